"""The context of a lowering: static shapes and dtypes of the Q/DQ model, names of integer tensors, codes of a value."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.operations import Norm, Shares, Softmax
from onnx_backend.integer.ir.values import (
    ActivationEncoding,
    Array,
    Codes,
    Constant,
    FixedPoint,
    Integers,
    Joined,
    Lookup,
    Movement,
    Refused,
    Value,
    dequantize_codes,
)
from onnx_backend.opening.encodings_of_file import UNMARKED
from onnx_backend.opening.read_graph import read_graph
from onnx_backend.proto.inputs import static_sizes, with_inferred_shapes
from onnx_backend.proto.nodes import attributes, node_label
from onnx_backend.proto.weightless import declared_types
from qsdk.core.numerics.fixed_point import Rounding
from qsdk.core.planning.lower_bounds import lower_bounds, never_above_zero


def max_pool(b: Builder, node: NodeProto) -> bool:
    """Write a MaxPool of uint8 codes of known sizes; return False, with nothing written, for any other node."""
    sizes = b.code_shapes.get(node.input[0]) if node.op_type == "MaxPool" and len(node.output) == 1 else None
    if sizes is None:
        return False
    attrs = attributes(node)
    spatial = [size for size in sizes[2:] if size is not None]
    if len(spatial) != len(sizes) - 2 or attrs.get("ceil_mode", 0) or attrs.get("auto_pad", "NOTSET") != "NOTSET":
        return False
    rank = len(spatial)
    kernel, pads = list(attrs["kernel_shape"]), list(attrs.get("pads", [0] * 2 * rank))
    strides, dilations = (list(attrs.get(key, [1] * rank)) for key in ("strides", "dilations"))
    wanted = [
        (size + pads[i] + pads[rank + i] - (kernel[i] - 1) * dilations[i] - 1) // strides[i] + 1
        for i, size in enumerate(spatial)
    ]
    if min(wanted) < 1:
        return False
    b.label = node.output[0]
    wide = b.cast(node.input[0], TensorProto.INT32)
    largest = largest_of_slices(b, wide, attrs, spatial, wanted)
    b.write("Cast", [largest], node.output[0], to=TensorProto.UINT8)
    return True


def largest_of_slices(
    b: Builder,
    codes: str,
    attributes: Mapping[str, Any],
    sizes: Sequence[int],
    wanted: Sequence[int],
    name: str | None = None,
) -> str:
    """Write a MaxPool of int32 codes as the Max of strided slices, axis by axis; return the result's name.

    Args:
        b: where to write.
        codes: int32, not negative.
        attributes: of the MaxPool; its padding given as numbers.
        sizes: of the spatial axes of the codes.
        wanted: of the spatial axes of the result.
        name: of the result of each axis.
    """
    kernel = list(attributes["kernel_shape"])
    rank = len(kernel)
    strides, dilations = (list(attributes.get(key, [1] * rank)) for key in ("strides", "dilations"))
    pads = list(attributes.get("pads", [0] * 2 * rank))
    for i, size in enumerate(sizes):
        reach = (wanted[i] - 1) * strides[i] + (kernel[i] - 1) * dilations[i] + 1
        after = max(reach - size - pads[i], 0)  # with ceil_mode more than its pad
        along = b.constant([i + 2], np.int64)
        if pads[i] or after:  # 0 is the smallest code, so padding never wins
            # of all axes: between Transposes, ONNX Runtime's optimizer of these moves the pads and not the input `axes`
            widths = [0] * (i + 2) + [pads[i]] + [0] * (rank + 1) + [after] + [0] * (rank - 1 - i)
            codes = b.node("Pad", [codes, b.constant(widths, np.int64), b.constant(0, np.int32)])
        taps = []
        for start in range(0, kernel[i] * dilations[i], dilations[i]):
            ends = [start], [start + (wanted[i] - 1) * strides[i] + 1]
            bounds = [b.constant(end, np.int64) for end in ends]
            taps.append(b.node("Slice", [codes, *bounds, along, b.constant([strides[i]], np.int64)]))
        codes = b.node("Max", taps, name=name)
    return codes


Args = Sequence[Value | None]
#: From a node of the Q/DQ model and the values of its inputs to those of its outputs; refuses nodes without a form.
Lowering = Callable[["LoweringContext", NodeProto, Args], Value | tuple[Value, ...]]

#: Property of a Softmax: how far a number in its divisor moves its shares at most.
GUARD = "qsdk.guard"
FIXED_SIZES = "export with fixed sizes, or give them: shapes={input name: sizes}"
_NEEDS_QUANTIZE = "put a QuantizeLinear/DequantizeLinear pair in front of it"


class LoweringContext(Builder):
    """The recorder of a conversion, and what it knows of the Q/DQ model.

    Attributes:
        shapes: static dimensions of the Q/DQ model's tensors, None for a dynamic one.
        types: ONNX dtypes of the Q/DQ model's tensors.
        edges: `float` or `integer`.
        opset: the default-domain opset of the Q/DQ model.
        composes: True if a function of a table may be written as one table of that table's input; False where the
            kernels of a runtime are written.
        reach: a tensor of the Q/DQ model -> numbers that its values are not below and not above, as the planner judges.
        inputs: the encoding with which each float graph input is quantized, and its codes (filled on the way).
        sites: the codes of every QuantizeLinear's output (filled on the way).
        halves: the high and the low byte of codes of 16 bits (filled on the way).
        floats: tensors that may be float, and float inputs that are read as they are (filled on the way).
        rows: the values that are a Softmax or norm of codes or shares of rows, by tensor (filled on the way).
        undefined: node -> what it computes where ONNX leaves the result open (filled on the way).
    """

    def __init__(
        self,
        reserved: Sequence[str],
        rounding: Rounding,
        shapes: Mapping[str, tuple[int | None, ...]],
        types: Mapping[str, int],
        *,
        edges: str = "float",
        opset: int = 21,
        composes: bool = True,
        reach: Callable[[str], tuple[float, float]] = lambda name: (-math.inf, math.inf),
    ) -> None:
        super().__init__(reserved, rounding)
        self.shapes, self.types, self.edges, self.opset = shapes, types, edges, opset
        self.composes, self.reach = composes, reach
        self.inputs: dict[str, list[Codes]] = {}
        self.sites: dict[str, Codes] = {}
        self.halves: dict[str, tuple[str, str]] = {}
        self.floats: set[str] = set()
        self.rows: dict[str, tuple[FixedPoint, Softmax | Shares | Norm]] = {}
        self.undefined: dict[str, str] = {}

    def sizes(self, tensor: str, axes: Sequence[int]) -> list[int]:
        """Return static dimensions of a tensor of the Q/DQ model."""
        shape = self.shapes.get(tensor)
        found = [None] if shape is None else [shape[axis] for axis in axes]
        sizes = [size for size in found if size is not None]
        if len(sizes) != len(found):
            raise Refused(f"the sizes of {tensor!r} along axes {list(axes)} are not static", FIXED_SIZES)
        return sizes

    def rank(self, tensor: str) -> int:
        """Return the rank of a tensor of the Q/DQ model."""
        shape = self.shapes.get(tensor)
        if shape is None:
            raise Refused(f"how many axes {tensor!r} has is unknown", FIXED_SIZES)
        return len(shape)

    def int64(self, value: FixedPoint) -> str:
        """Return the name of the integers of a value as int64."""
        self.proven.setdefault(value.name, (value.lo, value.hi))
        return self.cast(value.name, TensorProto.INT64) if value.narrow else value.name


def lowering_context(
    model: ModelProto, reserved: Sequence[str], rounding: Rounding, edges: str, *, composes: bool
) -> LoweringContext:
    """Return the context of a model, with shapes from ONNX shape inference."""
    known = with_inferred_shapes(model)
    graph, shapes = known.graph, static_sizes(known)
    types = {i.name: i.type.tensor_type.elem_type for i in (*graph.input, *graph.output, *graph.value_info)}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)

    @cache
    def bounds() -> tuple[dict[str, float], frozenset[str]]:
        read = read_graph(model, declared_types(graph))
        below = frozenset(read.tensors[tensor].name for tensor in never_above_zero(read))
        return {read.tensors[tensor].name: bound for tensor, bound in lower_bounds(read).items()}, below

    def reach(name: str) -> tuple[float, float]:
        least, below = bounds()
        return least.get(name, -math.inf), 0.0 if name in below else math.inf

    return LoweringContext(reserved, rounding, shapes, types, edges=edges, opset=opset, composes=composes, reach=reach)


def label(node: NodeProto) -> str:
    """Return the name by which a node is reported: its own, else its first output's."""
    return node_label(node).removesuffix(UNMARKED)


def integer_name(ctx: LoweringContext, value: Value | None) -> str:
    """Return the integer model's name of an integer tensor; a constant is written first."""
    if value is None:
        return ""
    if isinstance(value, Codes):
        raise Refused("it computes on quantized codes directly", "put a DequantizeLinear in front of it")
    if not isinstance(value, Integers):
        raise Refused("one of its shape or index inputs is a float tensor", "compute it on int64")
    return value.name if value.array is None else ctx.constant(value.array)


def constant_integers(value: Value | None) -> list[int] | None:
    """Return the values of a constant integer input, None if it is absent or not constant."""
    if isinstance(value, Integers) and value.array is not None:
        return [int(v) for v in value.array.reshape(-1)]
    return None


def reduced_axes(ctx: LoweringContext, node: NodeProto, args: Args) -> list[int] | None:
    """Return the axes that a reduction sums over, in order; None if it returns its input as it is."""
    attrs = attributes(node)
    axes: Sequence[int] | None = attrs.get("axes")
    if len(args) > 1 and args[1] is not None:
        axes = constant_integers(args[1])
        if axes is None:
            raise Refused("its axes are not constant", "store the axes as an initializer")
    if node.op_type.startswith("Global"):
        axes = range(2, ctx.rank(node.input[0]))
    if not axes and attrs.get("noop_with_empty_axes", 0):
        return None
    rank = ctx.rank(node.input[0])
    return sorted(axis % rank for axis in axes) if axes else list(range(rank))


def require_codes(value: Value | None, what: str = "its input") -> tuple[str, ActivationEncoding]:
    """Return the codes and encoding of a quantized operand."""
    if isinstance(value, Lookup) and value.encoding is not None:
        return value.name, value.encoding
    if isinstance(value, Constant):
        raise Refused(
            f"{what} is a constant where an activation is expected",
            "compute the result of this node once and store it in the model",
        )
    raise Refused(f"{what} is a float tensor", _NEEDS_QUANTIZE)


def move(ctx: LoweringContext, step: Movement, codes: str, encoding: ActivationEncoding, name: str) -> str:
    """Emit a node that moves codes without changing them and return its output."""
    if step.node.op_type == "MaxPool" and encoding.wide:
        return _largest_of_slices(ctx, step.node, codes, name)
    node = NodeProto()
    node.CopyFrom(step.node)
    outputs = [ctx.fresh(name if i == step.output else f"{name}.unused") for i in range(len(node.output))]
    inputs = [codes, *step.inputs]
    if step.fill is not None:
        inputs.insert(2, ctx.constant(encoding.quantize(step.fill), encoding.kind))
    while inputs and not inputs[-1]:
        inputs.pop()
    del node.input[:], node.output[:]
    node.input.extend(inputs)
    node.output.extend(outputs)
    node.name = f"{outputs[step.output]}_node"
    ctx.nodes.append(node)
    return outputs[step.output]


def concat_codes(ctx: LoweringContext, value: Value, name: str) -> Value:
    """Turn a Concat whose inputs already share one function of their codes into a plain uint8 tensor."""
    if not isinstance(value, Joined) or value.after:
        return value
    parts = [part for part in value.parts if isinstance(part, Lookup)]
    first = parts[0] if parts else None
    if first is None or len(parts) != len(value.parts):
        return value
    if any(not np.array_equal(part.values, first.values) for part in parts):
        return value
    codes = ctx.node("Concat", [part.name for part in parts], axis=value.axis, name=name)
    return dequantize_codes(codes, first.encoding) if first.encoding else Lookup(codes, first.values, None)


def _largest_of_slices(ctx: LoweringContext, node: NodeProto, codes: str, name: str) -> str:
    """Emit MaxPool of int32 codes, for which it has no kernel: the Max of one strided slice per tap, axis by axis."""
    attrs = attributes(node)
    if attrs.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise Refused("a MaxPool of 16 bits with auto_pad", "write its pads as numbers")
    axes = range(2, 2 + len(attrs["kernel_shape"]))
    sizes, wanted = (ctx.sizes(tensor, axes) for tensor in (node.input[0], node.output[0]))
    return largest_of_slices(ctx, codes, attrs, sizes, wanted, name)


def gathered_as(ctx: LoweringContext, codes: str, table: Array, name: str) -> str:
    """Emit a table look-up of another dtype than codes: GatherElements on the flattened tensor is the fast form."""
    flat = ctx.node("Reshape", [ctx.cast(codes, TensorProto.INT32), ctx.constant([-1], np.int64)])
    found = ctx.node("GatherElements", [ctx.constant(table), flat], axis=0)
    return ctx.node("Reshape", [found, ctx.node("Shape", [codes])], name=name)
