"""Write what depends on a whole row, a Softmax with a mask or a norm, as codes for ONNX Runtime.

Passes over the tensor are in 32 bits where that leaves the result within `SOFTMAX_CLOSE` of the real one; 64 bits, and
what they cost, are for the numbers of rows. What a row states as `error_bound` is for the form that was written.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from onnx import TensorProto

from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.exact_bounds import round_up
from onnx_backend.integer.ir.operations import Norm, Requantization, Shares
from onnx_backend.integer.ir.values import Array
from onnx_backend.workarounds.onnxruntime_table import SOFTMAX_CLOSE

_EXPONENT = 30
#: An exponential over 2**n is at most 2**-10 output steps, what a quotient that is rounded down can be off by.
_LEAST = _EXPONENT + 10
_ROOM = 63
_INT64, _UINT32, _UINT64 = TensorProto.INT64, TensorProto.UINT32, TensorProto.UINT64
#: Bits of an exponential in 32-bit products, the most and the fewest that are tried.
_EXPONENTS = range(20, 15, -1)


def share_codes(b: Builder, op: Requantization, rows: Shares) -> bool:
    """Write shares of rows along the last axis as codes; False with a Clip or too few bits for their scale."""
    steps, zero = 1 / Fraction(op.encoding.scale), op.encoding.zero_point
    if rows.axis != -1 or np.isfinite(op.value.lo) or np.isfinite(op.value.hi):
        return False
    n = next(n for n in range(31, 0, -1) if (steps + zero + 1) * 2**n < 1 << 32)
    cut = _in_32_bits(rows, float(steps), n, cut=True)
    narrow = cut or _in_32_bits(rows, float(steps), n, cut=False)
    n = n if narrow else _ROOM - (math.ceil(steps) + zero + 1).bit_length()
    if not narrow and n < _LEAST:
        return False
    kind, to = (np.uint32, _UINT32) if narrow else (np.uint64, _UINT64)
    whole = round(steps * 2**n)
    raised = (zero << n) + (1 << (n - 1))
    bits, error = narrow or (_EXPONENT, float(rows.error * steps + Fraction(1, 1 << (n - _EXPONENT - 1))))
    drop = _EXPONENT - bits
    powers = _exponentials(b, op, rows, drop, to)
    sums = b.node("MatMul", [powers, b.constant(np.ones((rows.length, 1)), kind)])
    if narrow and not cut:
        wide = b.cast(sums, _UINT64)
        half = _shifted(b, wide, b.constant(1, np.uint64))
        factor = b.node("Div", [b.node("Add", [b.constant(whole, np.uint64), half]), wide])
        factor = b.cast(factor, _UINT32)
    else:
        factor = b.node("Div", [b.constant(whole, kind), sums])
    if rows.missing:
        some = b.node("Unsqueeze", [b.node("Not", [rows.missing]), b.constant([-1], np.int64)])
        factor = b.node("Mul", [factor, b.cast(some, to)])  # the runtime has no Where of unsigned numbers
    total = b.node("Add", [b.node("Mul", [powers, factor]), b.constant(raised, kind)])
    found = b.node("BitShift", [total, b.constant(n, kind)], direction="RIGHT")
    lo, hi = op.bounds
    if lo > zero or (whole + raised) >> n > hi:
        found = b.cast(found, TensorProto.INT32)
        found = b.node("Clip", [found, b.constant(lo, np.int32), b.constant(hi, np.int32)])
    b.write("Cast", [found], op.result, to=op.encoding.onnx_kind)
    op.row.update(form="shares of rows", rounding="half_up", error_bound=round_up(Fraction(error)))
    return True


def _exponentials(b: Builder, op: Requantization, rows: Shares, drop: int, to: int) -> str:
    """Write the exponentials, of which the last bits are rounded off."""
    kind, half = (np.uint32 if to == _UINT32 else np.uint64), 1 << drop >> 1
    if rows.table is None:
        powers = b.cast(rows.index, to)
        if drop:
            powers = b.node("Add", [powers, b.constant(half, kind)])
            powers = b.node("BitShift", [powers, b.constant(drop, kind)], direction="RIGHT")
        return powers
    flat = b.node("Reshape", [rows.index, b.constant([-1], np.int64)])
    powers = b.node("GatherElements", [b.constant((rows.table + half) >> drop, kind, "table"), flat], axis=0)
    return b.node("Reshape", [powers, b.shape_of(rows.index, op.result)])


def _in_32_bits(rows: Shares, steps: float, n: int, *, cut: bool) -> tuple[int, float] | None:
    """Return the bits of exponentials whose products with `steps * 2**n` over their sum fit in 32, and the error.

    An exponential that is rounded moves its share by half a unit, and with those of the row that by as much times its
    length; the quotient is rounded too, or cut off.
    """
    errors = {
        bits: steps * (rows.error + (1 + rows.length) * 0.5 * 2.0**-bits) + 2.0 ** (bits - n - 1 + cut) + 2.0**-n
        for bits in _EXPONENTS
        if rows.length << bits < 1 << 32
    }
    best = min(errors, key=errors.__getitem__, default=None)
    return None if best is None or errors[best] > SOFTMAX_CLOSE else (best, errors[best])


# --- norms --------------------------------------------------------------------------------------------------------

#: A variance is divided by a power of 4 to a place in a table of reciprocal roots, from 2**_PLACES to four times that.
_PLACES = 12
_ROOT = 37  # bits of a reciprocal root of 1
#: Half the width of a place, half of what the root makes of it, and the rounding of the table.
_OFF_ROOT = 0.25 * 2.0**-_PLACES * (1.0 + 2.0**-_PLACES) + 2.0**-30
#: Bits of the least variance, so that an epsilon can be rounded.
_LEAST_VARIANCE = 15
#: How the numbers of a row are computed, in this order of time.
_CUT, _ROUNDED, _WIDE = range(3)


@dataclass(frozen=True)
class _Plan:
    """The constants of a norm in 32 bits."""

    epsilon: int  # in units of the variance
    finer: int  # bits by which that unit is finer than that of `Norm.epsilon`, an even number
    downs: Array  # right shifts of a root from the table, by how often a variance is over 4**first
    first: int
    way: int  # of `_CUT`, `_ROUNDED` and `_WIDE`
    unit: int  # a normalized value is in units of 2**-unit first
    offset: int  # what is added to it so that it is not negative
    drop: int  # the bits of it that are cut off then
    shift: int  # the right shift of its product with the gain
    gain: Array  # whole numbers
    addend: Array  # whole numbers, with the zero point, half a unit and `lift` steps
    lift: int  # a multiple of 256
    error: float  # in steps


def norm_codes(b: Builder, op: Requantization, norm: Norm) -> bool:
    """Write a norm of codes along the last axis, its gain and its bias; False where 32 bits are too few for it."""
    (term,), scale = op.value.terms, op.encoding.scale
    per_channel = [np.asarray(a, np.float64) for a in (term.scale, op.value.constant)]
    if term.name != norm.result or np.any(term.zero):
        return False
    if any(a.size not in (1, norm.count) or (a.size > 1 and a.shape[-1] != a.size) for a in per_channel):
        return False
    gain, constant = (np.broadcast_to(a.reshape(-1), (norm.count,)) for a in per_channel)
    steps = gain / norm.scale / scale, constant / scale + op.encoding.zero_point
    plans = (_plan(norm, *steps, op.bounds, way) for way in (_CUT, _ROUNDED, _WIDE))
    plan = next((plan for plan in plans if plan is not None and plan.error <= SOFTMAX_CLOSE), None)
    if plan is None:
        return False
    u = b.cast(norm.codes, _UINT32)
    if norm.zero:
        u = b.node("Sub", [u, b.constant(norm.zero, np.uint32)])
    factor, less = _row_factors(b, norm, u, plan)
    value = b.node("Add", [b.node("Mul", [u, factor]), less])
    value = b.node("BitShift", [value, b.constant(plan.drop, np.uint32)], direction="RIGHT")
    value = b.node("Mul", [value, b.constant(plan.gain, np.uint32)])
    value = b.node("Add", [value, b.constant(plan.addend, np.uint32)])
    value = b.node("BitShift", [value, b.constant(plan.shift, np.uint32)], direction="RIGHT")
    lo, hi = (b.constant(plan.lift + bound, np.uint32) for bound in op.bounds)
    # a Cast to 8 bits leaves out the lift, a multiple of 256
    b.write("Cast", [b.node("Clip", [value, lo, hi])], op.result, to=op.encoding.onnx_kind)
    op.row.update(form="norm of rows", rounding="half_up", error_bound=round_up(Fraction(plan.error)))
    return True


def _plan(norm: Norm, gain: Array, constant: Array, bounds: tuple[int, int], way: int) -> _Plan | None:
    """Return the constants with the least error, None where they do not fit.

    Args:
        norm: of rows.
        gain: steps of the result for each unit of a normalized value.
        constant: the code of a normalized 0.
        bounds: smallest and largest code.
        way: how the numbers of a row are computed.
    """
    lowest, highest, reach, spread = _extremes(norm)
    least = math.frexp(lowest + norm.epsilon)[1] - 1
    finer = max(0, _LEAST_VARIANCE - least)
    finer += finer % 2
    epsilon = round(math.ldexp(norm.epsilon, finer))
    most = (highest << finer) + epsilon
    if most.bit_length() > _ROOM:
        return None
    relative = _OFF_ROOT + 0.25 / (epsilon + (lowest << finer))
    # of the numbers of a row the error is one unit, or half of it
    off = norm.hi + 2.0 if way == _WIDE else spread * (1.0 if way == _CUT else 0.5)
    unit = math.floor(math.log2((2.0**31 - 2.0 * off - 2.0**12) / (reach * (1.0 + 2.0 * relative))))
    first = (math.frexp(float(epsilon + (lowest << finer)))[1] - 1 - _PLACES) // 2
    turns = max(0, (most.bit_length() - _PLACES - 1) // 2 - first)
    downs = np.arange(turns + 1) + (_ROOT + first - unit - finer // 2)
    if downs[0] < 0:
        return None
    offset = math.ceil(math.ldexp(reach * (1.0 + 2.0 * relative), unit) + off) + 4
    steep = np.abs(gain)
    lift = 256 * max(0, math.ceil((reach * steep - constant).max() / 256.0 + 2.0**-7))
    shift = 31 - int((reach * steep + constant).max() + lift + 2.0).bit_length()
    if shift < 1 or not np.isfinite(steep).all() or not steep.max():
        return None
    # beyond the bounds every code is the same, whatever the error
    shown = np.minimum(reach * steep, np.maximum(np.abs(bounds[0] - constant), np.abs(bounds[1] - constant)) + 1.0)
    best = None
    for drop in range(1, unit):
        whole = np.rint(np.ldexp(gain, shift + drop - unit))
        if np.abs(whole).max() >= 1 << 31:
            break
        off_gain = np.abs(np.ldexp(whole, unit - drop - shift) - gain)
        steps = steep * (math.ldexp(0.5, drop - unit) + math.ldexp(off, -unit)) + relative * shown
        error = float((steps + off_gain * np.minimum(reach, shown / np.maximum(steep, 1e-30))).max()) + 2.0**-shift
        if best is None or error < best[0]:
            best = error, drop, whole
    if best is None:
        return None
    error, drop, whole = best
    centre = math.ldexp(offset, -drop) - 0.5  # of the numbers of which the last bits are cut off
    addend = np.rint(np.ldexp(constant + lift, shift) - whole * centre).astype(np.int64) + (1 << (shift - 1))
    wrapped = [values.astype(np.int64) & 0xFFFFFFFF for values in (whole, addend)]
    return _Plan(epsilon, finer, downs, first, way, unit, offset, drop, shift, wrapped[0], wrapped[1], lift, error)


def _extremes(norm: Norm) -> tuple[int, int, float, int]:
    """Return the least variance but 0 and the largest, and the largest value: over the root, and as it is."""
    if norm.zero is None:
        return norm.count - 1, norm.count**2 * norm.hi**2 // 4, math.sqrt(norm.count - 1), norm.count * norm.hi
    most = max(norm.zero, norm.hi - norm.zero)
    return 1, norm.count * most**2, 1.0, most


def _row_factors(b: Builder, norm: Norm, u: str, plan: _Plan) -> tuple[str, str]:
    """Write the numbers of a row: the factor of its codes, and what is added to the products, modulo 2**32."""
    count, downs = norm.count, plan.downs
    sums, variance = _variance(b, norm, u)
    if plan.finer:
        variance = b.node("Mul", [variance, b.constant(1 << plan.finer, np.int64)])
    variance = b.node("Add", [variance, b.constant(plan.epsilon, np.int64)])
    powers = plan.first + np.arange(len(downs))
    ends = (4 << _PLACES) * 4 ** powers[:-1] - 1 if len(downs) > 1 else [(1 << _ROOM) - 1]
    above = b.node("Greater", [variance, b.constant(ends, np.int64)])
    turns = b.node("ReduceSum", [b.cast(above, TensorProto.INT32), b.constant([-1], np.int64)], keepdims=1)
    # of equal codes nothing is left that a root is multiplied with: any place will do
    place = b.node("Div", [variance, b.node("Gather", [b.constant(4**powers, np.int64), turns])])
    roots = math.ldexp(1.0, _ROOT) / np.sqrt(np.arange(4 << _PLACES).clip(1 << _PLACES) + 0.5)
    if plan.way == _WIDE:
        root = b.node("Gather", [b.constant(np.rint(roots), np.uint64), place])
        down = b.node("Gather", [b.constant(downs, np.uint64), turns])
        pair = []
        for number in (b.constant(count, np.uint64), b.cast(sums, _UINT64)):
            pair.append(b.cast(_shifted(b, b.node("Mul", [number, root]), down), _UINT32))
        return pair[0], b.node("Sub", [b.constant(plan.offset, np.uint32), pair[1]])
    root = b.node("Gather", [b.constant(np.rint(roots), np.uint32), place])
    if plan.way == _ROUNDED:
        halves = np.where(downs > 0, 1 << np.maximum(downs - 1, 0), 0)
        root = b.node("Add", [root, b.node("Gather", [b.constant(halves, np.uint32), turns])])
    root = _shifted(b, root, b.node("Gather", [b.constant(downs, np.uint32), turns]))
    if norm.zero is not None:
        return root, b.constant(plan.offset, np.uint32)
    less = b.node("Sub", [b.constant(plan.offset, np.uint32), b.node("Mul", [sums, root])])
    return b.node("Mul", [root, b.constant(count, np.uint32)]), less


def _variance(b: Builder, norm: Norm, u: str) -> tuple[str, str]:
    """Write the sum of a row, empty where none is subtracted, and its variance as int64, in units of `Norm.epsilon`."""
    count, wide = norm.count, _extremes(norm)[1] >= 1 << 32
    # below 2**32 the variance is right though what it is the difference of may not fit
    column = b.constant(np.full((count, 1), 1 if wide or norm.zero is not None else count), np.uint32)
    power = b.node("MatMul", [b.node("Mul", [u, u]), column])
    if norm.zero is not None:
        return "", b.cast(power, _INT64)
    mean = sums = b.node("MatMul", [u, b.constant(np.ones((count, 1)), np.uint32)])
    if wide:
        power = b.node("Mul", [b.cast(power, _INT64), b.constant(count, np.int64)])
        mean = b.cast(sums, _INT64)
    variance = b.node("Sub", [power, b.node("Mul", [mean, mean])])
    return sums, variance if wide else b.cast(variance, _INT64)


def _shifted(b: Builder, name: str, by: str, direction: str = "RIGHT") -> str:
    return b.node("BitShift", [name, by], direction=direction)
