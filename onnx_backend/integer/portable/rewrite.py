"""Rewrite an integer model so that every runtime computes it exactly: int32 alone, within the table of exact ranges.

Static bounds follow every tensor of the data. A 64-bit tensor becomes a number in parts; an operator whose operands or
sums can leave the range that the table states for it is written in others; what has no such form is refused by name.
Sizes, axes and indices stay int64, as ONNX wants them: they are small.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper, shape_inference

from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.context import FIXED_SIZES
from onnx_backend.integer.ir.operations import Requantization
from onnx_backend.integer.ir.values import Array, Refused
from onnx_backend.integer.portable.numbers import FUSING, INT32, LIMITS, REDUCTIONS, Arithmetic, Number, constant
from onnx_backend.proto.inputs import static_sizes
from onnx_backend.proto.nodes import attributes
from qsdk.core.graph.op_facts import BLOCK_MOVES, MOVEMENTS

_RANGES: Mapping[int, tuple[int, int]] = MappingProxyType(
    {
        TensorProto.BOOL: (0, 1),
        TensorProto.UINT2: (0, 3),
        TensorProto.UINT4: (0, 15),
        TensorProto.UINT8: (0, 255),
        TensorProto.INT8: (-128, 127),
        TensorProto.UINT16: (0, (1 << 16) - 1),
        TensorProto.INT16: (-(1 << 15), (1 << 15) - 1),
        TensorProto.INT32: (-INT32, INT32 - 1),
        TensorProto.UINT32: (0, INT32 - 1),
        TensorProto.INT64: (-(1 << 63), (1 << 63) - 1),
        TensorProto.UINT64: (0, (1 << 64) - 1),
    }
)
#: Types whose numbers are held in int32: 64-bit ones, and uint32, which not every runtime has.
WIDE = (TensorProto.INT64, TensorProto.UINT64, TensorProto.UINT32)
#: Operators that move elements of their first input, or of all inputs.
MOVES = (MOVEMENTS - BLOCK_MOVES) | {"Pad"}
#: Operators whose results are among the elements of their inputs, in 32 bits.
_SELECTIONS = frozenset(
    ("DepthToSpace", "MaxPool", "ReduceMax", "ReduceMin", "Resize", "ScatterElements", "ScatterND", "SpaceToDepth")
)
_EVALUATED = 64  # arrays that numpy.choose takes, by which onnx's evaluator runs GatherElements
_SIZES = ("Shape", "Size", "Range", "ConstantOfShape", "NonZero")
_REMEDY = 'use target="standard", or put a QuantizeLinear/DequantizeLinear pair in front of it'
Handler = Callable[["Rewriter", NodeProto], None]


class Rewriter:
    """The state of one rewriting: the new nodes, and what is known of every tensor."""

    def __init__(
        self, b: Builder, model: ModelProto, bounds: Mapping[str, tuple[int, int]], kept: Collection[str]
    ) -> None:
        inferred = shape_inference.infer_shapes(model, data_prop=True)
        infos = (*inferred.graph.input, *inferred.graph.output, *inferred.graph.value_info)
        self.b, self.bounds, self.kept = b, bounds, kept
        self.arithmetic = Arithmetic(b)
        self.types = {info.name: info.type.tensor_type.elem_type for info in infos}
        self.shapes = static_sizes(inferred)
        self.constants: dict[str, Array] = {}
        for tensor in model.graph.initializer:
            self.types[tensor.name] = tensor.data_type
            if tensor.data_type in _RANGES:
                self.constants[tensor.name] = numpy_helper.to_array(tensor)
        self.numbers: dict[str, Number] = {}
        self.sizes: set[str] = set()
        self.given: set[str] = set()  # 64-bit tensors that are there as a whole: ids, masks, places
        self.inputs = {info.name for info in model.graph.input}
        self.outputs = {info.name for info in model.graph.output}
        self.renamed: dict[str, str] = {}
        self.fusing: set[str] = set()  # results of float32 kernels, that may take what follows into them
        for info in model.graph.input:
            kind = info.type.tensor_type.elem_type
            if kind in WIDE:
                self.given.add(info.name)
            elif kind in _RANGES:
                self.numbers[info.name] = Number((info.name,), *_RANGES[kind])

    def number(self, name: str) -> Number:
        """Return a tensor as a number; raise `Refused` for one that is not of the data."""
        if name not in self.numbers and name in self.constants:
            self.numbers[name] = constant(self.constants[name])
        if name not in self.numbers and name in self.given:
            if name in self.inputs:
                self.b.assumed.append(f"the integers of the input {name!r} fit in 32 bits")
            self.numbers[name] = Number((self.b.cast(name, TensorProto.INT32),), *_RANGES[TensorProto.INT32])
        if name not in self.numbers:
            raise Refused(f"it computes with {name!r}, a size that is not fixed", FIXED_SIZES)
        return self.numbers[name]

    def int32(self, name: str) -> Number:
        """Return a tensor as a number whose parts are int32."""
        found = self.number(name)
        if name in self.fusing:
            return Number((self.apart(name),), found.lo, found.hi)
        if found.array is not None or self.types.get(name) in (TensorProto.INT32, *WIDE):
            return found
        return Number((self.b.cast(self.readable(name), TensorProto.INT32),), found.lo, found.hi)

    def readable(self, name: str) -> str:
        """Return the tensor of the new model that holds a tensor."""
        name = self.renamed.get(name, name)
        if name in self.given:
            return name
        found = self.numbers.get(name)
        if found is None or found.array is not None or self.types.get(name) not in WIDE:
            return name
        self.renamed[name] = self.b.cast(self.arithmetic.flat(found), self.types[name])
        return self.renamed[name]

    def apart(self, name: str) -> str:
        """Return a tensor behind an operator that no kernel takes in, so that what follows is computed on integers."""
        return self.arithmetic.apart(self.readable(name))

    def reduced(self, op_type: str, inputs: list[str], attrs: Mapping[str, Any]) -> str:
        """Write a reduction of int32 apart from what follows it."""
        return self.arithmetic.apart(self.b.node(op_type, inputs, **attrs))

    def copy_apart(self, node: NodeProto, bounds: tuple[int, int] | None = None) -> None:
        """Copy a node whose kernel is of float32, apart from the int32 arithmetic in front of it."""
        copied = NodeProto()
        copied.CopyFrom(node)
        for i, name in enumerate(node.input):
            if self.types.get(name) == TensorProto.INT32 and name not in self.constants:
                copied.input[i] = self.apart(name)
        self.copy(copied, bounds)

    def copy(self, node: NodeProto, bounds: tuple[int, int] | None = None) -> None:
        """Copy a node whose inputs are what it needs."""
        copied = NodeProto()
        copied.CopyFrom(node)
        names = [
            self.numbers[n].parts[0] if node.op_type == "Shape" and self.is_wide(n) and n not in self.given else n
            for n in node.input
        ]
        del copied.input[:]
        copied.input.extend(self.readable(name) if name else "" for name in names)
        if node.op_type in REDUCTIONS and self.types[node.output[0]] == TensorProto.INT32:
            found = self.reduced(node.op_type, list(copied.input), attributes(node))
            self.b.write("Identity", [found], node.output[0])
        else:
            self.b.nodes.append(copied)
        if node.op_type in FUSING:
            self.fusing.update(node.output)
        for name in node.output:
            if bounds is None and self.types.get(name) not in _RANGES:
                continue
            if self.types[name] in WIDE:
                self.given.add(name)
                continue
            lo, hi = _RANGES[self.types[name]]
            own = self.bounds.get(name, (lo, hi))
            given = bounds or (lo, hi)
            self.numbers[name] = Number((name,), max(lo, given[0], own[0]), min(hi, given[1], own[1]))

    def is_wide(self, name: str) -> bool:
        """Return True for a 64-bit tensor of the data, which is there in parts alone."""
        return name in self.numbers and self.types.get(name) in WIDE and self.numbers[name].array is None

    def found(self, name: str, value: Number) -> None:
        """Note a result, and write it as a whole where its type is not held in int32."""
        kind = self.types[name]
        lo, hi = _RANGES[kind]
        own = self.bounds.get(name, (lo, hi))
        value = replace(value, lo=max(value.lo, lo, own[0]), hi=min(value.hi, hi, own[1]))
        self.numbers[name] = value
        if kind in WIDE and (kind != TensorProto.UINT32 or name in self.outputs):
            if name in self.outputs:
                self.b.write("Cast", [self.arithmetic.flat(value)], name, to=kind)
            return
        whole = self.arithmetic.flat(value)
        if kind not in (TensorProto.INT32, TensorProto.UINT32):
            self.b.write("Cast", [whole], name, to=kind)
        else:
            self.b.write("Identity", [whole], name)
        self.numbers[name] = Number((name,), value.lo, value.hi)
        self.fusing.discard(name)

    def truth(self, name: str, test: str) -> None:
        """Note a bool result."""
        if name in self.kept:
            self.b.write("Identity", [test], name)
        else:
            self.renamed[name] = test
        self.numbers[name] = Number((name,), 0, 1)

    def count(self, node: NodeProto, axes: Collection[int] | None) -> int:
        """Return how many elements are summed along axes of the first input; raise `Refused` for open sizes."""
        shape = self.shapes.get(node.input[0])
        along = None if shape is None else [shape[axis] for axis in (range(len(shape)) if axes is None else axes)]
        if along is None or any(size is None for size in along):
            raise Refused("the sizes that it sums over are not fixed", FIXED_SIZES)
        return int(np.prod([size for size in along if size is not None], dtype=np.int64))


def data_inputs(node: NodeProto) -> list[str]:
    """Return the inputs of a node that hold data, not sizes, axes, indices or conditions."""
    if node.op_type in MOVES or node.op_type in ("ReduceSum", "ReduceMax", "ReduceMin", "CumSum", "TopK", "Resize"):
        return list(node.input[:1])
    if node.op_type in ("ScatterElements", "ScatterND"):
        return [node.input[0], node.input[2]]
    if node.op_type == "Where":
        return list(node.input[1:])
    return [name for name in node.input if name]


def proven_bounds(b: Builder) -> dict[str, tuple[int, int]]:
    """Return the smallest and the largest value of every tensor for which a lowering has proven them."""
    terms = [term for op in b.nodes if isinstance(op, Requantization) for term in op.value.terms]
    return {**b.proven, **{term.name: (int(term.lo.min()), int(term.hi.max())) for term in terms}}


def rewritten(
    model: ModelProto,
    b: Builder,
    exact: Collection[str],
    bounds: Mapping[str, tuple[int, int]],
    handlers: Mapping[str, Handler],
) -> list[tuple[str, str, Refused]]:
    """Write the nodes of a model anew into `b`; return node, operator and refusal of what has no such form.

    The model is integer-only, in the operators of the standard target, and was written by `b`. Nodes with a result in
    `exact` stay as they are; `bounds` has the smallest and the largest value of tensors, where known.
    """
    graph = model.graph
    kept = {info.name for info in graph.output} | set(bounds)
    state, refusals = Rewriter(b, model, bounds, kept), []
    b.nodes = []
    for node in graph.node:
        b.label = node.output[0]
        try:
            _write(state, node, exact, handlers)
        except Refused as refused:
            refusals.append((node.output[0], node.op_type, refused))
            for name in node.output:
                state.numbers[name] = Number((name,), 0, 1)
    return refusals


def evaluable(b: Builder) -> list[NodeProto]:
    """Return the nodes with look-ups in stored tables of more than 64 entries as Gather.

    GatherElements takes a fifth of its time in ONNX Runtime, and onnx's own evaluator raises for such a table.
    """
    tables = {tensor.name: tensor for tensor in b.initializers}
    nodes = [node for node in b.nodes if isinstance(node, NodeProto)]
    for node in nodes:
        if node.op_type == "GatherElements" and node.input[0] in tables:
            table, axis = numpy_helper.to_array(tables[node.input[0]]), attributes(node).get("axis", 0)
            rows = np.moveaxis(table, axis, -1).reshape(-1, table.shape[axis])
            if rows.shape[1] > _EVALUATED and np.all(rows == rows[0]):
                del node.attribute[:]
                node.op_type, node.input[0] = "Gather", b.constant(rows[0], stem="table")
                node.attribute.append(helper.make_attribute("axis", 0))
    return nodes


def _write(state: Rewriter, node: NodeProto, exact: Collection[str], handlers: Mapping[str, Handler]) -> None:
    inputs = data_inputs(node)
    known = [name for name in inputs if name not in state.constants]
    if node.output[0] in exact or node.op_type == "QuantizeLinear":
        state.copy(node)
    elif node.op_type in _SIZES or (known and all(name in state.sizes for name in known)):
        state.copy(node)
        state.sizes.update(node.output)
        for name in node.output:
            state.numbers.pop(name, None)
    elif node.op_type in handlers:
        handlers[node.op_type](state, node)
    elif node.op_type in LIMITS:
        values = [state.number(name) for name in inputs]
        if any(state.types.get(name) in WIDE for name in inputs):
            raise Refused(f"{node.op_type} of 64-bit integers has no form in 32 bits", _REMEDY)
        if any(max(-value.lo, value.hi) > min(LIMITS[node.op_type], INT32) for value in values):
            raise Refused(f"its numbers can be beyond {LIMITS[node.op_type]}", _REMEDY)
        selects = node.op_type in _SELECTIONS and attributes(node).get("reduction", "none") != "add"
        state.copy(node, (min(v.lo for v in values), max(v.hi for v in values)) if selects else None)
    else:
        raise Refused(f"{node.op_type} is not known to be the same on every runtime", _REMEDY)
