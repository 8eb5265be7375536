"""Fixed point between quantizers: every operation is within its stated error, exact where it says so."""

import math
from fractions import Fraction

import numpy as np
import pytest
from exact_integer import integers_of, require_near, surroundings
from fixed_point_programs import ALL_FUNCTIONS, CASES
from hypothesis import example, given, settings
from hypothesis import strategies as st
from onnx import helper

from onnx_backend.integer.fixed_point import fixed_arithmetic, newton, to_fixed
from onnx_backend.integer.fixed_point.curves import CURVES, bent
from onnx_backend.integer.ir.values import Constant, FixedPoint, Linear, Lookup, Refused, Term
from onnx_backend.integer.lowering.nonlinear.wide_forms import wide_matmul


def spread_out(lo, hi, count=60, seed=0):
    """Integers over a range: its ends, powers of two and their neighbours, and random ones of every size."""
    rng = np.random.default_rng(seed)
    edges = [sign * (1 << k) + d for k in range(63) for d in (-1, 0, 1) for sign in (1, -1)]
    drawn = [int(rng.integers(0, 1 << 62)) >> int(rng.integers(0, 62)) for _ in range(count)]
    values = [lo, hi, lo + 1, hi - 1, 0, 1, *edges, *drawn, *(-v for v in drawn)]
    return np.array(sorted({min(max(v, lo), hi) for v in values}), np.int64)


# --- integer methods -------------------------------------------------------------------------------------------------


def test_the_integer_root_is_the_floor_of_the_root():
    rng = np.random.default_rng(0)
    bases = [1 << 30, (1 << 30) + 1, (1 << 31) - 1, *(int(v) for v in rng.integers(1 << 30, 1 << 31, 4000))]
    values = {min(b * b + d, (1 << 62) - 1) for b in bases for d in (-1, 0, 1, b, 2 * b)}
    values = np.array(sorted(v for v in values if v >= 1 << 60), np.int64)
    _found, integers = integers_of(
        lambda ctx, x: FixedPoint(newton.integer_root(ctx, x.name), x.scale, 0, 1 << 31), values
    )
    assert integers.tolist() == [math.isqrt(int(v)) for v in values]


RANGES = [(1, 1), (1, 255), (1, (1 << 62) - 1), (100, 1 << 40), (1 << 33, 1 << 45), ((1 << 61) - 5, 1 << 61)]


@pytest.mark.parametrize("bounds", [*RANGES, (0, 0), (0, 7), (0, (1 << 61) - 1)])
def test_the_square_root_keeps_its_digits_over_the_whole_range(bounds):
    values = spread_out(*bounds)
    found, integers = integers_of(newton.square_root, values, bounds=[bounds], scales=[0.37])
    require_near(found, integers, np.sqrt(values * 0.37))
    positive = values > 0
    share = np.abs(integers * found.scale / np.sqrt(np.maximum(values, 1) * 0.37) - 1)[positive]
    assert not share.size or share.max() < 2.0**-29
    assert np.all(integers[~positive] == 0)


@pytest.mark.parametrize("bounds", RANGES)
@pytest.mark.parametrize("method", [newton.reciprocal, newton.reciprocal_root])
def test_reciprocals_keep_their_digits_over_the_whole_range(bounds, method):
    values = spread_out(*bounds)
    found, integers = integers_of(method, values, bounds=[bounds], scales=[0.37])
    power = 1.0 if method is newton.reciprocal else 0.5
    exact = (values * 0.37) ** -power
    require_near(found, integers, exact)
    if bounds[1] / bounds[0] < 1 << 28 or method is newton.reciprocal_root:
        assert np.abs(integers * found.scale / exact - 1).max() < 2.0**-27


@pytest.mark.parametrize("bounds", [(-255, -1), (-(1 << 50), -(1 << 30))])
def test_the_reciprocal_of_what_is_negative(bounds):
    values = spread_out(*bounds)
    found, integers = integers_of(newton.reciprocal, values, bounds=[bounds], scales=[0.37])
    require_near(found, integers, 1 / (values * 0.37))


@pytest.mark.parametrize("bounds", RANGES)
def test_the_logarithm_is_near_everywhere(bounds):
    values = spread_out(*bounds)
    found, integers = integers_of(newton.logarithm, values, bounds=[bounds], scales=[0.37])
    require_near(found, integers, np.log(values * 0.37))
    assert found.error * found.scale < 2.0**-25


@pytest.mark.parametrize(
    ("method", "bounds", "message"),
    [
        (newton.square_root, (-1, 5), "can be negative"),
        (newton.reciprocal, (0, 5), "can be 0"),
        (newton.reciprocal, (-2, 5), "can be 0"),
        (newton.reciprocal_root, (0, 5), "can be negative or 0"),
        (newton.logarithm, (0, 5), "can be negative or 0"),
    ],
)
def test_outside_its_domain_a_method_refuses(method, bounds, message):
    with pytest.raises(Refused, match=message):
        method(surroundings(x=(2,)), FixedPoint("x", np.ones(()), *bounds))


def test_an_error_of_the_input_counts():
    for method in (newton.square_root, newton.reciprocal, newton.reciprocal_root, newton.logarithm):
        exact = FixedPoint("x", np.ones(()), 1000, 2000)
        rough = FixedPoint("x", np.ones(()), 1000, 2000, error=10.0)
        found = [method(surroundings(x=(2,)), value) for value in (exact, rough)]
        moved = [f.spread * float(f.scale) for f in found]
        steepest = {
            "square_root": 0.5 / 1000**0.5,
            "reciprocal": 1e-6,
            "reciprocal_root": 0.5e-4 / 10,
            "logarithm": 1e-3,
        }
        assert moved[1] - moved[0] >= 9.9 * steepest[method.__name__] * 0.5
    with pytest.raises(Refused, match="within its error"):
        newton.reciprocal(surroundings(x=(2,)), FixedPoint("x", np.ones(()), 1, 2000, error=10.0))


# --- arithmetic ------------------------------------------------------------------------------------------------------

BITS = st.integers(1, 61)
SCALES = st.floats(1e-6, 1e4)


@settings(max_examples=40)
@given(BITS, BITS, SCALES, SCALES, st.booleans(), st.integers(0, 9))
@example(first=61, second=61, scale=1.0, other=1.0, negative=False, seed=0)
@example(first=1, second=59, scale=1.0, other=8.0, negative=True, seed=0)
def test_sums_and_products_are_within_their_error(first, second, scale, other, negative, seed):
    arrays = [spread_out(-(1 << first), 1 << first, 20, seed), spread_out(-(1 << second), 1 << second, 20, seed + 1)]
    arrays = [np.random.default_rng(seed).permutation(a)[:24] for a in arrays]
    size = min(a.size for a in arrays)
    arrays = [a[:size] for a in arrays]
    bounds = [(-(1 << first), 1 << first), (-(1 << second), 1 << second)]
    scales = [scale, -other if negative else other]
    reals = [np.array([Fraction(int(v)) * Fraction(s) for v in a]) for a, s in zip(arrays, scales, strict=True)]
    for function, exact in (
        (fixed_arithmetic.add, reals[0] + reals[1]),
        (fixed_arithmetic.multiply, reals[0] * reals[1]),
    ):
        found, integers = integers_of(function, *arrays, bounds=bounds, scales=scales)
        real = np.array([Fraction(int(v)) * Fraction(float(found.scale)) for v in integers])
        allowed = found.spread * abs(float(found.scale))
        # a product's scale is a product in float64, rounded once
        assert np.all(np.abs(real - exact) <= Fraction(allowed) + Fraction(2) ** -50 * np.abs(exact))
        whole = (
            scale * 2.0**first + other * 2.0**second
            if function is fixed_arithmetic.add
            else scale * other * 2.0 ** (first + second)
        )
        assert allowed <= 2.0**-20 * whole  # narrowing never costs more than it must


def test_small_sums_and_products_stay_int32_and_exact():
    arrays = [np.arange(-255, 256), np.arange(-255, 256)[::-1]]
    for function, exact in (
        (fixed_arithmetic.add, arrays[0] + arrays[1]),
        (fixed_arithmetic.multiply, arrays[0] * arrays[1]),
    ):
        found, integers = integers_of(function, *arrays, narrow=True)
        assert (found.narrow, found.error, found.relative) == (True, 0.0, 0.0)
        np.testing.assert_array_equal(integers, exact)


def test_a_scale_that_a_mean_has_is_a_whole_share_of_the_other():
    assert 0.1 / (0.1 / 11) < 11
    _found, integers = integers_of(fixed_arithmetic.add, np.arange(5), np.arange(5, 10), scales=[0.1 / 11, 0.1])
    np.testing.assert_array_equal(integers, np.arange(5) + 11 * np.arange(5, 10))


def test_the_errors_of_both_factors_count():
    exact, off = FixedPoint("x", np.ones(()), 0, 7), FixedPoint("z", np.ones(()), 0, 100, error=3.0)
    for sides in ((exact, off), (off, exact)):
        assert fixed_arithmetic.multiply(surroundings(x=(1,), z=(1,)), *sides).error >= 7 * 3.0


def test_a_square_is_known_not_to_be_negative():
    ctx = surroundings(x=(2,))
    value = FixedPoint("x", np.ones(()), -100, 50, narrow=True)
    found = fixed_arithmetic.multiply(ctx, value, value)
    assert (found.lo, found.hi) == (0, 10000)


@pytest.mark.parametrize("most", [1, 8, 30, 31, 40])
@pytest.mark.parametrize("bounds", [(-(1 << 61), 1 << 61), (0, 1 << 45), (-(1 << 45), -5)])
def test_narrowing_rounds_to_the_nearest(most, bounds):
    values = spread_out(*bounds)
    found, integers = integers_of(lambda ctx, x: fixed_arithmetic.narrow_to(ctx, x, most), values, bounds=[bounds])
    shift = max(max(abs(b) for b in bounds).bit_length() - most, 0)
    exact = [(int(v) + (1 << shift >> 1)) >> shift for v in values]
    assert integers.tolist() == exact
    assert found.narrow == (most <= 31)


def test_scales_per_channel_and_constants_become_integers():
    values = spread_out(-(1 << 20), 1 << 20)[:60].reshape(20, 3)
    scale, constant = np.array([0.5, 3.0, -0.001]), np.array([[0.25], [-7e3]] * 10)
    found, integers = integers_of(
        fixed_arithmetic.single_scale, values, bounds=[(-(1 << 20), 1 << 20)], scales=[scale], constants=[constant]
    )
    assert found.scale.ndim == 0
    require_near(found, integers, values * scale + constant)


def test_a_constant_that_leaves_no_room_costs_the_last_bits_only():
    values = spread_out(-(1 << 60), 1 << 60)
    found, integers = integers_of(fixed_arithmetic.single_scale, values, scales=[2.0**-60], constants=[0.3])
    real = values.astype(np.longdouble) * 2.0**-60 + 0.3
    assert np.abs(integers.astype(np.longdouble) * float(found.scale) - real).max() < 2.0**-55


def test_a_channel_of_a_tiny_scale_is_within_the_error():
    values = spread_out(-(1 << 30), 1 << 30)[:60].reshape(20, 3)
    scale = np.array([1.0, 3e-12, 0.0])
    found, integers = integers_of(fixed_arithmetic.single_scale, values, bounds=[(-(1 << 30), 1 << 30)], scales=[scale])
    require_near(found, integers, values * scale)


def test_a_scale_of_zero_forgets_the_integers():
    values = spread_out(-1000, 1000)
    found, integers = integers_of(fixed_arithmetic.single_scale, values, scales=[0.0], constants=[0.3])
    require_near(found, integers, np.full(values.shape, 0.3))
    found, integers = integers_of(fixed_arithmetic.add, values, values, scales=[0.0, 0.7])
    require_near(found, integers, values * 0.7)


@pytest.mark.parametrize("bound", [1e-15, 1e-9, 1e-3])
def test_a_bound_far_below_a_step_keeps_a_value_from_zero(bound):
    values = np.arange(256)
    found, integers = integers_of(lambda ctx, x: to_fixed.clip(ctx, x, bound, math.inf), values, scales=[1 / 255])
    require_near(found, integers, np.maximum(values / 255, bound))
    assert found.lo > 0
    assert found.hi < 1 << 62
    assert abs(integers[0] * found.scale / bound - 1) < 2.0**-5


def test_constants_of_some_channels_count_their_rounding():
    values = np.arange(6).reshape(3, 2)
    for constants in ([[0.1, 0.0], [0.2, 0.7]], [[0.2, 0.7], [0.1, 0.0]]):
        found, _ = integers_of(fixed_arithmetic.add, values, values, scales=[1.0, 1.0], constants=constants)
        exact = [sum(map(Fraction, pair)) for pair in zip(*constants, strict=True)]
        off = [abs(Fraction(float(c)) - x) for c, x in zip(found.constant, exact, strict=True)]
        assert 0 < max(off) <= Fraction(found.error) * Fraction(float(found.scale))


def test_the_error_of_a_product_is_that_of_both_matrices_at_once():
    node = helper.make_node("MatMul", ["x", "z"], ["y"])
    left = FixedPoint("x", np.asarray(1.0), 0, 4, error=3.0)
    right = FixedPoint("z", np.asarray(0.5), -5, 5, error=2.0)
    found = wide_matmul(surroundings(x=(2, 3), z=(3, 2)), node, (left, right))
    assert found.error >= 3 * ((4 + 3) * (5 + 2) - 4 * 5)
    assert found.error < 1.01 * 3 * ((4 + 3) * (5 + 2) - 4 * 5)


def test_a_small_epsilon_does_not_vanish():
    values = np.array([0, 1, 1 << 24])
    found, integers = integers_of(fixed_arithmetic.single_scale, values, scales=[1e-3], constants=[1e-12])
    require_near(found, integers, values * 1e-3 + 1e-12)
    assert found.lo > 0
    assert abs(integers[0] * found.scale / 1e-12 - 1) < 2.0**-6


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("reach", [1 << 8, 1 << 30, 1 << 61])
def test_sums_over_axes(keepdims, reach):
    values = np.random.default_rng(0).integers(-reach, reach, (4, 50, 6))
    found, integers = integers_of(
        lambda ctx, x: fixed_arithmetic.total(ctx, x, [1], 50, keepdims=keepdims),
        values,
        bounds=[(-reach, reach)],
        scales=[0.3],
    )
    exact = values.astype(np.longdouble).sum(1, keepdims=bool(keepdims)) * 0.3
    require_near(found, integers, exact)


@pytest.mark.parametrize("bounds", [(-0.1, 0.2), (-math.inf, 0.5), (0.0, math.inf), (5e9, 6e9), (-9.0, -8.0)])
@pytest.mark.parametrize("scale", [1e-9, -1e-9])
def test_clip(bounds, scale):
    values = spread_out(-(1 << 31), 1 << 40)
    found, integers = integers_of(
        lambda ctx, x: to_fixed.clip(ctx, x, *bounds), values, bounds=[(-(1 << 31), 1 << 40)], scales=[scale]
    )
    require_near(found, integers, np.clip(values * scale, *bounds))


def test_a_term_saturates_what_int32_cannot_hold():
    values = spread_out(-(1 << 50), 1 << 50)
    ctx = surroundings(x=values.shape)
    found = fixed_arithmetic.term(
        ctx, FixedPoint("x", np.asarray(2.0**-30), -(1 << 50), 1 << 50), (-10.0, 30.0), 2.0**-20
    )
    (one,) = found.terms
    assert -(1 << 31) < one.lo <= one.hi < 1 << 31
    assert float((one.lo - one.zero) * one.scale) == pytest.approx(-10.0, abs=1e-6)
    assert float((one.hi - one.zero) * one.scale) == pytest.approx(30.0, abs=1e-6)
    assert 0 < found.error <= 2.0**-24


# --- values of every kind --------------------------------------------------------------------------------------------


def test_tables_that_lie_on_a_grid_are_exact():
    squares = ((np.arange(256) - 119) * np.float32(0.031)).astype(np.float32) ** 2
    found = to_fixed.to_fixed(surroundings(c=(4,)), Lookup("c", squares, None))
    assert (found.lo, found.hi, found.error) == (0, 136**2, 0.0)
    assert found.relative < 2.0**-22
    rough = to_fixed.to_fixed(surroundings(c=(4,)), Lookup("c", np.exp(np.arange(256) / 20).astype(np.float32), None))
    assert rough.hi.bit_length() in (30, 31)
    assert rough.error == 0.5


def test_a_constant_keeps_the_integers_it_was_stored_with():
    found = to_fixed.to_fixed(surroundings(), Constant(np.float32([0.1, -0.2, 0.3])))
    assert (found.lo, found.hi) == (-2, 3)


def test_an_accumulator_is_taken_exactly():
    zero, lo, hi = (np.asarray(v, np.int64) for v in (7, -100, 100))
    term = Term("x", np.array([0.1, 0.2]), zero, lo, hi)
    found = to_fixed.to_fixed(surroundings(x=(2,)), Linear((term,), np.array([1.0, 2.0]), error=0.01))
    assert (found.lo, found.hi) == (-107, 93)
    assert found.error == pytest.approx(0.1)
    np.testing.assert_array_equal(found.constant, [1.0, 2.0])


# --- curves ----------------------------------------------------------------------------------------------------------


def curve_of(name, **attrs):
    return CURVES[name](attrs), lambda x: ALL_FUNCTIONS[name](x, attrs)


@pytest.mark.parametrize(("name", "attrs"), CASES)
def test_what_is_said_of_a_function_is_true(name, attrs):
    curve, function = curve_of(name, **attrs)
    for x in (np.linspace(0, 1.2 * curve.reach, 200001), np.linspace(-1.2 * curve.reach, 0, 200001)):
        h, y = x[1] - x[0], function(x)
        slope = np.diff(y) / h
        assert np.abs(slope).max() <= curve.slope * (1 + 1e-6)
        assert np.abs(np.diff(slope) / h).max() <= curve.bend * (1 + 1e-4) + 1e-5
    for side, line in ((np.linspace(curve.reach, 40), curve.right), (-np.linspace(curve.reach, 40), curve.left)):
        rest = function(side) - line * side
        assert np.ptp(rest) <= curve.tail


SPANS = [(-(1 << 20), 1 << 20), (-(1 << 27), 1 << 26), (-5, 7), (1 << 25, 1 << 26), (-(1 << 38), 1 << 38)]


@pytest.mark.spread(60)
@pytest.mark.parametrize("bounds", SPANS)
@pytest.mark.parametrize("scale", [3.7e-6, -3.7e-6])
@pytest.mark.parametrize(("name", "attrs"), CASES)
def test_curves_are_within_their_error(name, attrs, scale, bounds):
    curve, function = curve_of(name, **attrs)
    near = np.random.default_rng(0).integers(-(1 << 23), 1 << 23, 2000).clip(*bounds)
    values = np.unique(np.concatenate([spread_out(*bounds), np.linspace(*bounds, 999).astype(np.int64), near]))
    with np.errstate(all="ignore"):
        found, integers = integers_of(
            lambda ctx, x: bent(ctx, x, function, curve), values, bounds=[bounds], scales=[scale]
        )
        exact = function(values * scale)
    exact = np.where(np.abs(values * scale) > 100, _line(curve, values * scale, function), exact)
    require_near(found, integers, exact)
    assert found.error * abs(found.scale) < 2.0**-21 * max(1.0, curve.bend) * max(
        1.0, found.reach * abs(found.scale) / 64
    )


def _line(curve, x, function):
    ends = function(np.array([-60.0, 60.0]))
    return np.where(x > 0, curve.right * (x - 60) + ends[1], curve.left * (x + 60) + ends[0])
