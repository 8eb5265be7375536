"""Convert any value to fixed point and back: codes and accumulators exactly, functions of codes by tables."""

import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial, reduce
from types import MappingProxyType

import numpy as np
from onnx import NodeProto, TensorProto

from onnx_backend.integer.fixed_point.fixed_arithmetic import (
    ROOM,
    add,
    at_one_scale,
    clipped_integers,
    fits_int32,
    gather_table,
    require_unmasked,
    single_scale,
    term,
    whole_steps,
)
from onnx_backend.integer.ir.context import Args, LoweringContext, move
from onnx_backend.integer.ir.exact_bounds import MASK, ULP, round_up
from onnx_backend.integer.ir.values import (
    ActivationEncoding,
    Array,
    Bent,
    Constant,
    FixedPoint,
    Integers,
    Joined,
    Linear,
    Lookup,
    Movement,
    Pending,
    Refused,
    Selected,
    Value,
)
from onnx_backend.proto.nodes import attributes

_FINEST = ROOM - 4  # bits of a table
_GUARD_BITS = 16  # of a bound that keeps a value from 0
_ANY = ActivationEncoding(1.0, 0, TensorProto.UINT8)  # moves without a fill ignore it
_BETWEEN = "put a QuantizeLinear/DequantizeLinear pair between the two ops"


def to_fixed(ctx: LoweringContext, value: Value | None, what: str = "its input", *, most: int = 31) -> FixedPoint:
    """Return a value as fixed point.

    Args:
        ctx: where nodes are written.
        value: codes, a function of codes, an accumulator, a constant, a Concat of these, or fixed point already.
        what: the name of the value in a refusal.
        most: bits of the table where the value is no exact multiple of anything.
    """
    if isinstance(value, FixedPoint):
        return value
    if isinstance(value, Lookup):
        return _of_lookup(ctx, value, most)
    if isinstance(value, Linear):
        return _of_linear(ctx, value)
    if isinstance(value, Constant):
        return _of_constant(ctx, value, most)
    if isinstance(value, Bent):
        return reduce(partial(add, ctx), (to_fixed(ctx, part) for part in value.parts))
    if isinstance(value, Joined):
        return _of_joined(ctx, value, most)
    if isinstance(value, Selected):
        return _of_selected(ctx, value, most)
    if isinstance(value, Pending):
        return reduce(partial(move_integers, ctx), value.after, to_fixed(ctx, value.value, most=most))
    raise Refused(f"{what} is a float tensor", "put a QuantizeLinear/DequantizeLinear pair in front of it")


def _of_lookup(ctx: LoweringContext, value: Lookup, most: int) -> FixedPoint:
    if value.encoding is not None:
        encoding = value.encoding
        codes = ctx.cast(value.name, TensorProto.INT32)
        if encoding.zero_point:
            codes = ctx.node("Sub", [codes, ctx.constant(encoding.zero_point, np.int32)])
        lo, hi = -encoding.zero_point, encoding.hi - encoding.zero_point
        return FixedPoint(codes, np.asarray(encoding.scale, np.float64), lo, hi, narrow=True)
    values = value.values.astype(np.float64)
    masks = values <= MASK
    finite = values[~masks]
    if not np.all(np.isfinite(finite)) or finite.size == 0:
        raise Refused("it is not finite for some value that its input can have", "clip its input away from the pole")
    # values between a mask and the scores are far larger than the scores, and must be as exact
    table, unit, error, relative = _grid(np.where(masks, 0.0, values), _FINEST if masks.any() else most)
    lo, hi = int(table.min()), int(table.max())
    narrow = fits_int32(lo, hi)
    index = ctx.cast(value.name, TensorProto.INT32)
    name = gather_table(ctx, table, index, value.name, np.int32 if narrow else np.int64)
    found = FixedPoint(name, np.asarray(unit), lo, hi, narrow=narrow, error=error, relative=relative)
    if not masks.any():
        return found
    places = np.flatnonzero(masks)
    if places.size == 1:
        masked = ctx.node("Equal", [value.name, ctx.constant(places[0], np.uint8 if values.size <= 256 else np.int32)])
    else:
        masked = ctx.cast(gather_table(ctx, masks, index, value.name), TensorProto.BOOL)
    return replace(found, masked=masked, floor=float(values[masks].max()))


def _grid(values: Array, most: int) -> tuple[Array, float, float, float]:
    """Return integers, their unit, error and relative error: the coarsest grid for all values, else `most` bits.

    With `_FINEST` bits the values themselves are wanted, not the even steps of which float32 rounded them.
    """
    sizes = np.abs(values[values != 0])
    if sizes.size == 0:
        return np.zeros(values.shape, np.int64), 1.0, 0.0, 0.0
    top = float(sizes.max())
    least = float(sizes.min())
    whole = np.rint(values / least)
    if np.abs(whole).max() < 1 << 24:
        unit = top / float(np.abs(whole).max())
        off = float((np.abs(values - whole * unit)[values != 0] / sizes).max())
        if off <= 2.0**-22 and (
            not off or most < _FINEST
        ):  # float32 rounded the values, each in proportion to its size
            return whole.astype(np.int64), unit, 0.0, off + 2 * ULP if off else 0.0
    unit = math.ldexp(1.0, math.frexp(top)[1] - most)
    return np.rint(values / unit).astype(np.int64), unit, 0.5, 0.0


def _of_constant(ctx: LoweringContext, value: Constant, most: int) -> FixedPoint:
    values = value.values.astype(np.float64)
    masks = values <= MASK
    if not np.all(np.isfinite(values[~masks])):
        raise Refused("a constant is not finite", "remove it from the model")
    coded = value.coded
    if coded is not None and coded.axis is None:
        integers, unit, error, relative = coded.integers, float(coded.scale[0]), 0.0, 0.0
    else:
        integers, unit, error, relative = _grid(np.where(masks, 0.0, values), most)
        if coded is not None or value.blocks is not None:
            relative += 2.0**-24  # float32 rounded the stored integers
    lo, hi = int(integers.min(initial=0)), int(integers.max(initial=0))
    narrow = fits_int32(lo, hi)
    name = ctx.constant(integers, np.int32 if narrow else np.int64)
    found = FixedPoint(name, np.asarray(unit), lo, hi, narrow=narrow, error=error, relative=relative)
    if not masks.any():
        return found
    return replace(found, masked=ctx.constant(masks), floor=float(values[masks].max()))


def _of_linear(ctx: LoweringContext, value: Linear) -> FixedPoint:
    constant, masks = value.constant, value.constant <= MASK
    if masks.any():
        value = replace(value, constant=np.where(masks, 0.0, constant))
    found = _of_one_term(ctx, value) if len(value.terms) == 1 else _of_terms(ctx, value)
    if value.lo != -np.inf or value.hi != np.inf:
        found = clip(ctx, found, value.lo, value.hi)
    found = replace(found, source=value.source)
    if masks.any():
        found = replace(found, masked=ctx.constant(masks), floor=float(constant[masks].max()))
    for step in value.after:
        found = move_integers(ctx, found, step)
    return found


def _of_one_term(ctx: LoweringContext, value: Linear) -> FixedPoint:
    (term,) = value.terms
    lo, hi = int(np.min(term.lo - term.zero)), int(np.max(term.hi - term.zero))
    name, narrow = term.name, fits_int32(lo, hi)
    if narrow:
        name = ctx.cast(name, TensorProto.INT32)
        if np.any(term.zero):
            name = ctx.node("Sub", [name, ctx.constant(term.zero, np.int32)])
    else:
        name = ctx.node("Sub", [ctx.cast(name, TensorProto.INT64), ctx.constant64(term.zero)])
    least = float(np.min(np.abs(term.scale)))
    error = round_up(value.error / Fraction(least)) if least else 0.0
    return FixedPoint(name, term.scale, lo, hi, constant=value.constant, narrow=narrow, error=error)


def _of_terms(ctx: LoweringContext, value: Linear) -> FixedPoint:
    sums = [_of_one_term(ctx, Linear((term,))) for term in value.terms]
    found = sums[0]
    for other in sums[1:]:
        found = add(ctx, found, other)
    least = float(np.min(np.abs(found.scale)))
    error = found.error + (round_up(value.error / Fraction(least)) if least else 0.0)
    return replace(found, constant=found.constant + value.constant, error=error)


def clip(ctx: LoweringContext, value: FixedPoint, lo: float, hi: float) -> FixedPoint:
    """Write `clip(value, lo, hi)`, both bounds rounded to the value's grid."""
    if value.masked and lo > value.floor:
        raise Refused("it clips a mask of infinities", "clip in front of the mask")
    value = single_scale(ctx, value)
    unit = float(value.scale)
    lowest, highest = sorted((value.lo * unit, value.hi * unit))
    if lo > highest or hi < lowest:  # one number, which need not lie on the grid
        number = lo if lo > highest else hi
        same = clipped_integers(ctx, value, value.lo, value.lo)
        error = value.spread + 4 * ULP * (abs(number / unit) + value.reach)
        return replace(same, constant=np.asarray(number - value.lo * unit), error=error, relative=0.0)
    if unit > 0 and value.lo <= 0.0 < lo < unit * 2.0**_GUARD_BITS:
        value = _refined(ctx, value, lo)
        unit = float(value.scale)
    if unit < 0:
        lo, hi = hi, lo
    # bounds beyond the integers do nothing, and infinity has no integer
    ends = [
        value.lo if math.isnan(v) or v < value.lo else value.hi if v > value.hi else round(v)
        for v in (float(np.clip(bound / unit, -(2.0**62), 2.0**62)) for bound in (lo, hi))
    ]
    low, high = ends
    found = clipped_integers(ctx, value, low, high)
    if found.name == value.name:
        return found
    return replace(found, error=found.error + 0.5 + ULP * found.reach)  # the quotient is rounded to float64 first


def _refined(ctx: LoweringContext, value: FixedPoint, guard: float) -> FixedPoint:
    """Return the value on a finer grid, on which a small positive bound that keeps it from 0 is no 0 itself."""
    spare = min(_GUARD_BITS - math.floor(math.log2(guard / float(value.scale))), ROOM - value.bits)
    name = ctx.node("Mul", [ctx.int64(value), ctx.constant64(1 << spare)])
    lo, hi = (bound << spare for bound in (value.lo, value.hi))
    error, scale = math.ldexp(value.error, spare), np.ldexp(value.scale, -spare)
    return replace(value, name=name, scale=scale, lo=lo, hi=hi, error=error, narrow=False)


def _of_joined(ctx: LoweringContext, value: Joined, most: int) -> FixedPoint:
    parts = [single_scale(ctx, to_fixed(ctx, part, most=most)) for part in value.parts]
    if any(part.masked for part in parts):
        raise Refused("it joins a mask of infinities", _BETWEEN)
    parts = at_one_scale(ctx, parts)
    narrow = all(part.narrow for part in parts)
    names = [part.name if narrow else ctx.int64(part) for part in parts]
    found = FixedPoint(
        ctx.node("Concat", names, axis=value.axis),
        parts[0].scale,
        min(part.lo for part in parts),
        max(part.hi for part in parts),
        narrow=narrow,
        error=max(part.error for part in parts),
        relative=max(part.relative for part in parts),
        typed=any(part.typed for part in parts),
    )
    for step in value.after:
        found = move_integers(ctx, found, step)
    return found


def _of_selected(ctx: LoweringContext, value: Selected, most: int) -> FixedPoint:
    kind = value.node.op_type
    if kind not in ("Where", "Max", "Min"):
        raise Refused(f"a {kind} stands between its quantizers", _BETWEEN)
    if kind == "Where":
        places = [i for i in value.inputs[1:] if isinstance(i, int)]
        found = choose(ctx, str(value.inputs[0]), *(value.parts[i] for i in places), most=most)
    else:
        found = to_fixed(ctx, value.parts[0], most=most)
        for part in value.parts[1:]:
            left, right = at_one_scale(ctx, [_plain(ctx, side) for side in (found, to_fixed(ctx, part, most=most))])
            larger = ctx.node("Greater", [ctx.int64(left), ctx.int64(right)])
            found = _one_of(ctx, larger, *((left, right) if kind == "Max" else (right, left)))
    for step in value.after:
        found = move_integers(ctx, found, step)
    return found


def _plain(ctx: LoweringContext, value: FixedPoint) -> FixedPoint:
    return single_scale(ctx, whole_steps(ctx, require_unmasked(value)))


def choose(ctx: LoweringContext, condition: str, yes: Value | None, no: Value | None, *, most: int = 31) -> FixedPoint:
    """Write a Where of two values; a number that swallows every score becomes a mask of the other value."""
    for number, other, inside in ((yes, no, True), (no, yes, False)):
        if isinstance(number, Constant) and number.values.size == 1 and number.values.item() <= MASK:
            masked = condition if inside else ctx.node("Not", [condition])
            value, floor = to_fixed(ctx, other, most=most), float(number.values.item())
            if value.masked:
                masked, floor = ctx.node("Or", [value.masked, masked]), max(value.floor, floor)
            return replace(value, masked=masked, floor=floor)
    sides = at_one_scale(ctx, [_plain(ctx, to_fixed(ctx, side, most=most)) for side in (yes, no)])
    return _one_of(ctx, condition, sides[0], sides[1])


def _one_of(ctx: LoweringContext, condition: str, yes: FixedPoint, no: FixedPoint) -> FixedPoint:
    narrow = yes.narrow and no.narrow
    names = [side.name if narrow else ctx.int64(side) for side in (yes, no)]
    return FixedPoint(
        ctx.node("Where", [condition, *names]),
        yes.scale,
        min(yes.lo, no.lo),
        max(yes.hi, no.hi),
        narrow=narrow,
        error=max(yes.error, no.error),
        relative=max(yes.relative, no.relative),
        typed=yes.typed or no.typed,
    )


def move_integers(ctx: LoweringContext, value: FixedPoint, step: Movement) -> FixedPoint:
    """Write a movement of the integers: a Reshape, Transpose, Slice, Expand, Pad, ..."""
    kind = step.node.op_type
    if kind in ("MaxPool", "ReduceMax", "GlobalMaxPool"):
        raise Refused("it compares values that are not quantized", _BETWEEN)
    value = single_scale(ctx, value)
    if value.masked:
        return _move_masked(ctx, value, step)
    if step.fill is None:
        return replace(value, name=move(ctx, step, value.name, _ANY, step.node.output[step.output]))
    if abs(step.fill) > math.ldexp(abs(float(value.scale)), ROOM - 2):
        raise Refused(f"its fill value {step.fill} is far outside the range of its input", _BETWEEN)
    fill = round(step.fill / float(value.scale))
    inputs = (step.inputs[0], ctx.constant(fill, np.int32 if value.narrow else np.int64), *step.inputs[1:])
    name = move(ctx, Movement(step.node, inputs, step.output), value.name, _ANY, step.node.output[step.output])
    return replace(value, name=name, lo=min(value.lo, fill), hi=max(value.hi, fill), error=max(value.error, 0.5))


def _move_masked(ctx: LoweringContext, value: FixedPoint, step: Movement) -> FixedPoint:
    """Write a movement of integers and mask together: an integer below all others marks where the mask is.

    The mask may have a larger shape than the integers, which are then broadcast to it before they move.
    """
    fill = 0 if step.fill is None else round(step.fill / float(value.scale))
    mark = min(value.lo, fill) - 1
    narrow = value.narrow and fits_int32(mark, value.hi)
    name, kind = (value.name, np.int32) if narrow else (ctx.int64(value), np.int64)
    marked = ctx.node("Where", [value.masked, ctx.constant(mark, kind), name])
    moved = move_integers(ctx, replace(value, name=marked, lo=mark, narrow=narrow, masked=""), step)
    masked = ctx.node("Equal", [moved.name, ctx.constant(mark, np.int32 if moved.narrow else np.int64)])
    if not value.reach and not fill:  # a mask alone: no integers beside it
        moved = replace(moved, name=ctx.constant(0, kind), lo=0)
    return replace(moved, masked=masked)


def integer_scores(ctx: LoweringContext, value: FixedPoint) -> FixedPoint:
    """Return a value whose integers fit in int32 as int32; its mask stays beside it."""
    if value.narrow:
        return value
    return replace(value, name=ctx.cast(value.name, TensorProto.INT32), narrow=True)


_SMALL: Mapping[int, type] = MappingProxyType(
    {
        TensorProto.INT8: np.int8,
        TensorProto.INT16: np.int16,
        TensorProto.UINT16: np.uint16,
        TensorProto.INT32: np.int32,
    }
)
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)


def cast_to_float(ctx: LoweringContext, node: NodeProto, args: Args) -> Value | None:
    """Return integers (constants, functions of bool or uint8, fixed point) as the numbers they are; else None.

    64-bit integers saturate beyond 2**53, which float32 does not hold either.
    """
    value = args[0]
    if node.op_type != "Cast" or attributes(node)["to"] not in _FLOATS or not isinstance(value, Integers):
        return None
    if value.array is not None:
        return Constant(value.array.astype(np.float32))
    kind = value.dtype or ctx.types.get(node.input[0], TensorProto.UNDEFINED)
    if kind == TensorProto.BOOL:
        return Lookup(ctx.cast(value.name, TensorProto.UINT8), np.asarray([0, 1], np.float32), None)
    if kind == TensorProto.UINT8:
        return Lookup(value.name, np.arange(256, dtype=np.float32), None)
    if kind in _SMALL:
        info = np.iinfo(_SMALL[kind])
        narrow = ctx.cast(value.name, TensorProto.INT32)
        return FixedPoint(
            narrow, np.ones(()), int(info.min), int(info.max), narrow=True, typed=kind == TensorProto.INT32
        )
    if kind != TensorProto.INT64:
        raise Refused("it takes uint32 or uint64 for numbers", "cast to int64 first")
    name, top = value.name, 1 << 53
    for op, bound in (("Less", -top), ("Greater", top)):
        limit = ctx.constant64(bound)
        name = ctx.node("Where", [ctx.node(op, [name, limit]), limit, name])
    return FixedPoint(name, np.ones(()), -top, top, typed=True)


def to_accumulator(ctx: LoweringContext, value: Value, encoding: ActivationEncoding) -> Value:
    """Convert fixed point to one int32 accumulator, so that it can be requantized to `encoding`."""
    if isinstance(value, Joined | Selected) and any(isinstance(part, FixedPoint) for part in _parts(value)):
        value = to_fixed(ctx, value)
    if not isinstance(value, FixedPoint):
        return value
    # one step beyond the grid on both sides: everything further out saturates as well
    reals = ((-encoding.zero_point - 1) * encoding.scale, (encoding.hi - encoding.zero_point + 1) * encoding.scale)
    value = replace(value, source=value.source or ctx.behind)
    return term(ctx, value, reals, encoding.scale * 2.0**-16)


def _parts(value: Value) -> list[Value]:
    if isinstance(value, Joined | Selected):
        return [inner for part in value.parts for inner in _parts(part)]
    return [value]
