"""Norms of 8-bit codes: sums and products of whole tensors in int32, and only numbers of rows in 64 bits.

With u the codes of a row of n, `c = u - round(mean)` are small, and so are their sum d and the sum a of their squares:
`v = n * a - d**2` is the variance in units of `(scale / n)**2`. The result is `(n * c - d) / sqrt(v + epsilon)`, which
is `c * k - q` with two numbers per row. Both are cut into whole units of the result and 14 bits below.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from onnx_backend.integer.fixed_point.fixed_arithmetic import ROOM, add_constant
from onnx_backend.integer.fixed_point.int32 import Int32
from onnx_backend.integer.fixed_point.newton import reciprocal_root
from onnx_backend.integer.ir.context import LoweringContext
from onnx_backend.integer.ir.values import FixedPoint, Lookup, Value

#: Rows are no longer.
_LONGEST = 1 << 13
#: Bits of the reciprocal of a row's length.
_MEAN = 22
#: Bits below a unit of the result.
_BELOW = 14
#: Bits of the result.
_BITS = 29


@dataclass(frozen=True)
class _Rows:
    """The codes of rows and their numbers."""

    beside: Int32  # `u - m`, where m is a whole number near the mean of the row
    rest: Int32  # the sum of these
    variance: FixedPoint  # `n * sum of squares - rest**2`, and n for a row of equal codes
    off: float  # bound of the distance of m from the mean


def are_codes(value: Value | None, count: int) -> bool:
    """Return True if a value is a tensor of 8-bit codes, in rows whose sums fit."""
    codes = isinstance(value, Lookup) and value.encoding is not None and not value.encoding.wide
    return codes and 2 <= count <= _LONGEST


def normalized_codes(
    ctx: LoweringContext, value: Lookup, axes: Sequence[int], count: int, epsilon: float
) -> FixedPoint:
    """Write `(x - mean) / sqrt(variance + epsilon)` of codes.

    Args:
        ctx: where nodes are written.
        value: x.
        axes: of a row.
        count: number of elements of a row.
        epsilon: not negative.
    """
    assert value.encoding is not None
    rows, hi = _rows(ctx, value.name, value.encoding.hi, axes, count), value.encoding.hi
    inverse = reciprocal_root(ctx, add_constant(rows.variance, epsilon * count**2 / float(value.encoding.scale) ** 2))
    # of rows that are no longer than `_LONGEST` it has at most 45 bits: its products with numbers of a row fit in 62
    # no result is larger than the root of count - 1
    whole = math.ceil(math.sqrt(count) / float(inverse.scale) * (1.0 + 2.0**-16))
    unit = max(whole.bit_length() - _BITS, 0)
    unit += (whole >> unit) + (1 << 16) > 1 << _BITS
    top = (whole >> unit) + 2
    name = _scaled(ctx, rows, inverse, (axes, count, unit, top))
    # half a unit, and the units of 2**-14 that the numbers of the row are cut to
    error = 0.5 + (hi + 2.0) * 2.0**-_BELOW
    scale = np.asarray(math.ldexp(float(inverse.scale), unit))
    return FixedPoint(name, scale, -top, top, narrow=True, error=error, relative=inverse.relative)


def _rows(ctx: LoweringContext, codes: str, hi: int, axes: Sequence[int], count: int) -> _Rows:
    u = Int32(ctx, ctx.cast(codes, TensorProto.INT32), 0, hi)
    share = round((1 << _MEAN) / count)
    off = 0.5 + hi * count * 0.5 / (1 << _MEAN)
    total = u.summed(axes, (0, hi * count), count)
    near = total.times(share).plus(1 << (_MEAN - 1)).shifted(_MEAN)
    beside = u.minus(near.spread_over(axes), (-hi, hi))
    most = math.floor(count * (hi**2 / 4 + off**2)) + 1
    squares = beside.times(beside).summed(axes, (0, most), count)
    bound = math.floor(count * off) + 1
    rest = total.minus(near.times(count), (-bound, bound))
    wide = ctx.cast(rest.name, TensorProto.INT64)
    # equal codes are their mean, so that their squares are 0, and only theirs; of others the variance is n - 1 or more
    filled = ctx.node("Max", [squares.name, ctx.constant(1, np.int32)])
    ctx.proven[filled] = 1, squares.hi
    raised = ctx.node("Mul", [ctx.cast(filled, TensorProto.INT64), ctx.constant64(count)])
    name = ctx.node("Sub", [raised, ctx.node("Mul", [wide, wide])])
    most = count**2 * hi**2 // 4 + count
    ctx.proven[name] = count - 1, most
    return _Rows(beside, rest, FixedPoint(name, np.ones(()), count - 1, most), off)


def _scaled(ctx: LoweringContext, rows: _Rows, inverse: FixedPoint, facts: tuple[Sequence[int], int, int, int]) -> str:
    """Write `(n * c - d) * inverse / 2**unit`, rounded."""
    axes, count, unit, top = facts
    spare = -unit % _BELOW  # a shift by a multiple of 14 leaves out parts of the portable target's numbers
    spare = max(_BELOW - unit, spare if unit + spare <= ROOM - _BITS - 4 else 0)
    unit, finer = unit + spare, inverse.name
    if spare:
        finer = ctx.node("Mul", [finer, ctx.constant64(1 << spare)])
        ctx.proven[finer] = inverse.lo << spare, inverse.hi << spare
    down = unit - _BELOW
    factor = ctx.node("Mul", [finer, ctx.constant64(count)])
    product = ctx.node("Mul", [ctx.cast(rows.rest.name, TensorProto.INT64), finer])
    # |d| is at most `off * n`, and the variance at least n - 1
    largest = math.ceil(math.ldexp(rows.off * count / math.sqrt(count - 1) / float(inverse.scale), spare) * 1.0001)
    lift = (largest >> unit) + 1
    ctx.proven[product] = -largest, largest
    lowered = ctx.node("Sub", [ctx.constant64(lift << unit), product])
    ctx.proven[lowered] = (lift << unit) - largest, (lift << unit) + largest
    ends = (0, (count * inverse.hi << spare) >> unit), (0, 2 * lift)
    halves = [_halves(ctx, name, down, bounds) for name, bounds in zip((factor, lowered), ends, strict=True)]
    (k_low, k), (q_low, q) = ([part.spread_over(axes) for part in pair] for pair in halves)
    c, steps = rows.beside, 1 << _BELOW
    raised = q_low.plus(c.hi * steps + steps // 2)  # so that it is not negative with the product
    below = c.times(k_low).plus(raised, (0, 2 * (c.hi + 1) * steps))
    lowered_q = q.minus(lift + c.hi)
    most = top + lift + c.hi + 2
    above = c.times(k, (-most, most)).plus(below.shifted(_BELOW), (-most - c.hi, most + c.hi))
    return above.plus(lowered_q, (-top, top)).name


def _halves(ctx: LoweringContext, name: str, down: int, bounds: tuple[int, int]) -> list[Int32]:
    """Write the last 14 bits of an int64 tensor over `2**down`, which is not negative, and the bits above them."""
    wide = ctx.cast(name, TensorProto.UINT64)
    if down:
        wide = ctx.shifted_right(wide, down)
    low = ctx.cast(ctx.node("BitwiseAnd", [wide, ctx.constant((1 << _BELOW) - 1, np.uint64)]), TensorProto.INT32)
    above = ctx.shifted_right(wide, _BELOW)
    high = ctx.cast(above, TensorProto.INT32)
    ctx.proven[high] = bounds
    return [Int32(ctx, low, 0, (1 << _BELOW) - 1), Int32(ctx, high, *bounds)]
