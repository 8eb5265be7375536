"""Lower norms: integer sums of a row and of its squares, one reciprocal square root per row.

With x = integers * scale and n elements per row, `n * sum(x**2) - sum(x)**2` is the variance in units of
`(scale / n)**2`, exactly; epsilon is added in that unit, made fine enough that it never vanishes. A row without any
variance has only zeros left of it, so the root is never taken of less than one unit.

Norms of 8-bit codes take sums and products of whole tensors in int32, and only numbers of rows in 64 bits. With u the
codes of a row, `c = u - round(mean)` are small, and so are their sum d and the sum a of their squares: the variance is
`v = n * a - d**2`. The result `(n * c - d) / sqrt(v + epsilon)` is `c * k - q` with two numbers per row, both cut into
whole units of the result and 14 bits below.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from onnx import NodeProto, TensorProto

from onnx_backend.integer.fixed_point.fixed_arithmetic import (
    ROOM,
    SUM_ROOM,
    add,
    add_constant,
    fit_to,
    fits_int32,
    multiply,
    narrow_to,
    require_unmasked,
    scale_by,
    single_scale,
    total,
)
from onnx_backend.integer.fixed_point.newton import Int32, reciprocal, reciprocal_root
from onnx_backend.integer.fixed_point.to_fixed import to_fixed
from onnx_backend.integer.ir.context import Args, LoweringContext
from onnx_backend.integer.ir.operations import Norm
from onnx_backend.integer.ir.values import Constant, FixedPoint, Lookup, Refused, Value
from onnx_backend.proto.nodes import attributes

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
    epsilon *= count**2 / float(value.encoding.scale) ** 2
    inverse = reciprocal_root(ctx, add_constant(rows.variance, epsilon))
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
    found = FixedPoint(name, scale, -top, top, narrow=True, error=error, relative=inverse.relative)
    if list(axes) == [-1]:
        ctx.rows[name] = found, Norm(value.name, hi, count, epsilon, float(scale), name)
    return found


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


_OF_SQUARES = (ROOM - 1) // 2  # bits of numbers whose squares stay below 2**61
_BETWEEN = "put a QuantizeLinear/DequantizeLinear pair in front of it"


def normalized_rows(
    ctx: LoweringContext, value: FixedPoint, axes: Sequence[int], count: int, epsilon: float, *, centred: bool
) -> FixedPoint:
    """Write `(x - mean) / sqrt(variance + epsilon)`, or without `centred` `x / sqrt(mean of squares + epsilon)`.

    Args:
        ctx: where nodes are written.
        value: x.
        axes: of a row.
        count: number of elements of a row.
        epsilon: not negative.
        centred: True if the mean is subtracted.
    """
    value = single_scale(ctx, require_unmasked(value))
    # the sum of squares has to be exact, and count times the sum of squares to stay below 2**61
    length = count.bit_length()
    value = fit_to(ctx, value, min(_OF_SQUARES - length, (SUM_ROOM - length) // 2))
    scale = float(value.scale)
    sign = math.copysign(1.0, scale)
    power = total(ctx, multiply(ctx, value, value), axes, count)
    if not centred:
        epsilon *= count / scale**2
        inverse = _inverse(ctx, ctx.int64(power), power.hi, epsilon)
        rows = replace(value, scale=np.asarray(sign))
        return scale_by(
            _sized(ctx, rows, inverse, 1.0, _unrest(value, 1.0 + math.sqrt(count), epsilon)),
            math.sqrt(count),
        )
    epsilon *= count**2 / scale**2
    sums = total(ctx, value, axes, count)
    whole = ctx.int64(sums)
    variance = ctx.node(
        "Sub", [ctx.node("Mul", [ctx.int64(power), ctx.constant64(count)]), ctx.node("Mul", [whole, whole])]
    )
    inverse = _inverse(ctx, variance, (count * (value.hi - value.lo)) ** 2 // 4 + 1, epsilon)
    lo, hi = count * value.lo - sums.hi, count * value.hi - sums.lo
    narrow = value.narrow and sums.narrow and fits_int32(lo, hi) and fits_int32(count * value.lo, count * value.hi)
    kind = np.int32 if narrow else np.int64
    names = [side.name if narrow else ctx.int64(side) for side in (value, sums)]
    above = ctx.node("Sub", [ctx.node("Mul", [names[0], ctx.constant(count, kind)]), names[1]])
    rows = FixedPoint(above, np.asarray(sign), lo, hi, narrow=narrow)
    root = math.sqrt(count)
    return _sized(ctx, rows, inverse, root, _unrest(value, 2.0 * count * (1.0 + root), epsilon))


def _inverse(ctx: LoweringContext, name: str, high: int, epsilon: float) -> FixedPoint:
    """Write `1 / sqrt(v + epsilon)` for an int64 tensor in 0..high, of which 0 is taken as 1."""
    empty = ctx.cast(ctx.node("Equal", [name, ctx.constant64(0)]), TensorProto.INT64)
    filled = FixedPoint(ctx.node("Add", [name, empty]), np.ones(()), 1, max(high, 1))
    return reciprocal_root(ctx, add_constant(filled, epsilon))


def _unrest(value: FixedPoint, times: float, epsilon: float) -> float:
    """Bound the effect of an error of the elements on the quotient: the smallest size of a row is that of epsilon.

    A rounding of the scale alone leaves rows of zeros as they are; any other row has a size of at least 1.
    """
    if value.inexact and not epsilon:
        raise Refused("its input is not exact and it has no epsilon", _BETWEEN)
    return times * value.spread / math.sqrt(epsilon if value.inexact else max(epsilon, 1.0))


def _sized(ctx: LoweringContext, rows: FixedPoint, inverse: FixedPoint, most: float, unrest: float) -> FixedPoint:
    """Multiply rows by the inverse of their size; no quotient is larger than `most`, even if the bounds are."""
    found = multiply(ctx, replace(rows, error=0.0, relative=0.0), inverse)
    unit = abs(float(found.scale))
    top = math.ceil(most / unit * (1.0 + 2.0**-16)) + 2
    return replace(found, lo=max(found.lo, -top), hi=min(found.hi, top), error=found.error + unrest / unit)


def last_axes_normalization(ctx: LoweringContext, node: NodeProto, args: Args, *, centred: bool = True) -> Value:
    """Lower LayerNormalization, or RMSNormalization; gain and bias may be float, quantized, or activations."""
    if any(node.output[1:]):
        raise Refused("its mean or deviation is used", "remove the further outputs")
    attrs, rank = attributes(node), ctx.rank(node.input[0])
    axes = list(range(int(attrs.get("axis", -1)) % rank, rank))
    count = math.prod(ctx.sizes(node.input[0], axes))
    epsilon = float(attrs.get("epsilon", 1e-5))
    axes = axes if len(axes) > 1 else [-1]
    found = _normalized(ctx, args[0], axes, count, epsilon, centred=centred)
    return _affine(ctx, found, args[1:])


def _normalized(
    ctx: LoweringContext, value: Value | None, axes: Sequence[int], count: int, epsilon: float, *, centred: bool
) -> FixedPoint:
    """Write a norm of codes in their own way, where its numbers fit, and of any other value in fixed point."""
    if centred and isinstance(value, Lookup) and are_codes(value, count):
        with suppress(Refused):
            return normalized_codes(ctx, value, axes, count, epsilon)
    found = normalized_rows(ctx, to_fixed(ctx, value), axes, count, epsilon, centred=centred)
    if centred or list(axes) != [-1] or not isinstance(value, Lookup) or not are_codes(value, count):
        return found
    assert value.encoding is not None  # checked by `are_codes`
    scale, hi, zero = value.encoding.scale, value.encoding.hi, value.encoding.zero_point
    found = narrow_to(ctx, found, _BITS)
    unit = float(found.scale) / math.sqrt(count)
    ctx.rows[found.name] = found, Norm(value.name, hi, count, epsilon * count / scale**2, unit, found.name, zero)
    return found


def _affine(
    ctx: LoweringContext, value: FixedPoint, parameters: Args, shape: Sequence[int] | None = None
) -> FixedPoint:
    """Apply a gain and a bias."""
    for index, parameter in enumerate(parameters):
        if parameter is None:
            continue
        if isinstance(parameter, Constant):
            array = parameter.values.astype(np.float64)
            array = array if shape is None else array.reshape(tuple(shape))
            value = scale_by(value, array) if index == 0 else add_constant(value, array)
        elif shape is None:
            other = to_fixed(ctx, parameter)
            value = multiply(ctx, value, other) if index == 0 else add(ctx, value, other)
        else:
            raise Refused("its gain or bias is an activation", "store it as an initializer")
    return value


def instance_normalization(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower InstanceNormalization over the spatial axes."""
    rank = ctx.rank(node.input[0])
    axes = list(range(2, rank))
    count = math.prod(ctx.sizes(node.input[0], axes))
    epsilon = float(attributes(node).get("epsilon", 1e-5))
    found = _normalized(ctx, args[0], axes, count, epsilon, centred=True)
    return _affine(ctx, found, args[1:], (-1, *(1 for _ in axes)))


def group_normalization(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower GroupNormalization: every group is one row; gain and bias are per channel (per group before opset 21)."""
    attrs, rank = attributes(node), ctx.rank(node.input[0])
    groups = int(attrs["num_groups"])
    channels, *spatial = ctx.sizes(node.input[0], list(range(1, rank)))
    value = single_scale(ctx, require_unmasked(to_fixed(ctx, args[0])))
    grouped = replace(value, name=ctx.node("Reshape", [value.name, ctx.constant64(np.asarray([0, groups, -1]))]))
    count = channels // groups * math.prod(spatial)
    found = normalized_rows(ctx, grouped, [2], count, float(attrs.get("epsilon", 1e-5)), centred=True)
    found = replace(found, name=ctx.node("Reshape", [found.name, ctx.constant64(np.asarray([0, channels, *spatial]))]))
    parameters = [_per_channel(arg, channels) for arg in args[1:]]
    return _affine(ctx, found, parameters, (-1, *(1 for _ in spatial)))


def _per_channel(parameter: Value | None, channels: int) -> Value | None:
    if isinstance(parameter, Constant) and parameter.values.size < channels:
        return Constant(parameter.values.repeat(channels // parameter.values.size))
    return parameter


def mean_variance_normalization(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower MeanVarianceNormalization; the standard's 1e-9 beside the deviation is left out, as an error."""
    axes = [int(axis) % ctx.rank(node.input[0]) for axis in attributes(node).get("axes", [0, 2, 3])]
    count = math.prod(ctx.sizes(node.input[0], axes))
    value = single_scale(ctx, require_unmasked(to_fixed(ctx, args[0])))
    found = normalized_rows(ctx, value, axes, count, 0.0, centred=True)
    least = abs(float(value.scale)) / count  # of a deviation that is not 0
    return replace(found, relative=found.relative + 1e-9 / least)


def lp_normalization(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower LpNormalization: a row over its sum of magnitudes (p=1) or over the root of its sum of squares (p=2)."""
    attrs = attributes(node)
    axis = int(attrs.get("axis", -1))
    count = ctx.sizes(node.input[0], [axis])[0]
    value = to_fixed(ctx, args[0])
    if int(attrs.get("p", 2)) == 2:
        found = normalized_rows(ctx, value, [axis], count, 0.0, centred=False)
        return scale_by(found, 1.0 / math.sqrt(count))
    value = narrow_to(ctx, single_scale(ctx, require_unmasked(value)), 31)
    if value.inexact:
        raise Refused("its input is not exact", _BETWEEN)
    size = replace(value, name=ctx.node("Abs", [ctx.int64(value)]), lo=0, hi=value.reach, narrow=False)
    sums = total(ctx, size, [axis], count)
    empty = ctx.cast(ctx.node("Equal", [sums.name, ctx.constant64(0)]), TensorProto.INT64)
    sums = replace(sums, name=ctx.node("Add", [sums.name, empty]), lo=1, hi=max(sums.hi, 1), scale=np.ones(()))
    rows = replace(value, scale=np.asarray(math.copysign(1.0, float(value.scale))))
    return _sized(ctx, rows, reciprocal(ctx, sums), 1.0, 0.0)
