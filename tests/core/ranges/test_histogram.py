import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qsdk import CalibrationError
from qsdk.core.ranges.histogram import (
    SAMPLES,
    STEPS,
    Histogram,
    histogram_of,
    histogram_of_samples,
    percentiles,
    sample_step,
)
from qsdk.core.ranges.ranges import Range

#: of the samples of two batches; the second ones move some bins only
SIZES = ((500, 70, 9), (100, 900, 9))


def hist(values, bins=2048, **options):
    return histogram_of(np.atleast_2d(np.asarray(values, np.float32)), bins=bins, **options)


def trimmed(histogram):
    """Edges and counts of one group, without the empty bins at the end."""
    used = int(np.flatnonzero(histogram.counts[0]).max()) + 1
    return histogram.edges[0, : used + 1].tolist(), histogram.counts[0, :used].tolist()


def same(left, right):
    return all(
        np.array_equal(getattr(left, name), getattr(right, name))
        for name in ("exponent", "first", "counts", "low", "high")
    )


def test_merging_histograms_doubles_the_width_of_bins():
    first = hist([2, 3.5, 4.2, 5], bins=3)
    assert trimmed(first) == ([2, 3, 4, 5], [1, 1, 2])
    assert trimmed(first.merge(hist([5.3, 6.4, 7, 8], bins=3))) == ([2, 4, 6, 8], [2, 3, 3])


def test_merged_histograms_count_what_one_pass_would_count():
    """AIMET's example, whose bins of 15 put one of the 202 values into a neighbour; aligned bins move none."""
    small = np.arange(-50, 51)
    merged, together = hist(small, bins=10).merge(hist(1.5 * small, bins=10)), hist([*small, *(1.5 * small)], bins=10)
    assert merged.width.tolist() == [16.0]
    assert trimmed(merged) == trimmed(together)
    wanted = [10, 15, 25, 25, 25, 25, 25, 26, 15, 11]
    edges, counts = trimmed(merged)
    assert sum(counts) == sum(wanted)
    below = np.interp(np.arange(-60, 75, 15), edges, np.concatenate([[0], np.cumsum(counts)]))
    assert np.abs(below - np.cumsum(wanted)[:-1]).max() <= 3  # of a bin's 25


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.sampled_from([8, 100, 2048]))
def test_the_order_of_merging_does_not_matter(seed: int, bins: int):
    rng = np.random.default_rng(seed)
    batches = [
        (rng.normal(size=(3, rng.integers(1, 40))) * 10.0 ** rng.integers(-6, 6) + rng.normal() * 100).round(
            rng.integers(0, 9)
        )
        for _ in range(5)
    ]
    parts = [hist(batch, bins) for batch in batches]
    left = parts[0]
    for part in parts[1:]:
        left = left.merge(part)
    order = rng.permutation(5)
    right = parts[order[0]]
    for index in order[1:]:
        right = right.merge(parts[index])
    assert same(left, right)
    tree = parts[3].merge(parts[0]).merge(parts[4].merge(parts[1].merge(parts[2])))
    assert same(left, tree)


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.sampled_from([8, 100, 2048]))
def test_every_value_lies_in_its_bin(seed: int, bins: int):
    rng = np.random.default_rng(seed)
    values = (rng.standard_t(2, size=500) * 10.0 ** rng.integers(-6, 6) + rng.integers(-3, 4) * 50).astype(np.float32)
    values = values.round(int(rng.integers(0, 9)))
    found = hist(values, bins)
    edges, counts = found.edges[0], found.counts[0]
    assert counts.sum() == 500
    assert edges[0] <= values.min()
    assert edges[-1] >= values.max()
    last = np.flatnonzero(counts).max()
    for index in np.flatnonzero(counts):
        inside = (values >= edges[index]) & (
            (values < edges[index + 1]) | (index == last) & (values <= edges[last + 1])
        )
        assert counts[index] == inside.sum()
    # at least half of the bins are in use, unless the values are too near to each other for float32
    constant = values.min() == values.max()
    assert last + 1 >= bins / 2 - 1 or found.width[0] <= np.abs(values).max() * 2.0**-22 or constant


def test_histograms_of_channels_do_not_mix():
    rng = np.random.default_rng(1)
    batches = [rng.normal(size=(6, 3, 5)).astype(np.float32) * [[[1], [2], [30]]] for _ in range(2)]
    rows = [np.moveaxis(batch, 1, 0).reshape(3, -1) for batch in batches]
    together = hist(rows[0]).merge(hist(rows[1]))
    for channel in range(3):
        alone = hist(rows[0][channel]).merge(hist(rows[1][channel]))
        assert np.array_equal(together.counts[channel], alone.counts[0])
        assert np.array_equal(together.edges[channel], alone.edges[0])


def test_the_split_into_batches_moves_a_range_by_at_most_a_bin():
    values = np.random.default_rng(2).normal(size=1000).astype(np.float32)
    whole = hist(values)
    for pieces in (2, 5):
        parts = [hist(part) for part in np.split(values, pieces)]
        merged = parts[0]
        for part in parts[1:]:
            merged = merged.merge(part)
        assert (merged.low, merged.high) == (whole.low, whole.high)
        assert np.abs(np.cumsum(merged.counts) - np.cumsum(whole.counts)).max() <= 1


@pytest.mark.parametrize("constant", [0.0, 3.0, -1e-6, 1e-44, 3e38])
def test_a_constant_is_counted_and_grows(constant: float):
    found = hist([constant] * 4)
    assert found.counts.sum() == 4
    assert np.flatnonzero(found.counts[0]).tolist() == [0]
    assert found.edges[0, 0] <= np.float32(constant) <= found.edges[0, 1]
    grown = found.merge(hist([-1.0, 1.0]))
    assert grown.counts.sum() == 6
    assert grown.width[0] == max(2.0**-10, found.width[0]) or constant == 3e38 or constant == 3.0


def test_zeros_that_come_first_do_not_cost_resolution():
    zeros, small = hist([0.0]), hist([0.0, 1e-5])
    assert np.array_equal(zeros.merge(small).width, small.width)
    assert zeros.merge(small).counts[0, :2].tolist() == [1, 1]  # the first one, where 0 is its largest value


@pytest.mark.parametrize("bins", [10, 500, 2048])
def test_percentiles_of_a_thousand_values(bins: int):
    found = hist(np.arange(1001), bins)
    assert percentiles(found, 100).tolist() == [1000]
    assert percentiles(found, 0).tolist() == [0]
    assert percentiles(found, 99) == pytest.approx([990], abs=1)
    if bins == 500:
        assert percentiles(found, 99).tolist() == [990]


@pytest.mark.parametrize("bins", [10, 11, 50, 100, 300, 999, 1001, 2048])
def test_percentiles_are_within_one_value(bins: int):
    """AIMET gives the left edge of the bin: 900 with ten bins."""
    assert percentiles(hist(np.arange(1001), bins), 99.9) == pytest.approx([999], abs=1)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.sampled_from([50.0, 90.0, 99.0, 99.99, 100.0]))
def test_percentiles_are_within_one_bin_of_the_exact_ones(seed: int, percent: float):
    rng = np.random.default_rng(seed)
    values = rng.standard_t(3, size=(2, int(rng.integers(1, 3000)))).astype(np.float32)
    found = hist(values)
    exact = (
        np.percentile(values, percent, axis=1, method="lower"),
        np.percentile(values, percent, axis=1, method="higher"),
    )
    got = percentiles(found, percent)
    assert (got >= exact[0] - found.width).all()
    assert (got <= exact[1] + found.width).all()


def test_a_sample_stands_for_all_and_the_extremes_are_kept():
    values = np.arange(1000, dtype=np.float32)
    found = histogram_of_samples([values[::5]], [5], Range(np.float32([0]), np.float32([999])))
    assert (found.low.tolist(), found.high.tolist()) == ([0], [999])
    assert found.counts.sum() == 1000 + 2
    assert percentiles(found, 50) == pytest.approx([500], abs=5)


def test_samples_of_several_tensors_and_their_merging_are_those_of_each_alone():
    rng = np.random.default_rng(0)
    batches = [[rng.normal(size=n).astype(np.float32) * 4.0**i for i, n in enumerate(sizes)] for sizes in SIZES]

    def together(parts):
        ends = Range(np.stack([part.min() for part in parts]), np.stack([part.max() for part in parts]))
        return histogram_of_samples(parts, [1] * len(parts), ends)

    merged = together(batches[0]).merge(together(batches[1]))
    for group, parts in zip(merged.groups(), zip(*batches, strict=True), strict=True):
        alone = histogram_of(parts[0][None]).merge(histogram_of(parts[1][None]))
        assert [field.tolist() for field in group.fields] == [field.tolist() for field in alone.fields]
        assert trimmed(group) == trimmed(histogram_of(np.concatenate(parts)[None]))
    assert np.array_equal(Histogram.stack(merged.groups()).counts, merged.counts)


#: values on edges of bins, constants and samples: where bins grow, and where the largest value moves a bin down
GROWING = [
    np.linspace(0, 1, 300, dtype=np.float32),
    np.full(40, 6, np.float32),
    np.float32([-2, 0, 0, 4, 8]),
    np.arange(-1000, 1001, dtype=np.float32) / 4,
    np.zeros(7, np.float32),
]


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(len(GROWING))), st.sampled_from([1, 5]), st.sampled_from([16, 64, 2048]))
def test_samples_that_are_added_are_those_that_are_merged(order: list[int], step: int, bins: int):
    def counted(number: int) -> Histogram:
        return histogram_of_samples(*as_samples(number), bins=bins)

    def as_samples(number: int) -> tuple[list[np.ndarray], list[int], Range]:
        x = GROWING[number]
        parts = [x, x * np.float32(1.7)]
        ends = Range(np.stack([part.min() for part in parts]), np.stack([part.max() for part in parts]))
        return [part[::step] for part in parts], [step, step], ends

    added = merged = counted(order[0])
    added = Histogram(*(field.copy() for field in added.fields))
    for number in order[1:]:
        added = added.add_samples(*as_samples(number))
        merged = merged.merge(counted(number))
    for one, other in zip(added.fields, merged.fields, strict=True):
        assert np.array_equal(one, other)


def test_a_step_takes_a_bounded_number_and_never_walks_along_a_column():
    assert sample_step(SAMPLES) == 1
    assert sample_step(SAMPLES + 1) == 3
    for size in (10**5, 10**6, 10**7, 10**8):
        assert SAMPLES / 2.6 < size / sample_step(size) <= SAMPLES
    assert sample_step(10**12) == STEPS[-1]
    for step in STEPS[1:]:
        assert all(step % factor for factor in range(2, int(step**0.5) + 1))


def test_what_does_not_merge_says_so():
    with pytest.raises(CalibrationError, match=r"shapes \(1, 8\) and \(1, 16\) do not merge"):
        hist([1.0], 8).merge(hist([1.0], 16))
    with pytest.raises(CalibrationError, match="no histogram of an empty tensor"):
        hist(np.zeros((1, 0)))
