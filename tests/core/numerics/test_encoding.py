"""Encodings: what they accept, how they compare, and the ends of their grids."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from qsdk import CalibrationError, Encoding, float16, float32, int4, int8, int16, int32, uint8
from qsdk.core.numerics.dtypes import DTYPES, float8e8m0
from qsdk.core.numerics.encoding import storage_type


def encoding(dtype=int8, scale=(0.5,), zero_point=(0,), axis=None, block_size=None) -> Encoding:
    return Encoding(dtype, np.array(scale), np.array(zero_point), axis, block_size)


def test_operands_are_stored_as_float32_and_int32_in_one_shape():
    made = encoding(scale=0.5, zero_point=0)
    assert (made.scale.dtype, made.zero_point.dtype) == (np.float32, np.int32)
    assert made.scale.shape == made.zero_point.shape == (1,)
    spread = encoding(uint8, (0.5, 0.25, 1.0), 7, axis=0)
    assert spread.zero_point.tolist() == [7, 7, 7]


def test_operands_are_copies():
    scale, zero_point = np.ones(1, np.float32), np.zeros(1, np.int32)
    made = Encoding(int8, scale, zero_point)
    scale[0], zero_point[0] = 9, 9
    assert (made.scale.tolist(), made.zero_point.tolist()) == ([1.0], [0])


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf, 1e-60])
def test_scales_must_be_positive_and_finite(scale: float):
    with pytest.raises(CalibrationError, match=r"an encoding of int8 needs positive, finite scales, got \["):
        encoding(scale=[scale])


def test_many_scales_need_an_axis():
    with pytest.raises(CalibrationError, match="3 scales without an axis; name the channel axis"):
        encoding(scale=[1, 1, 1])


def test_per_channel_scales_have_one_dimension():
    with pytest.raises(CalibrationError, match=r"a per-channel scale has one dimension, got shape \(2, 1\)"):
        encoding(scale=[[1], [1]], axis=0)


@pytest.mark.parametrize(
    ("dtype", "zero_point", "grid"),
    [
        (int8, 128, "-128..127 of int8"),
        (int8, -129, "-128..127 of int8"),
        (uint8, -1, "0..255 of uint8"),
        (uint8, 256, "0..255 of uint8"),
        (int8.strict, -128, "-127..127 of int8_strict"),
        (DTYPES["int3"], 4, "-4..3 of int3"),
        (DTYPES["float8e4m3fn"], 1, "0..0 of float8e4m3fn"),
    ],
)
def test_zero_points_must_lie_inside_the_grid(dtype, zero_point: int, grid: str):
    with pytest.raises(CalibrationError, match=f"a zero point lies outside the grid {grid}"):
        encoding(dtype, zero_point=zero_point)


@pytest.mark.parametrize("dtype", [float16, float32, float8e8m0], ids=str)
def test_a_dtype_without_a_scale_has_no_encoding(dtype):
    with pytest.raises(CalibrationError, match=f"{dtype} has no scale; an encoding needs an integer, float8 or float4"):
        encoding(dtype)


@pytest.mark.parametrize(("axis", "block_size"), [(None, 4), (0, 0), (0, -1)])
def test_blocks_need_an_axis_and_a_size(axis, block_size: int):
    with pytest.raises(
        CalibrationError, match=f"blocks of {block_size} along axis {axis}; give an axis and a size from 1"
    ):
        encoding(axis=axis, block_size=block_size)


def test_an_encoding_of_another_shape_is_refused_when_used():
    with pytest.raises(ValueError, match="does not fit the 3 channels"):
        encoding(scale=[1, 1], axis=0).quantize(np.zeros((3, 4)))


def test_equality_is_by_value_and_hashing_is_refused():
    one = encoding(uint8, [0.5, 0.25], [1, 2], axis=0)
    assert one == encoding(uint8, [0.5, 0.25], [1, 2], axis=0)
    assert one == dataclasses.replace(one, frozen=True)
    others = [
        encoding(int8, [0.5, 0.25], [1, 2], axis=0),
        encoding(uint8, [0.5, 0.26], [1, 2], axis=0),
        encoding(uint8, [0.5, 0.25], [1, 3], axis=0),
        encoding(uint8, [0.5, 0.25], [1, 2], axis=1),
        encoding(uint8, [0.5, 0.25], [1, 2], axis=0, block_size=2),
        encoding(uint8, [0.5, 0.25, 1.0], [1, 2, 3], axis=0),
    ]
    assert all(one != other for other in others)
    assert one != "an encoding"
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)


def test_symmetric_means_that_no_zero_point_tensor_is_needed():
    assert encoding().symmetric
    assert not encoding(uint8, [1, 1], [0, 128], axis=0).symmetric


@pytest.mark.parametrize(
    ("dtype", "zero_point", "low", "high"),
    [
        (int8, 0, -64.0, 63.5),
        (int8.strict, 0, -63.5, 63.5),
        (uint8, 128, -64.0, 63.5),
        (uint8, 0, 0.0, 127.5),
        (DTYPES["uint3"], 1, -0.5, 3.0),
        (DTYPES["float8e4m3fn"], 0, -224.0, 224.0),
    ],
)
def test_low_and_high_are_the_ends_of_the_grid(dtype, zero_point: int, low: float, high: float):
    made = encoding(dtype, zero_point=zero_point)
    assert (made.low.tolist(), made.high.tolist()) == ([low], [high])
    assert made.fake_quantize([-1e6, 1e6]).tolist() == [low, high]


def test_ends_beyond_float32_are_infinite_without_a_warning():
    made = encoding(scale=[3e38])
    assert (made.low.tolist(), made.high.tolist()) == ([-np.inf], [np.inf])
    assert made.dequantize(np.array([127], np.int8)).tolist() == [np.inf]


def test_a_quotient_beyond_float32_saturates_without_a_warning():
    assert encoding(scale=[1e-30]).quantize([1e30, -1e30, np.inf]).tolist() == [127, -128, 127]
    assert encoding(DTYPES["float8e5m2"], scale=[1e-30]).quantize([1e30]).astype(float).tolist() == [57344.0]
    assert encoding(scale=[1.0]).quantize(np.array([1e300, -1e300])).tolist() == [127, -128]


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (int8, np.int8),
        (int8.strict, np.int8),
        (uint8, np.uint8),
        (int16, np.int16),
        (int32, np.int32),
        (int4, ml_dtypes.int4),
        (DTYPES["int2"], ml_dtypes.int2),
        (DTYPES["uint2"], ml_dtypes.uint2),
        (DTYPES["uint4"], ml_dtypes.uint4),
        (DTYPES["int3"], ml_dtypes.int4),
        (DTYPES["uint6"], np.uint8),
        (DTYPES["int12"], np.int16),
        (DTYPES["float8e4m3fn"], ml_dtypes.float8_e4m3fn),
        (DTYPES["float4e2m1"], ml_dtypes.float4_e2m1fn),
    ],
    ids=str,
)
def test_values_are_stored_in_the_containers_type(dtype, stored):
    assert storage_type(dtype) == np.dtype(stored)
    assert encoding(dtype).quantize([1.0]).dtype == np.dtype(stored)
    assert encoding(dtype).quantize([1.0]).astype(float).tolist() == [min(2.0, dtype.hi)]


def test_int32_saturates_exactly_at_its_ends():
    made = encoding(int32, scale=[1.0])
    lo, hi = -(2**31), 2**31 - 1
    assert made.quantize([3e9, -3e9, 2.0**31, -(2.0**31), np.inf]).tolist() == [hi, lo, hi, lo, hi]


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
def test_scalars_and_empty_arrays_keep_their_shape(shape: tuple[int, ...]):
    x = np.zeros(shape)
    assert encoding().quantize(x).shape == shape
    assert encoding().fake_quantize(x).shape == shape
    assert encoding().fake_quantize(x).dtype == np.float32
