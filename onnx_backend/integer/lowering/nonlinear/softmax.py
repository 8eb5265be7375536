"""Lower Softmax and LogSoftmax: exponentials by tables, one integer sum, one division per row.

The largest score of a row is subtracted first, so the exponentials are at most 1 and the largest is exactly 1. Scores
on a coarse grid (codes, with or without a mask) have one table entry per difference; scores on a fine grid are split
into a high and a low part, whose two exponentials are multiplied.

Shares of short rows are computed in int32: with e an exponential in units of 2**-30 and s the sum of its row,
`e * (2**60 / s) / 2**30` is its share in the same unit. The halves of e come from two tables, those of the reciprocal
from one Newton step per row; of their four products the lowest is left out, and half of what it can be is added.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from onnx import NodeProto, TensorProto, numpy_helper

from onnx_backend.integer.fixed_point.fixed_arithmetic import (
    ROOM,
    add,
    error_of_exponential,
    fits_int32,
    gather_table,
    int64_value,
    narrow_to,
    negate,
    single_scale,
)
from onnx_backend.integer.fixed_point.newton import (
    RECIPROCAL,
    Int32,
    factors_of_exponential,
    logarithm,
    reciprocal_of_mantissa,
    table_of_exponentials,
)
from onnx_backend.integer.fixed_point.to_fixed import choose, integer_scores, to_fixed
from onnx_backend.integer.ir.context import GUARD, Args, LoweringContext, integer_name
from onnx_backend.integer.ir.operations import Shares, Softmax
from onnx_backend.integer.ir.values import Array, Constant, FixedPoint, Integers, Lookup, NotANumber, Refused, Value
from onnx_backend.integer.lowering.nonlinear.selection import where as choose_codes
from onnx_backend.proto.nodes import attributes, metadata

#: Bits of an exponential and of a share.
BITS = 30
#: Rows are no longer.
LONGEST = (1 << 15) - 1
_HALF = BITS // 2
#: Bound of the error of a share, in its unit: the reciprocal's, that of the mantissa (half a unit of 2**-29), of the
#: reciprocal itself (half a unit), and of the products that are left out and cut off.
SHARE = RECIPROCAL * 2.0**BITS + 1.0 + 0.5 + 1.0 + 2.0**-_HALF


def shares(ctx: LoweringContext, index: str, table: Array, axis: int, length: int, missing: str) -> str:
    """Write the shares of exponentials in units of 2**-30.

    Args:
        ctx: where nodes are written.
        index: int32, places in the table.
        table: the exponentials in units of 2**-30, of which every row has a largest of 1.
        axis: of a row.
        length: of a row.
        missing: a bool tensor without the axis, true for rows whose shares are 0; empty if there are none.
    """
    halves = (table & ((1 << _HALF) - 1), table >> _HALF)
    low, high = (Int32(ctx, gather_table(ctx, part, index, index), 0, int(part.max())) for part in halves)
    for part in (low, high):
        ctx.proven[part.name] = part.lo, part.hi
    sum_of_low = low.summed([axis], (0, length << _HALF), length)
    inverse = _reciprocal(sum_of_low, high.summed([axis], (1 << _HALF, length << _HALF), length))
    if missing:
        zero = ctx.constant(0, np.int32)
        inverse = Int32(ctx, ctx.node("Where", [missing, zero, inverse.name]), 0, inverse.hi)
        ctx.proven[inverse.name] = 0, inverse.hi
    small, large = (part.spread_over([axis]) for part in inverse.cut(_HALF))
    # a reciprocal of 2**30 has no small half, and an exponential of 2**30 no low one: the sum stays below 2**31
    most = (1 << 31) - (1 << 16)
    sides = high.times(small, (0, most)), low.times(large, (0, most))
    across = sides[0].plus(sides[1], (0, most)).plus((1 << _HALF) - 1)
    found = high.times(large).plus(across.shifted(_HALF), (0, 1 << BITS))
    return found.name


def _reciprocal(low: Int32, high: Int32) -> Int32:
    """Write `2**60 / s` for the sum `s = high * 2**15 + low` of a row, at least 2**30 and below 2**45."""
    rest, carry = low.cut(_HALF)
    length = high.hi >> _HALF
    whole = high.plus(carry, (high.lo, length << _HALF))
    # shifted left by so much, the sum has 30 bits
    factors = np.asarray([1 << (_HALF - max(i.bit_length(), 1)) for i in range(length + 1)])
    factor = whole.shifted(_HALF).looked_up(factors)
    raised = whole.times(factor, (1 << (BITS - 1), (1 << BITS) - 1))
    below = rest.times(factor).plus(1 << (_HALF - 1)).shifted(_HALF)
    mantissa = reciprocal_of_mantissa(raised.plus(below, (1 << (BITS - 1), 1 << BITS)))
    small, large = mantissa.cut(_HALF)
    top = large.times(factor).times(2)
    under = small.times(factor).plus(1 << (_HALF - 2)).shifted(_HALF - 1)
    return top.plus(under, (0, 1 << BITS))


_BITS = 30
#: exp(-_FAR) is below half a unit of 2**-_BITS.
_FAR = 22.0
#: The rounding error that float64 adds to an entry of a table, in units.
_FLOAT64 = 2.0**-16
_LARGEST_TABLE = 1 << 14
#: A table has an entry for every difference where there are fewer, which saves a Clip.
_WHOLE_TABLE = 1 << 10
#: The fine grid has steps of at most this size.
_FINE = 2.0**-20
#: A row of dynamic length is taken to have at most this many elements.
_DYNAMIC = 1 << 20


@dataclass(frozen=True)
class _Near:
    """The scores below their row's largest."""

    below: str  # the largest score of the row minus the score, in the dtype of the scores
    name: str  # the same as int32, and no larger than `reach`
    step: float  # of the scores
    last: int  # beyond it the exponentials of `name` are all the same
    reach: int  # the largest of `name`
    empty: bool  # True if `last` stands for a share of 0
    largest: str  # the largest score of a row
    lowest: int  # the least that a score can be; what stands for a masked one
    scores: FixedPoint  # the scores, with their scale
    length: int | None  # the number of elements of a row, None if it is not fixed
    axis: int  # of a row


@dataclass(frozen=True)
class _Rows:
    """The scores below their row's largest, and values that follow from them."""

    below: str  # the largest score of the row minus the score, in the dtype of the scores
    exponentials: str  # int32, in units of 2**-_BITS
    sums: str  # int64, of the exponentials of a row
    missing: str  # a bool tensor that is true for rows that are masked altogether by minus infinity, or empty
    error: float  # bound of the error of an exponential, absolute, in its unit
    relative: float  # bound of its further error, as a share
    scores: FixedPoint  # the scores, with their scale
    length: int  # the number of elements of a row


def softmax(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower Softmax over one axis; scores may be codes, accumulators or sums with a mask of minus infinity."""
    near = _near(ctx, node, args)
    short = near.length is not None and near.length <= LONGEST and near.last < _LARGEST_TABLE
    rows: Shares | None = None
    if short and near.length:
        found, rows = _of_short_rows(ctx, near, near.length)
        missing = bool(rows.missing)
    else:
        found, missing, rows = _of_rows(ctx, near)
    guard = float(metadata(node).get(GUARD, 0.0))
    value = replace(found, missing=missing, error=found.error + guard / float(found.scale))
    if rows is not None:
        rows = replace(rows, error=rows.error + guard)
        ctx.rows[value.name] = value, rows
    scores = args[0]
    if isinstance(scores, Lookup) and scores.encoding is not None and not scores.encoding.wide:
        length = near.length or _DYNAMIC
        axis, shape = int(attributes(node).get("axis", -1)), ctx.shapes.get(node.input[0])
        whole = Softmax(scores.name, scores.encoding, axis, length, None if shape is None else len(shape))
        ctx.rows[value.name] = value, whole
    return value


def _of_rows(ctx: LoweringContext, near: _Near) -> tuple[FixedPoint, bool, Shares | None]:
    """Write shares by a division in 64 bits; return True beside them if a row can be masked altogether.

    What they are computed from is returned too, where no row can be and none is too long.
    """
    rows = _rows(ctx, near)
    share = ctx.node("Div", [ctx.constant64(1 << ROOM), rows.sums])
    if rows.missing:  # 0, where the standard has NaN
        share = ctx.node("Where", [rows.missing, ctx.constant64(0), share])
    name = ctx.node("Mul", [ctx.cast(rows.exponentials, TensorProto.INT64), share])
    # e / s against the true e' / s': an error d of each exponential moves it by (1 + length) * d / s, and s >= 2**_BITS
    off = 2.0 * rows.relative / (1.0 - rows.relative) if rows.relative < 0.5 else 1.0
    moved = (1.0 + rows.length) * rows.error * 2.0**-_BITS + off + rows.length * 2.0 ** (_BITS - ROOM)
    found = int64_value(name, 2.0**-ROOM, 0, 1 << ROOM, error=math.ldexp(moved, ROOM))
    given = moved - rows.length * 2.0 ** (_BITS - ROOM)  # without the division
    short = near.length is not None and near.length <= LONGEST and not rows.missing
    kept = Shares(rows.exponentials, None, near.axis, rows.length, "", given) if short else None
    return narrow_to(ctx, found, _BITS), bool(rows.missing), kept


def _of_short_rows(ctx: LoweringContext, near: _Near, length: int) -> tuple[FixedPoint, Shares]:
    """Write shares in int32; return beside them what they are computed from."""
    table = _table(near)
    missing = _missing(ctx, near, flat=True)
    name = shares(ctx, near.name, table, near.axis, length, missing)
    # e / s against the true e' / s', as of other rows; and what the shares themselves round
    relative = error_of_exponential(2.0 * near.scores.spread * near.step)
    off = 2.0 * relative / (1.0 - relative) if relative < 0.5 else 1.0
    given = (1.0 + length) * (0.5 + _FLOAT64) + math.ldexp(off, BITS)
    rows = Shares(near.name, table, near.axis, length, missing, math.ldexp(given, -BITS))
    return FixedPoint(name, np.asarray(2.0**-BITS), 0, 1 << BITS, narrow=True, error=given + SHARE), rows


def log_softmax(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower LogSoftmax over one axis as the scores below the largest, minus the logarithm of the sum."""
    rows = _rows(ctx, _near(ctx, node, args))
    if rows.scores.masked:
        raise Refused("minus infinity was added to its input", "use Softmax, or a finite mask")
    scale = abs(float(rows.scores.scale))
    most = rows.scores.hi - rows.scores.lo
    below = FixedPoint(
        rows.below, np.asarray(scale), 0, most, narrow=rows.scores.narrow, error=2.0 * rows.scores.spread
    )
    high = rows.length << _BITS
    error = rows.length * rows.error
    logs = logarithm(ctx, int64_value(rows.sums, 2.0**-_BITS, 1 << _BITS, high, error=error, relative=rows.relative))
    return negate(add(ctx, below, logs))


def _near(ctx: LoweringContext, node: NodeProto, args: Args) -> _Near:
    axis = int(attributes(node).get("axis", -1))
    shape = ctx.shapes.get(node.input[0])
    length = shape[axis] if shape is not None else None
    axis = -1 if shape is not None and axis == len(shape) - 1 else axis
    scores = _scores(ctx, args[0])
    scale = float(scores.scale)
    step = abs(scale)
    most = scores.hi - scores.lo  # the largest difference between two scores that are not masked
    tensor, lowest, highest = scores.name, scores.lo, scores.hi
    kind = np.int32 if scores.narrow else np.int64
    if scale < 0:
        tensor, lowest, highest = ctx.node("Sub", [ctx.constant(0, kind), tensor]), -scores.hi, -scores.lo
    last = min(most, math.ceil(_FAR / step)) + 1
    if scores.masked:
        lowest -= last + 1
        tensor = _without_masked(ctx, scores, tensor, lowest, highest)
    largest = _largest(ctx, tensor, axis, None if scores.narrow else lowest)
    below = ctx.node("Sub", [largest, tensor])
    near, reach = below, last
    if not scores.narrow:
        limit = ctx.constant64(last)
        near = ctx.node("Where", [ctx.node("Greater", [below, limit]), limit, below])
        near = ctx.cast(near, TensorProto.INT32)
    elif highest - lowest < _WHOLE_TABLE and last < _LARGEST_TABLE:
        reach = highest - lowest
        ctx.proven[below] = 0, reach
    elif scores.masked or last <= most:
        near = ctx.node("Clip", [below, ctx.constant(0, np.int32), ctx.constant(last, np.int32)])
    empty = bool(scores.masked) or last <= most
    return _Near(below, near, step, last, reach, empty, largest, lowest, scores, length, axis)


def _without_masked(ctx: LoweringContext, scores: FixedPoint, tensor: str, lowest: int, highest: int) -> str:
    """Write scores of which the masked ones are `lowest`: by a Min, which is faster than a Where."""
    if not scores.narrow:
        return ctx.node("Where", [scores.masked, ctx.constant(lowest, np.int64), tensor])
    ends = [ctx.constant(end, np.int32) for end in (lowest, highest)]
    return ctx.node("Min", [tensor, ctx.node("Where", [scores.masked, *ends])])


def _missing(ctx: LoweringContext, near: _Near, *, flat: bool) -> str:
    """Write which rows are masked altogether by minus infinity, without their axis if `flat`; empty if none can be."""
    if not near.scores.masked or near.scores.floor != -np.inf:
        return ""
    largest = near.largest
    if flat:
        largest = ctx.node("Squeeze", [largest, ctx.constant64(np.asarray([near.axis]))])
    return ctx.node("Equal", [largest, ctx.constant(near.lowest, np.int32 if near.scores.narrow else np.int64)])


def _rows(ctx: LoweringContext, near: _Near) -> _Rows:
    length = near.length or _DYNAMIC
    missing = _missing(ctx, near, flat=False)
    exponentials, error = _exponentials(ctx, near)
    wide = ctx.cast(exponentials, TensorProto.INT64)
    sums = ctx.node("ReduceSum", [wide, ctx.constant64(np.asarray([near.axis]))], keepdims=1)
    ctx.proven[sums] = 1 << _BITS, length << _BITS  # the largest score counts as 1
    relative = error_of_exponential(2.0 * near.scores.spread * near.step)
    return _Rows(near.below, exponentials, sums, missing, error, relative, near.scores, length)


def _scores(ctx: LoweringContext, value: Value | None) -> FixedPoint:
    """Return scores with one scale: codes as they are, everything else on a grid that is fine enough."""
    if isinstance(value, Lookup) and value.encoding is not None:
        encoding = value.encoding  # the zero point cancels in every difference
        name = ctx.cast(value.name, TensorProto.INT32)
        return FixedPoint(name, np.asarray(encoding.scale, np.float64), 0, encoding.hi, narrow=True)
    found = single_scale(ctx, to_fixed(ctx, value))
    excess = math.floor(math.log2(_FINE / 2 / abs(float(found.scale)))) if float(found.scale) else 0
    if excess > 0 and found.bits > 24:
        found = narrow_to(ctx, found, max(found.bits - excess, 24))
    found = narrow_to(ctx, _as_stored(ctx, found), 58)  # both halves of a difference fit in int32
    return integer_scores(ctx, found) if found.bits < 30 else replace(found, name=ctx.int64(found), narrow=False)


def _as_stored(ctx: LoweringContext, scores: FixedPoint) -> FixedPoint:
    """Return scores without the subtraction of a zero point, which cancels in every difference."""
    maker = next((node for node in reversed(ctx.nodes) if scores.name in node.output), None)
    if not scores.narrow or not isinstance(maker, NodeProto) or maker.op_type != "Sub":
        return scores
    stored = [numpy_helper.to_array(tensor) for tensor in ctx.initializers if tensor.name == maker.input[1]]
    if not stored or stored[0].size != 1:
        return scores
    zero = int(stored[0].item())
    lo, hi = scores.lo + zero, scores.hi + zero
    return replace(scores, name=maker.input[0], lo=lo, hi=hi) if fits_int32(lo, hi) else scores


def _largest(ctx: LoweringContext, tensor: str, axis: int, lowest: int | None) -> str:
    """Write the largest element along an axis, of int64 (at least `lowest`) by halves: its ReduceMax is wrong."""
    along = ctx.constant64(np.asarray([axis]))
    if lowest is None:
        return ctx.node("ReduceMax", [tensor, along], keepdims=1)
    half = 30
    unsigned = ctx.cast(ctx.node("Sub", [tensor, ctx.constant64(lowest)]), TensorProto.UINT64)
    high = ctx.cast(ctx.shifted_right(unsigned, half), TensorProto.INT32)
    low = ctx.node("BitwiseAnd", [unsigned, ctx.constant((1 << half) - 1, np.uint64)])
    top = ctx.node("ReduceMax", [high, along], keepdims=1)
    among = ctx.node(
        "Where", [ctx.node("Equal", [high, top]), ctx.cast(low, TensorProto.INT32), ctx.constant(-1, np.int32)]
    )
    rest = ctx.node("ReduceMax", [among, along], keepdims=1)
    raised = ctx.node("Mul", [ctx.cast(top, TensorProto.INT64), ctx.constant64(1 << half)])
    found = ctx.node("Add", [raised, ctx.cast(rest, TensorProto.INT64)])
    return ctx.node("Add", [found, ctx.constant64(lowest)])


def _table(near: _Near) -> Array:
    table = table_of_exponentials(near.step, near.last + 1, _BITS)
    if near.empty:
        table[-1] = 0
    return np.concatenate([table, np.full(max(near.reach - near.last, 0), table[-1])])


def _exponentials(ctx: LoweringContext, near: _Near) -> tuple[str, float]:
    """Write exp(-near * step) in units of 2**-_BITS for 0..last, where `last` stands for 0 if `empty`."""
    below, step, last = near.name, near.step, near.last
    if last < _LARGEST_TABLE:
        return gather_table(ctx, _table(near), below, below), 0.5 + _FLOAT64
    low = (last.bit_length() + 1) // 2
    if low > 14:
        raise Refused(
            "its input has steps too fine for a table", "put a QuantizeLinear/DequantizeLinear pair before it"
        )
    parts = factors_of_exponential(ctx, below, step, last, _BITS, low)
    product = ctx.node("Add", [ctx.node("Mul", parts), ctx.constant64(1 << (_BITS - 1))])
    shifted = ctx.shifted_right(ctx.cast(product, TensorProto.UINT64), _BITS)
    found = ctx.cast(shifted, TensorProto.INT32)
    if near.empty:  # the last place holds less than half a unit, or a mask, which must be exactly 0
        some = ctx.node("Less", [below, ctx.constant(last, np.int32)])
        found = ctx.node("Mul", [found, ctx.cast(some, TensorProto.INT32)])
    return found, 1.5 + 3 * _FLOAT64


def is_nan(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Note the question; only a Where that replaces the NaN of fully masked rows may ask it."""
    value = args[0]
    if value is None or isinstance(value, Integers | NotANumber):
        raise Refused("its input is no activation", "remove the node")
    return NotANumber(value)


def where(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower Where that makes a mask of two numbers, replaces the NaN of fully masked rows, or chooses fixed point.

    Everything else chooses among codes.
    """
    condition, first, second = args
    if isinstance(condition, NotANumber):
        return _replaced(condition, first, second)
    known = isinstance(condition, Integers) and condition.array is not None
    numbers = [
        float(arg.values.item()) for arg in (first, second) if isinstance(arg, Constant) and arg.values.size == 1
    ]
    if len(numbers) == 2 and not known:
        codes = ctx.cast(integer_name(ctx, condition), TensorProto.UINT8)
        return Lookup(codes, np.asarray(numbers[::-1], np.float32), None)
    if any(isinstance(arg, FixedPoint) for arg in (first, second)):
        return choose(ctx, integer_name(ctx, condition), first, second)
    return choose_codes(ctx, node, args)


def _replaced(condition: NotANumber, first: Value | None, second: Value | None) -> Value:
    value = condition.value
    if second is not value or not isinstance(first, Constant):
        raise Refused("it does not simply replace NaN by a constant", "replace NaN in the tensor that was tested")
    if isinstance(value, FixedPoint) and value.missing:
        if np.any(first.values):
            raise Refused("it replaces NaN by another number than 0", "replace NaN by 0")
        return replace(value, missing=False)
    return value
