"""Tables of what a runtime computes otherwise than the simulation, measured op by op, and the rules that read them.

Every op was run between two Q/DQ pairs of one dtype, written as `export` writes them for that runtime, on codes that
reach the ends of the grid, with and without zero points; `tests/onnx_backend/runtimes/test_tables.py` derives the
tables again on the installed versions.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from onnx import ModelProto, NodeProto

from onnx_backend.proto.external_data import array
from onnx_backend.proto.inputs import open_inputs
from onnx_backend.proto.nodes import node_label
from onnx_backend.readers import Readers, grid, is_shifted, pair_before, quantizers, type_name, words
from onnx_backend.validation.scope import Finding, error, warning
from qsdk.core.graph.op_facts import MOVEMENTS, SHAPE_OPS
from qsdk.core.numerics.dtypes import DTYPES

#: the zero points that a fault needs: none, one of the input, of the output, of any of the two, or of both
Where = Literal["anywhere", "input", "output", "either", "both"]
REFUSED = math.inf
_MISREAD = 16  # a difference of this part of the grid is no rounding any more


@dataclass(frozen=True)
class Fault:
    """What is wrong with an op in a runtime.

    Attributes:
        steps: the largest difference from the simulation, in steps of the output; REFUSED where it does not run.
        where: the zero points without which it is right.
        between_grids: it is right where both pairs have one scale and one zero point.
        second_operand: it is right where the zero point of the second operand is the middle of its grid.
    """

    steps: float
    where: Where = "anywhere"
    between_grids: bool = False
    second_operand: bool = False

    def applies(self, *, input_shifted: bool, output_shifted: bool, same_grid: bool = False) -> bool:
        """Return True if an op between pairs with these zero points has the fault."""
        if same_grid and self.between_grids:
            return False
        return {
            "anywhere": True,
            "input": input_shifted,
            "output": output_shifted,
            "either": input_shifted or output_shifted,
            "both": input_shifted and output_shifted,
        }[self.where]


@dataclass(frozen=True)
class RuntimeTable:
    """What one runtime computes otherwise than the simulation.

    Attributes:
        title: the runtime, and the version that was measured.
        refused: dtype of an activation -> readers (as `Readers.label` names them) that do not run on it.
        off: dtype of an activation -> readers that are more than one step off.
        shifts: types of integers that it shifts wrong: `uint64` where 64 bits are computed in 32, `uint32` from 2**31
            on. The integer-only files of `to_integer` consist of such shifts, but for those of the portable target.
    """

    title: str
    refused: Mapping[str, frozenset[str]]
    off: Mapping[str, Mapping[str, Fault]]
    shifts: frozenset[str] = frozenset()

    def fault(self, dtype: str, label: str) -> Fault | None:
        """Return what is wrong with a reader of an activation of a probed dtype, or None."""
        if label in self.refused[dtype]:
            return Fault(REFUSED)
        return self.off[dtype].get(label)


def labels(ops: str, weights: str = "") -> frozenset[str]:
    """Return the labels of ops, or of layers with each of these weights (a comma separates them)."""
    if not weights:
        return words(ops)
    return frozenset(f"{op}/{weight.strip()}" for op in ops.split() for weight in weights.split(","))


def off(steps: float, where: Where, labels: frozenset[str], **conditions: bool) -> dict[str, Fault]:
    """Return one fault for all of these labels."""
    return {label: Fault(steps, where, **conditions) for label in labels}


LAYERS = "Conv ConvTranspose Gemm MatMul"
#: op types that the tables were measured on; of others nothing is known
PROBED = labels(
    f"{LAYERS} Abs Add AveragePool Cast Clip Concat DepthToSpace Div Elu Erf Exp Expand Flatten Gather Gelu "
    "GlobalAveragePool GlobalMaxPool GroupNormalization HardSigmoid HardSwish Identity InstanceNormalization "
    "LayerNormalization LeakyRelu LogSoftmax LpNormalization Max MaxPool Mean Min Mul Neg Pad Pow QuantizeLinear "
    "ReduceMax ReduceMean ReduceSum Relu Reshape Resize Sigmoid Slice Softmax Softplus Split Squeeze Sub Tanh Tile "
    "Transpose Unsqueeze Where"
)


def ranges_at_run_time(node: NodeProto) -> Iterator[Finding]:
    """Yield a warning for a node that finds ranges while the model runs."""
    if node.op_type == "DynamicQuantizeLinear":
        problem = "ranges that are found while the model runs were not tried on this runtime"
        yield warning(node_label(node), "dialect", problem, "calibrate in place of dynamic_activations=True")


def open_sizes(model: ModelProto) -> Iterator[Finding]:
    """Yield an error for a model with open axes."""
    if opened := open_inputs(model):
        problem = f"{', '.join(opened)} has open axes, and the runtime compiles for one size"
        yield error("", "sizes", problem, 'export with shapes={"name": sizes}')


def lacks_zero_point(node: NodeProto, problem: str, dialect: str) -> Iterator[Finding]:
    """Yield an error with this problem for a node of a pair that states its type by an attribute, or not at all."""
    if len(node.input) < 3 or not node.input[2]:
        yield error(
            node_label(node), "zero_point", f"it has no zero point, {problem}", f'export with dialect="{dialect}"'
        )


def wrong_shift(node: NodeProto, known: Readers, table: RuntimeTable) -> Iterator[Finding]:
    """Yield a shift of integers of 64 bits that are computed in 32, and one that is right below 2**31 alone."""
    dtype = known.integer_type(node) if node.op_type == "BitShift" else ""
    if dtype not in table.shifts:
        return
    remedy = 'write integer-only files with to_integer(target="portable")'
    if dtype == "uint64":
        problem = f"{table.title} computes integers of 64 bits in 32, and gives other codes without a word"
        yield error(node_label(node), "dialect", problem, remedy)
    else:
        problem = f"{table.title} computes integers of 32 bits without sign wrong from 2**31 on (measured)"
        yield warning(node_label(node), "dialect", problem, remedy)


def wrong_readers(dequantize: NodeProto, known: Readers, table: RuntimeTable) -> Iterator[Finding]:
    """Yield the readers of an activation that the table lists."""
    if dequantize.op_type != "DequantizeLinear":
        return
    quantize = known.makers.get(dequantize.input[0])
    if quantize is None or quantize.op_type != "QuantizeLinear":
        return
    dtype = known.dtype(quantize)
    if dtype not in table.refused:
        problem = f"activations of {dtype} are not computed as simulated on {table.title}"
        yield error(node_label(quantize), "dialect", problem, f"use one of {', '.join(table.refused)}")
        return
    for reader in known.readers.get(dequantize.output[0], []):
        label = known.label(reader, dequantize.output[0])
        if reader.op_type not in PROBED and reader.op_type not in SHAPE_OPS:
            problem = f"not probed on this runtime: {reader.op_type} behind {dtype}"
            yield warning(node_label(reader), "not_probed", problem, "compare it with check_parity(runtime=...)")
            continue
        fault = table.fault(dtype, label)
        if fault is None or not _applies(fault, dequantize, reader, known):
            continue
        what = f"{label.removesuffix('>').replace('/', ' with a weight of ')} behind {dtype}"
        if fault.steps == REFUSED:
            problem, remedy = f"{table.title} does not run {what}", _remedy(label, fault)
            yield error(node_label(reader), "dialect", problem, remedy)
        else:
            problem = f"{table.title} computes {what} up to {fault.steps:g} steps off the simulation (measured)"
            found = error if fault.steps >= 2 ** DTYPES[dtype].bits / _MISREAD else warning
            yield found(node_label(reader), "dialect", problem, _remedy(label, fault))


def _applies(fault: Fault, dequantize: NodeProto, reader: NodeProto, known: Readers) -> bool:
    """Return True if the pairs around a reader are those with which the table found its fault."""
    if fault.second_operand:
        second = known.makers.get(reader.input[1])
        if second is not None and second.op_type == "DequantizeLinear":
            return reader.input[1] == dequantize.output[0] and not _is_centred(dequantize, known)
        moved = None if second is None or second.op_type not in MOVEMENTS else pair_before(second, known)
        return moved is not None and not _is_centred(moved, known)
    behind = quantizers(reader, known)
    return fault.applies(
        input_shifted=is_shifted(dequantize, known),
        output_shifted=any(is_shifted(node, known) for node in behind),
        same_grid=bool(behind) and all(grid(node, known) == grid(dequantize, known) for node in behind),
    )


def _is_centred(dequantize: NodeProto, known: Readers) -> bool:
    """Return True if the zero point of a pair is the middle of its grid: 128 for unsigned 8 bits, 0 for signed ones."""
    zero_point = known.stored.get(dequantize.input[2]) if len(dequantize.input) > 2 else None
    if zero_point is None:
        return True
    dtype = DTYPES[type_name(zero_point.data_type)]
    return bool((array(zero_point) == (int(dtype.lo) + int(dtype.hi) + 1) // 2).all())


def _remedy(label: str, fault: Fault) -> str:
    if fault.second_operand:
        return "quantize with config.for_dialect(...), which puts the zero point of its second operand in the middle"
    if fault.between_grids:
        return "give both pairs one scale and zero point, as quantize does"
    change = "leave it float with .skip(...), or choose another dtype for it"
    return f"quantize with config.for_dialect(...), or {change}" if "/" in label else change
