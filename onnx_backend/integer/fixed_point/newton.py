"""Integer methods for fixed point: square root, reciprocal and logarithm of positive tensors, exact up to a last bit.

Each first shifts every element left until its top bit stands at a fixed place, so that the result keeps about 30 bits
of relative precision over the whole static range (27 of a reciprocal root). They suit reduced tensors (means,
variances, sums).

Mantissas of 30 bits stay in int32, with static bounds that every step proves: straight lines give about 15 right bits
of a reciprocal or its root, one step of Newton's method doubles them. The residue `1 - m * r` (or `1 - m * r * r`) is
computed from products of halves of 15 bits, to about 2**-29; a bias keeps it positive where it is shifted. `RECIPROCAL`
and `ROOT` bound the relative errors: those of the lines squared, the roundings of the residue, of its product and of
the result. Both targets write these operators as they are: shifts are divisions of numbers that are not negative.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import TensorProto

from onnx_backend.integer.fixed_point.fixed_arithmetic import (
    ROOM,
    gather_table,
    int64_value,
    narrow_to,
    require_unmasked,
    single_scale,
)
from onnx_backend.integer.fixed_point.to_fixed import clip
from onnx_backend.integer.ir.context import LoweringContext
from onnx_backend.integer.ir.exact_bounds import ULP
from onnx_backend.integer.ir.values import Array, FixedPoint, Refused

Bounds = tuple[int, int]
_LEAST, _MOST = -(1 << 31), (1 << 31) - 1


@dataclass(frozen=True)
class Int32:
    """An int32 tensor with the smallest and the largest value that it can have; its methods write nodes.

    Where interval arithmetic says too little, a caller states `within` which bounds a result is proven to be.
    """

    ctx: LoweringContext
    name: str
    lo: int
    hi: int

    def plus(self, other: "Int32 | int", within: Bounds | None = None) -> "Int32":
        """Write a sum."""
        return self._combined("Add", other, within)

    def minus(self, other: "Int32 | int", within: Bounds | None = None) -> "Int32":
        """Write a difference."""
        return self._combined("Sub", other, within)

    def times(self, other: "Int32 | int", within: Bounds | None = None) -> "Int32":
        """Write a product."""
        return self._combined("Mul", other, within)

    def _combined(self, op_type: str, y: "Int32 | int", within: Bounds | None) -> "Int32":
        other = of_constant(self.ctx, y) if isinstance(y, int) else y
        pairs = [(a, b) for a in (self.lo, self.hi) for b in (other.lo, other.hi)]
        ends = [a + b if op_type == "Add" else a - b if op_type == "Sub" else a * b for a, b in pairs]
        if op_type == "Mul" and self is other:
            ends = [0 if self.lo < 0 < self.hi else min(ends), max(self.lo**2, self.hi**2)]
        lo, hi = (min(ends), max(ends)) if within is None else (max(min(ends), within[0]), min(max(ends), within[1]))
        if lo < _LEAST or hi > _MOST:
            raise Refused(f"its numbers can reach {max(-lo, hi)}", "use smaller rows")
        return self._written(self.ctx.node(op_type, [self.name, other.name]), lo, hi)

    def _written(self, name: str, lo: int, hi: int) -> "Int32":
        self.ctx.proven[name] = lo, hi
        return Int32(self.ctx, name, lo, hi)

    def shifted(self, by: int) -> "Int32":
        """Write `x >> by` of numbers that are not negative."""
        if self.lo < 0:
            raise Refused("it shifts a number that can be negative", "report it as a defect")
        if not by:
            return self
        name = self.ctx.node("Div", [self.name, self.ctx.constant(1 << by, np.int32)])
        return self._written(name, self.lo >> by, self.hi >> by)

    def cut(self, bits: int) -> "tuple[Int32, Int32]":
        """Write the low bits of numbers that are not negative, and the rest of them divided by their unit."""
        mask = (1 << bits) - 1
        low = self.ctx.node("BitwiseAnd", [self.name, self.ctx.constant(mask, np.int32)])
        return self._written(low, 0, min(mask, self.hi)), self.shifted(bits)

    def looked_up(self, table: Array) -> "Int32":
        """Write `table[x]` for numbers of rows, which are so few that one node is worth more than a fast one."""
        name = self.ctx.node("Gather", [self.ctx.constant(table, np.int32, "table"), self.name])
        return self._written(name, int(table.min()), int(table.max()))

    def summed(self, axes: Sequence[int], within: Bounds, count: int = 0) -> "Int32":
        """Write the sums of `count` numbers each, 0 if it is unknown, along axes, which are left out."""
        if within[0] < _LEAST or within[1] > _MOST:
            raise Refused(f"its sums can reach {max(-within[0], within[1])}", "use smaller rows")
        name = self.ctx.node("ReduceSum", [self.name, self.ctx.constant64(np.asarray(axes))], keepdims=0)
        if count and tuple(axes) == (-1,):
            self.ctx.row_sums[name] = count
        return self._written(name, *within)

    def spread_over(self, axes: Sequence[int]) -> "Int32":
        """Write numbers of rows so that they broadcast along the axes of their elements."""
        name = self.ctx.node("Unsqueeze", [self.name, self.ctx.constant64(np.asarray(axes))])
        return self._written(name, self.lo, self.hi)


def of_constant(ctx: LoweringContext, values: Array | int) -> Int32:
    """Return a constant."""
    array = np.asarray(values, np.int64)
    return Int32(ctx, ctx.constant(array, np.int32), int(array.min()), int(array.max()))


#: Bounds of the relative errors.
RECIPROCAL, ROOT = 2.0**-28, 2.0**-27.8
#: Bits of a mantissa below a line, of which the lower ones are not looked at.
_BELOW, _UNSEEN = 19, 9
#: Bits of a seed beyond those that stay.
_FINER = 14


def reciprocal_of_mantissa(mantissa: Int32) -> Int32:
    """Write `2**59 / m`, in 2**29..2**30, for m in 2**29..2**30-1."""
    seed = _seed(mantissa, lambda m: 2.0**45 / m)  # 2**15..2**16, off by 0.56 at most
    low, high = mantissa.cut(15)
    whole = high.times(seed, (0, (1 << 30) + (1 << 15)))
    rest = low.times(seed, (0, (1 << 31) - 1)).shifted(15)
    reached = whole.plus(rest, ((1 << 30) - (1 << 15), (1 << 30) + (1 << 15)))
    residue = of_constant(mantissa.ctx, (1 << 30) + (1 << 16) + 1).minus(reached)
    return _corrected(seed, residue, (1 << 14) - 1)


def root_of_mantissa(mantissa: Int32) -> Int32:
    """Write `2**44 / sqrt(m)`, in 2**29..2**30, for m in 2**28..2**30-1."""
    seed = _seed(mantissa, lambda m: 2.0**29 / np.sqrt(m))  # 2**14..2**15, off by 0.56 at most
    low, high = mantissa.cut(15)
    square = seed.times(seed)
    square_low, square_high = square.cut(15)
    sides = [high.times(square_low), low.times(square_high)]
    across = sides[0].plus(sides[1], (0, (1 << 31) - 1)).shifted(13)
    whole = high.times(square_high, (0, (1 << 28) + (1 << 15))).times(4)
    reached = whole.plus(across, ((1 << 30) - (1 << 17) + 8, (1 << 30) + (1 << 17) - 8))
    residue = of_constant(mantissa.ctx, (1 << 30) + (1 << 17)).minus(reached)
    return _corrected(seed, residue, (1 << 15) - 2)


def _corrected(seed: Int32, residue: Int32, times: int) -> Int32:
    """Write `seed * times + seed * residue / 2**16`: the factor has the residue's bias taken off."""
    quarter = residue.shifted(2)
    product = seed.times(quarter, (0, (1 << 31) - (1 << 14)))
    correction = product.plus(1 << 13).shifted(14)
    return seed.times(times).plus(correction, ((1 << 29) - 64, 1 << 30))


def _seed(mantissa: Int32, function: Callable[[Array], Array]) -> Int32:
    """Write the nearest integers to a function that falls, by straight lines between the multiples of 2**19."""
    first, last = mantissa.lo >> _BELOW, mantissa.hi >> _BELOW
    lines = np.maximum(np.arange(last + 2, dtype=np.float64), first)  # those below the first are not looked up
    places = lines * (1 << _BELOW) + (1 << (_UNSEEN - 1))
    knots = function(places) * (1 << _FINER)
    steps = 1 << (_BELOW - _UNSEEN)
    slopes = np.rint((knots[:-1] - knots[1:]) / steps).astype(np.int64)
    bases = np.rint(knots[:-1]).astype(np.int64) + (1 << (_FINER - 1))
    within, line = mantissa.shifted(_UNSEEN).cut(_BELOW - _UNSEEN)
    fall = line.looked_up(slopes).times(within)
    top = int(knots[0]) + (1 << (_FINER - 1))
    height = line.looked_up(bases).minus(fall, (int(knots[-1]), top))
    return height.shifted(_FINER)


_SEED_BITS = 8
_LOG_BITS = 12
_LOG_UNIT = 2.0**-40
#: An epsilon is so many bits below what it is added to, and is left out there.
_EPSILON_BITS = 24


@dataclass(frozen=True)
class Normalized:
    """A positive int64 tensor shifted left: `name = integers * 2**shift`, in [2**(62 - step), 2**62)."""

    name: str  # the shifted tensor, int64
    shift: str  # how far, an int32 tensor, a multiple of `step`
    least: int  # smallest shift within the static bounds
    most: int  # largest shift within the static bounds


def normalize(ctx: LoweringContext, value: FixedPoint, step: int) -> Normalized:
    """Shift a tensor whose integers are within 1..2**62-1 (0 is shifted as 1 is)."""
    least = (ROOM - max(value.hi, 1).bit_length()) // step * step
    most = (ROOM - max(value.lo, 1).bit_length()) // step * step
    # an element below 2**(62 - s) can be shifted by s
    limits = np.asarray([1 << (ROOM - s) for s in range(least + step, most + 1, step)], np.int64)
    name = ctx.int64(value)
    if limits.size:
        column = ctx.node("Unsqueeze", [name, ctx.constant64(np.asarray([-1]))])
        below = ctx.cast(ctx.node("Less", [column, ctx.constant64(limits)]), TensorProto.INT32)
        count = ctx.node("ReduceSum", [below, ctx.constant64(np.asarray([-1]))], keepdims=0)
        shift = ctx.node("Mul", [count, ctx.constant(step, np.int32)])
        shift = ctx.node("Add", [shift, ctx.constant(least, np.int32)])
    else:
        shift = ctx.node("Expand", [ctx.constant(least, np.int32), ctx.node("Shape", [name])])
    unsigned = [ctx.cast(name, TensorProto.UINT64), ctx.cast(shift, TensorProto.UINT64)]
    raised = ctx.node("BitShift", unsigned, direction="LEFT")
    name = ctx.cast(raised, TensorProto.INT64)
    if value.lo > 0:
        ctx.proven[name] = 1 << (ROOM - step), (1 << ROOM) - 1
    return Normalized(name, shift, least, most)


def _shifted_right(ctx: LoweringContext, name: str, by: int) -> str:
    unsigned = ctx.shifted_right(ctx.cast(name, TensorProto.UINT64), by)
    return ctx.cast(unsigned, TensorProto.INT64)


def _raised(ctx: LoweringContext, name: str, shift: str) -> str:
    unsigned = [ctx.cast(name, TensorProto.UINT64), ctx.cast(shift, TensorProto.UINT64)]
    return ctx.cast(ctx.node("BitShift", unsigned, direction="LEFT"), TensorProto.INT64)


def integer_root(ctx: LoweringContext, name: str) -> str:
    """Write `floor(sqrt(x))` of an int64 tensor in [2**60, 2**62), or of 0.

    A table of the top bits gives the root to 2**-8, each step of Newton's method (that is Heron's) doubles the number
    of right digits, and a last comparison takes back what the final division rounded up.
    """
    top = ctx.cast(_shifted_right(ctx, name, ROOM - _SEED_BITS), TensorProto.INT32)
    middle = (np.arange(1 << _SEED_BITS) + 0.5) * 2.0 ** (ROOM - _SEED_BITS)
    seeds = np.floor(np.sqrt(middle)).astype(np.int64)
    root = gather_table(ctx, seeds, top, name, np.int64)
    if name in ctx.proven:  # not 0, so the root is near the real one from the start
        ctx.proven[root] = int(seeds[len(seeds) // 4]), int(seeds[-1])
    for _ in range(2):
        mean = ctx.node("Add", [root, ctx.node("Div", [name, root])])
        root = _shifted_right(ctx, mean, 1)
        if name in ctx.proven:
            ctx.proven[root] = 1 << 30, (1 << 31) + (1 << 12)  # a mean is never below the root
    large = ctx.node("Greater", [ctx.node("Mul", [root, root]), name])
    return ctx.node("Sub", [root, ctx.cast(large, TensorProto.INT64)])


def square_root(ctx: LoweringContext, value: FixedPoint) -> FixedPoint:
    """Write the square root of a value that is not negative."""
    value = _positive(ctx, value, least=0)
    shifted = normalize(ctx, value, 2)
    root = integer_root(ctx, shifted.name)
    if value.lo == 0:  # 0 cannot be shifted to where the root is taken
        some = ctx.cast(ctx.node("Greater", [ctx.int64(value), ctx.constant64(0)]), TensorProto.INT64)
        root = ctx.node("Mul", [root, some])
    rest = ctx.node("Sub", [ctx.constant(shifted.most, np.int32), shifted.shift])
    half = ctx.shifted_right(ctx.cast(rest, TensorProto.UINT32), 1, np.uint32)
    name = _raised(ctx, root, half)
    unit = math.sqrt(float(value.scale)) * 2.0 ** (-shifted.most / 2)
    lo, hi = (math.isqrt(bound << shifted.most) for bound in (value.lo, value.hi))
    lo = max(lo - (lo >> 29) - 1, 0)
    off = value.error / value.lo if value.lo > value.error else 1.0
    own = 2.0**-29  # the root is rounded down to 31 bits
    if off < 0.25:
        return int64_value(
            name, unit, lo, hi, relative=own + 0.5 * (off + value.relative) * (1.0 + off + value.relative)
        )
    error = math.sqrt(value.error * float(value.scale)) / unit
    return int64_value(name, unit, lo, hi, error=error, relative=own + value.relative)


def reciprocal_root(ctx: LoweringContext, value: FixedPoint) -> FixedPoint:
    """Write `1 / sqrt(value)` of a value whose static bounds are positive."""
    value = _positive(ctx, value, least=1)
    shifted = normalize(ctx, value, 2)
    spare = (shifted.most - shifted.least) // 2
    if spare > ROOM - 33:
        return reciprocal(ctx, square_root(ctx, value))
    top = ctx.cast(_shifted_right(ctx, shifted.name, 32), TensorProto.INT32)
    ctx.proven[top] = 1 << 28, (1 << 30) - 1
    quotient = ctx.cast(root_of_mantissa(Int32(ctx, top, *ctx.proven[top])).name, TensorProto.INT64)  # 2**29..2**30
    above = ctx.node("Sub", [shifted.shift, ctx.constant(shifted.least, np.int32)])
    half = ctx.shifted_right(ctx.cast(above, TensorProto.UINT32), 1, np.uint32)
    name = _raised(ctx, quotient, half)
    # integers = 2**60 / sqrt(value * 2**shift) * 2**((shift - least) / 2) = 2**(60 - least / 2) / sqrt(value)
    power = ROOM - 2 - shifted.least // 2
    unit = 2.0**-power / math.sqrt(float(value.scale))
    lo, hi = (math.isqrt((1 << (2 * power)) // bound) for bound in (value.hi, value.lo))
    lo, hi = max(lo - (lo >> 27) - 2, 0), min(hi + (hi >> 27) + 2, (1 << ROOM) - 1)
    off = value.error / value.lo + value.relative
    if off >= 0.5:
        raise Refused("it divides by a tensor that can be 0 within its error", "add an epsilon")
    own = ROOT + 2.0**-29  # of the mantissa, and the bits below it
    return int64_value(name, unit, lo, hi, relative=off / (1.0 - off) + own)


def reciprocal(ctx: LoweringContext, value: FixedPoint) -> FixedPoint:
    """Write the reciprocal of a value whose static bounds exclude 0."""
    value, off = _divisor(ctx, value)
    shifted = normalize(ctx, value, 1)
    quotient = _mantissa_of_reciprocal(ctx, shifted)
    span = shifted.most - shifted.least
    over = max(0, span - (ROOM - 33))
    if over:  # more range than 62 bits hold: the smallest reciprocals lose their last bits
        quotient = ctx.node("Mul", [quotient, ctx.constant64(1 << (ROOM - 33))])
        down = ctx.node("Sub", [ctx.constant(shifted.most, np.int32), shifted.shift])
        unsigned = [ctx.cast(quotient, TensorProto.UINT64), ctx.cast(down, TensorProto.UINT64)]
        name = ctx.cast(ctx.node("BitShift", unsigned, direction="RIGHT"), TensorProto.INT64)
        power = shifted.most - (ROOM - 33)
    else:
        up = ctx.node("Sub", [shifted.shift, ctx.constant(shifted.least, np.int32)])
        name = _raised(ctx, quotient, up)
        power = shifted.least
    # integers = 2**62 / (value * 2**shift / 2**31) * 2**(shift - power) = 2**(93 - power) / value
    unit = 2.0 ** (power - 93) / float(value.scale)
    ends = [(1 << max(93 - power, 0)) // bound for bound in (value.hi, value.lo)]
    lo, hi = max(ends[0] - (ends[0] >> 28) - 2, 0), min(ends[1] + (ends[1] >> 28) + 2, (1 << ROOM) - 1)
    return int64_value(name, unit, lo, hi, error=1.0 if over else 0.0, relative=off / (1.0 - off) + 2.0**-28)


def quotient(ctx: LoweringContext, numerator: FixedPoint, divisor: FixedPoint) -> FixedPoint:
    """Write a quotient by a divisor whose static bounds exclude 0, but reach far nearer to it than their other end.

    No fixed point holds both ends of such a reciprocal as finely as a product needs: each element's product with the
    mantissa of the reciprocal is shifted by that element's own exponent.
    """
    divisor, off = _divisor(ctx, divisor)
    shifted = normalize(ctx, divisor, 1)
    room = ROOM - 34
    numerator = narrow_to(ctx, single_scale(ctx, require_unmasked(numerator)), room)
    spare = room - numerator.bits
    raised = ctx.node("Mul", [ctx.int64(numerator), ctx.constant64(1 << spare)])
    product = ctx.node("Mul", [raised, _mantissa_of_reciprocal(ctx, shifted)])  # below 2**60
    down = ctx.cast(ctx.node("Sub", [ctx.constant(shifted.most, np.int32), shifted.shift]), TensorProto.UINT64)
    top = ctx.constant(1 << (ROOM - 2), np.uint64)  # makes the product positive: uint64 has the only right shift
    positive = ctx.cast(ctx.node("Add", [product, ctx.constant64(1 << (ROOM - 2))]), TensorProto.UINT64)
    both = [ctx.cast(ctx.node("BitShift", [x, down], direction="RIGHT"), TensorProto.INT64) for x in (positive, top)]
    # integers = numerator * 2**spare * 2**93 / (divisor * 2**shift) * 2**(shift - most)
    power = 93 - shifted.most + spare
    most = (numerator.reach << max(power, 0)) // divisor.lo
    most = min((most >> max(-power, 0)) + (most >> 28) + 2, 1 << (ROOM - 2))
    relative = off / (1.0 - off) + 2.0**-28
    error = math.ldexp(numerator.error / divisor.lo, power) * (1.0 + relative) + 1.0
    unit = math.ldexp(float(numerator.scale / divisor.scale), -power)
    relative += numerator.relative * (1.0 + relative) + 4 * ULP
    lo, hi = (-most if numerator.lo < 0 else 0), (most if numerator.hi > 0 else 0)
    return int64_value(ctx.node("Sub", both), unit, lo, hi, error=error, relative=relative)


def _divisor(ctx: LoweringContext, value: FixedPoint) -> tuple[FixedPoint, float]:
    """Return a divisor as positive integers, and the bound of its error as a share."""
    value = single_scale(ctx, require_unmasked(value))
    if value.lo < 0 and value.hi < 0:
        flipped = ctx.node("Sub", [ctx.constant64(0), ctx.int64(value)])
        value = int64_value(flipped, -value.scale, -value.hi, -value.lo, error=value.error, relative=value.relative)
    if value.lo <= 0:
        raise Refused("it divides by a tensor that can be 0", "clip the divisor away from 0")
    value = narrow_to(ctx, value, ROOM)
    off = value.error / value.lo + value.relative
    if off >= 0.5:
        raise Refused(
            "it divides by a tensor that can be 0 within its error",
            "clip the divisor further away from 0, or put a QuantizeLinear/DequantizeLinear pair in front of the Clip",
        )
    return value, off


def _mantissa_of_reciprocal(ctx: LoweringContext, shifted: Normalized) -> str:
    """Write `2**93 / shifted`, in (2**31, 2**32]."""
    mantissa = _shifted_right(ctx, shifted.name, 31)  # [2**30, 2**31)
    return ctx.node("Div", [ctx.constant64(1 << ROOM), mantissa])


def logarithm(ctx: LoweringContext, value: FixedPoint, least: float = 0.0) -> FixedPoint:
    """Write the natural logarithm of a positive value: a table, straight between its entries.

    Args:
        ctx: where nodes are written.
        value: of static bounds that are positive, or that `least` is to make positive.
        least: a number that stands for every value below it; 0 for none.
    """
    zero = _number_of_zero(value, least)
    if zero:
        return _logarithm_beside_zero(ctx, value, zero)
    value = _positive(ctx, clip(ctx, value, least, np.inf) if least else value, least=1)
    shifted = normalize(ctx, value, 1)
    steps, rest_bits = 1 << _LOG_BITS, 30
    head = ctx.cast(_shifted_right(ctx, shifted.name, ROOM - 1 - _LOG_BITS), TensorProto.INT32)
    index = ctx.node("Sub", [head, ctx.constant(steps, np.int32)])
    tail = _shifted_right(ctx, shifted.name, ROOM - 1 - _LOG_BITS - rest_bits)
    mask = ctx.constant((1 << rest_bits) - 1, np.uint64)
    rest = ctx.cast(ctx.node("BitwiseAnd", [ctx.cast(tail, TensorProto.UINT64), mask]), TensorProto.INT64)
    unit = _LOG_UNIT
    knots = np.rint(np.log(1.0 + np.arange(steps + 1) / steps) / unit).astype(np.int64)
    base = gather_table(ctx, knots[:-1], index, shifted.name, np.int64)
    slope = gather_table(ctx, np.diff(knots), index, shifted.name, np.int64)
    bend = _shifted_right(ctx, ctx.node("Mul", [slope, rest]), rest_bits)
    turns = ctx.node("Mul", [ctx.cast(shifted.shift, TensorProto.INT64), ctx.constant64(round(math.log(2.0) / unit))])
    name = ctx.node("Sub", [ctx.node("Add", [base, bend]), turns])
    constant = np.asarray((ROOM - 1) * math.log(2.0) + math.log(float(value.scale)))
    off = value.error / value.lo + value.relative
    if off >= 0.5:
        raise Refused("it takes the logarithm of a tensor that can be 0 within its error", _clipped_at(value))
    # the chord of a logarithm is at most h**2 / 8 below it; knots, slope, shift and ln 2 are rounded
    error = (2.0 ** (-2 * _LOG_BITS) / 8 + 2 * off) / unit + 4 + ROOM
    turn = round(math.log(2.0) / unit)
    found = int64_value(name, unit, -shifted.most * turn - 2, turn + 2 - shifted.least * turn, error=error)
    return replace(found, constant=constant)


def _number_of_zero(value: FixedPoint, least: float) -> float:
    """Return the number whose logarithm is taken where the integers are 0, far below what 1 of them stands for.

    That is the least that a value is clipped at, or an epsilon that was added to it; 0 if there is none, or if integers
    of 0 do not stand for exactly 0.
    """
    finest, added = float(np.min(value.scale)), float(np.max(value.constant))
    inexact = value.error or value.relative > 2.0**-_LOG_BITS or value.masked or value.infinite
    if inexact or finest <= 0.0 or value.hi < 1:
        return 0.0
    if not np.any(value.constant):
        return least if least < finest else 0.0
    epsilon = value.constant.size == 1 and 0.0 < added < math.ldexp(finest, -_EPSILON_BITS)
    return added if epsilon and value.lo >= 0 and not least else 0.0


def _logarithm_beside_zero(ctx: LoweringContext, value: FixedPoint, zero: float) -> FixedPoint:
    """Write the logarithm of integers above 0, and beside them that of the number which stands for the others."""
    some = ctx.node("Greater", [value.name, ctx.constant(0, np.int32 if value.narrow else np.int64)])
    above = ctx.node("Where", [some, value.name, ctx.constant(1, np.int32 if value.narrow else np.int64)])
    ctx.proven[above] = 1, value.hi
    found = logarithm(ctx, FixedPoint(above, np.ones(()), 1, value.hi, narrow=value.narrow, relative=value.relative))
    constant = found.constant + np.log(value.scale)
    number = np.rint((math.log(zero) - constant) / _LOG_UNIT).astype(np.int64)
    name = ctx.node("Where", [some, found.name, ctx.constant64(number)])
    # an epsilon beside what 1 stands for; the number and the constant are rounded
    error = found.error + math.ldexp(1.0, -_EPSILON_BITS) / _LOG_UNIT * bool(np.any(value.constant)) + 1.0
    lo, hi = min(found.lo, int(number.min())), max(found.hi, int(number.max()))
    return replace(found, name=name, constant=constant, lo=lo, hi=hi, error=error)


def _clipped_at(value: FixedPoint) -> str:
    """Return the remedy for a value that is too near to 0: a bound that its integers resolve."""
    step = float(np.max(np.abs(value.scale)))
    bound = 4.0 * max(1.0, value.error) * step / max(1.0 - 4.0 * value.relative, 0.25)
    return f"clip its input at {bound:.2g} or above, which its integers resolve (a lower bound is 0 to them)"


def _positive(ctx: LoweringContext, value: FixedPoint, least: int) -> FixedPoint:
    value = single_scale(ctx, require_unmasked(value))
    if float(value.scale) < 0:
        raise Refused("its input is negative", "clip its input to positive numbers")
    if value.lo < least:
        raise Refused(
            "its input can be negative or 0" if least else "its input can be negative",
            _clipped_at(value) if least else "clip its input at 0",
        )
    return narrow_to(ctx, value, ROOM)


def factors_of_exponential(ctx: LoweringContext, below: str, step: float, last: int, bits: int, low: int) -> list[str]:
    """Write two int64 factors of `2**(2 * bits) * exp(-below * step)`, from tables of the high and the low bits.

    Args:
        ctx: of the model being lowered.
        below: int32 tensor of values in 0..last.
        step: the distance between them.
        last: the largest.
        bits: of each factor.
        low: how many bits the second table has.
    """
    unsigned = ctx.cast(below, TensorProto.UINT32)
    high = ctx.cast(ctx.shifted_right(unsigned, low, np.uint32), TensorProto.INT32)
    rest = ctx.cast(ctx.node("BitwiseAnd", [unsigned, ctx.constant((1 << low) - 1, np.uint32)]), TensorProto.INT32)
    coarse = table_of_exponentials(step * (1 << low), (last >> low) + 1, bits)
    fine = table_of_exponentials(step, 1 << low, bits)
    return [gather_table(ctx, table, index, below, np.int64) for table, index in ((coarse, high), (fine, rest))]


def table_of_exponentials(scale: float, count: int, bits: int) -> Array:
    """Return `rint(2**bits * exp(-i * scale))` for i in 0..count-1, int64."""
    return np.rint(np.ldexp(np.exp(-scale * np.arange(count, dtype=np.float64)), bits)).astype(np.int64)
