"""The fixed-point constants that requantize int32 accumulators to the codes of an encoding.

A real multiplier becomes a mantissa in [2**30, 2**31) and a right shift (Jacob et al. 2017, section 2.2); several
terms share one shift, so that their products are added before the one rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from onnx_backend.integer.ir.exact_bounds import ROUNDING, largest, misfit
from onnx_backend.integer.ir.values import ActivationEncoding, Array, Linear, Refused
from qsdk.core.errors import ConfigError
from qsdk.core.numerics.fixed_point import MAX_SHIFT, fixed_point, tie_in_range, ties_possible

#: Above this many channels or positions a tie is assumed possible instead of searched for.
_TIE_SEARCH = 1 << 16
#: Bits below an output step to which the rounding of a mantissa is kept, over all that it is multiplied with.
_FINE = 12


@dataclass(frozen=True)
class RequantMultiplier:
    """The constants of one requantization, all int64 arrays that broadcast against the tensor."""

    mantissas: tuple[Array, ...]  # one per term
    shift: Array  # right shift, 1..62
    addend: Array  # the sum of zero points, biases and constants, without the half unit of rounding
    low: Array  # smallest value of products + addend
    high: Array  # largest value of products + addend
    ties: bool  # True if an exact tie can occur for some accumulator within the bounds
    bound: int  # largest magnitude of a term with its zero point or bias applied
    error: Fraction  # how far the value before its rounding can be from the real one, in output steps, exactly


def requant_multiplier(value: Linear, encoding: ActivationEncoding) -> RequantMultiplier:
    """Return the fixed-point constants that requantize `value` to `encoding`."""
    ratios = [term.scale / np.float64(encoding.scale) for term in value.terms]
    single = len(ratios) == 1 and not np.any(value.constant) and bool(np.all(ratios[0] > 0))
    if single:
        mantissa, shift = _fixed(ratios[0])
        dead = shift > MAX_SHIFT  # rounds to 0 for every int32
        mantissas: tuple[Array, ...] = (np.where(dead, 0, mantissa),)
        shift = np.where(dead, 1, shift)
        constant: Array = np.zeros((), np.int64)
    else:
        shift, real = _common_shift(value, ratios, encoding)
        mantissas = tuple(np.rint(np.ldexp(ratio, shift)).astype(np.int64) for ratio in ratios)
        constant = np.rint(np.ldexp(real, shift)).astype(np.int64)
    low = high = addend = constant
    for term, mantissa in zip(value.terms, mantissas, strict=True):
        ends = (mantissa * (term.lo - term.zero), mantissa * (term.hi - term.zero))
        low, high = low + np.minimum(*ends), high + np.maximum(*ends)
        addend = addend - mantissa * term.zero
    bound = max(
        int(np.max(np.maximum(np.abs(term.lo - term.zero), np.abs(term.hi - term.zero)))) for term in value.terms
    )
    ties = _ties(value, mantissas, shift, constant)
    error = _error(value, mantissas, np.asarray(shift), constant, encoding)
    return RequantMultiplier(mantissas, np.asarray(shift), addend, low, high, ties, bound, error)


def _error(
    value: Linear, mantissas: Sequence[Array], shift: Array, constant: Array, to: ActivationEncoding
) -> Fraction:
    """Bound the error of the fixed point in output steps: of the sum, of every multiplier, of the constant."""
    scale = Fraction(to.scale)
    total = value.error / scale + misfit(value.terms, mantissas, shift, to.scale)
    if np.any(value.constant):
        # its own rounding, and that of its quotient by the scale; a constant far outside the grid is cut off on
        # purpose: everything saturates there either way
        total += (
            Fraction(1, 2 << int(np.min(shift))) + largest(np.ldexp(constant.astype(np.float64), -shift)) * ROUNDING
        )
    return total


def _fixed(ratio: Array) -> tuple[Array, Array]:
    try:
        return fixed_point(ratio)
    except ConfigError as error:
        raise Refused(str(error), "recalibrate: the output's scale is far too small for its inputs") from error


def _common_shift(value: Linear, ratios: Sequence[Array], encoding: ActivationEncoding) -> tuple[Array, Array]:
    """Return the shift that several terms share and the constant in output steps."""
    largest, reach = np.zeros(()), np.zeros(())
    for term, ratio in zip(value.terms, ratios, strict=True):
        raw = np.maximum(np.abs(term.lo), np.abs(term.hi)) + np.abs(term.zero)
        largest, reach = np.maximum(largest, np.abs(ratio)), reach + np.abs(ratio) * raw
    # beyond this the output saturates for any terms, so clipping changes nothing
    limit = np.max(reach) + 2.0 * encoding.hi + 2.0
    constant = np.clip(value.constant / np.float64(encoding.scale), -limit, limit)
    _, shift = _fixed(np.where(largest > 0, largest, 1.0))
    _, exponent = np.frexp(reach + np.abs(constant) + 1.0)
    # terms far apart: the mantissa of the finest needs enough bits for all values it is multiplied with
    _, span = np.frexp(sum(np.maximum(np.abs(t.lo - t.zero), np.abs(t.hi - t.zero)) for t in value.terms) + 1.0)
    shift = np.maximum(shift, span + _FINE)
    shift = np.minimum(np.minimum(shift, 60), 61 - exponent)  # products and their sum stay below 2**61
    if np.any(shift < 1):
        raise Refused("its terms are too far apart for one fixed point", "recalibrate: one scale is far too large")
    return shift.astype(np.int64), constant


def _ties(value: Linear, mantissas: Sequence[Array], shift: Array, constant: Array) -> bool:
    if len(mantissas) == 1:
        term, mantissa = value.terms[0], mantissas[0]
        lo, hi = term.lo - term.zero, term.hi - term.zero
        if not np.any(constant):
            return bool(np.any(ties_possible(np.maximum(np.abs(lo), np.abs(hi)), np.abs(mantissa), shift)))
        rows = np.broadcast_arrays(lo, hi, mantissa, shift, constant)
        if rows[0].size > _TIE_SEARCH:
            return True
        return any(tie_in_range(*(int(v) for v in row)) for row in zip(*(r.reshape(-1) for r in rows), strict=True))
    scalars = all(a.size == 1 for term in value.terms for a in (term.lo, term.hi, term.zero))
    if len(mantissas) != 2 or not scalars or shift.size != 1 or constant.size != 1:
        return True
    spans = [int(term.hi.item()) - int(term.lo.item()) + 1 for term in value.terms]
    if spans[0] * spans[1] > _TIE_SEARCH:
        return True
    first, second = (
        (np.arange(int(t.lo.item()), int(t.hi.item()) + 1) - t.zero.item()) * m.item()
        for t, m in zip(value.terms, mantissas, strict=True)
    )
    n = int(shift.item())
    low_bits = (first[:, None] + second[None, :] + constant.item()) & ((1 << n) - 1)
    return bool(np.any(low_bits == 1 << (n - 1)))
