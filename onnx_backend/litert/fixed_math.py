"""The fixed-point arithmetic of gemmlowp that LiteRT's reference kernels compute with, on NumPy integers.

A number of k integer bits is an int32 whose unit is `2**(k - 31)`. The sources are gemmlowp's `fixedpoint.h` and
LiteRT's `kernels/internal/common.h`; all intermediate values are int64.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qsdk.core.numerics.fixed_point import round_shift

Integers = NDArray[np.int64]
_MOST, _LEAST = (1 << 31) - 1, -(1 << 31)
#: the values of exp at -1/4, -1/2, -1, ..., -16 as numbers of 0 integer bits
_EXPONENTIALS = (
    (-2, 1672461947),
    (-1, 1302514674),
    (0, 790015084),
    (1, 290630308),
    (2, 39332535),
    (3, 720401),
    (4, 242),
)


def saturated(x: ArrayLike) -> Integers:
    """Return integers inside the bounds of int32."""
    return np.clip(np.asarray(x, np.int64), _LEAST, _MOST)


def high_product(a: ArrayLike, b: ArrayLike, bits: int = 31) -> Integers:
    """Return the rounded upper half of twice a product (SaturatingRoundingDoublingHighMul)."""
    product = np.asarray(a, np.int64) * np.asarray(b, np.int64)
    nudged = product + np.where(product >= 0, 1 << (bits - 1), 1 - (1 << (bits - 1)))
    halves = np.where(nudged >= 0, nudged >> bits, -((-nudged) >> bits))
    return np.clip(halves, -(1 << bits), (1 << bits) - 1)


def divided(x: ArrayLike, shift: ArrayLike) -> Integers:
    """Return integers divided by a power of two, ties away from zero (RoundingDivideByPOT)."""
    places = np.asarray(shift, np.int64)
    return np.where(places > 0, round_shift(x, np.maximum(places, 1), rounding="half_away"), np.asarray(x, np.int64))


def multiplier(real: ArrayLike) -> tuple[Integers, Integers]:
    """Return the mantissa of 31 bits and the left shift of real multipliers (QuantizeMultiplier)."""
    fraction, exponent = np.frexp(np.asarray(real, np.float64))
    mantissa = np.floor(np.ldexp(fraction, 31) + 0.5).astype(np.int64)
    carried = mantissa == 1 << 31
    shift = exponent.astype(np.int64) + carried
    mantissa = np.where(carried, 1 << 30, mantissa)
    return np.where(shift < -31, 0, mantissa), np.where(shift < -31, 0, shift)


def scaled(x: ArrayLike, real: ArrayLike) -> Integers:
    """Return accumulators times real multipliers, as fixed point rounds them (MultiplyByQuantizedMultiplier)."""
    mantissa, shift = multiplier(real)
    return divided(high_product(np.asarray(x, np.int64) << np.maximum(shift, 0), mantissa), np.maximum(-shift, 0))


def scaled_once(x: ArrayLike, real: ArrayLike) -> Integers:
    """Return accumulators times real multipliers with one rounding, ties up, as FULLY_CONNECTED does."""
    mantissa, shift = multiplier(real)
    return round_shift(np.asarray(x, np.int64) * mantissa, np.minimum(31 - shift, 62), rounding="half_up")


def scaled_wide(x: ArrayLike, real: ArrayLike) -> Integers:
    """Return accumulators of 48 bits times real multipliers, whose mantissas have 15 bits."""
    mantissa, shift = multiplier(real)
    short = np.where(mantissa < 0x7FFF0000, (mantissa + (1 << 15)) >> 16, 0x7FFF)
    places = 15 - shift
    return (np.asarray(x, np.int64) * short + (np.int64(1) << (places - 1))) >> places


def _shifted(x: Integers, places: int) -> Integers:
    """Return integers times a power of two, saturated."""
    return saturated(x << places) if places >= 0 else divided(x, -places)


def radius(integer_bits: int, left_shift: int) -> int:
    """Return the largest difference of codes that fits a number of these integer bits behind a shift."""
    return math.floor(((1 << integer_bits) - 1) * 2.0 ** (31 - integer_bits) / 2.0**left_shift)


def exp_of_negative(a: Integers, integer_bits: int) -> Integers:
    """Return exp of numbers up to 0, with 0 integer bits."""
    fraction_bits = 31 - integer_bits
    quarter = 1 << (fraction_bits - 2)
    inside = (a & (quarter - 1)) - quarter
    x = _shifted(inside, integer_bits) + (1 << 28)
    x2 = high_product(x, x)
    x3, x4 = high_product(x2, x), high_product(x2, x2)
    third = high_product(divided(x4, 2) + x3, 715827883) + x2
    result = saturated(1895147668 + high_product(1895147668, x + divided(third, 1)))
    rest = inside - a
    for exponent, factor in _EXPONENTIALS:
        if integer_bits > exponent:
            bit = 1 << (fraction_bits + exponent)
            result = np.where(rest & bit, high_product(result, factor), result)
    return np.where(a == 0, _MOST, result)


def _newton(a: Integers) -> Integers:
    """Return `1 / ((1 + a) / 2)` with 2 integer bits, for a between 0 and 1 with 0 integer bits."""
    half = a + _MOST
    half = np.where(half >= 0, (half + 1) >> 1, half >> 1)
    x = 1515870810 + high_product(half, -1010580540)
    for _ in range(3):
        rest = (1 << 29) - high_product(half, x)
        x = x + _shifted(high_product(x, rest), 2)
    return np.asarray(x, np.int64)


def reciprocal_of_one_plus(a: Integers) -> Integers:
    """Return `1 / (1 + a)` for a between 0 and 1, both with 0 integer bits."""
    return _shifted(_newton(a), 1)


def logistic(a: Integers, integer_bits: int) -> Integers:
    """Return the logistic function with 0 integer bits."""
    positive = reciprocal_of_one_plus(exp_of_negative(-np.abs(a), integer_bits))
    return np.where(a == 0, 1 << 30, np.where(a > 0, positive, _MOST - positive))


def tanh(a: Integers, integer_bits: int) -> Integers:
    """Return the hyperbolic tangent with 0 integer bits."""
    exponential = exp_of_negative(-np.abs(a), integer_bits + 1)
    found = _shifted(_newton(exponential) - (1 << 29), 2)
    return np.where(a == 0, 0, np.where(a < 0, -found, found))


def reciprocal(x: Integers, integer_bits: int) -> tuple[Integers, Integers]:
    """Return the mantissa of `1 / x` with 0 integer bits, and the bits by which x is above 1 (GetReciprocal)."""
    zeros: Any = 32 - np.frexp(x.astype(np.float64))[1]
    return reciprocal_of_one_plus((x << zeros) - (1 << 31)), integer_bits - zeros
