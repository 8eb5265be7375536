"""Quantize a value to the codes of an encoding, as a QuantizeLinear behind it asks."""

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from onnx_backend.integer.ir.builder import Builder, look_up, requantize
from onnx_backend.integer.ir.context import LoweringContext, move
from onnx_backend.integer.ir.operations import Join
from onnx_backend.integer.ir.values import (
    ActivationEncoding,
    Bent,
    Constant,
    Floating,
    FloatInput,
    Joined,
    Linear,
    Lookup,
    Movement,
    Pending,
    Refused,
    Selected,
    Value,
)
from onnx_backend.integer.lowering.edges import enter, quantize_input
from onnx_backend.proto.nodes import attributes


def to_codes(ctx: LoweringContext, value: Value, encoding: ActivationEncoding, name: str) -> str:
    """Emit the codes of a value in `encoding`, as its QuantizeLinear computes them.

    Raises:
        Refused: the value cannot be brought to that encoding with integers.
    """
    b = ctx.builder
    if isinstance(value, Lookup):
        return look_up(b, value, encoding, name)
    if isinstance(value, Constant):
        return b.constant(encoding.quantize(value.values), encoding.kind, name)
    if isinstance(value, Linear):
        codes = requantize(b, value, encoding, name)
        return _moved(ctx, value.after, codes, encoding, name)
    if isinstance(value, Bent):
        return _unbent(b, value, encoding, name)
    if isinstance(value, Selected):
        chosen = [to_codes(ctx, part, encoding, f"{name}.{i}") for i, part in enumerate(value.parts)]
        inputs = [chosen[i] if isinstance(i, int) else i for i in value.inputs]
        codes = b.node(value.node.op_type, inputs, name=name, **attributes(value.node))
        return _moved(ctx, value.after, codes, encoding, name)
    if isinstance(value, Joined):
        parts = [to_codes(ctx, part, encoding, f"{name}.{i}") for i, part in enumerate(value.parts)]
        joined = b.fresh(name)
        b.nodes.append(Join(tuple(parts), encoding, value.axis, joined, b.label))
        return _moved(ctx, value.after, joined, encoding, name)
    if isinstance(value, Pending):
        return _moved(ctx, value.after, to_codes(ctx, value.value, encoding, f"{name}.unmoved"), encoding, name)
    if isinstance(value, Floating):
        return quantize_input(b, value.name, encoding, name)
    if isinstance(value, FloatInput):
        codes = enter(ctx, value, encoding, name)
        return _moved(ctx, value.after, codes, encoding, name)
    raise Refused("its input is an integer tensor", "remove the QuantizeLinear, or cast its input to float32")


def _unbent(b: Builder, value: Bent, encoding: ActivationEncoding, name: str) -> str:
    """Emit the larger or smaller of both sides, as quantizing is monotone; for slopes of both kinds emit all parts.

    Each part is at the zero point where another is not, so their sum has too many zero points only.
    """
    if value.choice:
        sides = [requantize(b, side, encoding, f"{name}.{i}") for i, side in enumerate(value.sides)]
        return b.node(value.choice, sides, name=name)
    total = ""
    for i, part in enumerate(value.parts):
        codes = b.cast(requantize(b, part, encoding, f"{name}.{i}"), TensorProto.INT32)
        if total:
            codes = b.node("Sub", [b.node("Add", [total, codes]), b.constant(encoding.zero_point, np.int32)])
        total = codes
    return b.cast(total, encoding.onnx_kind, name=name)


def _moved(ctx: LoweringContext, steps: Sequence[Movement], codes: str, encoding: ActivationEncoding, name: str) -> str:
    for step in steps:
        codes = move(ctx, step, codes, encoding, name)
    return codes
