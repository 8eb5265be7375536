"""Masks that are added to the scores of attention: the ops that compute them, and the tensors used for nothing else."""

from collections.abc import Iterable, Mapping

import numpy as np

from qsdk.core.graph.graph import Graph
from qsdk.core.graph.op_facts import REPEATS, SHAPE_OPS, VIEWS
from qsdk.core.patterns.supergroup import Supergroup

#: a score this far below the others has a weight of 2e-9, which no grid of a softmax shows
HIDES = -20.0
_MOVES = VIEWS | REPEATS | {"Cast", "Slice", "Gather", "Concat", "Pad", "Trilu"}
_JOINS = frozenset({"Add", "Min"})
_DEPTH = 12  # ops between a mask and the constant that hides


def is_mask(graph: Graph, tensor: int) -> str | None:
    """Return None if a tensor that is added to scores is a mask, else why it is none."""
    if _sources(graph, tensor, _DEPTH) is not None:
        return None
    return "what is added to its scores is no mask of -20 or less"


def mask_tensors(graph: Graph, groups: Iterable[Supergroup]) -> frozenset[int]:
    """Return the computed tensors that hold a mask of a group, or a part of one, and that nothing else reads."""
    group_of = {op: group for group in groups if "mask" in group.tensors for op in group.ops}
    result: set[int] = set()
    for group in {id(group): group for group in group_of.values()}.values():
        result |= _sources(graph, group.tensors["mask"], _DEPTH) or set()
    result = {tensor for tensor in result if tensor not in graph.output_set and tensor in graph.producer}
    while True:
        read = {
            tensor
            for tensor in result
            if all(_only_hides(graph, tensor, op, result, group_of) for op in _readers(graph, tensor))
        }
        if read == result:
            return frozenset(result)
        result = read


def _readers(graph: Graph, tensor: int) -> list[int]:
    return [op for op in graph.consumers[tensor] if graph.ops[op].type not in SHAPE_OPS]


def _only_hides(graph: Graph, tensor: int, reader: int, masks: set[int], group_of: Mapping[int, Supergroup]) -> bool:
    group = group_of.get(reader)
    if group is not None:
        return True
    return all(output in masks for output in graph.ops[reader].outputs)


def _sources(graph: Graph, tensor: int | None, depth: int) -> set[int] | None:
    """Return the tensors through which a tensor hides scores, itself included; None if it hides none.

    Scores are hidden by a constant of -20 or less, from a Where or a product.
    """
    if tensor is None or depth == 0:
        return None
    value = graph.value(tensor)
    if value is not None:
        # zeros are a mask that hides nothing; a trace has one where nothing is padded
        return {tensor} if np.size(value) and (float(np.min(value)) <= HIDES or not np.any(value)) else None
    made_by = graph.producer.get(tensor)
    if made_by is None:
        return None
    op = graph.ops[made_by]
    if op.type == "Where":
        return _chosen(graph, tensor, op.inputs[1:], depth)
    if op.type == "Mul":
        hides = any((graph.scalar(operand) or 0.0) <= HIDES for operand in op.inputs)
        return {tensor} if hides else None
    parts = op.inputs if op.type in _JOINS else op.inputs[:1] if op.type in _MOVES else ()
    # halved, since a sum of two masks doubles the work at every step
    result = [_sources(graph, part, depth - 1 if op.type in _MOVES else depth // 2) for part in parts]
    hiding = [part for part in result if part is not None]
    return {tensor}.union(*hiding) if hiding else None


def _chosen(graph: Graph, tensor: int, branches: Iterable[int | None], depth: int) -> set[int] | None:
    """Return the sources of a Where with a branch that hides; the other one is a number, a mask or a bias."""
    result = [_sources(graph, branch, depth - 1) for branch in branches]
    hiding = [part for part in result if part is not None]
    return {tensor}.union(*hiding) if hiding else None
