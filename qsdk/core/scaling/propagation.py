"""Propagation of factors through ops without stored tensors: `op(x / s) = op(x) / s`, in both directions.

Every relation here is exact for positive factors. An op that is not listed blocks the region.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from qsdk.core.graph.graph import Graph, Op
from qsdk.core.graph.op_facts import RESHAPES
from qsdk.core.scaling.channels import Ids, broadcast_back, broadcast_on, reshape, varies, vector

NewIds = Callable[[tuple[int, ...]], Ids]


@dataclass(frozen=True)
class KnownTensor:
    """A tensor of an op whose channels are known, as the relations of the op take it.

    Attributes:
        graph: of the model.
        op: the op.
        tensor: the one whose channels are known.
        ids: its map.
        new: returns ids for new channels.
    """

    graph: Graph
    op: Op
    tensor: int
    ids: Ids
    new: NewIds

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

    def shape(self, tensor: int) -> tuple[int | str | None, ...]:
        """Return the shape of a tensor; an unknown rank counts as none."""
        return self.graph.tensors[tensor].shape or ()


@dataclass(frozen=True)
class Propagation:
    """The tensors that factors are propagated to.

    Attributes:
        tensors: tensor -> its map.
        inverse: of these tensors, the ones with the inverse factor.
        blocked: why propagation is impossible, or "".
    """

    tensors: Mapping[int, Ids] = field(default_factory=dict)
    inverse: frozenset[int] = frozenset()
    blocked: str = ""


def blocked(reason: str) -> Propagation:
    """Return the result that propagation is impossible, with the reason."""
    return Propagation(blocked=reason)


def propagate(at: KnownTensor) -> Propagation:
    """Return the tensors of an op that have the factors of one of its tensors."""
    relation = _RELATIONS.get(at.op.type) if at.op.domain in ("", "ai.onnx") else None
    if relation is None:
        return blocked(f"{at.op.type} does not commute with a scaling of its channels")
    return relation(at)


def _other(at: KnownTensor, ids: Ids | None) -> Propagation:
    if ids is None:
        return blocked(f"the channels cannot be followed through {at.op.type} {at.op.name}".rstrip())
    return Propagation({at.made if at.forward else at.fed: ids})


def _unary(at: KnownTensor) -> Propagation:
    return _other(at, at.ids)


def _clip(at: KnownTensor) -> Propagation:
    bounds = [at.graph.scalar(bound) if bound is not None else None for bound in (*at.op.inputs[1:], None, None)[:2]]
    named = [bound is not None for bound in (*at.op.inputs[1:], None, None)[:2]]
    low = bounds[0] if named[0] else -np.inf
    high = bounds[1] if named[1] else np.inf
    if low in (0.0, -np.inf) and high is not None and high >= np.finfo(np.float32).max:
        return _unary(at)
    shown = "6" if high == 6 else "what is stored"
    return blocked(f"a Clip at {shown} would cut at another value in each channel (relu6='relu' takes a ReLU6 away)")


def _pads(at: KnownTensor) -> Propagation:
    mode = at.op.attributes.get("mode", "constant")
    mode = mode.decode() if isinstance(mode, bytes) else mode
    value = at.op.inputs[2] if len(at.op.inputs) > 2 else None
    if mode == "constant" and value is not None and at.graph.scalar(value) != 0:
        return blocked("it is padded with another value than 0")
    return _spatial(at)


def _spatial(at: KnownTensor) -> Propagation:
    """Propagate through an op that mixes elements along axes without channels, and keeps the rank."""
    before, after = at.shape(at.fed), at.shape(at.made)
    changed = [i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b or i >= 2]
    if len(before) != len(after) or any(varies(at.ids, i) for i in changed):
        return _other(at, None)
    return _unary(at)


def _reduces(at: KnownTensor) -> Propagation:
    rank = len(at.shape(at.fed))
    axes = at.op.attributes.get("axes")
    if axes is None and len(at.op.inputs) > 1 and at.op.inputs[1] is not None:
        value = at.graph.value(at.op.inputs[1])
        axes = None if value is None else value.reshape(-1).tolist()
        if axes is None:
            return _other(at, None)
    gone = sorted(axis % rank for axis in (axes or range(rank)))
    if not axes and at.op.attributes.get("noop_with_empty_axes", 0):
        gone = []
    kept = bool(at.op.attributes.get("keepdims", 1))
    return _removing(at, gone, kept=kept)


def _removing(at: KnownTensor, gone: list[int], *, kept: bool) -> Propagation:
    """Propagate through an op that reduces or drops axes, on which the channel must not depend."""
    ids = at.ids
    if at.forward:
        if any(varies(ids, axis) for axis in gone):
            return blocked(f"{at.op.type} mixes its channels")
        return _other(at, ids if kept else ids.reshape([n for i, n in enumerate(ids.shape) if i not in gone]))
    if kept:
        return _other(at, ids)
    return _other(at, np.expand_dims(ids, tuple(gone)))


def _reshapes(at: KnownTensor) -> Propagation:
    source, target = (at.fed, at.made) if at.forward else (at.made, at.fed)
    return _other(at, reshape(at.ids, at.shape(source), at.shape(target)))


def _transposes(at: KnownTensor) -> Propagation:
    order = list(at.op.attributes.get("perm") or reversed(range(at.ids.ndim)))
    return _other(at, at.ids.transpose(order if at.forward else np.argsort(order)))


def _expands(at: KnownTensor) -> Propagation:
    if at.forward:
        return _other(at, broadcast_on(at.ids, len(at.shape(at.made))))
    return _other(at, broadcast_back(at.ids, at.shape(at.fed)))


def _gathers(at: KnownTensor) -> Propagation:
    """Propagate through a selection along an axis on which the channel does not depend."""
    where = at.op.inputs[1]
    rank = 0 if where is None else len(at.shape(where))
    axis = at.op.attributes.get("axis", 0) % len(at.shape(at.fed))
    if not at.forward:
        held = at.ids.shape[axis : axis + rank]
        if any(n != 1 for n in held):
            return _other(at, None)
        return _other(at, at.ids.reshape((*at.ids.shape[:axis], 1, *at.ids.shape[axis + rank :])))
    if varies(at.ids, axis):
        return _other(at, None)
    return _other(at, at.ids.reshape((*at.ids.shape[:axis], *[1] * rank, *at.ids.shape[axis + 1 :])))


def _concatenates(at: KnownTensor) -> Propagation:
    inputs = [tensor for tensor in at.op.inputs if tensor is not None]
    rank = at.ids.ndim
    axis = at.op.attributes.get("axis", 0) % rank
    sizes = [at.shape(tensor)[axis] if len(at.shape(tensor)) == rank else None for tensor in inputs]
    if at.forward and not varies(at.ids, axis) and at.shape(at.tensor)[axis] != 1:
        return Propagation(dict.fromkeys([*inputs, at.made], at.ids))
    known = [size for size in sizes if isinstance(size, int)]
    if len(known) < len(sizes):
        return _other(at, None)
    whole = at.ids
    if at.forward:
        shape = [(*at.ids.shape[:axis], size, *at.ids.shape[axis + 1 :]) for size in known]
        parts = [at.ids if t == at.tensor else at.new(s) for t, s in zip(inputs, shape, strict=True)]
        whole = np.concatenate(parts, axis)
    if not varies(whole, axis):
        return Propagation(dict.fromkeys([*inputs, at.made], whole))
    ends = np.cumsum([0, *known])
    cut = {t: whole.take(range(a, b), axis) for t, a, b in zip(inputs, ends, ends[1:], strict=False)}
    return Propagation({at.made: whole, **cut})


def _splits(at: KnownTensor) -> Propagation:
    axis = at.op.attributes.get("axis", 0) % at.ids.ndim
    outputs = list(at.op.outputs)
    whole = at.ids
    if not varies(whole, axis) and (at.forward or at.shape(at.tensor)[axis] != 1):
        return Propagation(dict.fromkeys([at.fed, *outputs], whole))
    sizes = [at.shape(tensor)[axis] for tensor in outputs]
    known = [size for size in sizes if isinstance(size, int)]
    if len(known) < len(sizes):
        return _other(at, None)
    if not at.forward:
        shape = [(*whole.shape[:axis], size, *whole.shape[axis + 1 :]) for size in known]
        parts = [at.ids if t == at.tensor else at.new(s) for t, s in zip(outputs, shape, strict=True)]
        whole = np.concatenate(parts, axis)
    ends = np.cumsum([0, *known])
    cut = {t: whole.take(range(a, b), axis) for t, a, b in zip(outputs, ends, ends[1:], strict=False)}
    return Propagation({at.fed: whole, **cut})


def _slices(at: KnownTensor) -> Propagation:
    """Propagate through a Slice with stored bounds; the elements that it drops get new channels."""
    values = [at.graph.value(tensor) for tensor in at.op.inputs[1:]]
    if len(values) < 2 or any(value is None for value in values):
        return _other(at, None)
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
            return _other(at, None)
        whole[axis] = size
        last = None if step < 0 and end < -size else end
        taken[axis] = slice(start, last, step)
    if at.forward:
        return _other(at, at.ids[tuple(taken)])
    ids = at.new(tuple(whole))
    if ids[tuple(taken)].shape != at.ids.shape:
        return _other(at, None)
    ids[tuple(taken)] = at.ids
    return _other(at, ids)


def _adds(at: KnownTensor) -> Propagation:
    """Propagate through a sum: all operands and the result have the same factors."""
    rank = len(at.shape(at.made))
    whole = at.ids if not at.forward else broadcast_on(at.ids, rank)
    result = {at.made: whole}
    for tensor in at.op.inputs:
        if tensor is None or tensor == at.tensor:
            continue
        ids = broadcast_back(whole, at.shape(tensor))
        if ids is None:
            return blocked(f"an operand of {at.op.type} has one value for several channels")
        result[tensor] = ids
    return Propagation(result)


def _multiplies(at: KnownTensor, other: int | None = None) -> Propagation:
    """Propagate through a product: the result has the factors of one operand, and the other is not scaled."""
    if at.forward:
        if list(at.op.inputs).count(at.tensor) > 1:
            return blocked(f"{at.op.type} reads it twice")
        if at.op.type == "Div" and at.tensor != at.fed:
            return blocked("it divides another tensor")
        return Propagation({at.made: broadcast_on(at.ids, len(at.shape(at.made)))})
    carrier = at.fed if other is None else other
    ids = broadcast_back(at.ids, at.shape(carrier))
    return (
        blocked(f"an operand of {at.op.type} has one value for several channels")
        if ids is None
        else Propagation({carrier: ids})
    )


def _contracts(at: KnownTensor) -> Propagation:
    """Propagate through a product of two computed matrices [..., m, k] and [..., k, n]."""
    left, right = at.op.inputs[:2]
    assert left is not None
    assert right is not None
    ranks = {len(at.shape(tensor)) for tensor in (left, right, at.made)}
    if left == right or len(ranks) > 1 or ranks == {1}:
        return _other(at, None)
    ids = at.ids
    if at.tensor == at.made:
        if varies(ids, -1) == varies(ids, -2):
            return blocked("the channels of a product of two tensors are not those of one of them")
        source = right if varies(ids, -1) else left
        back = broadcast_back(ids, at.shape(source))
        return _other(at, None) if back is None else Propagation({source: back})
    inner = -1 if at.tensor == left else -2
    if not varies(ids, inner):
        return Propagation({at.made: ids})
    if varies(ids, -3 - inner):
        return _other(at, None)
    partner = right if at.tensor == left else left
    turned = broadcast_back(ids.swapaxes(-1, -2), at.shape(partner))
    return _other(at, None) if turned is None else Propagation({partner: turned}, frozenset({partner}))


def operands_that_may_carry(graph: Graph, op: Op) -> list[int]:
    """Return the operands of a product that could have its factors, where there is a choice."""
    computed = [t for t in op.inputs if t is not None and graph.constant_root(t) is None]
    return computed if op.type == "Mul" else computed[:1]


def propagate_to_operand(at: KnownTensor, operand: int) -> Propagation:
    """Return the same as `propagate`, for a product whose factors one chosen operand is to have."""
    return _multiplies(at, operand)


def channels_along(ids: Ids, axis: int) -> Ids | None:
    """Return the channels of a tensor along the axis that a layer multiplies; None if they vary along others too."""
    return vector(ids, axis) if varies(ids, axis) else None


_RELATIONS: Mapping[str, Callable[[KnownTensor], Propagation]] = MappingProxyType(
    dict.fromkeys(("Relu", "LeakyRelu", "PRelu", "Identity", "Dropout", "Neg", "Abs", "Cast"), _unary)
    | dict.fromkeys(("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "LpPool", "Resize"), _spatial)
    | dict.fromkeys(("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin"), _reduces)
    | dict.fromkeys(RESHAPES, _reshapes)
    | dict.fromkeys(("Add", "Sub", "Sum", "Max", "Min", "Mean"), _adds)
    | dict.fromkeys(("Mul", "Div"), _multiplies)
    | {"Clip": _clip, "Pad": _pads, "Transpose": _transposes, "Expand": _expands, "Gather": _gathers}
    | {"Concat": _concatenates, "Split": _splits, "Slice": _slices, "MatMul": _contracts}
)
