"""Fixed-point arithmetic between quantizers: integer tensors with a static scale, static bounds and an error bound.

A `FixedPoint` represents `integers * scale + constant`. Every function writes the nodes of one exact integer operation,
follows the bounds by interval arithmetic, narrows an operand by a rounding shift only where a product or a sum could
leave 62 bits, and adds its rounding to the error. Bounds are Python integers, so they never overflow themselves.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from onnx import TensorProto

from onnx_backend.integer.ir.context import LoweringContext
from onnx_backend.integer.ir.exact_bounds import MASK, ULP, exact_product, float_chain_bound, is_power_of_two, largest
from onnx_backend.integer.ir.values import Array, FixedPoint, Linear, Refused, Term

#: Bits of the largest magnitude that the arithmetic lets an int64 tensor reach.
ROOM = 62
#: Bits of a sum over axes: ONNX Runtime's int64 ReduceSum adds in float64, so it is exact only up to 2**53.
SUM_ROOM = 53
_OFF_BY_FAR = 700.0  # beyond, e**x is no float64
_INT32 = (1 << 31) - 1
#: Bits by which a sum of two scales is finer than its finest operand.
GUARD = 24


def error_of_exponential(off: float) -> float:
    """Return the relative error of an exponential whose argument may be off by so much."""
    if off > _OFF_BY_FAR:
        raise Refused(
            f"its input may be off by {off:.3g} in integer arithmetic, and it takes exponentials",
            "put a QuantizeLinear/DequantizeLinear pair before it",
        )
    return math.expm1(off)


def fits_int32(lo: int, hi: int) -> bool:
    """Return True if bounds fit in int32, with a little room for a rounding constant."""
    return lo >= -_INT32 and hi <= _INT32


def int64_value(
    name: str, scale: Array | float, lo: int, hi: int, *, error: float = 0.0, relative: float = 0.0
) -> FixedPoint:
    """Return an int64 tensor as a value."""
    return FixedPoint(name, np.asarray(scale, np.float64), lo, hi, error=error, relative=relative)


def require_unmasked(value: FixedPoint) -> FixedPoint:
    """Return a value that has no infinities."""
    if value.infinite:
        raise Refused("its input was divided by a tensor that can be 0", "clip the divisor away from 0")
    if value.masked:
        raise Refused(
            "minus infinity was added to its input",
            "compute it first and choose afterwards, as in where(mask, exp(x), 0), or name it in allow_float",
        )
    return value


def rounding_shift(ctx: LoweringContext, name: str, lo: int, shift: int, to: int) -> str:
    """Write `round(x / 2**shift)`, half up, of an int64 tensor that is at least `lo`, in dtype `to`."""
    shifted, lift = lifted_shift(ctx, name, lo, shift, to)
    if not lift:
        return shifted
    return ctx.node("Sub", [shifted, ctx.constant(lift, np.int32 if to == TensorProto.INT32 else np.int64)])


def lifted_shift(ctx: LoweringContext, name: str, lo: int, shift: int, to: int) -> tuple[str, int]:
    """Write what `rounding_shift` does plus a number that leaves nothing negative, and return that number too."""
    lift = max(0, -(lo >> shift))  # uint64 has the only right shift, so the tensor is made non-negative first
    biased = ctx.node("Add", [name, ctx.constant64((lift << shift) + (1 << (shift - 1)))])
    unsigned = ctx.cast(biased, TensorProto.UINT64)
    return ctx.cast(ctx.shifted_right(unsigned, shift), to), lift


def narrow_to(ctx: LoweringContext, value: FixedPoint, most: int) -> FixedPoint:
    """Reduce the integers to at most `most` bits by a rounding shift, to int32 where they then fit."""
    excess = value.bits - most
    if excess <= 0:
        return value
    lo, hi = (round_half_up(bound, excess) for bound in (value.lo, value.hi))
    narrow = fits_int32(lo, hi)
    small = fits_int32(lo, hi - 2 * min(lo, 0))  # also before the lift is taken off again
    to = TensorProto.INT32 if small else TensorProto.INT64
    name = rounding_shift(ctx, ctx.int64(value), value.lo, excess, to)
    if narrow and not small:
        name = ctx.cast(name, TensorProto.INT32)
    error = math.ldexp(value.error, -excess) + 0.5 * (1.0 + value.relative)
    return replace(value, name=name, scale=np.ldexp(value.scale, excess), lo=lo, hi=hi, error=error, narrow=narrow)


def fit_to(ctx: LoweringContext, value: FixedPoint, most: int) -> FixedPoint:
    """Reduce the integers to at most `most` bits: those that only a type bounds saturate, all others are shifted."""
    if not value.typed or value.bits <= most:
        return narrow_to(ctx, value, most)
    top = (1 << most) - 1
    ctx.assumed.append(f"{ctx.label}: integers beyond {top} saturate")
    return clipped_integers(ctx, value, -top, top)


def round_half_up(bound: int, shift: int) -> int:
    """Return a bound after a rounding shift."""
    return (bound + (1 << (shift - 1))) >> shift


def clipped_integers(ctx: LoweringContext, value: FixedPoint, lo: int, hi: int) -> FixedPoint:
    """Clip the integers; int64 tensors by comparisons, because the runtime's int64 Clip is wrong."""
    lo, hi = max(lo, value.lo), min(hi, value.hi)
    if (lo, hi) == (value.lo, value.hi):
        return value
    if lo > hi:  # every value is beyond one of the bounds
        lo = hi = lo if value.hi < lo else hi
    name = value.name
    if value.narrow:
        name = ctx.node("Clip", [name, ctx.constant(lo, np.int32), ctx.constant(hi, np.int32)])
    else:
        if lo > value.lo:
            name = ctx.node("Where", [ctx.node("Less", [name, ctx.constant64(lo)]), ctx.constant64(lo), name])
        if hi < value.hi:
            name = ctx.node("Where", [ctx.node("Greater", [name, ctx.constant64(hi)]), ctx.constant64(hi), name])
    return replace(value, name=name, lo=lo, hi=hi)


def single_scale(ctx: LoweringContext, value: FixedPoint) -> FixedPoint:
    """Multiply scales per channel and constants into the integers: one scale is left, and no constant."""
    if not np.any(value.scale):  # a scale of 0 forgets the integers
        nothing = ctx.node("Mul", [ctx.int64(value), ctx.constant64(0)])
        value = replace(value, name=nothing, lo=0, hi=0, narrow=False, error=0.0, relative=0.0, scale=np.ones(()))
    if value.scale.size == 1 and not np.any(value.constant):
        return replace(value, scale=value.scale.reshape(()), constant=np.zeros(()))
    if value.scale.size > 1:
        value = fit_to(ctx, value, ROOM - 2 - GUARD)  # so that factors have enough bits to be fine
    scales, top = np.abs(value.scale), max(value.reach, 1)
    whole = float(np.max(scales * top + np.abs(value.constant)))
    if whole == 0.0:
        return replace(value, scale=np.ones(()), constant=np.zeros(()))
    room = ROOM - 2 if np.any(value.constant) else min(ROOM - 2, value.bits + 30)
    unit = math.ldexp(whole, -room)
    if scales.size == 1:  # a power of two of the scale itself rounds nothing
        spare = math.floor(math.log2(scales.item() / unit)) if scales.item() else 0
        if spare < 0:
            return single_scale(ctx, narrow_to(ctx, value, value.bits + spare))
        unit = math.ldexp(scales.item(), -spare) if scales.item() else unit
    factors = np.rint(value.scale / unit).astype(np.int64)
    addend = np.rint(value.constant / unit).astype(np.int64)
    name = ctx.int64(value)
    if np.any(factors != 1):
        name = ctx.node("Mul", [name, ctx.constant64(factors)])
    if np.any(addend):
        name = ctx.node("Add", [name, ctx.constant64(addend)])
    lo, hi = _products(value, factors, addend)
    steepest, offs, none = float(np.max(np.abs(factors))), np.abs(value.scale / unit - factors), factors == 0
    off = float(np.max(offs))
    added = 0.5 + float(np.max(np.abs(addend))) * ULP if np.any(addend) else 0.0
    error = (steepest + off) * value.error + added + float(np.max(offs[none], initial=0.0)) * top
    relative = float(np.max(offs[~none] / np.abs(factors[~none]), initial=0.0))
    relative += value.relative + value.relative * relative
    if np.any(addend) and (np.min(addend) < 0 or lo < 0 or np.min(value.scale) < 0 or value.lo < 0):
        error, relative = error + (steepest + off) * value.relative * top + off * top, 0.0  # a sum may cancel
    found = FixedPoint(name, np.asarray(unit), lo, hi, error=error, relative=relative, typed=value.typed)
    return replace(found, masked=value.masked, floor=value.floor)


def _products(value: FixedPoint, factors: Array, addend: Array) -> tuple[int, int]:
    pairs = np.broadcast_arrays(factors, addend)
    rows = {(int(f), int(a)) for f, a in zip(pairs[0].reshape(-1), pairs[1].reshape(-1), strict=True)}
    ends = [f * bound + a for f, a in rows for bound in (value.lo, value.hi)]
    return min(ends), max(ends)


def scale_by(value: FixedPoint, factor: Array | float) -> FixedPoint:
    """Multiply by a constant: nothing is written, the scale changes."""
    scale, constant = value.scale * factor, value.constant * factor
    found = replace(require_unmasked(value), scale=scale, constant=constant)
    if is_power_of_two(np.asarray(factor)):
        return found
    off = 0.0 if exact_product(value.scale, factor) else 2 * ULP
    return replace(found, relative=value.relative + off, error=value.error + rounded(constant, scale))


def rounded(constant: Array, scale: Array) -> float:
    """Bound one rounding of a constant to float64, in units of the scale."""
    unit = float(largest(scale))
    return 2 * ULP * float(largest(constant)) / unit if unit else 0.0


def add_constant(value: FixedPoint, addend: Array | float) -> FixedPoint:
    """Add a constant: nothing is written, the constant changes."""
    constant = value.constant + addend
    error = value.error + rounded(constant, value.scale) if np.any(value.constant) else value.error
    return replace(value, constant=constant, error=error)


def negate(value: FixedPoint) -> FixedPoint:
    """Change the sign: nothing is written, the scale changes."""
    return replace(require_unmasked(value), scale=-value.scale, constant=-value.constant)


def multiply(ctx: LoweringContext, left: FixedPoint, right: FixedPoint) -> FixedPoint:
    """Write the product of two values; the operand with more bits is narrowed where 62 would not hold it."""
    square = left.name == right.name
    left, right = (require_unmasked(side) for side in (left, right))
    left, right = (single_scale(ctx, side) if np.any(side.constant) else side for side in (left, right))
    over = left.bits + right.bits - ROOM
    if over > 0:
        smaller = min(left.bits, right.bits, ROOM // 2)
        left, right = (fit_to(ctx, side, ROOM - smaller) for side in (left, right))
    ends = [x * y for x in (left.lo, left.hi) for y in (right.lo, right.hi)]
    lo, hi = min(ends), max(ends)
    if square:
        lo = 0 if left.lo <= 0 <= left.hi else min(left.lo**2, left.hi**2)
    narrow = left.narrow and right.narrow and fits_int32(lo, hi)
    names = [side.name if narrow else ctx.int64(side) for side in (left, right)]
    error = left.error * right.reach + right.error * left.reach + left.error * right.error
    error *= 1.0 + left.relative + right.relative
    relative = left.relative + right.relative + left.relative * right.relative
    if not exact_product(left.scale, right.scale):
        relative += 2 * ULP
    name, typed = ctx.node("Mul", names), left.typed or right.typed
    return FixedPoint(
        name, left.scale * right.scale, lo, hi, narrow=narrow, error=error, relative=relative, typed=typed
    )


def total(ctx: LoweringContext, value: FixedPoint, axes: Sequence[int], count: int, *, keepdims: int = 1) -> FixedPoint:
    """Write the sum over `axes`, which together have `count` elements; `axes` are of the tensor itself."""
    value = single_scale(ctx, require_unmasked(value))
    value = fit_to(ctx, value, SUM_ROOM - count.bit_length())
    lo, hi = value.lo * count, value.hi * count
    narrow = value.narrow and fits_int32(lo, hi)
    name = value.name if narrow else ctx.int64(value)
    summed = ctx.node("ReduceSum", [name, ctx.constant64(np.asarray(axes))], keepdims=keepdims)
    error, relative = value.error, value.relative
    if lo < 0 and relative:
        error, relative = value.spread, 0.0
    error *= count
    return FixedPoint(summed, value.scale, lo, hi, narrow=narrow, error=error, relative=relative, typed=value.typed)


def gather_table(ctx: LoweringContext, table: Array, index: str, shape_of: str, dtype: type = np.int32) -> str:
    """Write `table[index]` for an int32 index tensor."""
    flat = ctx.node("Reshape", [index, ctx.constant64(np.asarray([-1]))])
    found = ctx.node("GatherElements", [ctx.constant(table, dtype, "table"), flat], axis=0)
    return ctx.node("Reshape", [found, ctx.node("Shape", [shape_of])])


def term(ctx: LoweringContext, value: FixedPoint, reals: tuple[float, float], finest: float) -> Linear:
    """Convert a value to one int32 term, for the requantization.

    Args:
        ctx: where nodes are written.
        value: the value.
        reals: values outside these real bounds may be clipped to them.
        finest: unit that the clipped values need not be finer than; where int32 holds the whole range in such units,
            nothing is clipped.
    """
    if value.infinite and value.infinite < max(abs(real) for real in reals):
        raise Refused("it divides by a tensor that can be 0", "clip the divisor away from 0")
    value = _floored(ctx, value, reals)
    if not value.narrow:
        if math.ldexp(float(largest(value.scale)), value.bits - 29) > finest:
            value = clipped_integers(ctx, value, *_integer_bounds(value, reals))
        excess = max(value.bits - (29 if value.lo < 0 else 30), 0)  # the lift doubles a range that can be negative
        lift = 0
        if excess:
            name, lift = lifted_shift(ctx, value.name, value.lo, excess, TensorProto.INT32)
            lo, hi = (round_half_up(bound, excess) for bound in (value.lo, value.hi))
            error = math.ldexp(value.error, -excess) + 0.5 * (1.0 + value.relative)
            scale = np.ldexp(value.scale, excess)
            value = replace(value, name=name, lo=lo, hi=hi, error=error, scale=scale)
        else:
            value = replace(value, name=ctx.cast(value.name, TensorProto.INT32))
        if lift:
            return _linear(value, lift)
    return _linear(value, 0)


def _linear(value: FixedPoint, lift: int) -> Linear:
    zero, lo, hi = (np.asarray(v, np.int64) for v in (lift, value.lo + lift, value.hi + lift))
    terms = (Term(value.name, value.scale, zero, lo, hi),)
    return Linear(
        terms,
        constant=value.constant,
        source=value.source,
        error=float_chain_bound(value.spread) * largest(value.scale),
    )


def _integer_bounds(value: FixedPoint, reals: tuple[float, float]) -> tuple[int, int]:
    with np.errstate(divide="ignore", invalid="ignore"):
        ends = [(bound - value.constant) / value.scale for bound in reals]
    finite = [end[np.isfinite(end)] for end in ends]
    if not all(end.size for end in finite):
        return value.lo, value.hi
    lows, highs = (function(*(f(end) for end in finite)) for function, f in ((min, np.min), (max, np.max)))
    return math.floor(float(lows)) - 1, math.ceil(float(highs)) + 1


def _floored(ctx: LoweringContext, value: FixedPoint, reals: tuple[float, float]) -> FixedPoint:
    if not value.masked:
        return value
    if value.floor > reals[0]:
        raise Refused(f"a mask of {value.floor} is inside the range of its quantizer", "use minus infinity as mask")
    value = single_scale(ctx, value)
    lowest = min(value.lo, math.floor(reals[0] / float(value.scale)) - 1)
    if lowest.bit_length() > ROOM:
        raise Refused("its quantizer's range is far wider than its input", "recalibrate")
    name = ctx.node("Where", [value.masked, ctx.constant64(lowest), ctx.int64(value)])
    return replace(value, name=name, lo=lowest, hi=max(value.hi, lowest), narrow=False, masked="")


_ROOM = ROOM - 2 - GUARD  # bits of an operand beside whose steps another one is to have its own


def add(ctx: LoweringContext, left: FixedPoint, right: FixedPoint) -> FixedPoint:
    """Write the sum of two values at a common scale that is finer than both, exactly where their scales agree."""
    left, right = _beside(ctx, left, right), _beside(ctx, right, left)
    constant = left.constant + right.constant
    if not (left.masked and not left.reach) and not (right.masked and not right.reach):
        return _masks(ctx, left, right, _plain_sum(ctx, left, right), constant)
    rest = right if left.masked and not left.reach else left  # a mask alone adds nothing but itself
    return _masks(ctx, left, right, rest, constant)


def _plain_sum(ctx: LoweringContext, left: FixedPoint, right: FixedPoint) -> FixedPoint:
    plain = replace(left, constant=np.zeros(())), replace(right, constant=np.zeros(()))
    if np.array_equal(plain[0].scale, plain[1].scale):
        if (left.reach + right.reach).bit_length() > ROOM:  # both lose their last bit
            plain = fit_to(ctx, plain[0], left.bits - 1), fit_to(ctx, plain[1], right.bits - 1)
        return _sum(ctx, *plain, (1, 1), plain[0].scale)
    first, second = (single_scale(ctx, side) for side in plain)
    return _sum_of_scales(ctx, first, second)


def _masks(ctx: LoweringContext, left: FixedPoint, right: FixedPoint, total: FixedPoint, constant: Array) -> FixedPoint:
    masked = left.masked or right.masked
    if left.masked and right.masked:
        masked = ctx.node("Or", [left.masked, right.masked])
    both = np.any(left.constant) and np.any(right.constant)
    error = total.error + rounded(constant, total.scale) if both else total.error
    return replace(total, constant=constant, masked=masked, floor=left.floor + right.floor, error=error)


def _sum_of_scales(ctx: LoweringContext, left: FixedPoint, right: FixedPoint) -> FixedPoint:
    sides = [left, right]
    scales = [abs(float(side.scale)) for side in sides]
    exact = max(scales) / min(scales)
    whole = math.fsum(scale * side.reach for scale, side in zip(scales, sides, strict=True)) or 1.0
    unit = min(scales)
    # a mean's scale is a quotient in float64: close to a whole number of it is meant to be one (`off` states the rest)
    if abs(exact - round(exact)) > exact * 2.0**-48 or whole / unit >= 2.0 ** (ROOM - 2):
        sides, unit = _common_unit(ctx, sides, math.ldexp(whole, 2 - ROOM))
    ratios = [float(side.scale) / unit for side in sides]
    factors = (round(ratios[0]), round(ratios[1]))
    found = _sum(ctx, sides[0], sides[1], factors, np.asarray(unit))
    # the ratios themselves are rounded to float64
    off = math.fsum(
        (side.reach + side.spread) * (abs(r - f) + abs(r) * ULP)
        for side, r, f in zip(sides, ratios, factors, strict=True)
    )
    return replace(found, error=found.error + off)


def _common_unit(ctx: LoweringContext, sides: Sequence[FixedPoint], least: float) -> tuple[list[FixedPoint], float]:
    """Return the sides, narrowed if finer than `least`, and a unit of which they are nearly whole multiples.

    The unit is the scale of the side that reaches furthest over a power of two: 2**-GUARD of the finest scale, or as
    fine as `least` allows.
    """
    widest = max(range(len(sides)), key=lambda i: abs(float(sides[i].scale)) * sides[i].reach)
    kept = []
    for i, side in enumerate(sides):
        excess = math.ceil(math.log2(least / abs(float(side.scale))))
        if i != widest:
            excess = max(excess, side.bits - _ROOM)  # so that its factor has enough bits to be fine
        kept.append(narrow_to(ctx, side, max(side.bits - excess, 1)) if excess > 0 else side)
    finest = min(abs(float(side.scale)) for side in kept)
    scale = abs(float(kept[widest].scale))
    parts = math.floor(math.log2(scale / max(least, math.ldexp(finest, -GUARD))))
    return kept, max(math.ldexp(scale, -parts), least)


def _sum(
    ctx: LoweringContext, left: FixedPoint, right: FixedPoint, factors: tuple[int, int], scale: Array
) -> FixedPoint:
    ends = [sorted((side.lo * f, side.hi * f)) for side, f in zip((left, right), factors, strict=True)]
    lo, hi = ends[0][0] + ends[1][0], ends[0][1] + ends[1][1]
    narrow = left.narrow and right.narrow and fits_int32(lo, hi) and factors == (1, 1)
    names = []
    for side, factor in zip((left, right), factors, strict=True):
        name = side.name if narrow else ctx.int64(side)
        names.append(name if factor == 1 else ctx.node("Mul", [name, ctx.constant64(factor)]))
    same_sign = min(ends[0][0], ends[1][0]) >= 0
    relative = max(left.relative, right.relative) if same_sign else 0.0
    errors = [side.error if same_sign else side.spread for side in (left, right)]
    error = errors[0] * abs(factors[0]) + errors[1] * abs(factors[1])
    typed = left.typed or right.typed
    return FixedPoint(ctx.node("Add", names), scale, lo, hi, narrow=narrow, error=error, relative=relative, typed=typed)


def _beside(ctx: LoweringContext, value: FixedPoint, other: FixedPoint) -> FixedPoint:
    """Return an operand that only its type bounds, fitted beside another one whose steps the sum must keep."""
    if not value.typed or other.typed or value.scale.size != 1 or not np.any(value.scale):
        return value
    value = whole_steps(ctx, value)
    scale, steps = abs(float(value.scale.reshape(()))), np.abs(other.scale[other.scale != 0])
    if scale >= -MASK and not value.masked and not np.any(value.constant):
        return _swallowing(ctx, value)
    return (
        _within(ctx, value, float(np.min(steps)) * max(1.0, math.ldexp(other.reach, -_ROOM))) if steps.size else value
    )


def at_one_scale(ctx: LoweringContext, parts: Sequence[FixedPoint]) -> list[FixedPoint]:
    """Bring values of one scale each to a common scale."""
    if len({float(part.scale) for part in parts}) == 1:
        return list(parts)
    steps = [abs(float(part.scale)) for part in parts if not part.typed]
    if steps:
        parts = [_within(ctx, part, min(steps)) if part.typed else part for part in parts]
    whole = max(abs(float(part.scale)) * part.reach for part in parts) or 1.0
    parts, unit = _common_unit(ctx, parts, math.ldexp(whole, 2 - ROOM))
    found = []
    for part in parts:
        ratio = float(part.scale) / unit
        factor = round(ratio)
        name = ctx.node("Mul", [ctx.int64(part), ctx.constant64(factor)])
        lo, hi = sorted((part.lo * factor, part.hi * factor))
        error = part.error * abs(ratio) + (abs(ratio - factor) + abs(ratio) * ULP) * (part.reach + part.spread)
        found.append(replace(part, name=name, scale=np.asarray(unit), lo=lo, hi=hi, narrow=False, error=error))
    return found


def _within(ctx: LoweringContext, value: FixedPoint, step: float) -> FixedPoint:
    """Saturate a value that only its type bounds, if steps of this size would have no room beside it."""
    most = max(math.floor(math.ldexp(step, _ROOM) / float(np.max(np.abs(value.scale)))), 1)
    return fit_to(ctx, value, max(most.bit_length() - 1, 1))


def whole_steps(ctx: LoweringContext, value: FixedPoint) -> FixedPoint:
    """Add a constant of whole steps to the integers, as that of `(1 - mask) * lowest`."""
    if value.constant.size != 1 or not np.any(value.constant):
        return value
    steps = float((value.constant / value.scale).item())
    if abs(steps) > 2.0**24 or steps != round(steps):
        return value
    whole = round(steps)
    narrow = value.narrow and fits_int32(value.lo + whole, value.hi + whole)
    name, kind = (value.name, np.int32) if narrow else (ctx.int64(value), np.int64)
    name = ctx.node("Add", [name, ctx.constant(whole, kind)])
    return replace(value, name=name, lo=value.lo + whole, hi=value.hi + whole, constant=np.zeros(()), narrow=narrow)


def _swallowing(ctx: LoweringContext, value: FixedPoint) -> FixedPoint:
    """Return multiples of a number that swallows every score: a mask where they are negative, else 0 or 2**24."""
    zero = ctx.constant(0, np.int32 if value.narrow else np.int64)
    below, above = ("Less", "Greater") if float(value.scale.reshape(())) > 0 else ("Greater", "Less")
    masked = ctx.node(below, [value.name, zero])
    raised = ctx.cast(ctx.node(above, [value.name, zero]), TensorProto.INT32)
    ctx.assumed.append(f"{ctx.label}: what it adds swallows its other operand, and is 2**24 where it is above 0")
    scale = abs(float(value.scale.reshape(())))
    return FixedPoint(raised, np.asarray(-MASK), 0, 1, narrow=True, masked=masked, floor=-scale)
