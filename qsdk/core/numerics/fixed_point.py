"""Fixed-point requantization: an integer multiplier and a right shift in place of a float scale.

A real multiplier is `m * 2**-n` with a mantissa m in [2**30, 2**31); an accumulator is multiplied in 64 bits and
shifted right with exactly one rounding (Jacob et al. 2017, section 2.2, without their second rounding, which moves
about one element in 400 by one LSB). All arithmetic here is on exact integers.
"""

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qsdk.core.errors import ConfigError

Integers = NDArray[np.int64]
Rounding = Literal["half_even", "half_up", "half_away", "gemmlowp"]
ROUNDINGS: tuple[str, ...] = get_args(Rounding)

MANTISSA_BITS = 31
#: Bits that gemmlowp's doubling high multiplication shifts out.
HIGH_MUL = 31
#: With a larger shift |accumulator * mantissa| <= 2**31 * (2**31 - 1) is below half a unit: everything rounds to 0.
MAX_SHIFT = 62


def fixed_point(multiplier: ArrayLike) -> tuple[Integers, Integers]:
    """Return the mantissa m in [2**30, 2**31) and right shift n with `m * 2**-n` nearest to each multiplier.

    Returns:
        m and n, int64, in the shape of `multiplier`. n is below 31 for multipliers of 1 and more, and may exceed
        `MAX_SHIFT`, where every int32 accumulator requantizes to 0.
    """
    real = np.asarray(multiplier, np.float64)
    if not np.all(np.isfinite(real) & (real > 0)):
        raise ConfigError(f"a multiplier must be positive and finite, got {_first(real)}; check the scales")
    fraction, exponent = np.frexp(real)
    mantissa = np.rint(np.ldexp(fraction, MANTISSA_BITS)).astype(np.int64)
    carried = mantissa == 1 << MANTISSA_BITS  # 0.99999... rounded up to 1.0: renormalise
    mantissa = np.where(carried, 1 << (MANTISSA_BITS - 1), mantissa)
    shift = MANTISSA_BITS - (exponent.astype(np.int64) + carried)
    if np.any(shift < 1):
        raise ConfigError(f"a multiplier of {real.max():.4g} is 2**30 or more; every output would saturate")
    return mantissa, shift


def round_shift(product: ArrayLike, shift: ArrayLike, *, rounding: Rounding = "half_even") -> Integers:
    """Return `round(product / 2**shift)` exactly, for |product| <= 2**62 and 1 <= shift <= `MAX_SHIFT`.

    `gemmlowp` rounds as that library's fixed point does, for chips that follow it: first to 31 bits, ties up
    (SaturatingRoundingDoublingHighMul), then by the rest of the shift, ties away from zero
    (RoundingDivideByPOT); a shift of 31 or less is its first step alone.
    """
    if rounding not in ROUNDINGS:
        raise ConfigError(f"unknown rounding {rounding!r}; choose one of {', '.join(ROUNDINGS)}")
    p, n = np.broadcast_arrays(np.asarray(product, np.int64), np.asarray(shift, np.int64))
    if np.any((n < 1) | (n > MAX_SHIFT)) or np.any((p < -(1 << 62)) | (p > 1 << 62)):
        raise ConfigError("round_shift needs 1 <= shift <= 62 and |product| <= 2**62")
    if rounding == "gemmlowp":
        first = round_shift(p, np.minimum(n, HIGH_MUL), rounding="half_up")
        second = round_shift(first, np.maximum(n - HIGH_MUL, 1), rounding="half_away")
        return np.where(n > HIGH_MUL, second, first)
    floor = p >> n  # arithmetic, hence floor also for negatives
    rest = p - (floor << n)
    half = np.left_shift(np.int64(1), n - 1)
    tie_up = {
        "half_even": (floor & 1) == 1,
        "half_up": np.ones(p.shape, bool),
        "half_away": floor >= 0,
    }[rounding]
    rounded: Integers = floor + ((rest > half) | ((rest == half) & tie_up))
    return rounded


def ties_possible(bound: ArrayLike, mantissa: ArrayLike, shift: ArrayLike) -> NDArray[np.bool_]:
    """Return where an accumulator with |accumulator| <= bound can fall exactly between two integers.

    `accumulator * m / 2**n` is a tie only if the accumulator has exactly `n - 1 - v2(m)` factors of two (v2 counts
    them), so its magnitude is at least that power of two. Where this is False, every rounding mode agrees and the
    cheaper half-up form may be used.

    Args:
        bound: non-negative integers below 2**62.
        mantissa: integers in [0, 2**31); 0 never ties.
        shift: integers >= 1.
    """
    b, m, n = np.broadcast_arrays(*(np.asarray(value, np.int64) for value in (bound, mantissa, shift)))
    lowest = np.maximum(m & -m, 1)
    factors = n - 1 - np.log2(lowest.astype(np.float64)).astype(np.int64)  # exact: a power of two
    smallest = np.left_shift(np.int64(1), np.clip(factors, 0, MAX_SHIFT))
    return np.asarray((m != 0) & (factors >= 0) & (factors <= MAX_SHIFT) & (smallest <= b))


def tie_in_range(lo: int, hi: int, mantissa: int, shift: int, constant: int = 0) -> bool:
    """Return whether some integer a in [lo, hi] makes `a * mantissa + constant` an exact tie of `shift` bits.

    The general form of `ties_possible` for one channel: it solves `a * mantissa = 2**(shift-1) - constant`
    modulo `2**shift`.
    """
    target = ((1 << (shift - 1)) - constant) % (1 << shift)
    if mantissa == 0:
        return target == 0
    factors = (mantissa & -mantissa).bit_length() - 1
    if factors >= shift:
        return target == 0
    if target % (1 << factors):
        return False
    period = 1 << (shift - factors)
    first = (target >> factors) * pow(mantissa >> factors, -1, period) % period
    return lo + (first - lo) % period <= hi


def _first(values: NDArray[Any]) -> str:
    flat = values.reshape(-1)
    return f"{flat[0]}" if flat.size == 1 else f"one of [{', '.join(str(v) for v in flat[:3])}, ...]"
