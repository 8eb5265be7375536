"""Leave out inputs without elements: the past of a prompt, where there are no keys and values yet."""

from collections.abc import Collection

from onnx import ModelProto, NodeProto

from onnx_backend.passes.decided_sizes import constant_sites, note_constant_sites
from onnx_backend.proto.graph_queries import declared_sizes, input_names, nodes_reaching
from onnx_backend.proto.nodes import drop_unused_initializers, metadata, node_label, replace_nodes
from onnx_backend.proto.subgraphs import reads
from qsdk.core.errors import ConfigError

#: ops whose result has no elements where their first input has none
_MOVES = frozenset({"Cast", "DequantizeLinear", "Identity", "QuantizeLinear", "Transpose"})


def leave_out_empty_inputs(model: ModelProto) -> None:
    """Remove the inputs with an axis of length 0, in place, and all that only moves what is in them.

    Raises:
        ConfigError: something else than joining them with other values reads one; names the node.
    """
    fed = input_names(model.graph)
    gone = {info.name for info in model.graph.input if info.name in fed and 0 in declared_sizes(info.type)}
    if gone:
        leave_out(model, gone)


def leave_out(model: ModelProto, gone: Collection[str], *, asked: Collection[str] = ()) -> None:
    """Remove inputs as if they had no elements, in place.

    Args:
        model: any.
        gone: names of inputs.
        asked: op types that may go on to read an input, such as Shape where the model is compared, not run.

    Raises:
        ConfigError: see `leave_out_empty_inputs`.
    """
    graph, empty = model.graph, set(gone)
    nodes: list[NodeProto] = []
    sites = set(constant_sites(model))
    for node in graph.node:
        if node.op_type in asked or empty.isdisjoint(reads(node)):
            nodes.append(node)
        elif node.op_type in _MOVES and empty.isdisjoint(node.input[1:]):
            empty.update(node.output)
            sites.add(metadata(node).get("qsdk.site", ""))
        elif node.op_type == "Concat":
            kept = [name for name in node.input if name not in empty]
            del node.input[:]
            node.input.extend(kept)
            empty.update(() if kept else node.output)
            nodes.extend([node] if kept else [])
        else:
            raise ConfigError(
                f"shapes leaves {', '.join(sorted(gone))} without elements, and the node {node_label(node)!r} "
                f"({node.op_type}) reads what comes of it; only keys and values of a cache may be empty"
            )
    replace_nodes(graph, nodes_reaching(nodes, {info.name for info in graph.output}))
    kept_inputs = [info for info in graph.input if info.name not in gone]
    del graph.input[:]
    graph.input.extend(kept_inputs)
    drop_unused_initializers(graph)
    note_constant_sites(model, sites - {""})
