"""Look-ups in quantized tables, written on codes: a runtime dequantizes the rows that it reads, not the whole table.

ONNX Runtime runs DequantizeLinear -> Gather as it stands, so that a table of 30,000 words is dequantized in every run
(measured on onnxruntime 1.32). Gather -> DequantizeLinear computes the same numbers.
"""

from collections.abc import Mapping, Sequence

from onnx import ModelProto, NodeProto, TensorProto, helper

from onnx_backend.proto.graph_queries import consumers, initializers, names_in, producers, unique
from onnx_backend.proto.nodes import attributes, metadata, node_label, replace_nodes, set_metadata
from qsdk.core.errors import FileFormatError

TABLE_KEY = "qsdk.table"  # metadata of a DequantizeLinear behind a look-up: the name of the whole table, dequantized
_ON_CODES = frozenset({TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16})


def look_up_codes(model: ModelProto) -> None:
    """Write every Gather of a dequantized table as a Gather of its codes and a DequantizeLinear behind, in place."""
    graph = model.graph
    stored, makers, readers = initializers(graph), producers(graph.node), consumers(graph.node)
    taken, outputs = names_in(graph), {value.name for value in graph.output}
    nodes: list[NodeProto] = []
    left_out, used = set[str](), set[str]()  # whole tables that nothing reads any more, names of nodes
    for node in graph.node:
        table = makers.get(node.input[0]) if node.op_type == "Gather" else None
        if table is None or not _is_table(node, table, stored):
            nodes.append(node)
            continue
        codes, name = unique(f"{node.output[0]}/codes", taken), table.output[0]
        rows = _behind(table, stored, codes, node.output[0])
        if name not in outputs and all(reader.op_type == "Gather" for reader in readers[name]):
            left_out.add(name)  # the first look-up takes over the name of its node
        if name not in left_out or table.name in used:
            rows.name = unique(table.name, taken)
        used.add(table.name)
        nodes += [_changed(node, [table.input[0], node.input[1]], codes), rows]
    replace_nodes(graph, [node for node in nodes if not left_out.intersection(node.output)])


def dequantize_tables(model: ModelProto) -> ModelProto:
    """Return the model, or a changed copy, with whole tables dequantized in front of look-ups, as sites have them.

    Raises:
        FileFormatError: a note of a table stands at another node than one behind a look-up.
    """
    if not any(TABLE_KEY in metadata(node) for node in model.graph.node):
        return model
    result = ModelProto()
    result.CopyFrom(model)
    makers, made, nodes = producers(result.graph.node), set[str](), list[NodeProto]()
    behind = [node for node in result.graph.node if TABLE_KEY in metadata(node)]
    on_codes = {node.input[0] for node in behind}
    for node in result.graph.node:
        name = metadata(node).get(TABLE_KEY)
        if name is None:
            nodes += [] if on_codes.intersection(node.output) else [node]
            continue
        gather = makers.get(node.input[0])
        if gather is None or gather.op_type != "Gather" or node.op_type != "DequantizeLinear":
            raise FileFormatError(
                f"the node {node_label(node)!r} has {TABLE_KEY} and is no DequantizeLinear behind a Gather; the file "
                "was changed, export it again"
            )
        if name not in makers and name not in made:
            made.add(name)
            nodes.append(_whole(node, gather, name, initializers(result.graph)))
        nodes.append(_changed(gather, [name, gather.input[1]], node.output[0]))
    replace_nodes(result.graph, nodes)
    return result


def _is_table(gather: NodeProto, table: NodeProto, stored: Mapping[str, TensorProto]) -> bool:
    """Return True for a look-up of rows in a stored table whose rows have the same scales."""
    if table.op_type != "DequantizeLinear" or table.input[0] not in stored or attributes(gather).get("axis", 0) != 0:
        return False
    codes, scale, facts = stored[table.input[0]], stored.get(table.input[1]), attributes(table)
    if scale is None or codes.data_type not in _ON_CODES or facts.get("block_size") or len(codes.dims) < 2:
        return False
    return not scale.dims or facts.get("axis", 1) % len(codes.dims) != 0


def _behind(table: NodeProto, stored: Mapping[str, TensorProto], codes: str, output: str) -> NodeProto:
    """Return the DequantizeLinear of the rows that were looked up; their channels are counted from the last axis."""
    node = _changed(table, [codes, *table.input[1:]], output)
    _count_axis(node, len(stored[table.input[0]].dims), from_end=True)
    set_metadata(node, **{TABLE_KEY.removeprefix("qsdk."): table.output[0]})
    return node


def _whole(rows: NodeProto, gather: NodeProto, name: str, stored: Mapping[str, TensorProto]) -> NodeProto:
    """Return the DequantizeLinear of a whole table, whose rows another one dequantizes."""
    node = _changed(rows, [gather.input[0], *rows.input[1:]], name)
    _count_axis(node, len(stored[gather.input[0]].dims), from_end=False)
    kept = [(entry.key, entry.value) for entry in node.metadata_props if entry.key != TABLE_KEY]
    del node.metadata_props[:]
    for key, value in kept:
        node.metadata_props.add(key=key, value=value)
    return node


def _count_axis(node: NodeProto, rank: int, *, from_end: bool) -> None:
    for entry in (entry for entry in node.attribute if entry.name == "axis"):
        entry.CopyFrom(helper.make_attribute("axis", entry.i % rank - (rank if from_end else 0)))


def _changed(node: NodeProto, inputs: Sequence[str], output: str) -> NodeProto:
    """Return a copy of a node with other inputs and another output."""
    copy = NodeProto()
    copy.CopyFrom(node)
    del copy.input[:], copy.output[:]
    copy.input.extend(inputs)
    copy.output.append(output)
    return copy
