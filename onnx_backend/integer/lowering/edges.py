"""The edges of the integer model: float tensors with one Q/DQ node at each edge, or integers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.context import FIXED_SIZES, LoweringContext, integer_name, move
from onnx_backend.integer.ir.values import (
    GRIDS,
    ActivationEncoding,
    Array,
    Codes,
    Constant,
    Failed,
    Floating,
    FloatInput,
    Integers,
    Joined,
    Lookup,
    Refused,
    Value,
)
from onnx_backend.proto.nodes import attributes
from qsdk.core.graph.op_facts import RESHAPES

_APART = (
    "let its parts leave the model one by one and join them outside of it, or keep what joins and moves them float by "
    "allow_float= (tie=True gives all of them one grid, on which small ones, such as scores beside boxes, are all 0)"
)


def enter(ctx: LoweringContext, value: FloatInput, encoding: ActivationEncoding, name: str) -> str:
    """Return the codes of a float graph input, emitting its edge once per encoding."""
    known = ctx.inputs.setdefault(value.name, [])
    found = next((codes.name for codes in known if codes.encoding == encoding), None)
    if found is None:
        if known and ctx.edges == "integer":
            raise Refused(
                f"input {value.name!r} is quantized with two encodings, an integer input has one",
                'use edges="float", or let one QuantizeLinear serve all that read it',
            )
        found = _edge_in(ctx, value.name, encoding, name)
        known.append(Codes(found, encoding))
    lo, hi = (int(encoding.quantize(bound)) for bound in (value.lo, value.hi))
    if (lo, hi) == (0, encoding.hi):
        return found
    b = ctx.builder
    return b.node("Clip", [found, b.constant(lo, encoding.kind), b.constant(hi, encoding.kind)], name=name)


def _edge_in(ctx: LoweringContext, tensor: str, encoding: ActivationEncoding, name: str) -> str:
    b = ctx.builder
    if ctx.edges == "float":
        return quantize_input(b, tensor, encoding, name)
    codes = from_stored_dtype(b, tensor, encoding, name)
    return codes if GRIDS[encoding.dtype][0] else _on_grid(b, codes, encoding, name)


def _whole(encoding: ActivationEncoding) -> bool:
    """Return True if every value of the stored type is a code."""
    return encoding.hi in (255, 65535)


def quantize_input(b: Builder, tensor: str, encoding: ActivationEncoding, name: str) -> str:
    """Emit the QuantizeLinear of a float tensor and return its codes."""
    unsigned = TensorProto.UINT16 if encoding.wide else TensorProto.UINT8
    scale = b.constant(encoding.scale, np.float32, f"{tensor}.scale")
    zero = b.constant(encoding.zero_point, np.uint16 if encoding.wide else np.uint8, f"{tensor}.zero_point")
    codes = b.node("QuantizeLinear", [tensor, scale, zero], name=name, output_dtype=int(unsigned))
    return _on_grid(b, b.cast(codes, TensorProto.INT32, name=name) if encoding.wide else codes, encoding, name)


def _on_grid(b: Builder, codes: str, encoding: ActivationEncoding, name: str) -> str:
    if _whole(encoding):
        return codes
    return b.node("Clip", [codes, b.constant(0, np.uint8), b.constant(encoding.hi, np.uint8)], name=name)


def from_stored_dtype(b: Builder, tensor: str, encoding: ActivationEncoding, name: str) -> str:
    """Emit the codes of a tensor in the dtype that the Q/DQ model stores and return their name."""
    up = GRIDS[encoding.dtype][0]
    if not up:
        return b.cast(tensor, TensorProto.INT32, name=name) if encoding.wide else tensor
    wide = b.node("Add", [b.cast(tensor, TensorProto.INT32), b.constant(up, np.int32)])
    if not _whole(encoding):  # 4 bits in 8: saturate before the Cast wraps
        wide = b.node("Clip", [wide, b.constant(0, np.int32), b.constant(encoding.hi, np.int32)])
    return wide if encoding.wide else b.cast(wide, TensorProto.UINT8, name=name)


def leave(ctx: LoweringContext, value: Value, output: str) -> Codes | None:
    """Emit a graph output under its own name; return its codes if it is a quantized one.

    Raises:
        Refused: the output is a float tensor that no QuantizeLinear precedes.
    """
    b = ctx.builder
    if isinstance(value, Failed):
        return None
    if isinstance(value, Integers) and value.name == output:
        return None  # an integer input that leaves as it is
    if isinstance(value, Integers):
        _append(b, "Identity", [integer_name(ctx, value)], output)
        return None
    if isinstance(value, Codes):
        _stored(ctx, value, output)
        return value
    if isinstance(value, Floating) and ctx.edges == "float":
        _append(b, "Identity", [value.name], output)
        ctx.floats.add(output)
        return None
    if isinstance(value, Joined) and ctx.edges == "float":
        _leave_joined(ctx, value, output)
        return None
    if isinstance(value, Constant):
        raise Refused("it is a float constant", "remove it from the model's outputs: it never changes")
    if isinstance(value, FloatInput) and not value.after and (value.lo, value.hi) == (-np.inf, np.inf):
        raise Refused(
            f"it is the float input {value.name!r} as it came",
            "remove it from the model's outputs, or quantize it: a QuantizeLinear/DequantizeLinear pair before it",
        )
    if not isinstance(value, Lookup) or value.encoding is None:
        raise Refused(
            "it leaves the model unquantized", "quantize it: a QuantizeLinear/DequantizeLinear pair before it"
        )
    codes = Codes(value.name, value.encoding)
    if ctx.edges == "integer":
        _stored(ctx, codes, output)
        return codes
    scale = b.constant(value.encoding.scale, np.float32, f"{output}.scale")
    zero = b.constant(value.encoding.zero_point, np.uint16 if value.encoding.wide else np.uint8, f"{output}.zero_point")
    _append(b, "DequantizeLinear", [_unsigned(b, value.name, value.encoding), scale, zero], output)
    return codes


@dataclass(frozen=True)
class _Assembly:
    """Codes of several encodings: one for each index of an axis, or, where that is None, one for all.

    Those of more than 8 bits are int32 as everywhere, and uint16 where they are joined.
    """

    codes: str
    axis: int | None
    encodings: tuple[ActivationEncoding, ...]
    kind: int

    def unsigned(self, b: Builder, *, wide: bool) -> str:
        """Return the codes in uint8 or uint16."""
        return b.cast(self.codes, TensorProto.UINT16) if wide and self.kind != TensorProto.UINT16 else self.codes


def _leave_joined(ctx: LoweringContext, value: Joined, output: str) -> None:
    """Emit a Concat of codes and one DequantizeLinear with a scale per index of its axis: each part keeps its own.

    Raises:
        Refused: a part is not quantized, its size is not static, or no one axis tells the parts apart.
    """
    b, whole = ctx.builder, _assembly(ctx, value, output)
    wide = whole.kind != TensorProto.UINT8
    kind = np.uint16 if wide else np.uint8
    scales = np.array([encoding.scale for encoding in whole.encodings], np.float32)
    zeros = np.array([encoding.zero_point for encoding in whole.encodings], kind)
    axis = {} if whole.axis is None else {"axis": whole.axis}
    if whole.axis is None:
        scales, zeros = scales[0], zeros[0]
    names = [b.constant(scales, np.float32, f"{output}.scale"), b.constant(zeros, kind, f"{output}.zero_point")]
    _append(b, "DequantizeLinear", [whole.unsigned(b, wide=wide), *names], output, **axis)


def _assembly(ctx: LoweringContext, value: Value, output: str) -> _Assembly:
    """Return the codes of what several encodings were joined to, moved or not."""
    if isinstance(value, Lookup) and value.encoding is not None:
        return _Assembly(value.name, None, (value.encoding,), value.encoding.onnx_kind)
    if isinstance(value, Constant):
        encoding = _grid_of(value.values)
        codes = ctx.builder.constant(encoding.quantize(value.values), encoding.kind)
        return _Assembly(codes, None, (encoding,), encoding.onnx_kind)
    if not isinstance(value, Joined):
        raise Refused("it is a Concat of parts that are not all quantized", _APART)
    parts = [_assembly(ctx, part, output) for part in value.parts]
    whole = _joined(ctx, value, parts)
    for step in value.after:
        codes = move(ctx, step, whole.codes, whole.encodings[0], f"{output}.moved")
        whole = replace(whole, codes=codes, axis=_axis_behind(ctx, step.node, whole.axis))
    return whole


def _joined(ctx: LoweringContext, value: Joined, parts: Sequence[_Assembly]) -> _Assembly:
    wide, axes = any(part.kind != TensorProto.UINT8 for part in parts), {part.axis for part in parts}
    kind = int(TensorProto.UINT16 if wide else TensorProto.UINT8)
    codes = ctx.builder.node("Concat", [part.unsigned(ctx.builder, wide=wide) for part in parts], axis=value.axis)
    if len({(part.axis, part.encodings) for part in parts}) == 1 and axes != {value.axis}:
        return _Assembly(codes, parts[0].axis, parts[0].encodings, kind)
    if not axes <= {None, value.axis}:
        raise Refused("it is a Concat of parts that are joined of several encodings along another axis", _APART)
    if None in value.sizes:
        raise Refused("it is a Concat of several encodings whose parts have sizes that are not static", FIXED_SIZES)
    sizes = [size or 1 if part.axis is None else 1 for part, size in zip(parts, value.sizes, strict=True)]
    encodings = tuple(e for part, size in zip(parts, sizes, strict=True) for e in part.encodings * size)
    return _Assembly(codes, value.axis, encodings, kind)


def _axis_behind(ctx: LoweringContext, node: NodeProto, axis: int | None) -> int | None:
    """Return the axis that tells the parts of a Concat apart behind a node that moves it.

    Raises:
        Refused: there is none, or the sizes do not tell.
    """
    shape, made = ctx.shapes.get(node.input[0]), ctx.shapes.get(node.output[0])
    if axis is None or node.op_type == "Identity":
        return axis
    if node.op_type == "Transpose" and shape is not None:
        return list(attributes(node).get("perm") or reversed(range(len(shape)))).index(axis)
    if node.op_type in RESHAPES and shape is not None and made is not None and None not in shape[axis:]:
        inner = prod(size or 0 for size in shape[axis + 1 :])
        for at, size in enumerate(made):
            if size == shape[axis] and None not in made[at:] and prod(n or 0 for n in made[at + 1 :]) == inner:
                return at
    raise Refused(f"it is a Concat of several encodings, which {node.op_type} moves out of their axis", _APART)


def _grid_of(values: Array) -> ActivationEncoding:
    """Return the grid of a constant that is joined with codes: an exact one of 8 bits if there is one, else 16 bits.

    Raises:
        Refused: it holds NaN or an infinity.
    """
    if not np.isfinite(values).all():
        raise Refused("it is a Concat of parts of which a stored one holds NaN or an infinity", _APART)
    low, high = min(0.0, float(values.min(initial=0.0))), max(0.0, float(values.max(initial=0.0)))
    whole = bool(np.all(values == np.rint(values))) and max(-low, high) < 1 << 24
    step = float(np.gcd.reduce(values.astype(np.int64), axis=None)) if whole and values.size else 0.0
    if (low, high) == (0.0, 0.0) or (step and (high - low) / step <= 255):
        step = step or 1.0
        return ActivationEncoding(step, int(-low / step), int(TensorProto.UINT8))
    step = float(np.float32((high - low) / 65535))
    return ActivationEncoding(step, round(-low / step), int(TensorProto.UINT16))


def _unsigned(b: Builder, codes: str, encoding: ActivationEncoding) -> str:
    return b.cast(codes, TensorProto.UINT16) if encoding.wide else codes


def _stored(ctx: LoweringContext, codes: Codes, output: str) -> None:
    """Emit codes in the dtype in which the Q/DQ model stores them (4-bit grids in 8 bits)."""
    b, up = ctx.builder, GRIDS[codes.encoding.dtype][0]
    if not up and not codes.encoding.wide:
        _append(b, "Identity", [codes.name], output)
        return
    lowered = codes.name
    if up:
        lowered = b.node("Sub", [b.cast(codes.name, TensorProto.INT32), b.constant(up, np.int32)])
    _append(b, "Cast", [lowered], output, to=edge_dtype(codes.encoding))


def _append(b: Builder, op_type: str, inputs: Sequence[str], output: str, **attrs: Any) -> None:
    b.nodes.append(helper.make_node(op_type, inputs, [output], name=f"{output}_edge", **attrs))


def edge_dtype(encoding: ActivationEncoding) -> int:
    """Return the ONNX dtype of an integer edge: signed where the Q/DQ model is, of 8 or 16 bits."""
    signed, unsigned = (
        (TensorProto.INT16, TensorProto.UINT16) if encoding.wide else (TensorProto.INT8, TensorProto.UINT8)
    )
    return int(signed if GRIDS[encoding.dtype][0] else unsigned)
