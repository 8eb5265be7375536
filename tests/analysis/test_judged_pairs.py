"""What a comparison says of one pair of places: steps of a grid, values outside a range, rounding."""

import numpy as np
import pytest

from qsdk import Encoding
from qsdk.core.comparing.judge import Difference, Layout, PairOfPlaces
from qsdk.core.comparing.place import Place
from qsdk.core.numerics.dtypes import DTYPES

GRID = Encoding(DTYPES["uint8"], np.array([0.5], np.float32), np.array([10], np.int32))  # -5 to 122.5
VALUES = np.arange(40, dtype=np.float32).reshape(5, 8) * 0.5


def pair(left: Encoding | None, right: Encoding | None, between: int = 0) -> PairOfPlaces:
    places = (Place("a", encoding=left), Place("b", encoding=right))
    return PairOfPlaces(places, 0, Layout(), ((5, 8), (5, 8)), between=between)


@pytest.mark.parametrize(("steps", "between", "off"), [(1, 0, False), (2, 0, True), (2, 1, False), (3, 1, True)])
def test_one_step_more_than_quantized_places_between_is_off(steps: int, between: int, off: bool):
    judged = pair(GRID, GRID, between)
    moved = VALUES.copy()
    moved[2, 3] += steps * 0.5
    judged.add(VALUES, moved, None)
    assert judged.own.steps == steps
    assert bool(judged.reason(None)) == off
    assert judged.row(judged.reason(None))["max_lsb"] == steps


@pytest.mark.parametrize("float_side", [0, 1])
def test_only_what_the_float_side_has_beyond_the_range_counts_as_clipped(float_side: int):
    values = [np.array([-6.0, 0.0, 100.0, 124.5], np.float32), np.array([-5.0, 0.25, 100.0, 122.5], np.float32)]
    sides = values if float_side == 0 else values[::-1]
    difference = Difference()
    difference.add(sides[0], sides[1], (None, GRID) if float_side == 0 else (GRID, None))
    assert difference.clipped == 1.0 + 4.0
    assert difference.noise == 1.0 + 0.0625 + 4.0
    assert difference.largest == 2.0


def test_a_grid_on_both_sides_clips_nothing():
    difference = Difference()
    difference.add(np.array([500.0]), np.array([122.5]), (GRID, GRID))
    assert difference.clipped == 0.0


@pytest.mark.parametrize("side", [0, 1])
def test_nan_on_one_side_alone_is_named(side: int):
    judged = pair(None, None)
    values = [VALUES, VALUES.copy()]
    values[side] = values[side].copy()
    values[side][0, 0] = np.nan
    judged.add(values[0], values[1], None)
    assert judged.reason(None) == "one side is NaN or infinite where the other is not"


def test_decibels_are_of_powers():
    difference = Difference()
    difference.add(np.array([3.0, 4.0]), np.array([3.0, 3.0]))
    assert difference.decibels() == pytest.approx(10 * np.log10(25.0))
