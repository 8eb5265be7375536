"""Range estimators: from the statistics of a tensor to the range of its encoding.

`min_max` covers all values, `moving_average` averages the extremes of batches, `percentile` cuts both tails, `mse` and
`tf_enhanced` search the range with the smallest quantization error, `entropy` the one that changes the distribution
least, `four_over_six` chooses between two scales of float4. All work on groups (a tensor, its channels, its blocks) at
once.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from qsdk.core.errors import ConfigError
from qsdk.core.numerics import affine
from qsdk.core.numerics.dtypes import DType, float4e2m1
from qsdk.core.numerics.encoding import FloatArray, storage_type
from qsdk.core.numerics.spec import Granularity, PerBlock, PerTensor, Spec
from qsdk.core.ranges.histogram import BINS, Histogram, histogram_of, percentiles
from qsdk.core.ranges.ranges import Range, range_of, scale_and_zero_point, with_room_for_sums

_CHUNK = 1 << 16  # elements of one candidate x value array, which fits a core's own cache
_CACHED = 1 << 15  # bounds that are looked up at once
_SPREAD = 8  # every how-many-th candidate is looked up before the others
_ROUNDING = 1 + 1e-9  # more than sums of float64 are off by
_COARSE, _FINE = 32, 8  # candidates (i / 32), then i / 256 around the best
_COARSE_ENDS = 16  # of each end, where both are searched

Scales = npt.NDArray[np.float32]
ZeroPoints = npt.NDArray[np.int32]
Doubles = npt.NDArray[np.float64]
#: scales and zero points of candidates, [C, G] -> their costs, [C, G]
Cost = Callable[[Scales, ZeroPoints], Doubles]


def least_error(values: FloatArray, spec: Spec, gamma: float) -> Range:
    """Return the range of each group of values, [G, n], with the smallest error."""

    def cost(scale: Scales, zero_point: ZeroPoints) -> Doubles:
        return _each_cost(values, None, scale, zero_point, spec.dtype, gamma)

    return _search(cost, Range(values.min(axis=1), values.max(axis=1)), spec, values.size)


def least_error_counted(histogram: Histogram, spec: Spec, gamma: float) -> Range:
    """Return the range of each group with the smallest error, from the count of the values in each bin."""
    full, counts = Range(histogram.low, histogram.high), histogram.counts
    levels = spec.dtype.hi - spec.dtype.lo
    if not spec.dtype.is_integer or levels > counts.shape[1]:
        values = histogram.centers.astype(np.float32)

        def each(scale: Scales, zero_point: ZeroPoints) -> Doubles:
            return _each_cost(values, counts, scale, zero_point, spec.dtype, gamma)

        return _search(each, full, spec, counts.size)
    groups = [_Counted(group) for group in histogram.groups()]

    def cost(scale: Scales, zero_point: ZeroPoints) -> Doubles:
        result = [
            group.cost(scale[:, number], zero_point[:, number], spec.dtype, gamma)
            for number, group in enumerate(groups)
        ]
        return np.stack(result, axis=1)

    return _search(cost, full, spec, len(groups))


def cast_to(dtype: DType) -> Callable[[Any], Any]:
    """Return the rounding of float32 to a minifloat's values."""
    return lambda value: value.astype(storage_type(dtype)).astype(np.float32)


def _search(cost: Cost, full: Range, spec: Spec, size: int) -> Range:
    """Return the range of smallest cost, the full one [G] among the candidates and winning a tie.

    The size is the amount of work for one candidate of every group.
    """
    low, high = np.minimum(full.low, 0), np.maximum(full.high, 0)
    full = Range(low, high)
    both = not spec.symmetric and bool(((low < 0) & (high > 0)).any())
    coarse, offsets, smallest = _candidates(both=both)
    best = _best(cost, full, spec, np.repeat(coarse[:, :, None], len(low), axis=2), size)
    fine = (best[:, None, :] + offsets[:, :, None]).clip(smallest, 1)
    low_share, high_share = _best(cost, full, spec, np.concatenate([best[:, None, :], fine], axis=1), size)
    return Range((low * low_share).astype(np.float32), (high * high_share).astype(np.float32))


@cache
def _candidates(*, both: bool) -> tuple[Doubles, Doubles, float]:
    """Return shares of low and high, [2, C]: coarse ones, offsets around the best of these, and the smallest share."""
    steps = _COARSE_ENDS if both else _COARSE
    shares, near = np.arange(steps, 0, -1) / steps, np.arange(_FINE - 1, -_FINE, -1) / (steps * _FINE)
    coarse, offsets = (_pairs(each, each) if both else np.stack([each, each]) for each in (shares, near))
    return coarse, offsets, 1 / (steps * _FINE)


def _pairs(left: Doubles, right: Doubles) -> Doubles:
    """Return every pair, [2, len(left) * len(right)], the widest first."""
    pairs = np.stack([side.ravel() for side in np.meshgrid(left, right, indexing="ij")])
    return pairs[:, np.argsort(-pairs.sum(axis=0), kind="stable")]


def _best(cost: Cost, full: Range, spec: Spec, shares: Doubles, size: int) -> Doubles:
    """Return the shares of low and high, [2, G], with the smallest cost among candidates [2, C, G]."""
    per_chunk = max(_CHUNK // size, 1)
    costs = []
    for start in range(0, shares.shape[1], per_chunk):
        low_share, high_share = shares[:, start : start + per_chunk]
        low, high = (full.low * low_share).astype(np.float32), (full.high * high_share).astype(np.float32)
        costs.append(cost(*scale_and_zero_point(low, high, spec)))
    chosen = np.concatenate(costs).argmin(axis=0)
    return np.asarray(shares[:, chosen, np.arange(shares.shape[2])])


def _each_cost(
    x: FloatArray, counts: Doubles | None, scale: Scales, zero_point: ZeroPoints, dtype: DType, gamma: float
) -> Doubles:
    """Return the weighted squared error of each candidate and group, [C, G], of values [G, n]; scales are [C, G].

    In units of the scale and without the zero point, which needs fewer passes than the exact formula.
    """
    scaled = x * (1 / scale[:, :, None])
    # a minifloat has the zero point 0
    z = zero_point[:, :, None].astype(np.float32)
    ends = np.float32(dtype.lo) - z, np.float32(dtype.hi) - z
    if dtype.is_integer:
        error = np.rint(scaled)
        np.clip(error, *ends, out=error)
    else:
        error = cast_to(dtype)(scaled.clip(*ends))
    error -= scaled
    result = _sum_squares(error, counts)
    if gamma != 1:
        np.clip(scaled, *ends, out=error)
        error -= scaled  # of clipped values alone
        result += (gamma - 1) * _sum_squares(error, counts)
    return np.asarray(result * np.square(scale, dtype=np.float64))


def _sum_squares(error: FloatArray, counts: Doubles | None) -> Doubles:
    """Return the sum over n of the squares of [C, G, n]. With counts, the input is overwritten."""
    if counts is None:
        return np.asarray(np.einsum("cgn,cgn->cg", error, error), np.float64)
    error *= error
    return np.asarray(np.einsum("cgn,gn->cg", error, counts))


class _Counted:
    """Sums over the counted values of a group up to a bound, from which the cost of a grid is looked up."""

    def __init__(self, histogram: Histogram) -> None:
        self.values, counts = histogram.centers[0], histogram.counts[0]
        self.width, self.first = float(histogram.width[0]), float(histogram.first[0])
        # of counts, of count * x and of count * x^2 over the values before each one
        self.sums = np.zeros((3, len(counts) + 1))
        for power, sums in enumerate(self.sums):
            np.cumsum(counts * self.values**power, out=sums[1:])

    def cost(self, scale: Scales, zero_point: ZeroPoints, dtype: DType, gamma: float) -> Doubles:
        """Return the cost of each candidate, [C], for scales [C]; infinity where it is above that of another.

        What clipping alone costs is known from the sums. Some candidates are looked up level by level, and then only
        those that clip for less than the best of these costs.
        """
        s, z = scale.astype(np.float64), zero_point.astype(np.float64)
        lowest, highest = (dtype.lo - z) * s, (dtype.hi - z) * s
        total = self.sums[:, -1]
        below = self.sums[:, np.searchsorted(self.values, lowest)]
        above = total[:, None] - self.sums[:, np.searchsorted(self.values, highest, "right")]
        clipped = _square(lowest, below) + _square(highest, above)
        middles = np.arange(dtype.lo, dtype.hi) + 0.5
        at_once = max(_CACHED // len(middles), 1)
        result = np.full(len(s), np.inf)

        def look_up(candidates: npt.NDArray[np.intp]) -> None:
            for start in range(0, len(candidates), at_once):
                some = candidates[start : start + at_once]
                bounds = (middles - z[some, None]) * s[some, None]
                rounded = _square(highest[some], total) - 2 * s[some] * self._shortfall(bounds).sum(axis=1)
                result[some] = rounded + (gamma - 1) * clipped[some]

        look_up(np.arange(0, len(s), _SPREAD))
        look_up(np.flatnonzero((gamma * clipped <= _ROUNDING * result.min()) & (result == np.inf)))
        return result

    def _shortfall(self, bounds: Doubles) -> Doubles:
        """Return F at any bound: linear between values, 0 below them, with the slope of all counts beyond the last.

        The bin of a bound says which values are below it, and so which line of F it is on. Only the first and the last
        value may not be in the middle of their bins; F is convex, no line of it is above it, and so the larger of that
        line and the outermost two is right there too.
        """
        place = bounds * (1 / self.width)
        place += 0.5 - self.first
        counts, sums = self.sums[0], self.sums[1]
        # rounded down; NumPy is faster to int32 and from there than to the indices at once
        number = np.clip(place, 0.0, len(counts) - 1.0, out=place).astype(np.int32).astype(np.intp)
        result = counts.take(number, mode="clip", out=place)
        result *= bounds
        result -= sums.take(number, mode="clip")
        np.maximum(result, 0, out=result)
        bounds *= counts[-1]
        bounds -= sums[-1]
        return np.asarray(np.maximum(result, bounds, out=result))


def _square(end: Doubles, sums: Doubles) -> Doubles:
    """Return the sum of count * (end - x)^2 over the values whose counts, x and x^2 add up to `sums`."""
    return np.asarray(end * end * sums[0] - 2 * end * sums[1] + sums[2])


#: the names that `calibrate` accepts; the last four are synonyms
CalibrationMethod = Literal[
    "min_max",
    "moving_average",
    "percentile",
    "mse",
    "tf_enhanced",
    "entropy",
    "four_over_six",
    "post_training_tf",
    "post_training_tf_enhanced",
    "post_training_percentile",
    "sqnr",
]
_SYNONYMS = {
    "post_training_tf": "min_max",
    "post_training_tf_enhanced": "tf_enhanced",
    "post_training_percentile": "percentile",
    "sqnr": "tf_enhanced",
}
#: each of these names -> the estimator
METHODS: Mapping[str, str] = MappingProxyType({name: _SYNONYMS.get(name, name) for name in get_args(CalibrationMethod)})
PERCENTILE = 99.99
MOMENTUM = 0.1

_GAMMA = 3.0  # weight of the error of clipped values in `tf_enhanced`
_FEWEST_BINS, _VALUES_PER_BIN = 128, 4
_ROWS = 1 << 17  # number of values, or bins, that are searched together
_THRESHOLDS = 64  # candidates of `entropy`
_SMOOTH = 1e-4  # ONNX Runtime's and TensorRT's floor on a distribution


@dataclass(frozen=True)
class Estimator:
    """A method that turns statistics into a range.

    Attributes:
        name: a canonical name of `METHODS`.
        percentile: share of the values, in percent, that `percentile` keeps below its upper end.
    """

    name: str = "min_max"
    percentile: float = PERCENTILE

    @property
    def reads_histogram(self) -> bool:
        """Return whether the method needs more than minimum and maximum."""
        return self.name in _SEARCHES


def estimator(method: str, percentile: float = PERCENTILE) -> Estimator:
    """Return the estimator of that name."""
    if method not in METHODS:
        raise ConfigError(f"unknown calibration method {method!r}; choose one of {', '.join(METHODS)}")
    if not 50 < percentile <= 100:
        raise ConfigError(f"percentile={percentile} is outside 50..100; give the share to keep, such as 99.9")
    return Estimator(METHODS[method], percentile)


def moving_average(before: Range | None, new: Range) -> Range:
    """Return the moving average of the extremes of batches, momentum 0.1."""
    if before is None:
        return new
    momentum = np.float32(MOMENTUM)
    low, high = (old + momentum * (now - old) for old, now in ((before.low, new.low), (before.high, new.high)))
    return Range(low, high)


def range_from_histogram(histogram: Histogram, spec: Spec, chosen: Estimator) -> Range:
    """Return the range of each group, [G], estimated from a histogram."""
    if not chosen.reads_histogram:
        return Range(histogram.low, histogram.high)
    return _SEARCHES[chosen.name].of_histogram(histogram, spec, chosen)


def range_of_stored(x: npt.ArrayLike, spec: Spec, chosen: Estimator) -> Range:
    """Return the range of a stored tensor at the spec's granularity."""
    full = range_of(x, spec)
    if not chosen.reads_histogram:
        return full
    values, lengths = grouped(np.asarray(x, np.float32), spec.granularity)
    low, high = np.empty(len(values), np.float32), np.empty(len(values), np.float32)
    for length in np.unique(lengths):
        rows = np.flatnonzero(lengths == length)
        for some in np.array_split(rows, -(-len(rows) * min(int(length), BINS) // _ROWS)):
            result = _range_of_groups(values[some, :length], spec, chosen)
            low[some], high[some] = result.low, result.high
    return with_room_for_sums(Range(low.reshape(full.low.shape), high.reshape(full.high.shape)), np.asarray(x), spec)


def _range_of_groups(values: FloatArray, spec: Spec, chosen: Estimator) -> Range:
    search = _SEARCHES[chosen.name]
    if search.of_values is not None and values.shape[1] <= search.most_values:
        return search.of_values(values, spec, chosen)
    # a few values in each bin: a distribution with one value in each would be noise
    bins = min(max(values.shape[1] // _VALUES_PER_BIN, _FEWEST_BINS), BINS)
    return search.of_histogram(histogram_of(values, bins=bins), spec, chosen)


def grouped(x: FloatArray, granularity: Granularity) -> tuple[FloatArray, npt.NDArray[np.int64]]:
    """Return x as [G, n], one row per scale, and the number of valid values per row: a last block may be shorter."""
    if isinstance(granularity, PerTensor):
        return x.reshape(1, -1), np.array([x.size])
    if not isinstance(granularity, PerBlock):
        moved = np.moveaxis(x, granularity.axis, 0)
        rows = moved.reshape(len(moved), -1)
        return rows, np.full(len(rows), rows.shape[1])
    axis, size = granularity.axis % x.ndim, granularity.size
    length, blocks = x.shape[axis], -(-x.shape[axis] // size)
    index = np.minimum(np.arange(blocks * size), length - 1)
    runs: FloatArray = np.moveaxis(np.take(x, index, axis), axis, -1)
    lengths = np.broadcast_to(np.minimum(length - np.arange(blocks) * size, size), (*runs.shape[:-1], blocks))
    # the groups in the order of a scale of x's rank, whose axis counts blocks
    ordered: FloatArray = np.moveaxis(runs.reshape(*runs.shape[:-1], blocks, size), -2, axis)
    return ordered.reshape(-1, size), np.moveaxis(lengths, -1, axis).reshape(-1)


# --- the grid that keeps the distribution -------------------------------------------------------------------------


def _least_divergent(histogram: Histogram, spec: Spec) -> Range:
    """Return the range with the smallest KL divergence between the clipped histogram and its quantized form.

    After Migacz 2017, "8-bit inference with TensorRT"; the levels are those of the grid itself.
    """
    low, high = np.minimum(histogram.low, 0), np.maximum(histogram.high, 0)
    if spec.dtype.is_integer and spec.dtype.hi - spec.dtype.lo >= 2 * histogram.counts.shape[1]:
        return Range(low, high)  # every bin has a level of its own, so nothing is lost
    shares = np.arange(_THRESHOLDS, _THRESHOLDS // 16 - 1, -1) / _THRESHOLDS
    thresholds = (np.maximum(-low, high) * shares[:, None]).astype(np.float32)
    lows, highs = np.maximum(low, -thresholds), np.minimum(high, thresholds)
    centers, counts = histogram.centers.astype(np.float32), histogram.counts
    result = []
    chunks = min(-(-len(shares) * counts.size // _ROWS), len(shares))
    for some in np.array_split(np.arange(len(shares)), chunks):
        rows = np.tile(np.arange(len(counts)), len(some))
        ends = lows[some].ravel(), highs[some].ravel()
        result.append(_divergence(centers[rows], counts[rows], ends, spec).reshape(len(some), -1))
    best = np.concatenate(result).argmin(axis=0)
    groups = np.arange(len(counts))
    return Range(lows[best, groups], highs[best, groups])


def _divergence(
    centers: FloatArray, counts: npt.NDArray[np.float64], ends: tuple[FloatArray, FloatArray], spec: Spec
) -> npt.NDArray[np.float64]:
    """Return the KL divergence of the clipped histogram from its quantized form, [G]."""
    groups, bins = counts.shape
    scale, zero_point = (value[:, None] for value in scale_and_zero_point(*ends, spec))
    if spec.dtype.is_integer:
        codes = affine.quantize(centers, scale, zero_point, spec.dtype.lo, spec.dtype.hi)
    else:
        codes = cast_to(spec.dtype)((centers / scale).clip(spec.dtype.lo, spec.dtype.hi))
    # a level: a run of bins with the same code
    level = np.zeros((groups, bins), np.int64)
    np.cumsum(codes[:, 1:] != codes[:, :-1], axis=1, out=level[:, 1:])
    level += np.arange(groups)[:, None] * bins
    below, above = centers < ends[0][:, None], centers > ends[1][:, None]
    inside = ~(below | above)
    kept = counts * inside
    # clipped values join the outermost bins that are kept
    reference = kept.copy()
    rows = np.arange(groups)
    lowest, highest = inside.argmax(axis=1), bins - 1 - inside[:, ::-1].argmax(axis=1)
    reference[rows, lowest] += (counts * below).sum(axis=1)
    reference[rows, highest] += (counts * above).sum(axis=1)
    held = reference > 0
    sums = np.bincount(level.ravel(), kept.ravel(), groups * bins)
    members = np.bincount(level.ravel(), held.ravel(), groups * bins)
    quantized = (sums / np.maximum(members, 1))[level] * held
    p, q = (_smoothed(value) for value in (reference, quantized))
    result = (p * np.log(p / q) * held).sum(axis=1)
    return np.where(inside.any(axis=1), result, np.inf)


def _smoothed(counts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    total = counts.sum(axis=1, keepdims=True)
    return np.asarray(np.maximum(counts / np.where(total > 0, total, 1), _SMOOTH / counts.shape[1]))


# --- what each estimator does -------------------------------------------------------------------------------------


def _tails_cut(percentile_of: Callable[[float], npt.NDArray[Any]], chosen: Estimator) -> Range:
    low, high = (np.asarray(percentile_of(share), np.float32) for share in (100 - chosen.percentile, chosen.percentile))
    return Range(low, high)


def _four_over_six(values: FloatArray, spec: Spec) -> Range:
    """Return the range of each group, or one and a half times it where that makes the error of a float4 smaller.

    The largest value is then a 4, and the others are nearer to what a float4 has below it.
    """
    full = Range(values.min(axis=1), values.max(axis=1))
    if spec.dtype != float4e2m1:
        return full
    shares = np.array([[[1.0], [1.5]]] * 2).repeat(len(values), axis=2)

    def cost(scale: Scales, zero_point: ZeroPoints) -> Doubles:
        # in units of each candidate's own scale
        return _each_cost(values, None, scale, zero_point, spec.dtype, 1.0)

    low, high = _best(cost, full, spec, shares, values.size)
    return Range((full.low * low).astype(np.float32), (full.high * high).astype(np.float32))


@dataclass(frozen=True)
class _Search:
    """How an estimator finds ranges from a histogram, and from groups of up to so many values, [G, n], one by one."""

    of_histogram: Callable[[Histogram, Spec, Estimator], Range]
    of_values: Callable[[FloatArray, Spec, Estimator], Range] | None = None
    most_values: float = math.inf


def _of_least_error(gamma: float) -> _Search:
    return _Search(
        lambda histogram, spec, _: least_error_counted(histogram, spec, gamma),
        lambda values, spec, _: least_error(values, spec, gamma),
        BINS,
    )


#: a row for each estimator that needs more than the extremes
_SEARCHES: Mapping[str, _Search] = MappingProxyType(
    {
        "percentile": _Search(
            lambda histogram, _, chosen: _tails_cut(partial(percentiles, histogram), chosen),
            lambda values, _, chosen: _tails_cut(partial(np.percentile, values, axis=1), chosen),
        ),
        "mse": _of_least_error(1.0),
        "tf_enhanced": _of_least_error(_GAMMA),
        "entropy": _Search(lambda histogram, spec, _: _least_divergent(histogram, spec)),
        "four_over_six": _Search(
            lambda histogram, *_: Range(histogram.low, histogram.high),
            lambda values, spec, _: _four_over_six(values, spec),
        ),
    }
)
