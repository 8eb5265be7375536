"""The graph of a model after constant folding, as it looks to an exporter that folds."""

from dataclasses import replace

from qsdk.core.graph.graph import Graph, Op

_SIZED = frozenset({"Expand", "Reshape", "Tile"})  # their sizes are constants in a file with fixed input sizes


def fold_constants(graph: Graph) -> Graph:
    """Return a graph in which sites that depend on stored tensors alone are stored themselves; ids and sites stay."""
    derived = {index for index, tensor in enumerate(graph.tensors) if tensor.constant}
    for op in graph.ops:
        read = _data(op)
        if read and derived.issuperset(read) and graph.output_set.isdisjoint(op.outputs):
            derived.update(op.outputs)
    stored = {index for index in derived if graph.tensors[index].constant or graph.tensors[index].site is not None}
    tensors = [replace(tensor, constant=index in stored) for index, tensor in enumerate(graph.tensors)]
    return replace(graph, tensors=tensors, ops=_live_ops(graph, stored))


def _data(op: Op) -> list[int]:
    return [tensor for tensor in op.inputs[: 1 if op.type in _SIZED else None] if tensor is not None]


def _live_ops(graph: Graph, stored: set[int]) -> list[Op]:
    """Return the ops that lead to an output, without those that compute stored tensors."""
    wanted, kept = set(graph.outputs), []
    for op in reversed(graph.ops):
        if wanted.difference(stored).intersection(op.outputs):
            wanted.update(tensor for tensor in op.inputs if tensor is not None)
            kept.append(op)
    return kept[::-1]
