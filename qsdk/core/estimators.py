"""Range estimators: statistics of a tensor in, the range that its encoding is made from out.

`min_max` keeps everything, `moving_average` averages the extremes of batches, `percentile` cuts both tails, `mse` and
`tf_enhanced` search the range whose grid moves the values least, `entropy` the one that keeps most of their
distribution. All work on groups (a tensor, its channels, its blocks) at once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from qsdk.core import affine
from qsdk.core.dtypes import DType
from qsdk.core.encoding import FloatArray, storage_type
from qsdk.core.errors import ConfigError
from qsdk.core.histogram import BINS, Histogram, histogram_of, percentiles
from qsdk.core.ranges import Range, range_of, scale_and_zero_point
from qsdk.core.spec import Granularity, PerBlock, PerTensor, Spec

#: Every name that `calibrate` takes -> the estimator.
METHODS: Mapping[str, str] = MappingProxyType(
    {name: name for name in ("min_max", "moving_average", "percentile", "mse", "tf_enhanced", "entropy")}
    | {"post_training_tf": "min_max", "post_training_tf_enhanced": "tf_enhanced", "sqnr": "tf_enhanced"}
)
PERCENTILE = 99.99
MOMENTUM = 0.1

_GAMMA = 3.0  # what a clipped value's error counts for in `tf_enhanced`
_CHUNK = 1 << 19  # elements of one candidate x value array
_FEWEST_BINS = 128
_ROWS = 1 << 17  # values, or bins, of the groups that are searched together
_COARSE, _FINE = 32, 8  # candidates (i / 32), then i / 256 around the best
_COARSE_ENDS = 16  # of each end, where both are searched
_THRESHOLDS = 64  # candidates of `entropy`
_SMOOTH = 1e-4  # ONNX Runtime's and TensorRT's floor on a distribution


@dataclass(frozen=True)
class Estimator:
    """A way from statistics to a range.

    Attributes:
        name: a canonical name of `METHODS`.
        percentile: share of the values, in percent, that `percentile` keeps below its upper end.
    """

    name: str = "min_max"
    percentile: float = PERCENTILE

    @property
    def reads_histogram(self) -> bool:
        """Whether minimum and maximum are not enough."""
        return self.name not in ("min_max", "moving_average")


def estimator(method: str, percentile: float = PERCENTILE) -> Estimator:
    """Give the estimator of that name.

    Raises:
        ConfigError: there is none, or the percentile is not in 50..100.
    """
    if method not in METHODS:
        raise ConfigError(f"unknown calibration method {method!r}; choose one of {', '.join(METHODS)}")
    if not 50 < percentile <= 100:
        raise ConfigError(f"percentile={percentile} is outside 50..100; give the share to keep, such as 99.9")
    return Estimator(METHODS[method], percentile)


def averaged(before: Range | None, new: Range) -> Range:
    """The moving average of the extremes of batches, momentum 0.1."""
    if before is None:
        return new
    momentum = np.float32(MOMENTUM)
    low, high = (old + momentum * (now - old) for old, now in ((before.low, new.low), (before.high, new.high)))
    return Range(low, high)


def range_from_histogram(histogram: Histogram, spec: Spec, chosen: Estimator) -> Range:
    """Estimate the range of each group, [G], from a histogram."""
    full = Range(histogram.low, histogram.high)
    match chosen.name:
        case "percentile":
            ends = (percentiles(histogram, share) for share in (100 - chosen.percentile, chosen.percentile))
            low, high = (np.asarray(end, np.float32) for end in ends)
            return Range(low, high)
        case "mse" | "tf_enhanced":
            points = _Points(histogram.centers.astype(np.float32), histogram.counts, full)
            return _least_moved(points, spec, _GAMMA if chosen.name == "tf_enhanced" else 1.0)
        case "entropy":
            return _most_alike(histogram, spec)
        case _:
            return full


def range_of_stored(x: npt.ArrayLike, spec: Spec, chosen: Estimator) -> Range:
    """Estimate the range of a stored tensor at the spec's granularity.

    Raises:
        CalibrationError: x is empty, lacks the axis, or holds NaN or an infinity.
    """
    full = range_of(x, spec)
    if not chosen.reads_histogram:
        return full
    values, lengths = grouped(np.asarray(x, np.float32), spec.granularity)
    low, high = np.empty(len(values), np.float32), np.empty(len(values), np.float32)
    for length in np.unique(lengths):
        rows = np.flatnonzero(lengths == length)
        for some in np.array_split(rows, -(-len(rows) * min(int(length), BINS) // _ROWS)):
            found = _range_of_groups(values[some, :length], spec, chosen)
            low[some], high[some] = found.low, found.high
    return Range(low.reshape(full.low.shape), high.reshape(full.high.shape))


def _range_of_groups(values: FloatArray, spec: Spec, chosen: Estimator) -> Range:
    if chosen.name == "percentile":
        ends = (np.percentile(values, share, axis=1) for share in (100 - chosen.percentile, chosen.percentile))
        low, high = (np.asarray(end, np.float32) for end in ends)
        return Range(low, high)
    if chosen.name in ("mse", "tf_enhanced") and values.shape[1] <= BINS:
        # few values: they themselves, rather than the bins they would fall into
        full = Range(values.min(axis=1), values.max(axis=1))
        points = _Points(values, np.ones(values.shape), full)
        return _least_moved(points, spec, _GAMMA if chosen.name == "tf_enhanced" else 1.0)
    # a bin for each value is enough
    bins = min(max(values.shape[1], _FEWEST_BINS), BINS)
    return range_from_histogram(histogram_of(values, bins=bins), spec, chosen)


def grouped(x: FloatArray, granularity: Granularity) -> tuple[FloatArray, npt.NDArray[np.int64]]:
    """Give x as [G, n], one row per scale, and how many values of each row count: a last block may be shorter."""
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


# --- the grid that moves values least -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Points:
    """Values [G, n], how often each occurs, [G, n], and the extremes of each group."""

    values: FloatArray
    counts: npt.NDArray[np.float64]
    full: Range


def _least_moved(points: _Points, spec: Spec, gamma: float) -> Range:
    """Search ranges inside the full one, coarsely and then finely, by the squared error of quantizing the points.

    The error of clipped values counts `gamma` times. The full range is among the candidates, and wins a tie.
    """
    low, high = np.minimum(points.full.low, 0), np.maximum(points.full.high, 0)
    points = replace(points, full=Range(low, high))
    both = not spec.symmetric and bool(((low < 0) & (high > 0)).any())
    steps = _COARSE_ENDS if both else _COARSE
    shares = np.arange(steps, 0, -1) / steps
    coarse = _pairs(shares, shares) if both else np.stack([shares, shares])
    best = _best(points, spec, gamma, np.repeat(coarse[:, :, None], len(low), axis=2))
    near = np.arange(_FINE - 1, -_FINE, -1) / (steps * _FINE)
    offsets = _pairs(near, near) if both else np.stack([near, near])
    fine = (best[:, None, :] + offsets[:, :, None]).clip(1 / (steps * _FINE), 1)
    low_share, high_share = _best(points, spec, gamma, np.concatenate([best[:, None, :], fine], axis=1))
    return Range((low * low_share).astype(np.float32), (high * high_share).astype(np.float32))


def _pairs(left: npt.NDArray[np.float64], right: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Every pair, [2, len(left) * len(right)], the widest first."""
    pairs = np.stack([side.ravel() for side in np.meshgrid(left, right, indexing="ij")])
    return pairs[:, np.argsort(-pairs.sum(axis=0), kind="stable")]


def _best(points: _Points, spec: Spec, gamma: float, shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The shares of low and high, [2, G], with the smallest cost among candidates [2, C, G]."""
    per_chunk = max(_CHUNK // points.values.size, 1)
    costs = []
    for start in range(0, shares.shape[1], per_chunk):
        low_share, high_share = shares[:, start : start + per_chunk]
        low = (points.full.low * low_share).astype(np.float32)
        high = (points.full.high * high_share).astype(np.float32)
        costs.append(_cost(points, *scale_and_zero_point(low, high, spec), spec.dtype, gamma))
    chosen = np.concatenate(costs).argmin(axis=0)
    return np.asarray(shares[:, chosen, np.arange(shares.shape[2])])


def _cost(
    points: _Points, scale: FloatArray, zero_point: npt.NDArray[np.int32], dtype: DType, gamma: float
) -> npt.NDArray[np.float64]:
    """The weighted squared error of each candidate and group, [C, G]; scales are [C, G]."""
    x = points.values
    s, z = scale[:, :, None], zero_point[:, :, None].astype(np.float32)
    if dtype.is_integer:
        error = affine.fake_quantize(x, s, z, dtype.lo, dtype.hi)
    else:
        error = affine.fake_quantize_minifloat(x, s, dtype, _cast_to(dtype))
    error -= x
    error *= error
    ends = (dtype.lo - z) * s, (dtype.hi - z) * s
    outside = (x < ends[0]) | (x > ends[1])
    if gamma != 1:
        np.multiply(error, np.float32(gamma), out=error, where=outside)
    return np.asarray(np.einsum("cgn,gn->cg", error, points.counts))


def _cast_to(dtype: DType) -> Callable[[Any], Any]:
    return lambda value: value.astype(storage_type(dtype)).astype(np.float32)


# --- the grid that keeps the distribution -------------------------------------------------------------------------


def _most_alike(histogram: Histogram, spec: Spec) -> Range:
    """Search the threshold on |x| with the smallest KL divergence between what is clipped and what its levels tell.

    After Migacz 2017, "8-bit inference with TensorRT"; the levels are those of the grid itself.
    """
    low, high = np.minimum(histogram.low, 0), np.maximum(histogram.high, 0)
    shares = np.arange(_THRESHOLDS, _THRESHOLDS // 16 - 1, -1) / _THRESHOLDS
    thresholds = (np.maximum(-low, high) * shares[:, None]).astype(np.float32)
    lows, highs = np.maximum(low, -thresholds), np.minimum(high, thresholds)
    centers, counts = histogram.centers.astype(np.float32), histogram.counts
    found = []
    chunks = min(-(-len(shares) * counts.size // _ROWS), len(shares))
    for some in np.array_split(np.arange(len(shares)), chunks):
        rows = np.tile(np.arange(len(counts)), len(some))
        ends = lows[some].ravel(), highs[some].ravel()
        found.append(_divergence(centers[rows], counts[rows], ends, spec).reshape(len(some), -1))
    best = np.concatenate(found).argmin(axis=0)
    groups = np.arange(len(counts))
    return Range(lows[best, groups], highs[best, groups])


def _divergence(
    centers: FloatArray, counts: npt.NDArray[np.float64], ends: tuple[FloatArray, FloatArray], spec: Spec
) -> npt.NDArray[np.float64]:
    """KL divergence of the clipped histogram from what remains of it on the grid, [G]."""
    groups, bins = counts.shape
    scale, zero_point = (value[:, None] for value in scale_and_zero_point(*ends, spec))
    if spec.dtype.is_integer:
        codes = affine.quantize(centers, scale, zero_point, spec.dtype.lo, spec.dtype.hi)
    else:
        codes = _cast_to(spec.dtype)((centers / scale).clip(spec.dtype.lo, spec.dtype.hi))
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
    told = (sums / np.maximum(members, 1))[level] * held
    p, q = (_smoothed(value) for value in (reference, told))
    found = (p * np.log(p / q) * held).sum(axis=1)
    return np.where(inside.any(axis=1), found, np.inf)


def _smoothed(counts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    total = counts.sum(axis=1, keepdims=True)
    return np.asarray(np.maximum(counts / np.where(total > 0, total, 1), _SMOOTH / counts.shape[1]))
