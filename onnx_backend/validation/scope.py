"""What a rule gets and gives: the scope of a node, bodies and functions included, and the rows of a report."""

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import onnx
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from onnx_backend.proto.graph_queries import producers
from onnx_backend.proto.nodes import attributes, constant_tensor, is_constant, node_label
from onnx_backend.proto.opsets import opset_of
from onnx_backend.proto.subgraphs import bodies, reads
from onnx_backend.proto.weightless import skeleton

Shape = tuple[int | None, ...]
STANDARD = ("", "ai.onnx")
CONTRIB = "com.microsoft"
T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """A row of a validation report.

    Attributes:
        node: the node's name (a path through functions and branches), else its first output's; a stored tensor's name
            where no node is at fault; "" for the model.
        rule: output_dtype, dtype, opset, shape, scale, zero_point, pair, grid, stored, unused, runtime,
            kernel, default_session, session, dialect, sizes, clip, placement, not_probed, speed or checker.
        severity: error, warning, or note, of what is right and takes more time than it need.
        problem: what is wrong.
        remedy: what to do.
    """

    node: str
    rule: str
    severity: Literal["error", "warning", "note"]
    problem: str
    remedy: str


def error(node: str, rule: str, problem: str, remedy: str) -> Finding:
    """Return a finding that makes the model invalid, or its meaning contradictory."""
    return Finding(node, rule, "error", problem, remedy)


def warning(node: str, rule: str, problem: str, remedy: str) -> Finding:
    """Return a finding in a valid model: the runtime cannot run it (`runtime`, `kernel`), or it is hardly intended."""
    return Finding(node, rule, "warning", problem, remedy)


def note(node: str, rule: str, problem: str, remedy: str) -> Finding:
    """Return a finding in a model that is right and takes more time than it need."""
    return Finding(node, rule, "note", problem, remedy)


@dataclass(frozen=True)
class Scope:
    """The known facts at a node; each mapping looks outwards from the innermost body.

    Attributes:
        opset: of the default domain.
        path: through functions and branches, to put before names.
        own: initializers and constants of this graph by name.
        stored: the same, and those of the graphs around it.
        types: tensor name -> TensorProto type, declared or inferred.
        shapes: tensor name -> shape, None where a dimension is not known.
        makers: tensor name -> the node that computes it.
        read: the names that something reads, here or in a body, or that leave this graph.
    """

    opset: int
    path: str
    own: Mapping[str, TensorProto]
    stored: Mapping[str, TensorProto]
    types: Mapping[str, int]
    shapes: Mapping[str, Shape]
    makers: Mapping[str, NodeProto]
    read: frozenset[str]

    def name(self, node: NodeProto) -> str:
        """Return a node's name with its path, else its first output's."""
        return self.path + node_label(node)

    def type(self, tensor: str) -> int:
        """Return the TensorProto type, 0 where it is unknown or the tensor absent."""
        if tensor in self.stored:
            return int(self.stored[tensor].data_type)
        maker = self.makers.get(tensor)
        if maker is not None and maker.op_type == "QuantizeLinear":
            return self.made_type(maker)  # the node decides: a declared type may be the error
        return self.types.get(tensor, 0)

    def made_type(self, node: NodeProto) -> int:
        """Return the result type of a QuantizeLinear or DequantizeLinear by the operator's rules; 0 where unknown."""
        asked = next((int(attribute.i) for attribute in node.attribute if attribute.name == "output_dtype"), 0)
        if node.op_type == "DequantizeLinear":
            return asked or self.type(node.input[1])
        zero_point = node.input[2] if len(node.input) > 2 else ""
        return (self.type(zero_point) if zero_point else 0) or asked or (0 if zero_point else int(TensorProto.UINT8))

    def shape(self, tensor: str) -> Shape | None:
        """Return the shape, None where it is unknown."""
        return tuple(self.stored[tensor].dims) if tensor in self.stored else self.shapes.get(tensor)


@dataclass(frozen=True)
class Operand:
    """An input of a node: its name, "" where it is absent, its type, 0 where unknown, and its shape."""

    name: str
    type: int
    shape: Shape | None


@dataclass(frozen=True)
class Quantizer:
    """A QuantizeLinear or DequantizeLinear with what its scope says of it: name, operands, the type of its result."""

    node: NodeProto
    scope: Scope
    name: str
    options: Mapping[str, Any]
    x: Operand
    scale: Operand
    zero_point: Operand
    made_type: int
    quantizes: bool  # rather than dequantizes
    is_contrib: bool  # the runtime's own op


def quantizer_of(node: NodeProto, scope: Scope) -> Quantizer:
    """Return a QuantizeLinear or DequantizeLinear with what its scope says of it."""
    names = [*node.input, "", ""][:3]
    x, scale, zero = (Operand(name, *((scope.type(name), scope.shape(name)) if name else (0, None))) for name in names)
    kinds = node.op_type == "QuantizeLinear", node.domain == CONTRIB
    return Quantizer(node, scope, scope.name(node), attributes(node), x, scale, zero, scope.made_type(node), *kinds)


def quantizers_in(scope: Scope, nodes: Iterable[NodeProto]) -> list[Quantizer]:
    """Return the QuantizeLinear and DequantizeLinear of a graph, without those that lack a scale."""
    return [quantizer_of(node, scope) for node in nodes if is_quantizer(node) and len(node.input) > 1]


def scopes(model: ModelProto) -> Iterator[tuple[Scope, Iterable[NodeProto]]]:
    """Yield every graph and function of a model with its scope; large weights are not copied."""
    outside = Scope(opset_of(model), "", {}, {}, {}, {}, {}, frozenset())
    graph = _inferred(model).graph
    yield from _graph_scopes(graph, _named(model.graph.initializer), outside, "")
    for function in model.functions:
        own = max((e.version for e in function.opset_import if e.domain in STANDARD), default=outside.opset)
        yield from _function_scopes(function, own)


def is_quantizer(node: NodeProto) -> bool:
    """Return True if a node is a QuantizeLinear or DequantizeLinear, of the standard or as a contrib op."""
    return node.op_type in ("QuantizeLinear", "DequantizeLinear") and node.domain in (*STANDARD, CONTRIB)


def _inferred(model: ModelProto) -> ModelProto:
    light = skeleton(model)
    try:
        return onnx.shape_inference.infer_shapes(light)
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError):
        return light  # the rules find contradictions, with names


def _graph_scopes(
    graph: GraphProto, stored: Mapping[str, TensorProto], outer: Scope, path: str
) -> Iterator[tuple[Scope, Iterable[NodeProto]]]:
    types, shapes = _declared((*graph.value_info, *graph.input, *graph.output))
    own = {**stored, **_constants(graph.node)}
    scope = Scope(
        outer.opset,
        path,
        own,
        _inside(own, outer.stored),
        _inside(types, outer.types),
        _inside(shapes, outer.shapes),
        _inside(producers(graph.node), outer.makers),
        _read(graph.node, (value.name for value in graph.output)),
    )
    yield scope, graph.node
    yield from _body_scopes(graph.node, scope)


def _inside(inner: Mapping[str, T], outer: Mapping[str, T]) -> Mapping[str, T]:
    """Return names as a body sees them; a graph with many bodies is not copied for each."""
    return ChainMap(inner, outer) if outer else inner  # type: ignore[arg-type]


def _body_scopes(nodes: Iterable[NodeProto], scope: Scope) -> Iterator[tuple[Scope, Iterable[NodeProto]]]:
    for node in nodes:
        for name, body in bodies(node):
            yield from _graph_scopes(body, _named(body.initializer), scope, f"{scope.name(node)}/{name}/")


def _named(tensors: Iterable[TensorProto]) -> dict[str, TensorProto]:
    return {tensor.name: tensor for tensor in tensors}


def _function_scopes(function: FunctionProto, opset: int) -> Iterator[tuple[Scope, Iterable[NodeProto]]]:
    types, shapes = _declared(function.value_info)
    stored, makers = _constants(function.node), producers(function.node)
    read = _read(function.node, function.output)
    scope = Scope(opset, f"{function.name}/", stored, stored, types, shapes, makers, read)
    yield scope, function.node
    yield from _body_scopes(function.node, scope)


def _read(nodes: Iterable[NodeProto], outputs: Iterable[str]) -> frozenset[str]:
    return frozenset(name for node in nodes for name in reads(node)).union(outputs)


def _constants(nodes: Iterable[NodeProto]) -> dict[str, TensorProto]:
    found = {}
    for node in nodes:
        if is_constant(node):
            attribute = node.attribute[0]
            found[node.output[0]] = attribute.t if attribute.name == "value" else constant_tensor(node)
    return found


def _declared(values: Iterable[ValueInfoProto]) -> tuple[dict[str, int], dict[str, Shape]]:
    types: dict[str, int] = {}
    shapes: dict[str, Shape] = {}
    for value in values:
        tensor = value.type.tensor_type
        types[value.name] = int(tensor.elem_type)
        if tensor.HasField("shape"):
            dims = tensor.shape.dim
            shapes[value.name] = tuple(int(d.dim_value) if d.HasField("dim_value") else None for d in dims)
    return types, shapes


def type_name(code: int) -> str:
    """Return the name of a TensorProto type."""
    return str(TensorProto.DataType.Name(code)) if code in TensorProto.DataType.values() else f"type {code}"
