"""Lower arithmetic on values without a quantizer behind them, where the short forms for codes do not apply."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from onnx import NodeProto, TensorProto, helper

from onnx_backend.integer.fixed_point.curves import CURVES, bent
from onnx_backend.integer.fixed_point.fixed_arithmetic import (
    ROOM,
    add,
    add_constant,
    at_one_scale,
    error_of_exponential,
    fit_to,
    fits_int32,
    int64_value,
    multiply,
    narrow_to,
    negate,
    require_unmasked,
    rounded,
    scale_by,
    single_scale,
    total,
)
from onnx_backend.integer.fixed_point.newton import (
    factors_of_exponential,
    logarithm,
    quotient,
    reciprocal,
    reciprocal_root,
    square_root,
)
from onnx_backend.integer.fixed_point.to_fixed import clip, integer_scores, to_fixed
from onnx_backend.integer.ir.context import (
    Args,
    Lowering,
    LoweringContext,
    constant_integers,
    integer_name,
    label,
    reduced_axes,
)
from onnx_backend.integer.ir.exact_bounds import MASK, ULP, largest
from onnx_backend.integer.ir.values import (
    Array,
    Constant,
    FixedPoint,
    Linear,
    Lookup,
    Refused,
    Value,
)
from onnx_backend.integer.lowering.movement.moves import MOVES
from onnx_backend.integer.lowering.nonlinear.selection import scatter as choose_scattered
from onnx_backend.integer.lowering.nonlinear.tables import SELU, TABLES
from onnx_backend.proto.nodes import attributes


def wide_clip(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Clip a value to constant bounds."""
    bounds = [-math.inf, math.inf]
    for index, bound in enumerate(args[1:]):
        if bound is not None:
            if not isinstance(bound, Constant) or bound.values.size != 1:
                raise Refused("one of its bounds is not a constant scalar", "store the bounds as initializers")
            bounds[index] = float(bound.values.reshape(-1)[0])
    return clip(ctx, to_fixed(ctx, args[0]), bounds[0], bounds[1])


def magnitude(ctx: LoweringContext, value: FixedPoint) -> FixedPoint:
    """Compute the magnitude of a value."""
    value = single_scale(ctx, require_unmasked(value))
    lo = 0 if value.lo <= 0 <= value.hi else min(abs(value.lo), abs(value.hi))
    return replace(value, name=ctx.node("Abs", [value.name]), lo=lo, hi=value.reach, scale=np.abs(value.scale))


def wide_leaky_relu(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Multiply negative values by a slope."""
    value = to_fixed(ctx, args[0])
    below = scale_by(clip(ctx, value, -math.inf, 0.0), float(attributes(node).get("alpha", 0.01)))
    return add(ctx, clip(ctx, value, 0.0, math.inf), below)


def wide_prelu(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Multiply negative values by slopes of their own, stored or computed."""
    value, slope = to_fixed(ctx, args[0]), args[1]
    below = clip(ctx, value, -math.inf, 0.0)
    if isinstance(slope, Constant):
        below = scale_by(below, slope.values.astype(np.float64))
    else:
        below = multiply(ctx, below, to_fixed(ctx, slope, "its slope"))
    return add(ctx, clip(ctx, value, 0.0, math.inf), below)


def wide_hard_sigmoid(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Clip a straight line to 0..1."""
    attrs = attributes(node)
    return _ramp(ctx, to_fixed(ctx, args[0]), float(attrs.get("alpha", 0.2)), float(attrs.get("beta", 0.5)))


def wide_hard_swish(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Multiply a value by its HardSigmoid."""
    value = narrow_to(ctx, single_scale(ctx, to_fixed(ctx, args[0])), 31)
    return multiply(ctx, value, narrow_to(ctx, _ramp(ctx, value, 1.0 / 6.0, 0.5), 31))


def _ramp(ctx: LoweringContext, value: FixedPoint, alpha: float, beta: float) -> FixedPoint:
    return clip(ctx, add_constant(scale_by(value, alpha), beta), 0.0, 1.0)


_FINE = 16  # bits that the smallest reciprocal needs
_SUMMED = 16  # bits that summands keep in int32
_BETWEEN = "put a QuantizeLinear/DequantizeLinear pair between the two ops"


def wide_add(ctx: LoweringContext, node: NodeProto, args: Args, sign: int = 1) -> FixedPoint:
    """Add two values, or a constant to one; with a `sign` of -1 subtract."""
    left, right = args
    for side, other in ((left, right), (right, left)):
        if isinstance(side, Constant) and np.all(np.isfinite(side.values)) and np.all(side.values > MASK):
            number = side.values.astype(np.float64)
            if side is right:
                return add_constant(to_fixed(ctx, other), sign * number)
            value = to_fixed(ctx, other)
            return add_constant(value if sign > 0 else negate(value), number)
    second = to_fixed(ctx, right, "its second input")
    return add(ctx, to_fixed(ctx, left, "its first input"), second if sign > 0 else negate(second))


def wide_mul(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Multiply two values, or a value and a constant."""
    left, right = args
    if isinstance(left, Constant):
        left, right = right, left
    if isinstance(right, Constant):
        if not np.all(np.isfinite(right.values)):
            raise Refused("it multiplies by infinity", "replace the constant by a finite one")
        return _times(to_fixed(ctx, left), right, right.values.astype(np.float64))
    if left is right:
        value = to_fixed(ctx, left)
        return multiply(ctx, value, value)
    return multiply(ctx, to_fixed(ctx, left, "its first input"), to_fixed(ctx, right, "its second input"))


def _times(value: FixedPoint, constant: Constant, numbers: Array, off: float = 0.0) -> FixedPoint:
    """Multiply by the numbers of a constant, `off` as a share; float32 rounded those that are stored as integers."""
    found = scale_by(value, numbers)
    if constant.coded is not None or constant.blocks is not None:
        off += 2.0**-23
    magnitude = float(largest(found.constant)) / (float(largest(found.scale)) or 1.0)
    return replace(found, relative=found.relative + off, error=found.error + off * magnitude)


def wide_div(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Divide by a value whose static bounds exclude 0: by a table of reciprocals, or by an integer division."""
    left, right = args
    if isinstance(right, Constant):
        return _times(to_fixed(ctx, left), right, 1.0 / right.values.astype(np.float64), ULP)
    if isinstance(left, Constant):
        return _times(inverse(ctx, node.input[1], right, ROOM - 9), left, left.values.astype(np.float64))
    numerator = to_fixed(ctx, left, "its first input")
    room = max(ROOM - numerator.bits, 31)  # of a factor beside the numerator
    if not isinstance(right, Lookup):
        right = _in_reach(ctx, node.input[1], to_fixed(ctx, right, "its second input"))
        if right.lo > 0 and right.bits - right.lo.bit_length() > room - _FINE:
            return quotient(ctx, numerator, right)
    divisor = inverse(ctx, node.input[1], right, room)
    if not divisor.infinite:
        return multiply(ctx, numerator, divisor)
    if numerator.constant.any() or numerator.inexact or numerator.scale.size != 1:
        raise Refused("it divides by a tensor that can be 0", "clip the divisor away from 0")
    ctx.undefined[label(node)] = "0 / 0 is 0; in the Q/DQ file it is NaN, which runtimes quantize differently"
    least = divisor.infinite * abs(float(numerator.scale))  # of any quotient by 0, except 0 / 0, which is 0 here
    return replace(multiply(ctx, numerator, replace(divisor, infinite=0.0)), infinite=least)


def inverse(ctx: LoweringContext, name: str, value: Value | None, most: int) -> FixedPoint:
    """Return `1 / value`; of codes by a table with up to `most` bits, in which a large number means infinity.

    Args:
        ctx: where nodes are written.
        name: of the tensor in the Q/DQ model.
        value: of that tensor.
        most: bits of a table.
    """
    if not isinstance(value, Lookup):
        return reciprocal(ctx, _in_reach(ctx, name, to_fixed(ctx, value, "its second input")))
    least, values = ctx.reach(name)[0], value.values.astype(np.float64)
    with np.errstate(divide="ignore"):
        inverted = 1.0 / (np.maximum(values, least) if least > 0.0 else values)
    zero = np.isinf(inverted)
    top = float(np.abs(inverted[~zero]).max(initial=0.0)) * 2.0**16 if zero.any() else 0.0
    return replace(to_fixed(ctx, Lookup(value.name, np.where(zero, top, inverted), None), most=most), infinite=top)


def _in_reach(ctx: LoweringContext, name: str, value: FixedPoint) -> FixedPoint:
    """Return a tensor of the Q/DQ model with the static bounds that the planner knows of it."""
    scale, constant = float(value.scale.reshape(-1)[0]), float(value.constant.reshape(-1)[0])
    if value.scale.size != 1 or value.constant.size != 1 or scale <= 0.0 or value.masked:
        return value
    low, high = ((end - constant) / scale for end in ctx.reach(name))
    off = value.spread + 1.0 + rounded(value.constant, value.scale)
    lo = min(max(math.floor(low * (1.0 - 4 * ULP) - off), value.lo), value.hi) if low > 0.0 else value.lo
    hi = max(min(math.ceil(high + off), value.hi), lo) if math.isfinite(high) else value.hi
    if (lo, hi) != (value.lo, value.hi):
        ctx.proven[value.name] = lo, hi
    return replace(value, lo=lo, hi=hi)


def wide_pow(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Raise a value to a small whole power, to 1/2 or to -1/2."""
    base, exponent = args
    if not isinstance(exponent, Constant) or exponent.values.size != 1:
        raise Refused("its exponent is not one stored number", "store the exponent as a scalar")
    power = float(exponent.values.reshape(-1)[0])
    value = _in_reach(ctx, node.input[0], to_fixed(ctx, base))
    if power in (0.5, -0.5):
        return square_root(ctx, value) if power > 0 else reciprocal_root(ctx, value)
    if power not in (-3.0, -2.0, -1.0, 1.0, 2.0, 3.0, 4.0):
        raise Refused(f"its exponent is {power}", _BETWEEN)
    found = value
    for _ in range(int(abs(power)) - 1):
        found = multiply(ctx, found, value)
    return found if power > 0 else reciprocal(ctx, found)


def wide_reciprocal(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Compute the reciprocal of a value whose static bounds exclude 0."""
    return reciprocal(ctx, _in_reach(ctx, node.input[0], to_fixed(ctx, args[0])))


def wide_log(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Compute the logarithm of a positive value, of an accumulator with the bound that it is clipped at."""
    value = args[0]
    if isinstance(value, Linear) and 0.0 < value.lo < value.hi:
        return logarithm(ctx, to_fixed(ctx, replace(value, lo=-np.inf)), value.lo)
    return logarithm(ctx, _in_reach(ctx, node.input[0], to_fixed(ctx, value)))


def wide_exp(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Compute the exponential: two tables for a high and a low part, in units of the largest possible result."""
    given = _in_reach(ctx, node.input[0], to_fixed(ctx, args[0]))
    value = narrow_to(ctx, single_scale(ctx, require_unmasked(given)), 30)
    step = abs(float(value.scale))
    highest = max(value.lo * float(value.scale), value.hi * float(value.scale))
    if highest > 28.0:
        raise Refused(
            f"its input can reach {highest:.4g}",
            "clip its input, or put a QuantizeLinear/DequantizeLinear pair before it",
        )
    last = min(value.hi - value.lo, math.ceil((highest + 22.0) / step))
    rising = float(value.scale) > 0
    ends = [ctx.constant64(value.hi), ctx.int64(value)] if rising else [ctx.int64(value), ctx.constant64(value.lo)]
    below = ctx.cast(ctx.node("Sub", ends), TensorProto.INT32)
    below = ctx.node("Clip", [below, ctx.constant(0, np.int32), ctx.constant(last, np.int32)])
    low = max((last.bit_length() + 1) // 2, 1)
    parts = factors_of_exponential(ctx, below, step, last, 30, low)
    unit = math.exp(highest) * 2.0**-60
    # half a unit of both tables and the rounding of float64; beyond the last entry, the smallest result is used
    error = 2.0**30 + 2.0**16 + math.exp(-22.0) / unit
    relative = error_of_exponential(value.spread * step + (abs(highest) + 4.0) * 4 * ULP)
    return int64_value(ctx.node("Mul", parts), unit, 0, 1 << 60, error=error, relative=relative)


def of_one(function: Callable[[LoweringContext, FixedPoint], FixedPoint]) -> Lowering:
    """Make the lowering of a function of one value."""
    return lambda ctx, node, args: function(ctx, to_fixed(ctx, args[0]))


def curve(op_type: str, function: Callable[[Array, Mapping[str, float]], Array]) -> Lowering:
    """Make the lowering of a function of `curves.CURVES`."""

    def lower(ctx: LoweringContext, node: NodeProto, args: Args) -> FixedPoint:
        attrs = attributes(node)
        with np.errstate(all="ignore"):
            return bent(ctx, to_fixed(ctx, args[0]), lambda x: function(x, attrs), CURVES[op_type](attrs))

    return lower


def wide_selu(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Compute an Elu times `gamma`: the line of a curve must have a slope that is exact, as 1 is."""
    attrs = {**SELU, **attributes(node)}
    with np.errstate(all="ignore"):
        elu = bent(ctx, to_fixed(ctx, args[0]), lambda x: TABLES["Elu"](x, attrs), CURVES["Elu"](attrs))
    return scale_by(elu, float(attrs["gamma"]))


def wide_reduction(ctx: LoweringContext, node: NodeProto, args: Args, *, mean: bool = False) -> Value:
    """Sum or average over axes of static sizes: an average is the sum with another scale."""
    axes = reduced_axes(ctx, node, args)
    count = 1 if axes is None else math.prod(ctx.sizes(node.input[0], axes))
    if count == 0:
        raise Refused("it reduces over an axis of size 0", "remove the node")
    found = to_fixed(ctx, args[0])
    if axes is not None:
        found = total(ctx, found, axes, count, keepdims=int(attributes(node).get("keepdims", 1)))
    return scale_by(found, 1.0 / count) if mean else found


def cum_sum(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower CumSum along an axis of static size: sums of integers are exact."""
    axis = constant_integers(args[1])
    if axis is None:
        raise Refused("its axis is not constant", "store the axis as an initializer")
    (count,) = ctx.sizes(node.input[0], axis)
    value = single_scale(ctx, require_unmasked(to_fixed(ctx, args[0])))
    (value,) = _addable(ctx, [value], count)
    name = ctx.node("CumSum", [value.name, ctx.constant(axis[0], np.int64)], **attributes(node))
    return _sums_of(ctx, name, value, value, count)


def scatter(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower ScatterND and ScatterElements, which choose among codes or add up."""
    if attributes(node).get("reduction", "none") == "add":
        return replace(_scattered_sum(ctx, node, args), source=label(node))
    return choose_scattered(ctx, node, args)


def _scattered_sum(ctx: LoweringContext, node: NodeProto, args: Args) -> FixedPoint:
    """Write ScatterND and ScatterElements that add to what is there, as sums over the edges of a graph do."""
    attrs, shape = attributes(node), ctx.shapes.get(node.input[1])
    axes = range(len(shape or ()) - 1) if node.op_type == "ScatterND" else [int(attrs.get("axis", 0))]
    count = math.prod(ctx.sizes(node.input[1], axes)) if shape else ctx.rank(node.input[1])
    whats = ("its first input", "", "its updates")
    data, updates = (single_scale(ctx, require_unmasked(to_fixed(ctx, args[i], whats[i]))) for i in (0, 2))
    if not data.reach and not data.spread:  # zeros have any scale
        parts = [replace(data, scale=updates.scale, error=0.0), updates]
    else:
        parts = at_one_scale(ctx, [data, updates])
    data, updates = _addable(ctx, parts, count + 1)
    name = ctx.node(node.op_type, [data.name, integer_name(ctx, args[1]), updates.name], **attrs)
    return _sums_of(ctx, name, data, updates, count)


def _addable(ctx: LoweringContext, parts: Sequence[FixedPoint], count: int) -> list[FixedPoint]:
    """Return values of one scale as integers of one type of which so many add up.

    That is int32 where it leaves them 16 bits, which rounds what has more; else int64.
    """
    widest = max(part.bits for part in parts)
    most = 31 - count.bit_length()
    if most < min(_SUMMED, widest):
        most = ROOM - count.bit_length()
    found = [narrow_to(ctx, part, part.bits - max(widest - most, 0)) for part in parts]
    if most > 31:
        return [replace(part, name=ctx.int64(part), narrow=False) for part in found]
    return [integer_scores(ctx, part) for part in found]


def _sums_of(ctx: LoweringContext, name: str, first: FixedPoint, value: FixedPoint, count: int) -> FixedPoint:
    """Return the tensor of sums of one value and up to `count` others as a value."""
    lo, hi = min(first.lo, 0) + min(value.lo, 0) * count, max(first.hi, 0) + max(value.hi, 0) * count
    ctx.proven[name] = lo, hi
    error = first.spread + value.spread * count
    return FixedPoint(name, value.scale, lo, hi, narrow=value.narrow, error=error)


def wide_matmul(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Multiply matrices of which at least one is neither codes nor a stored weight, in int32 or int64."""
    depth = ctx.sizes(node.input[0], [-1])[0]
    sides = [
        require_unmasked(to_fixed(ctx, arg, what))
        for arg, what in zip(args, ("its first input", "its second input"), strict=True)
    ]
    left, right = sides
    if left.scale.size > 1 or np.any(left.constant):
        left = single_scale(ctx, left)
    per_column = right.scale.ndim == 1 or (right.scale.ndim > 1 and right.scale.size == right.scale.shape[-1])
    if np.any(right.constant) or (right.scale.size > 1 and not per_column):
        right = single_scale(ctx, right)
    room = ROOM - depth.bit_length()
    if left.bits + right.bits > room:
        smaller = min(left.bits, right.bits, room // 2)
        left, right = (fit_to(ctx, side, room - smaller) for side in (left, right))
    most = depth * left.reach * right.reach
    narrow = left.narrow and right.narrow and fits_int32(-most, most)
    names = [side.name if narrow else ctx.int64(side) for side in (left, right)]
    error = depth * (left.spread * right.reach + right.spread * left.reach + left.spread * right.spread)
    lo = 0 if left.lo >= 0 and right.lo >= 0 else -most
    scale = left.scale.reshape(()) * (right.scale.reshape(-1) if right.scale.size > 1 else right.scale.reshape(()))
    return FixedPoint(ctx.node("MatMul", names), scale, lo, most, narrow=narrow, error=error)


def wide_gemm(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Multiply matrices as `wide_matmul` does, and add a bias."""
    attrs = attributes(node)
    if attrs.get("transA", 0):
        raise Refused("it transposes an input that is not quantized", _BETWEEN)
    turn = helper.make_node("Transpose", [node.input[1]], [node.input[1]], perm=[1, 0])
    right = MOVES["Transpose"](ctx, turn, [args[1]]) if attrs.get("transB", 0) else args[1]
    value = wide_matmul(ctx, node, [args[0], right])
    alpha, beta = (np.float32(attrs.get(key, 1.0)) for key in ("alpha", "beta"))
    if alpha != 1.0:
        value = wide_mul(ctx, node, [value, Constant(np.asarray(alpha))])
    if len(args) < 3 or args[2] is None:
        return value
    bias = args[2] if beta == 1.0 else wide_mul(ctx, node, [args[2], Constant(np.asarray(beta))])
    return wide_add(ctx, node, [value, bias])
