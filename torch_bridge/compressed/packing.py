"""Codes of a tensor: on the signed grid, and packed into int32 words."""

import torch
from torch import Tensor

from qsdk.core.numerics import affine
from qsdk.core.numerics.encoding import Encoding
from torch_bridge.compressed.scheme import shift_of, signed_zero_points


def codes_of(weight: Tensor, encoding: Encoding) -> Tensor:
    """Return the codes of a weight: int8 on the signed grid of its dtype, or float8_e4m3fn.

    Args:
        weight: of any float dtype.
        encoding: of it.
    """
    x, dtype = weight.detach().float(), encoding.dtype
    scale, zero_point = (
        affine.align(torch.from_numpy(part).to(x.device), tuple(x.shape), encoding.axis, encoding.block_size)
        for part in (encoding.scale, encoding.zero_point)
    )
    if not dtype.is_integer:
        cast: Tensor = (x / scale).clip(dtype.lo, dtype.hi).to(torch.float8_e4m3fn)
        return cast
    codes: Tensor = affine.quantize(x, scale, zero_point.float(), dtype.lo, dtype.hi) - shift_of(dtype)
    return codes.to(torch.int8)


def scales_of(encoding: Encoding, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return scales and zero points in the shapes of the format: [1], [channels, 1] or [channels, groups].

    Args:
        encoding: of a weight.
        dtype: of the scales; zero points are int8.
    """
    shape = (-1, 1) if encoding.axis is not None and encoding.block_size is None else encoding.scale.shape
    zero_points = torch.from_numpy(signed_zero_points(encoding)).to(torch.int8)
    scale = torch.from_numpy(encoding.scale).to(dtype, copy=True)  # a file holds no memory twice
    return scale.reshape(shape), zero_points.reshape(shape)


def as_read(codes: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """Return the weight that a reader of the format computes, in the dtype of its scales."""
    groups = 1 if scale.ndim < 2 else scale.shape[1]
    parts = codes.to(scale.dtype).reshape(codes.shape[0], groups, -1)
    shape = (*scale.shape, 1) if scale.ndim == 2 else scale.shape
    result: Tensor = (parts - zero_point.to(scale.dtype).reshape(shape)) * scale.reshape(shape)
    return result.reshape(codes.shape)


def packed(codes: Tensor, bits: int) -> Tensor:
    """Return int8 codes [rows, columns] of 4 or 8 bits as int32 words [rows, words], the first code lowest.

    Codes are stored with half of the grid's size added, and the last word of a row is padded with zeros.
    """
    per_word = 32 // bits
    stored = codes.to(torch.int32) + (1 << (bits - 1))
    missing = -codes.shape[-1] % per_word
    lanes = torch.nn.functional.pad(stored, (0, missing)).reshape(stored.shape[0], -1, per_word)
    words = torch.zeros_like(lanes[..., 0])
    for lane in range(per_word):
        words |= lanes[..., lane] << (bits * lane)
    return words.contiguous()
