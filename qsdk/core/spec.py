"""Specs: what is wanted at a site, before any data has been seen."""

from dataclasses import dataclass
from typing import Literal

from qsdk.core.dtypes import DType
from qsdk.core.errors import ConfigError


@dataclass(frozen=True)
class PerTensor:
    """One scale for the tensor."""

    def __str__(self) -> str:
        return "per tensor"


@dataclass(frozen=True)
class PerChannel:
    """One scale per index of `axis`: shape (C,)."""

    axis: int

    def __str__(self) -> str:
        return f"per channel (axis {self.axis})"


@dataclass(frozen=True)
class PerBlock:
    """One scale per run of `size` elements along `axis`: x's rank, `ceil(C / size)` along axis."""

    axis: int
    size: int

    def __str__(self) -> str:
        return f"per block of {self.size} (axis {self.axis})"


Granularity = PerTensor | PerChannel | PerBlock


def axis_of(granularity: Granularity) -> int | None:
    """The channel or block axis, or None per tensor."""
    return None if isinstance(granularity, PerTensor) else granularity.axis


def block_size_of(granularity: Granularity) -> int | None:
    """The block size, or None where there are no blocks."""
    return granularity.size if isinstance(granularity, PerBlock) else None


@dataclass(frozen=True)
class Spec:
    """How a site is to be quantized.

    Attributes:
        dtype: the stored type; its grid is the dtype's own.
        granularity: per tensor, channel or block.
        symmetric: fixes the zero point (0; the grid's middle for an unsigned dtype that sees negative values).
        power_of_two: rounds scales up to the next power of two.
        fixed_range: `(low, high)` that calibration does not touch (a Softmax lives in 0..1).
    """

    dtype: DType
    granularity: Granularity = PerTensor()
    symmetric: bool = True
    power_of_two: bool = False
    fixed_range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.dtype.kind == "scale":
            raise ConfigError(f"{self.dtype.name} is a type for scales; it cannot hold a tensor")
        if self.dtype.kind == "minifloat" and not self.symmetric:
            raise ConfigError(f"{self.dtype.name} has no zero point; ask for symmetric=True")
        if isinstance(self.granularity, PerBlock) and self.granularity.size < 1:
            raise ConfigError(f"block size {self.granularity.size} is not positive")


def float_spec(dtype: DType) -> Spec | None:
    """The spec of a site that a rule keeps in a float dtype: none for float32, a cast for the others."""
    return None if dtype.name == "float32" else Spec(dtype)


Kind = Literal["weight", "bias", "activation", "input", "output"]
#: the part a stored tensor plays in the op that reads it
Role = Literal["weight", "bias", "embedding", "constant", "statistic"]
