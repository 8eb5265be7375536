"""The edges of fixed point: integers that are cast to float, and values in front of a quantizer."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from onnx import NodeProto, TensorProto

from onnx_backend.integer.fixed_point.fixed_arithmetic import constant64, term
from onnx_backend.integer.fixed_point.to_fixed import to_fixed
from onnx_backend.integer.ir.context import Args, LoweringContext
from onnx_backend.integer.ir.values import (
    ActivationEncoding,
    Constant,
    FixedPoint,
    Integers,
    Joined,
    Lookup,
    Refused,
    Selected,
    Value,
)
from onnx_backend.proto.nodes import attributes

_SMALL: Mapping[int, type] = MappingProxyType(
    {
        TensorProto.INT8: np.int8,
        TensorProto.INT16: np.int16,
        TensorProto.UINT16: np.uint16,
        TensorProto.INT32: np.int32,
    }
)
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)


def cast_to_float(ctx: LoweringContext, node: NodeProto, args: Args) -> Value | None:
    """Return integers (constants, functions of bool or uint8, fixed point) as the numbers they are; else None.

    64-bit integers saturate beyond 2**53, which float32 does not hold either.
    """
    value = args[0]
    if node.op_type != "Cast" or attributes(node)["to"] not in _FLOATS or not isinstance(value, Integers):
        return None
    if value.array is not None:
        return Constant(value.array.astype(np.float32))
    b = ctx.builder
    kind = value.dtype or ctx.types.get(node.input[0], TensorProto.UNDEFINED)
    if kind == TensorProto.BOOL:
        return Lookup(b.cast(value.name, TensorProto.UINT8), np.asarray([0, 1], np.float32), None)
    if kind == TensorProto.UINT8:
        return Lookup(value.name, np.arange(256, dtype=np.float32), None)
    if kind in _SMALL:
        info = np.iinfo(_SMALL[kind])
        narrow = b.cast(value.name, TensorProto.INT32)
        return FixedPoint(
            narrow, np.ones(()), int(info.min), int(info.max), narrow=True, typed=kind == TensorProto.INT32
        )
    if kind != TensorProto.INT64:
        raise Refused("it takes uint32 or uint64 for numbers", "cast to int64 first")
    name, top = value.name, 1 << 53
    for op, bound in (("Less", -top), ("Greater", top)):
        limit = constant64(ctx, bound)
        name = b.node("Where", [b.node(op, [name, limit]), limit, name])
    return FixedPoint(name, np.ones(()), -top, top, typed=True)


def to_accumulator(ctx: LoweringContext, value: Value, encoding: ActivationEncoding) -> Value:
    """Convert fixed point to one int32 accumulator, so that it can be requantized to `encoding`."""
    if isinstance(value, Joined | Selected) and any(isinstance(part, FixedPoint) for part in _parts(value)):
        value = to_fixed(ctx, value)
    if not isinstance(value, FixedPoint):
        return value
    # one step beyond the grid on both sides: everything further out saturates as well
    reals = ((-encoding.zero_point - 1) * encoding.scale, (encoding.hi - encoding.zero_point + 1) * encoding.scale)
    value = replace(value, source=value.source or ctx.builder.behind)
    return term(ctx, value, reals, encoding.scale * 2.0**-16)


def _parts(value: Value) -> list[Value]:
    if isinstance(value, Joined | Selected):
        return [inner for part in value.parts for inner in _parts(part)]
    return [value]
