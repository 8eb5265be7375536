"""The search for the range whose grid moves values least, against its definition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qsdk import Encoding, float8e4m3fn, int4, int8, uint8, uint16
from qsdk.core.numerics.dtypes import DTYPES
from qsdk.core.numerics.spec import PerChannel, Spec
from qsdk.core.ranges.estimators import _Counted, _each_cost, least_error, least_error_counted
from qsdk.core.ranges.histogram import histogram_of
from qsdk.core.ranges.ranges import Range, encoding_from_range


def by_definition(values, counts, found: Encoding, gamma: float) -> float:
    """AIMET's cost: squared error by count, that of values outside the grid counting gamma times."""
    moved = found.fake_quantize(values.astype(np.float32)).astype(np.float64)
    outside = (values < found.low) | (values > found.high)
    return float((counts * (moved - values) ** 2 * np.where(outside, gamma, 1)).sum())


def some_values(seed: int):
    rng = np.random.default_rng(seed)
    values = np.unique((rng.standard_t(3, size=300) + rng.integers(-3, 4)).astype(np.float32))
    return values, rng.integers(0, 5, values.size).astype(np.float64) + (np.arange(values.size) % 7 == 0), rng


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([int4, int8, uint8, DTYPES["uint4"], uint16, float8e4m3fn]),
    st.sampled_from([1.0, 3.0]),
)
def test_costs_are_what_they_are_by_definition(seed: int, dtype, gamma: float):
    values, counts, rng = some_values(seed)
    spec = Spec(dtype, symmetric=dtype.signed)
    shares = rng.uniform(0.05, 1.2, size=(4, 2))
    low, high = min(values.min(), 0), max(values.max(), 0)
    grids = [encoding_from_range(Range(np.float32([low * a]), np.float32([high * b])), spec) for a, b in shares]
    scale, zero_point = (np.stack([getattr(grid, name) for grid in grids]) for name in ("scale", "zero_point"))
    wanted = [by_definition(values.astype(np.float64), counts, grid, gamma) for grid in grids]
    each = _each_cost(values[None], counts[None], scale, zero_point, dtype, gamma)
    assert each[:, 0] == pytest.approx(wanted, rel=1e-3, abs=1e-9 * wanted[0])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([int4, int8, uint8, DTYPES["uint4"]]), st.sampled_from([1.0, 3.0]))
def test_counted_costs_are_what_they_are_by_definition(seed: int, dtype, gamma: float):
    """Every candidate by itself: of several, those that cannot be the best are not looked up."""
    values, counts, rng = some_values(seed)
    histogram = histogram_of(np.repeat(values, counts.astype(int))[None], bins=int(rng.integers(64, 2048)))
    centers = histogram.centers[0].astype(np.float32)
    spec = Spec(dtype, symmetric=dtype.signed)
    low, high = min(values.min(), 0), max(values.max(), 0)
    shares = rng.uniform(0.05, 1.2, size=(12, 2))
    grids = [encoding_from_range(Range(np.float32([low * a]), np.float32([high * b])), spec) for a, b in shares]
    wanted = [by_definition(centers.astype(np.float64), histogram.counts[0], grid, gamma) for grid in grids]
    counted = _Counted(histogram)
    costs = [counted.cost(grid.scale, grid.zero_point, dtype, gamma)[0] for grid in grids]
    assert costs == pytest.approx(wanted, rel=1e-4, abs=1e-9 * max(wanted))
    together = counted.cost(
        *(np.concatenate([getattr(g, n) for g in grids]) for n in ("scale", "zero_point")), dtype, gamma
    )
    assert together.argmin() == np.argmin(costs)
    np.testing.assert_allclose(together[together < np.inf], np.array(costs)[together < np.inf], rtol=1e-9)


@pytest.mark.parametrize("gamma", [1.0, 3.0])
@pytest.mark.parametrize("spec", [Spec(int4, PerChannel(0)), Spec(uint8, PerChannel(0), symmetric=False)], ids=str)
def test_counted_values_lead_where_the_values_themselves_do(spec: Spec, gamma: float):
    """On values that are the middles of their bins both searches look at the same costs."""
    rng = np.random.default_rng(2)
    values = (np.round(rng.standard_t(3, size=(3, 1500)) * 80).clip(-900, 900) + 0.5).astype(np.float32)
    values[:, :2] = [-900, 900]  # the bins are 1 wide
    histogram = histogram_of(values)
    assert histogram.width.tolist() == [1, 1, 1]
    counted = least_error_counted(histogram, spec, gamma)
    each = least_error(values, spec, gamma)
    assert counted.low == pytest.approx(each.low, rel=0.02)
    assert counted.high == pytest.approx(each.high, rel=0.02)


def test_a_group_of_one_value_keeps_it():
    for value in (-2.0, 0.0, 3.0):
        found = least_error_counted(histogram_of(np.full((1, 4), value, np.float32)), Spec(uint8, symmetric=False), 3.0)
        assert (found.low[0], found.high[0]) == (min(value, 0), max(value, 0))
