"""A graph as an exporter leaves it that computes what depends on no input."""

from dataclasses import replace

from qsdk.core.graph.graph import Graph, Op

_SIZED = frozenset({"Expand", "Reshape", "Tile"})  # the sizes are the exporter's where it fixes the inputs'


def folded(graph: Graph) -> Graph:
    """Give a graph whose sites that are made of stored tensors alone are stored themselves; ids and sites stay.

    Args:
        graph: of a model.
    """
    derived = {index for index, tensor in enumerate(graph.tensors) if tensor.constant}
    for op in graph.ops:
        read = _data(op)
        if read and derived.issuperset(read) and graph.output_set.isdisjoint(op.outputs):
            derived.update(op.outputs)
    stored = {index for index in derived if graph.tensors[index].constant or graph.tensors[index].site is not None}
    tensors = [replace(tensor, constant=index in stored) for index, tensor in enumerate(graph.tensors)]
    return replace(graph, tensors=tensors, ops=_read_at_last(graph, stored))


def _data(op: Op) -> list[int]:
    return [tensor for tensor in op.inputs[: 1 if op.type in _SIZED else None] if tensor is not None]


def _read_at_last(graph: Graph, stored: set[int]) -> list[Op]:
    """The ops that lead to an output, where nothing makes what is stored."""
    wanted, kept = set(graph.outputs), []
    for op in reversed(graph.ops):
        if wanted.difference(stored).intersection(op.outputs):
            wanted.update(tensor for tensor in op.inputs if tensor is not None)
            kept.append(op)
    return kept[::-1]
