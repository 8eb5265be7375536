"""Arithmetic on int32 tensors whose values stay in int32, with static bounds that every step proves.

Both targets write these operators as they are: shifts are divisions of numbers that are not negative. Where interval
arithmetic says too little, a caller states the bounds that it has proven.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnx_backend.integer.ir.context import LoweringContext
from onnx_backend.integer.ir.values import Array, Refused

Bounds = tuple[int, int]
_LEAST, _MOST = -(1 << 31), (1 << 31) - 1


@dataclass(frozen=True)
class Int32:
    """An int32 tensor with the smallest and the largest value that it can have."""

    name: str
    lo: int
    hi: int


def of_constant(ctx: LoweringContext, values: Array | int) -> Int32:
    """Return a constant."""
    array = np.asarray(values, np.int64)
    return Int32(ctx.constant(array, np.int32), int(array.min()), int(array.max()))


def operation(ctx: LoweringContext, op_type: str, x: Int32, y: Int32 | int, within: Bounds | None = None) -> Int32:
    """Write `x + y`, `x - y` or `x * y` (`Add`, `Sub`, `Mul`), with bounds proven to be `within`."""
    other = of_constant(ctx, y) if isinstance(y, int) else y
    pairs = [(a, b) for a in (x.lo, x.hi) for b in (other.lo, other.hi)]
    ends = [a + b if op_type == "Add" else a - b if op_type == "Sub" else a * b for a, b in pairs]
    if op_type == "Mul" and x is other:
        ends = [0 if x.lo < 0 < x.hi else min(ends), max(x.lo**2, x.hi**2)]
    lo, hi = (min(ends), max(ends)) if within is None else (max(min(ends), within[0]), min(max(ends), within[1]))
    if lo < _LEAST or hi > _MOST:
        raise Refused(f"its numbers can reach {max(-lo, hi)}", "use smaller rows")
    name = ctx.node(op_type, [x.name, other.name])
    ctx.proven[name] = lo, hi
    return Int32(name, lo, hi)


def add(ctx: LoweringContext, x: Int32, y: Int32 | int, within: Bounds | None = None) -> Int32:
    """Write `x + y`."""
    return operation(ctx, "Add", x, y, within)


def subtract(ctx: LoweringContext, x: Int32 | int, y: Int32 | int, within: Bounds | None = None) -> Int32:
    """Write `x - y`."""
    return operation(ctx, "Sub", of_constant(ctx, x) if isinstance(x, int) else x, y, within)


def multiply(ctx: LoweringContext, x: Int32, y: Int32 | int, within: Bounds | None = None) -> Int32:
    """Write `x * y`."""
    return operation(ctx, "Mul", x, y, within)


def shifted(ctx: LoweringContext, x: Int32, by: int) -> Int32:
    """Write `x >> by` of numbers that are not negative."""
    if x.lo < 0:
        raise Refused("it shifts a number that can be negative", "report it as a defect")
    if not by:
        return x
    name = ctx.node("Div", [x.name, ctx.constant(1 << by, np.int32)])
    ctx.proven[name] = x.lo >> by, x.hi >> by
    return Int32(name, x.lo >> by, x.hi >> by)


def cut(ctx: LoweringContext, x: Int32, bits: int) -> tuple[Int32, Int32]:
    """Write the low bits of numbers that are not negative, and the rest of them divided by their unit."""
    mask = (1 << bits) - 1
    low = ctx.node("BitwiseAnd", [x.name, ctx.constant(mask, np.int32)])
    ctx.proven[low] = 0, min(mask, x.hi)
    return Int32(low, 0, min(mask, x.hi)), shifted(ctx, x, bits)


def looked_up(ctx: LoweringContext, table: Array, index: Int32) -> Int32:
    """Write `table[index]` for numbers of rows, which are so few that one node is worth more than a fast one."""
    name = ctx.node("Gather", [ctx.constant(table, np.int32, "table"), index.name])
    lo, hi = int(table.min()), int(table.max())
    ctx.proven[name] = lo, hi
    return Int32(name, lo, hi)


def summed(ctx: LoweringContext, x: Int32, axes: Sequence[int], within: Bounds, count: int = 0) -> Int32:
    """Write the sums of `count` numbers each, 0 if it is unknown, along axes, which are left out."""
    if within[0] < _LEAST or within[1] > _MOST:
        raise Refused(f"its sums can reach {max(-within[0], within[1])}", "use smaller rows")
    name = ctx.node("ReduceSum", [x.name, ctx.constant64(np.asarray(axes))], keepdims=0)
    ctx.proven[name] = within
    if count and tuple(axes) == (-1,):
        ctx.row_sums[name] = count
    return Int32(name, *within)


def spread_over(ctx: LoweringContext, x: Int32, axes: Sequence[int]) -> Int32:
    """Write numbers of rows so that they broadcast along the axes of their elements."""
    name = ctx.node("Unsqueeze", [x.name, ctx.constant64(np.asarray(axes))])
    ctx.proven[name] = x.lo, x.hi
    return Int32(name, x.lo, x.hi)
