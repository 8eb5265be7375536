"""Lower QuantizeLinear and DequantizeLinear, where values become codes and codes become values."""

from dataclasses import replace

import numpy as np
from onnx import NodeProto, TensorProto

from onnx_backend.integer.fixed_point.fixed_edges import to_accumulator
from onnx_backend.integer.ir.context import Args, LoweringContext
from onnx_backend.integer.ir.operations import Requantization
from onnx_backend.integer.ir.values import (
    GRIDS,
    ActivationEncoding,
    Array,
    BlockConstant,
    CodedConstant,
    Codes,
    Constant,
    Failed,
    FixedPoint,
    Integers,
    Lookup,
    Refused,
    Root,
    Value,
    dequantize_codes,
)
from onnx_backend.integer.lowering.codes import to_codes
from onnx_backend.integer.lowering.edges import from_stored_dtype
from onnx_backend.proto.nodes import attributes
from qsdk.core.numerics import affine

_ASSOCIATED: dict[int, tuple[int, int]] = {
    TensorProto.UINT8: (0, 255),
    TensorProto.INT8: (-128, 127),
    TensorProto.UINT4: (0, 15),
    TensorProto.INT4: (-8, 7),
    TensorProto.UINT16: (0, 65535),
    TensorProto.INT16: (-32768, 32767),
}
_WHOLE = frozenset({TensorProto.UINT8, TensorProto.INT8, TensorProto.UINT16, TensorProto.INT16})


def quantize(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower QuantizeLinear: requantize the value in front of it to codes."""
    value = args[0]
    scale = _scale(args[1])
    zero = args[2] if len(args) > 2 else None
    attrs = attributes(node)
    dtype = int(attrs.get("output_dtype", 0)) or int(TensorProto.UINT8)
    if isinstance(zero, Integers):
        dtype = zero.dtype
    points = _zero_points(zero, scale)
    if isinstance(value, Constant):
        return _quantized_constant(value, scale, points, dtype, attrs)
    encoding = activation_encoding(scale, points, dtype)
    name = node.output[0]
    if value is None or isinstance(value, Failed):
        return Codes(name, encoding)  # reported already; the nodes behind it are still examined
    codes = to_codes(ctx, to_accumulator(ctx, value, encoding), encoding, name)
    _note_softmax(ctx, value)
    found = Codes(codes, encoding, _root(value, codes, encoding) if ctx.composes else None)
    ctx.sites[name] = found
    return found


def _note_softmax(ctx: LoweringContext, value: Value) -> None:
    """Mark the requantization just recorded as that of a Softmax."""
    nodes = ctx.builder.nodes
    known, softmax = ctx.softmaxes.get(value.name, (None, None)) if isinstance(value, FixedPoint) else (None, None)
    if known is None or not isinstance(value, FixedPoint) or not isinstance(nodes[-1], Requantization):
        return
    # rows without a score may have been set to 0 in between, which they are in any case
    if value.scale is known.scale and value.constant is known.constant and value.masked == known.masked:
        nodes[-1] = replace(nodes[-1], softmax=softmax)


def _root(value: Value, codes: str, encoding: ActivationEncoding) -> Root | None:
    """Return the codes that a function of codes is a table of, else None."""
    if not isinstance(value, Lookup) or codes == value.name:
        return value.root if isinstance(value, Lookup) else None
    table = encoding.quantize(value.values)
    return Root(value.name, table) if value.root is None else Root(value.root.name, table[value.root.table])


def activation_encoding(scale: Array, points: Array, dtype: int) -> ActivationEncoding:
    """Return the encoding of an activation.

    Raises:
        Refused: it is not one positive scale on an integer grid of at most 16 bits.
    """
    if dtype not in GRIDS:
        name = TensorProto.DataType.Name(dtype)
        raise Refused(
            f"activations of {name} have no integer-only form in this version",
            "use an integer dtype of 4, 8 or 16 bits",
        )
    if scale.size != 1 and not np.unique(scale).size == np.unique(points).size == 1:
        raise Refused("its activation has more than one scale", "quantize activations per tensor")
    if not np.isfinite(scale).all() or not (scale > 0).all():
        raise Refused(f"its scale is {scale.reshape(-1)[0]}", "recalibrate: scales are positive and finite")
    zero = int(points.reshape(-1)[0]) + GRIDS[dtype][0]
    return ActivationEncoding(float(scale.reshape(-1)[0]), zero, dtype)


def dequantize(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower DequantizeLinear: of codes to a value with its encoding, of an initializer to a constant."""
    value = args[0]
    scale = _scale(args[1])
    points = _zero_points(args[2] if len(args) > 2 else None, scale)
    if isinstance(value, Codes):
        encoding = activation_encoding(scale, points, value.encoding.dtype)
        return dequantize_codes(value.name, encoding, value.root)
    if isinstance(value, Integers) and value.array is not None:
        return _dequantized_constant(value, scale, points, attributes(node))
    if isinstance(value, Integers) and value.dtype in _WHOLE:
        return _dequantized_tensor(ctx, node, value, activation_encoding(scale, points, value.dtype))
    raise Refused("its input is neither quantized nor a stored integer tensor", "quantize its input")


def _dequantized_tensor(ctx: LoweringContext, node: NodeProto, value: Integers, encoding: ActivationEncoding) -> Value:
    """Return an 8-bit or 16-bit tensor that enters as such (an integer input, a gathered table) as codes."""
    return dequantize_codes(from_stored_dtype(ctx.builder, value.name, encoding, f"{node.output[0]}.codes"), encoding)


def _scale(value: Value | None) -> Array:
    if isinstance(value, Constant):
        return value.values.astype(np.float32)
    raise Refused("its scale is not a constant", "store the scale as an initializer")


def _zero_points(value: Value | None, scale: Array) -> Array:
    if value is None:
        return np.zeros(scale.shape, np.int64)
    if isinstance(value, Integers) and value.array is not None:
        points = np.asarray(value.array, np.int64)
        if points.size == scale.size:
            return points.reshape(scale.shape)
        raise Refused("its zero point has another shape than its scale", "give both the same shape")
    raise Refused("its zero point is not a constant integer", "store the zero point as an initializer")


def _aligned(
    parameter: Array, shape: tuple[int, ...], attrs: dict[str, object]
) -> tuple[Array, int | None, int | None]:
    """Return a parameter that broadcasts against `shape`, the axis of its channels or blocks, and the blocks' size."""
    if parameter.size == 1 and (parameter.ndim == 0 or not shape or parameter.shape == (1,)):
        return parameter.reshape(()), None, None
    axis = int(attrs.get("axis", 1)) % len(shape)  # type: ignore[call-overload]
    block = int(attrs.get("block_size", 0)) or None  # type: ignore[call-overload]
    try:
        return affine.align(parameter, shape, axis, block), axis, block
    except ValueError as error:
        raise Refused(str(error), "repair the model: scale and tensor do not belong together") from error


def _dequantized_constant(value: Integers, scale: Array, points: Array, attrs: dict[str, object]) -> Constant:
    array = np.asarray(value.array).astype(np.int64)
    wide, axis, block = _aligned(scale, array.shape, attrs)
    integers = array - _aligned(points, array.shape, attrs)[0]
    values = affine.dequantize(integers.astype(np.float32), wide, np.float32(0))
    if block is not None and axis is not None:
        several = [i for i, size in enumerate(scale.shape) if size > 1]
        if axis in several or len(several) > 1:
            return Constant(values, blocks=BlockConstant(integers, scale.astype(np.float64), axis, block, value.dtype))
        axis = several[0] if several else None  # one block holds the whole axis
    return Constant(values, CodedConstant(integers, scale.reshape(-1).astype(np.float64), axis, value.dtype))


def _quantized_constant(value: Constant, scale: Array, points: Array, dtype: int, attrs: dict[str, object]) -> Integers:
    """Quantize a constant (weights that some exporters leave as float -> QuantizeLinear) at conversion time."""
    if dtype not in _ASSOCIATED:
        raise Refused(f"a constant quantized to {TensorProto.DataType.Name(dtype)}", "use an integer dtype")
    shape = value.values.shape
    lo, hi = _ASSOCIATED[dtype]
    wide, zero = _aligned(scale, shape, attrs)[0], _aligned(points, shape, attrs)[0]
    codes = affine.quantize(value.values, wide, zero.astype(np.float32), lo, hi)
    return Integers("", codes.astype(np.int64), dtype)
