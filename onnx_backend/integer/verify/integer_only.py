"""Check that a model computes only on integers between its quantized edges, in the standard domain."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, checker, helper
from onnx.shape_inference import InferenceError, infer_shapes

from onnx_backend.proto.nodes import node_label
from qsdk.core.errors import IntegerError

_STANDARD = ("", "ai.onnx")
_INTEGER = frozenset(
    {
        *(TensorProto.INT64, TensorProto.INT32, TensorProto.INT16, TensorProto.INT8, TensorProto.INT4),
        *(TensorProto.UINT64, TensorProto.UINT32, TensorProto.UINT16, TensorProto.UINT8, TensorProto.UINT4),
        *(TensorProto.INT2, TensorProto.UINT2),
        TensorProto.BOOL,
    }
)
_QDQ = ("QuantizeLinear", "DequantizeLinear")
_CONTRIB = "com.microsoft"
_TWO, _BINARY = (1, 3), (1, 4, 6)
#: Kernels with their own requantization -> which inputs are float constants: scales (every third of a Concat's).
_SCALES: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "QLinearConv": _BINARY,
        "QLinearMatMul": _BINARY,
        "QLinearAdd": _BINARY,
        "QLinearMul": _BINARY,
        "QGemm": (1, 4, 7),
        "QLinearSigmoid": _TWO,
        "QLinearLeakyRelu": _TWO,
        "QLinearSoftmax": _TWO,
        "QLinearAveragePool": _TWO,
        "QLinearGlobalAveragePool": _TWO,
        "QLinearConcat": (),
    }
)


@dataclass(frozen=True)
class FloatUse:
    """A violation: a place where a model is not integer-only.

    Attributes:
        kind: `float tensor`, `quantize node`, `domain` or `invalid`.
        where: the node, tensor or domain.
        reason: why it is a violation.
    """

    kind: str
    where: str
    reason: str


def integer_findings(
    model: ModelProto, *, edges: str = "float", kernels: bool = False, islands: Collection[str] = ()
) -> list[FloatUse]:
    """Return everything in a model that is not integer-only; an empty list means that it is.

    `kernels` allows QLinearConv, QLinearMatMul and the quantized operators of com.microsoft, which requantize with
    constant float scales, besides integer operators. No tensor between the edges is float, except those in `islands`.

    With `edges="float"` a QuantizeLinear may read a float graph input and a DequantizeLinear may write a float graph
    output, with their float scales, and an input may be float that nothing reads; with `edges="integer"` there is no
    such exception.
    """
    findings = [
        FloatUse("domain", entry.domain, "the model imports a domain outside the standard")
        for entry in model.opset_import
        if entry.domain not in _STANDARD and not (kernels and entry.domain == _CONTRIB)
    ]
    findings += [FloatUse("domain", f.name, "a model-local function hides its body") for f in model.functions]
    try:
        checker.check_model(model, full_check=True)
        inferred = infer_shapes(model, check_type=True, strict_mode=True)
    except (checker.ValidationError, InferenceError) as error:
        findings.append(FloatUse("invalid", "model", str(error).strip().splitlines()[0]))
        inferred = infer_shapes(model)
    graph = inferred.graph
    inputs, outputs = {i.name for i in graph.input}, {o.name for o in graph.output}
    at_edge = _edge_nodes(graph, inputs, outputs) if edges == "float" else set()
    read = {name for node in graph.node if node.op_type != "Shape" for name in node.input} | outputs
    unread = inputs - read if edges == "float" else set()
    findings += _graph_findings(graph, at_edge, unread, kernels, frozenset(islands))
    return findings


def require_integer_only(
    model: ModelProto, *, edges: str = "float", kernels: bool = False, islands: Collection[str] = ()
) -> None:
    """Raise unless the model is integer-only between its edges."""
    findings = integer_findings(model, edges=edges, kernels=kernels, islands=islands)
    if findings:
        lines = [f"  {finding.kind} {finding.where!r}: {finding.reason}" for finding in findings]
        raise IntegerError("the model is not integer-only; convert it with to_integer()\n" + "\n".join(lines))


def _edge_nodes(graph: GraphProto, inputs: set[str], outputs: set[str]) -> set[int]:
    """Return the indices of the Q/DQ nodes at a float edge."""
    read = {name for node in graph.node for name in node.input}
    return {
        index
        for index, node in enumerate(graph.node)
        if (node.op_type == "QuantizeLinear" and node.input[0] in inputs)
        or (node.op_type == "DequantizeLinear" and node.output[0] in outputs and node.output[0] not in read)
    }


def _in_island(node: NodeProto, islands: frozenset[str]) -> bool:
    return bool(islands.intersection(node.output)) or (node.op_type == "QuantizeLinear" and node.input[0] in islands)


def _scale_inputs(node: NodeProto, kernels: bool) -> list[str]:
    """Return the inputs of a node that may be float constants: the scales of a kernel that is allowed."""
    if not kernels or node.op_type not in _SCALES:
        return []
    if node.op_type == "QLinearConcat":
        return list(node.input[::3])
    return [node.input[i] for i in _SCALES[node.op_type]]


def _graph_findings(
    graph: GraphProto, at_edge: set[int], unread: set[str], kernels: bool, islands: frozenset[str]
) -> Iterator[FloatUse]:
    types = {i.name: i.type for i in (*graph.input, *graph.output, *graph.value_info)}
    edge_nodes = [node for index, node in enumerate(graph.node) if index in at_edge]
    free = unread | {node.input[0] for node in edge_nodes if node.op_type == "QuantizeLinear"}
    free |= {node.output[0] for node in edge_nodes if node.op_type == "DequantizeLinear"} | islands
    scales = {node.input[1] for node in edge_nodes}
    scales.update(node.input[1] for node in graph.node if node.op_type in _QDQ and _in_island(node, islands))
    scales.update(name for node in graph.node for name in _scale_inputs(node, kernels))
    constants = {tensor.name for tensor in graph.initializer}
    yield from _tensor_findings(graph, types, free, scales)
    for index, node in enumerate(graph.node):
        if node.domain not in _STANDARD and not (kernels and node.op_type in _SCALES):
            yield FloatUse("domain", node_label(node), f"{node.op_type} is of domain {node.domain!r}")
        if index in at_edge or _in_island(node, islands):
            continue
        if node.op_type in _QDQ:
            yield FloatUse("quantize node", node_label(node), f"{node.op_type} stands between the edges")
        own = _scale_inputs(node, kernels)
        for name in node.input:
            if name in own and name in constants:
                continue
            if name in free and node.op_type != "Shape":
                yield FloatUse("float tensor", node_label(node), f"{node.op_type} reads the float edge {name!r}")
            if name in scales:
                yield FloatUse("float tensor", node_label(node), f"{node.op_type} reads the float scale {name!r}")
        yield from _output_findings(node, types, free)
        yield from _attribute_findings(node)


def _tensor_findings(
    graph: GraphProto, types: dict[str, TypeProto], free: set[str], scales: set[str]
) -> Iterator[FloatUse]:
    for tensor in graph.initializer:
        if tensor.data_type not in _INTEGER and tensor.name not in scales and tensor.name not in free:
            yield FloatUse("float tensor", tensor.name, f"an initializer of {_dtype(tensor.data_type)}")
    for sparse in graph.sparse_initializer:
        if sparse.values.data_type not in _INTEGER:
            yield FloatUse("float tensor", sparse.values.name, "a sparse float initializer")
    for info in (*graph.input, *graph.output):
        kind = types[info.name].tensor_type.elem_type
        if kind not in _INTEGER and info.name not in free:
            yield FloatUse("float tensor", info.name, f"a graph edge of {_dtype(kind)} without its Q/DQ node")


def _output_findings(node: NodeProto, types: dict[str, TypeProto], free: set[str]) -> Iterator[FloatUse]:
    for name in filter(None, node.output):
        kind = types[name].tensor_type.elem_type if name in types else TensorProto.UNDEFINED
        if kind not in _INTEGER and name not in free:
            yield FloatUse("float tensor", node_label(node), f"{node.op_type} makes {name!r} of {_dtype(kind)}")


def _attribute_findings(node: NodeProto) -> Iterator[FloatUse]:
    for attribute in node.attribute:
        value = helper.get_attribute_value(attribute)
        if attribute.type in (AttributeProto.TENSOR, AttributeProto.TENSORS):
            tensors = [value] if attribute.type == AttributeProto.TENSOR else value
            bad = [_dtype(t.data_type) for t in tensors if t.data_type not in _INTEGER]
            if bad:
                yield FloatUse("float tensor", node_label(node), f"attribute {attribute.name!r} holds {', '.join(bad)}")
        elif node.op_type == "Constant" and attribute.type in (AttributeProto.FLOAT, AttributeProto.FLOATS):
            yield FloatUse("float tensor", node_label(node), f"a Constant with {attribute.name!r}")
        elif attribute.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
            for graph in [value] if attribute.type == AttributeProto.GRAPH else value:
                yield from _graph_findings(graph, set(), set(), False, frozenset())


def _dtype(code: int) -> str:
    return "an unknown dtype" if code == TensorProto.UNDEFINED else TensorProto.DataType.Name(code).lower()
