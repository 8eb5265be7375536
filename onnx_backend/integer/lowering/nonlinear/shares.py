"""The shares of exponentials in the sum of their row, in int32: halves of 15 bits, one reciprocal per row.

With e an exponential in units of 2**-30 and s the sum of its row, `e * (2**60 / s) / 2**30` is its share in the same
unit. The halves of e come from two tables, those of the reciprocal from one Newton step per row; of their four products
the lowest is left out, and half of what it can be is added instead.
"""

import numpy as np

from onnx_backend.integer.fixed_point.fixed_arithmetic import gather_table
from onnx_backend.integer.fixed_point.int32 import (
    Int32,
)
from onnx_backend.integer.fixed_point.mantissas import RECIPROCAL, reciprocal_of_mantissa
from onnx_backend.integer.ir.context import LoweringContext
from onnx_backend.integer.ir.values import Array

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
