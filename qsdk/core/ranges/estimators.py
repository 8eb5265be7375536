"""Range estimators: from the statistics of a tensor to the range of its encoding.

`min_max` covers all values, `moving_average` averages the extremes of batches, `percentile` cuts both tails, `mse` and
`tf_enhanced` search the range with the smallest quantization error, `entropy` the one that changes the distribution
least. All work on groups (a tensor, its channels, its blocks) at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
import numpy.typing as npt

from qsdk.core.errors import ConfigError
from qsdk.core.numerics import affine
from qsdk.core.numerics.encoding import FloatArray
from qsdk.core.numerics.spec import Granularity, PerBlock, PerTensor, Spec
from qsdk.core.ranges.histogram import BINS, Histogram, histogram_of, percentiles
from qsdk.core.ranges.ranges import Range, range_of, scale_and_zero_point, with_room_for_sums
from qsdk.core.ranges.search import cast_to, least_error, least_error_counted

#: the names that `calibrate` accepts; the last four are synonyms
CalibrationMethod = Literal[
    "min_max",
    "moving_average",
    "percentile",
    "mse",
    "tf_enhanced",
    "entropy",
    "post_training_tf",
    "post_training_tf_enhanced",
    "post_training_percentile",
    "sqnr",
]
#: each of these names -> the estimator
METHODS: Mapping[str, str] = MappingProxyType(
    {name: name for name in ("min_max", "moving_average", "percentile", "mse", "tf_enhanced", "entropy")}
    | {"post_training_tf": "min_max", "post_training_tf_enhanced": "tf_enhanced", "sqnr": "tf_enhanced"}
    | {"post_training_percentile": "percentile"}
)
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
        return self.name not in ("min_max", "moving_average")


def estimator(method: str, percentile: float = PERCENTILE) -> Estimator:
    """Return the estimator of that name.

    Raises:
        ConfigError: there is none, or the percentile is not in 50..100.
    """
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
    full = Range(histogram.low, histogram.high)
    match chosen.name:
        case "percentile":
            ends = (percentiles(histogram, share) for share in (100 - chosen.percentile, chosen.percentile))
            low, high = (np.asarray(end, np.float32) for end in ends)
            return Range(low, high)
        case "mse" | "tf_enhanced":
            return least_error_counted(histogram, spec, _gamma(chosen))
        case "entropy":
            return _least_divergent(histogram, spec)
        case _:
            return full


def range_of_stored(x: npt.ArrayLike, spec: Spec, chosen: Estimator) -> Range:
    """Return the range of a stored tensor at the spec's granularity.

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
            result = _range_of_groups(values[some, :length], spec, chosen)
            low[some], high[some] = result.low, result.high
    return with_room_for_sums(Range(low.reshape(full.low.shape), high.reshape(full.high.shape)), np.asarray(x), spec)


def _range_of_groups(values: FloatArray, spec: Spec, chosen: Estimator) -> Range:
    if chosen.name == "percentile":
        ends = (np.percentile(values, share, axis=1) for share in (100 - chosen.percentile, chosen.percentile))
        low, high = (np.asarray(end, np.float32) for end in ends)
        return Range(low, high)
    if chosen.name in ("mse", "tf_enhanced") and values.shape[1] <= BINS:
        # few values are searched one by one instead of in bins
        return least_error(values, spec, _gamma(chosen))
    # a few values in each bin: a distribution with one value in each would be noise
    bins = min(max(values.shape[1] // _VALUES_PER_BIN, _FEWEST_BINS), BINS)
    return range_from_histogram(histogram_of(values, bins=bins), spec, chosen)


def _gamma(chosen: Estimator) -> float:
    return _GAMMA if chosen.name == "tf_enhanced" else 1.0


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
