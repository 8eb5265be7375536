"""A layer and the ops that follow it: the bias that an Add adds to a MatMul, and the activation behind."""

from collections.abc import Container, Mapping

import numpy as np

from qsdk.core.graph.graph import Graph
from qsdk.core.graph.op_facts import LINEAR
from qsdk.core.patterns.supergroup import Supergroup

#: ops that end in an accumulator, whose activation is folded into its requantization
HEADS = LINEAR | {"Add", "Sub", "Mul", "BatchNormalization"}
#: activations that not every runtime computes in one kernel with the layer
SLOPES = frozenset({"LeakyRelu", "PRelu"})
ACTIVATIONS = SLOPES | {"Relu", "Clip"}


def linear_groups(graph: Graph, taken: Container[int]) -> Mapping[int, Supergroup]:
    """Return the supergroup of each op of a layer with an activation, without ops that another group has taken.

    A group grows from its head along tensors that have one reader and do not leave the model.
    """
    result: dict[int, Supergroup] = {}
    for index, head in enumerate(graph.ops):
        if index in result or index in taken or head.type not in HEADS or not head.outputs:
            continue
        ops = _grow(graph, index)
        if len(ops) > 1 and not any(op in taken for op in ops):
            group = Supergroup(tuple(ops), "+".join(graph.ops[op].type for op in ops))
            result.update(dict.fromkeys(ops, group))
    return result


def bias_of_add(graph: Graph, add: int) -> int | None:
    """Return the bias tensor of an Add behind a linear op that has none of its own; None for any other Add.

    A bias is a stored, one-dimensional operand with one value per output channel; the MatMul has a stored weight and
    no other reader. (One dimension is broadcast along the last axis, which is no channel axis of a convolution.)
    """
    op = graph.ops[add]
    if op.type != "Add" or len(op.inputs) != 2:
        return None
    for result, bias in (op.inputs, op.inputs[::-1]):
        product = graph.maker(result)
        if bias is None or result is None or product is None or product.type != "MatMul":
            continue
        root = graph.constant_root(bias)
        fits = root is not None and _is_one_per_column(graph, root, product.inputs[1])
        if fits and graph.sole_consumer(result) == add:
            return bias
    return None


def _grow(graph: Graph, head: int) -> list[int]:
    ops = [head]
    following = _next(graph, head)
    if graph.ops[head].type == "MatMul" and following is not None and bias_of_add(graph, following) is not None:
        ops.append(following)
        following = _next(graph, following)
    if following is not None and _is_activation(graph, following):
        ops.append(following)
    return ops


def _is_activation(graph: Graph, op_id: int) -> bool:
    """Return whether an op is an activation with stored bounds or a positive slope, which requantizing can include."""
    op = graph.ops[op_id]
    if op.type not in ACTIVATIONS or op.domain not in ("", "ai.onnx"):
        return False
    origins = [graph.origin(tensor) for tensor in op.inputs[1:] if tensor is not None]
    roots = [origin[0] for origin in origins if origin is not None]
    if len(roots) < len(origins):
        return False
    slopes = [op.attributes.get("alpha", 0.01)] if op.type == "LeakyRelu" else []
    if op.type == "PRelu":
        slopes = [graph.value(root) for root in roots]
    return all(slope is None or bool(np.all(np.asarray(slope) > 0)) for slope in slopes)


def _next(graph: Graph, op: int) -> int | None:
    return graph.sole_consumer(graph.ops[op].outputs[0])


def _is_one_per_column(graph: Graph, bias: int, weight: int | None) -> bool:
    if weight is None or graph.constant_root(weight) is None:
        return False
    shape, columns = graph.tensors[bias].shape or (), graph.tensors[weight].shape or (None,)
    return len(shape) == 1 and (columns[-1] is None or shape[0] == columns[-1])
