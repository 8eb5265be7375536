"""The names of an ONNX model's tensors in other tools: paths of modules, functional ops."""

import ast
from collections import Counter

from onnx import ModelProto, NodeProto

from onnx_backend.proto.graph_queries import consumers
from onnx_backend.proto.nodes import metadata
from onnx_backend.proto.subgraphs import reads
from onnx_backend.qdq.read import stored_tensors
from qsdk.core.comparing.names import op_names, parts_of_traced_name
from qsdk.core.site import owner_of, port_of

_SCOPES = "pkg.torch.onnx.name_scopes"  # in which torch's exporter keeps the paths of the modules of a node
_STORED = ("weight", "bias")


def names_of_tensors(model: ModelProto) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """Return tensor -> paths of the modules that it leaves, the innermost first; and -> its name as a functional op."""
    nodes = model.graph.node
    readers = consumers(nodes)
    scopes: dict[str, tuple[str, ...]] = {}  # by tensor; nodes that were put in belong to the module in front of them
    ops: dict[str, tuple[str, ...]] = {}
    calls: Counter[str] = Counter()
    for node in nodes:
        own = _scopes(node)
        before = next((scopes[name] for name in node.input if name in scopes), ())
        scopes.update(dict.fromkeys(node.output, before if own is None else own))
        if own is not None and len(node.output) == 1:
            place = f"{own[-1] if own else ''}/{node.op_type}"
            ops[node.output[0]] = op_names(own[-1] if own else "", node.op_type, calls[place])
            calls[place] += 1
    outputs, by_weights = {value.name for value in model.graph.output}, _modules_by_weights(model)
    modules: dict[str, tuple[str, ...]] = {}
    for name, paths in scopes.items():
        names, more = parts_of_traced_name(name)
        following = [scopes.get(output, ()) for node in readers.get(name, ()) for output in node.output[:1]]
        for path in reversed(paths):
            if name in outputs or any(path not in other for other in following):
                names = (*names, f"{path}@{calls[path]}" if calls[path] else path)
                calls[path] += 1
        if not names and name in by_weights:
            names = (by_weights[name],)
        modules[name], ops[name] = names, (*more, *ops.get(name, ()))
    return modules, ops


def _modules_by_weights(model: ModelProto) -> dict[str, str]:
    """Return tensor -> path of the module whose stored weight and bias the node that makes it, and those before, read.

    A stored tensor that several nodes read says nothing: exporters merge equal ones.
    """
    parts = {name: name.rpartition(".") for name in stored_tensors(model)}
    constant = {name: path if last in _STORED else "" for name, (path, _, last) in parts.items()}
    readers = consumers(model.graph.node)
    found: dict[str, str] = {}  # module -> the last tensor that it makes
    for node in model.graph.node:
        read = reads(node)
        if read and all(name in constant for name in read):
            site = metadata(node).get("qsdk.site", "")
            path = owner_of(site) if port_of(site) in _STORED else constant[read[0]]
            constant.update(dict.fromkeys(node.output, path))
            continue
        for name in read:
            if constant.get(name) and len(readers[name]) == 1:
                found[constant[name]] = node.output[0]
    return {tensor: path for path, tensor in found.items()}


def _scopes(node: NodeProto) -> tuple[str, ...] | None:
    """Return the paths of the modules that a node belongs to, the outermost first; None where the file says nothing."""
    text = metadata(node).get(_SCOPES)
    if text is None:
        return None
    try:
        given = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None
    if not isinstance(given, list):
        return None
    return tuple(str(path) for path in given[:-1] if path)
