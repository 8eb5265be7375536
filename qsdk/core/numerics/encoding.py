"""Encodings: the scale and zero point that were found for a site. Exactly QuantizeLinear's operands."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from qsdk.core.errors import CalibrationError
from qsdk.core.numerics import affine
from qsdk.core.numerics.dtypes import DType

FloatArray = npt.NDArray[np.float32]

_MINIFLOATS: dict[str, Any] = {
    "float8e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8e5m2": ml_dtypes.float8_e5m2,
    "float8e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "float4e2m1": ml_dtypes.float4_e2m1fn,
}
_INTEGERS: dict[str, Any] = {"int2": ml_dtypes.int2, "uint2": ml_dtypes.uint2, "int4": ml_dtypes.int4} | {
    "uint4": ml_dtypes.uint4,
    **{name: np.dtype(name) for name in ("int8", "uint8", "int16", "uint16", "int32")},
}


@dataclass(frozen=True, eq=False)
class Encoding:
    """The scale and zero point of a site; compared by value.

    Attributes:
        dtype: the stored type.
        scale: float32; (1,)-shaped per tensor, (C,) per channel, x's rank per block. Positive and finite.
        zero_point: int32 of scale's shape (all zero for minifloats), inside the grid.
        axis: channel or block axis, None per tensor.
        block_size: elements per scale along axis, None where there are no blocks.
        frozen: neither calibrated, trained nor searched any more.

    Raises:
        CalibrationError: a scale is not positive and finite, the shapes or zero points do not fit, or the dtype has no
            scale.

    Examples:
        >>> from qsdk import Encoding, uint8
        >>> encoding = Encoding(uint8, scale=0.5, zero_point=128)
        >>> float(encoding.low[0]), float(encoding.high[0])
        (-64.0, 63.5)
    """

    dtype: DType
    scale: FloatArray
    zero_point: npt.NDArray[np.int32]
    axis: int | None = None
    block_size: int | None = None
    frozen: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", np.array(self.scale, np.float32, ndmin=1))
        zero_point = np.array(self.zero_point, np.int32, ndmin=1)
        if zero_point.shape != self.scale.shape:
            zero_point = np.array(np.broadcast_to(zero_point, self.scale.shape))
        object.__setattr__(self, "zero_point", zero_point)
        if not self.dtype.is_quantized:
            raise CalibrationError(f"{self.dtype} has no scale; an encoding needs an integer, float8 or float4 dtype")
        if self.block_size is not None and (self.axis is None or self.block_size < 1):
            raise CalibrationError(
                f"blocks of {self.block_size} along axis {self.axis}; give an axis and a size from 1"
            )
        # NaN makes NaN of both ends, and every comparison with it False
        if self.scale.size and not (self.scale.min() > 0 and self.scale.max() < np.inf):
            raise CalibrationError(f"an encoding of {self.dtype} needs positive, finite scales, got {self.scale}")
        if self.axis is None and self.scale.size != 1:
            raise CalibrationError(f"{self.scale.size} scales without an axis; name the channel axis")
        if self.axis is not None and self.block_size is None and self.scale.ndim != 1:
            raise CalibrationError(f"a per-channel scale has one dimension, got shape {self.scale.shape}")
        low, high = (self.dtype.lo, self.dtype.hi) if self.dtype.is_integer else (0, 0)
        if zero_point.size and (zero_point.min() < low or zero_point.max() > high):
            raise CalibrationError(f"a zero point lies outside the grid {low}..{high} of {self.dtype}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Encoding):
            return NotImplemented
        return (
            (self.dtype, self.axis, self.block_size) == (other.dtype, other.axis, other.block_size)
            and np.array_equal(self.scale, other.scale)
            and np.array_equal(self.zero_point, other.zero_point)
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def symmetric(self) -> bool:
        """Return whether every zero point is 0, so that no zero-point tensor is needed."""
        return not self.zero_point.any()

    @property
    def low(self) -> FloatArray:
        """Return the smallest representable value, of scale's shape."""
        return self._value_of(self.dtype.lo)

    @property
    def high(self) -> FloatArray:
        """Return the largest representable value, of scale's shape."""
        return self._value_of(self.dtype.hi)

    def quantize(self, x: npt.ArrayLike) -> npt.NDArray[Any]:
        """Quantize x; the result has the container's NumPy type (ml_dtypes' own for 2 and 4 bits and minifloats)."""
        with np.errstate(over="ignore"):  # overflow saturates
            values = np.asarray(x, np.float32)
            scale, zero_point = self._aligned(values.shape)
            if not self.dtype.is_integer:
                return np.asarray((values / scale).clip(self.dtype.lo, self.dtype.hi).astype(storage_type(self.dtype)))
            # saturate in float64, which holds every int32; all before it is float32, as in QuantizeLinear
            q = affine.quantize(values, scale, zero_point, -np.inf, np.inf)
        clipped = q.astype(np.float64).clip(self.dtype.lo, self.dtype.hi)
        return np.where(np.isnan(clipped), self.dtype.lo, clipped).astype(np.int32).astype(storage_type(self.dtype))

    def dequantize(self, q: npt.NDArray[Any]) -> FloatArray:
        """Return `(q - zero_point) * scale` in float32."""
        scale, zero_point = self._aligned(q.shape)
        with np.errstate(over="ignore"):  # the end of a grid may lie just beyond float32
            return np.asarray(affine.dequantize(q.astype(np.float32), scale, zero_point), np.float32)

    def fake_quantize(self, x: npt.ArrayLike) -> FloatArray:
        """Return the nearest points of the grid for x, in float32."""
        return self.dequantize(self.quantize(x))

    def _value_of(self, q: float) -> FloatArray:
        with np.errstate(over="ignore"):
            return np.asarray((np.float32(q) - self.zero_point.astype(np.float32)) * self.scale)

    def _aligned(self, shape: tuple[int, ...]) -> tuple[FloatArray, FloatArray]:
        zero_point = self.zero_point.astype(np.float32)
        scale = affine.align(self.scale, shape, self.axis, self.block_size)
        return scale, affine.align(zero_point, shape, self.axis, self.block_size)


def storage_type(dtype: DType) -> Any:
    """Return the NumPy (or ml_dtypes) type that stores values of a quantized dtype's container."""
    return np.dtype(_INTEGERS[dtype.container] if dtype.is_integer else _MINIFLOATS[dtype.name])
