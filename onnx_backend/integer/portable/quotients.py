"""Division of numbers in parts: a shift by powers of two, else nine bits of the quotient at a time.

Each nine bits are estimated from the highest parts. The divisor is shifted left until its highest part has its top
bit, so that a table of reciprocals of that part gives the next bits of the quotient, never too many and at most three
too few (Knuth, The Art of Computer Programming, volume 2, 4.3.1). What is missing is in the remainder, which the next
bits are taken from; comparisons take the rest.
"""

from dataclasses import replace

import numpy as np
from onnx import TensorProto

from onnx_backend.integer.ir.values import Refused
from onnx_backend.integer.portable.numbers_in_parts import PART, Arithmetic, Number, constant, count_parts

_DIGIT = 9
_MISSING = 4


def divided(a: Arithmetic, left: Number, right: Number) -> Number:
    """Write `left // right` for a left side that is not negative and a right side above 0.

    Raises:
        Refused: the bounds are not of that kind.
    """
    if left.lo < 0 or right.lo < 1:
        raise Refused("it divides by a number that can be 0 or negative", 'use target="standard"')
    quotient = (left.lo // right.hi, left.hi // right.lo)
    count = count_parts(right.lo, right.hi)
    shift = _missing_bits(a, right, count)
    factor = a.power(shift)
    divisor = _within(a.multiply(right, factor), 1 << (PART * count - 1), (1 << (PART * count)) - 1)
    dividend = a.multiply(left, factor)
    steps = max(-(-quotient[1].bit_length() // _DIGIT), 1)
    tops = a.cut(divisor, count)[-1].what
    table = np.asarray([(1 << (2 * PART - 1)) // (i + 1) for i in range(1 << PART)])
    inverse = a.b.node("Gather", [a.int32(table), str(tops)])
    limit = _MISSING << (PART * count)
    rest = _within(a.shifted_right(dividend, _DIGIT * steps), 0, divisor.hi)
    found = constant(np.asarray(0))
    for step in range(steps - 1, -1, -1):
        digit = a.masked(a.shifted_right(dividend, _DIGIT * step), constant(np.asarray((1 << _DIGIT) - 1)))
        estimate = _estimate(a, rest, inverse, count)
        raised = a.add(a.multiply(rest, constant(np.asarray(1 << _DIGIT))), digit)
        rest = _within(a.add(raised, a.multiply(estimate, divisor), sign=-1), 0, limit - 1)
        found = a.add(a.multiply(found, constant(np.asarray(1 << _DIGIT))), estimate)
        found = _within(found, 0, quotient[1] >> (_DIGIT * step))
    for _ in range(_MISSING - 1):
        less = a.add(rest, divisor, sign=-1)
        negative = a.b.cast(a.negative(less), TensorProto.INT32)
        taken = Number((a.b.node("Sub", [a.int32(1), negative]),), 0, 1)
        rest = _within(a.add(rest, a.multiply(taken, divisor), sign=-1), 0, limit - 1)
        found = a.add(found, taken)
    return _within(found, *quotient)


def divided_by_powers(a: Arithmetic, left: Number, right: Number) -> Number:
    """Write a division by constant powers of two, which rounds toward zero."""
    assert right.array is not None
    ends = [abs(bound) // right.lo * (-1 if bound < 0 else 1) for bound in (left.lo, left.hi)]
    if left.lo < 0:  # a shift rounds down
        negative = Number((a.b.cast(a.negative(left), TensorProto.INT32),), 0, 1)
        left = a.add(left, a.multiply(negative, constant(right.array - 1)))
    most = right.hi.bit_length() - 1
    if right.lo != right.hi:
        left = a.multiply(left, constant((1 << most) // right.array))
    found = a.shifted_right(left, most)
    return replace(found, lo=max(found.lo, min(ends[0], 0)), hi=min(found.hi, max(ends[1], 0)))


def _estimate(a: Arithmetic, rest: Number, inverse: str, count: int) -> Number:
    """Write the next bits of the quotient: the remainder's highest part times the reciprocal of the divisor's."""
    top = a.flat(a.shifted_right(rest, PART * (count - 1)))
    product = Number((a.b.node("Mul", [top, inverse]),), 0, (_MISSING << PART) << PART)
    return a.shifted_right(_within(product, 0, (1 << 31) - 1), 2 * PART - 1 - _DIGIT)


def _missing_bits(a: Arithmetic, x: Number, count: int) -> Number:
    """Write how far a positive number can be shifted left within its parts."""
    least, most = (PART * count - bound.bit_length() for bound in (x.hi, x.lo))
    found = constant(np.asarray(least))
    for shift in range(least + 1, most + 1):
        below = a.negative(a.add(x, constant(np.asarray(1 << (PART * count - shift))), sign=-1))
        found = a.add(found, Number((a.b.cast(below, TensorProto.INT32),), 0, 1))
    return _within(found, least, most)


def _within(x: Number, lo: int, hi: int) -> Number:
    """Return a number with bounds that are known to be tighter than those of its parts."""
    if x.array is not None:
        return x
    return replace(x, lo=max(x.lo, lo), hi=min(x.hi, hi))
