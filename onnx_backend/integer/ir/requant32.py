"""Requantization for hardware without 64-bit products: everything in 32 bits, with a stated error.

An accumulator is centred, cut to the range of the output's grid, shifted right to at most 16 bits with rounding, and
multiplied by a mantissa of as many bits as 32 leave. Both roundings are bounded: `error` is their largest effect on the
value before its last rounding, in output steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from onnx_backend.integer.ir.exact_bounds import ROUNDING, distinct_rows, largest
from onnx_backend.integer.ir.values import ActivationEncoding, Array, Linear, Refused

_KEPT = 16  # bits of an accumulator that enter the product
_ROOM = 29  # bits of a sum of products: with its lift to the positive side it stays in int32
_LARGEST = 1 << 30


@dataclass(frozen=True)
class Requant32Term:
    """The constants of one term: `round_shift(clip(t - zero, -cut, cut), before) * mantissa`.

    Attributes:
        zero: int32, zero point or minus the bias.
        cut: int32, 0 where nothing is cut.
        before: right shift in front of the product, with ties up.
        mantissa: int32.
    """

    zero: Array
    cut: Array
    before: Array
    mantissa: Array


@dataclass(frozen=True)
class Requant32:
    """The constants of one requantization in 32 bits: `(sum of terms + addend + half) >> shift`, ties up.

    Attributes:
        terms: one for each term of the accumulator.
        shift: int64, 1..28, broadcasts against the tensor.
        addend: int32, the constant of the sum.
        reach: bound of the sum's magnitude.
        bound: largest magnitude of a term with its zero point or bias applied.
        error: how far the value before its last rounding can be from the real one, in output steps, exactly.
    """

    terms: tuple[Requant32Term, ...]
    shift: Array
    addend: Array
    reach: Array
    bound: int
    error: Fraction

    @property
    def mantissas(self) -> tuple[Array, ...]:
        """Return the mantissas, one per term."""
        return tuple(term.mantissa for term in self.terms)


def requant32(value: Linear, encoding: ActivationEncoding) -> Requant32:
    """Compute the constants that take `value` to `encoding` in 32 bits.

    Raises:
        Refused: the terms are too far apart for 32 bits.
    """
    ratios = [term.scale / np.float64(encoding.scale) for term in value.terms]
    spans = [np.maximum(np.abs(t.lo - t.zero), np.abs(t.hi - t.zero)).astype(np.float64) for t in value.terms]
    if any(np.max(span) > _LARGEST for span in spans):
        raise Refused("an accumulator can reach more than 2**30", "use product_bits=64, or split the layer")
    cuts = [_cut(value, ratio, span, encoding) for ratio, span in zip(ratios, spans, strict=True)]
    clipped_spans = [np.where(cut > 0, np.minimum(cut, span), span) for cut, span in zip(cuts, spans, strict=True)]
    before = [
        np.maximum(np.ceil(np.log2(np.maximum(span, 1) + 1)).astype(np.int64) - _KEPT, 0) for span in clipped_spans
    ]
    kept = [np.floor(np.ldexp(span, -p)) + 1 for span, p in zip(clipped_spans, before, strict=True)]
    steps = [np.ldexp(ratio, p) for ratio, p in zip(ratios, before, strict=True)]  # output steps per kept unit
    constant = value.constant / np.float64(encoding.scale)
    limit = 4.0 * (encoding.hi + 1) + sum(np.abs(s) * k for s, k in zip(steps, kept, strict=True))
    constant = np.clip(constant, -limit, limit)
    reach = np.abs(constant) + sum(np.abs(s) * k for s, k in zip(steps, kept, strict=True)) + 1.0
    _, exponent = np.frexp(reach)
    shift = _ROOM - exponent.astype(np.int64)
    if np.any(shift < 1):
        raise Refused("its terms are too far apart for 32-bit products", "use product_bits=64, or recalibrate")
    mantissas = [np.rint(np.ldexp(s, shift)) for s in steps]
    terms = tuple(
        Requant32Term(term.zero, cut, p, m.astype(np.int64))
        for term, cut, p, m in zip(value.terms, cuts, before, mantissas, strict=True)
    )
    error = _error(value, terms, kept, shift, constant, encoding)
    if error > 1:
        raise Refused(f"32-bit products would move it by up to {float(error):.3g} steps", "use product_bits=64")
    addend = np.rint(np.ldexp(constant, shift)).astype(np.int64)
    whole = np.ldexp(reach, shift)
    return Requant32(terms, shift, addend, whole, int(max(np.max(s) for s in spans)), error)


def _error(
    value: Linear,
    terms: Sequence[Requant32Term],
    kept: Sequence[Array],
    shift: Array,
    constant: Array,
    to: ActivationEncoding,
) -> Fraction:
    """Bound the error in output steps: of the sum itself, of both roundings of every term, of the constant."""
    columns: list[Array] = [np.asarray(shift, np.int64)]
    for source, term, most in zip(value.terms, terms, kept, strict=True):
        columns += [term.before, term.mantissa, np.asarray(most, np.int64), np.asarray(source.scale, np.float64)]
    unit, worst = Fraction(to.scale), Fraction(0)
    for n, *rest in distinct_rows(*columns):
        moved = Fraction(0)
        for i in range(0, len(rest), 4):
            before, mantissa, most, real = rest[i : i + 4]
            step = Fraction(real) * (1 << before)
            moved += abs(mantissa * unit / (1 << n) - step) * most + (abs(step) / 2 if before else 0)
        worst = max(worst, moved)
    total = (value.error + worst) / unit
    if np.any(value.constant):
        total += Fraction(1, 2 << int(np.min(shift))) + largest(constant) * ROUNDING
    return total


def _cut(value: Linear, ratio: Array, span: Array, encoding: ActivationEncoding) -> Array:
    """Return the magnitude beyond which a lone accumulator saturates any output, 0 for none."""
    alone = len(value.terms) == 1 and np.all(ratio != 0)
    if not alone:
        return np.zeros((), np.int64)
    window = np.abs(value.constant) / encoding.scale + encoding.hi + 2.0
    cut = np.ceil(window / np.abs(ratio))
    return np.where(cut < span, cut, 0).astype(np.int64)
