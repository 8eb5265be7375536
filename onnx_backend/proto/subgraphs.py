"""The bodies of If, Loop and Scan: their nodes, and the tensors that they read from outside."""

from collections.abc import Iterable, Iterator, Mapping

from onnx import AttributeProto, GraphProto, NodeProto


def bodies(node: NodeProto) -> Iterator[tuple[str, GraphProto]]:
    """Yield the graphs that a node carries, with the names of their attributes."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.name, attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            for index, graph in enumerate(attribute.graphs):
                yield f"{attribute.name}{index}", graph


def has_bodies(node: NodeProto) -> bool:
    """Return True if a node carries graphs."""
    return any(attribute.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) for attribute in node.attribute)


def captured_tensors(node: NodeProto) -> list[str]:
    """Return the tensors that a node's bodies read from outside, each once, in order."""
    found: dict[str, None] = {}
    for _, graph in bodies(node):
        found.update(dict.fromkeys(_outer(graph)))
    return list(found)


def reads(node: NodeProto) -> list[str]:
    """Return every tensor that a node reads, by name or in its bodies, each once; absent inputs are left out."""
    inner = captured_tensors(node) if has_bodies(node) else ()
    return [name for name in dict.fromkeys((*node.input, *inner)) if name]


def _outer(graph: GraphProto) -> Iterator[str]:
    own = _own_names(graph)
    for node in graph.node:
        for name in reads(node):
            if name not in own:
                yield name
    for value in graph.output:
        if value.name and value.name not in own:
            yield value.name


def _own_names(graph: GraphProto) -> set[str]:
    own = {value.name for value in (*graph.input, *graph.initializer)}
    for node in graph.node:
        own.update(node.output)
    return own


def all_nodes(nodes: Iterable[NodeProto]) -> list[NodeProto]:
    """Return nodes and the nodes of their bodies, at every depth."""
    found = []
    for node in nodes:
        found += [node, *(inner for _, graph in bodies(node) for inner in all_nodes(graph.node))]
    return found


def names_of(graph: GraphProto) -> Iterator[str]:
    """Yield every tensor and node name of a graph and of its bodies."""
    for value in (*graph.input, *graph.output, *graph.initializer):
        yield value.name
    for node in graph.node:
        yield node.name
        yield from node.input
        yield from node.output
        for _, body in bodies(node):
            yield from names_of(body)


def rename_reads(node: NodeProto, renamed: Mapping[str, str]) -> None:
    """Rename the tensors that a node reads, also in its bodies where a name comes from outside, in place."""
    for position, name in enumerate(node.input):
        if name in renamed:
            node.input[position] = renamed[name]
    for _, graph in bodies(node):
        own = _own_names(graph)
        outer = {old: new for old, new in renamed.items() if old not in own} if own & renamed.keys() else renamed
        for inner in graph.node:
            rename_reads(inner, outer)
