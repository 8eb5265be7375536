"""Reciprocals and reciprocal roots of mantissas of 30 bits in int32: straight lines, then one step of Newton's method.

The lines give about 15 right bits, the step doubles them. The residue `1 - m * r` (or `1 - m * r * r`) is computed from
products of halves of 15 bits, to about 2**-29; a bias keeps it positive where it is shifted. `RECIPROCAL` and `ROOT`
bound the relative errors: those of the lines squared, the roundings of the residue, of its product and of the result.
"""

from collections.abc import Callable

import numpy as np

from onnx_backend.integer.fixed_point.int32 import (
    Int32,
    of_constant,
)
from onnx_backend.integer.ir.values import Array

#: Bounds of the relative errors.
RECIPROCAL, ROOT = 2.0**-28, 2.0**-27.8
#: Bits of a mantissa below a line, of which the lower ones are not looked at.
_BELOW, _UNSEEN = 19, 9
#: Bits of a seed beyond those that stay.
_FINER = 14


def reciprocal_of_mantissa(mantissa: Int32) -> Int32:
    """Write `2**59 / m`, in 2**29..2**30, for m in 2**29..2**30-1."""
    seed = _seed(mantissa, lambda m: 2.0**45 / m)  # 2**15..2**16, off by 0.56 at most
    low, high = mantissa.cut(15)
    whole = high.times(seed, (0, (1 << 30) + (1 << 15)))
    rest = low.times(seed, (0, (1 << 31) - 1)).shifted(15)
    reached = whole.plus(rest, ((1 << 30) - (1 << 15), (1 << 30) + (1 << 15)))
    residue = of_constant(mantissa.ctx, (1 << 30) + (1 << 16) + 1).minus(reached)
    return _corrected(seed, residue, (1 << 14) - 1)


def root_of_mantissa(mantissa: Int32) -> Int32:
    """Write `2**44 / sqrt(m)`, in 2**29..2**30, for m in 2**28..2**30-1."""
    seed = _seed(mantissa, lambda m: 2.0**29 / np.sqrt(m))  # 2**14..2**15, off by 0.56 at most
    low, high = mantissa.cut(15)
    square = seed.times(seed)
    square_low, square_high = square.cut(15)
    sides = [high.times(square_low), low.times(square_high)]
    across = sides[0].plus(sides[1], (0, (1 << 31) - 1)).shifted(13)
    whole = high.times(square_high, (0, (1 << 28) + (1 << 15))).times(4)
    reached = whole.plus(across, ((1 << 30) - (1 << 17) + 8, (1 << 30) + (1 << 17) - 8))
    residue = of_constant(mantissa.ctx, (1 << 30) + (1 << 17)).minus(reached)
    return _corrected(seed, residue, (1 << 15) - 2)


def _corrected(seed: Int32, residue: Int32, times: int) -> Int32:
    """Write `seed * times + seed * residue / 2**16`: the factor has the residue's bias taken off."""
    quarter = residue.shifted(2)
    product = seed.times(quarter, (0, (1 << 31) - (1 << 14)))
    correction = product.plus(1 << 13).shifted(14)
    return seed.times(times).plus(correction, ((1 << 29) - 64, 1 << 30))


def _seed(mantissa: Int32, function: Callable[[Array], Array]) -> Int32:
    """Write the nearest integers to a function that falls, by straight lines between the multiples of 2**19."""
    first, last = mantissa.lo >> _BELOW, mantissa.hi >> _BELOW
    lines = np.maximum(np.arange(last + 2, dtype=np.float64), first)  # those below the first are not looked up
    places = lines * (1 << _BELOW) + (1 << (_UNSEEN - 1))
    knots = function(places) * (1 << _FINER)
    steps = 1 << (_BELOW - _UNSEEN)
    slopes = np.rint((knots[:-1] - knots[1:]) / steps).astype(np.int64)
    bases = np.rint(knots[:-1]).astype(np.int64) + (1 << (_FINER - 1))
    within, line = mantissa.shifted(_UNSEEN).cut(_BELOW - _UNSEEN)
    fall = line.looked_up(slopes).times(within)
    top = int(knots[0]) + (1 << (_FINER - 1))
    height = line.looked_up(bases).minus(fall, (int(knots[-1]), top))
    return height.shifted(_FINER)
