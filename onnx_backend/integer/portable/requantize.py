"""Requantization in 32 bits that gives the codes of the 64-bit one: the constants with their proof, and the nodes.

The 64-bit form is `floor((sum of x * m + c) / 2**n)`. Here every mantissa m is cut into parts of so few bits that a
product with x stays below 2**31; the sums of the parts are added from the lowest up, each with the carry of the one
below, which gives the same number. One accumulator is first cut to the window in which its code changes, so that it has
few bits. As its code changes at 255 places at most, a mantissa of fewer bits often does, which is proven by trying
both sides of every such place: the form never falls as accumulators grow. Of two tensors of codes, all pairs are tried.
An accumulator of more bits is cut into two parts itself.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from onnx import TensorProto

from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.operations import Requantization
from onnx_backend.integer.ir.requantization import RequantMultiplier
from onnx_backend.integer.ir.values import Array, Term
from onnx_backend.integer.portable.numbers import FLOAT32, INT32
from qsdk.core.numerics.fixed_point import round_shift

_MOST_PARTS = 4
#: A better mantissa is searched within its share of 2**-8.
_NEARBY = 8
#: Up to so many codes per step of an accumulator, the ends of its window are on the grid.
_GENTLE = 0.9
#: Places, over all channels, at which a form is tried.
_MOST_PLACES = 1 << 22
_PAIRS = 1 << 16
_HALF_BITS = 15
_UNIT, _HALF = 1 << _HALF_BITS, 1 << (_HALF_BITS - 1)
#: Sums of wide products stay so far below 2**31 that a carry of a sum below fits in as well.
_CARRY = 1 << 17
#: How far below a step the last sum has to stay: a division in float32 rounds numbers below 2**31 by at most 64, and
#: the carry may be one too large. With the low bits cut off in front of the last division only the carry is left, and
#: with those of all sums nothing is.
_MARGINS = ((0, 66), (1, 2), (2, 0))


@dataclass(frozen=True)
class SplitTerm:
    """A term as a distance that is not negative: `clip(t, lo, hi) - lo`, or `hi - clip(t, lo, hi)` where it falls.

    Attributes:
        name: the tensor.
        codes: True if it is a tensor of codes.
        lo: int64, lower end of the window.
        hi: int64, upper end of the window.
        cuts: whether the tensor can be below, and above, the window.
        rising: False if the product falls as the term rises.
        parts: of the mantissa, int64, the lowest first.
    """

    name: str
    codes: bool
    lo: Array
    hi: Array
    cuts: tuple[bool, bool]
    rising: bool
    parts: tuple[Array, ...] = ()

    def distance(self, values: Array) -> Array:
        """Return the distances of values."""
        inside = np.clip(values, self.lo, self.hi)
        return np.asarray(inside - self.lo if self.rising else self.hi - inside)


@dataclass(frozen=True)
class SplitProducts:
    """The constants of a requantization in 32 bits: `clip((last sum >> shift) + after, bounds)`.

    Attributes:
        terms: the summands.
        addends: one for each part.
        bits: of every part but the last.
        shift: int64, broadcasts against the tensor.
        masked: in front of which divisions the low bits are cut off: 0 none, 1 the last, 2 all.
        ties: True if a quotient without a rest is made even.
        after: what is added to the quotient.
        clips: True if codes beyond the bounds have to be cut.
    """

    terms: tuple[SplitTerm, ...]
    addends: tuple[Array, ...]
    bits: int
    shift: Array
    masked: int = 0
    ties: bool = False
    after: int | Array = 0
    clips: bool = False

    def quotients(self, distances: Sequence[Array], *, through_float32: bool) -> Array:
        """Return the quotients of distances, with divisions in integers or as a runtime divides in float32."""
        carry = rest = np.zeros((), np.int64)
        last = len(self.addends) - 1
        for part, addend in enumerate(self.addends):
            shift = self.shift if part == last else np.asarray(self.bits)
            total = carry + self._sum(distances, part, addend)
            low = total & ((np.int64(1) << shift) - 1)
            cut = self.masked > 1 or (self.masked and part == last)
            carry = _quotient(total - low if cut else total, shift, through_float32)
            rest = rest | low
        return np.asarray(carry - (carry & (rest == 0))) if self.ties else carry

    def largest(self, distances: Sequence[Array]) -> int:
        """Return a bound of all sums."""
        return max(int(np.max(self._sum(distances, i, a))) for i, a in enumerate(self.addends)) + (1 << 10)

    def _sum(self, distances: Sequence[Array], part: int, addend: Array) -> Array:
        total = addend
        for distance, term in zip(distances, self.terms, strict=True):
            total = total + distance * term.parts[part]
        return total


def split_products(op: Requantization) -> SplitProducts | None:
    """Return a requantization in 32 bits with the same codes, None if there is none of few parts."""
    plan = op.plan
    if not isinstance(plan, RequantMultiplier) or any(np.any(m > 0) and np.any(m < 0) for m in plan.mantissas):
        return None
    terms = [
        SplitTerm(term.name, term.codes, term.lo, term.hi, (False, False), not np.any(mantissa < 0))
        for term, mantissa in zip(op.value.terms, plan.mantissas, strict=True)
    ]
    if len(terms) == 1:
        return _of_one(op, plan, terms[0])
    spans = [int(np.max(term.hi - term.lo)) + 1 for term in terms]
    scalars = all(a.size == 1 for term in terms for a in (term.lo, term.hi)) and plan.shift.size == plan.addend.size
    if len(terms) == 2 and scalars and plan.shift.size == 1 and spans[0] * spans[1] <= _PAIRS:
        return _of_two(op, plan, terms)
    return None


def _quotient(total: Array, shift: Array, through_float32: bool) -> Array:
    if not through_float32:
        return np.asarray(total >> shift)
    return np.trunc(np.ldexp(total.astype(np.float32).astype(np.float64), -shift)).astype(np.int64)


def _rounded(op: Requantization, plan: RequantMultiplier, values: Sequence[Array]) -> Array:
    """Return the codes of the 64-bit form."""
    total = plan.addend
    for value, mantissa in zip(values, plan.mantissas, strict=True):
        total = total + value * mantissa
    rounded = round_shift(total, plan.shift, rounding=op.rounding)  # type: ignore[arg-type]
    return np.asarray(np.clip(rounded + op.encoding.zero_point, *op.bounds))


def _places(op: Requantization, plan: RequantMultiplier, term: Term, codes: Array) -> Array | None:
    """Return the first accumulator that has at least each code, one beyond the bounds if none has; None if in doubt."""
    sign = -1 if np.any(plan.mantissas[0] < 0) else 1
    mantissa = np.abs(plan.mantissas[0]).astype(np.float64)
    reals = np.ldexp(codes - op.encoding.zero_point - 0.5, plan.shift) - plan.addend
    near = sign * np.where(mantissa > 0, reals / np.maximum(mantissa, 1.0), 0.0)
    middle = np.floor(np.clip(near, term.lo - 3.0, term.hi + 3.0)).astype(np.int64)
    first, last = (term.lo, term.hi) if sign > 0 else (term.hi, term.lo)
    found: Array = np.broadcast_to(last + sign, middle.shape)
    for step in range(4, -5, -1):  # from the far side, so that the first accumulator with the code stays
        place = np.clip(middle + sign * step, term.lo, term.hi)
        found = np.where(_rounded(op, plan, [place]) >= codes, place, found)
    before = np.where(found == first, first, found - sign)
    early = (found != first) & (_rounded(op, plan, [before]) >= codes)
    return None if np.any(early) or np.any((found == last + sign) & (early | (before != last))) else found


def _of_one(op: Requantization, plan: RequantMultiplier, term: SplitTerm) -> SplitProducts | None:
    (lo, hi), source, sign = op.bounds, op.value.terms[0], 1 if term.rising else -1
    arrays = (source.lo, source.hi, plan.mantissas[0], plan.shift, plan.addend)
    if lo >= hi or (hi - lo) * max(a.size for a in arrays) > _MOST_PLACES:
        return None
    codes = np.arange(lo + 1, hi + 1).reshape(-1, *(1 for _ in range(max(a.ndim for a in arrays))))
    places = _places(op, plan, source, codes)
    if places is None:
        return None
    has_at, has_before = ((p >= source.lo) & (p <= source.hi) for p in (places, places - sign))
    changes = has_at & has_before
    low, high = _window(changes, *((places - sign, places) if term.rising else (places, places - sign)))
    low, high = (np.where(np.any(changes, 0), end, source.lo) for end in (low, high))
    cuts = bool(np.any(low > source.lo)), bool(np.any(high < source.hi))
    term = replace(term, lo=low, hi=high, cuts=cuts)
    bits = 30 - int(np.max(high - low)).bit_length()
    steps = _Steps(codes, term.distance(places), term.distance(places - sign), has_at, has_before)
    for count in range(1, _MOST_PARTS + 1):
        found = (_tried(op, plan, term, bits, (count, *margin), steps) for margin in _MARGINS if bits > 3)
        form = next((form for form in found if form is not None), None) or _exact(op, plan, term, bits, count, steps)
        if form is not None:
            return form
    return None


def _window(inside: Array, below: Array, at: Array) -> tuple[Array, Array]:
    """Return the smallest and the largest of the places that count, per channel."""
    least, most = np.iinfo(np.int64).max, np.iinfo(np.int64).min
    return np.min(np.where(inside, below, least), 0), np.max(np.where(inside, at, most), 0)


@dataclass(frozen=True)
class _Steps:
    """The places where codes change, as distances: at the code, and one before; and whether the tensor has them."""

    codes: Array
    at: Array
    before: Array
    has_at: Array
    has_before: Array

    def addends(
        self, mantissa: Array, wanted: Array, ends: tuple[Array, Array], room: int, span: Array
    ) -> tuple[Array, Array]:
        """Return the smallest and the largest addend with which the codes change at these places."""
        least = np.max(np.where(self.has_at, wanted - mantissa * self.at, 0), 0)
        most = np.min(np.where(self.has_before, wanted - mantissa * self.before - room - 1, 1 << 62), 0)
        return np.maximum(least, ends[0]), np.minimum(most, ends[1] - mantissa * span)

    def widest(self, mantissa: Array, wanted: Array, ends: tuple[Array, Array], room: int, span: Array) -> Array:
        """Return the mantissas near the given ones that leave the addend most room, which is concave in a mantissa."""

        def width(mantissa: Array) -> Array:
            least, most = self.addends(mantissa, wanted, ends, room, span)
            return np.asarray(most - least)

        widths = width(mantissa)
        if np.all(widths >= 0):
            return mantissa
        if widths.size > 1 and not self._of_channel(widths, mantissa, wanted, ends, room, span):
            return mantissa  # there is none for the worst channel, so the others need no search
        low, high = mantissa - (mantissa >> _NEARBY), mantissa + (mantissa >> _NEARBY)
        while np.any(high - low > 2):
            third = (high - low) // 3
            rising = width(low + third) <= width(high - third)
            low, high = np.where(rising, low + third, low), np.where(rising, high, high - third)
        found = np.stack([low, (low + high) >> 1, high])
        widths = np.stack([width(candidate) for candidate in found])
        return np.asarray(np.take_along_axis(found, np.argmax(widths, 0)[None], 0)[0])

    def _of_channel(
        self, widths: Array, mantissa: Array, wanted: Array, ends: tuple[Array, Array], room: int, span: Array
    ) -> bool:
        """Return True if, in the channel where the addend has least room, some mantissa leaves it room."""
        worst: tuple[Any, ...] = np.unravel_index(int(np.argmin(widths)), widths.shape)

        def rows(values: Array) -> Array:
            return np.asarray(np.broadcast_to(values, (len(values), *widths.shape))[:, *worst])

        def one(values: Array) -> Array:
            return np.asarray(np.broadcast_to(values, widths.shape)[worst])

        steps = _Steps(*(rows(a) for a in (self.codes, self.at, self.before, self.has_at, self.has_before)))
        given = rows(wanted), (one(ends[0]), one(ends[1])), room, one(span)
        least, most = steps.addends(steps.widest(one(mantissa), *given), *given)
        return bool(least <= most)

    def hold(self, made: SplitProducts, op: Requantization, span: Array) -> bool:
        """Return True if codes change at these places alone, in integers and with divisions in float32."""
        if made.largest([span]) >= 1 << 31:
            return False
        for through_float32 in (False, True):
            at, before, first, last = (
                made.quotients([distances], through_float32=through_float32) + made.after
                for distances in (self.at, self.before, np.zeros_like(span), span)
            )
            if np.any((at < self.codes) & self.has_at) or np.any((before >= self.codes) & self.has_before):
                return False
            if not made.clips and (np.any(first < op.bounds[0]) or np.any(last > op.bounds[1])):
                return False
        return True


def _tried(
    op: Requantization,
    plan: RequantMultiplier,
    term: SplitTerm,
    bits: int,
    form: tuple[int, int, int],
    steps: _Steps,
) -> SplitProducts | None:
    """Return the constants with so many parts, if codes then change where they should, and stay a margin below that."""
    count, masked, margin = form
    whole, room = bits * (count - 1), margin << (bits * (count - 1))
    alive = plan.mantissas[0] != 0
    steepest = float(np.max(np.ldexp(np.abs(plan.mantissas[0]).astype(np.float64), -plan.shift)))
    lift = math.ceil(steepest) if steepest > _GENTLE else 0  # the ends of the window are so far beyond the grid
    lo, hi = op.bounds[0], op.bounds[1] + 2 * lift
    code_bits = (hi + 1).bit_length()
    shift = np.minimum(np.minimum(31 - code_bits + whole, np.where(alive, plan.shift, 61)), 61 - code_bits)
    if np.any(shift - whole < 1):
        return None
    mantissa = np.rint(np.ldexp(np.abs(plan.mantissas[0]).astype(np.float64), shift - plan.shift)).astype(np.int64)
    once = np.sum(steps.has_at & steps.has_before, 0) == 1  # 0 or 1 then: any slope will do, and a steep one is safe
    mantissa = np.where(once, np.int64(1) << shift, mantissa)
    span, wanted = term.hi - term.lo, (steps.codes + lift) << shift
    ends = np.int64(lo) << shift, (np.int64(hi + 1) << shift) - room - 1
    mantissa = np.where(once, mantissa, steps.widest(mantissa, wanted, ends, room, span))
    least, most = steps.addends(mantissa, wanted, ends, room, span)
    if np.any(least > most):
        return None
    middle = (least + most) >> 1
    coarse = -((-middle >> whole) << whole)  # an addend without low bits saves a step
    addend = coarse if np.all((coarse >= least) & (coarse <= most)) else middle
    parts = (replace(term, parts=_parts(mantissa, bits, count)),)
    addends = _parts(addend, bits, count)
    made = SplitProducts(parts, addends, bits, np.asarray(shift - whole), masked, after=-lift, clips=lift > 0)
    return made if steps.hold(made, op, span) else None


def _exact(
    op: Requantization, plan: RequantMultiplier, term: SplitTerm, bits: int, count: int, steps: _Steps
) -> SplitProducts | None:
    """Return the constants of the 64-bit form itself, less common factors of two, where ties to even are possible."""
    if op.rounding != "half_even":
        return None
    lift = max(op.encoding.zero_point - op.bounds[0] + 2, 0)
    lift += lift & 1  # even, so that the parity of the quotient is its own
    mantissa, shift = np.abs(plan.mantissas[0]), plan.shift
    ends = [side * plan.mantissas[0] for side in (term.lo if term.rising else term.hi,)]
    if np.max(np.abs(ends[0].astype(np.float64))) + lift * np.ldexp(1.0, int(np.max(shift))) > 2.0**61:
        return None
    addend = plan.addend + ends[0] + (np.int64(1) << (shift - 1)) + (np.int64(lift) << shift)
    both = mantissa | addend
    common = np.minimum(np.log2((both & -both).astype(np.float64)).astype(np.int64), shift - 1)
    shift, whole = shift - common, bits * (count - 1)
    if np.any(shift - whole < 1) or bits < 4:
        return None
    parts = (replace(term, parts=_parts(mantissa >> common, bits, count)),)
    made = SplitProducts(
        parts,
        _parts(addend >> common, bits, count),
        bits,
        np.asarray(shift - whole),
        masked=2,
        ties=True,
        after=op.encoding.zero_point - lift,
        clips=True,
    )
    return made if steps.hold(made, op, term.hi - term.lo) else None


def _parts(number: Array, bits: int, count: int) -> tuple[Array, ...]:
    lower = [np.asarray((number >> (bits * i)) & ((1 << bits) - 1)) for i in range(count - 1)]
    return (*lower, np.asarray(number >> (bits * (count - 1))))


def _of_two(op: Requantization, plan: RequantMultiplier, terms: Sequence[SplitTerm]) -> SplitProducts | None:
    """Return the exact form in two parts, with as few steps as give the right codes for all pairs."""
    values = np.meshgrid(*(np.arange(t.lo.item(), t.hi.item() + 1) for t in terms), indexing="ij")
    wanted, shift = _rounded(op, plan, values), int(plan.shift.item())
    bits = min(28 - max(int(np.max(t.hi - t.lo)).bit_length() for t in terms), shift - 1)
    addend = int(plan.addend.item()) + (1 << (shift - 1))
    for term, mantissa in zip(terms, plan.mantissas, strict=True):
        addend += int(mantissa.item()) * int((term.lo if term.rising else term.hi).item())
    lift = max(-(addend >> shift), 0)
    lift += lift & 1  # even, so that the parity of the quotient is its own
    addend += lift << shift
    if bits < 1 or (addend >> bits) >= 1 << 30:
        return None
    split = tuple(
        replace(term, parts=_parts(np.abs(mantissa), bits, 2))
        for term, mantissa in zip(terms, plan.mantissas, strict=True)
    )
    addends = tuple(np.asarray(part, np.int64) for part in (addend & ((1 << bits) - 1), addend >> bits))
    distances = [term.distance(value) for term, value in zip(split, values, strict=True)]
    after = op.encoding.zero_point - lift
    for masked, ties in ((0, False), (2, False), (2, True)):
        made = SplitProducts(split, addends, bits, np.asarray(shift - bits), masked, ties, after, clips=True)
        if made.largest(distances) >= 1 << 31:
            return None
        found = [made.quotients(distances, through_float32=through) + after for through in (False, True)]
        if all(np.array_equal(np.clip(codes, *op.bounds), wanted) for codes in found):
            return made
    return None


# --- an accumulator of more bits than one part leaves -----------------------------------------------------------------


@dataclass(frozen=True)
class WideProduct:
    """The 64-bit product in four of 32 bits: the accumulator is cut into two parts, as the mantissa is.

    With `d = sign * t + offset`, the distances are `(d & 0x7fff) - 2**14` and `d >> 15`. Both have a sign, so that all
    sums stay in int32; their low bits are cut off in front of a division, which is then exact and rounds down.

    Attributes:
        sign: int64, 1, or -1 where the product falls as the tensor rises.
        offset: int64.
        products: of the two distances, in three sums.
    """

    sign: Array
    offset: Array
    products: SplitProducts


def wide_product(op: Requantization) -> WideProduct | None:
    """Return a requantization in four products with the same codes, None if its sums leave 32 bits."""
    plan, terms = op.plan, op.value.terms
    if not isinstance(plan, RequantMultiplier) or len(terms) != 1 or op.rounding != "half_up":
        return None
    term, signed, n = terms[0], plan.mantissas[0], plan.shift
    mantissa, sign = np.abs(signed), np.where(signed < 0, -1, 1)
    middle = (term.lo + term.hi) >> 1
    base, reach = sign * middle, int(np.max(np.maximum(term.hi - middle, middle - term.lo)))
    sizes = np.abs(plan.addend.astype(np.float64)) + (np.abs(base.astype(np.float64)) + reach) * mantissa
    sizes = sizes + np.ldexp(1.0, n)
    if int(np.max(mantissa)) >= INT32 or reach >= INT32 - _UNIT or np.max(sizes) > 2.0**62:
        return None
    addend = plan.addend + base * mantissa + (np.int64(1) << (n - 1))
    whole, none = addend >> n, mantissa == 0
    addend = np.where(none, 0, addend - (whole << n))
    n = np.where(none, 2 * _HALF_BITS + 1, n)  # of a constant the shift says nothing
    addends, shift = _parts(addend, _HALF_BITS, 3), n - 2 * _HALF_BITS
    low, high = _parts(mantissa, _HALF_BITS, 2)
    most = (reach + _UNIT) >> _HALF_BITS
    sums = (most * low + _HALF * high + addends[1], most * high + addends[2])
    if np.any(shift < 1) or np.any(shift > 30) or max(int(np.max(total)) for total in sums) >= INT32 - _CARRY:
        return None
    zero = np.zeros_like(low)
    whole_term = SplitTerm(term.name, term.codes, term.lo, term.hi, (False, False), rising=True)
    split = tuple(replace(whole_term, parts=parts) for parts in ((low, high, zero), (zero, low, high)))
    after = op.encoding.zero_point + whole
    return WideProduct(sign, _HALF - base, SplitProducts(split, addends, _HALF_BITS, shift, 2, after=after, clips=True))


# --- the nodes --------------------------------------------------------------------------------------------------------


def requantize(b: Builder, op: Requantization) -> bool:
    """Write a requantization in 32 bits, with the codes of the 64-bit form; False if it has too many parts."""
    split = split_products(op)
    wide = wide_product(op) if split is None else None
    if wide is not None:
        split, distances = wide.products, _halves(b, op.value.terms[0], wide)
    elif split is not None:
        reaches = [int(max(np.max(np.abs(end)) for end in (term.lo, term.hi))) for term in op.value.terms]
        pairs = zip(split.terms, reaches, strict=True)
        distances = [_distance(b, term, reach, alone=len(split.addends) == 1) for term, reach in pairs]
    else:
        return False
    carry, rests = "", []
    units: list[Array] = [np.asarray(1 << split.bits)] * (len(split.addends) - 1)
    for part, unit in enumerate([*units, np.left_shift(np.int64(1), split.shift)]):
        total = _sum(b, split, distances, part, carry)
        if split.ties:
            rests.append(b.node("BitwiseAnd", [total, _int32(b, unit - 1)]))
            total = b.node("Sub", [total, rests[-1]])
        elif split.masked > 1 or (split.masked and part == len(units)):
            total = b.node("BitwiseAnd", [total, _int32(b, -unit)])
        carry = b.node("Div", [total, _int32(b, unit)])
    quotient = _even_at_ties(b, carry, rests) if rests else carry
    if np.any(split.after):
        quotient = b.node("Add", [quotient, _int32(b, split.after)])
    if split.clips:
        if wide is None:  # the kernel of Clip is of float32: no runtime may take the products into it
            quotient = b.node("BitwiseAnd", [quotient, _int32(b, -1)])
        quotient = b.node("Clip", [quotient, *(_int32(b, bound) for bound in op.bounds)])
    to = TensorProto.INT32 if op.result in b.indices else op.encoding.onnx_kind
    if to == TensorProto.INT32:
        b.write("Identity", [quotient], op.result)
    else:
        b.write("Cast", [quotient], op.result, to=to)
    return True


def _even_at_ties(b: Builder, quotient: str, rests: list[str]) -> str:
    """Write quotients without a rest as even ones."""
    rest = rests[0]
    for other in rests[1:]:
        rest = b.node("BitwiseOr", [rest, other])
    whole = b.node("Sub", [_int32(b, 1), b.node("Min", [rest, _int32(b, 1)])])
    return b.node("Sub", [quotient, b.node("BitwiseAnd", [whole, quotient])])


def _halves(b: Builder, term: Term, wide: WideProduct) -> list[str]:
    """Write the two distances of a wide product."""
    name = b.cast(term.name, TensorProto.INT32) if term.codes else term.name
    if not term.codes and max(abs(int(np.min(term.lo))), abs(int(np.max(term.hi)))) <= FLOAT32:
        name = b.node("BitwiseAnd", [name, _int32(b, -1)])  # a layer may have computed it, in float32
    if np.any(wide.sign < 0):
        name = b.node("Mul", [name, _int32(b, wide.sign)])
    name = b.node("Add", [name, _int32(b, wide.offset)])
    low = b.node("BitwiseAnd", [name, _int32(b, _UNIT - 1)])
    high = b.node("Div", [b.node("Sub", [name, low]), _int32(b, _UNIT)])
    return [b.node("Sub", [low, _int32(b, _HALF)]), high]


def _distance(b: Builder, term: SplitTerm, reach: int, *, alone: bool) -> str:
    """Write the distance of a term.

    A runtime may take a product with a constant into a float32 kernel that computed the accumulator, unless two
    operators read the distance: where one alone does, an operator that no kernel takes in stands in between.
    """
    name = b.cast(term.name, TensorProto.INT32) if term.codes else term.name
    for op_type, end, cut in zip(("Max", "Min"), (term.lo, term.hi), term.cuts, strict=True):
        bound = _int32(b, end)
        if cut and reach > FLOAT32:  # with a constant, a runtime may clip in float32 with what is in front of it
            bound = b.node("Add", [b.node("BitwiseAnd", [name, _int32(b, 0)]), bound])
        name = b.node(op_type, [name, bound]) if cut else name
    if not term.rising:
        name = b.node("Sub", [_int32(b, term.hi), name])
    elif np.any(term.lo):
        name = b.node("Sub", [name, _int32(b, term.lo)])
    span = int(np.max(term.hi - term.lo))
    if term.codes or not (alone or span >= FLOAT32):
        return name
    return b.node("BitwiseAnd", [name, _int32(b, (1 << span.bit_length()) - 1)])


def _sum(b: Builder, split: SplitProducts, distances: list[str], part: int, carry: str) -> str:
    """Write the sum of the products with one part of the mantissas, its addend and the carry of the part below."""
    total = carry
    for distance, term in zip(distances, split.terms, strict=True):
        if np.any(term.parts[part]):
            product = b.node("Mul", [distance, _int32(b, term.parts[part])])
            total = b.node("Add", [total, product]) if total else product
    total = total or b.node("Mul", [distances[0], _int32(b, 0)])
    addend = split.addends[part]
    return b.node("Add", [total, _int32(b, addend)]) if np.any(addend) else total


def _int32(b: Builder, values: Array | int) -> str:
    return b.constant(values, np.int32)
