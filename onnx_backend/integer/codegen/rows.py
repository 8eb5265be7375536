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
_UINT32, _UINT64 = TensorProto.UINT32, TensorProto.UINT64
#: Bits of an exponential in 32-bit products, the most and the fewest that are tried.
_EXPONENTS = range(20, 15, -1)


def share_codes(b: Builder, op: Requantization, rows: Shares) -> bool:
    """Write shares of rows along the last axis as codes; False with a Clip or too few bits for their scale."""
    steps, zero = 1 / Fraction(op.encoding.scale), op.encoding.zero_point
    if rows.axis != -1 or np.isfinite(op.value.lo) or np.isfinite(op.value.hi):
        return False
    n = next(n for n in range(31, 0, -1) if (steps + zero + 1) * 2**n < 1 << 32)
    narrow = _in_32_bits(rows, float(steps), n)
    n = n if narrow else _ROOM - (math.ceil(steps) + zero + 1).bit_length()
    if not narrow and n < _LEAST:
        return False
    kind, to = (np.uint32, _UINT32) if narrow else (np.uint64, _UINT64)
    whole = round(steps * 2**n)
    raised = (zero << n) + (1 << (n - 1))
    bits, error = narrow or (_EXPONENT, float(rows.error * steps + Fraction(1, 1 << (n - _EXPONENT - 1))))
    drop = _EXPONENT - bits
    flat = b.node("Reshape", [rows.index, b.constant([-1], np.int64)])
    table = (rows.table + (1 << drop >> 1)) >> drop
    powers = b.node("GatherElements", [b.constant(table, kind, "table"), flat], axis=0)
    powers = b.node("Reshape", [powers, b.node("Shape", [rows.index])])
    sums = b.node("MatMul", [powers, b.constant(np.ones((rows.length, 1)), kind)])
    if narrow:
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


def _in_32_bits(rows: Shares, steps: float, n: int) -> tuple[int, float] | None:
    """Return the bits of exponentials whose products with `steps * 2**n` over their sum fit in 32, and the error.

    An exponential that is rounded moves its share by half a unit, and with those of the row that by as much times its
    length; the quotient is rounded too.
    """
    errors = {
        bits: steps * (rows.error + (1 + rows.length) * 0.5 * 2.0**-bits) + 2.0 ** (bits - n - 1) + 2.0**-n
        for bits in _EXPONENTS
        if rows.length << bits < 1 << 32
    }
    best = min(errors, key=errors.__getitem__, default=None)
    return None if best is None or errors[best] > SOFTMAX_CLOSE else (best, errors[best])


# --- norms --------------------------------------------------------------------------------------------------------

#: A variance is shifted to 60 or 61 bits by an even number of them; 8 of them, from 1 to 4, choose a chord of the root.
_TOP, _CHORDS = 60, 8
_PIECE = 16  # bits of a place on the chord
_ROOT = 30  # bits of the reciprocal root
#: A chord of `x**-0.5` over 2**-8 lies above it by at most an eighth of `2**-16 * 3 / 4` of it; and four roundings.
_OFF_ROOT = 2.0 ** (-2 * _CHORDS) * 0.75 / 8.0 + 4.0 * 2.0 ** (1 - _ROOT)
#: Bits that an epsilon is worth at least, so that it can be rounded.
_EPSILON = 18


@dataclass(frozen=True)
class _Plan:
    """The constants of a norm in 32 bits."""

    epsilon: int  # in units of the variance
    finer: int  # bits by which that unit is finer than that of `Norm.epsilon`, an even number
    turns: range  # how often a variance can have to be multiplied by 4, so that it has 61 or 62 bits
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
    plan = _plan(norm, gain / norm.scale / scale, constant / scale + op.encoding.zero_point, op.bounds)
    if plan is None or plan.error > SOFTMAX_CLOSE:
        return False
    u = b.cast(norm.codes, _UINT32)
    ones = b.constant(np.ones((norm.count, 1)), np.uint32)
    sums = b.cast(b.node("MatMul", [u, ones]), _UINT64)
    factor, less = _row_factors(b, norm, sums, b.node("MatMul", [b.node("Mul", [u, u]), ones]), plan)
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


def _plan(norm: Norm, gain: Array, constant: Array, bounds: tuple[int, int]) -> _Plan | None:
    """Return the constants with the least error, None where they do not fit.

    Args:
        norm: of rows.
        gain: steps of the result for each unit of a normalized value.
        constant: the code of a normalized 0.
        bounds: smallest and largest code.
    """
    finer = max(0, _EPSILON - max(math.frexp(norm.epsilon)[1], 0))
    finer += finer % 2
    # rows of equal codes have no other variance, and beside that of any others the least here is nothing
    epsilon = max(round(math.ldexp(norm.epsilon, finer)), (norm.count - 1 << finer) >> _EPSILON, 1)
    most = (norm.count**2 * norm.hi**2 // 4 << finer) + epsilon
    if most.bit_length() > _TOP + 2:
        return None
    turns = range((_TOP + 2 - most.bit_length()) // 2, (_TOP + 2 - epsilon.bit_length()) // 2 + 1)
    relative = _OFF_ROOT + 2.0 ** -(_EPSILON + 1) + 0.25 / (epsilon + ((norm.count - 1) << finer))
    reach = math.sqrt(norm.count - 1)  # no normalized value is larger
    unit = math.floor(math.log2((2.0**31 - 2.0**12) / (reach * (1.0 + 2.0**-12) + 1.0)))
    unit = min(unit, _TOP - finer // 2 - turns[-1])
    offset = math.ceil(math.ldexp(reach * (1.0 + 2.0 * relative), unit)) + norm.hi + 4
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
        steps = steep * (math.ldexp(0.5, drop - unit) + math.ldexp(norm.hi + 2.0, -unit)) + relative * shown
        error = float((steps + off_gain * np.minimum(reach, shown / np.maximum(steep, 1e-30))).max()) + 2.0**-shift
        if best is None or error < best[0]:
            best = error, drop, whole
    if best is None:
        return None
    error, drop, whole = best
    centre = math.ldexp(offset, -drop) - 0.5  # of the numbers of which the last bits are cut off
    addend = np.rint(np.ldexp(constant + lift, shift) - whole * centre).astype(np.int64) + (1 << (shift - 1))
    wrapped = [values.astype(np.int64) & 0xFFFFFFFF for values in (whole, addend)]
    return _Plan(epsilon, finer, turns, unit, offset, drop, shift, wrapped[0], wrapped[1], lift, error)


def _row_factors(b: Builder, norm: Norm, sums: str, squares: str, plan: _Plan) -> tuple[str, str]:
    """Write the numbers of a row: the factor of its codes, and what is added to the products, modulo 2**32."""
    finer, counts = plan.finer, np.asarray(plan.turns)
    power = b.node("Mul", [b.cast(squares, _UINT64), b.constant(norm.count << finer, np.uint64)])
    mean = b.node("Mul", [sums, b.constant(1 << finer, np.uint64)]) if finer else sums
    wide = b.node("Sub", [power, b.node("Mul", [sums, mean])])
    wide = b.node("Add", [wide, b.constant(plan.epsilon, np.uint64)])
    ends = [1 << (_TOP + 2 - 2 * turn) for turn in plan.turns[1:]] or [0]
    short = b.node("Less", [b.cast(wide, TensorProto.INT64), b.constant(ends, np.int64)])
    turns = b.node("ReduceSum", [b.cast(short, TensorProto.INT32), b.constant([-1], np.int64)], keepdims=1)
    raised = _shifted(b, wide, b.node("Gather", [b.constant(2 * counts, np.uint64), turns]), "LEFT")
    place = _shifted(b, raised, b.constant(_TOP - _CHORDS - _PIECE, np.uint64))
    index = b.cast(_shifted(b, place, b.constant(_PIECE, np.uint64)), TensorProto.INT32)
    root = np.rint(math.ldexp(1.0, _ROOT) * (np.arange((4 << _CHORDS) + 1).clip(1) / (1 << _CHORDS)) ** -0.5)
    start, fall = (b.node("Gather", [b.constant(values, np.uint64), index]) for values in (root[:-1], -np.diff(root)))
    along = b.node("BitwiseAnd", [place, b.constant((1 << _PIECE) - 1, np.uint64)])
    inverse = b.node("Sub", [start, _shifted(b, b.node("Mul", [along, fall]), b.constant(_PIECE, np.uint64))])
    down = b.node("Gather", [b.constant(_TOP - plan.unit - finer // 2 - counts, np.uint64), turns])
    pair = []
    for number in (b.constant(norm.count, np.uint64), sums):
        pair.append(b.cast(_shifted(b, b.node("Mul", [number, inverse]), down), _UINT32))
    return pair[0], b.node("Sub", [b.constant(plan.offset, np.uint32), pair[1]])


def _shifted(b: Builder, name: str, by: str, direction: str = "RIGHT") -> str:
    return b.node("BitShift", [name, by], direction=direction)
