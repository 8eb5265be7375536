"""Specs: what is wanted at a site, before any data has been seen."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd, log
from types import MappingProxyType
from typing import Literal

from qsdk.core.errors import ConfigError
from qsdk.core.numerics.dtypes import (
    BLOCK_FORMATS,
    BlockFormat,
    BlockName,
    DType,
    float8e4m3fn,
    float8e8m0,
    level_dtype,
    mxint8,
    nvfp4,
    uint4,
    uint8,
)


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
#: whether ranges are found while the model runs: for each tensor (True), for each row along the last axis, or for each
#: block of it as a format of blocks has them
Dynamic = bool | Literal["token"] | BlockName


def axis_of(granularity: Granularity) -> int | None:
    """Return the channel or block axis, or None per tensor."""
    return None if isinstance(granularity, PerTensor) else granularity.axis


def block_size_of(granularity: Granularity) -> int | None:
    """Return the block size, or None where there are no blocks."""
    return granularity.size if isinstance(granularity, PerBlock) else None


def whole_blocks(lengths: Iterable[int], near: int) -> str:
    """Return in words which lengths of blocks divide axes of all these lengths, those nearest to one first."""
    common = gcd(*lengths)
    sizes = sorted((n for n in range(2, common + 1) if common % n == 0), key=lambda n: abs(log(n / near)))
    return f"{', '.join(map(str, sizes[:6]))} do" if sizes else "no length divides them all"


@dataclass(frozen=True)
class Spec:
    """The way in which a site is to be quantized.

    Attributes:
        dtype: the stored type; its grid is the dtype's own.
        granularity: per tensor, channel or block.
        symmetric: fixes the zero point (0; the grid's middle for an unsigned dtype that sees negative values).
        scale_bits: rounds scales up to so many significant binary digits, 1 for powers of two; None keeps float32's 24.
            With 2 to 11, but for bfloat16's 8, float16 holds them.
        fixed_range: `(low, high)` that calibration does not touch (a Softmax lives in 0..1).
        scale_dtype: the type that holds the scales of symmetric blocks; None for float32. `float8e8m0`: powers of two
            (OCP MX 1.0). `float8e4m3fn`: its values times one float32 per tensor (NVFP4). `uint4`: 1 to 16 times one
            float32 per channel (AIMET's LPBQ), for integers of up to 4 bits; `uint8`: 1 to 256 times one, for others.
        dynamic: the range of each tensor, of each row along the last axis ("token"), or of each block of it (the name
            of a format of blocks) is found while the model runs. There is no encoding but for "nvfp4", whose scale is
            that of the largest block: the scales of all blocks are float8 values over one float32 that follows from it.
    """

    dtype: DType
    granularity: Granularity = PerTensor()
    symmetric: bool = True
    scale_bits: int | None = None
    fixed_range: tuple[float, float] | None = None
    scale_dtype: DType | None = None
    dynamic: Dynamic = False

    def __post_init__(self) -> None:
        if self.dtype.kind == "scale":
            raise ConfigError(f"{self.dtype.name} is a type for scales; it cannot hold a tensor")
        if self.dtype.kind == "minifloat" and not self.symmetric:
            raise ConfigError(f"{self.dtype.name} has no zero point; ask for symmetric=True")
        if isinstance(self.granularity, PerBlock) and self.granularity.size < 1:
            raise ConfigError(f"block size {self.granularity.size} is not positive")
        if self.scale_bits is not None and not 1 <= self.scale_bits <= 24:
            raise ConfigError(f"scale_bits={self.scale_bits} is no number of digits of a float32; give 1 to 24")
        if self.scale_dtype is not None:
            self._require_block_scales(self.scale_dtype)
        if self.dynamic:
            self._require_dynamic()

    @property
    def has_encoding(self) -> bool:
        """Return whether something is found before the model runs: a scale, with a zero point or without."""
        return self.dtype.is_quantized and (not self.dynamic or self.dynamic == nvfp4.name)

    @property
    def blocks(self) -> BlockFormat | None:
        """Return the format of an activation whose blocks get their scales while the model runs, else None."""
        return BLOCK_FORMATS.get(str(self.dynamic))

    @property
    def scales_are_free(self) -> bool:
        """Return whether every positive float32 may be a scale, so that training can change them."""
        return self.scale_bits is None and self.scale_dtype is None and self.blocks is None

    @property
    def scales_are_fine(self) -> bool:
        """Return whether scales can be learned in small steps: those of the narrow floats can, powers of two cannot."""
        return self.scale_dtype is None and (self.scale_bits is None or self.scale_bits >= min(_DIGITS.values()))

    def _require_dynamic(self) -> None:
        found = f"{'' if self.symmetric else 'a'}symmetric {self.dtype} {self.granularity}"
        if self.blocks is not None:
            if found != f"symmetric {self.blocks.dtype} per tensor":
                raise ConfigError(f"an activation in blocks of {self.blocks} is {self.blocks.dtype}, not {found}")
            return
        wanted = [f"symmetric {dtype} per tensor" for dtype in ("int8", "int4")]
        if found not in (wanted if self.dynamic == "token" else ["asymmetric uint8 per tensor"]):
            named = "symmetric int8 or int4 per token"
            named = named if self.dynamic == "token" else "asymmetric uint8 per tensor (DynamicQuantizeLinear)"
            raise ConfigError(f"a dynamic activation is {named}, not {found}")

    def _require_block_scales(self, scale_dtype: DType) -> None:
        if scale_dtype not in (float8e8m0, float8e4m3fn, uint4, uint8):
            raise ConfigError(f"{scale_dtype} cannot hold scales; choose float8e8m0, float8e4m3fn, uint4 or uint8")
        if not isinstance(self.granularity, PerBlock) or not self.symmetric:
            raise ConfigError(f"scales in {scale_dtype} belong to symmetric blocks; ask for blocks and symmetric=True")
        powers = scale_dtype == float8e8m0 and self.dtype == mxint8.dtype
        has = scale_dtype == level_dtype(self.dtype) or powers
        if not has if self.dtype.is_integer else scale_dtype in (uint4, uint8):
            raise ConfigError(
                f"{self.dtype} has no blocks with scales in {scale_dtype}; uint4 is for integers of up to 4 bits, "
                "uint8 for wider ones"
            )


#: uint8 with the range of the whole tensor, found while the model runs, as DynamicQuantizeLinear does
OF_WHOLE = Spec(uint8, symmetric=False, dynamic=True)


def float_spec(dtype: DType, tensor_type: str = "float32") -> Spec | None:
    """Return the spec of a site that a rule keeps in a float dtype: None for float32 and its own type, else a cast."""
    return None if dtype.name in ("float32", tensor_type) else Spec(dtype)


#: significant binary digits of the float types that are narrower than float32
_DIGITS = MappingProxyType({"float16": 11, "bfloat16": 8})


def scale_digits(wanted: int | None, tensor_type: str) -> int | None:
    """Return the binary digits of a tensor's scales: those wanted, and no more than the tensor's own float type has."""
    most = _DIGITS.get(tensor_type)
    return wanted if most is None else min(wanted or most, most)


Kind = Literal["weight", "bias", "activation", "input", "output"]
#: the part a stored tensor plays in the op that reads it
Role = Literal["weight", "bias", "embedding", "constant", "statistic"]
