"""Scales in the digits of float16 and bfloat16: the float type holds them, and no end of a grid leaves it."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsdk.core.numerics.dtypes import dtype_named
from qsdk.core.numerics.spec import Spec, scale_digits
from qsdk.core.ranges.ranges import Range, encoding_from_range

TYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
GRIDS = [("uint8", False), ("int8", True), ("int8", False), ("uint16", False), ("uint8", True), ("int4", True)]


def ends(kind):
    largest = float(ml_dtypes.finfo(TYPES[kind]).max)
    return st.one_of(st.just(largest), st.floats(0, largest), st.just(0.0), st.floats(0, 4.0))


@pytest.mark.spread(3)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("dtype", "symmetric"), GRIDS)
@given(st.data())
def test_values_of_the_range_stay_finite_in_their_own_type(kind, dtype, symmetric, data):
    low, high = (np.float32(np.asarray(data.draw(ends(kind))).astype(TYPES[kind])) for _ in range(2))
    spec = Spec(dtype_named(dtype), symmetric=symmetric, scale_bits=scale_digits(None, kind))
    encoding = encoding_from_range(Range(np.array([-low]), np.array([high])), spec)
    given_values = np.array([-low, high, 0, -low / 2, high / 2], np.float32)
    with np.errstate(over="ignore"):
        quantized = encoding.fake_quantize(given_values).astype(TYPES[kind]).astype(np.float32)
    assert np.isfinite(quantized).all(), (quantized, encoding)
    assert quantized[2] == 0


@pytest.mark.parametrize("kind", TYPES)
@given(st.floats(1e-4, 1e4))
def test_every_scale_of_normal_size_is_a_number_of_the_type(kind, high):
    spec = Spec(dtype_named("uint8"), symmetric=False, scale_bits=scale_digits(None, kind))
    scale = encoding_from_range(Range(np.array([0], np.float32), np.array([high], np.float32)), spec).scale
    if scale[0] >= 2.0**-14:  # below, float16 has fewer digits: such a pair is float32, with casts
        assert scale.astype(TYPES[kind]).astype(np.float32) == scale
    step = max(high / 255 * 2.0 ** (1 - scale_digits(None, kind)), 2.0**-24 if kind == "float16" else 0.0)
    assert high / 255 * (1 - 1e-6) <= scale[0] <= high / 255 + step


@pytest.mark.parametrize(
    ("wanted", "kind", "digits"),
    [
        (None, "float32", None),
        (None, "float16", 11),
        (None, "bfloat16", 8),
        (1, "float16", 1),
        (16, "bfloat16", 8),
        (16, "float64", 16),
    ],
)
def test_digits_are_the_fewer_of_the_config_and_the_type(wanted, kind, digits):
    assert scale_digits(wanted, kind) == digits
