"""The float model whose outputs are statistics of its sites: minimum, maximum, a sample."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from onnx_backend.calibration.same_size import SameSize
from onnx_backend.proto.external_data import FLOATS, float_array
from onnx_backend.proto.graph_queries import initializers, names_in, producers, unique
from onnx_backend.proto.model_io import load
from onnx_backend.proto.nodes import MARK_DOMAIN, attributes, is_mark, replace_nodes
from qsdk.core.planning.plan import Decision, Turns
from qsdk.core.planning.turning import pair_places
from qsdk.core.ranges.histogram import SAMPLES, STEPS
from qsdk.core.ranges.statistics import channel_axis

#: Ops that turn finite values into finite values, unless they overflow (which shows in an extreme).
_KEEP_FINITE = frozenset(
    {"Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "Sub", "Mul", "Sum", "Mean", "Neg", "Abs", "Max", "Min", "Where"}
    | {"Relu", "LeakyRelu", "PRelu", "Clip", "Sigmoid", "Tanh", "HardSigmoid", "HardSwish", "Gelu", "Erf", "Softmax"}
    | {"AveragePool", "GlobalAveragePool", "MaxPool", "GlobalMaxPool", "ReduceMean", "ReduceMax", "ReduceMin"}
    | {"ReduceSum", "Concat", "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Slice", "Split"}
    | {"Gather", "GatherElements", "GatherND", "Expand", "Tile", "Pad", "Resize", "DepthToSpace", "SpaceToDepth"}
    | {"Dropout", "LSTM", "GRU", "RNN", "Elu", "Softplus", "Softsign", "Sin", "Cos", "Shape", "Size", "Equal", "Less"}
)
#: Ops whose values are not below 0; a range contains 0, so only its upper end is needed.
_NOT_NEGATIVE = frozenset({"Relu", "Sigmoid", "HardSigmoid", "Softmax", "Abs"})


@dataclass(frozen=True)
class SiteStatistics:
    """The outputs that hold the statistics of one site; "" where there is none.

    Attributes:
        site: its name.
        high: the largest value, or that of each channel.
        low: the smallest one, or that of each channel.
        check: 0, unless there is NaN or an infinity.
        sample: some of the values, flattened.
        step: n where the sample holds every n-th value, int64 [1].
        shape: of a tensor that turns with the positions of tokens, int64 [rank].
    """

    site: str
    high: str
    low: str = ""
    check: str = ""
    sample: str = ""
    step: str = ""
    shape: str = ""


def statistics_graph(
    marked: ModelProto, wanted: Mapping[str, Decision], *, sampled: bool
) -> tuple[ModelProto, list[SiteStatistics]]:
    """Return the float model with the statistics of the wanted sites as its only outputs.

    Args:
        marked: the float model with marks; it is not changed.
        wanted: by site.
        sampled: True to add samples for histograms.
    """
    model = load(marked)
    builder = _StatisticsGraphBuilder(model, sampled=sampled)
    for node in model.graph.node:
        builder.add(node, wanted)
    del model.graph.output[:]
    model.graph.output.extend(builder.outputs)
    replace_nodes(model.graph, builder.nodes)
    kept = [entry for entry in model.opset_import if entry.domain != MARK_DOMAIN]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    return model, builder.watched


class _StatisticsGraphBuilder:
    """A statistics graph under construction: its nodes and outputs, and which tensors are known to be finite."""

    def __init__(self, model: ModelProto, *, sampled: bool) -> None:
        self.graph, self.sampled = model.graph, sampled
        self.stored = initializers(model.graph)
        self.makers = producers(model.graph.node)
        self.taken = names_in(model.graph)
        self.nodes: list[NodeProto] = []
        self.outputs: list[ValueInfoProto] = []
        self.watched: list[SiteStatistics] = []
        self.seen: set[str] = set()
        # integers are finite, and so are tensors that were checked
        self.finite = {name for name, tensor in self.stored.items() if _is_finite(tensor)}
        self.finite |= {v.name for v in self.graph.input if v.type.tensor_type.elem_type not in FLOATS}
        self.constants: dict[str, str] = {}
        self.same_size = SameSize({name for name, tensor in self.stored.items() if not tensor.dims})
        self.steps: dict[str, str] = {}  # tensor -> step of its sample, see `SameSize.of`

    def add(self, node: NodeProto, wanted: Mapping[str, Decision]) -> None:
        """Add a node; behind a mark come the statistics of its site."""
        known = all(name in self.finite for name in node.input if name)
        self.same_size.add(node)
        if not is_mark(node):
            self.nodes.append(node)
            if known and node.op_type in _KEEP_FINITE:
                self.finite.update(node.output)
            return
        site, tensor = str(attributes(node)["key"]), node.output[0]
        self.nodes.append(helper.make_node("Identity", node.input, node.output))
        if site in wanted and site not in self.seen:
            self.seen.add(site)
            self._watch(node, wanted[site], known)
            known = True
        if known:
            self.finite.add(tensor)

    def _watch(self, mark: NodeProto, decision: Decision, known: bool) -> None:
        site, tensor = decision.site, self._in_float32(mark)
        shape = ""
        if decision.turns is not None:
            shape = self._output(self._node("Shape", [tensor], f"{site}/shape"), TensorProto.INT64)
            tensor = self._at_any_position(tensor, decision.turns, site)
        channels = channel_axis(decision)
        if channels is not None:
            self._watch_channels(site, tensor, channels, decision, known, shape)
            return
        sampled = self.sampled and decision.spec is not None and decision.spec.fixed_range is None
        maker = self.makers.get(mark.input[0])
        positive = maker is not None and self._not_negative(maker)
        high = self._output(self._node("ReduceMax", [tensor], f"{site}/high", keepdims=0))
        low = "" if positive else self._output(self._node("ReduceMin", [tensor], f"{site}/low", keepdims=0))
        check = "" if known else self._check(site, tensor)
        sample = step = ""
        if sampled:
            sample, step = self._sample(site, mark if decision.turns is None else None, tensor)
        self.watched.append(SiteStatistics(site, high, low, check, sample, step, shape))

    def _in_float32(self, mark: NodeProto) -> str:
        """Return the values of a marked tensor in float32, in which statistics are computed."""
        if "dtype" not in attributes(mark):
            return str(mark.output[0])
        return self._node("Cast", [mark.output[0]], f"{mark.output[0]}/in_float32", to=TensorProto.FLOAT)

    def _watch_channels(self, site: str, tensor: str, axis: int, decision: Decision, known: bool, shape: str) -> None:
        others = np.array([other for other in range(len(decision.shape or ())) if other != axis], np.int64)
        ends = [
            self._node(op, [tensor, self._constant(f"beside {axis} of {len(others)}", others)], name, keepdims=0)
            for op, name in (("ReduceMax", f"{site}/high"), ("ReduceMin", f"{site}/low"))
        ]
        check = "" if known else self._check(site, tensor)
        self.watched.append(SiteStatistics(site, self._output(ends[0]), self._output(ends[1]), check, shape=shape))

    def _not_negative(self, maker: NodeProto) -> bool:
        if maker.op_type == "Clip" and len(maker.input) > 1 and maker.input[1] in self.stored:
            return bool(float_array(self.stored[maker.input[1]]).min(initial=np.inf) >= 0)
        return maker.op_type in _NOT_NEGATIVE

    def _check(self, site: str, tensor: str) -> str:
        """Return a sum of 0 * x: it is 0 unless x holds NaN or an infinity, which minimum and maximum may hide."""
        zeros = self._node("Mul", [tensor, self._constant("zero", np.zeros((), np.float32))], f"{site}/zeros")
        return self._output(self._node("ReduceSum", [zeros], f"{site}/check", keepdims=0))

    def _at_any_position(self, tensor: str, turns: Turns, site: str) -> str:
        """Return the ends that values come to which turn with the position, and all others as they are; all twice."""
        at = [self._constant(f"{n} of {turns}", place) for n, place in enumerate(pair_places(turns))]
        squares = []
        for place in at[:2]:
            part = self._node("Gather", [tensor, place], f"{site}/part", axis=turns.axis)
            squares.append(self._node("Mul", [part, part], f"{site}/square"))
        radius = self._node("Sqrt", [self._node("Add", squares, f"{site}/squares")], f"{site}/radius")
        ends = self._node("Gather", [radius, at[2]], f"{site}/ends", axis=turns.axis)
        limits = [
            self._constant(name, np.array([n], np.int64))
            for name, n in (("end", 2**62), (f"axis {turns.axis}", turns.axis))
        ]
        begin = self._constant(f"behind {turns.size}", np.array([turns.size], np.int64))
        rest = self._node("Slice", [tensor, begin, *limits], f"{site}/rest")
        both = [
            self._node("Concat", [end, rest], f"{site}/any_position", axis=turns.axis)
            for end in (ends, self._node("Neg", [ends], f"{site}/low_ends"))
        ]
        return self._node("Concat", both, f"{site}/any_position", axis=0)

    def _sample(self, site: str, mark: NodeProto | None, tensor: str) -> tuple[str, str]:
        """Return every n-th value of the flattened tensor; and n, see `sample_step`, one for tensors of one size."""
        flat = self._node("Reshape", [tensor, self._constant("flat", np.array([-1], np.int64))], f"{site}/flat")
        size = tensor if mark is None else self.same_size.of(mark.output[0])
        if size not in self.steps:
            self.steps[size] = self._output(self._step(site, flat), TensorProto.INT64)
        begin, end = (self._constant(name, np.array([n], np.int64)) for name, n in (("begin", 0), ("end", 2**62)))
        axis = self._constant("axis", np.array([0], np.int64))
        sample = self._node("Slice", [flat, begin, end, axis, self.steps[size]], f"{site}/sample")
        return self._output(sample), self.steps[size]

    def _step(self, site: str, flat: str) -> str:
        """Return `sample_step` of the size of a flattened tensor, int64 [1]."""
        size = self._node("Shape", [flat], f"{site}/size")
        steps = np.array(STEPS, np.int64)
        # step i serves tensors of up to SAMPLES * STEPS[i] elements, and the last one all that are larger, too
        larger = self._node("Less", [self._constant("served", steps[:-1] * SAMPLES), size], f"{site}/larger")
        counted = self._node("Cast", [larger], f"{site}/counted", to=TensorProto.INT64)
        place = self._node("ReduceSum", [counted], f"{site}/place", keepdims=1)
        return self._node("Gather", [self._constant("steps", steps), place], f"{site}/step")

    def _node(self, op: str, inputs: list[str], output: str, **options: Any) -> str:
        name = unique(output, self.taken)
        self.nodes.append(helper.make_node(op, inputs, [name], name, **options))
        return name

    def _output(self, name: str, code: int = TensorProto.FLOAT) -> str:
        self.outputs.append(helper.make_tensor_value_info(name, code, None))
        return name

    def _constant(self, name: str, value: npt.NDArray[Any]) -> str:
        if name not in self.constants:
            self.constants[name] = unique(f"observe/{name}", self.taken)
            self.graph.initializer.append(numpy_helper.from_array(value, self.constants[name]))
        return self.constants[name]


def _is_finite(tensor: TensorProto) -> bool:
    values = float_array(tensor)
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())
