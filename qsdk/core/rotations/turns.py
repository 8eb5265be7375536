"""Turns: how a stored tensor takes up a rotation, along one of its axes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from qsdk.core.graph.graph import Graph
from qsdk.core.graph.op_facts import SHAPE_OPS, VIEWS
from qsdk.core.rotations.norm_ops import NormOp
from qsdk.core.scaling.channels import Ids
from qsdk.core.scaling.propagation import KnownTensor, propagate

Role = Literal["writer", "reader", "vector"]
_VIEWS = VIEWS | {"Cast", "Expand"}


@dataclass(frozen=True, eq=False)
class Turn:
    """A stored tensor that takes up a rotation: `new[.., j] = sum(old[.., i] * rotation[i, j])` along one axis.

    Attributes:
        root: id of the stored tensor.
        ids: map of its elements to the channels of the rotation; -1 where it stays as it is.
        op: the op that reads it.
        role: `writer` of the stream, `reader` of it, or a `vector` that is added.
        gain: the norm whose gain is multiplied in first.
    """

    root: int
    ids: Ids
    op: int
    role: Role
    gain: NormOp | None = None

    @property
    def axis(self) -> int:
        """Return the axis of the channels."""
        axis = channel_axis(self.ids)
        assert axis is not None
        return axis

    @property
    def form(self) -> tuple[int, bytes, int | None]:
        """Return what two readers of one stored tensor must agree on: axis, channels and the stored gain."""
        return self.axis, self.ids.tobytes(), None if self.gain is None else self.gain.gain


def channel_axis(ids: Ids) -> int | None:
    """Return the one axis along which the channel varies; None if there is none, or several."""
    axes = [axis for axis, size in enumerate(ids.shape) if size != 1]
    return axes[0] if len(axes) == 1 else None


def channels_of(ids: Ids, axis: int) -> Ids | None:
    """Return the channels as a vector where they vary along this axis, else None."""
    return ids.reshape(-1) if channel_axis(ids) == axis % ids.ndim else None


def whole_blocks(ids: Ids, size: int) -> bool:
    """Return whether the channels come in whole blocks 0, 1, ..., size - 1, one behind the other."""
    turned = ids.reshape(-1)
    turned = turned[turned >= 0]
    return turned.size % size == 0 and np.array_equal(turned, np.tile(np.arange(size), turned.size // size))


def turn_of_stored(graph: Graph, tensor: int, ids: Ids, reader: int, role: Role) -> Turn | None:
    """Return the turn of the stored tensor behind a tensor, or None where its views cannot be followed."""
    origin = graph.origin(tensor)
    if origin is None:
        return None
    root, between = origin
    current = tensor
    for op_id in between:
        step = propagate(KnownTensor(graph, graph.ops[op_id], current, ids, lambda shape: np.full(shape, -1, np.int64)))
        source = graph.ops[op_id].inputs[0]
        if step.blocked or source is None or source not in step.tensors:
            return None
        current, ids = source, step.tensors[source]
    fits = channel_axis(ids) is not None and graph.tensors[root].is_float
    return Turn(root, ids, reader, role) if fits else None


def stored_readers(graph: Graph, root: int) -> Iterator[int]:
    """Yield the ops that read the values of a stored tensor, directly or through views of it."""
    pending = [root]
    while pending:
        for op_id in graph.consumers[pending.pop()]:
            op = graph.ops[op_id]
            if op.type in _VIEWS and op.inputs[0] is not None and graph.origin(op.outputs[0]) is not None:
                pending += op.outputs
            elif op.type not in SHAPE_OPS:
                yield op_id
