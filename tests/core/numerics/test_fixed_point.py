"""Fixed point against Python's unbounded integers, on worst cases chosen by hand and on random ones."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from integer_comparison import exact

from qsdk import ConfigError
from qsdk.core.numerics.fixed_point import fixed_point, round_shift, tie_in_range, ties_possible

MANTISSAS = [2**30, 2**30 + 1, 2**30 + 2, 3 * 2**29, 2**31 - 1, 2**31 - 2, 1518500250, 1234567891]
EXTREMES = [-(2**31), -(2**31) + 1, 2**31 - 1, 2**31 - 2, -1, 0, 1, 3, -3, 255, -255, 2**24 + 1, -(2**24) - 1, 2**30]


def worst_cases(shift: int, mantissa: int) -> list[int]:
    """Extremes, and the accumulators that tie (odd and even results, both signs) with their neighbours."""
    factors = shift - 1 - ((mantissa & -mantissa).bit_length() - 1)
    ties = [] if factors < 0 else [sign * odd << factors for odd in (1, 3, 5, 7) for sign in (1, -1)]
    near = [tie + step for tie in ties for step in (-1, 0, 1)]
    return [value for value in EXTREMES + near if -(2**31) <= value < 2**31]


@pytest.mark.parametrize("rounding", ["half_even", "half_up", "half_away", "gemmlowp"])
def test_a_product_is_rounded_as_big_integers_are_on_every_shift_and_worst_case(rounding):
    ties = 0
    for shift in range(1, 63):
        for mantissa in MANTISSAS:
            accumulators = worst_cases(shift, mantissa)
            expected = [exact(a * mantissa, shift, rounding) for a in accumulators]
            found = round_shift(np.array(accumulators) * mantissa, shift, rounding=rounding)
            assert found.tolist() == expected, (shift, mantissa)
            ties += sum(2 * a * mantissa % 2 ** (shift + 1) == 2**shift for a in accumulators)
    assert ties > 500  # the worst cases really contain ties


def test_the_three_roundings_differ_on_ties_only():
    halves = [1, 3, -1, -3]
    assert round_shift(halves, 1).tolist() == [0, 2, 0, -2]
    assert round_shift(halves, 1, rounding="half_up").tolist() == [1, 2, 0, -1]
    assert round_shift(halves, 1, rounding="half_away").tolist() == [1, 2, -1, -2]


@given(
    st.integers(-(2**62), 2**62), st.integers(1, 62), st.sampled_from(["half_even", "half_up", "half_away", "gemmlowp"])
)
def test_round_shift_equals_big_integers(product, shift, rounding):
    assert round_shift(product, shift, rounding=rounding) == exact(product, shift, rounding)


@given(st.floats(1e-30, 2.0**29))
def test_fixed_point_is_the_nearest(multiplier):
    mantissa, shift = (int(v) for v in fixed_point(multiplier))
    assert 2**30 <= mantissa < 2**31
    error = abs(Fraction(mantissa) / Fraction(2) ** shift - Fraction(multiplier))
    assert error <= Fraction(1, 2) / Fraction(2) ** shift


def test_fixed_point_renormalises_and_keeps_shape():
    mantissa, shift = fixed_point([[1.0, np.nextafter(1.0, 0.0)], [0.75, 300.0]])
    assert mantissa.tolist() == [[2**30, 2**30], [3 * 2**29, 300 * 2**22]]
    assert shift.tolist() == [[30, 30], [31, 22]]


@pytest.mark.parametrize("bad", [0.0, -1.0, np.inf, np.nan, 2.0**30])
def test_fixed_point_refuses(bad):
    with pytest.raises(ConfigError, match="multiplier"):
        fixed_point([1.0, bad])


def test_arguments_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="unknown rounding 'up'"):
        round_shift([1], 31, rounding="up")
    with pytest.raises(ConfigError, match="shift"):
        round_shift([1], 63)


@given(st.integers(0, 300), st.integers(1, 200), st.integers(1, 20))
def test_ties_possible_is_exact(bound, mantissa, shift):
    found = any((a * mantissa) % 2**shift == 2 ** (shift - 1) for a in range(-bound, bound + 1))
    assert bool(ties_possible(bound, mantissa, shift)) == found


def test_ties_possible_at_real_sizes():
    assert not ties_possible(2**24 - 1, 2**30 + 1, 40)
    assert ties_possible(2**24, 2**30 + 1, 25)
    assert ties_possible([1, 1], [2**30, 2**30 + 1], 31).tolist() == [True, False]


@given(st.integers(-60, 0), st.integers(0, 60), st.integers(0, 99), st.integers(1, 12), st.integers(-999, 999))
def test_tie_in_range_is_exact(lo, hi, mantissa, shift, constant):
    found = any((a * mantissa + constant) % 2**shift == 2 ** (shift - 1) for a in range(lo, hi + 1))
    assert tie_in_range(lo, hi, mantissa, shift, constant) == found


def test_where_ties_are_impossible_half_up_is_half_even():
    rng = np.random.default_rng(0)
    mantissa, shift = fixed_point(rng.uniform(1e-4, 1e-2, 200))
    bound = 2**20
    free = ~ties_possible(bound, mantissa, shift)
    assert free.any()
    accumulators = rng.integers(-bound, bound + 1, (500, 1))
    up, even = (round_shift(accumulators * mantissa, shift, rounding=mode) for mode in ("half_up", "half_even"))
    np.testing.assert_array_equal(up[:, free], even[:, free])
