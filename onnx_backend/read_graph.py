"""From an ONNX model, marked or not, to the neutral graph that planning reads."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
import onnx.inliner
from onnx import ModelProto, NodeProto, TensorProto, TypeProto, helper

from onnx_backend.model import (
    array,
    attributes,
    constant_tensor,
    initializers,
    input_names,
    is_mark,
    load,
    rename_inputs,
    replace_nodes,
    unique,
)
from qsdk.core.errors import ModelError
from qsdk.core.graph import Graph, Op, Tensor
from qsdk.core.operands import operands_of
from qsdk.core.site import site_name

_CONTROL_FLOW = frozenset({"If", "Loop", "Scan", "SequenceMap"})
_SMALL = 64  # constants up to this many elements keep their value
_LARGE = 4096  # initializers beyond this many elements are hidden from shape inference
Shape = tuple[int | str | None, ...]


@dataclass
class _Stripped:
    """A model without marks: nodes and what the marks said."""

    nodes: list[NodeProto] = field(default_factory=list)
    sites: dict[str, str] = field(default_factory=dict)  # tensor name -> site
    alias: dict[str, str] = field(default_factory=dict)  # a mark's output -> the tensor it marks

    def name(self, tensor: str) -> str:
        return self.alias.get(tensor, tensor)


def read_graph(model: ModelProto) -> Graph:
    """Read a model: its marks become sites, or, if it has none, every float tensor gets one of its own.

    A mark is an identity: what goes in and what comes out is one tensor. Tensor ids ascend over constants, graph
    inputs and op outputs in order.

    Raises:
        ModelError: the model has control flow, its types contradict each other, or one site marks two tensors.
    """
    model = inlined(load(model))
    _refuse_control_flow(model)
    marked = any(is_mark(node) for node in model.graph.node)
    stripped = _strip(model)
    plain = _without_marks(model, stripped)
    types = _types(plain)
    graph = _build(plain, stripped, types)
    return graph if marked else _with_sites(graph)


def inlined(model: ModelProto) -> ModelProto:
    """The model with the bodies of its functions in the place of their calls."""
    return onnx.inliner.inline_local_functions(model) if model.functions else model


def _refuse_control_flow(model: ModelProto) -> None:
    for node in model.graph.node:
        if node.op_type in _CONTROL_FLOW:
            named = node.name or node.output[0]
            raise ModelError(
                f"the node {named!r} is {node.op_type}, control flow that cannot be quantized yet; export the model "
                "without data-dependent branches or loops"
            )


def _strip(model: ModelProto) -> _Stripped:
    """Drop marks; a second site on the same tensor stays as an Identity of its own."""
    found = _Stripped()
    homes: dict[str, str] = {}  # site -> tensor that carries it
    origins: dict[str, str] = {}  # site -> tensor that was marked
    for node in model.graph.node:
        if not is_mark(node):
            found.nodes.append(node)
            continue
        site, source, output = str(attributes(node)["key"]), found.name(node.input[0]), node.output[0]
        if site in homes:
            if source not in (origins[site], homes[site]):
                raise ModelError(f"the site {site} marks two tensors, {origins[site]!r} and {source!r}; report this")
            found.alias[output] = homes[site]
            continue
        origins[site] = source
        if source in found.sites:
            found.nodes.append(helper.make_node("Identity", [source], [output], node.name or f"{site}/identity"))
            source = output
        else:
            found.alias[output] = source
        homes[site] = source
        found.sites[source] = site
    return found


def _without_marks(model: ModelProto, stripped: _Stripped) -> ModelProto:
    """The model as standard ONNX, with large weights left out, so that shape inference is cheap."""
    plain = ModelProto()
    plain.CopyFrom(model)
    replace_nodes(plain.graph, stripped.nodes)
    rename_inputs(plain.graph.node, stripped.alias)
    for value in plain.graph.output:
        value.name = stripped.name(value.name)
    kept = [entry for entry in plain.opset_import if entry.domain != "qsdk"]
    del plain.opset_import[:]
    plain.opset_import.extend(kept)
    return plain


def _types(model: ModelProto) -> dict[str, tuple[str, Shape | None]]:
    """Tensor name -> dtype and shape, where they can be inferred."""
    light = ModelProto()
    light.CopyFrom(model)
    given = {value.name for value in light.graph.input}
    small = []
    for tensor in light.graph.initializer:
        if np.prod(tensor.dims) <= _LARGE:
            small.append(tensor)
        elif tensor.name not in given:
            light.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    del light.graph.initializer[:]
    light.graph.initializer.extend(small)
    try:
        inferred = onnx.shape_inference.infer_shapes(light, data_prop=True)
    except (onnx.shape_inference.InferenceError, RuntimeError) as error:
        raise ModelError(f"the model's types contradict each other: {error}; run qsdk.validate on it") from error
    values = (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output)
    return {value.name: _type(value.type) for value in values}


def _type(proto: TypeProto) -> tuple[str, Shape | None]:
    tensor = proto.tensor_type
    if not proto.HasField("tensor_type") or not tensor.elem_type:
        return "", None
    if not tensor.HasField("shape"):
        return dtype_name(tensor.elem_type), None
    return dtype_name(tensor.elem_type), tuple(_dimension(dim) for dim in tensor.shape.dim)


def _dimension(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    return str(dim.dim_param) or None


def dtype_name(code: int) -> str:
    """The NumPy-style name of a TensorProto type."""
    if code == TensorProto.STRING:
        return "str"
    return str(np.dtype(helper.tensor_dtype_to_np_dtype(code)).name)


def _build(model: ModelProto, stripped: _Stripped, types: Mapping[str, tuple[str, Shape | None]]) -> Graph:
    tensors: list[Tensor] = []
    ids: dict[str, int] = {}

    def add(name: str, tensor: Tensor) -> int:
        ids[name] = len(tensors)
        tensors.append(tensor)
        return ids[name]

    constants = dict(initializers(model.graph))
    ordinary = []
    for node in model.graph.node:
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
            constants[node.output[0]] = constant_tensor(node)
        else:
            ordinary.append(node)
    for name, stored in constants.items():
        add(name, _constant(name, stored, stripped.sites.get(name)))
    inputs = [add(name, Tensor(name, *types[name], stripped.sites.get(name))) for name in input_names(model.graph)]
    ops = []
    for node in ordinary:
        unmade = [name for name in node.input if name and name not in ids]
        if unmade:
            named = node.name or node.output[0]
            raise ModelError(f"the node {named!r} reads {unmade[0]!r}, which nothing before it makes; sort the nodes")
        read = tuple(ids[name] if name else None for name in node.input)
        made = []
        for name in node.output:
            if name:
                dtype, shape = types.get(name, ("", None))
                if not dtype and any(t is not None and tensors[t].is_float for t in read):
                    dtype = "float32"  # an op without inference (another domain): better a site than a silent float
                made.append(add(name, Tensor(name, dtype, shape, stripped.sites.get(name))))
        ops.append(Op(node.op_type, read, tuple(made), attributes(node), node.name, node.domain))
    return Graph(tensors, ops, inputs, [ids[value.name] for value in model.graph.output])


def _constant(name: str, stored: TensorProto, site: str | None) -> Tensor:
    shape = tuple(int(n) for n in stored.dims)
    value = array(stored) if np.prod(shape) <= _SMALL else None
    return Tensor(name, dtype_name(stored.data_type), shape, site, True, value)


def _with_sites(graph: Graph) -> Graph:
    """Name a site at every float tensor of a model without marks: inputs and op outputs first, then stored operands."""
    tensors = list(graph.tensors)
    taken: set[str] = set()
    for index in graph.inputs:
        taken.add(tensors[index].name)
        if tensors[index].dtype == "float32":
            tensors[index] = replace(tensors[index], site=site_name(tensors[index].name, "input"))
    owners = []
    for op in graph.ops:
        owner = unique(op.name or tensors[op.outputs[0]].name, taken)
        owners.append(owner)
        for position, index in enumerate(op.outputs):
            if tensors[index].dtype == "float32" and graph.constant_root(index) is None:
                port = f"output{position}" if position else "output"
                tensors[index] = replace(tensors[index], site=site_name(owner, port))
    for op_id, owner in enumerate(owners):
        _site_operands(graph, op_id, owner, tensors)
    return replace(graph, tensors=tensors)


def _site_operands(graph: Graph, op_id: int, owner: str, tensors: list[Tensor]) -> None:
    ports: set[str] = set()
    for operand in operands_of(graph, op_id):
        facts = tensors[operand.root]
        plain = facts.dtype == "float32" and any(n != 1 for n in facts.shape or ())
        if operand.role == "statistic" or facts.site is not None or not plain:
            continue
        port = unique(operand.role, ports)
        tensors[operand.root] = replace(facts, site=site_name(owner, port))
