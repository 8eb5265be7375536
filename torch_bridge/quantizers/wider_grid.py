"""A grid of more bits over a site's range, on which the site is trained for a while before its own grid."""

from dataclasses import dataclass

from torch import Tensor

from qsdk.core.numerics.dtypes import DType, dtype_named
from qsdk.core.numerics.spec import Spec


@dataclass(frozen=True)
class FinerGrid:
    """A grid of more bits whose range is that of a site's own grid.

    Attributes:
        dtype: of more bits.
        own_lo: smallest value of the site's own grid.
        steps: steps of this grid in one step of the site's own.
    """

    dtype: DType
    own_lo: float
    steps: float

    def __call__(self, scale: Tensor, zero_point: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and zero point on this grid for those on the site's own; gradients pass through.

        The ends of the range stay, up to half a step: the zero point of a symmetric range need not be 0 here.
        """
        exact = (zero_point - self.own_lo) * self.steps + self.dtype.lo
        return scale / self.steps, exact + (exact.round() - exact).detach()


def finer_grid(spec: Spec, bits: int) -> FinerGrid | None:
    """Return the grid of `bits` bits, or None where the site's own has as many.

    Args:
        spec: of a site with an integer dtype.
        bits: 2 to 16.
    """
    own = spec.dtype
    if bits <= own.bits:
        return None
    strict = own.signed and own.lo == -own.hi
    wide = dtype_named(f"{'' if own.signed else 'u'}int{bits}{'_strict' if strict else ''}")
    return FinerGrid(wide, own.lo, (wide.hi - wide.lo) / (own.hi - own.lo))
