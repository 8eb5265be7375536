"""Sine and cosine of fixed point: the fraction of the angle in turns indexes a table.

Positions of a rotary embedding are integers without a bound of their own. A product of one with a frequency would lose
its fraction in any fixed point; so the integer is cut into digits, and every digit is multiplied by the fraction of a
turn that its unit stands for.
"""

import math
from fractions import Fraction

import numpy as np
from onnx import NodeProto, TensorProto

from onnx_backend.integer.fixed_point.fixed_arithmetic import (
    constant64,
    gather_table,
    int64,
    int64_value,
    require_unmasked,
    spread,
)
from onnx_backend.integer.fixed_point.to_fixed import to_fixed
from onnx_backend.integer.ir.context import Args, LoweringContext
from onnx_backend.integer.ir.values import Array, FixedPoint, Joined, Value

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
    b = ctx.builder
    phase, digits = _phase(ctx, value, ahead)
    index = b.cast(b.node("BitShift", [phase, b.constant(_REST, np.uint64)], direction="RIGHT"), TensorProto.INT32)
    rest = b.cast(b.node("BitwiseAnd", [phase, b.constant((1 << _REST) - 1, np.uint64)]), TensorProto.INT64)
    knots = np.rint(np.sin(2 * np.pi * np.arange((1 << _INDEX) + 1) / (1 << _INDEX)) / _UNIT).astype(np.int64)
    base = gather_table(ctx, knots[:-1] << _REST, index, phase, np.int64)
    slope = gather_table(ctx, np.diff(knots), index, phase, np.int64)
    name = b.node("Add", [base, b.node("Mul", [slope, rest])])
    turns = (digits * 2.0 ** (_DIGIT - 1) + 1) * 2.0**-_FRACTION  # every fraction is rounded
    error = 2 * math.pi * turns + spread(value) * float(np.abs(value.scale).max())
    error += (2 * math.pi / (1 << _INDEX)) ** 2 / 8 + 2 * _UNIT
    top, scale = round(1 / _UNIT) << _REST, math.ldexp(_UNIT, -_REST)
    return int64_value(name, scale, -top, top, error=error / scale)


def _phase(ctx: LoweringContext, value: FixedPoint, ahead: float) -> tuple[str, int]:
    """Write the fraction of a turn that an angle and `ahead` make, in `_FRACTION` bits of uint64; return its digits."""
    b = ctx.builder
    name = int64(ctx, value)
    if value.lo:
        name = b.node("Sub", [name, constant64(ctx, value.lo)])
    name = b.cast(name, TensorProto.UINT64)
    digits = max(-(-(value.hi - value.lo).bit_length() // _DIGIT), 1)
    scale, constant = np.broadcast_arrays(value.scale, value.constant)
    start = [Fraction(float(c)) + value.lo * Fraction(float(s)) for s, c in zip(scale.flat, constant.flat, strict=True)]
    total = b.constant(_fractions([turn + Fraction(ahead) * _TURN for turn in start], scale.shape), np.uint64)
    for digit in range(digits):
        unit = _fractions([Fraction(float(s)) * (1 << _DIGIT * digit) for s in scale.flat], scale.shape)
        part = name
        if digit:
            part = b.node("BitShift", [part, b.constant(_DIGIT * digit, np.uint64)], direction="RIGHT")
        if digit < digits - 1:
            part = b.node("BitwiseAnd", [part, b.constant((1 << _DIGIT) - 1, np.uint64)])
        total = b.node("Add", [b.node("Mul", [part, b.constant(unit, np.uint64)]), total])
    return b.node("BitwiseAnd", [total, b.constant((1 << _FRACTION) - 1, np.uint64)]), digits


def _fractions(angles: list[Fraction], shape: tuple[int, ...]) -> Array:
    """Return the fractions of a turn of angles in radians, in `_FRACTION` bits."""
    whole = 1 << _FRACTION
    return np.asarray([round(angle / _TURN * whole) % whole for angle in angles], np.uint64).reshape(shape)
