from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qsdk import CalibrationError, ConfigError, float4e2m1, float8e4m3fn, int4, int8, int16, uint8, uint16
from qsdk.core.numerics.dtypes import DTYPES, dtype_named
from qsdk.core.numerics.spec import PerBlock, PerChannel, PerTensor, Spec
from qsdk.core.ranges.estimators import (
    METHODS,
    Estimator,
    estimator,
    grouped,
    moving_average,
    range_from_histogram,
    range_of_stored,
)
from qsdk.core.ranges.histogram import histogram_of
from qsdk.core.ranges.ranges import Range, encoding_from_range, range_of

ACTIVATION = Spec(uint8, symmetric=False)
SEARCHES = ("mse", "tf_enhanced", "entropy")


def from_histogram(values, spec, method, **options):
    rows = np.atleast_2d(np.asarray(values, np.float32))
    return range_from_histogram(histogram_of(rows), spec, estimator(method, **options))


def encoding(values, spec, method, **options):
    return encoding_from_range(from_histogram(values, spec, method, **options), spec)


def squared_error(values, found):
    return float(((found.fake_quantize(values) - values) ** 2).mean())


def samples(seed: int, size: int = 4000):
    rng = np.random.default_rng(seed)
    kinds = (rng.normal(size=size), rng.standard_t(2, size=size), rng.exponential(size=size), rng.uniform(-1, 3, size))
    return (kinds[seed % 4] * 10.0 ** rng.integers(-3, 4)).astype(np.float32)


# --- behaviours of the reference -------------------------------------------------------------------------------------


def test_percentile_of_a_thousand_values():
    values = np.arange(1001)
    assert from_histogram(values, ACTIVATION, "percentile", percentile=100).high.tolist() == [1000]
    for found in (encoding(values, ACTIVATION, "percentile", percentile=99),):
        assert found.low.tolist() == [0]
        assert found.high == pytest.approx([990], abs=1)
    stored = range_of_stored(values, Spec(uint8, symmetric=False), estimator("percentile", 99))
    assert (stored.low.tolist(), stored.high.tolist()) == ([10], [990])


def test_percentiles_are_interpolated():
    assert from_histogram(np.arange(1001), ACTIVATION, "percentile", percentile=99.9).high == pytest.approx(
        [999], abs=1
    )
    stored = range_of_stored(np.arange(1001), Spec(int8), estimator("percentile", 99.95))
    assert stored.high == pytest.approx([999.5])
    assert stored.low == pytest.approx([0.5])


def test_uniform_values_keep_their_range():
    values = np.arange(-127, 129)
    found = encoding(values, ACTIVATION, "sqnr")
    assert (found.low.tolist(), found.high.tolist()) == ([-127], [128])
    assert found.scale.tolist() == [1]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("method", ["tf_enhanced", "mse"])
@pytest.mark.parametrize("spec", [Spec(int4), Spec(DTYPES["uint4"], symmetric=False)], ids=["symmetric", "asymmetric"])
def test_searched_ranges_are_no_worse_than_min_max(seed: int, method: str, spec: Spec):
    values = samples(seed)
    least = squared_error(values, encoding(values, spec, "min_max"))
    assert squared_error(values, encoding(values, spec, method)) <= 1.01 * least
    stored = encoding_from_range(range_of_stored(values[:2000], spec, estimator(method)), spec)
    full = encoding_from_range(range_of(values[:2000], spec), spec)
    assert squared_error(values[:2000], stored) <= 1.000001 * squared_error(values[:2000], full)


@pytest.mark.parametrize("method", [*SEARCHES, "percentile"])
@pytest.mark.parametrize("spec", [Spec(int4, PerChannel(1)), Spec(uint8, PerChannel(1), symmetric=False)], ids=str)
def test_channels_are_estimated_separately(method: str, spec: Spec):
    """Also across the edge between few values, taken as they are, and many, which are counted in bins."""
    rng = np.random.default_rng(1)
    for count in (40, 900):
        batches = [(rng.normal(size=(count, 3, 5)) * [[[1], [2], [30]]]).astype(np.float32) for _ in range(2)]
        whole = np.concatenate(batches)
        together = range_of_stored(whole, spec, estimator(method))
        counted = [histogram_of(np.moveaxis(batch, 1, 0).reshape(3, -1)) for batch in batches]
        streamed = range_from_histogram(counted[0].merge(counted[1]), spec, estimator(method))
        assert together.low.shape == streamed.low.shape == (3,)
        for channel in range(3):
            alone = range_of_stored(whole[:, channel], Spec(spec.dtype, symmetric=spec.symmetric), estimator(method))
            assert together.low[channel] == alone.low[0]
            assert together.high[channel] == alone.high[0]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("spec", [Spec(int4), Spec(uint8, symmetric=False)], ids=["symmetric", "asymmetric"])
def test_a_larger_gamma_gives_no_narrower_range(seed: int, spec: Spec):
    """`mse` has gamma 1, `tf_enhanced` 3."""
    values = samples(seed)
    narrow, wide = (encoding(values, spec, method) for method in ("mse", "tf_enhanced"))
    assert wide.high[0] - wide.low[0] >= narrow.high[0] - narrow.low[0]


def test_on_heavy_tails_a_larger_gamma_gives_a_wider_range():
    values = np.random.default_rng(0).standard_t(2, size=4000)
    assert encoding(values, Spec(int4), "tf_enhanced").scale > encoding(values, Spec(int4), "mse").scale


@pytest.mark.parametrize("pieces", [1, 2, 5])
@pytest.mark.parametrize("method", sorted(set(METHODS.values()) - {"moving_average"}))
def test_the_split_into_batches_does_not_change_a_range(pieces: int, method: str):
    values = samples(1, 5000)
    whole = histogram_of(values[None])
    parts = [histogram_of(part[None]) for part in np.split(values, pieces)]
    merged = parts[0]
    for part in parts[1:]:
        merged = merged.merge(part)
    chosen = estimator(method)
    one, many = (range_from_histogram(found, ACTIVATION, chosen) for found in (whole, merged))
    bin_width = float(whole.width[0])
    assert abs(one.low - many.low) <= bin_width
    assert abs(one.high - many.high) <= bin_width
    if method == "min_max":
        assert (one.low, one.high) == (many.low, many.high)


# --- what each is for -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["mse", "tf_enhanced", "entropy", "percentile"])
@pytest.mark.parametrize("sign", [1, -1])
def test_an_outlier_is_cut_off(method: str, sign: int):
    values = np.random.default_rng(0).exponential(size=200_000).astype(np.float32) * sign
    values[17] = 60 * sign
    spec = Spec(DTYPES["uint4"], symmetric=False)
    found, full = encoding(values, spec, method), encoding(values, spec, "min_max")
    assert found.scale[0] < 0.7 * full.scale[0]
    assert full.scale[0] == 4


@pytest.mark.parametrize("method", SEARCHES)
@pytest.mark.parametrize("seed", range(4))
def test_mirrored_values_have_the_mirrored_range(method: str, seed: int):
    rng = np.random.default_rng(seed)
    values = (rng.exponential(size=5000) - 0.3 * rng.random()).astype(np.float32)
    spec = Spec(dtype_named("int4_strict"))
    found, mirrored = from_histogram(values, spec, method), from_histogram(-values, spec, method)
    assert_ranges_equal(found, Range(-mirrored.high, -mirrored.low))


def assert_ranges_equal(found: Range, wanted: Range) -> None:
    np.testing.assert_array_equal([found.low, found.high], [wanted.low, wanted.high])


def exhaustive(values, spec):
    """The smallest squared error of 400 symmetric ranges."""
    full = range_of(values, spec)
    shares = np.arange(1, 401) / 400
    return min(squared_error(values, encoding_from_range(Range(full.low * s, full.high * s), spec)) for s in shares)


@pytest.mark.parametrize("dtype", [DTYPES["int3"], int4, int8], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_mse_finds_what_an_exhaustive_search_finds(dtype, seed: int):
    values = samples(seed)[:1500]
    found = encoding_from_range(range_of_stored(values, Spec(dtype), estimator("mse")), Spec(dtype))
    assert squared_error(values, found) <= 1.02 * exhaustive(values, Spec(dtype))
    assert squared_error(values, encoding(values, Spec(dtype), "mse")) <= 1.03 * exhaustive(values, Spec(dtype))


def test_both_ends_are_searched():
    rng = np.random.default_rng(3)
    values = np.concatenate([rng.uniform(-1, 4, 50_000), [-8.0]]).astype(np.float32)
    found = encoding(values, Spec(DTYPES["uint4"], symmetric=False), "mse")
    assert -2 < found.low[0] < -0.9
    assert 3.5 < found.high[0] < 4.5


@pytest.mark.parametrize("dtype", [uint16, int16], ids=str)
@pytest.mark.parametrize("method", ["mse", "tf_enhanced", "entropy"])
def test_sixteen_bits_cut_off_next_to_nothing(dtype, method: str):
    values = np.random.default_rng(5).normal(size=50_000).astype(np.float32)
    spec = Spec(dtype, symmetric=dtype.signed)
    full, found = encoding(values, spec, "min_max"), encoding(values, spec, method)
    assert found.scale[0] <= full.scale[0] * 1.001
    assert found.scale[0] >= full.scale[0] * 0.8
    assert squared_error(values, found) <= 1.2 * squared_error(values, full)


@pytest.mark.parametrize("method", SEARCHES)
@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(0), PerBlock(1, 16)], ids=str)
def test_minifloats_are_searched_too(method: str, granularity):
    values = samples(1, 1024).reshape(16, 64)
    spec = Spec(float8e4m3fn, granularity)
    found = encoding_from_range(range_of_stored(values, spec, estimator(method)), spec)
    full = encoding_from_range(range_of(values, spec), spec)
    assert found.scale.shape == full.scale.shape
    assert (found.scale <= full.scale).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(sorted(METHODS)))
def test_a_range_lies_inside_what_was_seen(seed: int, method: str):
    rng = np.random.default_rng(seed)
    values = (rng.standard_t(2, size=(3, int(rng.integers(1, 200)))) * 10.0 ** rng.integers(-4, 5)).astype(np.float32)
    values += np.float32(rng.integers(-2, 3))
    spec = Spec(uint8, PerChannel(0), symmetric=bool(rng.integers(2)))
    full = range_of(values, spec)
    low, high = np.minimum(full.low, 0), np.maximum(full.high, 0)
    for found in (
        range_from_histogram(histogram_of(values), spec, estimator(method)),
        range_of_stored(values, spec, estimator(method)),
    ):
        assert (found.low >= low).all()
        assert (found.high <= high).all()
        assert (found.low <= found.high).all()
        assert encoding_from_range(found, spec).scale.shape == (3,)


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("value", [0.0, 3.0, -3.0])
def test_constants_have_their_exact_range(method: str, value: float):
    for values in (np.full(50, value, np.float32), np.full(5000, value, np.float32)):
        stored = range_of_stored(values, ACTIVATION, estimator(method))
        counted = from_histogram(values, ACTIVATION, method)
        for found in (stored, counted):
            ends = encoding_from_range(found, ACTIVATION)
            assert min(0.0, value) == pytest.approx(float(ends.low[0]), abs=1e-4)
            assert max(0.0, value) == pytest.approx(float(ends.high[0]), abs=1e-4)


# --- blocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", sorted(set(METHODS.values())))
@pytest.mark.parametrize(("axis", "size"), [(0, 3), (1, 4), (-1, 4), (2, 5), (1, 6), (1, 1)])
def test_blocks_are_estimated_apart(method: str, axis: int, size: int):
    values = samples(1, 4 * 6 * 7).reshape(4, 6, 7)
    found = range_of_stored(values, Spec(int4, PerBlock(axis, size)), estimator(method))
    moved, lows = np.moveaxis(values, axis, -1), np.moveaxis(found.low, axis, -1)
    highs = np.moveaxis(found.high, axis, -1)
    for index in np.ndindex(*moved.shape[:-1]):
        for block in range(lows.shape[-1]):
            members = moved[index][block * size : (block + 1) * size]
            alone = range_of_stored(members, Spec(int4), estimator(method))
            assert (lows[*index, block], highs[*index, block]) == (alone.low[0], alone.high[0])


def test_a_short_block_counts_only_its_own_values():
    values, lengths = grouped(np.arange(1, 11, dtype=np.float32).reshape(2, 5), PerBlock(1, 4))
    assert values.tolist() == [[1, 2, 3, 4], [5, 5, 5, 5], [6, 7, 8, 9], [10, 10, 10, 10]]
    assert lengths.tolist() == [4, 1, 4, 1]
    assert grouped(values, PerBlock(0, 3))[1].tolist() == [3, 3, 3, 3, 1, 1, 1, 1]


# --- names and errors -------------------------------------------------------------------------------------------------


def test_names():
    assert estimator("post_training_tf") == Estimator("min_max")
    assert estimator("sqnr") == estimator("post_training_tf_enhanced") == Estimator("tf_enhanced")
    assert estimator("percentile").percentile == estimator("post_training_percentile").percentile == 99.99
    assert estimator("post_training_percentile", 99.0) == estimator("percentile", 99.0)
    with pytest.raises(ConfigError, match="unknown calibration method 'magic'; choose one of min_max, moving_average"):
        estimator("magic")
    for wrong in (50, 100.1, 0.999, float("nan")):
        with pytest.raises(ConfigError, match=r"percentile=.* is outside 50..100; give the share to keep"):
            estimator("percentile", wrong)


def test_moving_averages():
    first = Range(np.float32([-1]), np.float32([1]))
    assert moving_average(None, first) == first
    second = moving_average(first, Range(np.float32([-2]), np.float32([11])))
    assert (second.low.tolist(), second.high.tolist()) == (pytest.approx([-1.1]), pytest.approx([2.0]))


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_stored_tensor_must_be_finite(method: str):
    with pytest.raises(CalibrationError, match="the data holds NaN or an infinity"):
        range_of_stored([1.0, np.nan], Spec(int8), estimator(method))
    with pytest.raises(CalibrationError, match="no range in an empty tensor"):
        range_of_stored([], Spec(int8), estimator(method))


@given(st.integers(0, 10**6))
@settings(max_examples=20)
def test_four_over_six_never_has_the_larger_error_and_often_the_smaller(seed: int):
    """Cook et al. 2025, Four Over Six: scales are not rounded here, so that the choice is exact."""
    x = np.random.default_rng(seed).normal(size=(8, 64)).astype(np.float32)
    spec = Spec(float4e2m1, PerBlock(1, 16))
    found = [
        encoding_from_range(range_of_stored(x, spec, estimator(method)), spec)
        for method in ("min_max", "four_over_six")
    ]
    six, chosen = (((one.fake_quantize(x) - x) ** 2).reshape(8, 4, 16).sum(2) for one in found)
    ratio = found[1].scale / found[0].scale
    assert (np.isclose(ratio, 1) | np.isclose(ratio, 1.5)).all()
    assert (chosen <= six * (1 + 1e-5)).all()
    four = replace(found[0], scale=found[0].scale * np.float32(1.5))
    alternative = ((four.fake_quantize(x) - x) ** 2).reshape(8, 4, 16).sum(2)
    assert (chosen <= alternative * (1 + 1e-5)).all()
    assert np.isclose(ratio, 1.5).any()


def test_four_over_six_is_min_max_for_other_dtypes():
    x = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    for spec in (Spec(int4, PerBlock(1, 16)), Spec(int8, PerChannel(0))):
        plain, found = (range_of_stored(x, spec, estimator(name)) for name in ("min_max", "four_over_six"))
        assert found.same(plain)
