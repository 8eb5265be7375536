"""One op between two Q/DQ pairs as `export` writes them for another runtime, on codes that reach the grid's ends."""

from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from runtime_probes import FLOATS, IMAGE, INTS, LABELS, ZERO_POINTS, Probe

from onnx_backend.parity.teacher import RunOn
from onnx_backend.runtimes.qnn import QnnRunner
from onnx_backend.runtimes.registry import open_in, runtime_named
from onnx_backend.runtimes.runner import Runner
from onnx_backend.runtimes.tables import REFUSED, Fault, Where
from qsdk import ModelError, QsdkError
from qsdk.core.numerics.dtypes import dtype_named
from qsdk.core.numerics.encoding import storage_type

#: which of the two pairs has a zero point, and whether both have one scale
SHIFTS = (
    ((False, False), True),
    ((False, False), False),
    ((True, True), True),
    ((True, True), False),
    ((True, False), False),
    ((False, True), False),
)
#: ops with a gain of int8 and a float bias, which are written so in every dialect -> size of both, and attributes
NORMS = {
    "LayerNormalization": (6, {"axis": -1}),
    "InstanceNormalization": (4, {}),
    "GroupNormalization": (4, {"num_groups": 2}),
}
#: ops that ONNX Runtime's table does not list -> a second operand, if there is one
MORE = {"LogSoftmax": [], "LpNormalization": [], "Pow": ["six"], "Div": ["six"]}
ALL_LABELS = (*LABELS, *NORMS, *MORE)


def normed(op: str) -> tuple[list[NodeProto], list[TensorProto]]:
    """A norm from "d" to "t", and its stored tensors."""
    size, attributes = NORMS[op]
    rng = np.random.default_rng(1)
    stored = [numpy_helper.from_array(rng.integers(60, 128, size).astype(np.int8), "gain_q")]
    stored.append(numpy_helper.from_array(np.float32(0.012), "gain_scale"))
    stored.append(numpy_helper.from_array(rng.normal(0, 0.2, size).astype(np.float32), "bias"))
    gain = helper.make_node("DequantizeLinear", ["gain_q", "gain_scale"], ["gain"])
    return [gain, helper.make_node(op, ["d", "gain", "bias"], ["t"], **attributes)], stored


@dataclass(frozen=True)
class Written:
    """A reader of an activation of one dtype, written for a runtime."""

    label: str
    dtype: str
    runtime: str
    shifted: tuple[bool, bool]  # which pair has a zero point that is not 0
    same: bool  # the two pairs have the same scale

    @property
    def probe(self) -> Probe:
        return Probe(self.label, self.dtype, "both", self.same)

    def zero_point(self, last: bool) -> int:
        return ZERO_POINTS.get(self.dtype, 0) if self.shifted[last] else 0

    def model(self) -> ModelProto:
        nodes, shape, stored = self._inside()
        stored = [*stored, *(numpy_helper.from_array(np.float32(value), name) for name, value in FLOATS.items())]
        stored += [numpy_helper.from_array(np.int64(value), name) for name, value in INTS.items()]
        if runtime_named(self.runtime).explicit:
            _add_zero_points(nodes, stored)
        nodes = [*self._pair("x", "d", False, stored), *nodes]
        source = "t" if len(nodes) > 2 else "d"
        if self.dtype in runtime_named(self.runtime).clipped:
            nodes.append(self._clip(source, stored))
            source = "clipped"
        nodes += self._pair(source, "y", True, stored)
        read = {name for node in nodes for name in node.input}
        values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", shape), ("y", None))]
        kept = [tensor for tensor in stored if tensor.name in read]
        graph = helper.make_graph(nodes, "probe", values[:1], values[1:], kept)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)

    def _inside(self) -> tuple[list[NodeProto], tuple[int, ...], list[TensorProto]]:
        if self.label in MORE:
            return [helper.make_node(self.label, ["d", *MORE[self.label]], ["t"])], IMAGE, []
        if self.label in NORMS:
            nodes, stored = normed(self.label)
            return nodes, IMAGE, stored
        return self.probe._inside()

    def values(self, model: ModelProto) -> np.ndarray:
        """Values in the grid, its ends among them."""
        shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
        dtype, rng = dtype_named(self.dtype), np.random.default_rng(0)
        codes = rng.integers(int(dtype.lo), int(dtype.hi) + 1, shape)
        codes.flat[0], codes.flat[-1] = dtype.lo, dtype.hi
        return ((codes - self.zero_point(False)).astype(np.float32) * np.float32(self.probe.scale)).astype(np.float32)

    def _pair(self, source: str, result: str, last: bool, stored: list[TensorProto]):
        code = int(helper.np_dtype_to_tensor_dtype(storage_type(dtype_named(self.dtype))))
        scale, zero = f"{result}_scale", f"{result}_zero"
        stored.append(numpy_helper.from_array(np.float32(self._scale(last)), scale))
        stored.append(helper.make_tensor(zero, code, [], [self.zero_point(last)]))
        explicit = runtime_named(self.runtime).explicit
        inputs = [scale, zero] if explicit or self.shifted[last] else [scale]
        options = {} if explicit else {"output_dtype": code}
        return [
            helper.make_node("QuantizeLinear", [source, *inputs], [f"{result}_q"], **options),
            helper.make_node("DequantizeLinear", [f"{result}_q", *inputs], [result]),
        ]

    def _scale(self, last: bool) -> float:
        """The scale of a pair; a product of 16 bits needs a larger one, to stay within its grid."""
        wide = 100 if self.label == "MatMul" and self.dtype.endswith("16") else 1
        return self.probe.last_scale * wide if last else self.probe.scale

    def _clip(self, source: str, stored: list[TensorProto]):
        dtype, scale = dtype_named(self.dtype), np.float32(self._scale(True))
        for name, end in (("low_end", dtype.lo), ("high_end", dtype.hi)):
            stored.append(numpy_helper.from_array(np.float32((int(end) - self.zero_point(True)) * scale), name))
        return helper.make_node("Clip", [source, "low_end", "high_end"], ["clipped"])

    def off(self) -> float:
        """How many steps the runtime's codes are off those of the simulation; REFUSED if it does not run it.

        Raises:
            QsdkError: ONNX Runtime has no such op for this type, so that there is nothing to compare with.
        """
        model = self.model()
        feeds = {"x": self.values(model)}
        (wanted,) = RunOn().open(model).run(feeds)
        try:
            (got,) = _opened(self.runtime, model).run(feeds)
        except ModelError:
            return REFUSED
        return float(np.round(np.abs(np.asarray(got, np.float64) - wanted).max() / self._scale(True)))


def measured(runtime: str, dtype: str, labels=ALL_LABELS) -> dict[str, Fault]:
    """Label -> what is wrong with it, for those that are refused or more than a step off."""
    found = {}
    for label in labels:
        try:
            steps = {(shifted, same): Written(label, dtype, runtime, shifted, same).off() for shifted, same in SHIFTS}
        except QsdkError:
            continue
        wrong = {shifted for (shifted, _), off in steps.items() if off > 1}
        if wrong:
            is_between = not any(off > 1 for (_, same), off in steps.items() if same)
            found[label] = Fault(max(steps.values()), _where(wrong), between_grids=is_between)
    return found


def _where(wrong: set[tuple[bool, bool]]) -> Where:
    """Which zero points the fault needs."""
    if (False, False) in wrong:
        return "anywhere"
    if (True, False) in wrong:
        return "either" if (False, True) in wrong else "input"
    return "output" if (False, True) in wrong else "both"


def _opened(runtime: str, model: ModelProto) -> Runner:
    """Open a probe; on QNN without the CPU's help, so that what the processor does not take is refused."""
    return QnnRunner(model, cpu_fallback=False) if runtime == "qnn" else open_in(runtime, model)


def _add_zero_points(nodes, stored: list[TensorProto]) -> None:
    known = {tensor.name: tensor for tensor in stored}
    for node in nodes:
        if node.op_type == "DequantizeLinear" and len(node.input) == 2:
            codes, scale = known[node.input[0]], numpy_helper.to_array(known[node.input[1]])
            name = f"{node.output[0]}_zero"
            stored.append(helper.make_tensor(name, codes.data_type, scale.shape, [0] * scale.size))
            node.input.append(name)
