"""Sums of fixed point whose operands have scales of their own, masks beside them, or bounds known only by type."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from onnx import TensorProto

from onnx_backend.integer.fixed_point.fixed_arithmetic import (
    GUARD,
    ROOM,
    bits,
    constant64,
    fit_to,
    fits_int32,
    int64,
    narrow_to,
    reach,
    rounded,
    single_scale,
    spread,
)
from onnx_backend.integer.ir.context import LoweringContext
from onnx_backend.integer.ir.exact_bounds import MASK, ULP
from onnx_backend.integer.ir.values import Array, FixedPoint

_ROOM = ROOM - 2 - GUARD  # bits of an operand beside whose steps another one is to have its own


def add(ctx: LoweringContext, left: FixedPoint, right: FixedPoint) -> FixedPoint:
    """Write the sum of two values at a common scale that is finer than both, exactly where their scales agree."""
    left, right = _beside(ctx, left, right), _beside(ctx, right, left)
    constant = left.constant + right.constant
    if not (left.masked and not reach(left)) and not (right.masked and not reach(right)):
        return _masks(ctx, left, right, _plain_sum(ctx, left, right), constant)
    rest = right if left.masked and not reach(left) else left  # a mask alone adds nothing but itself
    return _masks(ctx, left, right, rest, constant)


def _plain_sum(ctx: LoweringContext, left: FixedPoint, right: FixedPoint) -> FixedPoint:
    plain = replace(left, constant=np.zeros(())), replace(right, constant=np.zeros(()))
    if np.array_equal(plain[0].scale, plain[1].scale):
        if (reach(left) + reach(right)).bit_length() > ROOM:  # both lose their last bit
            plain = fit_to(ctx, plain[0], bits(left) - 1), fit_to(ctx, plain[1], bits(right) - 1)
        return _sum(ctx, *plain, (1, 1), plain[0].scale)
    first, second = (single_scale(ctx, side) for side in plain)
    return _sum_of_scales(ctx, first, second)


def _masks(ctx: LoweringContext, left: FixedPoint, right: FixedPoint, total: FixedPoint, constant: Array) -> FixedPoint:
    masked = left.masked or right.masked
    if left.masked and right.masked:
        masked = ctx.builder.node("Or", [left.masked, right.masked])
    both = np.any(left.constant) and np.any(right.constant)
    error = total.error + rounded(constant, total.scale) if both else total.error
    return replace(total, constant=constant, masked=masked, floor=left.floor + right.floor, error=error)


def _sum_of_scales(ctx: LoweringContext, left: FixedPoint, right: FixedPoint) -> FixedPoint:
    sides = [left, right]
    scales = [abs(float(side.scale)) for side in sides]
    exact = max(scales) / min(scales)
    whole = math.fsum(scale * reach(side) for scale, side in zip(scales, sides, strict=True)) or 1.0
    unit = min(scales)
    # a mean's scale is a quotient in float64: close to a whole number of it is meant to be one (`off` states the rest)
    if abs(exact - round(exact)) > exact * 2.0**-48 or whole / unit >= 2.0 ** (ROOM - 2):
        sides, unit = _common_unit(ctx, sides, math.ldexp(whole, 2 - ROOM))
    ratios = [float(side.scale) / unit for side in sides]
    factors = (round(ratios[0]), round(ratios[1]))
    found = _sum(ctx, sides[0], sides[1], factors, np.asarray(unit))
    # the ratios themselves are rounded to float64
    off = math.fsum(
        (reach(side) + spread(side)) * (abs(r - f) + abs(r) * ULP)
        for side, r, f in zip(sides, ratios, factors, strict=True)
    )
    return replace(found, error=found.error + off)


def _common_unit(ctx: LoweringContext, sides: Sequence[FixedPoint], least: float) -> tuple[list[FixedPoint], float]:
    """Return the sides, narrowed if finer than `least`, and a unit of which they are nearly whole multiples.

    The unit is the scale of the side that reaches furthest over a power of two: 2**-GUARD of the finest scale, or as
    fine as `least` allows.
    """
    widest = max(range(len(sides)), key=lambda i: abs(float(sides[i].scale)) * reach(sides[i]))
    kept = []
    for i, side in enumerate(sides):
        excess = math.ceil(math.log2(least / abs(float(side.scale))))
        if i != widest:
            excess = max(excess, bits(side) - _ROOM)  # so that its factor has enough bits to be fine
        kept.append(narrow_to(ctx, side, max(bits(side) - excess, 1)) if excess > 0 else side)
    finest = min(abs(float(side.scale)) for side in kept)
    scale = abs(float(kept[widest].scale))
    parts = math.floor(math.log2(scale / max(least, math.ldexp(finest, -GUARD))))
    return kept, max(math.ldexp(scale, -parts), least)


def _sum(
    ctx: LoweringContext, left: FixedPoint, right: FixedPoint, factors: tuple[int, int], scale: Array
) -> FixedPoint:
    b = ctx.builder
    ends = [sorted((side.lo * f, side.hi * f)) for side, f in zip((left, right), factors, strict=True)]
    lo, hi = ends[0][0] + ends[1][0], ends[0][1] + ends[1][1]
    narrow = left.narrow and right.narrow and fits_int32(lo, hi) and factors == (1, 1)
    names = []
    for side, factor in zip((left, right), factors, strict=True):
        name = side.name if narrow else int64(ctx, side)
        names.append(name if factor == 1 else b.node("Mul", [name, constant64(ctx, factor)]))
    same_sign = min(ends[0][0], ends[1][0]) >= 0
    relative = max(left.relative, right.relative) if same_sign else 0.0
    errors = [side.error if same_sign else spread(side) for side in (left, right)]
    error = errors[0] * abs(factors[0]) + errors[1] * abs(factors[1])
    typed = left.typed or right.typed
    return FixedPoint(b.node("Add", names), scale, lo, hi, narrow=narrow, error=error, relative=relative, typed=typed)


def _beside(ctx: LoweringContext, value: FixedPoint, other: FixedPoint) -> FixedPoint:
    """Return an operand that only its type bounds, fitted beside another one whose steps the sum must keep."""
    if not value.typed or other.typed or value.scale.size != 1 or not np.any(value.scale):
        return value
    value = whole_steps(ctx, value)
    scale, steps = abs(float(value.scale.reshape(()))), np.abs(other.scale[other.scale != 0])
    if scale >= -MASK and not value.masked and not np.any(value.constant):
        return _swallowing(ctx, value)
    return (
        _within(ctx, value, float(np.min(steps)) * max(1.0, math.ldexp(reach(other), -_ROOM))) if steps.size else value
    )


def at_one_scale(ctx: LoweringContext, parts: Sequence[FixedPoint]) -> list[FixedPoint]:
    """Bring values of one scale each to a common scale."""
    if len({float(part.scale) for part in parts}) == 1:
        return list(parts)
    steps = [abs(float(part.scale)) for part in parts if not part.typed]
    if steps:
        parts = [_within(ctx, part, min(steps)) if part.typed else part for part in parts]
    whole = max(abs(float(part.scale)) * reach(part) for part in parts) or 1.0
    parts, unit = _common_unit(ctx, parts, math.ldexp(whole, 2 - ROOM))
    found = []
    for part in parts:
        ratio = float(part.scale) / unit
        factor = round(ratio)
        name = ctx.builder.node("Mul", [int64(ctx, part), constant64(ctx, factor)])
        lo, hi = sorted((part.lo * factor, part.hi * factor))
        error = part.error * abs(ratio) + (abs(ratio - factor) + abs(ratio) * ULP) * (reach(part) + spread(part))
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
    b, whole = ctx.builder, round(steps)
    narrow = value.narrow and fits_int32(value.lo + whole, value.hi + whole)
    name, kind = (value.name, np.int32) if narrow else (int64(ctx, value), np.int64)
    name = b.node("Add", [name, b.constant(whole, kind)])
    return replace(value, name=name, lo=value.lo + whole, hi=value.hi + whole, constant=np.zeros(()), narrow=narrow)


def _swallowing(ctx: LoweringContext, value: FixedPoint) -> FixedPoint:
    """Return multiples of a number that swallows every score: a mask where they are negative, else 0 or 2**24."""
    b = ctx.builder
    zero = b.constant(0, np.int32 if value.narrow else np.int64)
    below, above = ("Less", "Greater") if float(value.scale.reshape(())) > 0 else ("Greater", "Less")
    masked = b.node(below, [value.name, zero])
    raised = b.cast(b.node(above, [value.name, zero]), TensorProto.INT32)
    b.assumed.append(f"{b.label}: what it adds swallows its other operand, and is 2**24 where it is above 0")
    scale = abs(float(value.scale.reshape(())))
    return FixedPoint(raised, np.asarray(-MASK), 0, 1, narrow=True, masked=masked, floor=-scale)
