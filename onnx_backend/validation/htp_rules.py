"""Rules on files for Qualcomm's HTP (2.7, measured): what it computes wrong for some operands, without a word."""

from collections.abc import Iterator, Sequence

from onnx import ModelProto, NodeProto

from onnx_backend.dialects.on_codes import pair_before
from onnx_backend.dialects.readers import Readers, grid, is_shifted, quantizers
from onnx_backend.proto.external_data import array
from onnx_backend.proto.nodes import attributes, node_label
from onnx_backend.proto.weightless import types_of
from onnx_backend.validation.finding import Finding, error, warning
from qsdk.core.graph.op_facts import BLOCK_MOVES

#: Elements of the longest row whose Softmax was measured within a step; one of 6,625 is two steps off.
_LONGEST_RIGHT = 3000


def findings(node: NodeProto, known: Readers, beyond: frozenset[str], long_rows: frozenset[str]) -> Iterator[Finding]:
    """Yield what the HTP computes wrong: it sums zero points, moves codes between grids, and averages what is no pixel.

    Args:
        node: any.
        known: of the graph.
        beyond: see `pools_beyond_the_edge`.
        long_rows: see `softmax_of_long_rows`.
    """
    if node.op_type in ("LSTM", "GRU") and pair_before(node, known) is not None:
        problem = "the runtime computes it up to 3 steps of 8 bits off, or 746 of 16 (measured on a voice detector)"
        yield warning(node_label(node), "dialect", problem, "check it with check_parity(runtime='qnn')")
    if node.output[0] in long_rows:
        problem = "the runtime may be 2 steps off along so many elements, as along 6,625, not 3,000 (measured)"
        yield warning(node_label(node), "dialect", problem, "check it with check_parity(runtime='qnn')")
    if node.op_type == "CumSum":
        pair, axis = pair_before(node, known), known.stored.get(node.input[1])
        is_last = axis is not None and int(array(axis).reshape(())) == -1
        remedy = 'give what it reads 16 bits, .override("its name", activation="uint16")'
        if pair is not None and is_shifted(pair, known) and not is_last:
            problem = "the runtime adds up zero points too, but for the last axis: a quarter of the grid off or more"
            yield error(node_label(node), "dialect", f"{problem} (measured)", f"sum along axis=-1, or {remedy}")
        elif pair is not None:
            problem = "the runtime rounds every sum, and stops at the ends of the grid: 2 steps off for 8 elements"
            yield warning(node_label(node), "dialect", f"{problem}, 34 for 1,024 (measured)", remedy)
    if node.op_type in BLOCK_MOVES or (
        node.op_type == "Pad" and attributes(node).get("mode", "constant") != "constant"
    ):
        before = known.makers.get(node.input[0])
        if before is None or before.op_type != "DequantizeLinear":
            return
        alike = [after for after in quantizers(node, known) if known.dtype(after) == known.dtype(before)]
        if any(grid(after, known) != grid(before, known) for after in alike):
            problem = "the runtime moves codes, from one grid to another here: a third of the grid off (measured)"
            remedy = "give both pairs one scale and zero point, as quantize does"
            yield error(node_label(node), "dialect", problem, remedy)
    if node.output[0] in beyond:
        problem = "the runtime averages more than the input where a window of ceil_mode goes beyond it: any code"
        remedy = "give the pool the padding in which its windows fit, with count_include_pad=0, and no ceil_mode"
        yield error(node_label(node), "dialect", f"{problem} (measured)", remedy)


def softmax_of_long_rows(model: ModelProto) -> frozenset[str]:
    """Return the results of the Softmax nodes along an axis of many elements."""
    nodes = [node for node in model.graph.node if node.op_type == "Softmax"]
    types = types_of(model) if nodes else {}
    found = set()
    for node in nodes:
        shape = types.get(node.input[0], ("", None))[1]
        size = shape[attributes(node).get("axis", -1)] if shape else None
        if isinstance(size, int) and size > _LONGEST_RIGHT:
            found.add(node.output[0])
    return frozenset(found)


def pools_beyond_the_edge(model: ModelProto) -> frozenset[str]:
    """Return the results of the AveragePool nodes with ceil_mode whose windows do not fit into their padded input.

    Those of an input without known sizes are among them.
    """
    pools = [n for n in model.graph.node if n.op_type == "AveragePool" and attributes(n).get("ceil_mode")]
    types = types_of(model) if pools else {}
    shapes = {node.output[0]: types.get(node.input[0], ("", None))[1] for node in pools}
    return frozenset(node.output[0] for node in pools if not _fits(node, shapes[node.output[0]]))


def _fits(pool: NodeProto, shape: Sequence[int | str | None] | None) -> bool:
    attrs = attributes(pool)
    if shape is None or "kernel_shape" not in attrs or attrs.get("auto_pad", "NOTSET") != "NOTSET":
        return False
    kernel = attrs["kernel_shape"]
    count = len(kernel)
    strides, dilations = (attrs.get(name) or [1] * count for name in ("strides", "dilations"))
    pads = attrs.get("pads") or [0] * (2 * count)
    for at, size in enumerate(shape[2:]):
        if not isinstance(size, int):
            return False
        room = size + pads[at] + pads[at + count] - (kernel[at] - 1) * dilations[at] - 1
        if room % strides[at]:
            return False
    return True
