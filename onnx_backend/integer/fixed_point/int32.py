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
    """An int32 tensor with the smallest and the largest value that it can have; its methods write nodes.

    Where interval arithmetic says too little, a caller states `within` which bounds a result is proven to be.
    """

    ctx: LoweringContext
    name: str
    lo: int
    hi: int

    def plus(self, other: "Int32 | int", within: Bounds | None = None) -> "Int32":
        """Write a sum."""
        return self._combined("Add", other, within)

    def minus(self, other: "Int32 | int", within: Bounds | None = None) -> "Int32":
        """Write a difference."""
        return self._combined("Sub", other, within)

    def times(self, other: "Int32 | int", within: Bounds | None = None) -> "Int32":
        """Write a product."""
        return self._combined("Mul", other, within)

    def _combined(self, op_type: str, y: "Int32 | int", within: Bounds | None) -> "Int32":
        other = of_constant(self.ctx, y) if isinstance(y, int) else y
        pairs = [(a, b) for a in (self.lo, self.hi) for b in (other.lo, other.hi)]
        ends = [a + b if op_type == "Add" else a - b if op_type == "Sub" else a * b for a, b in pairs]
        if op_type == "Mul" and self is other:
            ends = [0 if self.lo < 0 < self.hi else min(ends), max(self.lo**2, self.hi**2)]
        lo, hi = (min(ends), max(ends)) if within is None else (max(min(ends), within[0]), min(max(ends), within[1]))
        if lo < _LEAST or hi > _MOST:
            raise Refused(f"its numbers can reach {max(-lo, hi)}", "use smaller rows")
        return self._written(self.ctx.node(op_type, [self.name, other.name]), lo, hi)

    def _written(self, name: str, lo: int, hi: int) -> "Int32":
        self.ctx.proven[name] = lo, hi
        return Int32(self.ctx, name, lo, hi)

    def shifted(self, by: int) -> "Int32":
        """Write `x >> by` of numbers that are not negative."""
        if self.lo < 0:
            raise Refused("it shifts a number that can be negative", "report it as a defect")
        if not by:
            return self
        name = self.ctx.node("Div", [self.name, self.ctx.constant(1 << by, np.int32)])
        return self._written(name, self.lo >> by, self.hi >> by)

    def cut(self, bits: int) -> "tuple[Int32, Int32]":
        """Write the low bits of numbers that are not negative, and the rest of them divided by their unit."""
        mask = (1 << bits) - 1
        low = self.ctx.node("BitwiseAnd", [self.name, self.ctx.constant(mask, np.int32)])
        return self._written(low, 0, min(mask, self.hi)), self.shifted(bits)

    def looked_up(self, table: Array) -> "Int32":
        """Write `table[x]` for numbers of rows, which are so few that one node is worth more than a fast one."""
        name = self.ctx.node("Gather", [self.ctx.constant(table, np.int32, "table"), self.name])
        return self._written(name, int(table.min()), int(table.max()))

    def summed(self, axes: Sequence[int], within: Bounds, count: int = 0) -> "Int32":
        """Write the sums of `count` numbers each, 0 if it is unknown, along axes, which are left out."""
        if within[0] < _LEAST or within[1] > _MOST:
            raise Refused(f"its sums can reach {max(-within[0], within[1])}", "use smaller rows")
        name = self.ctx.node("ReduceSum", [self.name, self.ctx.constant64(np.asarray(axes))], keepdims=0)
        if count and tuple(axes) == (-1,):
            self.ctx.row_sums[name] = count
        return self._written(name, *within)

    def spread_over(self, axes: Sequence[int]) -> "Int32":
        """Write numbers of rows so that they broadcast along the axes of their elements."""
        name = self.ctx.node("Unsqueeze", [self.name, self.ctx.constant64(np.asarray(axes))])
        return self._written(name, self.lo, self.hi)


def of_constant(ctx: LoweringContext, values: Array | int) -> Int32:
    """Return a constant."""
    array = np.asarray(values, np.int64)
    return Int32(ctx, ctx.constant(array, np.int32), int(array.min()), int(array.max()))
