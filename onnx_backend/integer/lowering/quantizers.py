"""Lower QuantizeLinear and DequantizeLinear, where values become codes and codes values, and the edges of the model.

An edge is a float tensor with one Q/DQ node, or integers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from onnx_backend.integer.fixed_point.to_fixed import to_accumulator
from onnx_backend.integer.ir.builder import Builder, look_up, requantize
from onnx_backend.integer.ir.context import FIXED_SIZES, Args, LoweringContext, integer_name, move
from onnx_backend.integer.ir.operations import Join, Norm, Requantization
from onnx_backend.integer.ir.values import (
    GRIDS,
    ActivationEncoding,
    Array,
    Bent,
    BlockConstant,
    CodedConstant,
    Codes,
    Constant,
    Failed,
    FixedPoint,
    Floating,
    FloatInput,
    Integers,
    Joined,
    Linear,
    Lookup,
    Movement,
    Pending,
    Refused,
    Root,
    Selected,
    Value,
    dequantize_codes,
)
from onnx_backend.proto.nodes import attributes
from qsdk.core.graph.op_facts import RESHAPES
from qsdk.core.numerics import affine

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
    return ctx.node("Clip", [found, ctx.constant(lo, encoding.kind), ctx.constant(hi, encoding.kind)], name=name)


def _edge_in(ctx: LoweringContext, tensor: str, encoding: ActivationEncoding, name: str) -> str:
    if ctx.edges == "float":
        return quantize_input(ctx, tensor, encoding, name)
    codes = from_stored_dtype(ctx, tensor, encoding, name)
    return codes if GRIDS[encoding.dtype][0] else _on_grid(ctx, codes, encoding, name)


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
    """Emit a graph output under its own name; return its codes if it is a quantized one."""
    if isinstance(value, Failed):
        return None
    if isinstance(value, Integers) and value.name == output:
        return None  # an integer input that leaves as it is
    if isinstance(value, Integers):
        _append(ctx, "Identity", [integer_name(ctx, value)], output)
        return None
    if isinstance(value, Codes):
        _stored(ctx, value, output)
        return value
    if isinstance(value, Floating) and ctx.edges == "float":
        _append(ctx, "Identity", [value.name], output)
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
    scale = ctx.constant(value.encoding.scale, np.float32, f"{output}.scale")
    zero = ctx.constant(
        value.encoding.zero_point, np.uint16 if value.encoding.wide else np.uint8, f"{output}.zero_point"
    )
    _append(ctx, "DequantizeLinear", [_unsigned(ctx, value.name, value.encoding), scale, zero], output)
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
    """Emit a Concat of codes and one DequantizeLinear with a scale per index of its axis: each part keeps its own."""
    whole = _assembly(ctx, value, output)
    wide = whole.kind != TensorProto.UINT8
    kind = np.uint16 if wide else np.uint8
    scales = np.array([encoding.scale for encoding in whole.encodings], np.float32)
    zeros = np.array([encoding.zero_point for encoding in whole.encodings], kind)
    axis = {} if whole.axis is None else {"axis": whole.axis}
    if whole.axis is None:
        scales, zeros = scales[0], zeros[0]
    names = [ctx.constant(scales, np.float32, f"{output}.scale"), ctx.constant(zeros, kind, f"{output}.zero_point")]
    _append(ctx, "DequantizeLinear", [whole.unsigned(ctx, wide=wide), *names], output, **axis)


def _assembly(ctx: LoweringContext, value: Value, output: str) -> _Assembly:
    """Return the codes of what several encodings were joined to, moved or not."""
    if isinstance(value, Lookup) and value.encoding is not None:
        return _Assembly(value.name, None, (value.encoding,), value.encoding.onnx_kind)
    if isinstance(value, Constant):
        encoding = _grid_of(value.values)
        codes = ctx.constant(encoding.quantize(value.values), encoding.kind)
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
    codes = ctx.node("Concat", [part.unsigned(ctx, wide=wide) for part in parts], axis=value.axis)
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
    """Return the axis that tells the parts of a Concat apart behind a node that moves it."""
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
    """Return the grid of a constant that is joined with codes: an exact one of 8 bits if there is one, else 16 bits."""
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
    up = GRIDS[codes.encoding.dtype][0]
    if not up and not codes.encoding.wide:
        _append(ctx, "Identity", [codes.name], output)
        return
    lowered = codes.name
    if up:
        lowered = ctx.node("Sub", [ctx.cast(codes.name, TensorProto.INT32), ctx.constant(up, np.int32)])
    _append(ctx, "Cast", [lowered], output, to=edge_dtype(codes.encoding))


def _append(b: Builder, op_type: str, inputs: Sequence[str], output: str, **attrs: Any) -> None:
    b.nodes.append(helper.make_node(op_type, inputs, [output], name=f"{output}_edge", **attrs))


def edge_dtype(encoding: ActivationEncoding) -> int:
    """Return the ONNX dtype of an integer edge: signed where the Q/DQ model is, of 8 or 16 bits."""
    signed, unsigned = (
        (TensorProto.INT16, TensorProto.UINT16) if encoding.wide else (TensorProto.INT8, TensorProto.UINT8)
    )
    return int(signed if GRIDS[encoding.dtype][0] else unsigned)


def to_codes(ctx: LoweringContext, value: Value, encoding: ActivationEncoding, name: str) -> str:
    """Emit the codes of a value in `encoding`, as its QuantizeLinear computes them."""
    if isinstance(value, Lookup):
        return look_up(ctx, value, encoding, name)
    if isinstance(value, Constant):
        return ctx.constant(encoding.quantize(value.values), encoding.kind, name)
    if isinstance(value, Linear):
        codes = requantize(ctx, value, encoding, name)
        return _moved(ctx, value.after, codes, encoding, name)
    if isinstance(value, Bent):
        return _unbent(ctx, value, encoding, name)
    if isinstance(value, Selected):
        chosen = [to_codes(ctx, part, encoding, f"{name}.{i}") for i, part in enumerate(value.parts)]
        inputs = [chosen[i] if isinstance(i, int) else i for i in value.inputs]
        codes = ctx.node(value.node.op_type, inputs, name=name, **attributes(value.node))
        return _moved(ctx, value.after, codes, encoding, name)
    if isinstance(value, Joined):
        parts = [to_codes(ctx, part, encoding, f"{name}.{i}") for i, part in enumerate(value.parts)]
        joined = ctx.fresh(name)
        ctx.nodes.append(Join(tuple(parts), encoding, value.axis, joined, ctx.label))
        return _moved(ctx, value.after, joined, encoding, name)
    if isinstance(value, Pending):
        return _moved(ctx, value.after, to_codes(ctx, value.value, encoding, f"{name}.unmoved"), encoding, name)
    if isinstance(value, Floating):
        return quantize_input(ctx, value.name, encoding, name)
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


_ASSOCIATED: dict[int, tuple[int, int]] = {
    TensorProto.UINT8: (0, 255),
    TensorProto.INT8: (-128, 127),
    TensorProto.UINT4: (0, 15),
    TensorProto.INT4: (-8, 7),
    TensorProto.UINT16: (0, 65535),
    TensorProto.INT16: (-32768, 32767),
}
_WHOLE = frozenset({TensorProto.UINT8, TensorProto.INT8, TensorProto.UINT16, TensorProto.INT16})


def quantize(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower QuantizeLinear: requantize the value in front of it to codes."""
    value = args[0]
    scale = _scale(args[1])
    zero = args[2] if len(args) > 2 else None
    attrs = attributes(node)
    dtype = int(attrs.get("output_dtype", 0)) or int(TensorProto.UINT8)
    if isinstance(zero, Integers):
        dtype = zero.dtype
    points = _zero_points(zero, scale)
    if isinstance(value, Constant):
        return _quantized_constant(value, scale, points, dtype, attrs)
    encoding = activation_encoding(scale, points, dtype)
    name = node.output[0]
    if value is None or isinstance(value, Failed):
        return Codes(name, encoding)  # reported already; the nodes behind it are still examined
    codes = to_codes(ctx, to_accumulator(ctx, value, encoding), encoding, name)
    _note_rows(ctx, value)
    found = Codes(codes, encoding, _root(value, codes, encoding) if ctx.composes else None)
    ctx.sites[name] = found
    return found


def _note_rows(ctx: LoweringContext, value: Value) -> None:
    """Mark the requantization just recorded as that of a Softmax or a norm."""
    nodes = ctx.nodes
    known, rows = ctx.rows.get(value.name, (None, None)) if isinstance(value, FixedPoint) else (None, None)
    if known is None or not isinstance(value, FixedPoint) or not isinstance(nodes[-1], Requantization):
        return
    # rows without a score may have been set to 0 in between, which they are in any case
    same = value.scale is known.scale and value.constant is known.constant and value.masked == known.masked
    if same or isinstance(rows, Norm):
        nodes[-1] = replace(nodes[-1], rows=rows)


def _root(value: Value, codes: str, encoding: ActivationEncoding) -> Root | None:
    """Return the codes that a function of codes is a table of, else None."""
    if not isinstance(value, Lookup) or codes == value.name:
        return value.root if isinstance(value, Lookup) else None
    table = encoding.quantize(value.values)
    return Root(value.name, table) if value.root is None else Root(value.root.name, table[value.root.table])


def activation_encoding(scale: Array, points: Array, dtype: int) -> ActivationEncoding:
    """Return the encoding of an activation."""
    if dtype not in GRIDS:
        name = TensorProto.DataType.Name(dtype)
        raise Refused(
            f"activations of {name} have no integer-only form in this version",
            "use an integer dtype of 4, 8 or 16 bits",
        )
    if scale.size != 1 and not np.unique(scale).size == np.unique(points).size == 1:
        raise Refused("its activation has more than one scale", "quantize activations per tensor")
    if not np.isfinite(scale).all() or not (scale > 0).all():
        raise Refused(f"its scale is {scale.reshape(-1)[0]}", "recalibrate: scales are positive and finite")
    zero = int(points.reshape(-1)[0]) + GRIDS[dtype][0]
    return ActivationEncoding(float(scale.reshape(-1)[0]), zero, dtype)


def dequantize(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower DequantizeLinear: of codes to a value with its encoding, of an initializer to a constant."""
    value = args[0]
    scale = _scale(args[1])
    points = _zero_points(args[2] if len(args) > 2 else None, scale)
    if isinstance(value, Codes):
        encoding = activation_encoding(scale, points, value.encoding.dtype)
        return dequantize_codes(value.name, encoding, value.root)
    if isinstance(value, Integers) and value.array is not None:
        return _dequantized_constant(value, scale, points, attributes(node))
    if isinstance(value, Integers) and value.dtype in _WHOLE:
        return _dequantized_tensor(ctx, node, value, activation_encoding(scale, points, value.dtype))
    raise Refused("its input is neither quantized nor a stored integer tensor", "quantize its input")


def _dequantized_tensor(ctx: LoweringContext, node: NodeProto, value: Integers, encoding: ActivationEncoding) -> Value:
    """Return an 8-bit or 16-bit tensor that enters as such (an integer input, a gathered table) as codes."""
    return dequantize_codes(from_stored_dtype(ctx, value.name, encoding, f"{node.output[0]}.codes"), encoding)


def _scale(value: Value | None) -> Array:
    if isinstance(value, Constant):
        return value.values.astype(np.float32)
    raise Refused("its scale is not a constant", "store the scale as an initializer")


def _zero_points(value: Value | None, scale: Array) -> Array:
    if value is None:
        return np.zeros(scale.shape, np.int64)
    if isinstance(value, Integers) and value.array is not None:
        points = np.asarray(value.array, np.int64)
        if points.size == scale.size:
            return points.reshape(scale.shape)
        raise Refused("its zero point has another shape than its scale", "give both the same shape")
    raise Refused("its zero point is not a constant integer", "store the zero point as an initializer")


def _aligned(
    parameter: Array, shape: tuple[int, ...], attrs: dict[str, object]
) -> tuple[Array, int | None, int | None]:
    """Return a parameter that broadcasts against `shape`, the axis of its channels or blocks, and the blocks' size."""
    if parameter.size == 1 and (parameter.ndim == 0 or not shape or parameter.shape == (1,)):
        return parameter.reshape(()), None, None
    axis = int(attrs.get("axis", 1)) % len(shape)  # type: ignore[call-overload]
    block = int(attrs.get("block_size", 0)) or None  # type: ignore[call-overload]
    try:
        return affine.align(parameter, shape, axis, block), axis, block
    except ValueError as error:
        raise Refused(str(error), "repair the model: scale and tensor do not belong together") from error


def _dequantized_constant(value: Integers, scale: Array, points: Array, attrs: dict[str, object]) -> Constant:
    array = np.asarray(value.array).astype(np.int64)
    wide, axis, block = _aligned(scale, array.shape, attrs)
    integers = array - _aligned(points, array.shape, attrs)[0]
    values = affine.dequantize(integers.astype(np.float32), wide, np.float32(0))
    if block is not None and axis is not None:
        several = [i for i, size in enumerate(scale.shape) if size > 1]
        if axis in several or len(several) > 1:
            return Constant(values, blocks=BlockConstant(integers, scale.astype(np.float64), axis, block, value.dtype))
        axis = several[0] if several else None  # one block holds the whole axis
    return Constant(values, CodedConstant(integers, scale.reshape(-1).astype(np.float64), axis, value.dtype))


def _quantized_constant(value: Constant, scale: Array, points: Array, dtype: int, attrs: dict[str, object]) -> Integers:
    """Quantize a constant (weights that some exporters leave as float -> QuantizeLinear) at conversion time."""
    if dtype not in _ASSOCIATED:
        raise Refused(f"a constant quantized to {TensorProto.DataType.Name(dtype)}", "use an integer dtype")
    shape = value.values.shape
    lo, hi = _ASSOCIATED[dtype]
    wide, zero = _aligned(scale, shape, attrs)[0], _aligned(points, shape, attrs)[0]
    codes = affine.quantize(value.values, wide, zero.astype(np.float32), lo, hi)
    return Integers("", codes.astype(np.int64), dtype)
