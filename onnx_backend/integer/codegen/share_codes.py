"""Write the codes of a Softmax for ONNX Runtime: one product in 64 bits instead of four in 32 and a requantization.

With e an exponential in units of 2**-30, s the sum of its row and f the encoding's scale, a code is
`(e * (2**n / (f * s)) + zero point * 2**n + 2**(n-1)) >> n`: the multiplier of the encoding is in the reciprocal of a
row. The product is at most `2**n / f`, so that n can be large enough for the quotient's rounding not to count.
"""

import math
from fractions import Fraction

import numpy as np
from onnx import TensorProto

from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.exact_bounds import round_up
from onnx_backend.integer.ir.operations import Requantization, Shares

_EXPONENT = 30
#: An exponential over 2**n is at most 2**-10 output steps, what a quotient that is rounded down can be off by.
_LEAST = _EXPONENT + 10
_ROOM = 63


def share_codes(b: Builder, op: Requantization, rows: Shares) -> bool:
    """Write shares of rows along the last axis as codes; False with a Clip or too few bits for their scale."""
    steps, zero = 1 / Fraction(op.encoding.scale), op.encoding.zero_point
    n = _ROOM - (math.ceil(steps) + zero + 1).bit_length()
    if rows.axis != -1 or n < _LEAST or np.isfinite(op.value.lo) or np.isfinite(op.value.hi):
        return False
    whole = round(steps * 2**n)
    raised = (zero << n) + (1 << (n - 1))
    wide = b.cast(_exponentials(b, rows), TensorProto.UINT64)
    sums = b.node("MatMul", [wide, b.constant(np.ones((rows.length, 1)), np.uint64)])
    factor = b.node("Div", [b.constant(whole, np.uint64), sums])
    if rows.missing:
        some = b.node("Unsqueeze", [b.node("Not", [rows.missing]), b.constant([-1], np.int64)])
        factor = b.node("Mul", [factor, b.cast(some, TensorProto.UINT64)])  # the runtime has no Where of uint64
    total = b.node("Add", [b.node("Mul", [wide, factor]), b.constant(raised, np.uint64)])
    found = b.node("BitShift", [total, b.constant(n, np.uint64)], direction="RIGHT")
    lo, hi = op.bounds
    if lo > zero or (whole + raised) >> n > hi:
        found = b.cast(found, TensorProto.INT32)
        found = b.node("Clip", [found, b.constant(lo, np.int32), b.constant(hi, np.int32)])
    b.write("Cast", [found], op.result, to=op.encoding.onnx_kind)
    error = Fraction(rows.error) * steps + Fraction(1, 1 << (n - _EXPONENT - 1))
    op.row.update(form="shares of rows", rounding="half_up", error_bound=round_up(error))
    return True


def _exponentials(b: Builder, rows: Shares) -> str:
    flat = b.node("Reshape", [rows.index, b.constant([-1], np.int64)])
    found = b.node("GatherElements", [b.constant(rows.table, np.int32, "table"), flat], axis=0)
    return b.node("Reshape", [found, b.node("Shape", [rows.index])])
