"""Numbers that become integers: positions, buckets and indices, of which a grid would change the ones it is near."""

from collections.abc import Mapping

from qsdk.core.graph.graph import Graph, Op
from qsdk.core.planning.ties import keeps_grid

AN_INTEGER = "it becomes an integer, such as an index or a bucket: a grid would move it to another one"

_OF_NUMBERS = frozenset(
    {"Add", "Sub", "Mul", "Div", "Neg", "Abs", "Sign", "Log", "Exp", "Sqrt", "Pow", "Reciprocal", "Cast", "Where"}
    | {"Min", "Max", "Clip", "Floor", "Ceil", "Round", "Mod", "Sum", "CumSum", "Relu"}
)


def becomes_integers(graph: Graph) -> Mapping[int, str]:
    """The floating-point tensors that are cast to integers, and those that only these are made of; id -> the reason.

    What a layer computes stays as it is: an integer that is made of its result reads it in float, and nothing before.
    """
    found: set[int] = set()
    for op in reversed(graph.ops):
        for tensor in op.outputs:
            cast = any(_casts_to_integer(graph, graph.ops[reader]) for reader in graph.consumers[tensor])
            if graph.tensors[tensor].is_float and (cast or (_counts(graph, op) and _only_counts(graph, tensor, found))):
                found.add(tensor)
    found.update(t for t in graph.inputs if graph.tensors[t].is_float and _only_counts(graph, t, found))
    return dict.fromkeys(found, AN_INTEGER)


def _casts_to_integer(graph: Graph, op: Op) -> bool:
    made = graph.tensors[op.outputs[0]].dtype if op.type == "Cast" and op.outputs else ""
    return made.startswith(("int", "uint"))


def _counts(graph: Graph, op: Op) -> bool:
    return op.type in _OF_NUMBERS or keeps_grid(graph, op)


def _only_counts(graph: Graph, tensor: int, found: set[int]) -> bool:
    """Whether all that reads a tensor makes integers, or such numbers, of it."""
    readers = [graph.ops[reader] for reader in graph.consumers[tensor]]
    if not readers or tensor in graph.output_set:
        return False
    return all(
        _casts_to_integer(graph, op) or (_counts(graph, op) and found.issuperset(op.outputs) and op.outputs != ())
        for op in readers
    )
