"""Smooth functions of fixed point by tables with straight lines between their entries, with a proven error.

Between two entries a distance h apart, a chord differs from a function by at most h**2 / 8 times the largest second
derivative, and by h / 4 times the jump of the slope where there is a kink. Outside the table the first and the last
chord go on, which is right for functions that end in straight lines.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from onnx import TensorProto

from onnx_backend.integer.context import Context
from onnx_backend.integer.values import Array, Refused, Wide
from onnx_backend.integer.wide import ROOM, constant64, gathered, int64, narrowed, single_scale, spread, unmasked

Attributes = Mapping[str, float]
#: Tables have at most this many segments.
_MOST = 1 << 14
#: A smaller table will do if its chords are this near.
_NEAR = 2.0**-24


@dataclass(frozen=True)
class Curve:
    """What is known about a function.

    Attributes:
        bend: bound of its second derivative, away from kinks.
        slope: bound of its first derivative.
        reach: beyond plus or minus this it is a straight line up to `tail`.
        tail: bound of what it differs from those lines.
        kink: largest jump of its slope.
    """

    bend: float
    slope: float
    reach: float
    tail: float
    kink: float = 0.0


def _elu(attrs: Attributes) -> Curve:
    alpha = float(attrs.get("alpha", 1.0))
    return Curve(abs(alpha), max(1.0, abs(alpha)), 24.0, abs(alpha) * 4e-11, abs(1.0 - alpha))


def _leaky(attrs: Attributes) -> Curve:
    alpha = float(attrs.get("alpha", 0.01))
    return Curve(0.0, max(1.0, abs(alpha)), 1.0, 0.0, abs(1.0 - alpha))


def _hard_sigmoid(attrs: Attributes) -> Curve:
    alpha, beta = float(attrs.get("alpha", 0.2)), float(attrs.get("beta", 0.5))
    far = max(abs(beta), abs(1.0 - beta)) / abs(alpha) if alpha else 1.0
    return Curve(0.0, abs(alpha), far + 1.0, 0.0, abs(alpha))


#: By op type; the bounds of the derivatives are the closed forms' extrema, rounded up.
CURVES: Mapping[str, Callable[[Attributes], Curve]] = MappingProxyType(
    {
        "Abs": lambda a: Curve(0.0, 1.0, 1.0, 0.0, 2.0),
        "Elu": _elu,
        "Erf": lambda a: Curve(0.968, 1.13, 4.8, 2e-11),
        "Gelu": lambda a: Curve(1.2 if a.get("approximate") == "tanh" else 0.8, 1.13, 7.5, 1e-11),
        "HardSigmoid": _hard_sigmoid,
        "HardSwish": lambda a: Curve(1 / 3, 1.5, 4.0, 0.0, 0.5),
        "LeakyRelu": _leaky,
        "Mish": lambda a: Curve(0.65, 1.1, 28.0, 4e-11),
        "Sigmoid": lambda a: Curve(0.0963, 0.25, 24.0, 4e-11),
        "Softplus": lambda a: Curve(0.25, 1.0, 24.0, 4e-11),
        "Swish": lambda a: Curve(0.5, 1.1, 28.0, 2e-11),
        "Tanh": lambda a: Curve(0.77, 1.0, 12.5, 3e-11),
    }
)


def bent(ctx: Context, value: Wide, function: Callable[[Array], Array], curve: Curve) -> Wide:
    """Write `function(value)` for a function of which `curve` holds.

    Raises:
        Refused: the value's range is too wide for its resolution.
    """
    value = narrowed(ctx, single_scale(ctx, unmasked(value)), 40)
    step = float(value.scale)
    sign = -1.0 if step < 0 else 1.0
    size = abs(step)
    first, last = (max(value.lo, -_integer(curve.reach, size)), min(value.hi, _integer(curve.reach, size)))
    if first >= last:  # all of it lies on one side
        first, last = (value.lo, value.lo + 1) if value.lo > 0 else (value.hi - 1, value.hi)
    wide = _segment_bits(last - first, size, curve)
    count = max(-((first - last) // (1 << wide)), 1)
    ends = [(value.lo - first) * size, (value.hi - first) * size]
    top = (max(abs(end) for end in ends) + 2 * curve.reach) * max(curve.slope, 1.0) + 2.0
    unit = math.ldexp(size, math.ceil(math.log2(top / size)) - (ROOM - 3 - wide))
    xs = sign * (first + (np.arange(count + 1, dtype=np.float64) * 2.0**wide)) * size
    knots = np.rint(np.asarray(function(xs), np.float64) / unit)
    if not np.all(np.isfinite(knots)) or np.max(np.abs(knots)) >= 2.0**61:
        raise Refused(
            "the range of its input is too wide for a table", "put a QuantizeLinear/DequantizeLinear pair before it"
        )
    name, lo, hi = _chords(ctx, value, knots.astype(np.int64), (first, wide, count))
    h = math.ldexp(size, wide)
    far = max(abs(end) for end in ends) / h + 1.0  # a chord that goes on enlarges the rounding of its ends
    beyond = value.lo < first or value.hi > first + (count << wide)
    error = (h * h / 8 * curve.bend + h / 4 * curve.kink + curve.tail * (2.0 + 2.0 * far if beyond else 1.0)) / unit
    error += (2.0 * far + 1.0 if beyond and not _exact_ends(knots, h, unit) else 1.0) + curve.slope * spread(
        value
    ) * size / unit
    return Wide(name, np.asarray(math.ldexp(unit, -wide)), lo, hi, error=math.ldexp(error, wide))


def _integer(real: float, size: float) -> int:
    return math.ceil(min(real / size, 2.0**61))


def _exact_ends(knots: Array, h: float, unit: float) -> bool:
    slopes = np.asarray([knots[1] - knots[0], knots[-1] - knots[-2]]) * unit / h
    return bool(np.all((slopes == 0) | (np.abs(slopes) == 1)))


def _segment_bits(span: int, size: float, curve: Curve) -> int:
    """Give log2 of the integers per segment: as few segments as are near enough, at most `_MOST`."""
    widest = max(span.bit_length() - 1, 0)
    for wide in range(widest, -1, -1):
        h = math.ldexp(size, wide)
        near = h * h / 8 * curve.bend + h / 4 * curve.kink <= _NEAR
        if near or (span >> max(wide - 1, 0)) > _MOST:
            return wide
    return 0


def _chords(ctx: Context, value: Wide, knots: Array, place: tuple[int, int, int]) -> tuple[str, int, int]:
    """Write `knots[i] * 2**wide + (knots[i + 1] - knots[i]) * f` with the value's place `first + i * 2**wide + f`."""
    first, wide, count = place
    b, name = ctx.builder, int64(ctx, value)
    lift = max(0, -((value.lo - first) >> wide)) << wide  # uint64 has the only right shift
    offset = b.node("Sub", [name, constant64(ctx, first)]) if first else name
    raised = b.node("Add", [offset, constant64(ctx, lift)]) if lift else offset
    high = b.node("BitShift", [b.cast(raised, TensorProto.UINT64), b.constant(wide, np.uint64)], direction="RIGHT")
    ends = [((bound - first) >> wide) for bound in (value.lo, value.hi)]
    if max(abs(end) for end in ends) >= 1 << 30:
        raise Refused(
            "the range of its input is too wide for a table", "put a QuantizeLinear/DequantizeLinear pair before it"
        )
    index = b.cast(high, TensorProto.INT32)
    if lift:
        index = b.node("Sub", [index, b.constant(lift >> wide, np.int32)])
    if ends[0] < 0 or ends[1] >= count:
        index = b.node("Clip", [index, b.constant(0, np.int32), b.constant(count - 1, np.int32)])
    base = gathered(ctx, knots[:-1] << wide, index, name, np.int64)
    slope = gathered(ctx, np.diff(knots), index, name, np.int64)
    start = b.node("Mul", [b.cast(index, TensorProto.INT64), constant64(ctx, 1 << wide)])
    rest = b.node("Sub", [offset, start])
    found = b.node("Add", [base, b.node("Mul", [slope, rest])])
    corners = [int(knot) << wide for knot in (knots.min(), knots.max())]
    outer = [
        (int(knots[i]) << wide) + int(knots[i + 1] - knots[i]) * (bound - first - (i << wide))
        for i, bound in ((0, value.lo), (count - 1, value.hi))
    ]
    return found, min(*corners, *outer), max(*corners, *outer)
