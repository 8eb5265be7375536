"""The flood behind equalization, SmoothQuant, AWQ and rotations: the tensors that one map of channels reaches.

From a tensor, a map is followed both ways through every op that commutes with it: `op(x / s) = op(x) / s` for positive
factors per channel, `op(x Q) = op(x) Q` for a rotation. Layers and norms end it or take it up, as the kind of map says:
`scale_groups` for factors, `rotation_groups` for rotations. Every relation here is exact.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NoReturn

import numpy as np

from qsdk.core.channel_maps.maps import Ids, Shape, broadcast_back, broadcast_on, reshape, varies
from qsdk.core.graph.graph import Graph, Op
from qsdk.core.graph.op_facts import LINEAR, RESHAPES, SHAPE_OPS

#: tensor id -> its map
Maps = dict[int, Ids]
STANDARD = ("", "ai.onnx")


class BlockedError(Exception):
    """Why a map cannot go on at an op."""


class Flood:
    """A group of tensors while it is searched; the kind of map says in `visit` and `enter` how it goes on."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.reason = graph, ""
        self.queue: list[int] = []

    def run(self, *, past_obstacles: bool) -> None:
        """Follow the map from all tensors in the queue, and those that are put into it on the way."""
        while self.queue and (past_obstacles or not self.reason):
            tensor = self.queue.pop()
            maker = self.graph.producer.get(tensor)
            if maker is None:
                self.enter(tensor)
            else:
                self._try(tensor, maker, upward=True)
            for reader in self.graph.consumers[tensor]:
                if self.graph.ops[reader].type not in SHAPE_OPS:
                    self._try(tensor, reader, upward=False)

    def _try(self, tensor: int, op_id: int, *, upward: bool) -> None:
        try:
            self.visit(tensor, op_id, upward=upward)
        except BlockedError as why:
            self.block(f"{self.label(op_id)}: {why}")

    def visit(self, tensor: int, op_id: int, *, upward: bool) -> None:
        """Continue at the op that computes a tensor (`upward`), or at one that reads it; raise `BlockedError`."""
        raise NotImplementedError

    def enter(self, tensor: int) -> None:
        """Note that the map reaches a tensor that no op computes."""
        raise NotImplementedError

    def block(self, reason: str) -> None:
        """Note why the group cannot be changed; the first reason holds."""
        self.reason = self.reason or reason

    def label(self, op_id: int) -> str:
        """Return the name of an op for messages: the site of its output, else its own name."""
        op = self.graph.ops[op_id]
        return self.graph.tensors[op.outputs[0]].site or op.name


# --- ops of which layers and norms are made ---------------------------------------------------------------------------


def is_linear(graph: Graph, op_id: int) -> bool:
    """Return whether an op multiplies its first input by a stored weight."""
    op = graph.ops[op_id]
    weight = op.inputs[1] if op.domain in STANDARD and op.type in LINEAR else None
    return (
        weight is not None
        and graph.constant_root(weight) is not None
        and graph.constant_root(op.inputs[0] or 0) is None
    )


def input_axis(graph: Graph, op_id: int) -> int:
    """Return the axis of a linear op's input whose channels it multiplies."""
    return 1 if graph.ops[op_id].type.startswith("Conv") else -1


def stored_operand(graph: Graph, op_id: int) -> int | None:
    """Return the operand of a binary op that is stored, or a view of a stored tensor; None if none or both are."""
    op = graph.ops[op_id]
    if op.type not in ("Add", "Sub", "Mul", "Div") or len(op.inputs) != 2:
        return None
    stored = [tensor for tensor in op.inputs if tensor is not None and graph.origin(tensor) is not None]
    return stored[0] if len(stored) == 1 else None


# --- relations: from one tensor of an op to the others ----------------------------------------------------------------


@dataclass(frozen=True)
class KnownTensor:
    """A tensor of an op whose map is known.

    Attributes:
        graph: of the model.
        op: the op.
        tensor: the one whose map is known.
        ids: the map.
        new: returns new ids for the elements that are joined to those of the tensor, in an array of a shape; None for a
            rotation, which leaves these as they are (-1).
    """

    graph: Graph
    op: Op
    tensor: int
    ids: Ids
    new: Callable[[tuple[int, ...]], Ids] | None = None

    @property
    def made(self) -> int:
        """Return the op's first output."""
        return self.op.outputs[0]

    @property
    def fed(self) -> int:
        """Return the op's first input."""
        assert self.op.inputs[0] is not None
        return self.op.inputs[0]

    @property
    def forward(self) -> bool:
        """Return whether the known tensor is an input of the op."""
        return self.tensor not in self.op.outputs

    def shape(self, tensor: int) -> Shape:
        """Return the shape of a tensor; an unknown rank counts as none."""
        return self.graph.tensors[tensor].shape or ()

    def others(self, shape: tuple[int, ...]) -> Ids:
        """Return the ids of elements that are not those of the tensor."""
        return np.full(shape, -1, np.int64) if self.new is None else self.new(shape)

    def lost(self) -> NoReturn:
        """Raise that the map cannot be told on the other side of the op."""
        raise BlockedError(f"the channels cannot be followed through {self.op.type} {self.op.name}".rstrip())


def propagate(at: KnownTensor) -> Maps:
    """Return the maps of the tensors of an op that one of its tensors determines; raise `BlockedError`."""
    relation = _RELATIONS.get(at.op.type) if at.op.domain in STANDARD else None
    if relation is None:
        raise BlockedError(f"{at.op.type} does not commute with a scaling of its channels")
    return relation(at)


def at_root(graph: Graph, tensor: int, ids: Ids) -> tuple[int, Ids]:
    """Return the stored tensor that a tensor is a view of, and its map; raise `BlockedError`."""
    origin = graph.origin(tensor)
    if origin is None:
        raise BlockedError("a parameter is computed, or has one value for several channels")
    for op_id in origin[1]:
        op = graph.ops[op_id]
        maps, tensor = propagate(KnownTensor(graph, op, tensor, ids)), op.inputs[0] or 0
        ids = maps[tensor]
    return origin[0], ids


def past_addend(at: KnownTensor, stored: int) -> Maps:
    """Return the maps of a sum with a stored operand, of that operand too."""
    data = next(tensor for tensor in at.op.inputs if tensor is not None and tensor != stored)
    if len(at.shape(stored)) > len(at.shape(data)):
        raise BlockedError(f"{at.op.type} adds axes")
    own = broadcast_back(at.ids, at.shape(stored))
    if own is None:
        raise BlockedError("a stored operand has one value for several channels")
    return {stored: own, at.made if at.forward else data: at.ids}


def past_product(at: KnownTensor, carrier: int) -> Maps:
    """Return the maps of a product whose result has the map of one operand, the carrier; the other is not changed."""
    if at.forward:
        if list(at.op.inputs).count(at.tensor) > 1:
            raise BlockedError(f"{at.op.type} reads it twice")
        if at.op.type == "Div" and at.tensor != at.fed:
            raise BlockedError("it divides another tensor")
        return {at.made: broadcast_on(at.ids, len(at.shape(at.made)))}
    ids = broadcast_back(at.ids, at.shape(carrier))
    if ids is None:
        raise BlockedError(f"an operand of {at.op.type} has one value for several channels")
    return {carrier: ids}


def _other(at: KnownTensor, ids: Ids | None) -> Maps:
    """Return the map of the result, or where that is known, of the first input."""
    if ids is None:
        at.lost()
    return {at.made if at.forward else at.fed: ids}


def _unary(at: KnownTensor) -> Maps:
    return _other(at, at.ids)


def _clip(at: KnownTensor) -> Maps:
    bounds = (*at.op.inputs[1:], None, None)[:2]
    low, high = (
        end if bound is None else at.graph.scalar(bound) for bound, end in zip(bounds, (-np.inf, np.inf), strict=True)
    )
    if low in (0.0, -np.inf) and high is not None and high >= np.finfo(np.float32).max:
        return _unary(at)
    shown = "6" if high == 6 else "what is stored"
    raise BlockedError(
        f"a Clip at {shown} would cut at another value in each channel (relu6='relu' takes a ReLU6 away)"
    )


def _pads(at: KnownTensor) -> Maps:
    mode = at.op.attributes.get("mode", "constant")
    value = at.op.inputs[2] if len(at.op.inputs) > 2 else None
    if mode in ("constant", b"constant") and value is not None and at.graph.scalar(value) != 0:
        raise BlockedError("it is padded with another value than 0")
    return _spatial(at)


def _spatial(at: KnownTensor) -> Maps:
    """Pass an op that mixes elements along axes without channels, and keeps the rank."""
    before, after = at.shape(at.fed), at.shape(at.made)
    changed = [i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b or i >= 2]
    if len(before) != len(after) or any(varies(at.ids, i) for i in changed):
        at.lost()
    return _unary(at)


def _reduces(at: KnownTensor) -> Maps:
    rank, axes = len(at.shape(at.fed)), at.op.attributes.get("axes")
    if axes is None and len(at.op.inputs) > 1 and at.op.inputs[1] is not None:
        value = at.graph.value(at.op.inputs[1])
        if value is None:
            at.lost()
        axes = value.reshape(-1).tolist()
    gone = sorted(axis % rank for axis in (axes or range(rank)))
    if not axes and at.op.attributes.get("noop_with_empty_axes", 0):
        gone = []
    if at.forward and any(varies(at.ids, axis) for axis in gone):
        raise BlockedError(f"{at.op.type} mixes its channels")
    if at.op.attributes.get("keepdims", 1):
        return _unary(at)
    if at.forward:
        return _other(at, at.ids.reshape([n for i, n in enumerate(at.ids.shape) if i not in gone]))
    return _other(at, np.expand_dims(at.ids, tuple(gone)))


def _reshapes(at: KnownTensor) -> Maps:
    source, target = (at.fed, at.made) if at.forward else (at.made, at.fed)
    return _other(at, reshape(at.ids, at.shape(source), at.shape(target)))


def _transposes(at: KnownTensor) -> Maps:
    order = list(at.op.attributes.get("perm") or reversed(range(at.ids.ndim)))
    return _other(at, at.ids.transpose(order if at.forward else np.argsort(order)))


def _expands(at: KnownTensor) -> Maps:
    if at.forward:
        return _other(at, broadcast_on(at.ids, len(at.shape(at.made))))
    return _other(at, broadcast_back(at.ids, at.shape(at.fed)))


def _gathers(at: KnownTensor) -> Maps:
    """Pass a selection along an axis on which the channel does not depend."""
    where = at.op.inputs[1]
    rank = 0 if where is None else len(at.shape(where))
    axis = at.op.attributes.get("axis", 0) % len(at.shape(at.fed))
    before, after = (1, rank) if at.forward else (rank, 1)
    if any(size != 1 for size in at.ids.shape[axis : axis + before]):
        at.lost()
    return _other(at, at.ids.reshape((*at.ids.shape[:axis], *[1] * after, *at.ids.shape[axis + before :])))


def _joins(at: KnownTensor) -> Maps:
    """Pass a Concat or a Split: a whole and its parts."""
    joined = at.op.type == "Concat"
    whole_tensor = at.made if joined else at.fed
    parts = [tensor for tensor in (at.op.inputs if joined else at.op.outputs) if tensor is not None]
    rank, from_part = at.ids.ndim, at.tensor != whole_tensor
    axis = at.op.attributes.get("axis", 0) % rank
    # a part of size 1 along the axis may be one of several channels that lie along it
    one_of_several = from_part and at.new is not None and at.shape(at.tensor)[axis] == 1
    if not varies(at.ids, axis) and not one_of_several:
        return dict.fromkeys([whole_tensor, *parts], at.ids)
    sizes = [at.shape(part)[axis] if len(at.shape(part)) == rank else None for part in parts]
    known = [size for size in sizes if isinstance(size, int)]
    if len(known) < len(sizes):
        at.lost()
    whole = at.ids
    if from_part:
        shapes = [(*whole.shape[:axis], size, *whole.shape[axis + 1 :]) for size in known]
        pieces = [at.ids if t == at.tensor else at.others(shape) for t, shape in zip(parts, shapes, strict=True)]
        whole = np.concatenate(pieces, axis)
    ends = np.cumsum([0, *known])
    cut = {part: whole.take(range(a, b), axis) for part, a, b in zip(parts, ends, ends[1:], strict=False)}
    return {whole_tensor: whole, **cut}


def _slices(at: KnownTensor) -> Maps:
    """Pass a Slice with stored bounds; the elements that it drops get ids of their own."""
    values = [at.graph.value(tensor) for tensor in at.op.inputs[1:]]
    if len(values) < 2 or any(value is None for value in values):
        at.lost()
    starts, ends, *rest = ([int(n) for n in value.reshape(-1)] for value in values if value is not None)
    axes = rest[0] if rest else list(range(len(starts)))
    steps = rest[1] if len(rest) > 1 else [1] * len(starts)
    shape = at.shape(at.fed)
    taken = [slice(None)] * len(shape)
    whole = list(at.ids.shape)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = shape[axis]
        if not varies(at.ids, axis) and (at.forward or at.shape(at.tensor)[axis] != 1):
            continue
        if not isinstance(size, int):
            at.lost()
        whole[axis] = size
        taken[axis] = slice(start, None if step < 0 and end < -size else end, step)
    if at.forward:
        return _other(at, at.ids[tuple(taken)])
    ids = at.others(tuple(whole))
    if ids[tuple(taken)].shape != at.ids.shape:
        at.lost()
    ids[tuple(taken)] = at.ids
    return _other(at, ids)


def _adds(at: KnownTensor) -> Maps:
    """Pass a sum: all operands and the result have the same map."""
    whole = broadcast_on(at.ids, len(at.shape(at.made))) if at.forward else at.ids
    result = {at.made: whole}
    for tensor in at.op.inputs:
        if tensor is None or tensor == at.tensor:
            continue
        ids = broadcast_back(whole, at.shape(tensor))
        if ids is None:
            raise BlockedError(f"an operand of {at.op.type} has one value for several channels")
        result[tensor] = ids
    return result


def _contracts(at: KnownTensor) -> Maps:
    """Pass a product of two computed matrices [..., m, k] and [..., k, n].

    Where the channels are what is summed over, the other operand has the same channels: it takes the inverse.
    """
    left, right = at.op.inputs[:2]
    assert left is not None
    assert right is not None
    ids, ranks = at.ids, {len(at.shape(tensor)) for tensor in (left, right, at.made)}
    if left == right or len(ranks) > 1 or ranks == {1}:
        at.lost()
    if at.tensor == at.made:
        if varies(ids, -1) == varies(ids, -2):
            raise BlockedError("the channels of a product of two tensors are not those of one of them")
        other, back = (right if varies(ids, -1) else left), ids
    else:
        inner = -1 if at.tensor == left else -2
        if not varies(ids, inner):
            return {at.made: ids}
        if varies(ids, -3 - inner):
            at.lost()
        other, back = (right if at.tensor == left else left), ids.swapaxes(-1, -2)
    own = broadcast_back(back, at.shape(other))
    if own is None:
        at.lost()
    return {other: own}


_RELATIONS: Mapping[str, Callable[[KnownTensor], Maps]] = MappingProxyType(
    dict.fromkeys(("Relu", "LeakyRelu", "PRelu", "Identity", "Dropout", "Neg", "Abs", "Cast"), _unary)
    | dict.fromkeys(("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "LpPool", "Resize"), _spatial)
    | dict.fromkeys(("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin"), _reduces)
    | dict.fromkeys(RESHAPES, _reshapes)
    | dict.fromkeys(("Add", "Sub", "Sum", "Max", "Min", "Mean"), _adds)
    | dict.fromkeys(("Mul", "Div"), lambda at: past_product(at, at.fed))
    | dict.fromkeys(("Concat", "Split"), _joins)
    | {"Clip": _clip, "Pad": _pads, "Transpose": _transposes, "Expand": _expands, "Gather": _gathers}
    | {"Slice": _slices, "MatMul": _contracts}
)
