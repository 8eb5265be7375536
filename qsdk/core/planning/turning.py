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
            size = _size(graph, tensor, -1)
            if axis == -1 and isinstance(size, int):
                turning[tensor] = Turns(layout, size)
    known = -1
    while turning and len(turning) > known:
        known = len(turning)
        for index, op in enumerate(graph.ops):
            if index not in groups and op.outputs and (keeps_grid(graph, op) or _scaled(graph, op)):
                _carry(graph, op, turning)
    return {
        tensor: replace(decision, turns=turning[tensor]) if tensor in turning else decision
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
    layout, size, _ = turns
    pairs = np.arange(size // 2)
    if layout == "halves":
        return pairs, pairs + size // 2, np.tile(pairs, 2)
    return 2 * pairs, 2 * pairs + 1, np.repeat(pairs, 2)


def _carry(graph: Graph, op: Op, turning: dict[int, Turns]) -> None:
    """Pass on what turns between an op's operands and its results, where it leaves the rows of pairs whole."""
    read = op.inputs if op.type == "Concat" else _scaled(graph, op) or op.inputs[:1]
    moved = [t for t in read if t is not None]
    front, rank = turning.get(moved[0]), len(graph.tensors[moved[0]].shape or ())
    if op.type == "Concat" and front is not None and op.attributes.get("axis") in (front.axis, rank + front.axis):
        if front.size == _size(graph, moved[0], front.axis):  # values that do not turn stand behind those that do
            turning.setdefault(op.outputs[0], front)
        return
    both_ways = [pair for one in moved for result in op.outputs for pair in ((one, result), (result, one))]
    for source, goal in both_ways:
        found = turning.get(source)
        axis = None if found is None else _axis_behind(graph, op, source, goal, found.axis)
        if found is not None and axis is not None and not graph.tensors[goal].constant:
            turning.setdefault(goal, found._replace(axis=axis))


def _axis_behind(graph: Graph, op: Op, source: int, goal: int, axis: int) -> int | None:
    """Return the axis of the pairs on the other side of an op, or None where it may take pairs apart."""
    shape = graph.tensors[source].shape
    if op.type == "Transpose":
        rank = len(shape or ())
        order = [int(place) for place in op.attributes.get("perm") or reversed(range(rank))]
        return (order.index(rank + axis) if goal in op.outputs else order[axis]) - rank if rank else None
    behind = range(axis, 0) if op.type in ("Reshape", "Flatten") else (axis,)
    whole = all(None is not _size(graph, source, at) == _size(graph, goal, at) for at in behind)
    return axis if whole else None


def _scaled(graph: Graph, op: Op) -> tuple[int, ...]:
    """Return the tensor that an op multiplies or divides by one number, which leaves pairs on circles; or nothing."""
    if op.type not in ("Mul", "Div"):
        return ()
    left, right = (t for t in op.inputs if t is not None)
    return (left,) if _is_number(graph, right) else (right,) if op.type == "Mul" and _is_number(graph, left) else ()


def _is_number(graph: Graph, tensor: int) -> bool:
    shape = graph.tensors[tensor].shape
    return shape is not None and all(size == 1 for size in shape)


def _size(graph: Graph, tensor: int, axis: int) -> int | str | None:
    shape = graph.tensors[tensor].shape
    return shape[axis] if shape and len(shape) >= -axis else None
