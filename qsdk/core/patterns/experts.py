"""Mixtures of experts: stacks of matrices, of which every row of data takes one, and the routers that choose it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from qsdk.core.graph.graph import Graph, Op
from qsdk.core.graph.op_facts import RESHAPES

OF_CHOSEN = "matrices or biases of the chosen experts, as they are stored"
OF_ROUTER = "the router of experts: a rounded score may choose another expert for a token"

_SAME_VALUES = frozenset({"Identity", "Cast", "Transpose"})


@dataclass(frozen=True)
class Stack:
    """A stored stack of matrices from which an op takes one for each row of data.

    Attributes:
        product: id of the MatMul that multiplies the row with it.
        chosen: ids of the tensors between: what was taken, and that transposed.
        channel_axis: output channels of the tensor that the op reads.
        input_axis: input channels of that tensor.
    """

    product: int
    chosen: tuple[int, ...]
    channel_axis: int
    input_axis: int


def takes_rows(graph: Graph, op: Op) -> bool:
    """Return whether an op takes entries of its first input along the first axis, each by one number."""
    if op.type == "Gather":
        return bool(op.attributes.get("axis", 0) == 0)
    if op.type != "GatherND" or op.attributes.get("batch_dims", 0) != 0:
        return False
    shape = graph.shape_of(op.inputs[1])
    return bool(shape) and shape is not None and shape[-1] == 1


def stack_of(graph: Graph, op_id: int) -> Stack | None:
    """Return the stack that an op takes matrices from, if that is what it does."""
    op = graph.ops[op_id]
    shape = graph.shape_of(op.inputs[0]) if op.inputs else None
    if shape is None or len(shape) != 3 or graph.constant_root(op.inputs[0]) is None or not takes_rows(graph, op):
        return None
    if len(graph.shape_of(op.outputs[0]) or ()) != 3:
        return None
    axes, current, chosen = [0, 1, 2], op.outputs[0], [op.outputs[0]]
    while (reader := graph.sole_consumer(current)) is not None and graph.ops[reader].type in _SAME_VALUES:
        following = graph.ops[reader]
        if following.type == "Transpose":
            axes = [axes[axis] for axis in following.attributes.get("perm") or (2, 1, 0)]
        current = following.outputs[0]
        chosen.append(current)
    if reader is None or graph.ops[reader].type != "MatMul" or axes[0] != 0:
        return None
    second = graph.ops[reader].inputs[1] == current
    return Stack(reader, tuple(chosen), axes[2 if second else 1], axes[1 if second else 2])


def stacks_of(graph: Graph) -> Mapping[int, Stack]:
    """Return the stacks that ops take matrices of experts from, by op id."""
    found = ((index, stack_of(graph, index)) for index in range(len(graph.ops)))
    return {index: stack for index, stack in found if stack is not None}


def takes_biases(graph: Graph, op_id: int) -> bool:
    """Return whether an op takes, for each row, the bias of its expert, which an Add behind a product reads."""
    op = graph.ops[op_id]
    shape = graph.shape_of(op.inputs[0]) if op.inputs else None
    if shape is None or len(shape) != 2 or graph.constant_root(op.inputs[0]) is None or not takes_rows(graph, op):
        return False
    current = op.outputs[0]
    while (reader := graph.sole_consumer(current)) is not None and graph.ops[reader].type in RESHAPES | _SAME_VALUES:
        current = graph.ops[reader].outputs[0]
    if reader is None or graph.ops[reader].type != "Add":
        return False
    return any(_is_product_of_stack(graph, other) for other in graph.ops[reader].inputs if other != current)


def _is_product_of_stack(graph: Graph, tensor: int | None) -> bool:
    op = graph.maker(tensor)
    while op is not None and op.type in RESHAPES | _SAME_VALUES:
        op = graph.maker(op.inputs[0])
    if op is None or op.type != "MatMul":
        return False
    makers = (_taker(graph, operand) for operand in op.inputs)
    return any(index is not None and stack_of(graph, index) is not None for index in makers)


def _taker(graph: Graph, tensor: int | None) -> int | None:
    """Return the op that took a matrix, in front of what turns it."""
    op = graph.maker(tensor)
    while op is not None and op.type in _SAME_VALUES:
        tensor = op.inputs[0]
        op = graph.maker(tensor)
    return None if tensor is None else graph.producer.get(tensor)


def chosen_tensors(graph: Graph) -> Mapping[int, str]:
    """Return the tensors that hold matrices and biases of chosen experts, each with why it has no grid of its own."""
    result = {tensor for stack in stacks_of(graph).values() for tensor in stack.chosen}
    for index, op in enumerate(graph.ops):
        if op.type in ("Gather", "GatherND") and takes_biases(graph, index):
            current: int | None = op.outputs[0]
            while current is not None:
                result.add(current)
                reader = graph.sole_consumer(current)
                moves = reader is not None and graph.ops[reader].type in RESHAPES | _SAME_VALUES
                current = graph.ops[reader].outputs[0] if moves and reader is not None else None
    return dict.fromkeys(result, OF_CHOSEN)


def routers_of(graph: Graph) -> Mapping[int, frozenset[int]]:
    """Return the floats that are computed from the scores of each router alone, by the op id of its linear layer.

    A router's scores decide, by a TopK, which matrix of a stack a row of data takes.
    """
    heads: set[int] = set()
    for index in stacks_of(graph):
        for top in _topks_before(graph, graph.ops[index].inputs[1]):
            heads.update(_layers_before(graph, graph.ops[top].inputs[0]))
    return {head: frozenset(_computed_from(graph, head)) for head in heads}


def _topks_before(graph: Graph, tensor: int | None) -> Iterator[int]:
    """Yield the TopK ops nearest before an index."""
    return _nearest_before(graph, tensor, lambda op: op.type == "TopK" and _floats(graph, op.inputs[:1]) != [])


def _layers_before(graph: Graph, tensor: int | None) -> Iterator[int]:
    """Yield the linear layers with stored weights nearest before a tensor."""
    for index in _nearest_before(graph, tensor, lambda op: op.type in ("Gemm", "MatMul"), floats=True):
        if any(graph.constant_root(t) is not None for t in graph.ops[index].inputs[:2]):
            yield index


def _nearest_before(
    graph: Graph, tensor: int | None, wanted: Callable[[Op], bool], *, floats: bool = False
) -> Iterator[int]:
    """Yield the wanted ops nearest before a tensor; with `floats`, along float tensors alone."""
    waiting, seen = [tensor], set[int]()
    while waiting:
        current = waiting.pop()
        index = None if current is None else graph.producer.get(current)
        if index is None or index in seen:
            continue
        seen.add(index)
        op = graph.ops[index]
        if wanted(op):
            yield index
        else:
            waiting += _floats(graph, op.inputs) if floats else op.inputs


def _floats(graph: Graph, tensors: Iterable[int | None]) -> list[int | None]:
    return [t for t in tensors if t is not None and graph.tensors[t].is_float]


def _computed_from(graph: Graph, head: int) -> set[int]:
    result = set(graph.ops[head].outputs)
    for op in graph.ops[head + 1 :]:
        read = {t for t in op.inputs if t is not None and graph.tensors[t].is_float and graph.constant_root(t) is None}
        if read and read <= result:
            result.update(t for t in op.outputs if graph.tensors[t].is_float)
    return result


def tokens_remark(counts: Sequence[int], inputs: int) -> str:
    """Return in words how many tokens each expert got, and which got fewer than its matrix has inputs."""
    few = [number for number, count in enumerate(counts) if count < inputs]
    named = ", ".join(map(str, few[:8])) + (f" and {len(few) - 8} others" if len(few) > 8 else "")
    found = f"{min(counts)} to {max(counts)} tokens for each of {len(counts)} experts"
    return found + (
        f"; fewer than {inputs}, its inputs, for {named}: give more data, or all_experts=True" if few else ""
    )
