"""Tensors made of one-element constants and shapes alone: a causal mask at run time, a first state of zeros."""

from collections.abc import Collection

from qsdk.core.graph import Graph, Op

_SHAPE_OPS = frozenset({"Shape", "Size"})
_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})


def steering_tensors(graph: Graph, masks: Collection[int]) -> frozenset[int]:
    """The floating-point tensors made of shapes that no quantized op computes with.

    They only become other such tensors, bools, integers or masks, or are the first state of a recurrent layer, which
    computes in float. A table of positions made of shapes is data: it is added to what is quantized.
    """
    made = _made_of_shapes(graph)
    found = {t for t in made if graph.tensors[t].is_float and t not in graph.output_set}
    for op in reversed(graph.ops):
        for tensor in op.outputs:
            if tensor in found and not all(_steers(graph, graph.ops[r], found, masks) for r in graph.consumers[tensor]):
                found.discard(tensor)
    return frozenset(found)


def _made_of_shapes(graph: Graph) -> set[int]:
    found: set[int] = set()
    for op in graph.ops:
        read = [t for t in op.inputs[: 1 if op.type == "CastLike" else None] if t is not None]
        known = all(t in found or _is_number(graph, t) for t in read)
        if op.type in _SHAPE_OPS or (read and known):
            found.update(op.outputs)
    return found


def _is_number(graph: Graph, tensor: int) -> bool:
    facts = graph.tensors[tensor]
    return facts.constant and not (facts.is_float and any(n != 1 for n in facts.shape or ()))


def _steers(graph: Graph, op: Op, found: Collection[int], masks: Collection[int]) -> bool:
    made = [t for t in op.outputs if graph.tensors[t].is_float and t not in found and t not in masks]
    return not made or op.type in _RECURRENT
