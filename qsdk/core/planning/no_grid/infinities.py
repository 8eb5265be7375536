"""Tensors into which the model itself writes an infinity, as a mask in front of an exponential or a maximum."""

from collections.abc import Mapping

import numpy as np

from qsdk.core.graph.graph import Graph, Op
from qsdk.core.planning.ties import keeps_grid

AN_INFINITY = "the model writes an infinity into it, as a mask does, and no grid has one"

#: ops that give an infinity where they read one; all others are taken to make something finite of it
_KEEP = frozenset({"Add", "Sub", "Mul", "Div", "Neg", "Cast", "CastLike", "CumSum", "Trilu"})


def infinite_tensors(graph: Graph) -> Mapping[int, str]:
    """Return the computed floats that hold an infinity by a constant of the model, each with the reason."""
    known = {index: tensor.value for index, tensor in enumerate(graph.tensors) if tensor.value is not None}
    stored = {index for index, value in known.items() if value.dtype.kind == "f" and bool(np.isinf(value).any())}
    result = set(stored)
    for op in graph.ops if stored else ():
        if result.intersection(t for t in _kept(graph, op) if t is not None):
            result.update(op.outputs)
    return dict.fromkeys(result - stored, AN_INFINITY)


def _kept(graph: Graph, op: Op) -> tuple[int | None, ...]:
    """Return the inputs of an op whose infinities its result has too."""
    if op.type == "Where":
        return tuple(op.inputs[1:])
    if op.type in _KEEP or op.type == "Concat":
        return tuple(op.inputs)
    return tuple(op.inputs[:1]) if op.inputs and keeps_grid(graph, op) else ()
