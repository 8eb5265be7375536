"""Histograms that grow: bins of a power-of-two width, aligned to multiples of it, so that merging is exact.

Where data outgrows the bins, their width doubles and neighbours are added up: the same result as counting all values in
the wider bins. It depends neither on the order of the batches nor on the order of merging.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qsdk.core.errors import CalibrationError
from qsdk.core.numerics.encoding import FloatArray
from qsdk.core.ranges.ranges import Range

#: Bins of a histogram; between half of them and all are in use.
BINS = 2048
#: Upper bound of the values that a batch of a tensor contributes; of larger tensors, every `sample_step`-th counts.
SAMPLES = 1 << 15
#: Steps through a flattened tensor. Primes, so that a step does not fall on the same channels or columns every time.
STEPS = (1, 3, 5, 11, 17, 23, 37, 53, 79, 113, 163, 233, 331, 479, 677, 967, 1373, 1951, 2767, 3931, 5569, 7901)

_SMALLEST_EXPONENT = -126
_CHUNK = 1 << 18  # values counted at once, so that a large tensor needs no copies of its size
_MANTISSA = 23  # multiples of the width must be exact in float32


def sample_step(size: int) -> int:
    """Return the step of the sample of a tensor of `size` elements: every n-th of them, about `SAMPLES` or fewer.

    Examples:
        >>> sample_step(1000), sample_step(100_000)
        (1, 5)
    """
    wanted = -(-size // SAMPLES)
    return next((step for step in STEPS if step >= wanted), STEPS[-1])


@dataclass(frozen=True, eq=False)
class Histogram:
    """Counts per group (a tensor, its channels or its blocks); each group has a bin width of its own.

    Attributes:
        exponent: int64 [G]; a bin is `2 ** exponent` wide.
        first: int64 [G]; bin i covers `(first + i) * width` up to the next multiple, which only the last one includes.
        counts: float64 [G, bins].
        low: float32 [G], the smallest value seen.
        high: float32 [G], the largest.
    """

    exponent: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]
    counts: npt.NDArray[np.float64]
    low: FloatArray
    high: FloatArray

    @property
    def fields(self) -> tuple[npt.NDArray[Any], ...]:
        """Return the arrays in the order of the attributes; the first axis of each is that of the groups."""
        return self.exponent, self.first, self.counts, self.low, self.high

    @property
    def width(self) -> npt.NDArray[np.float64]:
        """Return the width of a bin, [G]."""
        return np.asarray(np.exp2(self.exponent.astype(np.float64)))

    @property
    def edges(self) -> npt.NDArray[np.float64]:
        """Return the edges of the bins, [G, bins + 1]."""
        index = self.first[:, None] + np.arange(self.counts.shape[1] + 1)
        return np.asarray(index * self.width[:, None])

    @property
    def centers(self) -> npt.NDArray[np.float64]:
        """Return the centres of the bins, [G, bins], with the first and last bin cut at the extremes."""
        edges = self.edges.clip(self.low[:, None], self.high[:, None])
        return np.asarray((edges[:, 1:] + edges[:, :-1]) / 2)

    def merge(self, other: "Histogram") -> "Histogram":
        """Return the histogram of the values of both."""
        if self.counts.shape != other.counts.shape:
            raise CalibrationError(f"histograms of shapes {self.counts.shape} and {other.counts.shape} do not merge")
        low, high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        exponent, first = _common_bins(self, other, high, self.counts.shape[1])
        counts = _moved(self, exponent, first) + _moved(other, exponent, first)
        return Histogram(exponent, first, counts, low, high)

    def add_samples(self, samples: Sequence[FloatArray], steps: Sequence[int], ends: Range) -> "Histogram":
        """Return the merged histogram of these values and of `histogram_of_samples`; the counts are added in place."""
        bins = self.counts.shape[1]
        low, high = np.asarray(ends.low, np.float32), np.asarray(ends.high, np.float32)
        new = Histogram(*_fit(low, high, bins), self.counts, low, high)
        lowest, highest = np.minimum(self.low, low), np.maximum(self.high, high)
        exponent, first = _common_bins(self, new, highest, bins)
        result = Histogram(exponent, first, self.counts, lowest, highest)
        wider = (exponent != self.exponent) | (first != self.first)
        if wider.any():
            some = Histogram(*(field[wider] for field in self.fields))
            self.counts[wider] = _moved(some, exponent[wider], first[wider])
        _add_samples(result, samples, steps, _shifted(new.first, new, exponent), high)
        return result

    def groups(self) -> "list[Histogram]":
        """Return the histogram of each group, as views."""
        return [Histogram(*(field[i : i + 1] for field in self.fields)) for i in range(len(self.exponent))]

    @classmethod
    def stack(cls, histograms: "Sequence[Histogram]") -> "Histogram":
        """Return histograms of as many bins as one, their groups one after the other."""
        if len(histograms) == 1:
            return histograms[0]
        return cls(*(np.concatenate(parts) for parts in zip(*(each.fields for each in histograms), strict=True)))


def histogram_of(values: FloatArray, *, bins: int = BINS) -> Histogram:
    """Return the histogram of finite values, float32 [G, n]."""
    if values.size == 0:
        raise CalibrationError("there is no histogram of an empty tensor; give data with at least one element")
    ends = Range(values.min(axis=1), values.max(axis=1))
    return histogram_of_samples(list(values), [1] * len(values), ends, bins=bins)


def histogram_of_samples(
    samples: Sequence[FloatArray], steps: Sequence[int], ends: Range, *, bins: int = BINS
) -> Histogram:
    """Return the histogram of tensors of which only a sample is known, a group for each.

    Args:
        samples: finite values of each tensor, float32 [n], where n may differ.
        steps: every how-many-th value of its tensor a sample holds; each value counts as many times.
        ends: the extremes of each tensor, [G], which count once more where they may not be in the sample.
        bins: their number.
    """
    low, high = np.asarray(ends.low, np.float32), np.asarray(ends.high, np.float32)
    exponent, first = _fit(low, high, bins)
    result = Histogram(exponent, first, np.zeros((len(samples), bins)), low, high)
    _add_samples(result, samples, steps, first, high)
    return result


def _add_samples(
    into: Histogram,
    samples: Sequence[FloatArray],
    steps: Sequence[int],
    lowest: npt.NDArray[np.int64],
    high: FloatArray,
) -> None:
    """Add a sample to each group, in place, where the bins reach over the samples.

    Of each sample's tensor, the bin of its smallest value [G] and its largest value [G] are known.
    """
    scale = np.exp2(-into.exponent).astype(np.float32)  # a power of two, so that the products are exact
    lowest = lowest - into.first
    highest = _last(high, into.exponent) - into.first
    for i, (sample, step) in enumerate(zip(samples, steps, strict=True)):
        counts, first, last = into.counts[i], int(into.first[i]), int(highest[i])
        for start in range(0, sample.size, _CHUNK):
            index = sample[start : start + _CHUNK] * scale[i]
            # NumPy is several times as fast to int32 as to int64, and to clip integers as floats
            places = np.floor(index, out=index).astype(np.int32)
            places -= first
            found = np.bincount(np.minimum(places, last, out=places), minlength=len(counts))
            counts += found if step == 1 else found * step
        if step != 1:
            counts[lowest[i]] += 1
            counts[last] += 1


def _last(high: FloatArray, exponent: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the bin of the largest value, which is the one below its edge if it is a multiple of the width."""
    scaled = np.ldexp(high.astype(np.float64), -exponent)
    return (np.ceil(scaled) - 1).astype(np.int64)


def _fit(low: FloatArray, high: FloatArray, bins: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the smallest exponent with which the bins reach from low to high, and the first bin."""
    span = _exponent_of((high.astype(np.float64) - low) / bins) - 1
    exact = _exponent_of(np.maximum(np.abs(low), np.abs(high))) - _MANTISSA
    exponent = np.maximum(np.maximum(span, exact), _SMALLEST_EXPONENT)
    while True:
        first = np.floor(np.ldexp(low.astype(np.float64), -exponent)).astype(np.int64)
        first = np.minimum(first, _last(high, exponent))  # a constant on an edge lies in the bin below it
        short = _last(high, exponent) - first >= bins
        if not short.any():
            return exponent, first
        exponent = exponent + short


def _common_bins(
    one: Histogram, other: Histogram, high: FloatArray, bins: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the smallest exponent with which bins reach over those of both up to `high`, and the first bin."""
    exponent = np.maximum(one.exponent, other.exponent)
    while True:
        first = np.minimum(_shifted(one.first, one, exponent), _shifted(other.first, other, exponent))
        short = _last(high, exponent) - first >= bins
        if not short.any():
            return exponent, first
        exponent = exponent + short


def _exponent_of(value: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the exponent of the power of two above a value; the smallest one for 0."""
    return np.where(value == 0, _SMALLEST_EXPONENT, np.frexp(value)[1]).astype(np.int64)


def _shifted(
    index: npt.NDArray[np.int64], histogram: Histogram, exponent: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the indices of a histogram's bins, [G] or [G, n], among wider ones."""
    shift = (exponent - histogram.exponent).clip(0, 62)
    return np.asarray(index >> (shift if index.ndim == 1 else shift[:, None]))


def _moved(
    histogram: Histogram, exponent: npt.NDArray[np.int64], first: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return the counts in wider bins with another first bin: neighbours are added up."""
    groups, bins = histogram.counts.shape
    moved = (exponent != histogram.exponent) | (first != histogram.first)
    if not moved.any():
        return histogram.counts
    if not moved.all():
        counts = histogram.counts.copy()
        some = Histogram(*(field[moved] for field in histogram.fields))
        counts[moved] = _moved(some, exponent[moved], first[moved])
        return counts
    index = histogram.first[:, None] + np.arange(bins)
    places = _shifted(index, histogram, exponent) - first[:, None]
    # bins beyond the new ones are empty, since they were beyond the largest value
    places = places.clip(0, bins - 1) + np.arange(groups)[:, None] * bins
    counted = np.bincount(places.ravel(), histogram.counts.ravel(), groups * bins)
    return np.asarray(counted.reshape(groups, bins), np.float64)


def percentiles(histogram: Histogram, percent: float) -> npt.NDArray[np.float64]:
    """Return the value below which `percent` of the values lie, [G], interpolated inside its bin.

    Values are assumed evenly spaced in their bin; the rank among n values is NumPy's, `percent / 100 * (n - 1)`.
    """
    counts = histogram.counts
    before = np.cumsum(counts, axis=1) - counts
    total = before[:, -1] + counts[:, -1]
    rank = percent / 100 * (total - 1).clip(0)
    # the last bin that is not empty and begins at or below the rank
    reached = (before <= rank[:, None]) & (counts > 0)
    place = counts.shape[1] - 1 - reached[:, ::-1].argmax(axis=1)
    rows = np.arange(len(counts))
    inside, held = rank - before[rows, place], counts[rows, place]
    edges = histogram.edges
    start = np.maximum(edges[rows, place], histogram.low)
    end = np.minimum(edges[rows, place + 1], histogram.high)
    # the last value of all is the largest, so in the last bin the values reach its end
    is_last = end == histogram.high
    steps = np.where(is_last, held - 1, held)
    share = np.where(steps > 0, inside / np.where(steps > 0, steps, 1), is_last)
    return np.asarray(start + (end - start) * share.clip(0, 1))
