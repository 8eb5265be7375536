"""Collect statistics of activations, reduced inside the graph batch by batch, so that no activation is kept."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from operator import length_hint
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from onnx_backend.proto.external_data import FLOATS, float_array
from onnx_backend.proto.graph_queries import GraphIndex
from onnx_backend.proto.inputs import tell_axes_apart
from onnx_backend.proto.nodes import MARK_DOMAIN, attributes, copied, is_mark, replace_nodes, retain
from onnx_backend.runtime.feeds import as_feeds, batches_of, run_session
from onnx_backend.runtime.providers import CPU_ONLY, Providers
from onnx_backend.runtime.session import RepeatedSession, is_small_convolutional
from qsdk.core.planning.plan import Decision, Turns
from qsdk.core.planning.turning import pair_places
from qsdk.core.ranges.estimators import Estimator
from qsdk.core.ranges.histogram import SAMPLES, STEPS
from qsdk.core.ranges.ranges import Range
from qsdk.core.ranges.statistics import Statistics, channel_axis, part_axes, require_finite
from qsdk.core.site import site_name

_AT_ONCE = 2  # batches
_Batch = tuple[int, dict[str, npt.NDArray[Any]]]  # number, and input name -> array
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

    With `sampled`, samples for histograms are among them. The model itself is not changed.
    """
    model = copied(marked)
    builder = _StatisticsGraphBuilder(model, sampled=sampled)
    for node in model.graph.node:
        builder.add(node, wanted)
    del model.graph.output[:]
    model.graph.output.extend(builder.results)
    replace_nodes(model.graph, builder.nodes)
    retain(model.opset_import, lambda entry: entry.domain != MARK_DOMAIN)
    return model, builder.watched


class _StatisticsGraphBuilder(GraphIndex):
    """A statistics graph under construction: its nodes and outputs, and which tensors are known to be finite."""

    def __init__(self, model: ModelProto, *, sampled: bool) -> None:
        super().__init__(model.graph)
        self.sampled = sampled
        self.nodes: list[NodeProto] = []
        self.results: list[ValueInfoProto] = []
        self.watched: list[SiteStatistics] = []
        self.seen: set[str] = set()
        # integers are finite, and so are tensors that were checked
        self.finite = {name for name, tensor in self.stored.items() if _is_finite(tensor)}
        self.finite |= {v.name for v in self.graph.input if v.type.tensor_type.elem_type not in FLOATS}
        self.constants: dict[str, str] = {}

    def add(self, node: NodeProto, wanted: Mapping[str, Decision]) -> None:
        """Add a node; behind a mark come the statistics of its site."""
        known = all(name in self.finite for name in node.input if name)
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
            sample, step = self._sample(site, tensor)
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

    def _sample(self, site: str, tensor: str) -> tuple[str, str]:
        """Return every n-th value of the flattened tensor; and n, see `sample_step`."""
        flat = self._node("Reshape", [tensor, self._constant("flat", np.array([-1], np.int64))], f"{site}/flat")
        step = self._output(self._step(site, flat), TensorProto.INT64)
        begin, end = (self._constant(name, np.array([n], np.int64)) for name, n in (("begin", 0), ("end", 2**62)))
        axis = self._constant("axis", np.array([0], np.int64))
        sample = self._node("Slice", [flat, begin, end, axis, step], f"{site}/sample")
        return self._output(sample), step

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
        name = self.fresh(output)
        self.nodes.append(helper.make_node(op, inputs, [name], name, **options))
        return name

    def _output(self, name: str, code: int = TensorProto.FLOAT) -> str:
        self.results.append(helper.make_tensor_value_info(name, code, None))
        return name

    def _constant(self, name: str, value: npt.NDArray[Any]) -> str:
        if name not in self.constants:
            self.constants[name] = self.fresh(f"observe/{name}")
            self.graph.initializer.append(numpy_helper.from_array(value, self.constants[name]))
        return self.constants[name]


def _is_finite(tensor: TensorProto) -> bool:
    values = float_array(tensor)
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())


class SessionCache:
    """The sessions that observe a sim, with samples and without, kept until the observed sites change.

    Those that run batches side by side have a thread less for every run beside the first: each run brings its own.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[bool, int], tuple[ModelProto, Any, RepeatedSession, Sequence[SiteStatistics]]] = {}

    def open(
        self, marked: ModelProto, wanted: Mapping[str, Decision], providers: Providers, *, sampled: bool, at_once: int
    ) -> tuple[RepeatedSession, Sequence[SiteStatistics]]:
        """Return the session over the float model whose outputs are the statistics of the wanted sites.

        `at_once` is the number of batches that are run at once.
        """
        kept = self._kept.get((sampled, at_once))
        if kept is not None and kept[0] is marked and kept[1] == (wanted, providers):
            return kept[2:]
        model, watched = statistics_graph(marked, wanted, sampled=sampled)
        session = RepeatedSession(model, providers, cores() + 1 - at_once if at_once > 1 else 0)
        self._kept[sampled, at_once] = marked, (dict(wanted), providers), session, watched
        return session, watched


def observe(
    marked: ModelProto,
    wanted: Mapping[str, Decision],
    batches: Iterable[Any],
    chosen: Estimator,
    *,
    progress: bool = True,
    sessions: SessionCache | None = None,
    providers: Providers = CPU_ONLY,
) -> Statistics:
    """Collect the statistics that an estimator needs, of the wanted sites of a marked float model, in one pass.

    `tell_axes_apart` may rename axes of the model's inputs; `sessions` keeps the session for the next call. Data that
    the model does not take, and NaN or inf in it, are refused by site and batch.
    """
    several = length_hint(batches, _AT_ONCE) > 1 and _gains_by_more_at_once(marked, providers)
    at_once = _AT_ONCE if several else 1
    session, watched = (sessions or SessionCache()).open(
        marked, wanted, providers, sampled=chosen.reads_histogram, at_once=at_once
    )
    inputs, names = session.get_inputs(), [output.name for output in session.get_outputs()]
    # an iterator may write a batch over the one before
    copied = at_once > 1 and not isinstance(batches, list | tuple)

    statistics = Statistics(chosen)
    edges = {site for site, decision in wanted.items() if decision.kind == "input"}

    def read() -> Iterator[_Batch]:
        """Yield the batches by their numbers, as the session takes them, and note the ranges of the inputs' parts."""
        for number, batch in batches_of(batches, "calibrate", progress, skip_empty=False):
            feeds = as_feeds(batch, inputs, f"batch {number}")
            tell_axes_apart(marked, feeds)
            for site, value in ((site_name(name, "input"), value) for name, value in feeds.items()):
                for axis in part_axes(value.shape) if site in edges and value.size else ():
                    others = tuple(i for i in range(value.ndim) if i != axis)
                    largest = np.maximum(value.max(axis=others), -value.min(axis=others))
                    statistics.add_parts(site, axis, largest.astype(np.float32))
            yield number, {name: value.copy() for name, value in feeds.items()} if copied else feeds

    def run(batch: _Batch) -> tuple[int, dict[str, npt.NDArray[Any]]]:
        number, feeds = batch
        return number, dict(zip(names, run_session(session, feeds, f"batch {number}"), strict=True))

    with closing(prefetch(run, read(), at_once)) as results:
        for number, values in results:
            _add_statistics(watched, values, number, statistics)
            for item in watched:
                if item.shape:
                    statistics.add_length(wanted[item.site], values[item.shape].tolist())
            statistics.end_batch()
    return statistics


def _gains_by_more_at_once(marked: ModelProto, providers: Providers) -> bool:
    """Return whether two runs side by side, which share the threads, take less time than one after the other.

    Small models do: the runtime splits a convolution over threads, but not what calibration adds, and the threads wait
    for each other at every node. Large models do not, and would hold the activations of two batches.
    """
    return providers == CPU_ONLY and cores() > 1 and is_small_convolutional(marked)


def _add_statistics(
    watched: Sequence[SiteStatistics], values: Mapping[str, Any], number: int, statistics: Statistics
) -> None:
    """Add what a session has found in a batch: numbers of all sites at once, since calls cost more than values here."""
    numbers = [item for item in watched if not values[item.high].ndim]
    channels = [item for item in watched if values[item.high].ndim and not _is_empty(item, values)]
    low, high, check = (
        _numbers([getattr(item, name) for item in numbers], values) for name in ("low", "high", "check")
    )
    full = (high != -np.inf) | (high >= low)  # no value leaves the extremes of an empty tensor
    if not np.isfinite([low[full], high[full], check[full]]).all() or channels:
        _require_finite([item for item in watched if not _is_empty(item, values)], values, number)
    for item in channels:
        statistics.add(item.site, values[item.low], values[item.high])
    kept = [item for item, some in zip(numbers, full.tolist(), strict=True) if some]
    samples = {item.site: (values[item.sample], int(values[item.step].item())) for item in kept if item.sample}
    if kept:
        statistics.add_tensors([item.site for item in kept], Range(low[full], high[full]), samples)


def _numbers(names: Sequence[str], values: Mapping[str, Any]) -> npt.NDArray[np.float32]:
    """Return the numbers of these names, [N]; 0 for no name."""
    return np.array([values[name].item() if name else 0.0 for name in names], np.float32)


def _is_empty(item: SiteStatistics, values: Mapping[str, Any]) -> bool:
    """Return whether a tensor has no values: its largest one is minus infinity then."""
    high = values[item.high]
    return bool(high.max(initial=-np.inf) == -np.inf and np.all(high < (values[item.low] if item.low else 0)))


def _require_finite(watched: Iterable[SiteStatistics], values: Mapping[str, Any], number: int) -> None:
    """Raise an error that names the first site whose values are not finite."""
    for item in watched:
        read = [values[name] for name in (item.low, item.high, item.check) if name]
        require_finite(item.site, number, *read)


# --- several items of a stream at once, with the results and the errors of a plain loop -------------------------------


Item = TypeVar("Item")
Result = TypeVar("Result")


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prefetch(work: Callable[[Item], Result], items: Iterable[Item], most: int) -> Generator[Result]:
    """Yield `work(item)` of each item, in their order, computed in threads of their own.

    Items are read in the caller's thread, as late as possible. What reading or working raises comes where a loop over
    the items would raise it. Close the iterator if you leave it early: that waits for what is under way.

    Args:
        work: is called for several items at once.
        items: to work on.
        most: items that are read and whose result is not yielded yet; 1 for a plain loop in the caller's thread.

    Example:
        >>> list(prefetch(abs, [-1, 2, -3], 2))
        [1, 2, 3]
    """
    if most == 1:
        yield from map(work, items)
        return
    source = iter(items)
    failure: Exception | None = None
    running: deque[Future[Result]] = deque()
    more = True
    with ThreadPoolExecutor(most) as pool:
        while more or running:
            while more and len(running) < most:
                try:
                    running.append(pool.submit(work, next(source)))
                except StopIteration:
                    more = False
                except Exception as error:  # raised once the results before it are out
                    more, failure = False, error
            if running:
                yield running.popleft().result()
    if failure is not None:
        raise failure
