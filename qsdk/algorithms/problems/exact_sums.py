"""Sums whose bits do not depend on the order of their terms, so that ranks may add them up in any order."""

from collections.abc import Sequence

import torch
from torch import Tensor

#: Bits between the bound of a sum and the unit that its terms are rounded to: 52, and 3 of headroom.
_BITS, _HEADROOM = 52, 3
#: Elements that are added at a time.
_PART = 1 << 18
#: Moves terms that lie half-way between two multiples of the unit off that place.
_NO_TIES = 1 + 2.0**-52


def exponents(values: Tensor) -> Tensor:
    """Return for each value the smallest e with |value| < 2^e, int64; 0 for 0."""
    return torch.frexp(values.double())[1].long()


class ExactSum:
    """A sum of float tensors in which every term is rounded once, to a multiple of a unit that is known beforehand.

    Sums of multiples of one unit are exact in float64 as long as they stay below 2^53 units: then any order, and any
    distribution over ranks, gives the same bits. The unit of each element is 2^-49 of its bound.

    Source: the accumulators of Demmel and Nguyen 2015, Parallel Reproducible Summation, with one bin, since the bound
    is known before the first term.
    """

    def __init__(self, bounds: Sequence[Tensor]) -> None:
        """Start at zero.

        Args:
            bounds: int64 tensors that broadcast to the shape of the sum; the sum of the absolute values of all terms
                is at most 2 to the power of their sum. A bound that is given in several tensors takes little memory.
        """
        largest = max(range(len(bounds)), key=lambda at: bounds[at].numel())
        others = _power_of_two(torch.tensor(_HEADROOM, device=bounds[0].device)) * 1.5
        for at, bound in enumerate(bounds):
            if at != largest:
                others = others * _power_of_two(bound)
        # the offset of each element is their product, exact since all but one are powers of two
        self._offset = _power_of_two(bounds[largest]), others
        self._total = self._offset[0] * self._offset[1]

    def add(self, term: Tensor) -> None:
        """Add a float32 tensor.

        The total sits on an offset so large that its last bit is the unit: the addition itself rounds the term.
        Rounding half-way cases to even would look at the other terms, so there are none: a term that is so small is
        made larger by 2^-52 of itself.
        """
        # in parts, since torch makes a float64 copy of the term
        axis = max(term.dim() - 2, 0)
        rows = max(_PART * term.shape[axis] // max(term.numel(), 1), 1)
        for total, part in zip(torch.split(self._total, rows, axis), torch.split(term, rows, axis), strict=True):
            total.add_(part, alpha=_NO_TIES)

    def value(self) -> Tensor:
        """Return the sum, float64; sums of such values over ranks are exact as well."""
        return torch.addcmul(self._total, *self._offset, value=-1)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2 to the power of int64 tensors, float64: the bits themselves, since `pow` may be off by one."""
    return ((exponent + 1023) << _BITS).contiguous().view(torch.float64)
