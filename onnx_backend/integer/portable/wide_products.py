"""The 64-bit product of a requantization in four 32-bit ones, for an accumulator of more bits than one part leaves.

The 64-bit form is `floor((t * m + c) / 2**n)`. The distance `d` of `t` from the middle of its range is cut into
`dh * 2**15 + dl` with `dl` in -2**14..2**14-1, the mantissa into `mh * 2**15 + ml`. The products `dl * ml`,
`dh * ml + dl * mh` and `dh * mh` are added from the lowest up, each with the carry of the one below: sums can be
negative, so their low bits are cut off in front of the division, which is then exact and rounds down. All sums stay in
int32 because both parts of `d` have a sign.
"""

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.operations import Requantization
from onnx_backend.integer.ir.requantization import RequantMultiplier
from onnx_backend.integer.ir.values import Array
from onnx_backend.integer.portable.exact_ranges import FLOAT32, INT32

_PART = 15
_UNIT, _HALF = 1 << _PART, 1 << (_PART - 1)
#: Sums stay so far below 2**31 that a carry of a sum below fits in as well.
_CARRY = 1 << 17


@dataclass(frozen=True)
class WideProduct:
    """The constants of `(d * m + addends >> 30 + shift) + after`, all int64, that broadcast against the tensor.

    Attributes:
        sign: 1, or -1 where the product falls as the tensor rises.
        offset: `d + 2**14 = sign * t + offset`.
        mantissas: the low part and the high part.
        addends: of the three sums, the lowest first.
        shift: of the last sum, 1 and more.
        after: what is added to the quotient.
    """

    sign: Array
    offset: Array
    mantissas: tuple[Array, Array]
    addends: tuple[Array, Array, Array]
    shift: Array
    after: Array


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
    n = np.where(none, 2 * _PART + 1, n)  # of a constant the shift says nothing
    parts = (addend & (_UNIT - 1), (addend >> _PART) & (_UNIT - 1), addend >> (2 * _PART))
    shift = n - 2 * _PART
    high, least = (reach + _UNIT) >> _PART, (mantissa & (_UNIT - 1), mantissa >> _PART)
    sums = (high * least[0] + _HALF * least[1] + parts[1], high * least[1] + parts[2])
    if np.any(shift < 1) or np.any(shift > 30) or max(int(np.max(total)) for total in sums) >= INT32 - _CARRY:
        return None
    return WideProduct(sign, _HALF - base, least, parts, shift, op.encoding.zero_point + whole)


def quotients(form: WideProduct, values: Array) -> Array:
    """Return the codes of values before they are cut to the grid; every step is one of the nodes.

    Raises:
        OverflowError: a step leaves int32.
    """

    def within(step: Array) -> Array:
        if np.any(step >= INT32) or np.any(step < -INT32):
            raise OverflowError("a sum of products leaves int32")
        return step

    distance = within(form.sign * values + form.offset)
    low = distance & (_UNIT - 1)
    high, low = (distance - low) >> _PART, low - _HALF
    carry = np.zeros((), np.int64)
    pairs = (
        (within(low * form.mantissas[0]),),
        (within(high * form.mantissas[0]), within(low * form.mantissas[1])),
        (within(high * form.mantissas[1]),),
    )
    for products, addend in zip(pairs, form.addends, strict=True):
        total = products[0]
        for summand in (*products[1:], carry, addend):
            total = within(total + summand)
        carry = total >> _PART
    return np.asarray((total >> form.shift) + form.after)


def write_products(b: Builder, op: Requantization, form: WideProduct) -> str:
    """Write the codes before they are cut to the grid; the cuts of low bits keep them out of float32 kernels."""
    (term,) = op.value.terms
    name = b.cast(term.name, TensorProto.INT32) if term.codes else term.name
    if not term.codes and max(abs(int(np.min(term.lo))), abs(int(np.max(term.hi)))) <= FLOAT32:
        name = b.node("BitwiseAnd", [name, _int32(b, -1)])  # a layer may have computed it, in float32
    if np.any(form.sign < 0):
        name = b.node("Mul", [name, _int32(b, form.sign)])
    name = b.node("Add", [name, _int32(b, form.offset)])
    low = b.node("BitwiseAnd", [name, _int32(b, _UNIT - 1)])
    high = b.node("Div", [b.node("Sub", [name, low]), _int32(b, _UNIT)])
    low = b.node("Sub", [low, _int32(b, _HALF)])
    least, most = form.mantissas
    pairs = (((low, least),), ((high, least), (low, most)), ((high, most),))
    carry, low_unit = "", np.asarray(_UNIT)
    units: tuple[Array, ...] = (low_unit, low_unit, np.left_shift(np.int64(1), form.shift))
    for products, addend, unit in zip(pairs, form.addends, units, strict=True):
        names = [b.node("Mul", [side, _int32(b, mantissa)]) for side, mantissa in products]
        total = names[0]
        for other in (*names[1:], *([carry] if carry else [])):
            total = b.node("Add", [total, other])
        if np.any(addend):
            total = b.node("Add", [total, _int32(b, addend)])
        whole = b.node("BitwiseAnd", [total, _int32(b, -unit)])
        carry = b.node("Div", [whole, _int32(b, unit)])
    return b.node("Add", [carry, _int32(b, form.after)]) if np.any(form.after) else carry


def _int32(b: Builder, values: Array | int) -> str:
    return b.constant(values, np.int32)
