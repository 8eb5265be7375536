"""Codes of weights that add up to so little that no sum of their products leaves an accumulator of few bits.

An activation has a code on a grid of n + 1 numbers, and its zero point is one of them. Let neither the positive nor the
negative codes of an output's weights add up to more than (2**(bits - 1) - 1) / n. Then no sum of products leaves a
signed accumulator of so many bits: for any input, in any order, whether the zero point is subtracted before the
products or from their sum. The bias is not part of it.

Sources: Colbert et al. 2024, A2Q+, section 3 (the bound on zero-centred weights, which is twice this for both signs);
Colbert et al. 2024, AXE (sums of tiles). The functions take NumPy arrays and torch tensors.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

#: halvings of the interval in which a threshold lies
_HALVINGS = 20


@dataclass(frozen=True)
class SumLimit:
    """The limit of the sums of codes of one sign, over all inputs of an output or over tiles of some.

    Attributes:
        most: the largest sum.
        columns: K of the layer's matrix, which runs over input channels and, within them, over a kernel's positions.
        inputs: input channels among them.
        tile: products that are added up in one accumulator, in the order in which kernels have them: position by
            position, the input channels of each side by side; None for all.
    """

    most: int
    columns: int
    inputs: int
    tile: int | None = None

    @cached_property
    def tile_of(self) -> npt.NDArray[np.int64]:
        """Return the number of the tile of each column, int64 [K]."""
        k, positions = np.arange(self.columns), self.columns // self.inputs
        return ((k % positions) * self.inputs + k // positions) // (self.tile or self.columns)

    @cached_property
    def _order(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        order = np.argsort(self.tile_of, kind="stable")
        return order, np.flatnonzero(np.diff(self.tile_of[order], append=-1))

    def sums(self, codes: Any) -> Any:
        """Return the sums of whole numbers [..., K] over each tile, [..., tiles]."""
        if self.tile is None or self.tile >= self.columns:
            return codes.sum(-1)[..., None]
        order, ends = self._order
        to_here = codes[..., order].cumsum(-1)[..., ends]
        result = to_here * 1
        result[..., 1:] -= to_here[..., :-1]
        return result

    def largest(self, codes: npt.NDArray[Any]) -> int:
        """Return the largest sum of codes of one sign, for whole numbers [..., K] of both signs."""
        return max(int(self.sums((sign * codes).clip(0, None)).max(initial=0)) for sign in (1, -1))

    def thresholds(self, weight: Any, scale: Any, lo: float, hi: float) -> tuple[Any, Any]:
        """Return what positive and negative weights [..., K] are to lose, [..., tiles], so that their codes fit.

        Nearest codes of what is left are those with the smallest squared error within the limit, but for ties.
        """
        high, low = (self._threshold((sign * weight).clip(0, None), scale, end) for sign, end in ((1, hi), (-1, -lo)))
        return high, low

    def _threshold(self, part: Any, scale: Any, end: float) -> Any:
        one = part[..., :1] * 0 + 1  # of the weight's own float type
        fits = (self.sums((part / scale).round().clip(0, end)) <= self.most) * one
        # no weight is larger than the root of the sum of squares, and without weights everything fits
        above = ((part * part).sum(-1)[..., None] ** 0.5 * 1.0001) * (1 - fits)
        below = above * 0
        for _ in range(_HALVINGS if float(fits.min()) < 1 else 0):
            middle = (below + above) / 2
            left = (part - middle[..., self.tile_of]).clip(0, None)
            fits = (self.sums((left / scale).round().clip(0, end)) <= self.most) * one
            above, below = above + fits * (middle - above), below + (1 - fits) * (middle - below)
        return above

    def within(self, weight: Any, scale: Any, lo: float, hi: float) -> Any:
        """Return weights [..., K] less their thresholds: nearest codes `rint(weight / scale)` are within the limit."""
        high, low = (found[..., self.tile_of] for found in self.thresholds(weight, scale, lo, hi))
        return (weight - high).clip(0, None) - (-weight - low).clip(0, None)
