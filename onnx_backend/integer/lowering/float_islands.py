"""Float islands: nodes that `allow_float` names keep computing in float, between Q/DQ nodes, and are listed."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto

from onnx_backend.integer.fixed_point.to_fixed import to_fixed
from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.context import Args, LoweringContext, integer_name, label, move
from onnx_backend.integer.ir.values import (
    ActivationEncoding,
    Constant,
    FixedPoint,
    Floating,
    FloatInput,
    Integers,
    Linear,
    Lookup,
    Refused,
    Value,
)
from onnx_backend.integer.lowering.ops import INTEGER_TYPES
from onnx_backend.integer.lowering.unsupported import require_no_bodies
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
        """Refuse patterns that match nothing.

        Raises:
            ConfigError: naming them.
        """
        if self._unused:
            shown = ", ".join(repr(pattern) for pattern in self._unused)
            some = ", ".join(model_nodes[:5])
            raise ConfigError(f"allow_float={shown} matches no node; node names are like {some}")


def keep_float(ctx: LoweringContext, node: NodeProto, args: Args) -> Value | tuple[Value, ...]:
    """Copy a node as it is, its quantized inputs dequantized in front of it.

    Raises:
        Refused: an input has no float form.
    """
    require_no_bodies(node)
    b = ctx.builder
    before = len(b.nodes)
    inputs = [_as_float(ctx, arg, name) if arg is not None else "" for arg, name in zip(args, node.input, strict=True)]
    outputs = b.copy(node, inputs)
    written = [written for written in b.nodes[before:] if isinstance(written, NodeProto)]
    ctx.floats.update(name for one in written for name in one.output)
    stored = {tensor.name for tensor in b.initializers if tensor.data_type == TensorProto.FLOAT}
    ctx.floats.update(name for one in written for name in one.input if name in stored)
    kinds = [ctx.types.get(name, int(TensorProto.UNDEFINED)) for name in node.output]
    found: tuple[Value, ...] = tuple(
        Integers(name, dtype=kind) if kind in INTEGER_TYPES else Floating(name)
        for name, kind in zip(outputs, kinds, strict=True)
    )
    return found[0] if len(found) == 1 else found


def _as_float(ctx: LoweringContext, value: Value, tensor: str) -> str:
    b = ctx.builder
    if isinstance(value, Floating):
        return value.name
    if isinstance(value, Integers):
        return integer_name(ctx, value)
    if isinstance(value, Constant):
        return b.constant(value.values, np.float32)
    if isinstance(value, FloatInput) and not value.after and (value.lo, value.hi) == (-np.inf, np.inf):
        if ctx.edges != "float":
            raise Refused(f"it reads the float input {value.name!r}", 'use edges="float"')
        ctx.floats.add(value.name)
        return value.name
    if isinstance(value, Lookup) and value.encoding is not None:
        return _dequantized(b, value.name, value.encoding)
    if isinstance(value, Lookup):
        return b.node("Gather", [b.constant(value.values, np.float32), b.cast(value.name, TensorProto.INT32)])
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
    b = ctx.builder
    found = b.node("Mul", [b.cast(value.name, TensorProto.FLOAT), b.constant(value.scale, np.float32)])
    if np.any(value.constant):
        found = b.node("Add", [found, b.constant(value.constant, np.float32)])
    if value.masked:
        found = b.node("Where", [value.masked, b.constant(value.floor, np.float32), found])
    return found


def _dequantized(b: Builder, codes: str, encoding: ActivationEncoding) -> str:
    wide = encoding.wide
    stored = b.cast(codes, TensorProto.UINT16) if wide else codes
    kind: Any = np.uint16 if wide else np.uint8
    inputs = [stored, b.constant(encoding.scale, np.float32), b.constant(encoding.zero_point, kind)]
    return b.node("DequantizeLinear", inputs)


def _summed(ctx: LoweringContext, value: Linear) -> str:
    """Return accumulators as the float sum that they represent."""
    b, total = ctx.builder, ""
    for term in value.terms:
        centred = b.node("Sub", [b.cast(term.name, TensorProto.INT32), b.constant(term.zero, np.int32)])
        part = b.node("Mul", [b.cast(centred, TensorProto.FLOAT), b.constant(term.scale, np.float32)])
        total = b.node("Add", [total, part]) if total else part
    if np.any(value.constant):
        total = b.node("Add", [total, b.constant(value.constant, np.float32)])
    if np.isfinite(value.lo):
        total = b.node("Max", [total, b.constant(value.lo, np.float32)])
    if np.isfinite(value.hi):
        total = b.node("Min", [total, b.constant(value.hi, np.float32)])
    for step in value.after:
        if step.fill is not None:
            raise Refused("a Pad stands in front of it", "name the Pad in allow_float too")
        total = move(ctx, step, total, ActivationEncoding(1.0, 0, int(TensorProto.UINT8)), total)
    return total
