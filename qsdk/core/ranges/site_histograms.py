"""The histograms of many sites, which samples of batch after batch are added to."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qsdk.core.numerics.encoding import FloatArray
from qsdk.core.ranges.histogram import Histogram, histogram_of_samples
from qsdk.core.ranges.ranges import Range


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
