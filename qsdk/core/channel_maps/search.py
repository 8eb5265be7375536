"""The search for factors and ranges, by what quantization costs the layers that read a group on a sample of inputs.

SmoothQuant (Xiao et al. 2023) and AWQ (Lin et al. 2024) choose factors, AWQ narrower ranges of weights too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from qsdk.core.channel_maps.flood import input_axis, is_linear, varies
from qsdk.core.channel_maps.scale_groups import End, ScaleGroup
from qsdk.core.channel_maps.scalings import Factors, FloatArray, Scalings, balance, center, widest
from qsdk.core.graph.graph import Graph
from qsdk.core.numerics import affine
from qsdk.core.numerics.bias import with_room_for
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.exact_sums import with_exact_sums
from qsdk.core.numerics.spec import OF_WHOLE, PerBlock, Spec
from qsdk.core.planning.operands import operands_of
from qsdk.core.planning.plan import WHOLE
from qsdk.core.ranges.ranges import Range, encoding_from_range, range_of
from qsdk.core.sims.state import SimState, owns_encoding

Array = npt.NDArray[np.floating]
_ROWS = 512  # of a layer's input that are kept
_STEPS, _LEAST = 20, 0.5  # shares of the range that are tried, and the smallest of them


# --- statistics of activations --------------------------------------------------------------------------------------


@dataclass
class ChannelObserver:
    """The statistics of the channels of one tensor in one float pass, and a sample of the rows that a layer multiplies.

    Attributes:
        axes: those that its channels lie along; statistics have one value for each index of them, flattened.
        row_axis: the axis that a layer multiplies, whose rows are sampled; None for no sample.
        rows: float32 [at most 512, size along the axis], evenly spaced.
        total: sums of the magnitudes, and of the squares, float64 [2, n].
        count: number of elements of each channel.
    """

    axes: tuple[int, ...]
    row_axis: int | None = None
    low: FloatArray = field(init=False)
    high: FloatArray = field(init=False)
    rows: FloatArray = field(init=False)
    total: npt.NDArray[np.float64] = field(init=False)
    count: float = field(init=False)

    def __post_init__(self) -> None:
        self.low, self.high = np.full(1, np.inf, np.float32), np.full(1, -np.inf, np.float32)
        self.rows = np.empty((0, 0), np.float32)
        self.total = np.zeros((2, 1))
        self.count = 0.0

    def add(self, x: FloatArray) -> None:
        """Add the values of one batch."""
        if x.size == 0:
            return
        kept = {axis % x.ndim for axis in self.axes}
        others = tuple(axis for axis in range(x.ndim) if axis not in kept)
        self.low = np.minimum(self.low, x.min(axis=others).reshape(-1))
        self.high = np.maximum(self.high, x.max(axis=others).reshape(-1))
        sums = (np.abs(x).sum(axis=others, dtype=np.float64), np.square(x).sum(axis=others, dtype=np.float64))
        self.total = self.total + np.stack([result.reshape(-1) for result in sums])
        self.count += x.size / self.low.size
        if self.row_axis is not None:
            rows = _thinned(np.moveaxis(x, self.row_axis, -1).reshape(-1, x.shape[self.row_axis]))
            self.rows = _thinned(np.concatenate([self.rows.reshape(-1, rows.shape[1]), rows]))

    @property
    def amax(self) -> FloatArray:
        """Return the largest magnitude of each channel."""
        return np.maximum(np.abs(self.low), np.abs(self.high))

    @property
    def means(self) -> npt.NDArray[np.float64]:
        """Return the mean magnitude of each channel, and its mean square, [2, n]."""
        return np.asarray(self.total / max(self.count, 1.0))


def _thinned(rows: FloatArray) -> FloatArray:
    """Return at most `_ROWS` rows, evenly spaced. An odd step visits every position of rows of text of even length."""
    step = -(-len(rows) // _ROWS)
    return np.ascontiguousarray(rows[:: step + (step > 1 and step % 2 == 0)], np.float32)


def observers_for(groups: Sequence[ScaleGroup], graph: Graph) -> dict[int, ChannelObserver]:
    """Return observers by tensor id, for the inputs of all layers and the other tensors at which a group ends."""
    result: dict[int, ChannelObserver] = {}
    for index, op in enumerate(graph.ops):
        tensor = op.inputs[0] if op.inputs else None
        if tensor is not None and is_linear(graph, index) and graph.tensors[tensor].site is not None:
            axis = input_axis(graph, index)
            result.setdefault(tensor, ChannelObserver((axis,), axis))
    for group in groups:
        if group.blocked:
            continue
        for tensor, place in group.members.items():
            ends = any(end.reads == tensor for end in group.consumers)
            if (ends or _in_product(graph, tensor, group)) and graph.tensors[tensor].site is not None:
                axes = tuple(axis for axis in range(place.ids.ndim) if varies(place.ids, axis))
                result.setdefault(tensor, ChannelObserver(axes))
    return result


def _in_product(graph: Graph, tensor: int, group: ScaleGroup) -> bool:
    """Return whether a MatMul multiplies a tensor by one that is scaled inversely."""
    power = group.members[tensor].power
    products = [graph.ops[op] for op in graph.consumers[tensor] if graph.ops[op].type == "MatMul"]
    return any(
        other in group.members and group.members[other].power != power
        for op in products
        for other in op.inputs
        if other is not None
    )


# --- the layers that read a group -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ObservedLayer:
    """A layer and its input.

    Attributes:
        op: its id.
        root: id of its weight.
        tensor: id of its input.
        channel_axis: output channels of the stored weight.
        input_axis: input channels of the stored weight.
        weight_spec: of its weight; None where it stays float.
        input_spec: of its input, likewise.
        input_block: channels of each scale with which its input is rounded to int8 while the model runs, or None.
        plain: whether it multiplies rows by one matrix (a convolution with a kernel or groups does not).
    """

    op: int
    root: int
    tensor: int
    channel_axis: int
    input_axis: int
    weight_spec: Spec | None
    input_spec: Spec | None
    plain: bool
    input_block: int | None


def observed_layer(
    graph: Graph, op_id: int, specs: Mapping[str, Spec], blocks: Mapping[str, int]
) -> ObservedLayer | None:
    """Return a linear op as a layer; None where its weight is no matrix or kernel of its own.

    `specs` are those of the quantized sites; `blocks` has the `input_block` by weight site, where it is not None.
    """
    op = graph.ops[op_id]
    tensor = op.inputs[0]
    operand = next((o for o in operands_of(graph, op_id) if o.role == "weight"), None)
    if operand is None or tensor is None or operand.channel_axis is None or operand.input_axis is None:
        return None
    shape = graph.tensors[operand.root].shape or ()
    kernel = len(shape) > 2 and any(size != 1 for size in shape[2:])
    plain = not kernel and op.attributes.get("group", 1) == 1 and (len(shape) == 2 or input_axis(graph, op_id) == 1)
    weight, fed = graph.tensors[operand.root].site or "", graph.tensors[tensor].site or ""
    axes, block = (operand.channel_axis, operand.input_axis), blocks.get(weight)
    given, block = (OF_WHOLE, None) if block == WHOLE else (specs.get(fed), block)
    return ObservedLayer(op_id, operand.root, tensor, *axes, specs.get(weight), given, plain, block)


def output_error(
    layer: ObservedLayer, weight: FloatArray, observer: ChannelObserver, rows_by: Array, weight_by: Array
) -> float:
    """Return the relative error of a layer's output, its input divided by factors and its weight multiplied.

    Both are quantized as in the sim, with their new ranges. For a layer with a kernel or with groups, products of
    different inputs are assumed to be independent. `rows_by` are the divisors along the input's channel axis, and
    `weight_by` the factors of the stored weight, which broadcast to its shape.
    """
    scaled = np.asarray(weight * weight_by, np.float32)
    quantized = scaled
    if layer.weight_spec is not None:
        quantized = _nearest(scaled, range_of(scaled, layer.weight_spec), layer.weight_spec)
    rows = np.asarray(observer.rows / rows_by, np.float32)
    fed = rows
    if layer.input_spec is not None and layer.input_spec.dtype.is_quantized:
        low, high = (np.asarray(end / rows_by, np.float32) for end in (observer.low, observer.high))
        fed = _nearest(rows, Range(low.min(keepdims=True), high.max(keepdims=True)), layer.input_spec)
    elif layer.input_block is not None:
        fed = _in_blocks(rows, layer.input_block)
    if layer.plain:
        exact, result = (_times(layer, x, w) for x, w in ((rows, scaled), (fed, quantized)))
        return float(np.square(result - exact).sum() / max(float(np.square(exact).sum()), 1e-30))
    return _independent(layer, scaled, quantized - scaled, rows, fed - rows)


def _independent(layer: ObservedLayer, weight: Array, weight_off: Array, rows: Array, rows_off: Array) -> float:
    """Return the same error from the squares of the operands alone."""
    power, noise = (np.square(x).mean(axis=0) for x in (rows, rows_off))
    axis, kernel = layer.input_axis, tuple(range(2, weight.ndim))
    if weight.shape[axis] != power.size:  # groups: axis 0 runs over them
        groups = power.size // weight.shape[axis]
        power, noise = (np.repeat(x.reshape(groups, -1), weight.shape[0] // groups, axis=0) for x in (power, noise))
    elif axis == 0:
        power, noise = power[:, None], noise[:, None]
    squares, off = (np.square(w).sum(axis=kernel) for w in (weight, weight_off))
    energy = float((squares * power).sum())
    return float((off * power + squares * noise).sum()) / max(energy, 1e-30)


def _times(layer: ObservedLayer, rows: Array, weight: Array) -> Array:
    """Return rows [n, in] times the weight as [in, out]."""
    matrix = np.moveaxis(weight, (layer.input_axis, layer.channel_axis), (0, 1)).reshape(rows.shape[1], -1)
    result: Array = rows @ matrix
    return result


def _in_blocks(rows: FloatArray, block: int) -> FloatArray:
    """Return rows as a layer multiplies them that rounds its input to int8."""
    whole = np.pad(rows, ((0, 0), (0, -rows.shape[1] % block)))
    blocks = whole.reshape(len(rows), -1, block)
    scale = affine.block_scale(np.abs(blocks).max(-1, keepdims=True))
    rounded: FloatArray = affine.fake_quantize(blocks, scale, np.float32(0), -128, 127)
    return rounded.reshape(whole.shape)[:, : rows.shape[1]]


def _nearest(x: FloatArray, observed: Range, spec: Spec) -> FloatArray:
    return encoding_from_range(observed, spec).fake_quantize(x)


# --- factors ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FactorChoice:
    """The factors found for a group, with the relative errors of its readers' outputs; no alpha where they are 1."""

    factors: Factors
    alpha: float | None
    error_before: float
    error_after: float


class ObservedGroups:
    """Groups and their factors so far, with the statistics of their tensors before any scaling, by tensor id.

    `specs` are those of the quantized sites, and `blocks` the channels of each scale with which the layers of a weight
    site round their input.
    """

    def __init__(
        self,
        scalings: Scalings,
        observers: Mapping[int, ChannelObserver],
        specs: Mapping[str, Spec],
        blocks: Mapping[str, int],
    ) -> None:
        self.scalings, self.observers, self.specs, self.blocks = scalings, observers, specs, blocks
        self.graph: Graph = scalings.graph

    def layers(self, group: ScaleGroup) -> list[tuple[End, ObservedLayer]]:
        """Return the layers that read a group's tensors and were observed."""
        known = (self.specs, self.blocks)
        result = ((end, observed_layer(self.graph, end.op, *known)) for end in group.consumers if end.linear)
        return [(end, layer) for end, layer in result if layer is not None and layer.tensor in self.observers]

    def shrinking(self, number: int, *, mean: bool = False) -> Factors:
        """Return the largest (or mean) magnitude per channel of what the factors divide."""
        group = self.scalings.groups[number]
        read = [end.reads for end in group.consumers if end.reads is not None]
        tensors = read or [t for t, place in group.members.items() if place.power == -1 and t in self.observers]
        return self._of_activations(number, tensors, mean=mean)

    def growing(self, number: int) -> Factors:
        """Return the largest magnitude per channel of what the factors multiply: weights, or the other operand."""
        group = self.scalings.groups[number]
        partners = [t for t, place in group.members.items() if place.power == 1 and t in self.observers]
        result = self._of_activations(number, partners)
        for end in group.consumers:
            for edit in end.edits:
                if edit.role == "weight":
                    weight = np.abs(self.scalings.value(edit.root))
                    result = np.maximum(result, widest(weight, edit.ids, group.channels))
        return result

    def _of_activations(self, number: int, tensors: Sequence[int], *, mean: bool = False) -> Factors:
        group, result = self.scalings.groups[number], np.zeros(self.scalings.groups[number].channels)
        for tensor in tensors:
            look, place = self.observers.get(tensor), group.members[tensor]
            if look is not None:
                flat = place.ids.reshape(-1)
                by = self.scalings.factors[number][flat] ** place.power
                np.maximum.at(result, flat, (look.means[0] if mean else look.amax) * by)
        return result

    def bounded(self, number: int, factors: Factors) -> Factors:
        """Return factors cut so that neither stored tensors nor the observed activations overflow their type."""
        members = self.scalings.groups[number].members
        known = {t: self._of_activations(number, [t]) for t in members if t in self.observers}
        return self.scalings.bounded(number, factors, known)

    def error(self, number: int, factors: Factors) -> float:
        """Return the mean relative error of the outputs of a group's readers, with these factors applied on top."""
        group = self.scalings.groups[number]
        whole = factors * self.scalings.factors[number]
        errors = []
        for end, layer in self.layers(group):
            edit = next(edit for edit in end.edits if edit.root == layer.root)
            place = group.members[layer.tensor]
            by = factors[edit.ids] ** edit.power
            rows_by = whole[place.ids.reshape(-1)] ** -place.power
            weight = self.scalings.value(layer.root)
            errors.append(output_error(layer, weight, self.observers[layer.tensor], rows_by, by))
        if not errors:
            errors.append(self._product_error(number, whole))
        return float(np.mean(errors))

    def _product_error(self, number: int, factors: Factors) -> float:
        """Return the error that quantizing both operands adds to a product of computed tensors, up to a constant."""
        group = self.scalings.groups[number]
        noise: dict[int, float] = {}
        power: dict[int, float] = {}
        for tensor, place in group.members.items():
            look = self.observers.get(tensor)
            spec = self.specs.get(self.graph.tensors[tensor].site or "")
            if look is None:
                continue
            by = factors[place.ids.reshape(-1)] ** place.power
            width = max(float((look.high * by).max()), 0.0) - min(float((look.low * by).min()), 0.0)
            steps = (spec.dtype.hi - spec.dtype.lo) if spec is not None and spec.dtype.is_quantized else np.inf
            noise[place.power] = noise.get(place.power, 0.0) + (width / steps) ** 2 / 12
            power[place.power] = float((look.means[1] * by**2).sum())
        if len(power) < 2 or 0.0 in power.values():
            return 0.0
        return float(noise[-1] / power[-1] + noise[1] / power[1])


def search_smooth_quant(seen: ObservedGroups, number: int, alphas: Sequence[float]) -> FactorChoice:
    """Return the factors `amax(X)^alpha / amax(W)^(1 - alpha)` of the alpha with the least error.

    A single alpha is used in any case; of several the best, or none if all are worse than no scaling.
    """
    shrinking, growing = seen.shrinking(number), seen.growing(number)
    factors = {alpha: balance(shrinking, growing, alpha) for alpha in alphas}
    return _best(seen, number, factors, forced=len(alphas) == 1)


def search_awq(seen: ObservedGroups, number: int, grid: int) -> FactorChoice:
    """Return the factors `mean(|X|)^alpha`, alpha from 0 to 1 in `grid` steps, with the least output error."""
    magnitude = seen.shrinking(number, mean=True)
    base = np.where(magnitude > 0, np.maximum(magnitude, 1e-4), 1.0)
    return _best(seen, number, {step / grid: base ** (step / grid) for step in range(1, grid + 1)}, forced=False)


def _best(seen: ObservedGroups, number: int, tried: Mapping[float, Factors], *, forced: bool) -> FactorChoice:
    """Return the factors with the least error, by the exponent that they come from; 1 where none is better."""
    none = np.ones(seen.scalings.groups[number].channels)
    before = seen.error(number, none)
    choices = []
    for alpha, raw in tried.items():
        factors = seen.bounded(number, center(raw))
        choices.append(FactorChoice(factors, alpha, before, seen.error(number, factors)))
    best = min(choices, key=lambda choice: choice.error_after)
    return best if forced or best.error_after < before else FactorChoice(none, None, before, before)


# --- narrower ranges of weights ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClippedWeight:
    """The encoding of a weight with narrower ranges, and the relative error of its layer's output before and after."""

    encoding: Encoding
    error_before: float
    error_after: float


def clip_all(seen: ObservedGroups, state: SimState, stored: Callable[[str], Array | None]) -> dict[str, ClippedWeight]:
    """Return a narrower encoding by site, for each weight of a layer that improves by it.

    The sim is calibrated with the factors, which the stored tensors contain by now. `stored` returns the values at the
    site of a weight or bias, None where the model stores nothing: a site may be part of a parameter (the queries' rows
    of a packed projection), which no name of the graph leads to.
    """
    graph, result = seen.graph, {}
    for index in range(len(graph.ops)):
        layer = observed_layer(graph, index, seen.specs, seen.blocks) if is_linear(graph, index) else None
        if layer is None or layer.tensor not in seen.observers:
            continue
        site = graph.tensors[layer.root].site or ""
        decision, now = state.plan.decisions.get(site), state.own.get(site)
        if decision is None or now is None or now.frozen or not owns_encoding(decision) or site in result:
            continue
        weight = stored(site)
        if weight is None:
            continue
        rows = seen.observers[layer.tensor].rows
        scaled = rows * seen.scalings.activation_factors(layer.tensor, input_axis(graph, index))
        better = clip(layer, np.asarray(weight, np.float32), np.asarray(scaled, np.float32))
        if better is not None and better.error_after < better.error_before:
            wide = with_exact_sums(better.encoding, weight)
            result[site] = replace(better, encoding=_with_room(site, wide, state, stored))
    return result


def _with_room(site: str, encoding: Encoding, state: SimState, stored: Callable[[str], Array | None]) -> Encoding:
    """Return the encoding, wide enough for the int32 biases that depend on it."""
    for bias, decision in state.plan.decisions.items():
        if decision.bias_of is not None and decision.bias_of[1] == site and decision.bias_of[0] in state.own:
            spec = state.plan.decisions[site].spec
            bits = None if spec is None else spec.scale_bits
            values = stored(bias)
            if values is not None:
                encoding = with_room_for(values, state.own[decision.bias_of[0]], encoding, bits)
    return encoding


def clip(layer: ObservedLayer, weight: FloatArray, rows: FloatArray) -> ClippedWeight | None:
    """Return the encoding whose ranges have the least error of each block's part of the output.

    Weight and rows, float32 [n, in], are scaled. None where a layer is not plain or its weight not quantized.
    """
    spec = layer.weight_spec
    if spec is None or not layer.plain or weight.ndim != 2:
        return None
    observed = range_of(weight, spec)
    second = rows.T.astype(np.float64) @ rows / max(len(rows), 1)
    best, least = np.ones(observed.low.shape, np.float32), None
    for step in range(_STEPS):
        share = np.float32(1 - (1 - _LEAST) * step / _STEPS)
        errors = _errors(layer, spec, weight, _encoding(observed, spec, np.full_like(best, share)), second)
        if least is None:
            least = errors
            continue
        best, least = np.where(errors < least, share, best), np.minimum(errors, least)
    energy = float(np.einsum("oi,ij,oj->", _matrix(layer, weight), second, _matrix(layer, weight), optimize=True))
    plain, chosen = (_encoding(observed, spec, share) for share in (np.ones_like(best), best))
    first, last = (_whole(layer, weight, encoding, second) / max(energy, 1e-30) for encoding in (plain, chosen))
    return ClippedWeight(chosen, first, last) if last < first else ClippedWeight(plain, first, first)


def _encoding(observed: Range, spec: Spec, share: FloatArray) -> Encoding:
    return encoding_from_range(Range(observed.low * share, observed.high * share), spec)


def _matrix(layer: ObservedLayer, weight: Array) -> Array:
    """Return the weight as [out, in]."""
    return weight if layer.channel_axis == 0 else weight.T


def _whole(layer: ObservedLayer, weight: FloatArray, encoding: Encoding, second: Array) -> float:
    off = _matrix(layer, encoding.fake_quantize(weight) - weight).astype(np.float64)
    return float(((off @ second) * off).sum())


def _errors(layer: ObservedLayer, spec: Spec, weight: FloatArray, encoding: Encoding, second: Array) -> Array:
    """Return the error of the outputs that each scale affects, of the scales' shape."""
    off = _matrix(layer, encoding.fake_quantize(weight) - weight).astype(np.float64)
    granularity = spec.granularity
    if isinstance(granularity, PerBlock) and granularity.axis % 2 == layer.input_axis:
        size = granularity.size
        blocks = range(0, off.shape[1], size)
        parts = [
            ((off[:, i : i + size] @ second[i : i + size, i : i + size]) * off[:, i : i + size]).sum(1) for i in blocks
        ]
        stacked = np.stack(parts, axis=1)
        return stacked if layer.channel_axis == 0 else stacked.T
    by_output: Array = ((off @ second) * off).sum(1)
    if encoding.scale.size == by_output.size:
        return by_output.reshape(encoding.scale.shape)
    return np.full(encoding.scale.shape, by_output.sum())
