"""What lets values pass: movements of codes that no DequantizeLinear precedes, and casts between float types."""

from onnx import NodeProto, TensorProto

from onnx_backend.integer.lowering.moves import MOVES
from onnx_backend.integer.recording.context import Args, Context, attributes
from onnx_backend.integer.recording.values import Codes, FloatInput, Lookup, Refused, Value, dequantized

_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE)
#: What may stand between a QuantizeLinear and its DequantizeLinear: it moves codes, or selects by their order.
CODE_MOVES = frozenset(MOVES) - {"Shape"} | {"Concat"}


def moved_codes(ctx: Context, node: NodeProto, args: Args) -> Value | tuple[Value, ...]:
    """Lower a movement between QuantizeLinear and DequantizeLinear: the same movement of the codes.

    Raises:
        Refused: it joins codes of several types, or what the movement refuses.
    """
    if node.op_type == "Concat":
        parts = [arg for arg in args if isinstance(arg, Codes)]
        if len(parts) != len(args) or len({part.encoding.dtype for part in parts}) > 1:
            raise Refused("it joins codes with something else", "put a DequantizeLinear in front of each of its inputs")
        names, axis = [part.name for part in parts], int(attributes(node)["axis"])
        return Codes(ctx.builder.node("Concat", names, name=node.output[0], axis=axis), parts[0].encoding)
    first = args[0]
    assert isinstance(first, Codes)  # the caller asks for nothing else
    found = MOVES[node.op_type](ctx, node, [dequantized(first.name, first.encoding), *args[1:]])
    results = found if isinstance(found, tuple) else (found,)
    codes = tuple(Codes(value.name, first.encoding) for value in results if isinstance(value, Lookup))
    if len(codes) != len(results):
        raise Refused("it computes on quantized codes directly", "put a DequantizeLinear in front of it")
    return codes if isinstance(found, tuple) else codes[0]


def cast(ctx: Context, node: NodeProto, args: Args) -> Value:
    """Drop a Cast to float32 or float64: the integers behind a float tensor are the same.

    Raises:
        Refused: it casts to another type.
    """
    value, to = args[0], int(attributes(node)["to"])
    if isinstance(value, Codes):
        raise Refused("it computes on quantized codes directly", "put a DequantizeLinear in front of it")
    name = TensorProto.DataType.Name(to).lower()
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
