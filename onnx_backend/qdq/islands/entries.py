"""Which nodes an island consists of, and what it reads, rounded to its type.

Here the nodes compute in float32, between casts to the narrow type and back: so ONNX Runtime rounds wherever the casts
say. Of ops that are in float16 themselves it runs most in float32, and drops the roundings in front of them.
`narrow` writes them in their type.
"""

from collections.abc import Iterable, Iterator

from onnx import ModelProto, NodeProto, helper, numpy_helper

from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import consumers, initializers, producers, unique
from onnx_backend.proto.lazy_tensors import narrow
from onnx_backend.proto.nodes import (
    drop_unused_initializers,
    is_mark,
    metadata,
    rename_inputs,
    replace_nodes,
    set_metadata,
)
from onnx_backend.proto.opsets import opset_of
from onnx_backend.qdq.float_types import type_of_mark
from onnx_backend.qdq.graph_editor import GraphEditor
from onnx_backend.qdq.kernel_casts import takes_dtype
from onnx_backend.qdq.read import FLOAT32, FLOAT_CODES, type_of_cast
from qsdk.core.planning.plan import Plan

#: metadata of a node of an island: its narrow float type
TYPE_KEY = "qsdk.computes_in"
#: metadata of a cast that rounds what an island reads from outside
ENTRY_KEY = "qsdk.enters"


def island_type(node: NodeProto) -> str:
    """Return the narrow float type that a node computes in, or ""."""
    return metadata(node).get(TYPE_KEY, "")


def note_islands(model: ModelProto, plan: Plan) -> None:
    """Note on each node of a marked model, in place, the narrow type in which the plan has it compute.

    What an opened file notes on its nodes stays.
    """
    wanted = {site: decision.computes_in for site, decision in plan.decisions.items() if decision.computes_in}
    if not wanted:
        return
    made_by = producers(model.graph.node)
    for node in model.graph.node:
        if not is_mark(node) or type_of_mark(node) != FLOAT32:
            continue
        dtype = wanted.get(next(a.s.decode() for a in node.attribute if a.name == "key"), "")
        waiting = [node.input[0]] if dtype else []
        while waiting:
            maker = made_by.get(waiting.pop())
            if maker is not None and not is_mark(maker) and not island_type(maker):
                set_metadata(maker, **{TYPE_KEY.removeprefix("qsdk."): dtype})
                waiting += [name for _, name in float_inputs(maker, opset_of(model))]


def float_inputs(node: NodeProto, opset: int) -> Iterator[tuple[int, str]]:
    """Yield position and tensor of the inputs of an island's node that are of its type."""
    for at, name in enumerate(node.input):
        if name and takes_dtype(node.op_type, at, "float16", opset):
            yield at, name


def cast_site(node: NodeProto | None, dtype: str) -> str:
    """Return the site of a cast that is the first or second of a site kept in a narrow type; "" for any other node."""
    facts = {} if node is None or node.op_type != "Cast" else metadata(node)
    return facts.get("qsdk.site", "") if facts.get("qsdk.dtype") == dtype else ""


def round_entries(at: GraphEditor) -> None:
    """Round what islands read to their type: a pair of casts per tensor, or a stored tensor of their type and a cast.

    Nodes whose results do not all go to sites of their type, or to other nodes of the island, are none after all.
    """
    graph, opset = at.graph, opset_of(at.model)
    island = _with_closed_ends(graph.node, {value.name for value in graph.output})
    at.stored = initializers(graph)
    made_by = producers(graph.node)
    nodes: list[NodeProto] = []
    rounded: dict[tuple[str, str], str] = {}
    for node in graph.node:
        dtype = island_type(node)
        if dtype and node.output[0] not in island:
            _forget(node)
        elif dtype:
            for place, name in float_inputs(node, opset):
                maker = made_by.get(name)
                inside = maker is not None and island_type(maker) == dtype
                if inside or cast_site(maker, dtype) or (maker is not None and ENTRY_KEY in metadata(maker)):
                    continue
                if (name, dtype) not in rounded:
                    casts = _rounding(at, name, dtype)
                    nodes += casts
                    rounded[name, dtype] = casts[-1].output[0]
                node.input[place] = rounded[name, dtype]
        nodes.append(node)
    if rounded:
        replace_nodes(graph, nodes)
        drop_unused_initializers(graph)


def _with_closed_ends(nodes: Iterable[NodeProto], outputs: set[str]) -> set[str]:
    """Return the first outputs of the noted nodes whose every reader is in the island or rounds to its type."""
    kept = {node.output[0]: node for node in nodes if island_type(node)}
    readers = consumers(nodes) if kept else {}

    def is_closed(node: NodeProto) -> bool:
        dtype = island_type(node)
        return not outputs.intersection(node.output) and all(
            (reader.output[0] in kept and island_type(reader) == dtype) or narrows(reader, dtype)
            for name in node.output
            for reader in readers.get(name, ())
        )

    while open_ended := [name for name, node in kept.items() if not is_closed(node)]:
        for name in open_ended:
            del kept[name]
    return set(kept)


def narrows(node: NodeProto, dtype: str) -> bool:
    """Return True if a node is the first cast of a site kept in a narrow type."""
    return bool(cast_site(node, dtype)) and type_of_cast(node) == dtype


def _forget(node: NodeProto) -> None:
    kept = [(entry.key, entry.value) for entry in node.metadata_props if entry.key != TYPE_KEY]
    del node.metadata_props[:]
    for key, value in kept:
        node.metadata_props.add(key=key, value=value)


def _rounding(at: GraphEditor, name: str, dtype: str) -> list[NodeProto]:
    code, result = FLOAT_CODES[dtype], []
    if name in at.stored:
        narrowed = at.once(name, dtype.encode(), narrow(at.values(name), code), f"_{dtype}")
    else:
        narrowed = unique(f"{name}/{dtype}", at.taken)
        result.append(helper.make_node("Cast", [name], [narrowed], f"{name}/enter", to=code))
    wide = unique(f"{narrowed}/wide", at.taken)
    result.append(helper.make_node("Cast", [narrowed], [wide], f"{narrowed}/enter_back", to=FLOAT_CODES[FLOAT32]))
    for cast in result:
        set_metadata(cast, **{ENTRY_KEY.removeprefix("qsdk."): dtype})
    return result


def remove_entries(model: ModelProto) -> None:
    """Take the casts of `round_entries` out again, in place; stored tensors are float32, of the rounded values."""
    stored, made_by = initializers(model.graph), producers(model.graph.node)
    taken = {*stored, *made_by, *(value.name for value in model.graph.input)}
    read_instead: dict[str, str] = {}
    widened: dict[str, str] = {}
    kept = []
    for node in model.graph.node:
        dtype = metadata(node).get(ENTRY_KEY) if node.op_type == "Cast" else None
        source = node.input[0] if node.input else ""
        if dtype is None:
            kept.append(node)
        elif source in stored:
            if source not in widened:
                # the name from before the export, so that exporting again gives the same file
                widened[source] = unique(source.removesuffix(f"_{dtype}"), taken)
                values = array(stored[source]).astype("float32")
                model.graph.initializer.append(numpy_helper.from_array(values, widened[source]))
            read_instead[node.output[0]] = widened[source]
        else:
            read_instead[node.output[0]] = read_instead.get(source, source)
    if read_instead:
        rename_inputs(kept, read_instead)
        replace_nodes(model.graph, kept)
        drop_unused_initializers(model.graph)
