"""Two-level block scales (AIMET calls them LPBQ): every block's scale is a small integer times its channel's scale."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qsdk.core.numerics.dtypes import DType, level_dtype
from qsdk.core.numerics.encoding import Encoding, FloatArray


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
