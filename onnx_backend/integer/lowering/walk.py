"""Walk over a Q/DQ graph to find the value of every tensor, and the nodes that cannot be converted."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto, helper

from onnx_backend.integer.ir.context import LoweringContext, label
from onnx_backend.integer.ir.values import (
    Array,
    Codes,
    Constant,
    Failed,
    Floating,
    FloatInput,
    Integers,
    Lookup,
    Refused,
    Value,
)
from onnx_backend.integer.lowering.code_movement import CODE_MOVES, move_codes
from onnx_backend.integer.lowering.float_islands import Islands, keep_float
from onnx_backend.integer.lowering.ops import INTEGER_TYPES, stored
from onnx_backend.integer.lowering.registry import LOWERINGS, copy_node
from onnx_backend.integer.lowering.unsupported import refusal, require_no_bodies
from onnx_backend.passes.fold_constants import evaluate, fold
from onnx_backend.proto.graph_queries import producers
from onnx_backend.proto.nodes import attributes, metadata
from onnx_backend.proto.subgraphs import reads
from onnx_backend.qdq.narrow_regions import TYPE_KEY

QDQ = ("QuantizeLinear", "DequantizeLinear")
_OPTIONAL = ("BatchNormalization", "Dropout", "LayerNormalization", "MaxPool")
#: Operators that leave stored integers as they are; a Sum does of one operand, which keeps a runtime from fusing.
_AS_THEY_ARE = CODE_MOVES | {"Sum"}
_LARGEST_FOLDED = 1 << 22  # elements of a constant that is computed at conversion time


@dataclass(frozen=True)
class Refusal:
    """A node that cannot be converted, why, and the remedy."""

    node: str
    op_type: str
    reason: str
    remedy: str


def walk(model: ModelProto, ctx: LoweringContext, islands: Islands) -> tuple[dict[str, Value], list[Refusal]]:
    """Return the value of every tensor; nodes behind a refused one are skipped until the next QuantizeLinear."""
    values: dict[str, Value] = {tensor.name: stored(tensor) for tensor in model.graph.initializer}
    refusals: list[Refusal] = []
    for info in model.graph.input:
        if info.name in values:
            continue
        kind = info.type.tensor_type.elem_type
        values[info.name] = Integers(info.name, dtype=kind) if kind in INTEGER_TYPES else FloatInput(info.name)
    read = {name for node in model.graph.node for name in reads(node)} | {info.name for info in model.graph.output}
    makers = {name: label(node) for node in model.graph.node for name in node.output}
    narrow = _narrow_casts(model)
    for given in model.graph.node:
        node = _trimmed(given, read)
        found: Value | tuple[Value, ...] = Failed()
        args = [values.get(name, Failed()) if name else None for name in node.input]
        if not any(isinstance(arg, Failed) for arg in args) or node.op_type == "QuantizeLinear":
            ctx.builder.label, ctx.builder.behind = label(node), makers.get(node.input[0] if node.input else "", "")
            points = [arg.encoding.zero_point for arg in args if isinstance(arg, Lookup) and arg.encoding]
            ctx.builder.facts[label(node)] = {"op_type": node.op_type, "input_zero_points": points}
            try:
                kept = islands.match(node) if node.op_type not in QDQ else False
                found = keep_float(ctx, node, args) if kept else _lowered(ctx, node, args)
            except Refused as refused:
                named = narrow.get(node.output[0], node)
                found_so = Refusal(label(named), named.op_type, refused.reason, refused.remedy)
                refusals += [] if found_so in refusals else [found_so]
        results = found if isinstance(found, tuple) else (found,) * len(node.output)
        values.update(zip(node.output, results, strict=False))
    return values, refusals


def _narrow_casts(model: ModelProto) -> dict[str, NodeProto]:
    """Return the result of each cast that stands for a narrow float type -> the op that computes in that type.

    Those casts are not in the file: it holds the op and its tensors in the type itself.
    """
    found: dict[str, NodeProto] = {}
    made_by, casts = producers(model.graph.node), {}
    for node in model.graph.node:
        if node.op_type == "Cast":
            casts[node.output[0]] = node
            maker = made_by.get(node.input[0])
            if maker is not None and TYPE_KEY in metadata(maker):
                found[node.output[0]] = maker
    for node in model.graph.node:
        if TYPE_KEY in metadata(node):
            found.update({name: node for name in node.input if name in casts})
    return found


def _trimmed(node: NodeProto, read: Collection[str]) -> NodeProto:
    """Return a node without unread optional outputs (a mask, indices), which have no integer form."""
    if node.op_type not in _OPTIONAL or all(name in read for name in node.output[1:]):
        return node
    trimmed = NodeProto()
    trimmed.CopyFrom(node)
    trimmed.output[:] = [node.output[0], *(name if name in read else "" for name in node.output[1:])]
    while trimmed.output and not trimmed.output[-1]:
        trimmed.output.pop()
    return trimmed


def _lowered(ctx: LoweringContext, node: NodeProto, args: list[Value | None]) -> Value | tuple[Value, ...]:
    standard = node.domain in ("", "ai.onnx") or (node.domain == "com.microsoft" and node.op_type in QDQ)
    if not standard:
        raise Refused(
            f"it is of domain {node.domain!r}",
            "write it with standard operators: export the model without fusing operators for a runtime",
        )
    if any(isinstance(arg, Floating) for arg in args) and node.op_type != "QuantizeLinear":
        raise Refused("it reads a tensor that allow_float keeps float", "name it in allow_float too, or quantize it")
    folded = _folded(ctx, node, args, last=node.op_type not in _AS_THEY_ARE)
    if folded is not None:
        return folded
    try:
        return _by_its_op(ctx, node, args)
    except Refused:
        folded = _folded(ctx, node, args, last=True)
        if folded is None:
            raise
        return folded


def _by_its_op(ctx: LoweringContext, node: NodeProto, args: list[Value | None]) -> Value | tuple[Value, ...]:
    lowering = LOWERINGS.get(node.op_type)
    require_no_bodies(node)
    if args and isinstance(args[0], Codes) and node.op_type in CODE_MOVES:
        return move_codes(ctx, node, args)
    integers = bool(args) and all(arg is None or isinstance(arg, Integers) for arg in args)
    if integers and node.op_type not in ("DequantizeLinear", "QuantizeLinear", "Shape", "Identity"):
        return copy_node(ctx, node, args)
    if lowering is None:
        raise refusal(node)
    return lowering(ctx, node, args)


def _folded(ctx: LoweringContext, node: NodeProto, args: list[Value | None], *, last: bool) -> tuple[Value, ...] | None:
    """Compute a node on constants at conversion time; None if it is not one.

    That is shape arithmetic, anchor grids, and whatever else a network computes of what it stores (attention among
    learned queries). Constants with integers of their own are weights, which movements leave as they are where they
    can; `last` says that this one cannot, or is none.
    """
    known = {
        name: arg.values if isinstance(arg, Constant) else arg.array
        for name, arg in zip(node.input, args, strict=True)
        if (isinstance(arg, Constant) and (last or not (arg.coded or arg.blocks)))
        or (isinstance(arg, Integers) and arg.array is not None)
    }
    narrow = node.op_type == "Cast" and attributes(node)["to"] not in INTEGER_TYPES
    if node.op_type in QDQ or (narrow and any(isinstance(arg, Constant) for arg in args)):
        return None  # a rule keeps this layer in another float type, and the refusal is to name that
    small = {name: array for name, array in known.items() if array is not None}
    if last:
        found = evaluate(node, small, {"": ctx.opset}, limit=_LARGEST_FOLDED)
    else:
        found = fold(node, small, {"": ctx.opset}, weights_stay=False, limit=_LARGEST_FOLDED)
    if found is None:
        return None
    return tuple(_plain(found[name]) if name else Failed() for name in node.output)


def _plain(array: Array) -> Value:
    if array.dtype.kind == "f":
        return Constant(array.astype(np.float32))
    return Integers("", array, helper.np_dtype_to_tensor_dtype(array.dtype))
