"""Tensors that depend on integers and constants alone: causal masks, positions and their angles, initial states."""

from collections.abc import Collection, Mapping

from qsdk.core.graph.graph import Graph, Op
from qsdk.core.graph.op_facts import PERIODIC, RECURRENT, SHAPE_OPS

_ANGLE_OPS = frozenset(
    {"Add", "Sub", "Mul", "Div", "Pow", "Exp", "Neg", "Reciprocal", "Sqrt", "Cast", "Floor", "Mod", "Where", "CumSum"}
    | {
        "Concat",
        "Unsqueeze",
        "Squeeze",
        "Reshape",
        "Expand",
        "Transpose",
        "Slice",
        "Split",
        "Tile",
        "Identity",
        "Range",
    }
    | {"ConstantOfShape", "MatMul", "Gather"}
)


def steering_tensors(graph: Graph, masks: Collection[int]) -> Mapping[int, str]:
    """Return the floats made of shapes and integers that no quantized op computes with, each with the reason.

    They only become other such tensors, bools, integers or masks, or are the initial state of a recurrent layer, which
    computes in float; or they are the angles of positions, of which Sin and Cos need every digit. A table of positions
    made of shapes is data: it is added to quantized tensors.
    """
    steering = _only_read_by(graph, _made_of_integers(graph), masks, RECURRENT)
    angles = _only_read_by(graph, _made_as_angles(graph), steering | frozenset(masks), PERIODIC)
    result = dict.fromkeys(angles, "an angle made of positions: Sin and Cos need all its digits")
    return result | dict.fromkeys(steering, "made of shapes and integers: no quantized op computes with it")


def _made_of_integers(graph: Graph) -> set[int]:
    """Return the tensors that depend on integers, bools, shapes and single numbers alone."""
    result = {index for index in range(len(graph.tensors)) if _is_counted(graph, index) or _is_number(graph, index)}
    for op in graph.ops:
        read = [t for t in op.inputs[: 1 if op.type == "CastLike" else None] if t is not None]
        if op.type in SHAPE_OPS or (read and result.issuperset(read)):
            result.update(op.outputs)
    return result


def _made_as_angles(graph: Graph) -> set[int]:
    """Return the tensors computed from integers and stored numbers by the arithmetic of positions, not from a table."""
    result = {index for index, facts in enumerate(graph.tensors) if _is_counted(graph, index) or facts.constant}
    for index, op in enumerate(graph.ops):
        read = [t for t in op.inputs if t is not None]
        if op.type in _ANGLE_OPS and result.issuperset(read) and not _takes_from_data(graph, index):
            result.update(op.outputs)
    return result


def _takes_from_data(graph: Graph, op_id: int) -> bool:
    """Return whether an op reads a stored table or mixes the features of one, which is no arithmetic of positions."""
    op = graph.ops[op_id]
    if op.type == "Gather":
        return op.inputs[0] is None or graph.origin(op.inputs[0]) is not None
    if op.type != "MatMul" or op.inputs[0] is None:
        return False
    # positions times frequencies is an outer product
    return (graph.tensors[op.inputs[0]].shape or (None,))[-1] != 1


def _only_read_by(graph: Graph, made: Collection[int], others: Collection[int], sinks: Collection[str]) -> set[int]:
    """Return those of `made` that are computed in floating point and read only by these ops or by steering ops."""
    result = {t for t in made if graph.tensors[t].is_float and t not in graph.output_set and t in graph.producer}
    for op in reversed(graph.ops):
        for tensor in op.outputs:
            readers = graph.consumers[tensor]
            if tensor in result and not all(_steers(graph, graph.ops[r], result, others, sinks) for r in readers):
                result.discard(tensor)
    return result


def _is_counted(graph: Graph, tensor: int) -> bool:
    """Return whether a tensor holds integers or bools, from any source."""
    return graph.tensors[tensor].dtype != "" and not graph.tensors[tensor].is_float


def _is_number(graph: Graph, tensor: int) -> bool:
    facts = graph.tensors[tensor]
    return facts.constant and not any(n != 1 for n in facts.shape or ())


def _steers(graph: Graph, op: Op, found: Collection[int], others: Collection[int], sinks: Collection[str]) -> bool:
    made = [t for t in op.outputs if graph.tensors[t].is_float and t not in found and t not in others]
    return not made or op.type in sinks
