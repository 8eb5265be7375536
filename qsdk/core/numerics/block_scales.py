"""Scales that are stored in less than a float32: with fewer digits, or as block scales of two levels.

A block's scale is a float32 in an `Encoding` and everywhere in the simulation; `Spec.scale_dtype` restricts its values.
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from qsdk.core.numerics import affine
from qsdk.core.numerics.dtypes import DType, float4e2m1, float8e4m3fn, float8e8m0, level_dtype, uint4, uint8
from qsdk.core.numerics.encoding import Encoding, FloatArray
from qsdk.core.numerics.spec import PerBlock, Spec


def top_level(dtype: DType) -> int:
    """Return the largest level: products of codes and levels fit twice the bits of 4-bit codes, or of 8-bit ones."""
    return int(level_dtype(dtype).hi) + 1


@dataclass(frozen=True, eq=False)
class TwoLevel:
    """The two factors of block scales.

    Attributes:
        channel_scale: float32, of the scales' rank, with length 1 along the block axis.
        levels: int32 from 1 to 16 (256 for codes of more than 4 bits), of the scales' shape.
    """

    channel_scale: FloatArray
    levels: npt.NDArray[np.int32]


def block_scales(parts: TwoLevel) -> FloatArray:
    """Return the block scales `levels * channel_scale`, one float32 product each."""
    return np.asarray(parts.levels.astype(np.float32) * parts.channel_scale, np.float32)


def split_block_scales(encoding: Encoding) -> TwoLevel | None:
    """Return the factors of block scales, or None where no factors reproduce every scale bit for bit.

    Of several possible channel scales, the one with the highest levels is taken: the first candidate is a 16th (a
    256th) of the largest block scale, as calibration sets it.

    Source: AIMET 2.42, `GroupedBlockQuantizeDequantize`, whose levels are `clamp(round(scale / channel), 1, 16)`.
    """
    if encoding.block_size is None or encoding.axis is None or not encoding.scale.size:
        return None
    top = top_level(encoding.dtype)
    scale = np.moveaxis(encoding.scale, encoding.axis, -1)
    rows = scale.reshape(-1, scale.shape[-1])
    if not _channel_scales(rows[:1], top).all():  # nearly always one channel shows that there are no factors
        return None
    channels = _channel_scales(rows, top)
    if not channels.all():
        return None
    levels = np.moveaxis(_levels(rows, channels, top).reshape(scale.shape), -1, encoding.axis)
    return TwoLevel(np.moveaxis(channels.reshape(*scale.shape[:-1], 1), -1, encoding.axis), levels)


def _channel_scales(rows: FloatArray, top: int) -> FloatArray:
    """Return the channel scale of each row of block scales, [rows, 1]; 0 where none reproduces them all."""
    largest = rows.max(axis=1, keepdims=True)
    channel = np.zeros_like(largest)
    for divisor in range(top, 0, -1):
        quotient = np.asarray(largest / np.float32(divisor), np.float32)
        # the quotient's rounding may hide the factor that made the product: it is then a neighbour
        for toward in (None, np.float32(0), np.float32(np.inf)):
            candidate = quotient if toward is None else np.nextafter(quotient, toward)
            exact = _reproduces(rows, candidate, top).all(axis=1, keepdims=True)
            channel = np.where((channel == 0) & exact, candidate, channel)
        if channel.all():
            break
    return np.asarray(channel, np.float32)


def _levels(scale: FloatArray, channel: FloatArray, top: int) -> npt.NDArray[np.int32]:
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        quotient = np.rint(scale / channel)
    return np.asarray(np.nan_to_num(quotient, posinf=0).clip(0, top), np.int32)


def _reproduces(scale: FloatArray, channel: FloatArray, top: int) -> npt.NDArray[np.bool_]:
    levels = _levels(scale, channel, top)
    with np.errstate(over="ignore"):
        return np.asarray((levels > 0) & (block_scales(TwoLevel(channel, levels)) == scale))


_FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
EXPONENT_BITS = 0x7F800000  # of a float32


@dataclass(frozen=True, eq=False)
class Float8Scales:
    """The two parts of NVFP4's block scales.

    Attributes:
        codes: float8e4m3fn, of the scales' shape.
        divisor: one float32 for the tensor, the global scale of compressed-tensors.
    """

    codes: npt.NDArray[Any]
    divisor: np.float32

    def quotient(self) -> FloatArray:
        """Return the block scales, one float32 quotient each."""
        return np.asarray(self.codes.astype(np.float32) / self.divisor, np.float32)


def round_up_to_digits(scale: FloatArray, bits: int) -> FloatArray:
    """Round positive scales up to the next float32 with `bits` significant binary digits, the largest there is at most.

    With one digit they are powers of two. With fewer digits than 24, products of scales and integers are exact for
    longer. Those of float16's 11 digits or fewer are float16 numbers, small ones too; see `last_place`.
    """
    mantissa, exponent = np.frexp(scale.astype(np.float64))
    digits = np.minimum(bits, exponent - last_place(bits))
    short = np.ldexp(np.ceil(np.ldexp(mantissa, digits)), exponent - digits)
    return np.asarray(np.minimum(short, np.ldexp(2.0**bits - 1, 128 - bits)), np.float32)


def last_place(bits: int) -> int:
    """Return the exponent of the smallest step between scales of so many significant binary digits.

    That is float16's, for scales that one can hold; powers of two, and the 8 digits of bfloat16, have float32's.
    """
    return -24 if 1 < bits <= 11 and bits != 8 else -149


def shared_exponents(largest: FloatArray, dtype: DType) -> FloatArray:
    """Return the power-of-two scale of each block, from its largest magnitude; see `affine.power_of_two_scale`."""
    return np.asarray(affine.power_of_two_scale(largest.astype(np.float32), dtype, _floor_power), np.float32)


def _floor_power(x: FloatArray) -> FloatArray:
    return np.asarray((x.view(np.int32) & np.int32(EXPONENT_BITS)).view(np.float32))


def changed_block_scales(encoding: Encoding, scale: FloatArray, spec: Spec) -> FloatArray:
    """Return other scales of an encoding as its spec can store them, those of NVFP4 over the divisor that it has."""
    if spec.scale_dtype == float8e8m0:
        return np.asarray(np.ldexp(1.0, np.rint(np.log2(scale.astype(np.float64))).astype(int)), np.float32)
    parts = float8_scales(encoding) if spec.scale_dtype == float8e4m3fn else None
    return restrict_block_scales(scale, spec) if parts is None else _float8_scales(scale, parts.divisor).quotient()


def restrict_block_scales(scale: FloatArray, spec: Spec, peak: np.float32 | None = None) -> FloatArray:
    """Round block scales to those that the spec's `scale_dtype` can hold; return others unchanged.

    With `uint4` a channel's scale is a 16th of its largest block scale, and levels are `clip(round(scale / channel), 1,
    16)`, with `uint8` the same of 256 (AIMET 2.42, `GroupedBlockQuantizeDequantize`). With `float8e4m3fn` all are
    float8 values over one float32, with which the largest of them is 448 (NVIDIA, NVFP4; see `affine.float8_codes`).
    `peak` is the value that the largest scale is for, to the last bit; what the grid reaches with it where it is None.
    """
    if spec.scale_dtype in (uint4, uint8):
        assert isinstance(spec.granularity, PerBlock)
        top = top_level(spec.dtype)
        channel = _outer(scale.max(axis=spec.granularity.axis, keepdims=True) / np.float32(top), spec)
        return block_scales(TwoLevel(channel, np.rint(scale / channel).clip(1, top).astype(np.int32)))
    if spec.scale_dtype == float8e4m3fn:
        known = _known_float8_scales(scale)
        divisor = affine.float8_divisor(scale.max() * np.float32(float4e2m1.hi) if peak is None else peak)
        divisor = divisor if spec.scale_bits is None else _floor_power(np.atleast_1d(divisor))[0]
        return scale if known is not None else _float8_scales(scale, divisor).quotient()
    return scale


def _outer(scale: Any, spec: Spec) -> Any:
    positive = np.maximum(scale, np.finfo(np.float32).tiny)
    return positive if spec.scale_bits is None else round_up_to_digits(positive, spec.scale_bits)


def _float8_scales(scale: FloatArray, divisor: Any) -> Float8Scales:
    def cast(value: FloatArray) -> FloatArray:
        return value.astype(_FLOAT8).astype(np.float32)

    divisor = np.float32(divisor)
    return Float8Scales(affine.float8_codes(scale, divisor, cast).astype(_FLOAT8), divisor)


def float8_scales(encoding: Encoding) -> Float8Scales | None:
    """Return the parts of block scales that are float8 values over one float32, to the last bit; else None."""
    if encoding.block_size is None or encoding.dtype.is_integer:
        return None
    return _known_float8_scales(encoding.scale)


def _known_float8_scales(scale: FloatArray) -> Float8Scales | None:
    largest = scale.max()
    if not largest * np.float32(float4e2m1.hi) < np.inf:
        return None
    first = np.float32(affine.float8_divisor(largest * np.float32(float4e2m1.hi)))
    # the quotients' rounding may hide the divisor that made them: it is then near, or a power of two
    near = np.atleast_1d(first).view(np.int32) + np.array([0, 1, -1, 2, -2, 3, -3], np.int32)
    for divisor in (*near.view(np.float32), np.float32(1), *_floor_power(np.atleast_1d(first))):
        result = _float8_scales(scale, divisor)
        if np.array_equal(result.quotient(), scale):
            return result
    return None


def scale_dtype_of(encoding: Encoding) -> DType | None:
    """Return the `scale_dtype` of a spec that allows an encoding's block scales; None for any float32."""
    if encoding.block_size is None or not encoding.symmetric:
        return None
    if encoding.dtype.is_integer:
        return None if split_block_scales(encoding) is None else level_dtype(encoding.dtype)
    mantissa, exponent = np.frexp(encoding.scale)
    if (mantissa == 0.5).all() and (exponent - 1 >= -127).all():
        return float8e8m0
    return float8e4m3fn if float8_scales(encoding) is not None else None
