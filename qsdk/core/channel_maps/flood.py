"""The flood behind equalization, SmoothQuant, AWQ and rotations: the tensors that one map of channels reaches.

From a tensor, a map is followed both ways through every op that commutes with it: `op(x / s) = op(x) / s` for positive
factors per channel, `op(x Q) = op(x) Q` for a rotation. Layers and norms end it or take it up, as the kind of map says:
`scale_groups` for factors, `rotation_groups` for rotations. Every relation here is exact.

The map of a tensor is an int64 array of the same rank that broadcasts to its shape: the id of the channel of the group
at each element, with size 1 along every axis on which the channel does not depend. In the map of a rotation, -1 is an
element that stays as it is.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from qsdk.core.graph.graph import Graph, Op
from qsdk.core.graph.op_facts import LINEAR, RESHAPES, SHAPE_OPS

# --- maps -------------------------------------------------------------------------------------------------------------


Ids = npt.NDArray[np.int64]
Shape = Sequence[int | str | None]


def along(ids: npt.NDArray[np.int64], axis: int, rank: int) -> Ids:
    """Return the map of a tensor whose channels lie along one axis."""
    return ids.reshape([-1 if i == axis % rank else 1 for i in range(rank)])


def varies(ids: Ids, axis: int) -> bool:
    """Return whether the channel depends on an axis."""
    return bool(ids.shape[axis] != 1)


def channel_axis(ids: Ids) -> int | None:
    """Return the one axis along which the channel varies; None if there is none, or several."""
    axes = [axis for axis in range(ids.ndim) if varies(ids, axis)]
    return axes[0] if len(axes) == 1 else None


def channels_along(ids: Ids, axis: int) -> Ids | None:
    """Return the channels along an axis, [n]; None where they vary along others too, or not along this one."""
    return ids.reshape(-1) if channel_axis(ids) == axis % ids.ndim else None


def reshape(ids: Ids, before: Shape, after: Shape) -> Ids | None:
    """Return the map behind a Reshape, or None where the shapes do not determine it."""
    parts = _align(before, after)
    if parts is None:
        return None
    spread = list(ids.shape)
    target: list[int] = []
    for old, new in parts:
        if all(ids.shape[i] == 1 for i in old):
            target += [1] * len(new)
            continue
        sizes = [before[i] for i in old] + [after[j] for j in new]
        if not all(isinstance(size, int) for size in sizes) or _volume(sizes[: len(old)]) != _volume(sizes[len(old) :]):
            return None
        for i in old:
            spread[i] = int(before[i] or 0)
        target += [int(after[j] or 0) for j in new]
    return _compact(np.broadcast_to(ids, spread).reshape(target))


def broadcast_back(ids: Ids, shape: Shape) -> Ids | None:
    """Return the map of an operand of this shape whose elementwise result has the map `ids`; None if too small."""
    cut = ids.reshape(ids.shape[ids.ndim - len(shape) :]) if _leading_ones(ids, ids.ndim - len(shape)) else None
    if cut is None or any(size == 1 and varies(cut, axis) for axis, size in enumerate(shape)):
        return None
    return cut


def broadcast_on(ids: Ids, rank: int) -> Ids:
    """Return the map of an elementwise result of this rank, one operand of which has the map `ids`."""
    return ids.reshape((1,) * (rank - ids.ndim) + ids.shape)


def _leading_ones(ids: Ids, count: int) -> bool:
    return count >= 0 and all(size == 1 for size in ids.shape[:count])


def _compact(ids: Ids) -> Ids:
    """Return the same map with size 1 along every axis on which it does not depend."""
    for axis, size in enumerate(ids.shape):
        first = ids.take([0], axis)
        if size > 1 and bool((ids == first).all()):
            ids = first
    return ids


def _align(before: Shape, after: Shape) -> list[tuple[list[int], list[int]]] | None:
    """Return the smallest runs of axes, from the left and from the right, that hold the same elements."""
    left, old, new = _runs(before, after)
    right, old_end, new_end = _runs(before[old:][::-1], after[new:][::-1])
    last_old, last_new = len(before) - old_end, len(after) - new_end
    middle = [(list(range(old, last_old)), list(range(new, last_new)))] if old < last_old or new < last_new else []
    tail = [([len(before) - 1 - i for i in a][::-1], [len(after) - 1 - j for j in b][::-1]) for a, b in reversed(right)]
    return left + middle + tail


def _runs(before: Shape, after: Shape) -> tuple[list[tuple[list[int], list[int]]], int, int]:
    """Return the runs from the left where the sizes certainly agree, and where they end on either side."""
    result: list[tuple[list[int], list[int]]] = []
    i = j = first = second = 0
    while i < len(before) or j < len(after):
        a, b = _volume(before[first:i]), _volume(after[second:j])
        if (i, j) != (first, second) and a is not None and a == b:
            result.append((list(range(first, i)), list(range(second, j))))
            first, second = i, j
            continue
        if None in (a, b):
            break
        if j < len(after) and (i == len(before) or (i > first and _smaller(b, a))):
            j += 1
        elif i < len(before):
            i += 1
            if j < len(after) and j == second:
                j += 1
        else:
            break
    if (i, j) != (first, second):
        a, b = _volume(before[first:i]), _volume(after[second:j])
        if a is not None and a == b:
            result.append((list(range(first, i)), list(range(second, j))))
            first, second = i, j
    return result, first, second


def _volume(sizes: Shape) -> tuple[int, tuple[str, ...]] | None:
    """Return the product of sizes: a number and the names in it; None where a size is unknown."""
    if any(size is None for size in sizes):
        return None
    names = tuple(sorted(size for size in sizes if isinstance(size, str)))
    return prod(size for size in sizes if isinstance(size, int)), names


def _smaller(b: tuple[int, tuple[str, ...]] | None, a: tuple[int, tuple[str, ...]] | None) -> bool:
    return a is not None and b is not None and (len(b[1]), b[0]) < (len(a[1]), a[0])


# --- the flood --------------------------------------------------------------------------------------------------------


#: tensor id -> its map
Maps = dict[int, Ids]
STANDARD = ("", "ai.onnx")


class BlockedError(Exception):
    """Why a map cannot go on at an op."""


class Flood(ABC):
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

    @abstractmethod
    def visit(self, tensor: int, op_id: int, *, upward: bool) -> None:
        """Continue at the op that computes a tensor (`upward`), or at one that reads it; raise `BlockedError`."""

    @abstractmethod
    def enter(self, tensor: int) -> None:
        """Note that the map reaches a tensor that no op computes."""

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
