"""The types of GGUF that hold quantized weights without loss, and the bytes of a weight in them.

Sources: the specification of GGUF and the block layouts of ggml (`ggml-common.h`), as the package `gguf` reads them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qsdk.core.numerics.dtypes import float4e2m1
from qsdk.core.numerics.encoding import Encoding

Bytes = npt.NDArray[np.uint8]
#: the values of a weight divided by their scales, and scales and minima of its blocks: [rows, blocks, elements or 1]
Blocks = tuple[npt.NDArray[Any], npt.NDArray[np.float32], npt.NDArray[np.float32]]


class NoTypeError(Exception):
    """No type of GGUF holds a weight; the text says why."""


@dataclass(frozen=True)
class BlockType:
    """A type of GGUF for integers.

    Attributes:
        name: of `gguf.GGMLQuantizationType`.
        size: elements that share a scale.
        low: what a stored integer of 0 stands for, in steps; None where each block has a minimum of its own.
        levels: how many integers there are.
        pack: from blocks whose integers start at 0 to bytes [rows, blocks, bytes].
    """

    name: str
    size: int
    low: int | None
    levels: int
    pack: Callable[[Blocks], Bytes]


def bytes_of(weight: npt.ArrayLike, encoding: Encoding) -> tuple[str, Bytes]:
    """Return the name of the smallest type that gives every value of a quantized weight, and its bytes [rows, bytes].

    Raises:
        NoTypeError: there is none.
    """
    codes = encoding.quantize(weight)
    if codes.ndim != 2:
        raise NoTypeError(f"it has {codes.ndim} axes, and blocks run along the second of two")
    per_block, length = _block_length(encoding, codes.shape[1]), codes.shape[1]
    if encoding.dtype == float4e2m1:
        return "MXFP4", _mxfp4(codes, _of_blocks(encoding.scale, encoding, codes.shape, 32))
    if not encoding.dtype.is_integer:
        raise NoTypeError(f"{encoding.dtype} has none; int2 to int8 and mxfp4 have")
    reasons = []
    for kind in _TYPES:
        if length % kind.size or per_block % kind.size:
            continue
        try:
            packed = kind.pack(_blocks(codes, encoding, kind))
        except NoTypeError as reason:
            reasons.append(str(reason))
            continue
        return kind.name, packed.reshape(codes.shape[0], -1)
    raise NoTypeError(reasons[-1])


def _block_length(encoding: Encoding, length: int) -> int:
    """Return how many neighbours of a row share a scale, a multiple of 32."""
    if length % 32:
        raise NoTypeError(f"32 does not divide its {length} input channels, and every type has blocks of 32 or 256")
    if encoding.block_size is None and encoding.axis != 1:
        return length
    size = 1 if encoding.block_size is None else encoding.block_size
    if encoding.axis != 1 or size % 32:
        raise NoTypeError(f"scales for {size} elements along axis {encoding.axis} are no blocks of 32 input channels")
    return size if length % size == 0 else 32


def _of_blocks(values: npt.NDArray[Any], encoding: Encoding, shape: tuple[int, ...], size: int) -> npt.NDArray[Any]:
    """Return scales or zero points [rows, blocks, 1] of blocks of a size."""
    rows, blocks = shape[0], shape[1] // size
    if encoding.block_size is not None:
        values = values.repeat(encoding.block_size // size, axis=1)[:, :blocks]
    return np.broadcast_to(values.reshape(values.shape[0], -1), (rows, blocks))[..., None]


def _blocks(codes: npt.NDArray[Any], encoding: Encoding, kind: BlockType) -> Blocks:
    """Return the integers of a weight from 0, and the scales and minima of its blocks, all as the type stores them."""
    shape, dtype = codes.shape, encoding.dtype
    zero = encoding.zero_point.astype(np.int64)
    lowest, highest = int(dtype.lo - zero.max()), int(dtype.hi - zero.min())
    scale = _of_blocks(encoding.scale, encoding, shape, kind.size)
    start = _of_blocks(zero, encoding, shape, kind.size)
    sign, low = 1, int(dtype.lo) - start
    if kind.low is not None:
        last = kind.low + kind.levels - 1
        if kind.low <= -highest and -lowest <= last and not kind.low <= lowest:
            sign, lowest, highest = -1, -highest, -lowest  # a negative scale turns -2..1 into -1..2
        if not (kind.low <= lowest and highest <= last):
            raise NoTypeError(f"it has values of {lowest} to {highest} steps, more than a type without minima holds")
    elif dtype.hi - dtype.lo >= kind.levels:
        raise NoTypeError(f"{dtype} with zero points has {dtype.bits} bits, and types with minima have up to 5")
    steps = codes.astype(np.int64).reshape(*scale.shape[:2], kind.size) - start
    minima = np.zeros_like(scale) if kind.low is not None else (low * scale).astype(np.float32)
    for part, name in ((scale, "scale"), (minima, "minimum")):
        with np.errstate(over="ignore"):
            held = part.astype(np.float16).astype(np.float32) == part
        if not held.all():
            raise NoTypeError(f"a {name} of {part[~held].flat[0]:.9g} is no float16")
    return sign * steps - (low if kind.low is None else kind.low), sign * scale, minima


def _half(values: npt.NDArray[Any]) -> Bytes:
    return values.astype("<f2").view(np.uint8)


def _bytes(values: npt.NDArray[Any]) -> Bytes:
    return values.astype(np.int8).view(np.uint8)


def _nibbles(values: npt.NDArray[Any]) -> Bytes:
    """Return the low four bits of 32 values: those of the first half of a block below those of the second."""
    low = values.astype(np.uint8) & 15
    return np.asarray(low[..., :16] | low[..., 16:] << 4, np.uint8)


def _fifth_bits(values: npt.NDArray[Any]) -> Bytes:
    return np.packbits(values.astype(np.uint8) >> 4 & 1, axis=-1, bitorder="little")


def _join(*parts: Bytes) -> Bytes:
    return np.concatenate(parts, axis=-1)


def _tq2_0(blocks: Blocks) -> Bytes:
    values, scale, _ = blocks
    quarters: Any = values.astype(np.uint8).reshape(*values.shape[:2], 2, 4, 32)
    packed = quarters[..., 0, :] | quarters[..., 1, :] << 2 | quarters[..., 2, :] << 4 | quarters[..., 3, :] << 6
    return _join(packed.reshape(*values.shape[:2], 64), _half(scale))


def _mxfp4(codes: npt.NDArray[Any], scale: npt.NDArray[Any]) -> Bytes:
    """Return float4 values with powers of two: the exponent of each with 127 added, and four bits of each value."""
    mantissa, exponent = np.frexp(scale)
    if (mantissa != 0.5).any():
        raise NoTypeError('scales of float4e2m1 that are no powers of two have none; take weight="mxfp4"')
    exponents: Any = exponent + 126
    nibbles = _nibbles(codes.view(np.uint8).reshape(*scale.shape[:2], 32))
    return _join(exponents.astype(np.uint8), nibbles).reshape(codes.shape[0], -1)


#: those of integers, the smaller ones first
_TYPES = (
    BlockType("TQ2_0", 256, -1, 4, _tq2_0),
    BlockType("Q4_0", 32, -8, 16, lambda b: _join(_half(b[1]), _nibbles(b[0]))),
    BlockType("Q4_1", 32, None, 16, lambda b: _join(_half(b[1]), _half(b[2]), _nibbles(b[0]))),
    BlockType("Q5_0", 32, -16, 32, lambda b: _join(_half(b[1]), _fifth_bits(b[0]), _nibbles(b[0]))),
    BlockType("Q5_1", 32, None, 32, lambda b: _join(_half(b[1]), _half(b[2]), _fifth_bits(b[0]), _nibbles(b[0]))),
    BlockType("Q8_0", 32, -128, 256, lambda b: _join(_half(b[1]), _bytes(b[0] - 128))),
)
