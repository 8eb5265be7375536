"""The search for the range with the smallest squared error, where clipped values count `gamma` times.

Ranges inside the full one are tried coarsely, then finely around the best. Single values are quantized under every
candidate. For values that were counted in bins, F(b), the sum of count * (b - x) over x <= b, is piecewise linear and
computed once. The error of a grid of scale s that ends at e is then the
sum of count * (e - x)^2 - 2 s * sum of F(b) over the boundaries b between its levels (summation by parts), so that a
candidate costs a look-up per level, not a pass over the bins.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from qsdk.core.numerics.dtypes import DType
from qsdk.core.numerics.encoding import FloatArray, storage_type
from qsdk.core.numerics.spec import Spec
from qsdk.core.ranges.histogram import Histogram
from qsdk.core.ranges.ranges import Range, scale_and_zero_point

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
    """Return the range of each group with the smallest error, from the count of the values in each bin.

    Args:
        histogram: of the values; all of a bin count as its centre.
        spec: of the grid.
        gamma: weight of the error of clipped values.
    """
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
    """Return the range of smallest cost, the full one among the candidates and winning a tie.

    Args:
        cost: of candidates.
        full: the extremes of each group, [G].
        spec: of the grid.
        size: amount of work for one candidate of every group.
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
    """Return shares of low and high, [2, C]: coarse ones, offsets around the best of these, and the smallest share.

    Args:
        both: whether both ends are searched, each by itself.
    """
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
