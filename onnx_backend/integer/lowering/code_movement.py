"""Lowerings that pass values on: movements of codes without a DequantizeLinear, and casts between float types."""

import numpy as np
from onnx import NodeProto, TensorProto, helper

from onnx_backend.integer.fixed_point.sums import whole_steps
from onnx_backend.integer.ir.context import Args, LoweringContext
from onnx_backend.integer.ir.values import (
    Codes,
    FixedPoint,
    FloatInput,
    Integers,
    Lookup,
    Refused,
    Value,
    dequantize_codes,
)
from onnx_backend.integer.lowering.movement.moves import MOVES
from onnx_backend.integer.lowering.nonlinear.selection import gathered_as
from onnx_backend.integer.lowering.ops import INTEGER_TYPES
from onnx_backend.proto.nodes import attributes

_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE)
#: Ops that may lie between a QuantizeLinear and its DequantizeLinear: they move codes, or select by their order.
CODE_MOVES = frozenset(MOVES) - {"Shape"} | {"Concat"}


def move_codes(ctx: LoweringContext, node: NodeProto, args: Args) -> Value | tuple[Value, ...]:
    """Lower a movement between QuantizeLinear and DequantizeLinear: the same movement of the codes.

    Raises:
        Refused: it joins codes of several types, or the movement refuses.
    """
    if node.op_type == "Concat":
        parts = [arg for arg in args if isinstance(arg, Codes)]
        if len(parts) != len(args) or len({part.encoding.dtype for part in parts}) > 1:
            raise Refused("it joins codes with something else", "put a DequantizeLinear in front of each of its inputs")
        names, axis = [part.name for part in parts], int(attributes(node)["axis"])
        return Codes(ctx.builder.node("Concat", names, name=node.output[0], axis=axis), parts[0].encoding)
    first = args[0]
    assert isinstance(first, Codes)  # the caller asks for nothing else
    found = MOVES[node.op_type](ctx, node, [dequantize_codes(first.name, first.encoding), *args[1:]])
    results = found if isinstance(found, tuple) else (found,)
    codes = tuple(Codes(value.name, first.encoding) for value in results if isinstance(value, Lookup))
    if len(codes) != len(results):
        raise Refused("it computes on quantized codes directly", "put a DequantizeLinear in front of it")
    return codes if isinstance(found, tuple) else codes[0]


def cast(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Drop a Cast to float32 or float64: the integers are the same; one to integers or bool is a function of codes.

    Raises:
        Refused: it casts to a narrow float type, or something else than codes to integers.
    """
    value, to = args[0], int(attributes(node)["to"])
    if isinstance(value, Codes):
        raise Refused("it computes on quantized codes directly", "put a DequantizeLinear in front of it")
    name = TensorProto.DataType.Name(to).lower()
    if to in INTEGER_TYPES and isinstance(value, Lookup):
        return _as_integers(ctx, value, to, node.output[0])
    if to == TensorProto.BOOL and isinstance(value, FixedPoint):
        return _is_some(ctx, value, node.output[0])
    if to not in (*_FLOATS, TensorProto.FLOAT16, TensorProto.BFLOAT16):
        raise Refused(f"it turns a float tensor into {name}", "quantize its input and compute on the codes instead")
    before = ctx.types.get(node.input[0], TensorProto.UNDEFINED)
    known = (TensorProto.FLOAT,) if isinstance(value, FloatInput) else (*_FLOATS, TensorProto.UNDEFINED)
    if to not in _FLOATS or before not in known:
        narrow = name if to not in _FLOATS else TensorProto.DataType.Name(before).lower()
        raise Refused(
            f"it keeps its tensor in {narrow}",
            "quantize that site: drop the rule that keeps it float, or remove the casts",
        )
    assert value is not None  # the input is required by the standard
    return value


def _as_integers(ctx: LoweringContext, value: Lookup, to: int, name: str) -> Integers:
    """Return a function of codes, cut to whole numbers, or the truth of "it is not 0".

    Raises:
        Refused: the type does not hold a number that its input can have.
    """
    kind, cut = helper.tensor_dtype_to_np_dtype(to), np.trunc(value.values.astype(np.float64))
    if to != TensorProto.BOOL:
        bounds = np.iinfo(kind)
        if not np.all((cut >= bounds.min) & (cut <= bounds.max)):
            raise Refused(f"its input can be beyond what {kind} holds", "clip its input, or cast to a wider type")
    table = value.values != 0 if to == TensorProto.BOOL else cut.astype(kind)
    return Integers(gathered_as(ctx, value.name, table, name), dtype=to)


def _is_some(ctx: LoweringContext, value: FixedPoint, name: str) -> Integers:
    """Return the truth of "fixed point is not 0", as of an inverted mask of integers.

    Raises:
        Refused: it is not exact.
    """
    value, b = whole_steps(ctx, value), ctx.builder
    if value.error or value.relative or value.masked or np.any(value.constant) or not np.all(value.scale):
        raise Refused("it asks whether fixed point is exactly 0", "put a QuantizeLinear/DequantizeLinear pair in front")
    zero = b.constant(0, np.int32 if value.narrow else np.int64)
    return Integers(b.node("Not", [b.node("Equal", [value.name, zero])], name=name), dtype=TensorProto.BOOL)
