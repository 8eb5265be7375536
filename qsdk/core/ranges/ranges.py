"""Ranges: observed minima and maxima, and the scale and zero point that follow from them.

Conventions and their measured values: a range always contains 0, which is exactly representable; a symmetric
scale is the smallest that covers both ends, `max(high / hi, -low / -lo)`; scales never fall below float32's
machine epsilon (its 256th at 16 bits), so that a tensor of zeros has an encoding; the fixed range from 0 to 1 has a
whole number of steps.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from qsdk.core.errors import CalibrationError
from qsdk.core.numerics.block_scales import restrict_block_scales, round_up_to_digits, shared_exponents
from qsdk.core.numerics.dtypes import bfloat16, float8e4m3fn, float8e8m0, float16, nvfp4
from qsdk.core.numerics.encoding import Encoding, FloatArray
from qsdk.core.numerics.exact_sums import least_scale
from qsdk.core.numerics.spec import PerBlock, PerTensor, Spec, axis_of, block_size_of

#: significant binary digits of a float type -> its largest number
_LARGEST_OF_DIGITS = MappingProxyType({11: float16.hi, 8: bfloat16.hi})
_TIMES = 3
SMALLEST_SCALE = np.float32(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Range:
    """The minimum and maximum per tensor (shape (1,)), channel (C,) or block (x's rank); float32."""

    low: FloatArray
    high: FloatArray

    def merge(self, other: "Range") -> "Range":
        """Return the smallest range that covers both."""
        return Range(np.minimum(self.low, other.low), np.maximum(self.high, other.high))

    def same(self, other: "Range") -> bool:
        """Return whether both have the same ends."""
        return np.array_equal(self.low, other.low) and np.array_equal(self.high, other.high)


def range_of(x: npt.ArrayLike, spec: Spec) -> Range:
    """Return the minimum and maximum of x at the spec's granularity."""
    with np.errstate(over="ignore"):  # a float64 too large for float32 is reported below
        values = np.asarray(x, np.float32)
    if values.size == 0:
        raise CalibrationError("there is no range in an empty tensor; give data with at least one element")
    axis_wanted = axis_of(spec.granularity)
    if axis_wanted is not None and not -values.ndim <= axis_wanted < values.ndim:
        raise CalibrationError(f"axis {axis_wanted} is outside a tensor of shape {values.shape}; name one of its axes")
    match spec.granularity:
        case PerTensor():
            low, high = values.min(keepdims=True).reshape(1), values.max(keepdims=True).reshape(1)
        case PerBlock(axis, size):
            starts = np.arange(0, values.shape[axis], size)
            low, high = np.minimum.reduceat(values, starts, axis), np.maximum.reduceat(values, starts, axis)
        case granularity:
            others = tuple(i for i in range(values.ndim) if i != granularity.axis % values.ndim)
            low, high = values.min(axis=others), values.max(axis=others)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise CalibrationError("the data holds NaN or an infinity")
    return with_room_for_sums(Range(low, high), values, spec)


def with_room_for_sums(found: Range, values: npt.NDArray[Any], spec: Spec) -> Range:
    """Return the range of a weight, wide enough for the sums that its dtype promises to be exact."""
    if not spec.dtype.exact_sums:
        return found
    return Range(found.low, np.maximum(found.high, least_scale(values, axis_of(spec.granularity)) * spec.dtype.hi))


def encoding_from_range(observed: Range, spec: Spec) -> Encoding:
    """Return the encoding whose grid covers `observed`, extended to contain 0.

    Symmetric on an unsigned dtype means zero point 0 where nothing is negative, else the grid's middle.
    Minifloats use the largest finite value; `scale_bits` rounds scales up (powers of two:
    Jain et al. 2020, TQT, section 3).
    """
    low = np.minimum(np.asarray(observed.low, np.float32), np.float32(0))
    high = np.maximum(np.asarray(observed.high, np.float32), np.float32(0))
    if low.size and not (low.min() > -np.inf and high.max() < np.inf):  # False for NaN too
        raise CalibrationError("a range must be finite")
    if (np.asarray(observed.low) > np.asarray(observed.high)).any():
        raise CalibrationError("a range must have its minimum below its maximum")
    scale, zero_point = scale_and_zero_point(low, high, spec)
    scale = restrict_block_scales(scale, spec, np.maximum(-low, high).max(initial=0) if spec.scale_dtype else None)
    return Encoding(spec.dtype, scale, zero_point, axis_of(spec.granularity), block_size_of(spec.granularity))


def scale_and_zero_point(low: FloatArray, high: FloatArray, spec: Spec) -> tuple[FloatArray, npt.NDArray[np.int32]]:
    """Return the scale and zero point of ranges that contain 0, elementwise, for arrays of any shape.

    Scales that depend on those of other blocks are not restricted yet; see `restrict_block_scales`.
    """
    if spec.scale_dtype == float8e8m0:
        scale = shared_exponents(np.maximum(-low, high), spec.dtype)
        return scale, np.zeros(scale.shape, np.int32)
    scale, zero_point = (_symmetric if spec.symmetric else _asymmetric)(low, high, spec)
    return (of_whole_steps(scale, spec.scale_bits) if spec.fixed_range == (0.0, 1.0) else scale), zero_point


def of_whole_steps(scale: FloatArray, digits: int | None = None) -> FloatArray:
    """Return scales with which the range from 0 to 1 has a whole number of steps, in float32 too.

    A kernel may take the whole part of `1 / scale` for their number: of float32(1/255), which is above 1/255, that is
    254. The scale below it gives 255. Scales stay where so few binary digits have none that is as near.
    """
    steps = np.rint(1.0 / scale.astype(np.float64))
    mantissa, exponent = np.frexp(1.0 / np.maximum(steps, 1.0))
    below = np.ldexp(np.floor(np.ldexp(mantissa, digits or 24)), exponent - (digits or 24))
    return np.where(np.rint(1.0 / below) == steps, below, scale).astype(np.float32)


def _symmetric(low: FloatArray, high: FloatArray, spec: Spec) -> tuple[FloatArray, npt.NDArray[np.int32]]:
    lo, hi = spec.dtype.lo, spec.dtype.hi
    middle = 0
    if not spec.dtype.signed and (low < 0).any():
        middle = 1 << (spec.dtype.bits - 1)
    above, below = np.float32(hi - middle), np.float32(middle - lo)
    scale = high / above
    if below > 0:
        scale = np.maximum(scale, -low / below)
    zero_point = np.full(scale.shape, middle, np.int32)
    return _within_type(_positive(scale, spec), zero_point, low, high, spec), zero_point


def _asymmetric(low: FloatArray, high: FloatArray, spec: Spec) -> tuple[FloatArray, npt.NDArray[np.int32]]:
    lo, hi = spec.dtype.lo, spec.dtype.hi
    # halves first: high - low itself may overflow float32
    scale = _positive(high / np.float32(hi - lo) - low / np.float32(hi - lo), spec)
    zero_point = np.clip(np.rint(lo - low.astype(np.float64) / scale), lo, hi).astype(np.int32)
    return _within_type(scale, zero_point, low, high, spec), zero_point


def _positive(scale: FloatArray, spec: Spec) -> FloatArray:
    if spec.scale_dtype == float8e4m3fn or spec.dynamic == nvfp4.name:
        return np.maximum(scale.astype(np.float32), np.finfo(np.float32).tiny)  # what is coded is their share
    # a finer grid may have finer steps: the floor is on the range, as it is at 8 bits
    finer = np.float32(2.0 ** -max(spec.dtype.bits - 8, 0))
    floored = np.maximum(scale.astype(np.float32), SMALLEST_SCALE * finer)
    return floored if spec.scale_bits is None else round_up_to_digits(floored, spec.scale_bits)


def _within_type(
    scale: FloatArray, zero_point: npt.NDArray[np.int32], low: FloatArray, high: FloatArray, spec: Spec
) -> FloatArray:
    """Return scales with which no value of a range is quantized to one beyond the largest number of its float type.

    A scale that is rounded up may carry an end of the grid there: that of a mask of the lowest number, to infinity.
    """
    largest = _LARGEST_OF_DIGITS.get(spec.scale_bits or 0)
    if largest is None:
        return scale
    fits = np.maximum(-low, high) <= largest
    below, above = zero_point - spec.dtype.lo, spec.dtype.hi - zero_point
    for _ in range(_TIMES):  # a smaller scale may reach one level more
        wide = scale.astype(np.float64)
        levels = np.maximum(np.minimum(np.rint(-low / wide), below), np.minimum(np.rint(high / wide), above))
        mantissa, exponent = np.frexp(largest / np.maximum(levels, 1))
        most = np.ldexp(np.floor(np.ldexp(mantissa, spec.scale_bits or 24)), exponent - (spec.scale_bits or 24))
        scale = np.where(fits & (levels * wide > largest), most, wide).astype(np.float32)
    return scale
