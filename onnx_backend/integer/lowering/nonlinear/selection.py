"""Lower ops that choose among values or compare them: they need the order of values, never their arithmetic."""

import operator
from collections.abc import Callable, Mapping
from functools import reduce
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from onnx_backend.integer.ir.context import Args, LoweringContext, constant_integers, gathered_as, integer_name
from onnx_backend.integer.ir.values import (
    Array,
    Constant,
    Integers,
    Lookup,
    Refused,
    Selected,
    Value,
    clip_value,
)
from onnx_backend.proto.nodes import attributes

_QUANTIZE = "put a QuantizeLinear/DequantizeLinear pair before it"


# --- Max, Min, Where, Scatter: choosing ------------------------------------------------------------------------------


def extreme(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower Max and Min: of an activation and a constant scalar to a clip, else to the same op on codes."""
    largest = node.op_type == "Max"
    function = np.maximum if largest else np.minimum
    constants = [arg.values for arg in args if isinstance(arg, Constant)]
    parts: list[Value] = [arg for arg in args if arg is not None and not isinstance(arg, Constant)]
    if constants:
        folded = np.asarray(reduce(function, constants))
        if not parts or folded.size > 1 or folded.ndim > 1:
            parts.append(Constant(folded))
        else:
            bound = float(folded.reshape(-1)[0])
            limits = (bound, np.inf) if largest else (-np.inf, bound)
            # one operand suffices: the extreme of all is the bounded one's with the others
            bounded = clip_value(parts[0], *limits)
            if bounded is None:
                raise Refused("one of its operands is not quantized", _QUANTIZE)
            parts[0] = bounded
    if len(parts) == 1:
        return parts[0]
    return select(ctx, node, tuple(range(len(parts))), tuple(parts), monotone=True)


def where(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower Where with a boolean condition to Where on codes."""
    condition, yes, no = args
    known = condition.array if isinstance(condition, Integers) else None
    if known is not None and isinstance(yes, Constant) and isinstance(no, Constant):
        return Constant(np.where(known, yes.values, no.values))
    if yes is None or no is None:
        raise Refused("a branch is missing", "give both branches")
    return select(ctx, node, (integer_name(ctx, condition), 0, 1), (yes, no))


def scatter(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower ScatterND and ScatterElements, which write codes over codes."""
    reduction = attributes(node).get("reduction", "none")
    if reduction not in ("none", "max", "min"):
        raise Refused(f"reduction={reduction!r} computes on codes", "write the reduction with ops of its own")
    data, indices, updates = args
    if data is None or updates is None:
        raise Refused("an operand is missing", "give data, indices and updates")
    return select(ctx, node, (0, integer_name(ctx, indices), 1), (data, updates), monotone=reduction != "none")


def trilu(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower Trilu of static sizes to a Where with a stored mask."""
    value = args[0]
    rows, columns = ctx.sizes(node.input[0], [-2, -1])
    given = constant_integers(args[1]) if len(args) > 1 and args[1] is not None else [0]
    if given is None:
        raise Refused("its diagonal is not constant", "store k as an initializer")
    upper = bool(attributes(node).get("upper", 1))
    ones = np.ones((rows, columns), bool)
    mask = np.triu(ones, given[0]) if upper else np.tril(ones, given[0])
    if isinstance(value, Constant):
        return Constant(np.where(mask, value.values, np.float32(0)))
    if value is None:
        raise Refused("its input is missing", "give its input")
    choose = helper.make_node("Where", ["m", "x", "z"], list(node.output), name=node.name)
    zero = Constant(np.zeros((), np.float32))
    return select(ctx, choose, (ctx.constant(mask), 0, 1), (value, zero))


def select(
    ctx: LoweringContext,
    node: NodeProto,
    inputs: tuple[str | int, ...],
    parts: tuple[Value, ...],
    *,
    monotone: bool = False,
) -> Value:
    """Return a selection: written at once if all parts share one function of codes, else when it is quantized."""
    if any(isinstance(part, Integers) for part in parts):
        raise Refused("it mixes integer and float tensors", "quantize the integer operand")
    first = next((part for part in parts if isinstance(part, Lookup)), None)
    names = [None if first is None else _shared(ctx, first, part) for part in parts]
    if first is None or None in names or (monotone and np.any(np.diff(first.values) < 0)):
        return Selected(node, inputs, parts)
    written = [str(names[i]) if isinstance(i, int) else i for i in inputs]
    name = ctx.node(node.op_type, written, name=node.output[0], **attributes(node))
    return Lookup(name, first.values, first.encoding)


def _shared(ctx: LoweringContext, first: Lookup, part: Value) -> str | None:
    """Return the codes of a part if they are codes of `first` too: the same function, or a constant of its values."""
    if isinstance(part, Lookup):
        return part.name if np.array_equal(part.values, first.values) else None
    if isinstance(part, Constant) and first.encoding is not None:
        codes = first.encoding.quantize(part.values)
        if np.array_equal(first.values[codes], part.values.astype(np.float32)):
            return ctx.constant(codes, first.encoding.kind)
    return None


# --- comparisons -----------------------------------------------------------------------------------------------------


def _comparison(function: Callable[[Array, Array], Array]) -> Callable[[LoweringContext, NodeProto, Args], Value]:
    """Make the lowering of a comparison of quantized tensors and constants; it is exact.

    Every value is replaced by its rank among all values that either operand can have: ranks compare as the float32
    values do, whatever the scales, and equal values have equal ranks.
    """

    def lower(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
        """Return the comparison as booleans: by a table beside a constant, else by ranks."""
        left, right = (_finite(arg, what) for arg, what in zip(args, ("first", "second"), strict=True))
        op = node.op_type
        if isinstance(left, Constant) and isinstance(right, Constant):
            return Integers("", function(left.values, right.values), TensorProto.BOOL)
        for side, other, turned in ((left, right, False), (right, left, True)):
            if isinstance(side, Lookup) and isinstance(other, Constant) and other.values.size == 1:
                if other.values.ndim > 1:
                    break
                value = other.values.reshape(())
                table = function(value, side.values) if turned else function(side.values, value)
                return Integers(gathered_as(ctx, side.name, table, node.output[0]), dtype=TensorProto.BOOL)
        same = np.array_equal(left.values, right.values) and np.all(np.diff(left.values) > 0)
        if isinstance(left, Lookup) and isinstance(right, Lookup) and same:
            return Integers(ctx.node(op, [left.name, right.name], name=node.output[0]), dtype=TensorProto.BOOL)
        ranks = np.unique(np.concatenate([left.values.reshape(-1), right.values.reshape(-1)]))
        names = [_ranked(ctx, side, ranks) for side in (left, right)]
        return Integers(ctx.node(op, names, name=node.output[0]), dtype=TensorProto.BOOL)

    return lower


def _finite(value: Value | None, what: str) -> Lookup | Constant:
    if not isinstance(value, Lookup | Constant):
        raise Refused(f"its {what} operand is a float tensor", _QUANTIZE)
    if np.any(np.isnan(value.values)):
        raise Refused(f"its {what} operand can be NaN", "repair the constant, or clip the input away from the pole")
    return value


def _ranked(ctx: LoweringContext, value: Lookup | Constant, ranks: Array) -> str:
    places = np.searchsorted(ranks, value.values).astype(np.int32)
    if isinstance(value, Constant):
        return ctx.constant(places)
    return gathered_as(ctx, value.name, places, f"{value.name}.rank")


# --- ArgMax, ArgMin, TopK: order -------------------------------------------------------------------------------------


def arg_extreme(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower ArgMax and ArgMin: codes, or ranks where codes are not in the order of values, decide."""
    ordered = _ordered(ctx, args[0])
    name = ctx.node(node.op_type, [ordered.name], name=node.output[0], **attributes(node))
    return Integers(name, dtype=TensorProto.INT64)


def top_k(ctx: LoweringContext, node: NodeProto, args: Args) -> tuple[Value, ...]:
    """Lower TopK on codes; values stay codes, indices are integers, and among equals the smaller index comes first."""
    ordered = _ordered(ctx, args[0])
    outputs = [ctx.fresh(name or f"{ctx.label}.unused") for name in (*node.output, "")[:2]]
    inputs = [ordered.name, integer_name(ctx, args[1])]
    ctx.nodes.append(helper.make_node("TopK", inputs, outputs, name=f"{outputs[0]}_node", **attributes(node)))
    values = Lookup(outputs[0], ordered.values, ordered.encoding)
    return (values, Integers(outputs[1], dtype=TensorProto.INT64))[: len(node.output)]


def _ordered(ctx: LoweringContext, value: Value | None) -> Lookup:
    """Return a tensor whose codes compare as its values do: equal where they are equal."""
    if not isinstance(value, Lookup):
        raise Refused("its input is not a quantized activation", _QUANTIZE)
    if np.all(np.diff(value.values) > 0):
        return value
    if np.any(np.isnan(value.values)):
        raise Refused("its input can be NaN", "clip its input away from the pole")
    distinct, ranks = np.unique(value.values, return_inverse=True)
    return Lookup(
        gathered_as(
            ctx, value.name, ranks.astype(np.uint8 if distinct.size <= 256 else np.int32), f"{value.name}.rank"
        ),
        distinct,
        None,
    )


#: Choosing, comparing and ordering by op type.
SELECTIONS: Mapping[str, Callable[[LoweringContext, NodeProto, Args], Any]] = MappingProxyType(
    {
        "ArgMax": arg_extreme,
        "ArgMin": arg_extreme,
        "Equal": _comparison(operator.eq),
        "Greater": _comparison(operator.gt),
        "GreaterOrEqual": _comparison(operator.ge),
        "Less": _comparison(operator.lt),
        "LessOrEqual": _comparison(operator.le),
        "Max": extreme,
        "Min": extreme,
        "TopK": top_k,
        "Trilu": trilu,
    }
)
