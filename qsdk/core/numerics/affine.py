"""The quantization formula, once, for NumPy, PyTorch and the integer lowering.

Duck-typed: `/`, `.round()`, `+` and `.clip()` exist on NumPy arrays and torch tensors and agree bit for bit
(half to even). Order matters: divide, round, add the zero point, saturate (ONNX QuantizeLinear). Adding the
zero point before rounding, or multiplying by 1/scale, results in other integers.
"""

import math
from collections.abc import Callable
from typing import Any

from qsdk.core.numerics.dtypes import DType

Rounding = Callable[[Any], Any]
SMALLEST = 2.0**-126  # the smallest normal float32
_LARGEST_PRODUCT = 448.0 * 6.0  # of a float8e4m3fn and a float4e2m1
_LEAST_PEAK = _LARGEST_PRODUCT * 2.0**-128


def nearest(value: Any) -> Any:
    """Round to the nearest integer, half to even."""
    return value.round()


def quantize(x: Any, scale: Any, zero_point: Any, lo: float, hi: float, rounding: Rounding = nearest) -> Any:
    """Return `clip(round(x / scale) + zero_point, lo, hi)`, still in x's float type.

    `scale` and `zero_point` broadcast against x (see `align`); `zero_point` is in x's type.
    """
    return (rounding(x / scale) + zero_point).clip(lo, hi)


def dequantize(q: Any, scale: Any, zero_point: Any) -> Any:
    """Return `(q - zero_point) * scale`; `q` is in the float type of the result."""
    return (q - zero_point) * scale


def fake_quantize(x: Any, scale: Any, zero_point: Any, lo: float, hi: float, rounding: Rounding = nearest) -> Any:
    """Quantize and dequantize x: return the nearest point of its grid."""
    return dequantize(quantize(x, scale, zero_point, lo, hi, rounding), scale, zero_point)


def dynamic_parameters(low: Any, high: Any) -> tuple[Any, Any]:
    """Return the scale and zero point of uint8 for a tensor with these extremes, as ONNX's DynamicQuantizeLinear does.

    The range is extended to 0. A tensor of zeros has the scale 1, as in ONNX Runtime.
    """
    low, high = low.clip(None, 0), high.clip(0, None)
    scale = (high - low) / 255
    scale = scale + (scale == 0)
    return scale, (-low / scale).clip(0, 255).round()


def token_scale(peak: Any, hi: float) -> Any:
    """Return the scale of a signed grid up to `hi` for rows with these largest values, as compressed-tensors does.

    127.5 steps of int8 reach the largest value, which is clipped to 127. A row of zeros has the scale 1.
    """
    scale = peak / (hi + 0.5)
    return scale + (scale == 0)


def block_scale(peak: Any) -> Any:
    """Return the scale of int8 for blocks of a layer's input with these largest absolute values.

    As the kernels of ONNX Runtime have it (MlasQNBitGemm with int8 inputs): 127 steps reach the largest value. A block
    of zeros has the smallest normal float32.
    """
    return (peak / 127).clip(SMALLEST, None)


def power_of_two_scale(peak: Any, dtype: DType, floor_power: Rounding) -> Any:
    """Return the power of two that scales blocks with these largest absolute values, for elements of a dtype.

    `2**(floor(log2(peak)) - emax)`, emax the exponent of the dtype's largest value (OCP Microscaling Formats 1.0,
    section 6.3). With floats a peak of 1.75 or more times a power of two counts as the next one, as compressed-tensors
    computes it for MXFP4 and MXFP8 and torchao's mode EVEN for MXFP4: less is clipped so. `floor_power` returns the
    largest power of two up to each of its arguments, 0 for 0 and for subnormals. A block of zeros has the smallest
    scale that float8e8m0 can hold, 2**-127.
    """
    power = floor_power(peak)
    if not dtype.is_integer:
        power = floor_power(peak + power / 4)
    return (power * 2.0 ** (1 - math.frexp(dtype.hi)[1])).clip(2.0**-127, 2.0**127)


def float8_divisor(peak: Any) -> Any:
    """Return what NVFP4's float8 scales are divided by, its global scale, for a tensor's largest absolute value.

    The largest block scale is then 448 (compressed-tensors 0.20, `generate_gparam`). A tensor of zeros, or of less
    than float32 has a quotient for, has 1.
    """
    # not one division: torch multiplies by the reciprocal where a number is divided by a tensor
    return 1 / (peak + (peak < _LEAST_PEAK) * (_LARGEST_PRODUCT - peak)) * _LARGEST_PRODUCT


def float8_codes(scale: Any, divisor: Any, cast: Rounding) -> Any:
    """Return the float8 values that over `divisor` are nearest to scales of blocks, NVFP4's.

    `cast` rounds to float8e4m3fn. What rounds to 0 is an eighth (compressed-tensors 0.20, `calculate_qparams`).
    """
    codes = cast((divisor * scale).clip(None, 448.0))
    return codes + (codes == 0) * (codes * 0 + 0.125)


def saturate(value: Any, lo: float, hi: float) -> Any:
    """Return the value, or the end of the interval that it is beyond."""
    return value.clip(lo, hi)


def fake_quantize_minifloat(
    x: Any, scale: Any, dtype: DType, cast: Rounding, clip: Callable[[Any, float, float], Any] = saturate
) -> Any:
    """Fake-quantize x to a float8 or float4: divide, saturate to the largest finite value, cast, multiply.

    `cast` rounds its argument to the minifloat's values and returns it in x's type (ml_dtypes in NumPy,
    torch's own float8 types in PyTorch). `clip` saturates.
    """
    return cast(clip(x / scale, dtype.lo, dtype.hi)) * scale


def round_to_float4(magnitude: Any) -> Any:
    """Return magnitudes of up to 6 at 0, 0.5, 1, 1.5, 2, 3, 4 or 6; a tie goes to the value with an even code."""
    # steps of 0.5 below 2, of 1 below 4, else of 2: in each of them the even multiple has the even code
    step = ((magnitude >= 2) + 1) * ((magnitude >= 4) + 1) * 0.5
    return (magnitude / step).round() * step


def align(parameter: Any, shape: tuple[int, ...], axis: int | None, block_size: int | None) -> Any:
    """Reshape a scale or zero point so that it broadcasts against a tensor of `shape`.

    Per tensor (`axis` None): shape () or (1,), returned with one element. Per channel: shape (C,), C =
    shape[axis]. Per block: x's rank, `ceil(shape[axis] / block_size)` along axis, repeated to full length.
    """
    result = tuple(parameter.shape)
    if axis is None:
        if math.prod(result) != 1:
            raise ValueError(f"a scale of shape {result} is not one scale per tensor; name the channel axis")
        return parameter.reshape(())
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"axis {axis} is outside a tensor of shape {shape}")
    axis %= len(shape)
    if block_size is None:
        if result != (shape[axis],):
            raise ValueError(
                f"a scale of shape {result} does not fit the {shape[axis]} channels (axis {axis}) of {shape}"
            )
        return parameter.reshape(tuple(shape[axis] if i == axis else 1 for i in range(len(shape))))
    blocks = -(-shape[axis] // block_size)
    if result != (*shape[:axis], blocks, *shape[axis + 1 :]):
        raise ValueError(f"a scale of shape {result} does not fit blocks of {block_size} (axis {axis}) in {shape}")
    # an array of NumPy repeats its elements, a tensor of torch itself, so that its method for elements has another name
    repeat = getattr(parameter, "repeat_interleave", parameter.repeat)
    return repeat(block_size, axis)[(slice(None),) * axis + (slice(shape[axis]),)]
