"""Floats that become integers: positions, buckets and indices, which a grid would move to their neighbours."""

from collections.abc import Mapping

from qsdk.core.graph.graph import Graph, Op
from qsdk.core.planning.ties import keeps_grid

AN_INTEGER = "it becomes an integer, such as an index or a bucket: a grid would move it to another one"

_ARITHMETIC = frozenset(
    {"Add", "Sub", "Mul", "Div", "Neg", "Abs", "Sign", "Log", "Exp", "Sqrt", "Pow", "Reciprocal", "Cast", "Where"}
    | {"Min", "Max", "Clip", "Floor", "Ceil", "Round", "Mod", "Sum", "CumSum", "Relu"}
)


def becomes_integers(graph: Graph) -> Mapping[int, str]:
    """Return the floats that are cast to integers, and those that only these depend on, each with the reason.

    Results of layers are not affected: an integer computed from one reads it in float, and nothing before it changes.
    """
    result: set[int] = set()
    for op in reversed(graph.ops):
        for tensor in op.outputs:
            cast = any(_casts_to_integer(graph, graph.ops[reader]) for reader in graph.consumers[tensor])
            if graph.tensors[tensor].is_float and (
                cast or (_counts(graph, op) and _only_counts(graph, tensor, result))
            ):
                result.add(tensor)
    result.update(t for t in graph.inputs if graph.tensors[t].is_float and _only_counts(graph, t, result))
    return dict.fromkeys(result, AN_INTEGER)


def _casts_to_integer(graph: Graph, op: Op) -> bool:
    made = graph.tensors[op.outputs[0]].dtype if op.type == "Cast" and op.outputs else ""
    return made.startswith(("int", "uint"))


def _counts(graph: Graph, op: Op) -> bool:
    return op.type in _ARITHMETIC or keeps_grid(graph, op)


def _only_counts(graph: Graph, tensor: int, found: set[int]) -> bool:
    """Return whether everything that reads a tensor computes integers, or such numbers, from it."""
    readers = [graph.ops[reader] for reader in graph.consumers[tensor]]
    if not readers or tensor in graph.output_set:
        return False
    return all(
        _casts_to_integer(graph, op) or (_counts(graph, op) and found.issuperset(op.outputs) and op.outputs != ())
        for op in readers
    )
