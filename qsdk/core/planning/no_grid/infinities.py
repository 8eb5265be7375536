"""Tensors into which the model itself writes an infinity, as a mask in front of an exponential or a maximum."""

from collections.abc import Mapping

import numpy as np

from qsdk.core.graph.graph import Graph, Op
from qsdk.core.planning.ties import keeps_grid, moved_inputs

AN_INFINITY = "the model writes an infinity into it, as a mask does, and no grid has one"

Signs = frozenset[int]  # of the infinities that a tensor may hold

_BOTH = frozenset({-1, 1})
#: ops that give an infinity where they read one
_KEEP = frozenset({"Add", "Cast", "CastLike", "CumSum", "Trilu", "Pad", "ReduceSum", "ReduceMean", "Concat"})
#: ops of which this infinity does not come out
_END = {"Relu": -1, "Max": -1, "MaxPool": -1, "GlobalMaxPool": -1, "ReduceMax": -1, "Min": 1, "ReduceMin": 1}


def infinite_tensors(graph: Graph) -> Mapping[int, str]:
    """Return the computed floats that hold an infinity by a constant of the model, each with the reason.

    An op that is not known to keep one, such as an exponential of minus infinity, is taken to end it.
    """
    signs: dict[int, Signs] = {}
    for index, tensor in enumerate(graph.tensors):
        if tensor.value is not None and tensor.value.dtype.kind == "f" and bool(np.isinf(tensor.value).any()):
            signs[index] = frozenset(int(np.sign(x)) for x in tensor.value.ravel() if np.isinf(x))
    stored = set(signs)
    for op in graph.ops if stored else ():
        given = _given(graph, op, [frozenset() if t is None else signs.get(t, frozenset()) for t in op.inputs])
        if given:
            signs.update(dict.fromkeys(op.outputs, given))
    return dict.fromkeys(signs.keys() - stored, AN_INFINITY)


def _given(graph: Graph, op: Op, read: list[Signs]) -> Signs:
    """Return the signs of the infinities of an op's result; of its inputs they are `read`."""
    every = frozenset[int]().union(*read)
    if not every:
        return every
    if op.type == "Where":
        return read[1] | read[2]
    if op.type in ("Neg", "Sub"):
        return read[0] | _turned(read[1]) if op.type == "Sub" else _turned(read[0])
    if op.type in ("Mul", "Div"):
        return _BOTH if op.type == "Mul" or read[0] else frozenset()
    if op.type == "Clip":
        has = [(len(op.inputs) > at and op.inputs[at] is not None) or name in op.attributes for at, name in _BOUNDS]
        return read[0] - {sign for sign, bound in zip((-1, 1), has, strict=True) if bound}
    if op.type in _END:
        return every - {_END[op.type]}
    if op.type in _KEEP:
        return every
    moved = moved_inputs(op) if keeps_grid(graph, op) else []
    return frozenset[int]().union(*(signs for t, signs in zip(op.inputs, read, strict=True) if t in moved))


_BOUNDS = ((1, "min"), (2, "max"))


def _turned(signs: Signs) -> Signs:
    return frozenset(-sign for sign in signs)
