"""Dtypes: the types that quantized tensors are stored in, each with its grid lo..hi."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from qsdk.core.errors import ConfigError


@dataclass(frozen=True)
class DType:
    """A numeric type with its grid.

    Attributes:
        name: the name in configs, files and reports (`"int8"`, `"float8e4m3fn"`, `"int8_strict"`).
        kind: `integer` (quantized), `minifloat` (quantized by a saturating cast), `scale` (only for scales),
            `float` (not quantized: the tensor is stored in that float type).
        bits: width of a value.
        signed: whether the grid has negative values.
        lo: smallest value of the grid.
        hi: largest value of the grid.
        container: the ONNX type that carries it; an odd width rides in the next standard one.
        exact_sums: whether weights have scales with which `qsdk.core.numerics.exact_sums` holds.

    Examples:
        >>> from qsdk import uint4
        >>> uint4.lo, uint4.hi, uint4.bits
        (0, 15, 4)
    """

    name: str
    kind: Literal["integer", "minifloat", "scale", "float"]
    bits: int
    signed: bool
    lo: float
    hi: float
    container: str
    exact_sums: bool = False

    @property
    def is_integer(self) -> bool:
        """Return whether the grid consists of integers."""
        return self.kind == "integer"

    @property
    def is_quantized(self) -> bool:
        """Return whether a tensor of this dtype has a scale (integers and minifloats)."""
        return self.kind in ("integer", "minifloat")

    @property
    def narrows_container(self) -> bool:
        """Return whether the grid is smaller than the container's (odd widths and strict symmetric grids)."""
        return self.is_integer and (self.lo, self.hi) != (DTYPES[self.container].lo, DTYPES[self.container].hi)

    @property
    def strict(self) -> "DType":
        """Return the dtype of the same width with the strict symmetric grid -hi..hi.

        Raises:
            ConfigError: the dtype is not a signed integer.
        """
        if not (self.is_integer and self.signed):
            raise ConfigError(f"{self.name} has no strict symmetric grid; use a signed integer dtype")
        if self.lo == -self.hi:
            return self
        return replace(self, name=f"{self.name}_strict", lo=-self.hi)

    def __repr__(self) -> str:
        return self.name


def _integer(bits: int, signed: bool) -> DType:
    standard = next(width for width in (2, 4, 8, 16, 32) if width >= bits)
    prefix = "int" if signed else "uint"
    lo, hi = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    return DType(f"{prefix}{bits}", "integer", bits, signed, lo, hi, f"{prefix}{standard}")


def _float(name: str, kind: Literal["minifloat", "scale", "float"], bits: int, hi: float) -> DType:
    lo = 2.0**-127 if kind == "scale" else -hi
    return DType(name, kind, bits, kind != "scale", lo, hi, name)


int2, int4, int8, int16, int32 = (_integer(bits, True) for bits in (2, 4, 8, 16, 32))
#: weights that the 8-bit kernels of every processor multiply exactly
int8_exact = replace(int8, name="int8_exact", exact_sums=True)
uint2, uint4, uint8, uint16 = (_integer(bits, False) for bits in (2, 4, 8, 16))
float8e4m3fn = _float("float8e4m3fn", "minifloat", 8, 448.0)
float8e4m3fnuz = _float("float8e4m3fnuz", "minifloat", 8, 240.0)
float8e5m2 = _float("float8e5m2", "minifloat", 8, 57344.0)
float8e5m2fnuz = _float("float8e5m2fnuz", "minifloat", 8, 57344.0)
float4e2m1 = _float("float4e2m1", "minifloat", 4, 6.0)
float8e8m0 = _float("float8e8m0", "scale", 8, 2.0**127)
float16 = _float("float16", "float", 16, 65504.0)
bfloat16 = _float("bfloat16", "float", 16, 3.3895313892515355e38)
float32 = _float("float32", "float", 32, 3.4028234663852886e38)


BlockName = Literal["nvfp4", "mxfp4", "mxfp8", "mxint8"]


@dataclass(frozen=True)
class BlockFormat:
    """A format of weights and activations: a dtype in blocks along what a layer sums over, and scales of a narrow type.

    Weights that cannot have blocks (an embedding, a norm's weight, a depthwise kernel) are quantized as with
    `weight=dtype`. Activations have them where a linear layer reads them; the scale of each block is found while the
    model runs.

    Attributes:
        name: in configs.
        dtype: of the elements.
        block_size: input channels per scale.
        scale_dtype: the type that holds the scales: powers of two (float8e8m0, OCP MX 1.0), or float8e4m3fn over one
            float32 for the tensor (NVFP4).

    Examples:
        >>> from qsdk import weight_only
        >>> from qsdk.dtypes import mxfp4
        >>> mxfp4.dtype, mxfp4.block_size, weight_only(mxfp4).weight
        (float4e2m1, 32, mxfp4)
    """

    name: BlockName
    dtype: DType
    block_size: int
    scale_dtype: DType

    @property
    def kind(self) -> str:
        """Return the kind of its dtype."""
        return self.dtype.kind

    @property
    def bits(self) -> int:
        """Return the width of an element."""
        return self.dtype.bits

    @property
    def is_quantized(self) -> bool:
        """Return True: a tensor in blocks has scales."""
        return self.dtype.is_quantized

    def __repr__(self) -> str:
        return self.name


mxfp4 = BlockFormat("mxfp4", float4e2m1, 32, float8e8m0)
mxfp8 = BlockFormat("mxfp8", float8e4m3fn, 32, float8e8m0)
mxint8 = BlockFormat("mxint8", int8, 32, float8e8m0)
nvfp4 = BlockFormat("nvfp4", float4e2m1, 16, float8e4m3fn)
BLOCK_FORMATS: Mapping[str, BlockFormat] = MappingProxyType(
    {found.name: found for found in (mxfp4, mxfp8, mxint8, nvfp4)}
)
#: the types that a config may name for weights and activations
ElementType = DType | BlockFormat

_ODD = [_integer(bits, signed) for bits in (3, 5, 6, 7, *range(9, 16)) for signed in (True, False)]
_STANDARD = [
    *(int2, int4, int8, int8_exact, int16, int32, uint2, uint4, uint8, uint16),
    *(float8e4m3fn, float8e4m3fnuz, float8e5m2, float8e5m2fnuz, float4e2m1, float8e8m0, float16, bfloat16, float32),
]
DTYPES = MappingProxyType({dtype.name: dtype for dtype in (*_STANDARD, *_ODD)})


#: container of 4 bits -> the one of whole bytes that may hold its codes instead
WHOLE_BYTES = MappingProxyType({"int4": "int8", "uint4": "uint8"})


def element_type_named(name: ElementType | str) -> ElementType:
    """Return the dtype, or the format of blocks, of that name.

    Raises:
        ConfigError: neither has that name.
    """
    if isinstance(name, BlockFormat):
        return name
    return BLOCK_FORMATS.get(str(name)) or dtype_named(name)


def dtype_named(name: ElementType | str) -> DType:
    """Return the dtype of that name; a `DType` is returned unchanged.

    Raises:
        ConfigError: no dtype has that name, or it is a format of blocks, which weights and activations alone have.

    Examples:
        >>> dtype_named("int8_strict").lo
        -127
    """
    if isinstance(name, DType):
        return name
    if str(name) in BLOCK_FORMATS:
        raise ConfigError(f"{name} is a format of blocks, for weights and activations; give a dtype here")
    strict = re.fullmatch(r"(int\d+(?:_exact)?)_strict", str(name))
    result = DTYPES.get(strict[1] if strict else str(name))
    if result is None:
        meant = f"int{name}" if isinstance(name, int) else str(name).removeprefix("torch.")
        near = f"write {meant!r}; all: " if meant in DTYPES else "choose one of "
        raise ConfigError(f"unknown dtype {name!r}; {near}{', '.join(DTYPES)}")
    return result.strict if strict else result


def level_dtype(dtype: DType) -> DType:
    """Return the dtype of the levels of two-level scales: `uint4` for integers of up to 4 bits, else `uint8`."""
    return uint4 if dtype.bits <= 4 else uint8


#: of tensors in models of it; no site can be asked to have it
_FLOAT64 = _float("float64", "float", 64, 1.7976931348623157e308)


def tensor_dtype_named(name: str) -> DType:
    """Return the dtype of a tensor by its name, of `dtype_named` or float64.

    Raises:
        ConfigError: an unknown name.
    """
    return _FLOAT64 if name == _FLOAT64.name else dtype_named(name)
