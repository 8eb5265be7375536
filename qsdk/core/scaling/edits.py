"""Edits: the changes that scaling a region makes to the stored tensors of the ops at its ends."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np

from qsdk.core.graph.graph import Graph
from qsdk.core.graph.op_facts import LINEAR
from qsdk.core.planning.operands import StoredOperand, operands_of
from qsdk.core.scaling.channels import Ids, along, broadcast_back
from qsdk.core.scaling.propagation import KnownTensor, channels_along, propagate
from qsdk.core.site import owner_of

#: norms -> the inputs that hold gamma and beta, and the axis of their channels in the output
_NORMS: Mapping[str, tuple[tuple[int, ...], int]] = MappingProxyType(
    {"LayerNormalization": ((1, 2), -1), "RMSNormalization": ((1,), -1)}
    | dict.fromkeys(("BatchNormalization", "InstanceNormalization", "GroupNormalization"), ((1, 2), 1))
)
_GAMMA, _MEAN = 1, 3  # inputs of BatchNormalization


@dataclass(frozen=True)
class Edit:
    """A stored tensor that is multiplied by the factors of its channels, to a power.

    Attributes:
        root: id of the stored tensor.
        ids: its map; it broadcasts to the tensor's shape.
        power: +1 where it is multiplied by the factors, -1 where it is divided.
        role: `weight` for the weight of a layer, else `vector`.
    """

    root: int
    ids: Ids
    power: int
    role: Literal["weight", "vector"] = "vector"


@dataclass(frozen=True)
class End:
    """An op at the end of a region.

    Attributes:
        op: its id.
        edits: of its stored tensors.
        reads: the tensor of the region that it reads; None for an op that computes one.
        linear: whether it multiplies a stored weight, or looks it up.
    """

    op: int
    edits: tuple[Edit, ...]
    reads: int | None = None
    linear: bool = False

    def owner(self, graph: Graph) -> str:
        """Return the owner of its stored tensors in sites, or its own name where they have no site."""
        sites = (graph.tensors[edit.root].site for edit in self.edits)
        site = next((site for site in sites if site is not None), None)
        return graph.ops[self.op].name if site is None else owner_of(site)


def is_linear(graph: Graph, op_id: int) -> bool:
    """Return whether an op multiplies its first input by a stored weight."""
    op = graph.ops[op_id]
    is_layer = op.domain in ("", "ai.onnx") and op.type in LINEAR
    weight = op.inputs[1] if is_layer else None
    return (
        weight is not None
        and graph.constant_root(weight) is not None
        and graph.constant_root(op.inputs[0] or 0) is None
    )


def input_axis(graph: Graph, op_id: int) -> int:
    """Return the axis of a linear op's input whose channels it multiplies."""
    return 1 if graph.ops[op_id].type.startswith("Conv") else -1


def producer_edit(graph: Graph, op_id: int, ids: Ids, power: int) -> End | str | None:
    """Return the edit by which the op that makes a tensor divides it, or why it cannot; None without stored tensors."""
    op = graph.ops[op_id]
    if is_linear(graph, op_id):
        channels = channels_along(ids, input_axis(graph, op_id))
        if channels is None or (op.type == "Gemm" and op.attributes.get("transA", 0)):
            return f"the channels of {op.type} are not those of the factors"
        return _linear(graph, op_id, channels, -power, is_producer=True)
    if op.type in _NORMS and op.domain in ("", "ai.onnx"):
        members, axis = _NORMS[op.type]
        channels = channels_along(ids, axis)
        stored = [op.inputs[place] for place in members if len(op.inputs) > place]
        if channels is None or not stored or stored[0] is None:
            return f"{op.type} has no parameter for each channel"
        result = [_vector(graph, tensor, along(channels, -1, 1), -power) for tensor in stored if tensor is not None]
        return _end(op_id, result)
    if op.type == "Gather" and op.inputs[0] is not None and graph.constant_root(op.inputs[0]) is not None:
        channels = channels_along(ids, -1)
        table = graph.constant_root(op.inputs[0])
        shape = graph.tensors[op.inputs[0]].shape or ()
        if channels is None or table != op.inputs[0] or len(shape) != 2 or op.attributes.get("axis", 0) != 0:
            return "the channels of an embedding are not those of the factors"
        return _end(op_id, [Edit(table, along(channels, 1, 2), -power, "weight")], linear=True)
    constant = stored_operand(graph, op_id)
    if op.type == "Mul" and constant is not None and _holds(graph, constant, ids):
        return _end(op_id, [_vector(graph, constant, ids, -power)])
    return None


def consumer_edit(graph: Graph, op_id: int, tensor: int, ids: Ids, power: int) -> End | str | None:
    """Return the edit by which a reader of a tensor multiplies it, or why it cannot; None without stored tensors."""
    op = graph.ops[op_id]
    if is_linear(graph, op_id):
        channels = channels_along(ids, input_axis(graph, op_id))
        if channels is None or op.inputs[0] != tensor or op.attributes.get("transA", 0):
            return f"{op.type} multiplies other channels than those of the factors"
        return _linear(graph, op_id, channels, power, is_producer=False, reads=tensor)
    if op.type == "BatchNormalization" and op.domain in ("", "ai.onnx"):
        channels = channels_along(ids, 1)
        gamma, mean = op.inputs[_GAMMA], op.inputs[_MEAN]
        if channels is None or op.inputs[0] != tensor or gamma is None or mean is None:
            return "BatchNormalization has other channels than those of the factors"
        return _end(
            op_id,
            [_vector(graph, gamma, along(channels, 0, 1), power), _vector(graph, mean, along(channels, 0, 1), -power)],
            reads=tensor,
        )
    constant = stored_operand(graph, op_id)
    if op.type == "Mul" and constant is not None and _holds(graph, constant, ids):
        return _end(op_id, [_vector(graph, constant, ids, power)], reads=tensor)
    return None


def stored_operand(graph: Graph, op_id: int) -> int | None:
    """Return the operand of a binary op that is stored, or a view of a stored tensor; None if none or both are."""
    op = graph.ops[op_id]
    if op.type not in ("Add", "Sub", "Mul", "Div") or len(op.inputs) != 2:
        return None
    stored = [tensor for tensor in op.inputs if tensor is not None and graph.origin(tensor) is not None]
    return stored[0] if len(stored) == 1 else None


def addend_edit(graph: Graph, constant: int, ids: Ids, power: int) -> Edit | str:
    """Return the edit of a stored operand of an Add, whose result has the map `ids`."""
    own = broadcast_back(ids, graph.tensors[constant].shape or ())
    return (
        "a stored operand has one value for several channels" if own is None else _vector(graph, constant, own, -power)
    )


def _holds(graph: Graph, constant: int, ids: Ids) -> bool:
    return broadcast_back(ids, graph.tensors[constant].shape or ()) is not None


def _linear(
    graph: Graph, op_id: int, channels: Ids, power: int, *, is_producer: bool, reads: int | None = None
) -> End | str:
    result: list[Edit | str] = []
    for operand in operands_of(graph, op_id):
        if operand.role == "weight":
            ids = _weight_map(graph, op_id, operand, channels, is_producer=is_producer)
            if ids is None:
                return f"the channels of {graph.ops[op_id].type} are not those of the factors"
            result.append(_if_exclusive(graph, operand.tensor, Edit(operand.root, ids, power, "weight")))
        elif is_producer:
            result.append(addend_edit(graph, operand.tensor, along(channels, -1, 2), -power))
    return _end(op_id, result, reads=reads, linear=True)


def _weight_map(graph: Graph, op_id: int, operand: StoredOperand, channels: Ids, *, is_producer: bool) -> Ids | None:
    """Return the map of a weight from the channels of its layer's output, or input."""
    shape = tuple(n for n in graph.tensors[operand.root].shape or () if isinstance(n, int))
    groups = graph.ops[op_id].attributes.get("group", 1)
    axis = operand.channel_axis if is_producer else operand.input_axis
    if axis is None or operand.channel_axis is None or operand.input_axis is None:
        return None
    if shape[axis] == channels.size:  # one axis holds all channels
        if groups == 1 or (axis == 0):
            return along(channels, axis, len(shape))
        return None
    if groups * shape[axis] != channels.size or len(shape) < 3:
        return None
    # axis 1 has the channels of one group, and axis 0 runs over the groups
    per_group = channels.reshape(groups, shape[axis])
    rows = np.repeat(per_group, shape[0] // groups, axis=0)
    return rows.reshape(*rows.shape, *[1] * (len(shape) - 2))


def _vector(graph: Graph, tensor: int, ids: Ids, power: int) -> Edit | str:
    """Return the edit of a stored vector, read directly or through views."""
    own = broadcast_back(ids, graph.tensors[tensor].shape or ())
    origin = graph.origin(tensor)
    if own is None or origin is None:
        return "a parameter is computed, or has one value for several channels"
    root, between = origin
    current = tensor
    for op_id in between:
        step = propagate(KnownTensor(graph, graph.ops[op_id], current, own, _no_new))
        current = graph.ops[op_id].inputs[0] or 0
        if step.blocked:
            return step.blocked
        own = step.tensors[current]
    return _if_exclusive(graph, tensor, Edit(root, own, power))


def _no_new(shape: tuple[int, ...]) -> Ids:
    raise AssertionError("a view of a stored tensor has no channels of its own")


def _if_exclusive(graph: Graph, tensor: int, edit: Edit) -> Edit | str:
    """Return an edit, or why the tensor cannot be changed: something else reads it as well."""
    name, current = graph.tensors[edit.root].name, edit.root
    if not graph.tensors[edit.root].is_float:
        return f"{name} is stored as {graph.tensors[edit.root].dtype}"
    while True:
        readers = graph.consumers[current]
        if len(readers) != 1 or current in graph.output_set:
            return f"{name} is shared: other ops read it as well"
        if current == tensor:
            return edit
        current = graph.ops[readers[0]].outputs[0]


def _end(
    op_id: int, edits_or_reasons: list[Edit | str] | list[Edit], *, reads: int | None = None, linear: bool = False
) -> End | str:
    reasons = [item for item in edits_or_reasons if isinstance(item, str)]
    edits = tuple(item for item in edits_or_reasons if not isinstance(item, str))
    return reasons[0] if reasons else End(op_id, edits, reads, linear)
