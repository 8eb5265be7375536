"""Lower ops that move, copy or select values without changing them: they work on codes as they are; and Casts."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from onnx_backend.integer.fixed_point.fixed_arithmetic import whole_steps
from onnx_backend.integer.fixed_point.to_fixed import move_integers as move_fixed_point
from onnx_backend.integer.ir.context import Args, LoweringContext, constant_integers, gathered_as, integer_name, move
from onnx_backend.integer.ir.values import (
    GRIDS,
    INTEGER_TYPES,
    ActivationEncoding,
    CodedConstant,
    Codes,
    Constant,
    FixedPoint,
    FloatInput,
    Integers,
    Linear,
    Lookup,
    Movement,
    Pending,
    Refused,
    Value,
    append_movement,
    dequantize_codes,
)
from onnx_backend.proto.nodes import attributes

_BEFORE = "put a QuantizeLinear/DequantizeLinear pair in front of it"
_FEW = 256  # numbers that codes of 8 bits can distinguish
_ANY = ActivationEncoding(1.0, 0, TensorProto.UINT8)  # moves without a fill ignore it


def _movement(*, monotone: bool = False) -> Callable[[LoweringContext, NodeProto, Args], Value | tuple[Value, ...]]:
    """Make the lowering of a movement; `monotone` ops compare values, so codes must be in the order of values."""

    def lower(ctx: LoweringContext, node: NodeProto, args: Args) -> Value | tuple[Value, ...]:
        """Return the moved values: of a constant now, of codes by the same movement."""
        value = args[0]
        if isinstance(value, Constant):
            if all(arg is None or constant_integers(arg) is not None for arg in args[1:]):
                return _folded(node, value, args)
            value = as_movable(ctx, value)  # to where only a run knows, as a class token to the size of the batch
        if monotone and isinstance(value, Lookup) and np.any(np.diff(value.values) < 0):
            raise Refused("a decreasing function stands directly in front of it", _BEFORE)
        rest = tuple(integer_name(ctx, arg) for arg in args[1:])
        found = tuple(applied(ctx, value, Movement(node, rest, i), name) for i, name in enumerate(node.output))
        return found[0] if len(found) == 1 else found

    return lower


def applied(ctx: LoweringContext, value: Value | None, step: Movement, name: str) -> Value:
    """Apply a movement to codes now, to a pending value once its codes exist."""
    if isinstance(value, Lookup):
        return Lookup(move(ctx, step, value.name, value.encoding or _ANY, name), value.values, value.encoding)
    if isinstance(value, FixedPoint):
        return move_fixed_point(ctx, value, step)
    pending = None if value is None else append_movement(value, step)
    if pending is None:
        raise Refused("its input is not quantized", _BEFORE)
    return pending


def as_movable(ctx: LoweringContext, value: Constant) -> Lookup | Pending:
    """Return a constant as a value that nodes can move: its own codes, indices of few numbers, or a pending one.

    A pending value is quantized at conversion time, by the QuantizeLinear behind the movement.
    """
    codes = _own_codes(ctx, value)
    if codes is not None:
        return codes
    numbers, places = np.unique(value.values, return_inverse=True)
    if numbers.size > _FEW:
        return Pending(value)
    table = np.pad(numbers, (0, _FEW - numbers.size), mode="edge") if numbers.size else np.zeros(_FEW, np.float32)
    name = ctx.constant(places.reshape(value.values.shape), np.uint8)
    return Lookup(name, table.astype(np.float32), None)


def _own_codes(ctx: LoweringContext, value: Constant, name: str = "constant") -> Lookup | None:
    """Return a constant that is stored per tensor as its codes, None if it has none of at most 16 bits."""
    coded = value.coded
    if coded is None or coded.axis is not None or coded.error:
        return None
    low, high = int(coded.integers.min(initial=0)), int(coded.integers.max(initial=0))
    kind = TensorProto.UINT8 if high - low <= 255 else TensorProto.UINT16
    if high - low > GRIDS[kind][1]:
        return None
    zero = 128 if -128 <= low < 0 and high <= 127 else -low
    encoding = ActivationEncoding(float(coded.scale[0]), zero, kind)
    return Lookup(ctx.constant(coded.integers + zero, encoding.kind, name), encoding.values(), encoding)


def _folded(node: NodeProto, value: Constant, args: Args) -> Value:
    """Apply a movement to a constant at conversion time (a weight that is transposed behind its DequantizeLinear)."""
    coded, attrs = value.coded, attributes(node)
    if node.op_type == "Identity":
        return value
    if node.op_type == "Transpose":
        order = list(attrs.get("perm", range(value.values.ndim)[::-1]))
        if coded is not None:
            axis = None if coded.axis is None else order.index(coded.axis)
            coded = CodedConstant(coded.integers.transpose(order), coded.scale, axis, coded.dtype)
        return Constant(value.values.transpose(order), coded, value.blocks and value.blocks.transposed(order))
    wanted = _constant_shape(node, value, args)
    if wanted is not None:
        if coded is not None and coded.axis is None:
            integers = coded.integers.reshape(wanted)
            return Constant(value.values.reshape(wanted), CodedConstant(integers, coded.scale, None, coded.dtype))
        return Constant(value.values.reshape(wanted))
    raise Refused("it computes on a constant", "compute its result once and store it in the model")


def _constant_shape(node: NodeProto, value: Constant, args: Args) -> tuple[int, ...] | None:
    """Return the shape that a reshaping node gives a constant, None for other nodes and unknown shapes."""
    old = value.values.shape
    given = constant_integers(args[1]) if len(args) > 1 else None
    if node.op_type == "Reshape" and given is not None:
        sizes = [
            old[i] if size == 0 and not attributes(node).get("allowzero", 0) else size for i, size in enumerate(given)
        ]
        return np.empty(old, bool).reshape(sizes).shape
    if node.op_type == "Unsqueeze" and given is not None:
        return np.expand_dims(np.empty(old, bool), tuple(given)).shape
    if node.op_type == "Squeeze":
        return np.squeeze(np.empty(old, bool), None if given is None else tuple(given)).shape
    return None


def filled(ctx: LoweringContext, node: NodeProto, args: Args) -> Value | tuple[Value, ...] | None:
    """Lower ConstantOfShape of a float: its number, expanded to where only a run knows; None if it is an integer."""
    given = attributes(node).get("value")
    number = np.zeros((), np.float32) if given is None else given.reshape(())
    if number.dtype != np.float32:
        return None
    expand = helper.make_node("Expand", ["", *node.input], list(node.output), name=node.name)
    return _movement()(ctx, expand, [Constant(np.asarray(number)), *args])


def blocks(ctx: LoweringContext, node: NodeProto, args: Args) -> Value | tuple[Value, ...]:
    """Lower DepthToSpace and SpaceToDepth; the runtime has kernels for 8 bits, all else is reshaped and transposed."""
    value, attrs = args[0], attributes(node)
    if isinstance(value, Lookup) and (value.encoding is None or not value.encoding.wide) and value.values.size <= 256:
        return _movement()(ctx, node, args)
    (c, h, w), size = ctx.sizes(node.input[0], [1, 2, 3]), int(attrs["blocksize"])
    if node.op_type == "SpaceToDepth":
        split, order = [0, c, h // size, size, w // size, size], [0, 3, 5, 1, 2, 4]
        whole = [0, c * size**2, h // size, w // size]
    else:
        first = attrs.get("mode", "DCR") == "DCR"
        depth = c // size**2
        split = [0, size, size, depth, h, w] if first else [0, depth, size, size, h, w]
        order = [0, 3, 4, 1, 5, 2] if first else [0, 1, 4, 2, 5, 3]
        whole = [0, depth, h * size, w * size]
    reshape, transpose = (helper.make_node(kind, ["x"], ["y"]) for kind in ("Reshape", "Transpose"))
    transpose.attribute.append(helper.make_attribute("perm", order))
    steps = [
        Movement(reshape, (ctx.constant(split, np.int64),)),
        Movement(transpose),
        Movement(reshape, (ctx.constant(whole, np.int64),)),
    ]
    for step in steps:
        value = applied(ctx, value, step, node.output[0])
    assert value is not None  # the steps make one
    return value


def max_pool(ctx: LoweringContext, node: NodeProto, args: Args) -> Value | tuple[Value, ...]:
    """Lower MaxPool: the largest code is the code of the largest value, and padding never wins."""
    if len(node.output) > 1 and node.output[1]:
        raise Refused("its second output, the indices, is read", "write what reads them without indices")
    return _movement(monotone=True)(ctx, node, args)


def global_max_pool(ctx: LoweringContext, node: NodeProto, args: Args) -> Value | tuple[Value, ...]:
    """Lower GlobalMaxPool to ReduceMax, which has a uint8 kernel."""
    axes = list(range(2, ctx.rank(node.input[0])))
    name = ctx.constant(axes, np.int64)
    reduced = helper.make_node("ReduceMax", [node.input[0], name], list(node.output), name=node.name, keepdims=1)
    return _movement(monotone=True)(ctx, reduced, [args[0], Integers(name)])


def gather(ctx: LoweringContext, node: NodeProto, args: Args) -> Value | tuple[Value, ...]:
    """Lower Gather, also of rows of a stored table (an embedding)."""
    table = args[0]
    if not isinstance(table, Constant):
        return _movement()(ctx, node, args)
    rows = _own_codes(ctx, table, node.input[0]) or as_movable(ctx, table)
    return _movement()(ctx, node, [rows, *args[1:]])


def shape(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower Shape: a constant where all sizes are static; else the codes have the shape of the values."""
    value = args[0]
    sizes = ctx.shapes.get(node.input[0])
    if sizes is not None and None not in sizes:
        attrs = attributes(node)
        return Integers("", np.asarray(sizes, np.int64)[attrs.get("start", 0) : attrs.get("end")], TensorProto.INT64)
    if isinstance(value, Lookup | Codes | Integers):
        name = integer_name(ctx, value) if isinstance(value, Integers) else value.name
    elif isinstance(value, FloatInput) and not value.after:
        name = value.name
    elif isinstance(value, Linear) and not value.after and len(value.terms) == 1:
        name = value.terms[0].name
    elif isinstance(value, FixedPoint):
        name = value.name
    elif isinstance(value, Constant):
        whole = np.asarray(value.values.shape, np.int64)
        attrs = attributes(node)
        return Integers("", whole[attrs.get("start", 0) : attrs.get("end")], TensorProto.INT64)
    else:
        raise Refused(
            "the tensor it measures is computed together with the next ones", "take the Shape of a quantized tensor"
        )
    return Integers(ctx.node("Shape", [name], name=node.output[0], **attributes(node)), dtype=TensorProto.INT64)


def identity(ctx: LoweringContext, node: NodeProto, args: Args) -> Value | tuple[Value, ...]:
    """Drop Identity and inference-time Dropout."""
    if len(node.output) > 1 and node.output[1]:
        raise Refused("its second output, the mask, is read", "export the model in evaluation mode, without Dropout")
    value = args[0]
    assert value is not None  # the input is required by the standard
    return value


def pad(ctx: LoweringContext, node: NodeProto, args: Args) -> Value | tuple[Value, ...]:
    """Lower Pad: a constant is filled in as its code, which must be exact."""
    value, (pads, axes) = args[0], _of_all_axes(ctx, node, args)
    mode = attributes(node).get("mode", "constant")
    if mode != "constant":
        return applied(ctx, value, Movement(node, (pads, "", axes)), node.output[0])
    given = args[2] if len(args) > 2 else None
    if given is not None and not isinstance(given, Constant):
        raise Refused("its fill value is not a constant", "store the fill value as an initializer")
    fill = 0.0 if given is None else float(given.values.reshape(-1)[0])
    step = Movement(node, (pads, axes), fill=fill)
    if isinstance(value, Lookup) and not _has_code(value, fill):
        return Pending(value, (step,))
    return applied(ctx, value, step, node.output[0])


def _of_all_axes(ctx: LoweringContext, node: NodeProto, args: Args) -> tuple[str, str]:
    """Return the pads and the axes of a Pad, where both are known as pads of all axes.

    Between two Transposes ONNX Runtime's optimizer of these moves the pads, and not the axes that they are of.
    """
    pads, axes = (args[i] if i < len(args) else None for i in (1, 3))
    given, along, shape = constant_integers(pads), constant_integers(axes), ctx.shapes.get(node.input[0])
    if given is None or along is None or shape is None:
        return integer_name(ctx, pads), integer_name(ctx, axes)
    whole = np.zeros((2, len(shape)), np.int64)
    whole[:, along] = np.reshape(given, (2, -1))
    return ctx.constant(whole.reshape(-1)), ""


def _has_code(value: Lookup, number: float) -> bool:
    """Return True if a number is exactly the value of a code."""
    if value.encoding is None:
        return False
    code = int(value.encoding.quantize(number))
    return abs(float(value.values[code]) - number) <= 1e-6 * value.encoding.scale


#: Movements by op type; the data is the first input, all others are integers.
MOVES: Mapping[str, Callable[[LoweringContext, NodeProto, Args], Any]] = MappingProxyType(
    {
        **{name: _movement() for name in ("Expand", "Flatten", "GatherND", "Reshape", "Slice", "Split", "Squeeze")},
        "DepthToSpace": blocks,
        "GatherElements": _movement(),
        **{name: _movement() for name in ("Tile", "Transpose", "Unsqueeze")},
        "Dropout": identity,
        "Gather": gather,
        "GlobalMaxPool": global_max_pool,
        "Identity": identity,
        "MaxPool": max_pool,
        "ReduceMax": _movement(monotone=True),
        "ReduceMin": _movement(monotone=True),
        "Shape": shape,
        "SpaceToDepth": blocks,
    }
)


_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE)
#: Ops that may lie between a QuantizeLinear and its DequantizeLinear: they move codes, or select by their order.
CODE_MOVES = frozenset(MOVES) - {"Shape"} | {"Concat"}


def move_codes(ctx: LoweringContext, node: NodeProto, args: Args) -> Value | tuple[Value, ...]:
    """Lower a movement between QuantizeLinear and DequantizeLinear: the same movement of the codes."""
    if node.op_type == "Concat":
        parts = [arg for arg in args if isinstance(arg, Codes)]
        if len(parts) != len(args) or len({part.encoding.dtype for part in parts}) > 1:
            raise Refused("it joins codes with something else", "put a DequantizeLinear in front of each of its inputs")
        names, axis = [part.name for part in parts], int(attributes(node)["axis"])
        return Codes(ctx.node("Concat", names, name=node.output[0], axis=axis), parts[0].encoding)
    first = args[0]
    assert isinstance(first, Codes)  # the caller asks for nothing else
    found = MOVES[node.op_type](ctx, node, [dequantize_codes(first.name, first.encoding), *args[1:]])
    results = found if isinstance(found, tuple) else (found,)
    codes = tuple(Codes(value.name, first.encoding) for value in results if isinstance(value, Lookup))
    if len(codes) != len(results):
        raise Refused("it computes on quantized codes directly", "put a DequantizeLinear in front of it")
    return codes if isinstance(found, tuple) else codes[0]


def cast(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Drop a Cast to float32 or float64: the integers are the same; one to integers or bool is a function of codes."""
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
    """Return a function of codes, cut to whole numbers, or the truth of "it is not 0"."""
    kind, cut = helper.tensor_dtype_to_np_dtype(to), np.trunc(value.values.astype(np.float64))
    if to != TensorProto.BOOL:
        bounds = np.iinfo(kind)
        if not np.all((cut >= bounds.min) & (cut <= bounds.max)):
            raise Refused(f"its input can be beyond what {kind} holds", "clip its input, or cast to a wider type")
    table = value.values != 0 if to == TensorProto.BOOL else cut.astype(kind)
    return Integers(gathered_as(ctx, value.name, table, name), dtype=to)


def _is_some(ctx: LoweringContext, value: FixedPoint, name: str) -> Integers:
    """Return the truth of "fixed point is not 0", as of an inverted mask of integers."""
    value = whole_steps(ctx, value)
    if value.error or value.relative or value.masked or np.any(value.constant) or not np.all(value.scale):
        raise Refused("it asks whether fixed point is exactly 0", "put a QuantizeLinear/DequantizeLinear pair in front")
    zero = ctx.constant(0, np.int32 if value.narrow else np.int64)
    return Integers(ctx.node("Not", [ctx.node("Equal", [value.name, zero])], name=name), dtype=TensorProto.BOOL)
