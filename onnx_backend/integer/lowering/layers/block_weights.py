"""Convert weights with a scale per block to wider integers with a scale per channel.

A sum of products per block would need a rounding multiplication for every block of every output. Wider integers need
none: the scales of the blocks are multiplied into the weight at conversion time, and its bytes are ordinary layers.
"""

from dataclasses import replace

import numpy as np

from onnx_backend.integer.ir.exact_bounds import ROUNDING, are_float32, float_chain_bound
from onnx_backend.integer.ir.quantized_constant import Array, BlockConstant, CodedConstant

_LEVELS = 256  # of a block's scale over the channel's that stay exact
_FLOAT32 = 2.0**-22  # a few roundings of float32, relative
_SIGNED = 1.0 + 2.0**-7  # room for the highest byte where the lower ones are signed


def to_channel_scales(blocks: BlockConstant, axis: int, bits: int) -> CodedConstant:
    """Return a weight with positive scales as integers with one scale per index of `axis`.

    Scales that are whole multiples of one scale, as two-level ones are, are multiplied in exactly, and powers of two
    as far as `bits` reach. Else every weight is rounded to `bits` bits, relative to the largest one of its channel;
    `error` of the result is the bound.
    """
    if axis == blocks.axis:  # a block of channels shares its scales
        blocks = replace(blocks, scale=blocks.spread(blocks.scale), size=1)
    shape = blocks.integers.shape
    others = tuple(i for i in range(len(shape)) if i != axis)
    channels = [1 if i in others else -1 for i in range(len(shape))]
    rows = np.moveaxis(blocks.scale, axis, 0).reshape(shape[axis], -1)
    largest, levels = rows.max(1).reshape(channels), _levels(rows)
    if levels is not None:
        unit = largest / levels.reshape(channels)
        integers = blocks.integers * blocks.spread(np.rint(blocks.scale / unit).astype(np.int64))
    else:
        steps = blocks.integers * blocks.spread(blocks.scale / largest)
        _, exponent = np.frexp(np.abs(steps).max(others, keepdims=True) * _SIGNED)
        shift = bits - 1 - exponent
        unit = np.ldexp(largest, -shift)
        integers = np.rint(np.ldexp(steps, shift)).astype(np.int64)
    found = integers * unit
    off = np.abs(blocks.integers * blocks.spread(blocks.scale) - found).sum(others).max()
    error = float_chain_bound(float(off))
    if not are_float32(unit) or np.abs(integers).max(initial=0) >= 1 << 29:  # else these products are exact in float64
        error += float_chain_bound(float(np.abs(found).sum(others).max())) * ROUNDING
    return CodedConstant(integers, unit.reshape(-1), axis, blocks.dtype, error)


def _levels(rows: Array) -> Array | None:
    """Return for every row the least number of equal steps on which all its scales lie, None if a row has none."""
    if len(rows) > 1 and _levels(rows[:1]) is None:  # nearly always one row shows it
        return None
    relative, levels = rows / rows.max(1, keepdims=True), np.zeros(len(rows), np.int64)
    for count in range(1, _LEVELS + 1):
        left = np.flatnonzero(levels == 0)
        if not left.size:
            break
        exact = relative[left] * count
        whole = np.rint(exact)
        levels[left[(np.abs(exact - whole) <= _FLOAT32 * whole).all(1)]] = count
    return levels if levels.all() else None
