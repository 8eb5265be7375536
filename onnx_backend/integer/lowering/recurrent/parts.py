"""Parts of recurrent layers in fixed point: weights, products with a fine hidden state, gates in fixed units.

The hidden state is an int32 tensor whose unit is a power of two, about 2**-22, and is multiplied with 8-bit weights as
three tensors of 8 bits in one MatMulInteger, exactly. Everything between two products is fixed point with static
bounds; every rounding adds to the error that the value carries.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import TensorProto, helper

from onnx_backend.integer.fixed_point.elementwise import CURVES, bent
from onnx_backend.integer.fixed_point.fixed_arithmetic import (
    ROOM,
    bits,
    clipped_integers,
    constant64,
    int64,
    int64_value,
    multiply,
    narrow_to,
    round_half_up,
    rounding_shift,
    single_scale,
)
from onnx_backend.integer.fixed_point.sums import add
from onnx_backend.integer.ir.context import LoweringContext
from onnx_backend.integer.ir.values import Array, Constant, FixedPoint, Refused, Value
from onnx_backend.integer.lowering.layers.layers import (
    accumulator_bounds,
    require_int32,
    require_positive,
    weight_storage,
)
from onnx_backend.integer.lowering.layers.split_int16 import Bytes

_GATE = 30  # a gate is a multiple of 2**-30
_PLANES = 3  # tensors of 8 bits that hold a hidden state
_RELATIVE = 32  # bits of a value that is brought to another unit, which leaves 29 to the factor
_STATE = 22  # a hidden state within -1..1 is a multiple of 2**-22
_QUANTIZE = "store W and R as integers behind a DequantizeLinear, per tensor or per gate row"


@dataclass(frozen=True)
class Matrix:
    """A weight of one direction, inputs by columns (all gates).

    Attributes:
        name: the stored uint8 tensor.
        zero: its zero point.
        integers: int64, the zero point subtracted.
        scale: float64, shape () or (columns,).
    """

    name: str
    zero: str
    integers: Array
    scale: Array


def matrix(ctx: LoweringContext, value: Value | None, direction: int, what: str) -> Matrix:
    """Return W or R of one direction.

    Raises:
        Refused: it is float, not constant, or has scales along its inputs.
    """
    if not isinstance(value, Constant) or value.coded is None:
        raise Refused(f"{what} is float, block-wise or not constant", _QUANTIZE)
    coded = value.coded
    if coded.axis not in (None, 0, 1):
        raise Refused(f"{what} has one scale per index of axis {coded.axis}", _QUANTIZE)
    require_positive(coded.scale)
    integers = np.ascontiguousarray(coded.integers[direction].T)
    scale: Array = coded.scale.reshape(-1)
    if coded.axis != 1:
        scale = scale[direction if coded.axis == 0 else 0].reshape(())
    zero, bits = weight_storage(ctx, coded, integers)
    b = ctx.builder
    name = b.packed(integers + zero, bits, what)
    return Matrix(name, b.constant(zero, np.uint8), integers, scale)


def columns(weight: Matrix, ctx: LoweringContext, first: int, last: int) -> Matrix:
    """Return some columns of a weight."""
    b = ctx.builder
    ends = [b.constant([bound], np.int64) for bound in (first, last, 1)]
    name = b.node("Slice", [weight.name, *ends])
    scale = weight.scale[first:last] if weight.scale.ndim else weight.scale
    return Matrix(name, weight.zero, weight.integers[:, first:last], scale)


def of_codes(ctx: LoweringContext, parts: Sequence[Bytes], weight: Matrix, bias: Array) -> FixedPoint:
    """Write the product of quantized activations with a weight, plus a real bias per column."""
    b, found = ctx.builder, None
    for codes, encoding in parts:
        low, high = accumulator_bounds(weight.integers, encoding, (0,))
        require_int32(low, high)
        product = b.node("MatMulInteger", [codes, weight.name, b.constant(encoding.zero_point, np.uint8), weight.zero])
        term = FixedPoint(product, encoding.scale * weight.scale, int(low.min()), int(high.max()), narrow=True)
        found = term if found is None else add(ctx, found, term)
    assert found is not None  # every operand has at least one tensor of codes
    return single_scale(ctx, replace(found, constant=found.constant + bias))


def of_state(ctx: LoweringContext, state: FixedPoint, weight: Matrix) -> FixedPoint:
    """Write the exact product of a hidden state with a weight, in three products of 8 bits at once."""
    b, offset = ctx.builder, 1 << (8 * _PLANES - 1)
    assert -offset <= state.lo <= state.hi < offset  # `in_unit` and the clip of the caller
    raised = b.cast(b.node("Add", [state.name, b.constant(offset, np.int32)]), TensorProto.UINT32)
    shifts = np.arange(_PLANES)[::-1].reshape(-1, 1, 1) * 8
    planes = b.node("BitShift", [raised, b.constant(shifts, np.uint32)], direction="RIGHT")
    planes = b.cast(b.node("BitwiseAnd", [planes, b.constant(255, np.uint32)]), TensorProto.UINT8)
    products = b.node("MatMulInteger", [planes, weight.name, b.constant(0, np.uint8), weight.zero])
    whole = b.node("Mul", [b.cast(products, TensorProto.INT64), constant64(ctx, np.left_shift(1, shifts))])
    total = b.node("ReduceSum", [whole, constant64(ctx, np.zeros(1, np.int64))], keepdims=0)
    centred = b.node("Sub", [total, constant64(ctx, offset * weight.integers.sum(0))])
    sums = np.abs(weight.integers).sum(0)
    top = int(sums.max()) * max(abs(state.lo), abs(state.hi))
    return int64_value(centred, float(state.scale) * weight.scale, -top, top, error=state.error * float(sums.max()))


def in_unit(ctx: LoweringContext, value: FixedPoint, fraction: int) -> FixedPoint:
    """Round a value to multiples of `2**-fraction`, in int32 where they fit."""
    value = single_scale(ctx, value)
    mantissa, exponent = math.frexp(float(value.scale) * 2.0**fraction)
    if abs(mantissa) == 0.5 and 1 <= 1 - exponent <= ROOM - 2:
        shift = 1 - exponent  # a power of two: nothing but the shift rounds
    else:
        value = narrow_to(ctx, value, _RELATIVE)
        exponent = math.frexp(float(value.scale) * 2.0**fraction)[1]
        # the factor uses all remaining bits, so that its own rounding is far below one unit
        shift = min(max(ROOM - 1 - bits(value) - exponent, 1), ROOM - 2)
    ratio = float(value.scale) * 2.0**fraction
    factor = round(math.ldexp(ratio, shift))
    top = max(abs(value.lo), abs(value.hi))
    name = int64(ctx, value)
    if factor != 1:
        name = ctx.builder.node("Mul", [name, constant64(ctx, factor)])
    ends = sorted((value.lo * factor, value.hi * factor))
    lo, hi = (round_half_up(bound, shift) for bound in ends)
    narrow = max(abs(lo), abs(hi)) < (1 << 31) - 1
    name, _ = rounding_shift(ctx, name, ends[0], shift, TensorProto.INT32 if narrow else TensorProto.INT64)
    error = (value.error + value.relative * top) * abs(ratio) + abs(factor / 2.0**shift - ratio) * top + 0.5
    return FixedPoint(name, np.asarray(2.0**-fraction), lo, hi, narrow=narrow, error=error)


def within(ctx: LoweringContext, value: FixedPoint, lo: float, hi: float) -> FixedPoint:
    """Clip to a range that the real value never leaves: bounds stay put from step to step, errors never exceed it."""
    unit = float(value.scale)
    found = clipped_integers(ctx, value, math.floor(lo / unit), math.ceil(hi / unit))
    return replace(found, error=min(found.error, (hi - lo) / unit + 1.0))


def loosen_bounds(value: FixedPoint, bound: float) -> FixedPoint:
    """Return a value with the bounds that it has in every step, so that the steps share their tables."""
    most = math.ceil(bound / float(value.scale))
    return replace(value, lo=-most, hi=most)


def gate(ctx: LoweringContext, value: FixedPoint, op_type: str, fraction: int = _GATE) -> FixedPoint:
    """Write Sigmoid or Tanh of a value in multiples of `2**-fraction`."""
    functions: dict[str, Callable[[Array], Array]] = {"Sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)), "Tanh": np.tanh}
    found = in_unit(ctx, bent(ctx, value, functions[op_type], CURVES[op_type]({})), fraction)
    return within(ctx, found, 0.0 if op_type == "Sigmoid" else -1.0, 1.0)


def product_in_unit(ctx: LoweringContext, left: FixedPoint, right: FixedPoint, fraction: int) -> FixedPoint:
    """Write a product in multiples of `2**-fraction`."""
    return in_unit(ctx, multiply(ctx, left, right), fraction)


def difference(ctx: LoweringContext, left: FixedPoint, right: FixedPoint) -> FixedPoint:
    """Write the difference of two values in the same unit, exactly."""
    lo, hi = left.lo - right.hi, left.hi - right.lo
    assert left.scale == right.scale  # both are states
    assert max(-lo, hi) < 1 << 31
    name = ctx.builder.node("Sub", [left.name, right.name])
    return FixedPoint(name, left.scale, lo, hi, narrow=True, error=left.error + right.error)


def split(ctx: LoweringContext, value: FixedPoint, sizes: Sequence[int]) -> list[FixedPoint]:
    """Split along the last axis; the value has one scale."""
    b = ctx.builder
    names = [b.fresh(f"{value.name}.{i}") for i in range(len(sizes))]
    inputs = [value.name, b.constant(list(sizes), np.int64)]
    b.nodes.append(helper.make_node("Split", inputs, names, name=f"{names[0]}_node", axis=-1))
    return [replace(value, name=name) for name in names]


def pick(ctx: LoweringContext, value: FixedPoint, index: int) -> FixedPoint:
    """Return one index of the first axis, which is dropped."""
    return replace(value, name=ctx.builder.node("Gather", [value.name, constant64(ctx, index)], axis=0))


def state_fraction(largest: float) -> int:
    """Return the fraction bits of a hidden state of at most this magnitude, so that it fits in 8-bit tensors."""
    return _STATE - max(math.ceil(math.log2(largest)), 0)
