"""Quantized weights in the types of GGUF, read back by the package `gguf`."""

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qsdk
from qsdk.core.config.for_dialect import scale_bits_of
from qsdk.core.config.target import load_target
from qsdk.core.numerics.dtypes import dtype_named
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.spec import PerBlock, PerChannel, PerTensor, Spec
from qsdk.core.ranges.ranges import encoding_from_range, range_of
from torch_bridge.gguf.blocks import NoTypeError, bytes_of

GRANULARITIES = (PerTensor(), PerChannel(0), PerBlock(1, 32), PerBlock(1, 128), PerBlock(1, 256))
DTYPES = ("int2", "int2_strict", "uint2", "int3", "int4", "int4_strict", "uint4", "int5", "uint5", "int6", "int8")


def read(kind: str, data: np.ndarray) -> np.ndarray:
    return gguf.dequantize(data, gguf.GGMLQuantizationType[kind])


@pytest.mark.slow
@given(
    dtype=st.sampled_from(DTYPES),
    granularity=st.sampled_from(GRANULARITIES),
    asymmetric=st.booleans(),
    size=st.integers(-22, 4),
    seed=st.integers(0, 99),
)
def test_a_type_gives_every_value_of_a_calibrated_weight(dtype, granularity, asymmetric, size, seed):
    """With scales that `for_dialect` asks for, whatever the size of the weights: small float16 numbers too."""
    asymmetric = asymmetric and dtype not in ("int6", "int8")
    rng = np.random.default_rng(seed)
    weight = (rng.normal(size=(3, 512)) * 2.0 ** (size + rng.integers(-4, 5, (3, 1)))).astype(np.float32)
    bits = scale_bits_of({"weight": dtype_named(dtype), "symmetric_weights": not asymmetric}, load_target("gguf"))
    spec = Spec(dtype_named(dtype), granularity, not asymmetric, bits)
    encoding = encoding_from_range(range_of(weight, spec), spec)
    kind, data = bytes_of(weight, encoding)
    assert np.array_equal(read(kind, data), encoding.fake_quantize(weight))


@pytest.mark.parametrize(
    ("dtype", "zero_point", "block", "expected"),
    [
        ("int2_strict", 0, 256, "TQ2_0"),
        ("int2", 0, 256, "TQ2_0"),
        ("int2", 0, 32, "Q4_0"),
        ("int3", 0, 128, "Q4_0"),
        ("int4", 0, 32, "Q4_0"),
        ("uint4", 8, 32, "Q4_0"),
        ("uint4", 3, 32, "Q4_1"),
        ("int5", 0, 32, "Q5_0"),
        ("uint5", 3, 32, "Q5_1"),
        ("int8", 0, 32, "Q8_0"),
    ],
)
def test_the_smallest_type_is_taken(dtype, zero_point, block, expected):
    weight = np.random.default_rng(0).normal(size=(2, 256)).astype(np.float32)
    encoding = Encoding(dtype_named(dtype), np.full((2, 256 // block), 0.25), np.full((), zero_point), 1, block)
    kind, data = bytes_of(weight, encoding)
    assert kind == expected
    assert np.array_equal(read(kind, data), encoding.fake_quantize(weight))


@given(exponent=st.integers(-120, 120))
def test_mxfp4_has_every_power_of_two(exponent):
    weight = (np.random.default_rng(0).normal(size=(2, 64)) * 2.0**exponent).astype(np.float32)
    encoding = Encoding(dtype_named("float4e2m1"), np.full((2, 2), 2.0**exponent), np.zeros(()), 1, 32)
    kind, data = bytes_of(weight, encoding)
    assert kind == "MXFP4"
    assert np.array_equal(read(kind, data), encoding.fake_quantize(weight))


@pytest.mark.parametrize(
    ("encoding", "said"),
    [
        (Encoding(dtype_named("uint8"), 1, 7), "values of -7 to 248 steps"),
        (Encoding(dtype_named("int4"), 1 / 3, 0), "a scale of 0.333333343 is no float16"),
        (Encoding(dtype_named("int4"), np.ones((4, 4)), 0, 1, 16), "16 elements along axis 1 are no blocks of 32"),
        (Encoding(dtype_named("float8e4m3fn"), 1, 0), "float8e4m3fn has none"),
        (Encoding(dtype_named("float4e2m1"), 0.75, 0), "no powers of two"),
    ],
)
def test_what_no_type_holds(encoding, said):
    weight = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    with pytest.raises(NoTypeError, match=said):
        bytes_of(weight, encoding)


def test_rows_that_32_does_not_divide():
    with pytest.raises(NoTypeError, match="32 does not divide its 40 input channels"):
        bytes_of(np.ones((4, 40), np.float32), Encoding(dtype_named("int4"), 1, 0))


def test_a_config_for_gguf_has_scales_that_float16_holds():
    config = qsdk.weight_only("int4", block_size=32).override("head", weight="int8").override("x", weight="uint4")
    changed = config.for_dialect("gguf")
    assert (changed.scale_bits, changed.compute) == (11, "int8")
    assert [rule.scale_bits for rule in changed.rules] == [11, 7]
    lopsided = qsdk.weight_only("int4", block_size=32).override("*", symmetric_weights=False).for_dialect("gguf")
    assert [rule.scale_bits for rule in lopsided.rules] == [7, 11]  # the last one is for the embedding
    assert str(qsdk.w4a16().for_dialect("gguf").activation) == "float32"
    for config in (qsdk.w8a8(), qsdk.weight_only("float8e4m3fn"), qsdk.weight_only("nvfp4")):
        with pytest.raises(qsdk.ConfigError, match="cannot be had in the dialect gguf"):
            config.for_dialect("gguf")
