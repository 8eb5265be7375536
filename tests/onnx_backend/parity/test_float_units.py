"""Distances of narrow and wide floats: units in the last place, and steps of a grid that is finer than these."""

import ml_dtypes
import numpy as np
import pytest

from onnx_backend.parity.float_outputs import verdict
from qsdk import Encoding, int16, uint8, uint16
from qsdk.core.comparing.tally import Tally, in_units, lsb


def test_float64_distances_are_exact_for_neighbours_and_large_across_zero():
    ones = np.array([1.0, -1.0, 0.0])
    assert lsb(ones, np.nextafter(ones, np.inf)).tolist() == [1, 1, 1]
    assert lsb(np.array([1e300]), np.array([-1e300]))[0] > 1e18


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_equal_values_of_either_sign_of_zero_are_no_distance_apart(dtype):
    assert lsb(np.array([0.0, 2.0], dtype), np.array([-0.0, 2.0], dtype)).tolist() == [0, 0]


def test_a_unit_of_bfloat16_that_is_wider_than_the_grid_counts_as_one():
    encoding = Encoding(
        uint8, np.float32(1 / 256), 0
    )  # values up to 1, in whose upper half bfloat16 has 256 steps of 1/256
    values = np.array([0.75, 0.75, 0.25, 0.25], np.float32)
    assert in_units(np.array([1, 2, 1, 2]), values, encoding, "bfloat16").tolist() == [1, 2, 1, 2]
    fine = Encoding(int16, np.float32(1 / 32768), 0)
    steps = np.array([128, 129, 64, 256])
    assert (in_units(steps, values, fine, "bfloat16") <= 1).tolist() == [True, False, True, False]
    assert in_units(steps, values, fine, "float32").tolist() == steps.tolist()


def test_values_of_neighbouring_codes_on_both_sides_of_a_power_of_two_are_one_step_apart():
    """What a runtime gives is rounded to float16 in its own binade, which may be the coarser one."""
    encoding, codes = Encoding(uint8, np.float32(0.016373387), 0), np.array([61, 62], np.uint8)
    below, above = np.float16(encoding.dequantize(codes))
    apart = (float(above) - float(below)) / encoding.scale  # in steps
    assert below < 1 < above
    assert abs(apart - 1) * encoding.scale > 2**-11  # a unit of the smaller one
    tally = Tally("activation")
    tally.add_values(np.array([above]), np.array([below]), encoding, "float16")
    assert tally.largest == 1


def test_neighbouring_codes_of_16_bits_are_one_step_apart_although_float32_rounds_their_values():
    encoding, codes = Encoding(uint16, np.float32(1.7e-5), 0), np.arange(65000, 65536, dtype=np.uint16)
    values = encoding.dequantize(codes)
    tally, other = Tally("activation"), Tally("activation")
    tally.add_values(values[1:], values[:-1], encoding, "float32")
    assert tally.largest == 1
    other.add_values(values + np.float32(0.3 * 1.7e-5), values, encoding, "float32")
    assert 0.25 < other.largest < 0.35  # a rounding that the runtime has removed


def test_an_output_may_be_off_by_the_last_rounding_of_its_own_type_only():
    wanted = np.array([1.0, 2.0, 3.0], np.float32)
    unit = np.float32(2.0**-7)
    assert verdict(wanted + np.array([unit, 0, 0], np.float32), wanted, (), "bfloat16").passed
    assert not verdict(wanted + np.array([8 * unit, 0, 0], np.float32), wanted, (), "bfloat16").passed
    assert not verdict(wanted + np.array([unit, 0, 0], np.float32), wanted, ()).passed


def test_a_small_number_among_zeros_may_be_as_far_off_as_among_others():
    """Behind a Relu, half of the results are zeros: a sum near 0 has the error of its terms, not of its size."""
    usual = np.linspace(0.5, 1.5, 40, dtype=np.float32)
    for zeros in (0, 60):
        wanted = np.concatenate([usual, np.zeros(zeros, np.float32), np.float32([1e-4])])
        got = wanted.copy()
        got[-1] += np.float32(2e-7)
        assert verdict(got, wanted, ()).passed
        got[-1] += np.float32(2e-5)
        assert not verdict(got, wanted, ()).passed
