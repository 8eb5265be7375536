"""Walk over a Q/DQ graph to find the value of every tensor, and the nodes that cannot be converted, with a remedy.

Nodes that `allow_float` names keep computing in float, between Q/DQ nodes, and are listed.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from onnx_backend.integer.fixed_point.to_fixed import to_fixed
from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.context import Args, LoweringContext, integer_name, label, move
from onnx_backend.integer.ir.values import (
    INTEGER_TYPES,
    ActivationEncoding,
    Array,
    Codes,
    Constant,
    Failed,
    FixedPoint,
    Floating,
    FloatInput,
    Integers,
    Linear,
    Lookup,
    Refused,
    Value,
)
from onnx_backend.integer.lowering.movement.moves import CODE_MOVES, move_codes
from onnx_backend.integer.lowering.short_forms import copied, stored
from onnx_backend.integer.lowering.table import LOWERINGS
from onnx_backend.passes.fold_constants import evaluate, fold
from onnx_backend.proto.graph_queries import consumers, producers
from onnx_backend.proto.nodes import attributes, metadata
from onnx_backend.proto.subgraphs import captured_tensors, has_bodies, reads
from onnx_backend.qdq.narrow_regions import TYPE_KEY
from qsdk.core.errors import ConfigError


class Islands:
    """The nodes that may stay float: shell globs over their names and op types.

    Attributes:
        kept: the nodes that stayed float.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._unused = list(dict.fromkeys(patterns))
        self._patterns = tuple(self._unused)
        self.kept: list[str] = []

    def match(self, node: NodeProto) -> bool:
        """Return True if a node may stay float, and record that it does."""
        names = (label(node), node.op_type, *node.output)
        found = [p for p in self._patterns if any(fnmatchcase(name, p) for name in names)]
        self._unused = [pattern for pattern in self._unused if pattern not in found]
        if found:
            self.kept.append(label(node))
        return bool(found)

    def require_used(self, model_nodes: Sequence[str]) -> None:
        """Refuse patterns that match nothing."""
        if self._unused:
            shown = ", ".join(repr(pattern) for pattern in self._unused)
            some = ", ".join(model_nodes[:5])
            raise ConfigError(f"allow_float={shown} matches no node; node names are like {some}")


def keep_float(ctx: LoweringContext, node: NodeProto, args: Args) -> Value | tuple[Value, ...]:
    """Copy a node as it is, its quantized inputs dequantized in front of it."""
    require_no_bodies(node)
    before = len(ctx.nodes)
    inputs = [_as_float(ctx, arg, name) if arg is not None else "" for arg, name in zip(args, node.input, strict=True)]
    outputs = ctx.copy(node, inputs)
    written = [written for written in ctx.nodes[before:] if isinstance(written, NodeProto)]
    ctx.floats.update(name for one in written for name in one.output)
    stored = {tensor.name for tensor in ctx.initializers if tensor.data_type == TensorProto.FLOAT}
    ctx.floats.update(name for one in written for name in one.input if name in stored)
    kinds = [ctx.types.get(name, int(TensorProto.UNDEFINED)) for name in node.output]
    found: tuple[Value, ...] = tuple(
        Integers(name, dtype=kind) if kind in INTEGER_TYPES else Floating(name)
        for name, kind in zip(outputs, kinds, strict=True)
    )
    return found[0] if len(found) == 1 else found


def _as_float(ctx: LoweringContext, value: Value, tensor: str) -> str:
    if isinstance(value, Floating):
        return value.name
    if isinstance(value, Integers):
        return integer_name(ctx, value)
    if isinstance(value, Constant):
        return ctx.constant(value.values, np.float32)
    if isinstance(value, FloatInput) and not value.after and (value.lo, value.hi) == (-np.inf, np.inf):
        if ctx.edges != "float":
            raise Refused(f"it reads the float input {value.name!r}", 'use edges="float"')
        ctx.floats.add(value.name)
        return value.name
    if isinstance(value, Lookup) and value.encoding is not None:
        return _dequantized(ctx, value.name, value.encoding)
    if isinstance(value, Lookup):
        return ctx.node("Gather", [ctx.constant(value.values, np.float32), ctx.cast(value.name, TensorProto.INT32)])
    if isinstance(value, Linear):
        return _summed(ctx, value)
    try:
        return _of_fixed(ctx, to_fixed(ctx, value))
    except Refused as refused:
        remedy = f"name the node that makes {tensor!r} in allow_float too"
        raise Refused(f"its input {tensor!r} has no float form: {refused.reason}", remedy) from refused


def _of_fixed(ctx: LoweringContext, value: FixedPoint) -> str:
    """Return fixed point as the float that it represents."""
    if value.missing or value.infinite:
        raise Refused("integers stand for its NaN or infinities", "name the node that makes it in allow_float")
    found = ctx.node("Mul", [ctx.cast(value.name, TensorProto.FLOAT), ctx.constant(value.scale, np.float32)])
    if np.any(value.constant):
        found = ctx.node("Add", [found, ctx.constant(value.constant, np.float32)])
    if value.masked:
        found = ctx.node("Where", [value.masked, ctx.constant(value.floor, np.float32), found])
    return found


def _dequantized(b: Builder, codes: str, encoding: ActivationEncoding) -> str:
    wide = encoding.wide
    stored = b.cast(codes, TensorProto.UINT16) if wide else codes
    kind: Any = np.uint16 if wide else np.uint8
    inputs = [stored, b.constant(encoding.scale, np.float32), b.constant(encoding.zero_point, kind)]
    return b.node("DequantizeLinear", inputs)


def _summed(ctx: LoweringContext, value: Linear) -> str:
    """Return accumulators as the float sum that they represent."""
    total = ""
    for term in value.terms:
        centred = ctx.node("Sub", [ctx.cast(term.name, TensorProto.INT32), ctx.constant(term.zero, np.int32)])
        part = ctx.node("Mul", [ctx.cast(centred, TensorProto.FLOAT), ctx.constant(term.scale, np.float32)])
        total = ctx.node("Add", [total, part]) if total else part
    if np.any(value.constant):
        total = ctx.node("Add", [total, ctx.constant(value.constant, np.float32)])
    if np.isfinite(value.lo):
        total = ctx.node("Max", [total, ctx.constant(value.lo, np.float32)])
    if np.isfinite(value.hi):
        total = ctx.node("Min", [total, ctx.constant(value.hi, np.float32)])
    for step in value.after:
        if step.fill is not None:
            raise Refused("a Pad stands in front of it", "name the Pad in allow_float too")
        total = move(ctx, step, total, ActivationEncoding(1.0, 0, int(TensorProto.UINT8)), total)
    return total


_REPLACE = "replace it by operators that have one, or keep it float: name it in allow_float"
_CONTROL_FLOW = (
    "it is control flow, whose branches or steps are chosen while the model runs",
    "export the model with the condition or the number of steps fixed, or split the model there",
)
_BRANCHES = (
    _CONTROL_FLOW[0],
    "fix the input that decides it when the float model is quantized: quantize(..., inputs={name: value}), or export "
    "the model with the condition fixed, or split the model there",
)
_SEQUENCE = (
    "it works on a list of tensors",
    "export the model with separate tensors, Split or Concat instead; where this is an nn.EmbeddingBag with offsets, "
    "give it indices [bags, length], with padding_idx where a bag is shorter",
)
_COMPOSED = (
    "it was left in one piece, because allow_float names another node of its type",
    "name all nodes of this type in allow_float, or none",
)
_DYNAMIC = (
    "its scale and zero point depend on the data of every run",
    "quantize the float model statically, with calibration data",
)
_EINSUM = (
    "it has more than two factors, a diagonal, a sum over an axis of one factor alone, or several dynamic axes",
    "write it as several Einsums of two tensors, with a QuantizeLinear/DequantizeLinear pair between them, or fix the "
    "dynamic axes: shapes={input name: sizes}",
)
_REASONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("Loop", "Scan"), _CONTROL_FLOW),
        "If": _BRANCHES,
        **{f"Sequence{rest}": _SEQUENCE for rest in ("At", "Construct", "Empty", "Erase", "Insert", "Length", "Map")},
        **dict.fromkeys(("ConcatFromSequence", "SplitToSequence"), _SEQUENCE),
        "DynamicQuantizeLinear": _DYNAMIC,
        **dict.fromkeys(("Attention", "RotaryEmbedding"), _COMPOSED),
        "Einsum": _EINSUM,
    }
)


def refusal(node: NodeProto) -> Refused:
    """Return the refusal of an operator that has no lowering."""
    found = _REASONS.get(node.op_type)
    return Refused(*found) if found else Refused(f"{node.op_type} has no integer form in this version", _REPLACE)


def require_no_bodies(node: NodeProto) -> None:
    """Refuse control flow that computes on more than integers that are its own inputs."""
    if has_bodies(node) and captured_tensors(node):
        raise Refused(*_REASONS.get(node.op_type, _CONTROL_FLOW))


def origins(nodes: Iterable[NodeProto]) -> dict[str, tuple[str, str]]:
    """Return name of a node or tensor of a Q/DQ model -> op type and name of the node that the user knows it by.

    A QuantizeLinear stands for the node whose result it quantizes.
    """
    found: dict[str, tuple[str, str]] = {}
    for node in nodes:
        known = (node.op_type, label(node))
        if node.op_type == "QuantizeLinear":
            known = found.get(node.input[0], known)
        found.update(dict.fromkeys((label(node), *node.output), known))
    return found


def origin(name: str, known: Mapping[str, tuple[str, str]]) -> tuple[str, str] | None:
    """Return op type and name of the node of the Q/DQ model that a node of the integer model was written for."""
    name = name.removesuffix("_node")
    while name not in known and "." in name:
        name = name.rpartition(".")[0]
    return known.get(name)


def sites_in_front(nodes: Iterable[NodeProto]) -> dict[str, str]:
    """Return name of a node -> the site in front of whose quantizer it stands, of a file that qsdk has written."""
    listed = list(nodes)
    readers, makers, found = consumers(listed), producers(listed), dict[str, str]()
    for node in listed:
        site = metadata(node).get("qsdk.site") if node.op_type == "DequantizeLinear" else None
        quantize = makers.get(node.input[0]) if site else None
        made_by = makers.get(quantize.input[0]) if quantize is not None else None
        while site and made_by is not None and made_by.op_type != "DequantizeLinear" and label(made_by) not in found:
            found[label(made_by)] = site
            alone = [makers[name] for name in made_by.input if name in makers and len(readers[name]) == 1]
            made_by = alone[0] if alone else None
    return found


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
            ctx.label, ctx.behind = label(node), makers.get(node.input[0] if node.input else "", "")
            points = [arg.encoding.zero_point for arg in args if isinstance(arg, Lookup) and arg.encoding]
            ctx.facts[label(node)] = {"op_type": node.op_type, "input_zero_points": points}
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
        return copied(ctx, node, args)
    if lowering is None:
        raise refusal(node)
    return lowering.lower(ctx, node, args)


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
