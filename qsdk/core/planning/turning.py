"""Values that turn with the position of a token: what rotary embeddings make, and the cache of such keys.

Ranges that a short text shows are wrong later on: a pair (a, b) comes by every point of its circle. The radius of the
circle is the same at every position, so it bounds both values of the pair wherever the token stands.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from qsdk.core.graph.graph import Graph, Op
from qsdk.core.patterns.supergroup import Supergroup
from qsdk.core.planning.plan import Decision, Turns
from qsdk.core.planning.ties import keeps_grid


def with_turning(
    graph: Graph, groups: Mapping[int, Supergroup], decisions: Mapping[int, Decision]
) -> dict[int, Decision]:
    """Return decisions by tensor id that say of each quantized result which of its values turn with the position.

    Only where positions are computed as the model runs: those that are stored are all that there are.
    """
    turning: dict[int, Turns] = {}
    open_ended = _depending(graph) if any(group.name == "RoPE" for group in groups.values()) else frozenset()
    for index, group in groups.items():
        if group.name == "RoPE" and group.ops[-1] == index and group.tensors["cos"] in open_ended:
            (tensor,), (layout, axis, *_) = graph.ops[index].outputs, group.facts["cut"]
            size = _row(graph, tensor)
            if axis == -1 and size is not None:
                turning[tensor] = layout, size
    known = -1
    while turning and len(turning) > known:
        known = len(turning)
        for index, op in enumerate(graph.ops):
            if index not in groups and op.outputs and keeps_grid(graph, op):
                _carry(graph, op, turning)
    return {
        tensor: replace(decision, turns=turning[tensor]) if tensor in turning and decision.quantized else decision
        for tensor, decision in decisions.items()
    }


def _depending(graph: Graph) -> frozenset[int]:
    """Return the tensors that depend on an input of the graph, on its values or its sizes."""
    found = set(graph.inputs)
    for op in graph.ops:
        if found.intersection(t for t in op.inputs if t is not None):
            found.update(op.outputs)
    return frozenset(found)


def pair_places(turns: Turns) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the places of the first values of pairs and of the second ones; and for each value, its pair's number."""
    layout, size = turns
    pairs = np.arange(size // 2)
    if layout == "halves":
        return pairs, pairs + size // 2, np.tile(pairs, 2)
    return 2 * pairs, 2 * pairs + 1, np.repeat(pairs, 2)


def _carry(graph: Graph, op: Op, turning: dict[int, Turns]) -> None:
    """Pass on what turns between an op's operands and its results, where it leaves the rows of the last axis whole."""
    moved = [t for t in (op.inputs if op.type == "Concat" else op.inputs[:1]) if t is not None]
    (result, *_), rows = op.outputs, {_row(graph, tensor) for tensor in (*moved, *op.outputs)}
    if op.type == "Concat" and _joins_rows(graph, op):  # values that do not turn behind those that do
        front = turning.get(moved[0])
        if front is not None and front[1] == _row(graph, moved[0]):
            turning.setdefault(result, front)
    elif len(rows) == 1 and None not in rows and not _moves_last_axis(op):
        found = next((turning[tensor] for tensor in (*moved, *op.outputs) if tensor in turning), None)
        if found is not None:
            fresh = (tensor for tensor in (*moved, *op.outputs) if not graph.tensors[tensor].constant)
            turning.update({tensor: found for tensor in fresh if tensor not in turning})


def _row(graph: Graph, tensor: int) -> int | None:
    shape = graph.tensors[tensor].shape
    return shape[-1] if shape and isinstance(shape[-1], int) else None


def _joins_rows(graph: Graph, op: Op) -> bool:
    shape, axis = graph.tensors[op.outputs[0]].shape, int(op.attributes.get("axis", 0))
    return axis == -1 or (shape is not None and axis == len(shape) - 1)


def _moves_last_axis(op: Op) -> bool:
    order = op.attributes.get("perm")
    return op.type == "Transpose" and (order is None or order[-1] != len(order) - 1)
