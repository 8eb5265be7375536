"""What every runtime computes exactly on int32, and integers of up to 64 bits as several int32 tensors within that.

OpenVINO computes 64-bit integers in 32 bits, and many of its kernels take int32 through float32. Such an operator is
exact while its operands, results and sums stay within 2**24; `tests/integer/verify/test_portable_table.py` derives the
limits again on the installed version. A right shift is a division by a power of two, exact if its operand has at most
24 significant bits: low bits are cut off first.

A number is `sum of parts[i] * 2**(14 * i)`: all parts but the last are in 0..2**14-1, the last one has the sign.
Products of two parts stay below 2**28, so several of them can be added in int32. Static bounds decide how many parts a
number has; one that fits in int32 is a single tensor, which is only cut into parts where something needs them. Sums and
products leave their parts *loose*, beyond that range: carries are only added where something needs them.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx import TensorProto

from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.values import Array, Refused

#: Bound of what passes through float32.
FLOAT32 = 1 << 24
#: Bound of int32.
INT32 = 1 << 31

_ALL = (
    "Abs Add And ArgMax ArgMin BitwiseAnd BitwiseOr Cast Concat CumSum DepthToSpace Expand Flatten Gather "
    "GatherElements GatherND Identity Max Min Mul Not Or Reshape ScatterElements ScatterND Shape Slice SpaceToDepth "
    "Split Squeeze Sub Tile TopK Transpose Unsqueeze Where Xor"
)
_THROUGH_FLOAT32 = (
    "BitShift Clip ConvInteger Div Equal Greater GreaterOrEqual Less LessOrEqual MatMul MatMulInteger MaxPool Pad "
    "ReduceMax ReduceMin ReduceSum Resize"
)
#: Operators into whose float32 kernels a runtime may take the arithmetic on their results: into a layer's as float32,
#: into a reduction's with wrong results even of small numbers.
FUSING = frozenset(("ConvInteger", "MatMul", "MatMulInteger"))
REDUCTIONS = frozenset(("ReduceMax", "ReduceMin", "ReduceSum"))
#: Operator -> magnitudes below this are computed exactly, as operands, results and partial sums. Of Clip and Pad it is
#: their bounds and fill value that count.
LIMITS: Mapping[str, int] = MappingProxyType(
    {**dict.fromkeys(_ALL.split(), INT32), **dict.fromkeys(_THROUGH_FLOAT32.split(), FLOAT32)}
)


PART = 14
_MASK = (1 << PART) - 1
_MOST_SHIFT = 28
#: Loose parts are smaller, so that two of them can be added, and a carry too.
_ROOM = (1 << 30) - (1 << 18)


@dataclass(frozen=True)
class Number:
    """An integer tensor with static bounds.

    Attributes:
        parts: int32 tensors, the lowest first; one part is the number itself. Empty for a constant.
        lo: smallest value it can have.
        hi: largest value it can have.
        array: its values if it is constant, as Python integers.
        loose: bounds of every part, where these are beyond the range of a part; else empty.
    """

    parts: tuple[str, ...]
    lo: int
    hi: int
    array: Array | None = None
    loose: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class _Column:
    """A summand of weight `2**(14 * i)`, with its bounds; an array if it is constant."""

    what: str | Array
    lo: int
    hi: int


def constant(values: Array) -> Number:
    """Return a constant."""
    array = np.asarray(values).astype(object)
    flat = [int(value) for value in array.reshape(-1)] or [0]
    return Number((), min(flat), max(flat), array)


def count_parts(lo: int, hi: int) -> int:
    """Return how many parts hold a range if it has to be cut."""
    return max(-(-max(hi.bit_length(), (-lo - 1).bit_length() if lo < 0 else 0) // PART), 1)


def fits(lo: int, hi: int) -> bool:
    """Return True if bounds fit in int32."""
    return lo >= -INT32 and hi < INT32


class Arithmetic:
    """Writes operations on numbers in parts."""

    def __init__(self, b: Builder) -> None:
        self.b = b
        self._tight: dict[tuple[str, ...], Number] = {}

    def int32(self, values: Array | int) -> str:
        """Return the name of an int32 constant; raise `Refused` where it does not fit."""
        array = np.asarray(values, object)
        if array.size and not fits(int(array.min()), int(array.max())):
            raise Refused("one of its constants does not fit in 32 bits", 'use target="standard"')
        return self.b.constant(array.astype(np.int64), np.int32)

    def apart(self, name: str) -> str:
        """Write an operator between an int32 tensor and what follows that no runtime takes into a float32 kernel."""
        return self.b.node("BitwiseAnd", [name, self.int32(-1)])

    def flat(self, x: Number) -> str:
        """Return a number that fits in int32 as one tensor; raise `Refused` where its bounds are beyond."""
        if x.array is not None:
            return self.int32(x.array)
        if len(x.parts) == 1:
            return x.parts[0]
        x = self.tight(x)
        if not fits(x.lo, x.hi):
            raise Refused("a number of more than 32 bits is read as a whole", 'use target="standard"')
        parts = self._without_sign_parts(list(x.parts), count_parts(x.lo, x.hi))
        name = parts[0]
        for i, part in enumerate(parts[1:], 1):
            name = self.b.node("Add", [name, self.b.node("Mul", [part, self.int32(1 << (PART * i))])])
        return name

    def cut(self, x: Number, count: int = 0) -> list[_Column]:
        """Return the parts of a number: `count`, or as many as its bounds need if these are more."""
        count = max(count, count_parts(x.lo, x.hi))
        if x.array is not None:
            lower = [(x.array >> (PART * i)) & _MASK for i in range(count - 1)]
            return [_of_array(part) for part in (*lower, x.array >> (PART * (count - 1)))]
        parts = self._without_sign_parts(list(self.tight(x).parts), count)
        while len(parts) < count:
            low, high = self._split(parts.pop(), PART)
            parts += [low, high]
        return self._bounded(parts, x.lo, x.hi)

    def tight(self, x: Number) -> Number:
        """Return a number whose parts are within their range: carries are added, once for all readers."""
        if not x.loose:
            return x
        if x.parts not in self._tight:
            self._tight[x.parts] = self.carried(_columns(x), x.lo, x.hi)
        return replace(self._tight[x.parts], lo=x.lo, hi=x.hi)

    def _kept(self, columns: Sequence[_Column], lo: int, hi: int) -> Number:
        """Return the number that columns sum up to: loose, or with carries where there is no room left for any."""
        if len(columns) < 2 or any(max(-c.lo, c.hi) >= _ROOM for c in columns):
            return self.carried(columns, lo, hi)
        parts = tuple(c.what if isinstance(c.what, str) else self._filled(c.what, columns) for c in columns)
        return Number(parts, lo, hi, loose=tuple((c.lo, c.hi) for c in columns))

    def names(self, x: Number, count: int = 0) -> list[str]:
        """Return the parts of a number as tensors."""
        return [c.what if isinstance(c.what, str) else self.int32(c.what) for c in self.cut(x, count)]

    def _bounded(self, parts: Sequence[str], lo: int, hi: int) -> list[_Column]:
        last = PART * (len(parts) - 1)
        lower = [_Column(part, 0, _MASK) for part in parts[:-1]]
        return [*lower, _Column(parts[-1], lo >> last, hi >> last)]

    def _split(self, name: str, bits: int) -> tuple[str, str]:
        """Write the low bits of an int32 tensor, and the rest of it divided by their unit, rounded down.

        The rest is a difference: ONNX Runtime takes 4 times as long for a BitwiseAnd as for a Sub.
        """
        low = self.b.node("BitwiseAnd", [name, self.int32((1 << bits) - 1)])
        return low, self.b.node("Div", [self.b.node("Sub", [name, low]), self.int32(1 << bits)])

    def _op(self, op_type: str, left: _Column, right: _Column) -> _Column:
        """Write one operation on columns; constants are computed."""
        function: Callable[[Any, Any], Any] = {"Add": operator.add, "Sub": operator.sub, "Mul": operator.mul}[op_type]
        ends = [function(a, b) for a in (left.lo, left.hi) for b in (right.lo, right.hi)]
        lo, hi = min(ends), max(ends)
        if not isinstance(left.what, str) and not isinstance(right.what, str):
            return _of_array(function(left.what, right.what))
        if not fits(lo, hi):
            raise Refused("its sums do not fit in parts of 32 bits", 'use target="standard"')
        if op_type == "Mul" and any((one.lo, one.hi) == (0, 0) for one in (left, right)):
            return _of_array(np.asarray(0, object))
        for one, other in ((left, right), (right, left)):
            neutral = (1, 1) if op_type == "Mul" else (0, 0)
            single = not isinstance(other.what, str) and other.what.size == 1 and (other.lo, other.hi) == neutral
            if single and isinstance(one.what, str) and (op_type != "Sub" or one is left):
                return one
        names = [side.what if isinstance(side.what, str) else self.int32(side.what) for side in (left, right)]
        return _Column(self.b.node(op_type, names), lo, hi)

    def carried(self, columns: Sequence[_Column], lo: int, hi: int) -> Number:
        """Return the number that columns sum up to, with the carries added from the lowest up."""
        parts: list[str] = []
        carry = _of_array(np.asarray(0, object))
        for i, column in enumerate(columns):
            total = self._op("Add", column, carry)
            carry = _of_array(np.asarray(0, object))
            name = total.what if isinstance(total.what, str) else self._filled(total.what, columns)
            if i < len(columns) - 1 and (total.lo < 0 or total.hi > _MASK):
                name, over = self._split(name, PART)
                carry = _Column(over, total.lo >> PART, total.hi >> PART)
            parts.append(name)
        count = count_parts(lo, hi)
        parts = self._without_sign_parts(parts, count)
        while len(parts) < count:
            parts.extend(self._split(parts.pop(), PART))
        return Number(tuple(parts), lo, hi)

    def _filled(self, values: Array, columns: Sequence[_Column]) -> str:
        """Write a constant part in the shape of the others, which moves and sums need."""
        shaped = next((column.what for column in columns if isinstance(column.what, str)), "")
        if not shaped:
            return self.int32(values)
        nothing = self.b.node("Mul", [shaped, self.int32(0)])
        return self.b.node("Add", [nothing, self.int32(values)]) if np.any(values) else nothing

    def _without_sign_parts(self, parts: list[str], count: int) -> list[str]:
        """Add parts beyond `count` to the last one that stays: they are nothing but its sign."""
        while len(parts) > count:
            top = self.b.node("Mul", [parts.pop(), self.int32(1 << PART)])
            parts[-1] = self.b.node("Add", [parts[-1], top])
        return parts

    def add(self, left: Number, right: Number, *, sign: int = 1) -> Number:
        """Write `left + sign * right`."""
        other = (right.lo, right.hi) if sign > 0 else (-right.hi, -right.lo)
        lo, hi = left.lo + other[0], left.hi + other[1]
        kind = "Add" if sign > 0 else "Sub"
        if fits(lo, hi) and fits(left.lo, left.hi) and fits(right.lo, right.hi):
            return Number((self.b.node(kind, [self.flat(left), self.flat(right)]),), lo, hi)
        count = max(len(x.loose) or count_parts(x.lo, x.hi) for x in (left, right))
        sides = [_columns(x) if len(x.loose) == count else self.cut(x, count) for x in (left, right)]
        if any(max(-c.lo, c.hi) >= _ROOM for side in sides for c in side):
            sides = [self.cut(x, max(count, count_parts(lo, hi))) for x in (left, right)]
        return self._kept([self._op(kind, a, b) for a, b in zip(*sides, strict=True)], lo, hi)

    def multiply(self, left: Number, right: Number) -> Number:
        """Write the product."""
        ends = [a * b for a in (left.lo, left.hi) for b in (right.lo, right.hi)]
        lo, hi = min(ends), max(ends)
        if fits(lo, hi) and fits(left.lo, left.hi) and fits(right.lo, right.hi):
            return Number((self.b.node("Mul", [self.flat(left), self.flat(right)]),), lo, hi)
        sides = self.cut(left), self.cut(right)
        columns = [_of_array(np.asarray(0, object)) for _ in range(len(sides[0]) + len(sides[1]) - 1)]
        for i, a in enumerate(sides[0]):
            for j, b in enumerate(sides[1]):
                columns[i + j] = self._op("Add", columns[i + j], self._op("Mul", a, b))
        return self._kept(columns, lo, hi)

    def shifted_right(self, x: Number, by: int) -> Number:
        """Write `x >> by`, rounded down."""
        lo, hi = x.lo >> by, x.hi >> by
        if not by:
            return x
        if (lo, hi) == (0, 0):
            return Number((self.b.node("Mul", [self.names(x)[0], self.int32(0)]),), 0, 0)
        if fits(x.lo, x.hi) and by > _MOST_SHIFT:
            return self.shifted_right(self.shifted_right(x, _MOST_SHIFT), by - _MOST_SHIFT)
        if fits(x.lo, x.hi) and lo >= -FLOAT32 and hi < FLOAT32:
            name = self.flat(x)
            if x.lo < 0 or x.hi >= FLOAT32:  # else the division is exact, and rounds down
                name = self.b.node("BitwiseAnd", [name, self.int32(-1 << by)])
            return Number((self.b.node("Div", [name, self.int32(1 << by)]),), lo, hi)
        whole, bits = divmod(by, PART)
        if whole and whole < len(x.parts):
            return self.shifted_right(self._above(x, whole), bits)
        names = self.names(x, whole + 1)[whole:]
        if bits and len(names) > 1 and fits(lo, hi):
            return Number((self._joined(names, bits),), lo, hi)
        if bits:
            halves = [self._split(name, bits) for name in names]
            lows = [self.b.node("Mul", [low, self.int32(1 << (PART - bits))]) for low, _ in halves[1:]]
            names = [self.b.node("Add", [h, low]) for (_, h), low in zip(halves[:-1], lows, strict=True)]
            names.append(halves[-1][1])
        return self.carried(self._bounded(names, lo, hi), lo, hi)

    def _joined(self, names: Sequence[str], bits: int) -> str:
        """Write a number of several parts over `2**bits`, rounded down, as one tensor: the lowest part is shifted."""
        total = self.flat(self.shifted_right(Number((names[0],), 0, _MASK), bits))
        for i, name in reversed(list(enumerate(names))[1:]):
            raised = self.b.node("Mul", [name, self.int32(1 << (PART * i - bits))])
            total = self.b.node("Add", [total, raised])
        return total

    def _above(self, x: Number, count: int) -> Number:
        """Return the parts above the lowest ones, with the carry of these."""
        columns, carry = _columns(x), _of_array(np.asarray(0, object))
        for column in columns[:count]:
            total = self._op("Add", column, carry)
            carry = _of_array(np.asarray(0, object))
            if total.lo >= 0 and total.hi <= _MASK:
                continue
            name = total.what if isinstance(total.what, str) else self.int32(total.what)
            over = self.shifted_right(Number((name,), total.lo, total.hi), PART)
            carry = _Column(self.flat(over), over.lo, over.hi)
        first = self._op("Add", columns[count], carry)
        lo, hi = x.lo >> (PART * count), x.hi >> (PART * count)
        if count == len(columns) - 1:
            return Number((str(first.what),), lo, hi)
        return self._kept([first, *columns[count + 1 :]], lo, hi)

    def power(self, exponent: Number) -> Number:
        """Write `2**exponent` for an exponent of 0..62, by a table for each part."""
        table = np.asarray([1 << i for i in range(exponent.hi + 1)], object)
        if exponent.array is not None:
            return constant(np.left_shift(np.asarray(1, object), exponent.array))
        return self.looked_up(table, self.flat(exponent), lambda t, i: self.b.node("Gather", [t, i]))

    def looked_up(self, table: Array, index: str, gather: Callable[[str, str], str]) -> Number:
        """Write `table[index]`, a look-up for each part of the table."""
        whole = constant(table)
        if fits(whole.lo, whole.hi):
            return Number((gather(self.int32(table), index),), whole.lo, whole.hi)
        parts = tuple(gather(self.int32(np.asarray(part.what)), index) for part in self.cut(whole))
        return Number(parts, whole.lo, whole.hi)

    def masked(self, x: Number, mask: Number) -> Number:
        """Write the bits that two numbers that are not negative have in common."""
        hi = min(x.hi, mask.hi)
        if fits(x.lo, x.hi) and fits(mask.lo, mask.hi):
            return Number((self.b.node("BitwiseAnd", [self.flat(x), self.flat(mask)]),), 0, hi)
        pairs = list(zip(self.names(x), self.names(mask), strict=False))[: count_parts(0, hi)]
        parts = [self.b.node("BitwiseAnd", list(pair)) for pair in pairs]
        return Number(tuple(parts), 0, hi)

    def negative(self, x: Number) -> str:
        """Write the test if a number is below 0, a bool tensor."""
        name = self.flat(x) if fits(x.lo, x.hi) else self.names(x)[-1]
        if fits(x.lo, x.hi) and max(-x.lo, x.hi) > FLOAT32:
            name = self.b.node("Min", [self.b.node("Max", [name, self.int32(-1)]), self.int32(0)])
        return self.b.node("Less", [self.apart(name), self.int32(0)])

    def is_zero(self, x: Number) -> str:
        """Write the test if a number is 0, a bool tensor."""
        if fits(x.lo, x.hi):
            name = self.flat(x)
            if max(-x.lo, x.hi) > FLOAT32:
                name = self.b.node("Min", [self.b.node("Max", [name, self.int32(-1)]), self.int32(1)])
            return self.b.node("Equal", [self.apart(name), self.int32(0)])
        found, *names = self.names(x)
        for name in names:
            found = self.b.node("BitwiseOr", [found, name])
        return self.b.node("Equal", [self.apart(found), self.int32(0)])

    def each_part(self, numbers: Sequence[Number], write: Callable[[list[str]], str]) -> Number:
        """Write an operation that moves or selects elements, once for each part."""
        lo, hi = min(x.lo for x in numbers), max(x.hi for x in numbers)
        if fits(lo, hi):
            return Number((write([self.flat(x) for x in numbers]),), lo, hi)
        count = max(max(len(x.parts), count_parts(x.lo, x.hi)) for x in numbers)
        rows = zip(*(self.names(x, count) for x in numbers), strict=True)
        return Number(tuple(write(list(row)) for row in rows), lo, hi)

    def chosen(self, test: str, yes: Number, no: Number) -> Number:
        """Write a choice by a bool tensor.

        A runtime may take a Where and the comparison in front of it into one float32 kernel, so numbers beyond its
        exact range are chosen by their bits.
        """
        lo, hi = min(yes.lo, no.lo), max(yes.hi, no.hi)
        if max(-lo, hi) <= FLOAT32 or not fits(lo, hi):
            return self.each_part([yes, no], lambda parts: self.b.node("Where", [test, *map(self.apart, parts)]))
        all_bits = self.b.node("Sub", [self.int32(0), self.b.cast(test, TensorProto.INT32)])
        none = self.b.node("Sub", [self.int32(-1), all_bits])
        kept = [self.b.node("BitwiseAnd", [self.flat(side), mask]) for side, mask in ((yes, all_bits), (no, none))]
        return Number((self.b.node("BitwiseOr", kept),), lo, hi)

    def summed(self, x: Number, count: int, write: Callable[[str], str]) -> Number:
        """Write sums of `count` elements by `write`, which sums one int32 tensor."""
        lo, hi = min(x.lo * count, 0), max(x.hi * count, 0)
        if max(-lo, hi) <= FLOAT32:
            return Number((write(self.flat(x)),), lo, hi)
        bits = PART
        while count << bits > FLOAT32:
            bits -= 1
        if bits < 1:
            raise Refused(f"it sums {count} numbers", 'use target="standard"')
        columns = []
        for part in self.cut(x):
            name = part.what if isinstance(part.what, str) else self.int32(part.what)
            if bits >= PART and max(-part.lo, part.hi) * count <= FLOAT32:
                columns.append(_Column(write(name), part.lo * count, part.hi * count))
                continue
            if part.hi >> (2 * bits) or part.lo < -(1 << (2 * bits)):
                raise Refused(f"it sums {count} numbers", 'use target="standard"')
            low, high = self._split(name, bits)
            top = _Column(write(high), (part.lo >> bits) * count, (part.hi >> bits) * count)
            raised = self._op("Mul", top, _of_array(np.asarray(1 << bits, object)))
            columns.append(self._op("Add", raised, _Column(write(low), 0, count << bits)))
        return self.carried(columns, lo, hi)


def _columns(x: Number) -> list[_Column]:
    """Return the parts of a number that is no constant, with their bounds."""
    last = PART * (len(x.parts) - 1)
    ends = x.loose or (*((0, _MASK) for _ in x.parts[1:]), (x.lo >> last, x.hi >> last))
    return [_Column(part, *bounds) for part, bounds in zip(x.parts, ends, strict=True)]


def _of_array(values: Array) -> _Column:
    array = np.asarray(values, object)
    flat = [int(value) for value in array.reshape(-1)] or [0]
    return _Column(array, min(flat), max(flat))


_DIGIT = 9


def divided(a: Arithmetic, left: Number, right: Number) -> Number:
    """Write `left // right` for a left side that is not negative and a right side above 0, nine bits at a time.

    The divisor is shifted left until its highest part has its top bit. A table of reciprocals of that part then gives
    the next bits of the quotient from the highest part of the remainder (Knuth, The Art of Computer Programming, volume
    2, 4.3.1), never too many: it takes the part as one more, and drops all lower ones. With a remainder below twice the
    divisor these errors are below 3/8, and the floor's below 1, so that the bits are one too few at most and the next
    remainder is below twice the divisor again. The last one is compared with the divisor.

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
    limit = 2 << (PART * count)
    rest = _within(a.shifted_right(dividend, _DIGIT * steps), 0, divisor.hi)
    found = constant(np.asarray(0))
    for step in range(steps - 1, -1, -1):
        digit = a.masked(a.shifted_right(dividend, _DIGIT * step), constant(np.asarray((1 << _DIGIT) - 1)))
        estimate = _estimate(a, rest, inverse, count)
        raised = a.add(a.multiply(rest, constant(np.asarray(1 << _DIGIT))), digit)
        rest = _within(a.add(raised, a.multiply(estimate, divisor), sign=-1), 0, limit - 1)
        found = a.add(a.multiply(found, constant(np.asarray(1 << _DIGIT))), estimate)
        found = _within(found, 0, quotient[1] >> (_DIGIT * step))
    negative = a.b.cast(a.negative(a.add(rest, divisor, sign=-1)), TensorProto.INT32)
    found = a.add(found, Number((a.b.node("Sub", [a.int32(1), negative]),), 0, 1))
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
    product = Number((a.b.node("Mul", [top, inverse]),), 0, (2 << PART) << PART)
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
