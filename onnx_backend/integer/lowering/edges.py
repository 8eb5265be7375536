"""The edges of the integer model: float tensors with one Q/DQ node at each edge, or integers."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.context import FIXED_SIZES, LoweringContext, integer_name
from onnx_backend.integer.ir.values import (
    GRIDS,
    ActivationEncoding,
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


def _leave_joined(ctx: LoweringContext, value: Joined, output: str) -> None:
    """Emit a Concat of codes and one DequantizeLinear with a scale per index of its axis: each part keeps its own.

    Raises:
        Refused: a part is not quantized, its size is not static, or the whole is moved afterwards.
    """
    parts = list(_parts_of(value, output))
    b = ctx.builder
    encodings = [(part.encoding, size) for part, size in parts if part.encoding is not None]
    wide = any(encoding.wide for encoding, _ in encodings)
    names = [part.name for part, _ in parts]
    if wide:
        names = [b.cast(name, TensorProto.UINT16) for name in names]
    codes = b.node("Concat", names, axis=value.axis)
    kind = np.uint16 if wide else np.uint8
    scales = np.concatenate([np.full(size, encoding.scale, np.float32) for encoding, size in encodings])
    zeros = np.concatenate([np.full(size, encoding.zero_point, kind) for encoding, size in encodings])
    names = [b.constant(scales, np.float32, f"{output}.scale"), b.constant(zeros, kind, f"{output}.zero_point")]
    _append(b, "DequantizeLinear", [codes, *names], output, axis=value.axis)


def _parts_of(value: Joined, output: str) -> Iterator[tuple[Lookup, int]]:
    remedy = f"quantize the Concat that makes {output!r} as one tensor: config.override(its owner, tie=True)"
    for part, size in zip(value.parts, value.sizes, strict=True):
        if isinstance(part, Joined) and part.axis == value.axis and not part.after:
            yield from _parts_of(part, output)
        elif not isinstance(part, Lookup) or part.encoding is None:
            raise Refused("it is a Concat of parts that are not all quantized", remedy)
        elif size is None:
            raise Refused("it is a Concat of several encodings whose parts have sizes that are not static", FIXED_SIZES)
        elif value.after:
            raise Refused("it is a Concat of several encodings that is moved afterwards", remedy)
        else:
            yield part, size


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
