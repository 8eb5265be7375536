"""Statistics of many sites at once: those of each by itself."""

import numpy as np
import pytest

from qsdk import int8, uint8
from qsdk.core.numerics.spec import Spec
from qsdk.core.ranges.estimators import METHODS, estimator
from qsdk.core.ranges.ranges import Range
from qsdk.core.ranges.statistics import Statistics

SITES = ("both", "positive", "negative", "constant", "zeros")


def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    found = []
    for number in range(4):
        x = rng.standard_t(3, 900).astype(np.float32) * 3**number
        values = {"both": x, "positive": np.abs(x), "negative": -np.abs(x), "constant": np.full(9, 2, np.float32)}
        found.append(values | {"zeros": np.zeros(5, np.float32)})
    del found[0]["positive"]  # a site that a later batch reaches first
    del found[2]["negative"]  # a site that a later batch does not reach
    return found


def one_by_one(method: str) -> Statistics:
    found = Statistics(estimator(method))
    for batch in batches():
        for site, x in batch.items():
            found.add(site, x.min(), x.max(), x if found.chosen.reads_histogram else None)
        found.end_batch()
    return found


def at_once(method: str) -> Statistics:
    found = Statistics(estimator(method))
    for batch in batches():
        ends = Range(*(np.array([getattr(x, end)() for x in batch.values()]) for end in ("min", "max")))
        samples = {site: (x, 1) for site, x in batch.items()} if found.chosen.reads_histogram else {}
        found.add_tensors(list(batch), ends, samples)
        found.end_batch()
    return found


@pytest.mark.parametrize("method", sorted(set(METHODS.values())))
def test_many_sites_at_once_have_the_statistics_of_each_alone(method: str):
    single, together = one_by_one(method), at_once(method)
    assert single.ranges.keys() == together.ranges.keys() == set(SITES)
    assert all(single.ranges[site].same(together.ranges[site]) for site in SITES)
    for site in single.histograms:
        for one, other in zip(single.histograms[site].fields, together.histograms[site].fields, strict=True):
            assert np.array_equal(one, other), site


def test_every_value_of_every_batch_is_counted():
    found = at_once("tf_enhanced")
    for site in SITES:
        values = np.concatenate([batch[site] for batch in batches() if site in batch])
        histogram = found.histograms[site]
        assert histogram.counts.sum() == values.size
        assert (histogram.low, histogram.high) == (values.min(), values.max())


def test_data_without_texts_has_no_longest_one():
    assert at_once("min_max").longest == 0


@pytest.mark.parametrize("spec", [Spec(uint8, symmetric=False), Spec(int8), Spec(uint8)], ids=str)
@pytest.mark.parametrize("method", sorted(set(METHODS.values())))
def test_ranges_of_many_sites_are_those_of_each_alone(method: str, spec: Spec):
    found = at_once(method)
    wanted = [((site,), spec) for site in SITES] + [(SITES, spec), (("nowhere",), spec)]
    together = found.ranges_of(wanted)
    assert together[-1] is None
    for (sites, _), range_ in zip(wanted[:-1], together[:-1], strict=True):
        alone = found.ranges_of([(sites, spec)])[0]
        assert (alone.low, alone.high) == (range_.low, range_.high), sites
