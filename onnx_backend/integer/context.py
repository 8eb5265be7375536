"""What a lowering may ask: static shapes and dtypes of the Q/DQ model, names of integer tensors, codes of a value."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, shape_inference

from onnx_backend.integer.emit import Builder, look_up, requantize
from onnx_backend.integer.values import (
    GRIDS,
    Bent,
    Codes,
    Constant,
    Encoding,
    Failed,
    FloatInput,
    Integers,
    Joined,
    Linear,
    Lookup,
    Refused,
    Step,
    Value,
    dequantized,
)
from onnx_backend.stored_encodings import UNMARKED

Args = Sequence[Value | None]

_NEEDS_QUANTIZE = "put a QuantizeLinear/DequantizeLinear pair in front of it"


@dataclass(frozen=True)
class Context:
    """The surroundings of one conversion.

    Attributes:
        builder: where nodes are written.
        shapes: static dimensions of the Q/DQ model's tensors, None for a dynamic one.
        types: ONNX dtypes of the Q/DQ model's tensors.
        edges: `float` or `integer`.
        opset: the default-domain opset of the Q/DQ model.
        inputs: the encoding with which each float graph input is quantized, and its codes (filled on the way).
    """

    builder: Builder
    shapes: Mapping[str, tuple[int | None, ...]]
    types: Mapping[str, int]
    edges: str
    opset: int
    inputs: dict[str, list[Codes]] = field(default_factory=dict)

    def sizes(self, tensor: str, axes: Sequence[int]) -> list[int]:
        """Give static dimensions of a tensor of the Q/DQ model.

        Raises:
            Refused: the rank or one of the dimensions is not static.
        """
        shape = self.shapes.get(tensor)
        found = [None] if shape is None else [shape[axis] for axis in axes]
        sizes = [size for size in found if size is not None]
        if len(sizes) != len(found):
            raise Refused(f"the sizes of {tensor!r} along axes {list(axes)} are not static", "export with fixed sizes")
        return sizes

    def rank(self, tensor: str) -> int:
        """Give the rank of a tensor of the Q/DQ model.

        Raises:
            Refused: shape inference could not find it.
        """
        shape = self.shapes.get(tensor)
        if shape is None:
            raise Refused(f"the rank of {tensor!r} is unknown", "run ONNX shape inference on the model first")
        return len(shape)


def surroundings(model: ModelProto, builder: Builder, edges: str) -> Context:
    """Build the context of a model by ONNX shape inference."""
    inferred = shape_inference.infer_shapes(model, data_prop=True)
    shapes, types = {}, {}
    for info in (*inferred.graph.input, *inferred.graph.output, *inferred.graph.value_info):
        kind = info.type.tensor_type
        types[info.name] = kind.elem_type
        if kind.HasField("shape"):
            shapes[info.name] = tuple(d.dim_value if d.HasField("dim_value") else None for d in kind.shape.dim)
    for tensor in inferred.graph.initializer:
        types[tensor.name], shapes[tensor.name] = tensor.data_type, tuple(tensor.dims)
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    return Context(builder, shapes, types, edges, opset)


def attributes(node: NodeProto) -> dict[str, Any]:
    """Give a node's attributes as plain values (strings decoded)."""
    values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return {key: value.decode() if isinstance(value, bytes) else value for key, value in values.items()}


def label(node: NodeProto) -> str:
    """Give the name by which a node is reported: its own, else its first output's."""
    return (node.name or (node.output[0] if node.output else node.op_type)).removesuffix(UNMARKED)


def integer_name(ctx: Context, value: Value | None) -> str:
    """Give the integer model's name of an integer tensor, writing it first if it is a constant.

    Raises:
        Refused: the value is not an integer tensor.
    """
    if value is None:
        return ""
    if isinstance(value, Codes):
        raise Refused("it computes on quantized codes directly", "put a DequantizeLinear in front of it")
    if not isinstance(value, Integers):
        raise Refused("one of its shape or index inputs is a float tensor", "compute it on int64")
    return value.name if value.array is None else ctx.builder.constant(value.array)


def constant_integers(value: Value | None) -> list[int] | None:
    """Give the values of a constant integer input, None if it is absent or not constant."""
    if isinstance(value, Integers) and value.array is not None:
        return [int(v) for v in value.array.reshape(-1)]
    return None


def encoded(value: Value | None, what: str = "its input") -> tuple[str, Encoding]:
    """Give the codes and encoding of a quantized operand.

    Raises:
        Refused: the operand does not come straight from a DequantizeLinear.
    """
    if isinstance(value, Lookup) and value.encoding is not None:
        return value.name, value.encoding
    if isinstance(value, Constant):
        raise Refused(f"{what} is a constant where an activation is expected", "fold the constant subgraph first")
    raise Refused(f"{what} is a float tensor", _NEEDS_QUANTIZE)


def move(ctx: Context, step: Step, codes: str, encoding: Encoding, name: str) -> str:
    """Emit a node that moves codes without changing them and give its output."""
    node = NodeProto()
    node.CopyFrom(step.node)
    b = ctx.builder
    outputs = [b.fresh(name if i == step.output else f"{name}.unused") for i in range(len(node.output))]
    inputs = [codes, *step.inputs]
    if step.fill is not None:
        inputs.insert(2, b.constant(encoding.quantize(step.fill), np.uint8))
    while inputs and not inputs[-1]:
        inputs.pop()
    del node.input[:], node.output[:]
    node.input.extend(inputs)
    node.output.extend(outputs)
    node.name = f"{outputs[step.output]}_node"
    b.nodes.append(node)
    return outputs[step.output]


def to_codes(ctx: Context, value: Value, encoding: Encoding, name: str) -> str:
    """Emit the uint8 codes of a value in `encoding`: what its QuantizeLinear means.

    Raises:
        Refused: the value cannot be brought to that encoding with integers.
    """
    b = ctx.builder
    if isinstance(value, Lookup):
        return look_up(b, value, encoding, name)
    if isinstance(value, Constant):
        return b.constant(encoding.quantize(value.values), np.uint8, name)
    if isinstance(value, Linear):
        codes = requantize(b, value, encoding, name)
        return _moved(ctx, value.after, codes, encoding, name)
    if isinstance(value, Bent):
        return _unbent(b, value, encoding, name)
    if isinstance(value, Joined):
        parts = [to_codes(ctx, part, encoding, f"{name}.{i}") for i, part in enumerate(value.parts)]
        return _moved(ctx, value.after, b.node("Concat", parts, axis=value.axis, name=name), encoding, name)
    if isinstance(value, FloatInput):
        codes = _entered(ctx, value, encoding, name)
        return _moved(ctx, value.after, codes, encoding, name)
    raise Refused("it quantizes an integer tensor", "quantize float tensors only")


def _unbent(b: Builder, value: Bent, encoding: Encoding, name: str) -> str:
    """Emit both halves: each is at the zero point where the other is not, so their sum lacks only one zero point."""
    halves = [("positive", value.positive), ("negative", value.negative)]
    codes = [b.cast(requantize(b, half, encoding, f"{name}.{side}"), TensorProto.INT32) for side, half in halves]
    total = b.node("Sub", [b.node("Add", codes), b.constant(encoding.zero_point, np.int32)])
    return b.cast(total, TensorProto.UINT8, name=name)


def _moved(ctx: Context, steps: Sequence[Step], codes: str, encoding: Encoding, name: str) -> str:
    for step in steps:
        codes = move(ctx, step, codes, encoding, name)
    return codes


def _entered(ctx: Context, value: FloatInput, encoding: Encoding, name: str) -> str:
    """Give the codes of a float graph input, emitting its edge once per encoding."""
    known = ctx.inputs.setdefault(value.name, [])
    found = next((codes.name for codes in known if codes.encoding == encoding), None)
    if found is None:
        if known and ctx.edges == "integer":
            raise Refused(
                f"input {value.name!r} is quantized with two encodings, an integer input has one",
                'use edges="float" or tie the encodings',
            )
        found = _edge_in(ctx, value.name, encoding, name)
        known.append(Codes(found, encoding))
    lo, hi = (int(encoding.quantize(bound)) for bound in (value.lo, value.hi))
    if (lo, hi) == (0, encoding.hi):
        return found
    b = ctx.builder
    return b.node("Clip", [found, b.constant(lo, np.uint8), b.constant(hi, np.uint8)], name=name)


def _edge_in(ctx: Context, tensor: str, encoding: Encoding, name: str) -> str:
    b = ctx.builder
    if ctx.edges == "float":
        scale = b.constant(encoding.scale, np.float32, f"{tensor}.scale")
        zero = b.constant(encoding.zero_point, np.uint8, f"{tensor}.zero_point")
        codes = b.node("QuantizeLinear", [tensor, scale, zero], name=name, output_dtype=int(TensorProto.UINT8))
    else:
        move_up = GRIDS[encoding.dtype][0]
        codes = tensor
        if move_up:
            raised = b.node("Add", [b.cast(tensor, TensorProto.INT32), b.constant(move_up, np.int32)])
            codes = b.cast(raised, TensorProto.UINT8, name=name)
    if encoding.hi == 255:
        return codes
    return b.node("Clip", [codes, b.constant(0, np.uint8), b.constant(encoding.hi, np.uint8)], name=name)


def leave(ctx: Context, value: Value, output: str) -> Codes | None:
    """Emit a graph output under its own name; give its codes if it is a quantized one.

    Raises:
        Refused: the output is a float tensor that no QuantizeLinear precedes.
    """
    b = ctx.builder
    if isinstance(value, Failed):
        return None
    if isinstance(value, Integers):
        _append(b, "Identity", [integer_name(ctx, value)], output)
        return None
    if isinstance(value, Codes):
        _stored(ctx, value, output)
        return value
    if isinstance(value, Joined) and ctx.edges == "float":
        _leave_joined(ctx, value, output)
        return None
    if not isinstance(value, Lookup) or value.encoding is None:
        raise Refused(
            "it leaves the model unquantized", "quantize it: a QuantizeLinear/DequantizeLinear pair before it"
        )
    codes = Codes(value.name, value.encoding)
    if ctx.edges == "integer":
        _stored(ctx, codes, output)
        return codes
    scale = b.constant(value.encoding.scale, np.float32, f"{output}.scale")
    zero = b.constant(value.encoding.zero_point, np.uint8, f"{output}.zero_point")
    _append(b, "DequantizeLinear", [value.name, scale, zero], output)
    return codes


def _leave_joined(ctx: Context, value: Joined, output: str) -> None:
    """Emit a Concat of codes and one DequantizeLinear with a scale per index of its axis: each part keeps its own.

    Raises:
        Refused: a part is not quantized, its size is not static, or the whole is moved afterwards.
    """
    parts = list(_parts_of(value, output))
    b = ctx.builder
    codes = b.node("Concat", [part.name for part, _ in parts], axis=value.axis)
    encodings = [(part.encoding, size) for part, size in parts if part.encoding is not None]
    scales = np.concatenate([np.full(size, encoding.scale, np.float32) for encoding, size in encodings])
    zeros = np.concatenate([np.full(size, encoding.zero_point, np.uint8) for encoding, size in encodings])
    names = [b.constant(scales, np.float32, f"{output}.scale"), b.constant(zeros, np.uint8, f"{output}.zero_point")]
    _append(b, "DequantizeLinear", [codes, *names], output, axis=value.axis)


def _parts_of(value: Joined, output: str) -> Iterator[tuple[Lookup, int]]:
    remedy = f"quantize the Concat that makes {output!r} as one tensor: config.override(its owner, tie=True)"
    for part, size in zip(value.parts, value.sizes, strict=True):
        if isinstance(part, Joined) and part.axis == value.axis and not part.after:
            yield from _parts_of(part, output)
        elif not isinstance(part, Lookup) or part.encoding is None:
            raise Refused("it is a Concat of parts that are not all quantized", remedy)
        elif size is None or value.after:
            raise Refused("it is a Concat of several encodings whose parts are moved or of dynamic size", remedy)
        else:
            yield part, size


def _stored(ctx: Context, codes: Codes, output: str) -> None:
    """Emit codes in the dtype in which the Q/DQ model stores them (4-bit grids in 8 bits)."""
    b = ctx.builder
    move_up = GRIDS[codes.encoding.dtype][0]
    if not move_up:
        _append(b, "Identity", [codes.name], output)
        return
    lowered = b.node("Sub", [b.cast(codes.name, TensorProto.INT32), b.constant(move_up, np.int32)])
    _append(b, "Cast", [lowered], output, to=int(TensorProto.INT8))


def _append(b: Builder, op_type: str, inputs: Sequence[str], output: str, **attrs: Any) -> None:
    b.nodes.append(helper.make_node(op_type, inputs, [output], name=f"{output}_edge", **attrs))


def edge_dtype(encoding: Encoding) -> int:
    """Give the ONNX dtype of an integer edge: int8 where the Q/DQ model is signed, else uint8."""
    return int(TensorProto.INT8 if GRIDS[encoding.dtype][0] else TensorProto.UINT8)


def settled(ctx: Context, value: Value, name: str) -> Value:
    """Turn a Concat whose inputs already share one function of their codes into a plain uint8 tensor."""
    if not isinstance(value, Joined) or value.after:
        return value
    parts = [part for part in value.parts if isinstance(part, Lookup)]
    first = parts[0] if parts else None
    if first is None or len(parts) != len(value.parts):
        return value
    if any(not np.array_equal(part.values, first.values) for part in parts):
        return value
    codes = ctx.builder.node("Concat", [part.name for part in parts], axis=value.axis, name=name)
    return dequantized(codes, first.encoding) if first.encoding else Lookup(codes, first.values, None)
