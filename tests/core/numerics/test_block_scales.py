"""Scales in narrow types: shared exponents (OCP MX), float8 scales (NVFP4), levels (AIMET's LPBQ)."""

import math
import time

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import qsdk
from qsdk import ConfigError, DType, Encoding, float4e2m1, float8e4m3fn, int4, int8, quantize, uint4, uint8, w8a8
from qsdk.core.numerics.block_scales import (
    float8_scales,
    restrict_block_scales,
    scale_dtype_of,
    shared_exponents,
    split_block_scales,
)
from qsdk.core.numerics.dtypes import DTYPES, float8e8m0
from qsdk.core.numerics.spec import PerBlock, PerChannel, PerTensor, Spec
from qsdk.core.ranges.ranges import encoding_from_range, range_of
from torch_bridge.quantizers.fake_quant import fake_quantize_minifloat

BLOCKS = PerBlock(1, 16)
MXFP4 = Spec(float4e2m1, PerBlock(1, 32), scale_dtype=float8e8m0)
NVFP4 = Spec(float4e2m1, BLOCKS, scale_dtype=float8e4m3fn)
LPBQ = Spec(int4, BLOCKS, scale_dtype=uint4)


def of_values(x, spec: Spec) -> Encoding:
    return encoding_from_range(range_of(x, spec), spec)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# powers of two


@pytest.mark.parametrize(("dtype", "emax"), [(float4e2m1, 2), (float8e4m3fn, 8), (qsdk.float8e5m2, 15)], ids=str)
@given(largest=st.floats(2.0**-100, 2.0**100, width=32))
def test_the_shared_exponent_of_a_block_is_that_of_its_largest_value_less_emax(dtype: DType, emax: int, largest: float):
    """OCP MX 1.0, section 6.3, emax of each type from its table 1; from 1.75 times a power of two on, the next one."""
    mantissa, exponent = math.frexp(largest)
    expected = 2.0 ** (exponent - 1 - emax + (mantissa >= 0.875))
    assert shared_exponents(np.float32([largest]), dtype).tolist() == [expected]


def test_mxfp4_of_a_block_whose_values_are_known():
    x = np.zeros((1, 64), np.float32)
    x[0, :6] = [
        6.9,
        -0.26,
        0.25,
        3.5,
        2.5,
        5.0,
    ]  # amax 6.9, below 7: exponent 2 - 2, scale 1; 6.9 saturates
    x[0, 32:35] = [0.86, 0.1, -0.04]  # amax 0.86: exponent -1 - 2, so the scale is an eighth
    encoding = of_values(x, MXFP4)
    assert encoding.scale.tolist() == [[1.0, 0.125]]
    moved = encoding.fake_quantize(x)
    assert moved[0, :6].tolist() == [6.0, -0.5, 0.0, 4.0, 2.0, 4.0]  # ties to even codes
    assert moved[0, 32:35].tolist() == [0.75, 0.125, -0.0625]


def test_a_block_of_zeros_has_a_scale():
    encoding = of_values(np.zeros((2, 32), np.float32), MXFP4)
    assert (encoding.scale > 0).all()
    assert encoding.fake_quantize(np.zeros((2, 32))).tolist() == np.zeros((2, 32)).tolist()


@pytest.mark.parametrize("dtype", [float4e2m1, float8e4m3fn, qsdk.float8e5m2], ids=str)
def test_both_arithmetics_give_the_values_of_ml_dtypes(dtype: DType):
    spec = Spec(dtype, PerBlock(1, 32), scale_dtype=float8e8m0)
    x = normal(8, 100) * np.float32(2.0) ** np.arange(-4, 4, dtype=np.float32)[:, None]
    encoding = of_values(x, spec)
    scale = np.repeat(encoding.scale, 32, 1)[:, :100]
    elements = {"float4e2m1": ml_dtypes.float4_e2m1fn, "float8e4m3fn": ml_dtypes.float8_e4m3fn}
    element = elements.get(dtype.name, ml_dtypes.float8_e5m2)
    exponents = encoding.scale.astype(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert exponents.tolist() == encoding.scale.tolist()
    expected = (x / scale).clip(dtype.lo, dtype.hi).astype(element).astype(np.float32) * scale
    assert encoding.fake_quantize(x).tobytes() == expected.tobytes()
    in_torch = fake_quantize_minifloat(torch.from_numpy(x), torch.from_numpy(scale), dtype)
    assert in_torch.numpy().tobytes() == expected.tobytes()


# two levels


def test_levels_and_channel_scales_equal_those_of_the_reference():
    scale = np.float32([[16, 1.6, 0.16], [0.12, 1.111, 0.033]])
    for axis, factors, levels in (
        (0, [[1, 0.1, 0.01]], [[16, 16, 16], [1, 11, 3]]),
        (1, [[1], [0.0694375]], [[16, 2, 1], [2, 16, 1]]),
    ):
        spec = Spec(int4, PerBlock(axis, 4), scale_dtype=uint4)
        found = restrict_block_scales(scale, spec)
        parts = split_block_scales(Encoding(int4, found, 0, axis, 4))
        assert parts is not None
        np.testing.assert_allclose(parts.channel_scale, factors, rtol=1e-6)
        assert parts.levels.tolist() == levels
        np.testing.assert_allclose(found, np.multiply(factors, levels), rtol=1e-6)


def test_levels_of_8_bit_weights_reach_256():
    scale = np.float32([[25.6, 11.111], [256, 25.555]])
    found = restrict_block_scales(scale, Spec(int8, PerBlock(1, 4), scale_dtype=uint8))
    parts = split_block_scales(Encoding(int8, found, 0, 1, 4))
    assert parts is not None
    np.testing.assert_allclose(parts.channel_scale, [[0.1], [1]], rtol=1e-6)
    assert parts.levels.tolist() == [[256, 111], [256, 26]]
    np.testing.assert_allclose(found, [[25.6, 11.1], [256, 26]], rtol=1e-6)


@pytest.mark.slow
def test_the_levels_of_a_config_follow_the_bits_of_the_weight():
    for weight, levels in (("int4", uint4), ("int8", uint8), ("int2", uint4)):
        config = w8a8(block_size=4).override("*", weight=weight, two_level_scales=True)
        sim = quantize(torch.nn.Linear(16, 3), torch.randn(2, 16), config)
        assert sim.plan.decisions["self:weight"].spec.scale_dtype == levels
    with pytest.raises(ConfigError, match="uint4 is for integers of up to 4 bits, uint8 for wider ones"):
        Spec(int8, PerBlock(1, 4), scale_dtype=uint4)


def test_scales_without_factors_are_told_at_once():
    scale = np.abs(normal(4096, 128)) + 1
    start = time.process_time()
    assert split_block_scales(Encoding(int8, scale, 0, 1, 32)) is None
    assert time.process_time() - start < 10  # a search that looks at every scale takes minutes


@given(st.integers(0, 1000), st.sampled_from([0, 1]), st.integers(1, 9))
def test_two_level_scales_are_found_again_and_stay_where_they_are(seed: int, axis: int, size: int):
    spec = Spec(int4, PerBlock(axis, size), scale_dtype=uint4)
    encoding = of_values(normal(9, 12, seed=seed) * 10.0 ** (seed % 7 - 3), spec)
    parts = split_block_scales(encoding)
    assert parts is not None
    assert (parts.levels.max(axis=axis) == 16).all()
    assert scale_dtype_of(encoding) == uint4
    assert restrict_block_scales(encoding.scale, spec).tobytes() == encoding.scale.tobytes()


@given(st.integers(0, 1000), st.floats(2.0**-30, 2.0**30, width=32))
def test_float8_scales_are_found_again_and_stay_where_they_are(seed: int, size: float):
    encoding = of_values(normal(7, 50, seed=seed) * np.float32(size), NVFP4)
    factors = float8_scales(encoding)
    assert factors is not None
    assert factors.codes.dtype == ml_dtypes.float8_e4m3fn
    assert factors.codes.astype(np.float32).max() == 448
    assert factors.quotient().tobytes() == encoding.scale.tobytes()
    assert restrict_block_scales(encoding.scale, NVFP4).tobytes() == encoding.scale.tobytes()


def test_nvfp4_scales_are_those_of_the_format():
    """The tensor's scale is its largest value over 6 * 448; a block's the nearest float8 to its share of that."""
    x = normal(4, 64)
    encoding = of_values(x, NVFP4)
    tensor_scale = np.float32(np.abs(x).max() / (6 * 448))
    blocks = np.abs(x).reshape(4, 4, 16).max(2) / 6
    expected = (blocks / tensor_scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * tensor_scale
    np.testing.assert_allclose(encoding.scale, expected, rtol=3e-7)


@pytest.mark.parametrize("bits", [1, 6])
@pytest.mark.parametrize("spec", [LPBQ, NVFP4], ids=["lpbq", "nvfp4"])
def test_short_scales_of_two_levels_have_a_short_outer_one(spec: Spec, bits: int):
    short = Spec(spec.dtype, spec.granularity, scale_bits=bits, scale_dtype=spec.scale_dtype)
    encoding = of_values(normal(4, 64), short)
    outer = {uint4: lambda: split_block_scales(encoding).channel_scale, float8e4m3fn: lambda: None}[spec.scale_dtype]()
    if outer is not None:
        mantissa = np.frexp(outer)[0].astype(np.float64) * 2**bits
        assert (mantissa == np.rint(mantissa)).all()
    # 4 bits of level or float8, times `bits`
    mantissa = np.frexp(encoding.scale)[0].astype(np.float64) * 2 ** (bits + 5)
    assert (mantissa == np.rint(mantissa)).all()


# who is what


def test_scales_of_any_float32_are_nobodys():
    x = normal(4, 64)
    assert scale_dtype_of(of_values(x, Spec(float4e2m1, BLOCKS))) is None
    assert scale_dtype_of(of_values(x, Spec(int4, BLOCKS))) is None
    assert scale_dtype_of(of_values(x, Spec(int4, BLOCKS, symmetric=False))) is None
    assert scale_dtype_of(of_values(x, Spec(float4e2m1, PerChannel(0), scale_bits=1))) is None


@pytest.mark.parametrize("spec", [MXFP4, NVFP4, LPBQ], ids=["mxfp4", "nvfp4", "lpbq"])
def test_what_scales_are_confined_to_is_read_off_them(spec: Spec):
    assert scale_dtype_of(of_values(normal(6, 96), spec)) == spec.scale_dtype


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": int4, "granularity": BLOCKS, "scale_dtype": float8e8m0}, "int4 has no blocks with scales in float8"),
        ({"dtype": float4e2m1, "granularity": BLOCKS, "scale_dtype": uint4}, "uint4 is for integers"),
        ({"dtype": int4, "granularity": PerChannel(0), "scale_dtype": uint4}, "belong to symmetric blocks"),
        (
            {"dtype": int4, "granularity": BLOCKS, "symmetric": False, "scale_dtype": uint4},
            "belong to symmetric blocks",
        ),
        ({"dtype": int4, "granularity": BLOCKS, "scale_dtype": int8}, "int8 cannot hold scales; choose float8e8m0"),
        ({"dtype": uint8, "dynamic": True}, "asymmetric uint8 per tensor .*, not symmetric uint8 per tensor"),
        ({"dtype": DTYPES["uint16"], "symmetric": False, "dynamic": True}, "not asymmetric uint16 per tensor"),
        (
            {"dtype": uint8, "granularity": PerChannel(1), "symmetric": False, "dynamic": True},
            "not asymmetric uint8 per channel",
        ),
        ({"dtype": uint8, "dynamic": "token"}, "symmetric int8 or int4 per token, not symmetric uint8 per tensor"),
        ({"dtype": qsdk.float16, "dynamic": True}, "not symmetric float16"),
    ],
)
def test_what_no_scale_type_serves_is_refused(options, message: str):
    with pytest.raises(ConfigError, match=message):
        Spec(**options)


def test_blocks_of_another_type_are_left_as_they_are():
    scale = normal(4, 4) ** 2 + 0.1
    for spec in (Spec(int4, BLOCKS), Spec(int8, PerTensor()), Spec(qsdk.bfloat16)):
        assert restrict_block_scales(scale, spec) is scale
