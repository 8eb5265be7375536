"""Statistics of activations, collected batch by batch for either side, and the encodings that follow from them."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from qsdk.core.callbacks import log
from qsdk.core.errors import CalibrationError, DataError
from qsdk.core.numerics.encoding import Encoding, FloatArray
from qsdk.core.numerics.spec import Spec, axis_of
from qsdk.core.planning.plan import Decision
from qsdk.core.ranges.estimators import Estimator, moving_average, range_from_histogram
from qsdk.core.ranges.histogram import Histogram, histogram_of_samples
from qsdk.core.ranges.ranges import Range, encoding_from_range

DoubleArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ChannelStatistics:
    """The statistics of the values of each channel.

    Attributes:
        count: of values per channel.
        mean: float64 [channels].
        squares: float64 [channels], the sum of the squared distances from the mean.
    """

    count: int
    mean: DoubleArray
    squares: DoubleArray

    def variance(self, owner: str) -> DoubleArray:
        """Return the unbiased variance, as in PyTorch's BatchNorm."""
        if self.count < 2:
            raise DataError(f"{owner} saw {self.count} values per channel, which have no variance; give more data")
        if not (np.isfinite(self.mean).all() and np.isfinite(self.squares).all()):
            raise DataError(f"the input of {owner} holds NaN or an infinity; give data that is finite")
        return np.asarray(self.squares / (self.count - 1))


#: merges the statistics of all ranks for an owner
Together = Callable[[str, ChannelStatistics], ChannelStatistics]


def merge(parts: Sequence[ChannelStatistics]) -> ChannelStatistics:
    """Return the statistics of all values of the parts (Chan et al. 1979)."""
    result = parts[0]
    for part in parts[1:]:
        count = result.count + part.count
        if part.count == 0 or result.count == 0:
            result = part if result.count == 0 else result
            continue
        difference = part.mean - result.mean
        mean = result.mean + difference * (part.count / count)
        shifted = np.square(difference) * (result.count * part.count / count)
        result = ChannelStatistics(count, mean, result.squares + part.squares + shifted)
    return result


def deviation(now: ChannelStatistics, mean: DoubleArray, variance: DoubleArray) -> float:
    """Return how far a BatchNorm's output is from mean 0 and deviation 1: root mean square over the channels."""
    spread = np.sqrt(variance)
    off = np.square((now.mean - mean) / spread) + np.square(np.sqrt(now.squares / now.count) / spread - 1)
    return float(np.sqrt(off.mean()))


@dataclass(frozen=True, eq=False)
class Sample:
    """A sample of a tensor.

    Attributes:
        values: float32 [n], every `step`-th value.
        step: see `histogram.sample_step`.
        ends: the extremes of the tensor, [1].
    """

    values: FloatArray
    step: int
    ends: Range


class SiteHistograms(Mapping[str, Histogram]):
    """Site -> histogram of its samples so far, with one group; a view, which later samples change."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._all: list[Histogram] = []  # one, with a group for each site, or none

    def __getitem__(self, site: str) -> Histogram:
        """Return the histogram of a site."""
        row = self._rows[site]
        return Histogram(*(field[row : row + 1] for field in self._all[0].fields))

    def __iter__(self) -> Iterator[str]:
        """Return the sites."""
        return iter(self._rows)

    def __len__(self) -> int:
        """Return their number."""
        return len(self._rows)

    def add(self, samples: Mapping[str, Sample]) -> None:
        """Add a sample of each of these sites, of all sites at once: calls cost more than values here."""
        known = {site: sample for site, sample in samples.items() if site in self._rows}
        new = {site: sample for site, sample in samples.items() if site not in self._rows}
        if known:
            rows = np.array([self._rows[site] for site in known])
            everywhere = np.array_equal(rows, np.arange(len(self._rows)))
            held = self._all[0]
            some = held if everywhere else Histogram(*(field[rows] for field in held.fields))
            some = some.add_samples(*_in_columns(known.values()))
            if everywhere:
                self._all = [some]
            else:
                for field, changed in zip(held.fields, some.fields, strict=True):
                    field[rows] = changed
        if new:
            self._append(list(new), histogram_of_samples(*_in_columns(new.values())))

    def merge(self, others: Mapping[str, Histogram]) -> None:
        """Add the values that other histograms count."""
        new = {site: histogram for site, histogram in others.items() if site not in self._rows}
        for site in others.keys() - new.keys():
            merged = self[site].merge(others[site])
            for field, changed in zip(self._all[0].fields, merged.fields, strict=True):
                field[self._rows[site]] = changed[0]
        if new:
            together = Histogram.stack(list(new.values()))
            self._append(list(new), Histogram(*(field.copy() for field in together.fields)))

    def _append(self, sites: Sequence[str], histogram: Histogram) -> None:
        self._rows |= {site: len(self._rows) + number for number, site in enumerate(sites)}
        self._all = [Histogram.stack([*self._all, histogram])]


def _in_columns(samples: Iterable[Sample]) -> tuple[list[FloatArray], list[int], Range]:
    """Return the values, the steps and the extremes, [S], of S samples."""
    found = list(samples)
    low, high = (np.concatenate([getattr(sample.ends, end) for sample in found]) for end in ("low", "high"))
    return [sample.values for sample in found], [sample.step for sample in found], Range(low, high)


#: histograms that are searched together
_SEARCHED = 32
#: an axis of more indices is no list of parts
_PARTS = 8_192
#: the range of a site that no batch has reached
_NOTHING = Range(np.array([np.inf], np.float32), np.array([-np.inf], np.float32))
#: returns the values of all ranks, in the order of the ranks
Gather = Callable[[Any], list[Any]]


def single_process(value: Any) -> list[Any]:
    """Return the value in a list: the `Gather` of a single process."""
    return [value]


class Statistics:
    """The extremes of each site, and a histogram if the estimator reads one. Its size does not depend on the data.

    Attributes:
        ranges: site -> extremes so far (their moving average, if that is the estimator).
        parts: (site of an input, axis) -> largest magnitude at each index of that axis.
        longest: tokens of the longest text.
    """

    def __init__(self, chosen: Estimator) -> None:
        self.chosen = chosen
        self.ranges: dict[str, Range] = {}
        self.parts: dict[tuple[str, int], FloatArray] = {}
        self.longest = 0
        self._histograms = SiteHistograms()
        self._moved: set[str] = set()  # sites whose range the batch has changed
        self._samples: list[tuple[str, Sample]] = []  # not counted yet

    def add(
        self, site: str, low: npt.ArrayLike, high: npt.ArrayLike, sample: FloatArray | None = None, step: int = 1
    ) -> None:
        """Add a batch of a site.

        Args:
            site: of the values.
            low: the smallest value, or that of each channel; finite.
            high: the largest.
            sample: every `step`-th value, flattened; needed if the estimator reads histograms, but not per channel,
                where the extremes count whatever the estimator.
            step: see `sample_step`.
        """
        new = Range(*(np.array(end, np.float32).reshape(-1) for end in (low, high)))
        before = self.ranges.get(site)
        if self.chosen.name == "moving_average":
            self.ranges[site] = moving_average(before, new)
        else:
            self.ranges[site] = new if before is None else before.merge(new)
        if before is None or not before.same(self.ranges[site]):
            self._moved.add(site)
        if sample is not None:
            self._samples.append((site, Sample(sample, step, new)))

    def add_tensors(self, sites: Sequence[str], ends: Range, samples: Mapping[str, tuple[FloatArray, int]]) -> None:
        """Add a batch of S different sites with one finite range each, [S], as `add` does one by one."""
        before = [self.ranges.get(site, _NOTHING) for site in sites]
        old = Range(*(np.concatenate([getattr(one, end) for one in before]) for end in ("low", "high")))
        now = old.merge(ends)
        if self.chosen.name == "moving_average":
            unseen = np.isinf(old.low)
            start = Range(np.where(unseen, ends.low, old.low), np.where(unseen, ends.high, old.high))
            now = moving_average(start, ends)
        for place in np.flatnonzero((now.low != old.low) | (now.high != old.high)).tolist():
            self._moved.add(sites[place])
            self.ranges[sites[place]] = Range(now.low[place : place + 1], now.high[place : place + 1])
        for place, site in enumerate(sites):
            if site in samples:
                own = Range(ends.low[place : place + 1], ends.high[place : place + 1])
                self._samples.append((site, Sample(*samples[site], own)))

    def add_parts(self, site: str, axis: int, largest: FloatArray) -> None:
        """Add the largest magnitudes of a batch of an input, one for each index of an axis.

        Where batches have several sizes the last ones count, as indices then have no meaning of their own.
        """
        before = self.parts.get((site, axis))
        known = before is not None and before.shape == largest.shape
        self.parts[site, axis] = np.maximum(before, largest) if before is not None and known else largest

    def add_length(self, decision: Decision, shape: Sequence[int]) -> None:
        """Note how many tokens a tensor holds that turns with their positions: its size along axes that are open."""
        sizes = zip((decision.shape or ())[1:], shape[1:], strict=False)  # the first axis is that of texts
        self.longest = max([self.longest, *(size for known, size in sizes if not isinstance(known, int))])

    def end_batch(self) -> None:
        """Count the samples of the batch, and log which share of the ranges it has changed.

        Once that share stays near 0, more data changes little.
        """
        self._count_samples()
        if self.ranges:
            log("calibrate/moved_ranges", len(self._moved) / len(self.ranges))
        self._moved.clear()

    @property
    def histograms(self) -> Mapping[str, Histogram]:
        """Return the histogram so far of each site of which there are samples."""
        self._count_samples()
        return self._histograms

    def _count_samples(self) -> None:
        """Add the samples to the histograms of their sites."""
        while self._samples:
            some = {entry[0]: entry for entry in reversed(self._samples)}  # of each site the first, if it has several
            self._samples = [entry for entry in self._samples if some[entry[0]] is not entry]
            self._histograms.add(dict(some.values()))

    def merge(self, *others: "Statistics") -> "Statistics":
        """Return the statistics of all together, exactly as if one had observed all the data, in any order.

        Moving averages depend on an order that ranks do not have: the result is the mean of theirs.
        """
        merged, everyone = Statistics(self.chosen), (self, *others)
        for site in dict.fromkeys(site for one in everyone for site in one.ranges):
            ranges = [one.ranges[site] for one in everyone if site in one.ranges]
            merged.ranges[site] = _mean(ranges) if self.chosen.name == "moving_average" else reduce(Range.merge, ranges)
        for one in everyone:
            for (site, axis), largest in one.parts.items():
                merged.add_parts(site, axis, largest)
            merged._histograms.merge(one.histograms)
        merged.longest = max(one.longest for one in everyone)
        return merged

    def ranges_of(self, wanted: Iterable[tuple[Iterable[str], Spec]]) -> list[Range | None]:
        """Return the range of each of these lists of sites together; None where no batch has reached any of them.

        Many histograms are searched in less time together.
        """
        found: list[Range | None] = []
        alike: dict[tuple[Spec, bool, bool], list[tuple[int, Histogram]]] = {}
        for number, (sites, spec) in enumerate(wanted):
            seen = [site for site in sites if site in self.ranges]
            found.append(reduce(Range.merge, [self.ranges[site] for site in seen]) if seen else None)
            counted = [self.histograms[site] for site in seen if site in self.histograms]
            if self.chosen.reads_histogram and counted and spec.blocks is None:
                together = reduce(Histogram.merge, counted)
                # those of one sign have other candidates than those of both
                signs = bool(together.low[0] < 0), bool(together.high[0] > 0)
                alike.setdefault((spec, *signs), []).append((number, together))
        for (spec, *_), members in alike.items():
            for start in range(0, len(members), _SEARCHED):
                some = members[start : start + _SEARCHED]
                result = range_from_histogram(Histogram.stack([each for _, each in some]), spec, self.chosen)
                for place, (number, _) in enumerate(some):
                    found[number] = Range(result.low[place : place + 1], result.high[place : place + 1])
        return found


def _mean(ranges: list[Range]) -> Range:
    low, high = (np.stack([getattr(one, end) for one in ranges]) for end in ("low", "high"))
    return Range(low.mean(axis=0), high.mean(axis=0))


@dataclass(frozen=True)
class _Failure:
    """The reason why a rank has no statistics."""

    reason: str


def merge_over_ranks(observe: Callable[[], Statistics], gather: Gather) -> Statistics:
    """Observe the data of this rank, and return the statistics of all ranks together."""
    try:
        own = observe()
    except Exception as error:  # of any type: the other ranks wait for this one
        gather(_Failure(str(error)))
        raise
    everyone = gather(own)
    for rank, result in enumerate(everyone):
        if isinstance(result, _Failure):
            raise DataError(f"rank {rank}: {result.reason}")
    return everyone[0].merge(*everyone[1:]) if len(everyone) > 1 else own


def require_finite(site: str, number: int, *values: npt.ArrayLike) -> None:
    """Raise an error for values that are not finite."""
    if not all(_is_finite(value) for value in values):
        raise DataError(
            f"NaN or inf at the site {site} in batch {number}; clean the data, or skip the owner if its float values "
            "are meant to be infinite"
        )


def _is_finite(value: npt.ArrayLike) -> bool:
    values = np.asarray(value)
    # there is one for each site and batch, and NumPy takes 20 times as long for a single number
    return math.isfinite(values.item()) if values.size == 1 else bool(np.isfinite(values).all())


def part_axes(shape: Sequence[int]) -> list[int]:
    """Return the axes of an input of this shape along which parts of different meaning may lie: rows, columns.

    The last axis of a picture or volume is none: one of its columns is like the others.
    """
    axes = {1, len(shape) - 1} if len(shape) in (2, 3) else {1} if len(shape) > 3 else set[int]()
    return [axis for axis in sorted(axes) if 1 < shape[axis] <= _PARTS]


def channel_axis(decision: Decision) -> int | None:
    """Return the axis whose channels have ranges of their own; None where there is one range."""
    return None if decision.spec is None else axis_of(decision.spec.granularity)


def reads_histogram(decision: Decision, chosen: Estimator) -> bool:
    """Return whether the range of a site comes from a histogram of its values."""
    # no error of one grid says how far the scales of blocks should reach
    full = decision.spec is not None and (decision.spec.fixed_range is not None or decision.spec.blocks is not None)
    return chosen.reads_histogram and not full and channel_axis(decision) is None


def observed_sites(decisions: Iterable[Decision]) -> dict[str, Decision]:
    """Return the sites whose range is observed: members of tie classes too, but no site that only passes values on."""
    kinds = ("activation", "input", "output")
    return {d.site: d for d in decisions if d.quantized and d.kind in kinds and not d.passes_through}


def activation_encodings(
    wanted: Iterable[Decision],
    statistics: Statistics,
    *,
    frozen: Collection[str],
    known: Collection[str],
    only_traced: Collection[str] = (),
) -> dict[str, Encoding]:
    """Return the encodings of the sites that have one of their own.

    A fixed range does not depend on the data. Members of a tie share one range, estimated from all their statistics.

    Args:
        wanted: see `observed_sites`.
        statistics: of the data.
        frozen: sites whose encoding stays.
        known: sites that have an encoding, and keep it if no batch reached them.
        only_traced: sites that the example did not reach, and that get no encoding if no batch does.
    """
    decisions = list(wanted)
    members: dict[str, list[str]] = {}
    for decision in decisions:
        members.setdefault(decision.encoding_site, []).append(decision.site)
    found: dict[str, tuple[Spec, Range | None]] = {}
    estimated: list[tuple[str, Spec]] = []
    for decision in decisions:
        site, spec = decision.site, decision.spec
        if decision.tied_to is not None or decision.bias_of is not None or spec is None or site in frozen:
            continue
        found[site] = spec, _fixed(spec)
        if spec.fixed_range is None:
            estimated.append((site, spec))
    ranges = statistics.ranges_of((members[site], spec) for site, spec in estimated)
    found |= {site: (spec, range_) for (site, spec), range_ in zip(estimated, ranges, strict=True)}
    unseen = [site for site, (_, range_) in found.items() if range_ is None and site not in known]
    unseen = [site for site in unseen if not set(members[site]).issubset(only_traced)]
    if unseen:
        raise CalibrationError(
            f"no batch reached {', '.join(unseen[:8])}; calibrate with data that takes this path through the model, or "
            "skip these owners"
        )
    return {site: encoding_from_range(range_, spec) for site, (spec, range_) in found.items() if range_ is not None}


def _fixed(spec: Spec) -> Range | None:
    if spec.fixed_range is None:
        return None
    low, high = (np.array([end], np.float32) for end in spec.fixed_range)
    return Range(low, high)
