"""Dtypes: grids, containers, strict grids and names."""

import doctest

import ml_dtypes
import numpy as np
import pytest
from strategies import ML_DTYPE

from qsdk import ConfigError, float16, int2, int4, int8, int16, int32, uint4, uint8
from qsdk.core.numerics import dtypes
from qsdk.core.numerics.dtypes import DTYPES, dtype_named, float8e8m0


@pytest.mark.parametrize("bits", [2, *range(3, 17), 32])
def test_signed_grids(bits: int):
    dtype = DTYPES[f"int{bits}"]
    assert (dtype.lo, dtype.hi, dtype.bits, dtype.signed) == (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1, bits, True)
    assert dtype.is_integer
    assert dtype.is_quantized


@pytest.mark.parametrize("bits", range(2, 17))
def test_unsigned_grids(bits: int):
    dtype = DTYPES[f"uint{bits}"]
    assert (dtype.lo, dtype.hi, dtype.bits, dtype.signed) == (0, 2**bits - 1, bits, False)


@pytest.mark.parametrize(
    ("bits", "container"), [(2, 2), (3, 4), (4, 4), (5, 8), (6, 8), (7, 8), (8, 8), (9, 16), (15, 16), (16, 16)]
)
@pytest.mark.parametrize("prefix", ["int", "uint"])
def test_an_odd_width_rides_in_the_next_standard_one(prefix: str, bits: int, container: int):
    dtype = DTYPES[f"{prefix}{bits}"]
    assert dtype.container == f"{prefix}{container}"
    assert dtype.narrows_container == (bits != container)


@pytest.mark.parametrize("name", sorted(ML_DTYPE))
def test_minifloat_grids_end_at_the_largest_finite_value(name: str):
    dtype = DTYPES[name]
    assert dtype.hi == float(ml_dtypes.finfo(ML_DTYPE[name]).max)
    assert (dtype.lo, dtype.kind, dtype.signed, dtype.container) == (-dtype.hi, "minifloat", True, name)
    assert dtype.is_quantized
    assert not dtype.is_integer
    assert not dtype.narrows_container


@pytest.mark.parametrize(
    ("name", "hi"),
    [
        ("float16", float(np.finfo(np.float16).max)),
        ("bfloat16", float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)),
        ("float32", float(np.finfo(np.float32).max)),
    ],
)
def test_floats_are_not_quantized(name: str, hi: float):
    assert (DTYPES[name].kind, DTYPES[name].lo, DTYPES[name].hi) == ("float", -hi, hi)
    assert not DTYPES[name].is_quantized


def test_the_scale_type_holds_powers_of_two_only():
    assert (float8e8m0.kind, float8e8m0.lo, float8e8m0.hi, float8e8m0.signed) == ("scale", 2.0**-127, 2.0**127, False)
    assert not float8e8m0.is_quantized


@pytest.mark.parametrize(("dtype", "lo"), [(int2, -1), (int4, -7), (int8, -127), (int16, -32767), (int32, 1 - 2**31)])
def test_a_strict_grid_is_symmetric_and_narrower_than_its_container(dtype, lo: int):
    strict = dtype.strict
    assert (strict.lo, strict.hi, strict.name) == (lo, -lo, f"{dtype.name}_strict")
    assert strict.narrows_container
    assert strict.container == dtype.container
    assert strict.strict is strict
    assert strict != dtype
    assert not dtype.narrows_container


@pytest.mark.parametrize("dtype", [uint8, uint4, float16, DTYPES["float8e4m3fn"]], ids=str)
def test_only_signed_integers_have_a_strict_grid(dtype):
    with pytest.raises(ConfigError, match=f"{dtype} has no strict symmetric grid; use a signed integer dtype"):
        _ = dtype.strict


@pytest.mark.parametrize("name", [*DTYPES, "int8_strict", "int3_strict"])
def test_names_lead_back_to_the_dtype(name: str):
    dtype = dtype_named(name)
    assert dtype.name == name
    assert repr(dtype) == name
    assert dtype_named(dtype) is dtype
    assert dtype_named(dtype.name) == dtype


@pytest.mark.parametrize("name", ["int77", "int1", "uint8_strict", "float8_strict", "INT8", "", "int99_strict"])
def test_an_unknown_name_is_answered_with_all_known_ones(name):
    with pytest.raises(ConfigError, match=f"unknown dtype {name!r}; choose one of int2, int4, int8, .*float32"):
        dtype_named(name)


def test_a_number_of_bits_is_answered_with_the_dtype_that_is_meant():
    with pytest.raises(ConfigError, match=r"unknown dtype 8; write 'int8'; all: int2, int4, int8, .*float32"):
        dtype_named(8)


def test_the_table_is_complete_and_cannot_be_changed():
    assert all(DTYPES[name].name == name for name in DTYPES)
    assert all(dtype.container in DTYPES for dtype in DTYPES.values())
    with pytest.raises(TypeError, match="does not support item assignment"):
        DTYPES["int8"] = int4  # type: ignore[index]


def test_the_examples_in_the_docstrings_hold():
    failed, tried = doctest.testmod(dtypes)
    assert (failed, tried > 0) == (0, True)
