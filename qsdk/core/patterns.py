"""Supergroups: ops quantized as one, matched on structure. Only the last tensor of a group is quantized."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from qsdk.core.graph import Graph
from qsdk.core.spec import Role

HEADS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "BatchNormalization"})
ACTIVATIONS = frozenset({"Relu", "Clip"})


@dataclass(frozen=True)
class Supergroup:
    """Ops that run as one.

    Attributes:
        ops: their ids in order; the last one makes the group's output.
        name: such as `Conv+Relu`.
        roles: stored tensor (root id) -> its part in the group, where the ops themselves do not say it.
    """

    ops: tuple[int, ...]
    name: str
    roles: Mapping[int, Role] = field(default_factory=dict)


def find_supergroups(graph: Graph) -> Mapping[int, Supergroup]:
    """Map each op that is inside a supergroup to it; every other op stands alone and is absent.

    A group grows from its head along tensors that have one reader and do not leave the model.
    """
    found: dict[int, Supergroup] = {}
    for index in range(len(graph.ops)):
        if index in found or graph.ops[index].type not in HEADS:
            continue
        ops = _grow(graph, index)
        if len(ops) > 1:
            group = Supergroup(tuple(ops), "+".join(graph.ops[op].type for op in ops))
            found.update(dict.fromkeys(ops, group))
    return found


def bias_of_add(graph: Graph, add: int) -> int | None:
    """The tensor that an Add puts as bias on a linear op without one of its own, or None if it is no such Add.

    A bias is a stored, one-dimensional operand with one value per output channel; the MatMul has a stored weight and
    no other reader. (Broadcasting puts one dimension on the last axis, which is no channel axis of a convolution.)
    """
    op = graph.ops[add]
    if op.type != "Add" or len(op.inputs) != 2:
        return None
    for result, bias in (op.inputs, op.inputs[::-1]):
        made_by = None if result is None else graph.producer.get(result)
        if bias is None or result is None or made_by is None or graph.ops[made_by].type != "MatMul":
            continue
        root = graph.constant_root(bias)
        fits = root is not None and _is_one_per_column(graph, root, made_by)
        if fits and graph.sole_consumer(result) == add:
            return bias
    return None


def _grow(graph: Graph, head: int) -> list[int]:
    ops = [head]
    following = _next(graph, head)
    if graph.ops[head].type == "MatMul" and following is not None and bias_of_add(graph, following) is not None:
        ops.append(following)
        following = _next(graph, following)
    if following is not None and graph.ops[following].type in ACTIVATIONS:
        ops.append(following)
    return ops


def _next(graph: Graph, op: int) -> int | None:
    return graph.sole_consumer(graph.ops[op].outputs[0])


def _is_one_per_column(graph: Graph, bias: int, matmul: int) -> bool:
    weight = graph.ops[matmul].inputs[1]
    if weight is None or graph.constant_root(weight) is None:
        return False
    shape, columns = graph.tensors[bias].shape or (), graph.tensors[weight].shape or (None,)
    return len(shape) == 1 and (columns[-1] is None or shape[0] == columns[-1])
