"""Functions of fixed point by tables that are straight between their entries, with a proven error.

Between two entries a distance h apart, a chord differs from a function by at most h**2 / 8 times the largest second
derivative. Beyond the table of a smooth function, where it is a straight line up to a tiny tail, that line goes on. Of
an angle the fraction in turns is looked up: positions of a rotary embedding are integers without a bound of their own,
whose product with a frequency would lose its fraction in any fixed point; so the integer is cut into digits, and every
digit is multiplied by the fraction of a turn that its unit stands for.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType

import numpy as np
from onnx import NodeProto, TensorProto

from onnx_backend.integer.fixed_point.fixed_arithmetic import (
    ROOM,
    clipped_integers,
    fits_int32,
    gather_table,
    int64_value,
    narrow_to,
    require_unmasked,
    single_scale,
)
from onnx_backend.integer.fixed_point.to_fixed import to_fixed
from onnx_backend.integer.ir.context import Args, LoweringContext
from onnx_backend.integer.ir.exact_bounds import ULP
from onnx_backend.integer.ir.values import Array, FixedPoint, Joined, Refused, Value

Attributes = Mapping[str, float]
#: Tables have at most this many segments.
_MOST = 1 << 14
#: A smaller table will do if its chords are this near.
_NEAR = 2.0**-24


@dataclass(frozen=True)
class Curve:
    """The known properties of a function."""

    bend: float  # bound of its second derivative, on both sides of 0 (the slope may jump at 0)
    slope: float  # bound of its first derivative
    reach: float  # beyond plus or minus this it is a straight line up to `tail`
    tail: float  # bound of its difference from those lines
    left: float = 0.0  # slope of the line on the left
    right: float = 0.0  # slope of the line on the right


def _elu(attrs: Attributes) -> Curve:
    alpha = abs(float(attrs.get("alpha", 1.0)))
    return Curve(alpha, max(1.0, alpha), 24.0, alpha * 4e-11, right=1.0)


def _celu(attrs: Attributes) -> Curve:
    alpha = float(attrs.get("alpha", 1.0))
    if alpha <= 0:
        raise Refused(f"its alpha is {alpha}", "give it an alpha above 0")
    return Curve(1.0 / alpha, 1.0, 24.0 * alpha, alpha * 4e-11, right=1.0)


def _gelu(attrs: Mapping[str, object]) -> Curve:
    return Curve(1.2 if attrs.get("approximate") == "tanh" else 0.8, 1.13, 7.5, 1e-11, right=1.0)


#: By op type; the bounds of the derivatives are the closed forms' extrema, rounded up.
CURVES: Mapping[str, Callable[[Attributes], Curve]] = MappingProxyType(
    {
        "Celu": _celu,
        "Elu": _elu,
        "Erf": lambda a: Curve(0.968, 1.13, 4.8, 2e-11),
        "Gelu": _gelu,
        "Mish": lambda a: Curve(0.65, 1.1, 28.0, 4e-11, right=1.0),
        "Sigmoid": lambda a: Curve(0.0963, 0.25, 24.0, 4e-11),
        "Softplus": lambda a: Curve(0.25, 1.0, 24.0, 4e-11, right=1.0),
        "Swish": lambda a: Curve(0.5, 1.1, 28.0, 2e-11, right=1.0),
        "Tanh": lambda a: Curve(0.77, 1.0, 12.5, 3e-11),
    }
)


def bent(ctx: LoweringContext, value: FixedPoint, function: Callable[[Array], Array], curve: Curve) -> FixedPoint:
    """Write `function(value)` for a function of which `curve` holds."""
    value = narrow_to(ctx, single_scale(ctx, require_unmasked(value)), 40)
    if float(value.scale) < 0:
        curve = replace(curve, left=-curve.right, right=-curve.left)
    size, sign = abs(float(value.scale)), math.copysign(1.0, float(value.scale))
    far = math.ceil(min(curve.reach / size, 2.0**61))
    if value.lo >= far or value.hi <= -far:  # all of it lies on one of the lines
        first, last, curve = value.lo, value.hi, replace(curve, bend=0.0)
    else:
        first, last = max(value.lo, -far), min(value.hi, far)
    wide = segment_bits(last - first, size, curve)
    first = first >> wide << wide  # so that 0 is an entry
    count = max(-((first - last) >> wide), 1)
    top = value.reach * size * max(curve.slope, 1.0) + 2.0 + curve.reach
    unit = math.ldexp(size, math.ceil(math.log2(top / size)) - (ROOM - 3 - wide))
    xs = sign * (first + (np.arange(count + 1, dtype=np.float64) * 2.0**wide)) * size
    knots = np.rint(np.asarray(function(xs), np.float64) / unit)
    h = math.ldexp(size, wide)
    if value.lo < first:
        knots[0] = knots[1] - round(curve.left * h / unit)
    if value.hi > first + (count << wide):
        knots[-1] = knots[-2] + round(curve.right * h / unit)
    if not np.all(np.isfinite(knots)):
        raise Refused("it is not finite within its range", "clip its input")
    name, lo, hi = _chords(ctx, value, knots.astype(np.int64), (first, wide, count))
    error = (h * h / 8 * curve.bend + 4.0 * curve.tail + curve.slope * value.spread * size) / unit + 2.0
    error += top / unit * 16 * ULP  # of the places and of the function there, in float64
    return FixedPoint(name, np.asarray(math.ldexp(unit, -wide)), lo, hi, error=math.ldexp(error, wide))


def segment_bits(span: int, size: float, curve: Curve) -> int:
    """Return log2 of the integers per segment: as few segments as are precise enough, at most `_MOST`."""
    for wide in range(min(max(span.bit_length() - 1, 0), 28), -1, -1):
        h = math.ldexp(size, wide)
        if h * h / 8 * curve.bend <= _NEAR or (span >> max(wide - 1, 0)) > _MOST:
            return wide
    return 0


def _chords(ctx: LoweringContext, value: FixedPoint, knots: Array, place: tuple[int, int, int]) -> tuple[str, int, int]:
    """Write `knots[i] * 2**wide + (knots[i + 1] - knots[i]) * f` with the value's place `first + i * 2**wide + f`."""
    first, wide, count = place
    name = ctx.int64(value)
    lift = max(0, -((value.lo - first) >> wide))  # uint64 has the only right shift
    offset = ctx.node("Sub", [name, ctx.constant64(first)]) if first else name
    raised = ctx.node("Add", [offset, ctx.constant64(lift << wide)]) if lift else offset
    unsigned = ctx.shifted_right(ctx.cast(raised, TensorProto.UINT64), wide)
    ends = [((bound - first) >> wide) + lift for bound in (value.lo, value.hi)]
    index, high = _places(ctx, unsigned, (ends[0], ends[1]), lift, count)
    base = gather_table(ctx, knots[:-1] << wide, index, name, np.int64)
    slope = gather_table(ctx, np.diff(knots), index, name, np.int64)
    rest = ctx.node("Sub", [offset, ctx.node("Mul", [high, ctx.constant64(1 << wide)])])
    found = ctx.node("Add", [base, ctx.node("Mul", [slope, rest])])
    corners = [int(knot) << wide for knot in (knots.min(), knots.max())]
    for i, bound in ((0, value.lo), (count - 1, value.hi)):
        corners.append((int(knots[i]) << wide) + int(knots[i + 1] - knots[i]) * (bound - first - (i << wide)))
    return found, min(corners), max(corners)


def _places(ctx: LoweringContext, unsigned: str, ends: tuple[int, int], lift: int, count: int) -> tuple[str, str]:
    """Write places less their lift within 0..count-1, as int32 and as int64: in int32 where they fit, one Clip."""
    narrow = fits_int32(*ends)
    name = ctx.cast(unsigned, TensorProto.INT32 if narrow else TensorProto.INT64)
    clipped = clipped_integers(ctx, FixedPoint(name, np.ones(()), *ends, narrow=narrow), lift, lift + count - 1)
    index = clipped.name if narrow else ctx.cast(clipped.name, TensorProto.INT32)
    index = ctx.node("Sub", [index, ctx.constant(lift, np.int32)]) if lift else index
    if narrow:
        return index, ctx.cast(index, TensorProto.INT64)
    return index, ctx.node("Sub", [clipped.name, ctx.constant64(lift)]) if lift else clipped.name


_TURN = 2 * Fraction("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")
_DIGIT = 18  # bits of a digit: its product with a fraction, and the sum of four of these, stay below 2**63
_FRACTION = 42  # bits of the fraction of a turn
_INDEX = 12  # bits of it that are looked up; between two entries the table is straight
_REST = _FRACTION - _INDEX
_UNIT = 2.0**-28  # of the table's entries


def turned(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower Sin and Cos of a value in fixed point, or of several that are joined."""
    value = args[0]
    if isinstance(value, Joined):  # apart, since each may have scales of its own
        parts = (turned(ctx, node, [part]) for part in value.parts)
        return Joined(tuple(parts), value.axis, value.sizes, value.after)
    return _looked_up(ctx, require_unmasked(to_fixed(ctx, value)), 0.25 if node.op_type == "Cos" else 0.0)


def _looked_up(ctx: LoweringContext, value: FixedPoint, ahead: float) -> FixedPoint:
    phase, digits = _phase(ctx, value, ahead)
    index = ctx.cast(ctx.shifted_right(phase, _REST), TensorProto.INT32)
    rest = ctx.cast(ctx.node("BitwiseAnd", [phase, ctx.constant((1 << _REST) - 1, np.uint64)]), TensorProto.INT64)
    knots = np.rint(np.sin(2 * np.pi * np.arange((1 << _INDEX) + 1) / (1 << _INDEX)) / _UNIT).astype(np.int64)
    base = gather_table(ctx, knots[:-1] << _REST, index, phase, np.int64)
    slope = gather_table(ctx, np.diff(knots), index, phase, np.int64)
    name = ctx.node("Add", [base, ctx.node("Mul", [slope, rest])])
    turns = (digits * 2.0 ** (_DIGIT - 1) + 1) * 2.0**-_FRACTION  # every fraction is rounded
    error = 2 * math.pi * turns + value.spread * float(np.abs(value.scale).max())
    error += (2 * math.pi / (1 << _INDEX)) ** 2 / 8 + 2 * _UNIT
    top, scale = round(1 / _UNIT) << _REST, math.ldexp(_UNIT, -_REST)
    return int64_value(name, scale, -top, top, error=error / scale)


def _phase(ctx: LoweringContext, value: FixedPoint, ahead: float) -> tuple[str, int]:
    """Write the fraction of a turn that an angle and `ahead` make, in `_FRACTION` bits of uint64; return its digits."""
    name = ctx.int64(value)
    if value.lo:
        name = ctx.node("Sub", [name, ctx.constant64(value.lo)])
    name = ctx.cast(name, TensorProto.UINT64)
    digits = max(-(-(value.hi - value.lo).bit_length() // _DIGIT), 1)
    scale, constant = np.broadcast_arrays(value.scale, value.constant)
    start = [Fraction(float(c)) + value.lo * Fraction(float(s)) for s, c in zip(scale.flat, constant.flat, strict=True)]
    total = ctx.constant(_fractions([turn + Fraction(ahead) * _TURN for turn in start], scale.shape), np.uint64)
    for digit in range(digits):
        unit = _fractions([Fraction(float(s)) * (1 << _DIGIT * digit) for s in scale.flat], scale.shape)
        part = name
        if digit:
            part = ctx.shifted_right(part, _DIGIT * digit)
        if digit < digits - 1:
            part = ctx.node("BitwiseAnd", [part, ctx.constant((1 << _DIGIT) - 1, np.uint64)])
        total = ctx.node("Add", [ctx.node("Mul", [part, ctx.constant(unit, np.uint64)]), total])
    return ctx.node("BitwiseAnd", [total, ctx.constant((1 << _FRACTION) - 1, np.uint64)]), digits


def _fractions(angles: list[Fraction], shape: tuple[int, ...]) -> Array:
    """Return the fractions of a turn of angles in radians, in `_FRACTION` bits."""
    whole = 1 << _FRACTION
    return np.asarray([round(angle / _TURN * whole) % whole for angle in angles], np.uint64).reshape(shape)
