"""The quantization ops of the ONNX standard in NumPy: `KERNELS[op_type](attributes, *inputs)`, at every opset.

The formula is that of `qsdk.core.numerics.affine`, and sums of products are the exact ones of the integer reference.
All kernels raise ValueError for what the standard forbids and OverflowError where an accumulator leaves int32.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper

from onnx_backend.integer.reference.ops import OPS
from qsdk.core.numerics import affine

Array = npt.NDArray[Any]
Attributes = Mapping[str, Any]
Kernel = Callable[..., Array | tuple[Array, ...]]

_INTEGERS = frozenset({"int2", "int4", "int8", "int16", "uint2", "uint4", "uint8", "uint16"})
_MINIFLOATS = frozenset({"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"}) | frozenset(
    {"float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"}
)
_SCALES_ONLY = "float8_e8m0fnu"


def grid(dtype: Any) -> tuple[float, float]:
    """Return the smallest and the largest finite value of a NumPy (or ml_dtypes) type.

    Raises:
        ValueError: no tensor can be quantized to that type.
    """
    name = np.dtype(dtype).name
    if name in _INTEGERS:
        whole = ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
        return int(whole.min), int(whole.max)
    if name in _MINIFLOATS:
        real = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
        return float(real.min), float(real.max)
    raise ValueError(f"{name} cannot be quantized to; use an integer of 2 to 16 bits, float8, float6 or float4")


def _named(code: int) -> str:
    return str(TensorProto.DataType.Name(code))


def _stored_type(output_dtype: int, zero_point: Array | None) -> Any:
    """Return the type of QuantizeLinear's result: the zero point's, else the attribute's, else uint8."""
    if zero_point is None:
        return helper.tensor_dtype_to_np_dtype(output_dtype or TensorProto.UINT8)
    found = helper.np_dtype_to_tensor_dtype(zero_point.dtype)
    if output_dtype not in (0, found):
        raise ValueError(
            f"output_dtype {_named(output_dtype)} contradicts the zero point's type {_named(found)}; "
            "make them agree, or remove one of them"
        )
    return zero_point.dtype


def _aligned(attrs: Attributes, shape: tuple[int, ...], scale: Array, zero_point: Array | None) -> tuple[Array, Array]:
    """Scale and zero point so that they broadcast against a tensor of `shape`; the zero point in float32."""
    block = int(attrs.get("block_size", 0))
    if block < 0:
        raise ValueError(f"block_size is {block}; give a positive size, or 0 where there are no blocks")
    if zero_point is not None and zero_point.shape != scale.shape and (zero_point.size, scale.size) != (1, 1):
        raise ValueError(f"the zero point has the shape {zero_point.shape}, the scale {scale.shape}; make them equal")
    one = not block and scale.size == 1 and scale.ndim <= 1
    where = (shape, None if one else int(attrs.get("axis", 1)), block or None)
    zeros = np.zeros(scale.shape, np.float32) if zero_point is None else zero_point.astype(np.float32)
    return affine.align(scale, *where), affine.align(zeros, *where)


def _division_type(precision: int, scale: Array) -> Any:
    """Return the type in which QuantizeLinear divides: that of `precision`, else the scale's own.

    A float8e8m0 scale divides in float32, which holds every power of two, and an int32 scale in float64, which holds
    every int32: the standard names no precision for them, and neither type has quotients.
    """
    if precision:
        return helper.tensor_dtype_to_np_dtype(precision)
    if scale.dtype.name == _SCALES_ONLY:
        return np.dtype(np.float32)
    return np.dtype(np.float64) if scale.dtype == np.int32 else scale.dtype


def _wide(value: Array) -> Array:
    """Return a quotient in float64, which holds every one of the narrower types."""
    return value.astype(np.float64)


def _nearest(value: Array) -> Array:
    return affine.nearest(_wide(value))  # type: ignore[no-any-return]


def _codes(x: Array, scale: Array, zero_point: Array, dtype: Any, *, saturate: bool = True) -> Array:
    """Quantize x, dividing in the type of x and scale; rounding and all that follows is exact.

    NaN becomes the smallest integer, as in ONNX Runtime, and stays NaN in a float8 type.
    """
    lo, hi = grid(dtype)
    zero = _wide(zero_point)
    with np.errstate(all="ignore"):  # overflows saturate
        if np.dtype(dtype).name in _INTEGERS:
            codes = np.asarray(affine.quantize(x, scale, zero, lo, hi, _nearest))
            return np.where(np.isnan(codes), lo, codes).astype(np.int32).astype(dtype)
        # -0.0 is the zero that also leaves -0.0 as it is
        zero = np.where(zero == 0, -0.0, zero)
        ends = (lo, hi) if saturate else (-np.inf, np.inf)
        return np.asarray(affine.quantize(x, scale, zero, *ends, _wide)).astype(np.float32).astype(dtype)


def _quantize_linear(attrs: Attributes, x: Array, scale: Array, zero_point: Array | None = None) -> Array:
    dtype = _stored_type(int(attrs.get("output_dtype", 0)), zero_point)
    scales, zeros = _aligned(attrs, x.shape, scale, zero_point)
    kind = _division_type(int(attrs.get("precision", 0)), scale)
    with np.errstate(over="ignore"):
        operands = x.astype(kind), scales.astype(kind)
    return _codes(*operands, zeros, dtype, saturate=bool(attrs.get("saturate", 1)))


def _dequantize_linear(attrs: Attributes, x: Array, scale: Array, zero_point: Array | None = None) -> Array:
    """Multiply in float32 and round once to the result's type, as a product in that type would be."""
    code = int(attrs.get("output_dtype", 0))
    kind = helper.tensor_dtype_to_np_dtype(code) if code else scale.dtype
    if kind.name not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"the result would be {kind.name}; set output_dtype to FLOAT, FLOAT16 or BFLOAT16")
    if zero_point is not None and zero_point.dtype != x.dtype:
        raise ValueError(f"x is {x.dtype.name} and its zero point {zero_point.dtype.name}; give both one type")
    scales, zeros = _aligned(attrs, x.shape, scale, zero_point)
    with np.errstate(all="ignore"):  # the end of a grid may lie just beyond the type
        return np.asarray(affine.dequantize(x.astype(np.float32), scales.astype(np.float32), zeros)).astype(kind)


def _dynamic_quantize_linear(attrs: Attributes, x: Array) -> tuple[Array, ...]:
    low, high = (np.asarray(found) for found in (x.min(initial=0), x.max(initial=0)))
    with np.errstate(all="ignore"):
        scale, zero_point = (np.asarray(found, np.float32) for found in affine.dynamic_parameters(low, high))
    if not np.isfinite(scale):
        raise ValueError(f"the tensor reaches from {low} to {high}, which has no finite scale; look for inf and NaN")
    return _codes(x, scale, zero_point, np.uint8), scale, zero_point.astype(np.uint8)


def _along_filters(parameter: Array, rank: int) -> Array:
    """Return a scale or zero point of a filter, shaped to broadcast along axis 0 of the filters."""
    return parameter.reshape(() if parameter.size == 1 else (-1, *(1,) * (rank - 1)))


def _per_filter(what: str, parameter: Array | None, weight: Array) -> None:
    if parameter is not None and parameter.size != 1 and parameter.shape != weight.shape[:1]:
        raise ValueError(
            f"the {what} of the filters has the shape {parameter.shape}; give one value, or one for each of the "
            f"{weight.shape[0]} filters"
        )


def _conv_integer(attrs: Attributes, x: Array, w: Array, zx: Array | None = None, zw: Array | None = None) -> Array:
    _per_filter("zero point", zw, w)
    aligned = None if zw is None else _along_filters(zw, w.ndim)
    return np.asarray(OPS["ConvInteger"](attrs, x, w, None if zx is None else zx.reshape(()), aligned))


def _rows(parameter: Array | None, matrix: Array) -> Array | None:
    """Return a parameter of the left factor: one value, one per row (M,), or (..., M, 1)."""
    if parameter is None or parameter.size == 1:
        return None if parameter is None else parameter.reshape(())
    rows = matrix.shape[-2] if matrix.ndim > 1 else 0
    if parameter.shape == (rows,) and matrix.ndim == 2:
        return parameter.reshape(rows, 1)
    if parameter.ndim != matrix.ndim or parameter.shape[-1] != 1:
        raise ValueError(f"scale or zero point of shape {parameter.shape} do not fit the rows of {matrix.shape}")
    return parameter


def _columns(parameter: Array | None, matrix: Array) -> Array | None:
    """Return a parameter of the right factor: one value, one per column (N,), or (..., 1, N)."""
    if parameter is None or parameter.size == 1:
        return None if parameter is None else parameter.reshape(())
    per_column = parameter.shape == matrix.shape[-1:] and matrix.ndim == 2
    if not per_column and (parameter.ndim != matrix.ndim or parameter.shape[-2] != 1):
        raise ValueError(f"scale or zero point of shape {parameter.shape} do not fit the columns of {matrix.shape}")
    return parameter


def _matmul_integer(attrs: Attributes, a: Array, b: Array, za: Array | None = None, zb: Array | None = None) -> Array:
    return np.asarray(OPS["MatMulInteger"](attrs, a, b, _rows(za, a), _columns(zb, b)))


def _requantized(accumulator: Array, multiplier: Array, scale: Array, zero_point: Array) -> Array:
    """Return an accumulator on the result's grid as ONNX Runtime rounds it: one float32 multiplier, one rounding."""
    with np.errstate(all="ignore"):
        factor = np.asarray(multiplier / scale.astype(np.float32), np.float32)
        values = accumulator.astype(np.float32) * factor
    return _codes(values, np.ones((), np.float32), zero_point.astype(np.float32), zero_point.dtype)


def _qlinear_matmul(
    attrs: Attributes, a: Array, sa: Array, za: Array, b: Array, sb: Array, zb: Array, sy: Array, zy: Array
) -> Array:
    """Multiply quantized matrices; float8 factors (from opset 21 on) are multiplied and summed in float64."""
    if sy.size != 1 or zy.size != 1:
        raise ValueError(f"y_scale has the shape {sy.shape}, y_zero_point {zy.shape}; give one value for the result")
    if a.dtype.kind in "iu" and b.dtype.kind in "iu":
        accumulator = _matmul_integer({}, a, b, za, zb)
    else:
        left, right = _rows(za, a), _columns(zb, b)
        accumulator = np.asarray(np.matmul(_wide(a) - _wide(np.asarray(left)), _wide(b) - _wide(np.asarray(right))))
    left, right = (np.asarray(found, np.float32) for found in (_rows(sa, a), _columns(sb, b)))
    return _requantized(accumulator, left * right, sy.reshape(()), zy.reshape(()))


def _qlinear_conv(
    attrs: Attributes,
    x: Array,
    sx: Array,
    zx: Array,
    w: Array,
    sw: Array,
    zw: Array,
    sy: Array,
    zy: Array,
    bias: Array | None = None,
) -> Array:
    _per_filter("scale", sw, w)
    accumulator = _conv_integer(attrs, x, w, zx, zw)
    if bias is not None:
        accumulator = OPS["Add"]({}, accumulator, _along_filters(bias, w.ndim - 1))
    multiplier = sx.reshape(()) * _along_filters(sw, w.ndim - 1)
    return _requantized(accumulator, multiplier, sy.reshape(()), zy.reshape(()))


KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {
        "ConvInteger": _conv_integer,
        "DequantizeLinear": _dequantize_linear,
        "DynamicQuantizeLinear": _dynamic_quantize_linear,
        "MatMulInteger": _matmul_integer,
        "QLinearConv": _qlinear_conv,
        "QLinearMatMul": _qlinear_matmul,
        "QuantizeLinear": _quantize_linear,
    }
)
