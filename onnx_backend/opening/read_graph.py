"""Read an ONNX model, marked or not, into the neutral graph of planning."""

import math
from ast import literal_eval
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import onnx.inliner
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import initializers, input_names, names_in, unique
from onnx_backend.proto.lazy_tensors import without_large
from onnx_backend.proto.nodes import (
    MARK_DOMAIN,
    attributes,
    constant_tensor,
    is_constant,
    is_mark,
    metadata,
    node_label,
    rename_inputs,
    replace_nodes,
    retain,
)
from onnx_backend.proto.subgraphs import all_nodes, bodies, has_bodies, reads
from onnx_backend.proto.weightless import Types, dtype_name, types_of
from onnx_backend.qdq.read import FLOAT_CODES
from qsdk.core.arrays import Array
from qsdk.core.errors import ModelError
from qsdk.core.graph.graph import Graph, Op, Tensor
from qsdk.core.planning.operands import is_scalar, operands_of
from qsdk.core.site import site_name

_SMALL = 4096  # constants up to this many elements keep their value: bounds, axes, and masks that planning looks into
_LARGEST_MASK = 1 << 22  # and stored attention masks up to this many
_SCOPES = "pkg.torch.onnx.name_scopes"  # metadata of a node that torch's exporter writes
_READ_MASKS = frozenset({"Add", "Where", "Slice", "Expand", "Unsqueeze"})


@dataclass
class _Stripped:
    """A model without marks: its nodes, and the sites of the marks."""

    nodes: list[NodeProto] = field(default_factory=list)
    sites: dict[str, str] = field(default_factory=dict)  # tensor name -> site
    alias: dict[str, str] = field(default_factory=dict)  # a mark's output -> the tensor it marks

    def name(self, tensor: str) -> str:
        """Return the name of the tensor that a mark stands for, or the name itself."""
        return self.alias.get(tensor, tensor)


def read_graph(
    model: ModelProto,
    types: Types | None = None,
    *,
    weights: Mapping[str, Array] | None = None,
    modules: bool = False,
) -> Graph:
    """Read a model: its marks become sites, or, if it has none, every float tensor gets one of its own.

    A mark is an identity: its input and its output are one tensor. Tensor ids ascend over constants, graph inputs and
    op outputs in order.

    Tensors that the body of an If, Loop or Scan reads from outside count as inputs of that op, after its own.

    `weights` are the values of stored tensors that the model has only stubs of; `modules` notes the modules of PyTorch
    that the file says its ops were exported from.
    """
    model = inline_functions(model)
    _refuse_marked_bodies(model)
    marked = any(is_mark(node) for node in model.graph.node)
    stripped = _strip(model)
    plain = _without_marks(model, stripped)
    stored = initializers(model.graph)
    graph = _build(plain, stripped, types_of(plain) if types is None else types, stored, weights or {})
    if modules:
        graph = _with_modules(graph, plain)
    return graph if marked else with_sites(graph)


def _with_modules(graph: Graph, model: ModelProto) -> Graph:
    """Return the graph with the path of the module that each op was exported from by torch, where the file says it."""
    paths = {name: path for node in model.graph.node if (path := _module_of(node)) for name in node.output}
    ops = [
        replace(op, module=paths.get(graph.tensors[op.outputs[0]].name, "")) if op.outputs else op for op in graph.ops
    ]
    return replace(graph, ops=ops)


def _module_of(node: NodeProto) -> str:
    """Return the last module among the scopes that torch's exporter notes: the model, its modules, then the op."""
    try:
        scopes = literal_eval(metadata(node).get(_SCOPES, "[]"))
    except (ValueError, SyntaxError):
        return ""
    return scopes[-2] if isinstance(scopes, list) and len(scopes) > 1 and isinstance(scopes[-2], str) else ""


def inline_functions(model: ModelProto) -> ModelProto:
    """Return the model with the calls of its functions replaced by their bodies."""
    return onnx.inliner.inline_local_functions(model) if model.functions else model


def _refuse_marked_bodies(model: ModelProto) -> None:
    for node in model.graph.node:
        if any(is_mark(inner) for _, body in bodies(node) for inner in all_nodes(body.node)):
            raise ModelError(
                f"sites lie inside the {node.op_type} {node_label(node)!r}, and what is inside control flow "
                "cannot be quantized; take its body out of the model, or skip the modules it calls"
            )


def _strip(model: ModelProto) -> _Stripped:
    """Drop marks; a second site on the same tensor stays as an Identity, named after a stored tensor with a number."""
    found = _Stripped()
    stored, taken = initializers(model.graph), names_in(model.graph)
    carriers: dict[str, str] = {}  # site -> tensor that carries it
    origins: dict[str, str] = {}  # site -> tensor that was marked
    for node in model.graph.node:
        if not is_mark(node):
            found.nodes.append(node)
            continue
        site, source, output = str(attributes(node)["key"]), found.name(node.input[0]), node.output[0]
        if site in carriers:
            if source not in (origins[site], carriers[site]):
                raise ModelError(f"the site {site} marks two tensors, {origins[site]!r} and {source!r}; report this")
            found.alias[output] = carriers[site]
            continue
        origins[site] = source
        if source in found.sites:
            second = unique(f"{source}_1", taken) if source in stored else output
            found.nodes.append(helper.make_node("Identity", [source], [second], node.name or f"{site}/identity"))
            if second != output:
                found.alias[output] = second
            source = second
        else:
            found.alias[output] = source
        carriers[site] = source
        found.sites[source] = site
    return found


def _without_marks(model: ModelProto, stripped: _Stripped) -> ModelProto:
    """Return the model as standard ONNX; of a marked one a copy, with stubs of the large stored tensors."""
    if not stripped.alias and not any(entry.domain == MARK_DOMAIN for entry in model.opset_import):
        return model
    plain = without_large(model)
    replace_nodes(plain.graph, stripped.nodes)
    rename_inputs(plain.graph.node, stripped.alias)
    for value in plain.graph.output:
        value.name = stripped.name(value.name)
    retain(plain.opset_import, lambda entry: entry.domain != MARK_DOMAIN)
    return plain


def _build(
    model: ModelProto,
    stripped: _Stripped,
    types: Types,
    stored: Mapping[str, TensorProto],
    weights: Mapping[str, Array],
) -> Graph:
    tensors: list[Tensor] = []
    ids: dict[str, int] = {}

    def add(name: str, tensor: Tensor) -> int:
        ids[name] = len(tensors)
        tensors.append(tensor)
        return ids[name]

    constants = dict(stored)
    ordinary = []
    for node in model.graph.node:
        if is_constant(node):
            constants[node.output[0]] = constant_tensor(node)
        else:
            ordinary.append(node)
    masks = {name for node in ordinary if node.op_type in _READ_MASKS for name in node.input}
    for name, tensor in constants.items():
        add(name, _constant(tensor, stripped.sites.get(name), weights, keep=name in masks))
    inputs = [add(name, Tensor(name, *types[name], stripped.sites.get(name))) for name in input_names(model.graph)]
    ops = []
    for node in ordinary:
        captured = [name for name in reads(node) if name not in node.input] if has_bodies(node) else []
        unmade = [name for name in (*node.input, *captured) if name and name not in ids]
        if unmade:
            raise ModelError(
                f"the node {node_label(node)!r} reads {unmade[0]!r}, which nothing before it makes; sort the nodes"
            )
        read = tuple(ids[name] if name else None for name in (*node.input, *captured))
        outputs = []
        for name in node.output:
            if name:
                dtype, shape = types.get(name, ("", None))
                if not dtype:  # an op without inference (another domain): better a site than a silent float
                    dtype = next((tensors[t].dtype for t in read if t is not None and tensors[t].is_float), "")
                outputs.append(add(name, Tensor(name, dtype, shape, stripped.sites.get(name))))
        facts = {name: value for name, value in attributes(node).items() if not isinstance(value, GraphProto)}
        places = tuple(place for place, name in enumerate(node.output) if name)
        ops.append(Op(node.op_type, read, tuple(outputs), facts, node.name, node.domain, places))
    return Graph(tensors, ops, inputs, [ids[value.name] for value in model.graph.output])


def _constant(stored: TensorProto, site: str | None, weights: Mapping[str, Array], *, keep: bool) -> Tensor:
    """Return a stored tensor; `weights` has its value where the model has only a stub of it."""
    shape = tuple(int(n) for n in stored.dims)
    value = None
    if math.prod(shape) <= _SMALL or (keep and math.prod(shape) <= _LARGEST_MASK):
        found = weights[stored.name] if stored.name in weights else array(stored)
        value = found if math.prod(shape) <= _SMALL or _is_mask(found) else None
    return Tensor(stored.name, dtype_name(stored.data_type), shape, site, True, value)


def _is_mask(value: Array) -> bool:
    """Return True if a stored tensor is an attention mask, that is, holds the lowest number or minus infinity."""
    return value.dtype.name in FLOAT_CODES and value.size > 0 and bool(value.min() <= np.finfo(np.float16).min)


def with_sites(graph: Graph) -> Graph:
    """Name a site at every float tensor of a model without marks: inputs and op outputs first, then operands."""
    tensors = list(graph.tensors)
    taken: set[str] = set()
    for index in graph.inputs:
        taken.add(tensors[index].name)
        if tensors[index].is_float and graph.reads_values(index):
            tensors[index] = replace(tensors[index], site=site_name(tensors[index].name, "input"))
    owners = []
    for op in graph.ops:
        owner = unique(op.name or tensors[op.outputs[0]].name, taken)
        owners.append(owner)
        for position, index in enumerate(op.outputs):
            plain = tensors[index].is_float and graph.constant_root(index) is None
            if plain and graph.reads_values(index):
                port = f"output{position}" if position else "output"
                tensors[index] = replace(tensors[index], site=site_name(owner, port))
    for op_id, owner in enumerate(owners):
        _site_operands(graph, op_id, owner, tensors)
    return replace(graph, tensors=tensors)


def _site_operands(graph: Graph, op_id: int, owner: str, tensors: list[Tensor]) -> None:
    ports: set[str] = set()
    for operand in operands_of(graph, op_id):
        facts = tensors[operand.root]
        plain = facts.is_float and not is_scalar(graph, op_id, operand)
        if operand.role == "statistic" or facts.site is not None or not plain:
            continue
        port = unique(operand.role, ports)
        tensors[operand.root] = replace(facts, site=site_name(owner, port))
