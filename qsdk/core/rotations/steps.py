"""Steps of a rotation through ops that are linear in the channels: `op(x Q) = op(x) Q`, in both directions."""

import numpy as np

from qsdk.core.graph.graph import Graph
from qsdk.core.graph.op_facts import VIEWS
from qsdk.core.planning.operands import operands_of
from qsdk.core.rotations.turns import channel_axis
from qsdk.core.scaling.channels import Ids, along, broadcast_on
from qsdk.core.scaling.edits import input_axis, is_linear, stored_operand
from qsdk.core.scaling.propagation import KnownTensor, Propagation, propagate

#: ops that only move channels or leave out whole rows
MOVES = VIEWS | {"Dropout", "Cast", "Expand", "Slice", "Gather"}
_LINEAR = MOVES | {"Neg", "Add", "Sub", "Sum", "MatMul", "ReduceMean", "ReduceSum"}


def step(graph: Graph, op_id: int, tensor: int, ids: Ids, size: int) -> Propagation:
    """Return the tensors of an op that are turned if one of them is, or why that is impossible.

    Args:
        graph: of the model.
        op_id: of the op.
        tensor: the one that is turned.
        ids: map of its channels to those of the rotation, -1 where they stay.
        size: of the rotation.
    """
    op = graph.ops[op_id]
    at = KnownTensor(graph, op, tensor, ids, lambda shape: np.full(shape, -1, np.int64))
    if op.domain in ("", "ai.onnx"):
        if op.type in ("Mul", "Div"):
            return _scales(at)
        if op.type in ("Concat", "Split"):
            return _joins(at)
        if op.type == "Reshape":
            return _reshapes(at, size) or propagate(at)
        if op.type in _LINEAR:
            constant = stored_operand(graph, op_id)
            return propagate(at) if constant is None else _adds_stored(at, constant)
    return Propagation(blocked="it is not linear in its channels")


def _scales(at: KnownTensor) -> Propagation:
    """Propagate through a product with one number for all channels."""
    axis = channel_axis(at.ids)
    assert axis is not None
    rank = len(at.shape(at.made))
    from_end = axis - at.ids.ndim

    def varies_there(tensor: int) -> bool:
        shape = at.shape(tensor)
        return len(shape) >= -from_end and shape[from_end] != 1

    carriers = [t for t in at.op.inputs if t is not None and varies_there(t)]
    if len(carriers) != 1 or (at.op.type == "Div" and carriers[0] != at.fed):
        return Propagation(blocked="its channels are multiplied by different numbers")
    if at.forward:
        return Propagation({at.made: broadcast_on(at.ids, rank)})
    held = at.shape(carriers[0])
    return Propagation({carriers[0]: at.ids.reshape(at.ids.shape[rank - len(held) :])})


def _reshapes(at: KnownTensor, size: int) -> Propagation | None:
    """Propagate whole blocks along the last axis to the last axis, whatever the sizes before it; None if that fails.

    Elements keep their order, so the place in its block is that of the element modulo the size, on either side.
    """
    other = at.made if at.forward else at.fed
    shape = at.shape(other)
    width = _width(at.graph, other)
    in_blocks = channel_axis(at.ids) == at.ids.ndim - 1 and at.ids.size % size == 0 and (at.ids >= 0).all()
    if not in_blocks or not isinstance(width, int) or width % size:
        return None
    return Propagation({other: along(np.tile(np.arange(size), width // size), -1, len(shape))})


def _width(graph: Graph, tensor: int) -> int | None:
    """Return the size of a tensor's last axis; where shape inference leaves it open, that which its layer takes.

    If another Reshape alone reads it, that one's result counts: the elements between are in the same order.
    """
    shape = graph.tensors[tensor].shape or (None,)
    if isinstance(shape[-1], int):
        return shape[-1]
    only = graph.sole_consumer(tensor)
    if only is not None and graph.ops[only].type == "Reshape":
        return _width(graph, graph.ops[only].outputs[0])
    for op_id in graph.consumers[tensor]:
        if is_linear(graph, op_id) and graph.ops[op_id].inputs[0] == tensor and input_axis(graph, op_id) == -1:
            for operand in operands_of(graph, op_id):
                if operand.role == "weight" and operand.input_axis is not None:
                    width = (graph.tensors[operand.root].shape or ())[operand.input_axis]
                    return width if isinstance(width, int) else None
    return None


def _joins(at: KnownTensor) -> Propagation:
    """Propagate through a Concat or a Split; channels beside those that are known are not turned."""
    whole_tensor = at.made if at.op.type == "Concat" else at.fed
    parts = [t for t in (at.op.inputs if at.op.type == "Concat" else at.op.outputs) if t is not None]
    axis = at.op.attributes.get("axis", 0) % at.ids.ndim
    if axis != channel_axis(at.ids):
        return Propagation(dict.fromkeys([whole_tensor, *parts], at.ids))
    if at.op.type == "Split":
        parts = list(at.op.outputs)
    sizes = [at.shape(tensor)[axis] for tensor in parts]
    known = [size for size in sizes if isinstance(size, int)]
    if len(known) < len(sizes):
        return Propagation(blocked="the sizes of its parts are not known")
    whole = at.ids
    if at.tensor != whole_tensor:
        ids = [at.ids.reshape(-1) if t == at.tensor else np.full(n, -1) for t, n in zip(parts, known, strict=True)]
        whole = along(np.concatenate(ids), axis, at.ids.ndim)
    ends = np.cumsum([0, *known])
    cut = {t: whole.take(range(a, b), axis) for t, a, b in zip(parts, ends, ends[1:], strict=False)}
    return Propagation({whole_tensor: whole, **cut})


def _adds_stored(at: KnownTensor, constant: int) -> Propagation:
    """Propagate through a sum with a stored operand, which is turned too."""
    data = next(t for t in at.op.inputs if t is not None and t != constant)
    rank = len(at.shape(at.made))
    if rank != len(at.shape(data)):
        return Propagation(blocked=f"{at.op.type} adds axes")
    shape = at.shape(constant)
    axis = channel_axis(at.ids)
    assert axis is not None
    from_end = axis - at.ids.ndim
    if len(shape) < -from_end or shape[from_end] != at.ids.shape[axis]:
        return Propagation(blocked="one stored number is added to several channels")
    own = along(at.ids.reshape(-1), from_end, len(shape))
    return Propagation({at.made if at.forward else data: at.ids, constant: own})
