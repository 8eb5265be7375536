"""Qualcomm's HTP by QNN: what it reads, misreads and refuses, and how it, or its emulation, is run (2.7, measured)."""

import platform
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto, NodeProto, TensorProto, helper

from onnx_backend.proto.external_data import array
from onnx_backend.proto.nodes import attributes, drop_unused_initializers, node_label, replace_nodes
from onnx_backend.proto.weightless import types_of
from onnx_backend.qdq.read import LITERAL_KEY
from onnx_backend.readers import Readers, grid, is_shifted, pair_before, quantizers
from onnx_backend.runtime.feeds import as_declared
from onnx_backend.runtimes.runner import SizedModel, installed_package
from onnx_backend.runtimes.runtime import Runtime
from onnx_backend.runtimes.tables import (
    LAYERS,
    RuntimeTable,
    labels,
    lacks_zero_point,
    off,
    open_sizes,
    ranges_at_run_time,
    wrong_readers,
    wrong_shift,
)
from onnx_backend.validation.scope import Finding, error, is_quantizer, warning
from qsdk.core.arrays import Array
from qsdk.core.config.target import load_target
from qsdk.core.errors import ModelError
from qsdk.core.graph.op_facts import BLOCK_MOVES

#: Elements of the longest row whose Softmax was measured within a step; one of 6,625 is two steps off.
_LONGEST_RIGHT = 3000
_PROVIDER = "QNNExecutionProvider"
#: The processor to emulate: Snapdragon X Elite, whose HTP is a v73. Where none is named, the emulation takes one
#: without float16 (v68), and does not compile floats in front of a layer: error 1002, MEM_ALLOC.
EMULATED = MappingProxyType({"soc_model": "60", "htp_arch": "73"})
_EMULATING = frozenset({"x86_64", "amd64"})
_BINARY = frozenset({"Add", "Sub", "Mul", "Div"})
_NOT_ON_HTP = labels(LAYERS, "float8e4m3fn, uint8, int8 blocks, uint8 blocks, int4 blocks") | labels("Erf")
_INT16_WEIGHTS = labels(LAYERS, "int16")
_FLOAT_WEIGHTS = "float16, float32"
TABLE = RuntimeTable(
    "QNN HTP 2.7 (v73, emulated)",
    {
        "uint8": _NOT_ON_HTP | _INT16_WEIGHTS,
        "int8": _NOT_ON_HTP | _INT16_WEIGHTS | labels(LAYERS, "int4") | labels("HardSigmoid LeakyRelu LogSoftmax Neg"),
        "uint16": _NOT_ON_HTP,
    },
    {
        "uint8": {
            # float weights between quantized activations are computed in float16
            **off(6, "anywhere", labels("Conv ConvTranspose", _FLOAT_WEIGHTS)),
            **off(2, "anywhere", labels("Gemm", _FLOAT_WEIGHTS)),
            # a second operand is rounded to a signed grid
            **off(6, "input", labels("MatMul"), second_operand=True),
            **off(118, "output", labels("Softmax")),  # it drops the zero point
        },
        "int8": {
            **off(4, "anywhere", labels("Conv ConvTranspose", _FLOAT_WEIGHTS)),
            **off(130, "input", labels("Pad")),  # it pads with the code 0
            **off(129, "anywhere", labels("Softmax")),
        },
        "uint16": {
            **off(1769, "anywhere", labels("Conv ConvTranspose", _FLOAT_WEIGHTS)),
            **off(468, "anywhere", labels("Gemm", _FLOAT_WEIGHTS)),
            **off(69, "anywhere", labels("MatMul", _FLOAT_WEIGHTS)),
            **off(98, "anywhere", labels(LAYERS, "int4")),
            **off(5, "anywhere", labels(LAYERS, "int8, int16")),
            **off(89, "anywhere", labels("Pow Softplus")),
            **off(16, "anywhere", labels("Gelu GroupNormalization InstanceNormalization")),
            **off(14, "anywhere", labels("Div")),
            **off(3, "anywhere", labels("AveragePool Elu Exp HardSwish LeakyRelu")),
            **off(133, "anywhere", labels("MatMul")),
            **off(1272, "input", labels("Tanh")),
            **off(1272, "input", labels("Transpose>"), between_grids=True),
            **off(12, "anywhere", labels("LayerNormalization")),
            **off(65535, "input", labels("LpNormalization")),
            # a pair right behind another goes through float16, and so do these
            **off(28, "anywhere", labels("Expand Flatten> Gather> Identity Mean QuantizeLinear Split")),
            **off(28, "output", labels("Pad>")),
            # and these, from one grid of 16 bits to another
            **off(28, "anywhere", labels("Flatten Gather MaxPool Reshape Squeeze Tile Unsqueeze"), between_grids=True),
            **off(116, "anywhere", frozenset({"Resize", "Resize linear"}), between_grids=True),
        },
    },
    shifts=frozenset({"uint32"}),
)


class QnnRunner:
    """A model on the HTP backend of QNN; on x86-64, its package holds an emulation of the processor.

    The processor computes for fixed sizes: the model is compiled for those that it is run on.
    """

    def __init__(
        self, model: ModelProto, *, cpu_fallback: bool = True, processor: Mapping[str, str] | None = None
    ) -> None:
        """Keep a model until its sizes are known.

        Args:
            model: it is not changed.
            cpu_fallback: let ONNX Runtime's CPU run what QNN does not take; else such a model is refused.
            processor: the plug-in's options that name one; None for `EMULATED`, and on a device for its own.
        """
        self.package = installed_package("onnxruntime_qnn", "qnn")
        self.title = f"QNN HTP by onnxruntime-qnn {self.package.__version__}"
        self.sized, self.cpu_fallback = SizedModel(model), cpu_fallback
        emulated = EMULATED if platform.machine().lower() in _EMULATING else {}
        self.processor = dict(emulated if processor is None else processor)
        self.session: ort.InferenceSession | None = None

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Run the model; see `Runner.run`."""
        given = self.sized.given(feeds)
        fixed = self.sized.for_sizes_of(given)
        if fixed is not None or self.session is None:
            self.session = self._session(fixed or self.sized.model)
        types = {value.name: value.type for value in self.session.get_inputs()}
        known = {name: as_declared(value, types[name]) for name, value in given.items() if name in types}
        try:
            return [np.asarray(value) for value in self.session.run(None, known)]
        except Exception as error:  # the runtime's own exception types are private
            raise ModelError(f"{self.title} cannot run the model: {error}") from error

    def fell_back(self) -> list[tuple[str, str]]:
        """Return name and op type of the nodes that run on ONNX Runtime's CPU."""
        parts = [] if self.session is None else self.session.get_provider_graph_assignment_info()
        return [(node.name, node.op_type) for part in parts if part.ep_name != _PROVIDER for node in part.get_nodes()]

    def _session(self, model: ModelProto) -> ort.InferenceSession:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        if not self.cpu_fallback:
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        backend = {"backend_path": self.package.get_qnn_htp_path(), **self.processor}
        try:
            options.add_provider_for_devices([_device(self.package)], backend)
            return ort.InferenceSession(model.SerializeToString(), options)
        except Exception as error:  # the runtime's exceptions have no common type
            raise ModelError(f"{self.title} cannot compile the model: {error}") from error


def _device(package: Any) -> Any:
    """Return the device of the plug-in, which is registered with ONNX Runtime once per process."""
    if not _devices():
        ort.register_execution_provider_library(_PROVIDER, package.get_library_path())
    return _devices()[0]


def _devices() -> list[Any]:
    return [device for device in ort.get_ep_devices() if device.ep_name == _PROVIDER]


def quantize_scalars(model: ModelProto) -> None:
    """Store each number beside a quantized activation as one code and a scale whose product it is, in place.

    The processor takes an op for a quantized one only if all of its operands have a pair; a Div by 2.0 in a network of
    pairs can keep it from being compiled (the decoding of boxes in YOLOv8: QNN_COMMON_ERROR_MEM_ALLOC, 1002).
    """
    known, nodes = Readers(model.graph), list[NodeProto]()
    for node in model.graph.node:
        at, readers = _scalar_operand(node, known), known.readers.get(node.output[0], [])
        if at is not None and all(reader.op_type == "QuantizeLinear" for reader in readers):
            nodes.append(_dequantized(known, known.stored[node.input[at]]))
            node.input[at] = nodes[-1].output[0]
        nodes.append(node)
    replace_nodes(model.graph, nodes)
    drop_unused_initializers(model.graph)


def _scalar_operand(node: NodeProto, known: Readers) -> int | None:
    """Return which operand of an op is one stored float32 number beside a quantized activation."""
    if node.op_type not in _BINARY or node.domain not in ("", "ai.onnx"):
        return None
    for at, other in ((0, 1), (1, 0)):
        tensor, maker = known.stored.get(node.input[at]), known.makers.get(node.input[other])
        if tensor is None or tensor.data_type != TensorProto.FLOAT or int(np.prod(tensor.dims)) != 1:
            continue
        if maker is not None and maker.op_type == "DequantizeLinear" and np.isfinite(array(tensor)).all():
            return at
    return None


def _dequantized(known: Readers, tensor: TensorProto) -> NodeProto:
    """Return a DequantizeLinear of one code that gives a stored number; store its operands."""
    value = array(tensor)
    zero_point = np.uint8(1 if value.item() < 0 else 0)
    code = np.full(value.shape, 0 if value.item() <= 0 else 1, np.uint8)
    scale = np.float32(abs(value.item()) or 1)  # 1 * scale, or (0 - 1) * scale: no rounding
    parts = {"code": code, "scale": scale, "zero_point": zero_point}
    names = [known.store(f"{tensor.name}/{name}", np.asarray(part)) for name, part in parts.items()]
    result = known.fresh(f"{tensor.name}/number")
    node = helper.make_node("DequantizeLinear", names, [result], result)
    node.metadata_props.add(key=LITERAL_KEY, value="number")
    return node


def _findings(model: ModelProto) -> Iterator[Finding]:
    yield from open_sizes(model)
    known, beyond, long_rows = Readers(model.graph), _pools_beyond_the_edge(model), _softmax_of_long_rows(model)
    without = (
        "without which this runtime computes in floats; where the processor has no float16, it takes the codes for "
        "another type, without a word"
    )
    for node in model.graph.node:
        yield from ranges_at_run_time(node)
        yield from _of_node(node, known, beyond, long_rows)
        yield from wrong_shift(node, known, TABLE)
        if is_quantizer(node):
            yield from lacks_zero_point(node, without, "qnn")
        yield from wrong_readers(node, known, TABLE)


def _of_node(node: NodeProto, known: Readers, beyond: frozenset[str], long_rows: frozenset[str]) -> Iterator[Finding]:
    """Yield what the HTP computes wrong: it sums zero points, moves codes between grids, averages what is no pixel."""
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


def _softmax_of_long_rows(model: ModelProto) -> frozenset[str]:
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


def _pools_beyond_the_edge(model: ModelProto) -> frozenset[str]:
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


QNN = Runtime(
    load_target("qnn"),
    "2.7",
    finish=quantize_scalars,
    findings=_findings,
    table=TABLE,
    open=QnnRunner,
)
