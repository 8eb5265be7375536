"""Bounds in exact rationals: a float counts as the number that it is, and a bound is rounded up once, when printed.

The multipliers of the integer model are float64. Where one is the rounding of an exact product, quotient or root of
stored numbers, `rounded` counts that rounding; a product of two float32 scales is exact in float64 and needs none.
"""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

#: At and below this a number that is added to scores is a mask: it swallows them in float32.
MASK = -(2.0**24)
#: Bound of one rounding to float64 as a share, with room for the products of several.
ROUNDING = Fraction(1, 1 << 52)
#: The same as a float, for bounds that are computed in float64 and widened by `float_chain_bound`.
ULP = 2.0**-52
#: More than the share that float64 rounds off a chain of sums and products of numbers that are not negative.
_CHAIN = Fraction(1, 1 << 30)


def round_up(bound: Fraction) -> float:
    """Return the smallest float64 that is not below a bound."""
    nearest = float(bound)
    return nearest if Fraction(nearest) >= bound else math.nextafter(nearest, math.inf)


def float_chain_bound(bound: float) -> Fraction:
    """Return a bound on the exact value of a float64 chain of sums and products of non-negative numbers."""
    return Fraction(bound) * (1 + _CHAIN)


def largest(values: Array) -> Fraction:
    """Return the largest magnitude of float64 numbers, 0 of none, exactly."""
    return Fraction(float(np.max(np.abs(values), initial=0.0)))


def is_power_of_two(factor: Array) -> bool:
    """Return True if products with all these factors are exact in float64: each is 0 or a power of two."""
    mantissa, _ = np.frexp(np.abs(np.asarray(factor, np.float64)))
    return bool(np.all((mantissa == 0.5) | (mantissa == 0.0)))


def distinct_rows(*columns: Array) -> Iterator[tuple[Any, ...]]:
    """Return every combination that occurs in float64 and int64 arrays that broadcast together."""
    floats = [column.dtype.kind == "f" for column in columns]
    whole = [
        c.astype(np.float64).view(np.int64) if f else c.astype(np.int64) for c, f in zip(columns, floats, strict=True)
    ]
    table = np.stack([c.reshape(-1) for c in np.broadcast_arrays(*whole)], 1)
    if len(table) > 1:
        table = np.unique(table, axis=0)
    numbers = [(table[:, i].copy().view(np.float64) if f else table[:, i]).tolist() for i, f in enumerate(floats)]
    return zip(*numbers, strict=True)


def misfit(terms: Sequence[Any], mantissas: Sequence[Array], shift: Array, scale: float) -> Fraction:
    """Bound the change of a sum, in units of `scale`, when its multipliers are rounded to `mantissa * 2**-shift`."""
    columns: list[Array] = [np.asarray(shift, np.int64)]
    for term, mantissa in zip(terms, mantissas, strict=True):
        reach = np.maximum(np.abs(term.lo - term.zero), np.abs(term.hi - term.zero))
        columns += [np.asarray(mantissa, np.int64), np.asarray(term.scale, np.float64), np.asarray(reach, np.int64)]
    unit, worst = Fraction(scale), Fraction(0)
    for n, *rest in distinct_rows(*columns):
        moved = Fraction(0)
        for m, real, reach in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
            moved += abs(m * unit / (1 << n) - Fraction(real)) * reach
        worst = max(worst, moved)
    return worst / unit


def one_rounding(terms: Sequence[Any], constant: Array | float = 0.0) -> Fraction:
    """Bound the change of a sum, in real units, when every scale and the constant are rounded once."""
    whole = largest(_plain(constant))
    for term in terms:
        reach = np.maximum(np.abs(term.lo - term.zero), np.abs(term.hi - term.zero))
        whole += float_chain_bound(float(np.max(np.abs(term.scale) * reach, initial=0.0)))
    return whole * ROUNDING


def exact_product(first: Array | float, second: Array | float) -> bool:
    """Return True if the products of two arrays are exact in float64."""
    powers = is_power_of_two(np.asarray(first)) or is_power_of_two(np.asarray(second))
    return powers or are_float32(first, second)


def one_sum(first: Array, second: Array) -> Fraction:
    """Bound the rounding of the sum of two constants, in real units."""
    both = np.any(first) and np.any(second)
    return (largest(_plain(first)) + largest(_plain(second))) * ROUNDING if both else Fraction(0)


def _plain(constant: Array | float) -> Array:
    """Return a constant without masks: where they are added everything saturates."""
    values = np.asarray(constant, np.float64)
    return np.where(values > MASK, values, 0.0)


def are_float32(*scales: Array | float) -> bool:
    """Return True if numbers are float32, so that the product of any two is exact in float64."""
    return all(np.array_equal(np.asarray(scale).astype(np.float32), np.asarray(scale)) for scale in scales)
