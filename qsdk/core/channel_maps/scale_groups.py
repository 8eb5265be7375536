"""Scale groups: activations that can be divided by factors per channel without changing the result of the model.

From the input of a layer the factors are followed both ways: up to the ops whose stored tensors are divided (a layer, a
norm), down to the layers whose weights are multiplied, through all ops between that commute with the factors. A group
is scaled as a whole or not at all.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import numpy as np

from qsdk.core.channel_maps.flood import (
    STANDARD,
    BlockedError,
    Flood,
    Ids,
    KnownTensor,
    Maps,
    along,
    at_root,
    broadcast_back,
    channels_along,
    input_axis,
    is_linear,
    past_addend,
    past_product,
    propagate,
    stored_operand,
)
from qsdk.core.graph.graph import Graph
from qsdk.core.planning.operands import StoredOperand, operands_of
from qsdk.core.site import owner_of

_TRIES = 16  # of the operands of products
#: norms -> the inputs that hold gamma and beta, and the axis of their channels in the output
_NORMS: Mapping[str, tuple[tuple[int, ...], int]] = MappingProxyType(
    {"LayerNormalization": ((1, 2), -1), "RMSNormalization": ((1,), -1)}
    | dict.fromkeys(("BatchNormalization", "InstanceNormalization", "GroupNormalization"), ((1, 2), 1))
)
_GAMMA, _MEAN = 1, 3  # inputs of BatchNormalization
_NOT_ALONG = "the channels of {} are not those of the factors"


@dataclass(frozen=True)
class ScaledTensor:
    """A tensor of a group.

    Attributes:
        ids: its map.
        power: -1 where it is divided by the factors, +1 where it is multiplied (the other operand of a product).
    """

    ids: Ids
    power: int


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
    """An op at the end of a group.

    Attributes:
        op: its id.
        edits: of its stored tensors.
        reads: the tensor of the group that it reads; None for an op that computes one.
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


@dataclass(frozen=True)
class ScaleGroup:
    """Tensors with common factors.

    Attributes:
        channels: number of factors.
        members: tensor id -> how it is scaled.
        ends: the ops whose stored tensors change, in the order of the graph.
        between: edits of stored tensors that are added inside the group.
        blocked: why it cannot be scaled, or "".
        seed: the tensor that the search started from.
    """

    channels: int
    members: Mapping[int, ScaledTensor]
    ends: Sequence[End] = ()
    between: Sequence[Edit] = ()
    blocked: str = ""
    seed: int = 0

    @property
    def edits(self) -> list[Edit]:
        """Return all edits, those of the ends and those inside."""
        return [*(edit for end in self.ends for edit in end.edits), *self.between]

    @property
    def consumers(self) -> list[End]:
        """Return the layers and norms that read a tensor of the group."""
        return [end for end in self.ends if end.reads is not None]

    @property
    def producers(self) -> list[End]:
        """Return the layers and norms that compute a tensor of the group."""
        return [end for end in self.ends if end.reads is None]

    def label(self, graph: Graph) -> str:
        """Return a name made of its ends: `norm -> query, key, value`."""
        makers, readers = ([end.owner(graph) for end in ends] for ends in (self.producers, self.consumers))
        if not readers:
            return " x ".join(dict.fromkeys(makers))
        return f"{', '.join(dict.fromkeys(makers))} -> {', '.join(dict.fromkeys(readers))}"


@dataclass(frozen=True)
class _Seed:
    """A tensor that a group may grow from, and the axes that its channels may lie along, the best way first."""

    tensor: int
    ways: tuple[tuple[int, ...], ...]
    of_layer: bool


def find_scale_groups(graph: Graph) -> list[ScaleGroup]:
    """Return the groups around the inputs of layers, and around left operands of products of computed tensors.

    BlockedError groups of layers are included, with the reason.
    """
    result: list[ScaleGroup] = []
    seen: set[int] = set()
    for seed in _seeds(graph):
        if seed.tensor in seen:
            continue
        group = replace(_group(graph, seed), seed=seed.tensor)
        if not group.blocked or seed.of_layer:
            result.append(group)
        seen |= {seed.tensor} if group.blocked else set(group.members)
    return result


def _seeds(graph: Graph) -> Iterator[_Seed]:
    for index, op in enumerate(graph.ops):
        computed = [t for t in op.inputs[:2] if t is not None and graph.origin(t) is None]
        if is_linear(graph, index) and computed:  # not of a stored tensor
            yield _Seed(computed[0], ((input_axis(graph, index),),), True)
        elif op.type == "MatMul" and len(computed) == 2:
            # of two products with heads, [batch, heads, rows, width], each head has channels of its own
            heads = ((1, -1),) if len(graph.tensors[computed[0]].shape or ()) == 4 else ()
            yield _Seed(computed[0], (*heads, (-1,)), False)


def _group(graph: Graph, seed: _Seed) -> ScaleGroup:
    """Return the group that grows from a seed; if its first way is blocked, another operand of a product is tried."""
    pending: list[tuple[tuple[int, ...], dict[int, int]]] = [(axes, {}) for axes in seed.ways]
    blocked = None
    for _ in range(_TRIES):
        if not pending:
            break
        axes, carriers = pending.pop(0)
        flood = _ScaleFlood(graph, carriers)
        group = flood.grow(seed.tensor, axes)
        if not group.blocked:
            return group
        blocked = blocked or group
        for op, operands in flood.choices.items():
            if op not in carriers:
                pending.extend((axes, {**carriers, op: other}) for other in operands[1:])
    assert blocked is not None
    return blocked


class _ScaleFlood(Flood):
    """A scale group while it is searched; `carriers` are the operands that have the factors of a product."""

    def __init__(self, graph: Graph, carriers: Mapping[int, int]) -> None:
        super().__init__(graph)
        self.carriers = carriers
        self.choices: dict[int, list[int]] = {}  # products whose carrier could be another one
        self.members: dict[int, ScaledTensor] = {}
        self.ends: dict[tuple[int, int], End] = {}
        self.between: dict[int, Edit] = {}
        self.same: list[int] = []  # union-find over ids

    def grow(self, seed: int, axes: Sequence[int]) -> ScaleGroup:
        """Return the group that grows from a tensor, whose channels lie along these axes."""
        shape = self.graph.tensors[seed].shape or ()
        lying = {axis % len(shape) for axis in axes if -len(shape) <= axis < len(shape)}
        sizes = [size if axis in lying else 1 for axis, size in enumerate(shape)]
        known = tuple(size for size in sizes if isinstance(size, int))
        if len(lying) < len(axes) or len(known) < len(shape):
            return ScaleGroup(0, {}, blocked="how many channels it has is unknown")
        self.join(seed, self.new(known), -1)
        self.run(past_obstacles=False)
        if self.reason:
            return ScaleGroup(0, self.members, tuple(self.ends.values()), blocked=self.reason)
        return self.numbered()

    def new(self, shape: tuple[int, ...]) -> Ids:
        """Return ids that no tensor has yet, in an array of this shape."""
        count = int(np.prod(shape))
        start = len(self.same)
        self.same.extend(range(start, start + count))
        return np.arange(start, start + count, dtype=np.int64).reshape(shape)

    def join(self, tensor: int, ids: Ids, power: int) -> None:
        """Add a tensor to the group."""
        facts = self.graph.tensors[tensor]
        shape = facts.shape
        if not facts.is_float or shape is None or len(shape) != ids.ndim:
            self.block("the type or the rank of a tensor in between is not known")
        elif any(n not in (1, size) for n, size in zip(ids.shape, shape, strict=True)):
            self.block("the channels of a tensor in between cannot be told")
        elif tensor in self.graph.output_set:
            self.block("it leaves the model")
        elif tensor not in self.members:
            self.members[tensor] = ScaledTensor(ids, power)
            self.queue.append(tensor)
        elif self.members[tensor].power != power:
            self.block("it meets its own inverse")
        else:
            self.unite(self.members[tensor].ids, ids)

    def unite(self, one: Ids, other: Ids) -> None:
        """Make the ids of two arrays, broadcast against each other, the same channels."""
        a, b = np.broadcast_arrays(one, other)
        for i, j in {(int(i), int(j)) for i, j in zip(a.ravel(), b.ravel(), strict=True) if i != j}:
            first, second = self.smallest(i), self.smallest(j)
            self.same[max(first, second)] = min(first, second)

    def smallest(self, i: int) -> int:
        """Return the smallest id of the same channel."""
        while self.same[i] != i:
            self.same[i] = self.same[self.same[i]]
            i = self.same[i]
        return i

    def enter(self, tensor: int) -> None:
        """Block: no op divides a tensor that no op computes."""
        self.block("it is an input of the model" if tensor in self.graph.inputs else "it is stored as it is")

    def visit(self, tensor: int, op_id: int, *, upward: bool) -> None:
        """End at an op whose stored tensors take the factors, or continue through it."""
        member = self.members[tensor]
        end = (_maker if upward else _reader)(self.graph, op_id, tensor, member)
        if end is not None:
            self.ends[op_id, tensor] = end
            return
        op, constant = self.graph.ops[op_id], stored_operand(self.graph, op_id)
        at = KnownTensor(self.graph, op, tensor, member.ids, self.new)
        if constant is not None:
            maps = _past_stored(at, constant)
        elif upward and op.type == "Mul":
            operands = [t for t in op.inputs if t is not None and self.graph.constant_root(t) is None]
            self.choices.setdefault(op_id, operands)
            maps = past_product(at, self.carriers.get(op_id, operands[0]))
        else:
            maps = propagate(at)
        for other, ids in maps.items():
            if other == constant:
                self.between[op_id] = _vector(self.graph, other, ids, member.power)
                continue
            inverse = op.type == "MatMul" and {tensor, other} <= set(op.inputs)  # (x / s) @ (s y) = x @ y
            self.join(other, ids, -member.power if inverse else member.power)

    def numbered(self) -> ScaleGroup:
        """Return the group, with the channels numbered from 0 on."""
        roots = np.array([self.smallest(i) for i in range(len(self.same))], np.int64)
        used = np.unique(np.concatenate([roots[member.ids].ravel() for member in self.members.values()]))
        number = np.full(len(roots), -1, np.int64)
        number[used] = np.arange(used.size)
        numbers = number[roots]
        members = {t: ScaledTensor(numbers[member.ids], member.power) for t, member in self.members.items()}
        ends = tuple(
            replace(end, edits=tuple(replace(edit, ids=numbers[edit.ids]) for edit in end.edits))
            for _, end in sorted(self.ends.items())
        )
        between = tuple(replace(edit, ids=numbers[edit.ids]) for edit in self.between.values())
        return ScaleGroup(used.size, members, ends, between)


def _past_stored(at: KnownTensor, stored: int) -> Maps:
    """Return the maps of an elementwise op with one stored operand: a sum, or a product with a single number."""
    if at.op.type in ("Add", "Sub"):
        return past_addend(at, stored)
    data = next(t for t in at.op.inputs if t is not None and t != stored)
    if at.shape(stored) not in ((), (1,)) or (at.op.type == "Div" and data != at.fed):
        raise BlockedError(f"{at.op.type} by a stored tensor does not commute with a scaling of its channels")
    if len(at.shape(stored)) > len(at.shape(data)):
        raise BlockedError(f"{at.op.type} adds axes")
    return {at.made if at.forward else data: at.ids}


# --- the ends ---------------------------------------------------------------------------------------------------------


def _maker(graph: Graph, op_id: int, tensor: int, member: ScaledTensor) -> End | None:
    """Return the op that makes a tensor as an end, whose stored tensors are scaled like it; None without such."""
    op, ids, power = graph.ops[op_id], member.ids, member.power
    if is_linear(graph, op_id):
        channels = channels_along(ids, input_axis(graph, op_id))
        if channels is None or (op.type == "Gemm" and op.attributes.get("transA", 0)):
            raise BlockedError(_NOT_ALONG.format(op.type))
        weights = _weights(graph, op_id, channels, power, is_maker=True)
        biases = [
            _vector(graph, operand.tensor, along(channels, -1, 2), power)
            for operand in operands_of(graph, op_id)
            if operand.role != "weight"
        ]
        return End(op_id, (*weights, *biases), linear=True)
    if op.type in _NORMS and op.domain in STANDARD:
        places, axis = _NORMS[op.type]
        channels = channels_along(ids, axis)
        stored = [op.inputs[place] for place in places if len(op.inputs) > place]
        if channels is None or not stored or stored[0] is None:
            raise BlockedError(f"{op.type} has no parameter for each channel")
        own = along(channels, -1, 1)
        return End(op_id, tuple(_vector(graph, name, own, power) for name in stored if name is not None))
    if op.type == "Gather" and op.inputs[0] is not None and graph.constant_root(op.inputs[0]) is not None:
        channels, table = channels_along(ids, -1), op.inputs[0]
        rank = len(graph.tensors[table].shape or ())
        if channels is None or graph.constant_root(table) != table or rank != 2 or op.attributes.get("axis", 0) != 0:
            raise BlockedError(_NOT_ALONG.format("an embedding"))
        return End(op_id, (Edit(table, along(channels, 1, 2), power, "weight"),), linear=True)
    edit = _gain(graph, op_id, ids, power)
    return None if edit is None else End(op_id, (edit,))


def _reader(graph: Graph, op_id: int, tensor: int, member: ScaledTensor) -> End | None:
    """Return a reader of a tensor as an end, whose stored tensors are scaled inversely; None without such."""
    op, ids, power = graph.ops[op_id], member.ids, -member.power
    if is_linear(graph, op_id):
        channels = channels_along(ids, input_axis(graph, op_id))
        if channels is None or op.inputs[0] != tensor or op.attributes.get("transA", 0):
            raise BlockedError(f"{op.type} multiplies other channels than those of the factors")
        return End(op_id, _weights(graph, op_id, channels, power, is_maker=False), tensor, linear=True)
    if op.type == "BatchNormalization" and op.domain in STANDARD:
        channels = channels_along(ids, 1)
        gamma, mean = op.inputs[_GAMMA], op.inputs[_MEAN]
        if channels is None or op.inputs[0] != tensor or gamma is None or mean is None:
            raise BlockedError("BatchNormalization has other channels than those of the factors")
        return End(op_id, (_vector(graph, gamma, channels, power), _vector(graph, mean, channels, -power)), tensor)
    edit = _gain(graph, op_id, ids, power)
    return None if edit is None else End(op_id, (edit,), tensor)


def _gain(graph: Graph, op_id: int, ids: Ids, power: int) -> Edit | None:
    """Return the edit of a stored tensor with a number for each channel that an op multiplies by, or None."""
    stored = stored_operand(graph, op_id) if graph.ops[op_id].type == "Mul" else None
    if stored is None or broadcast_back(ids, graph.tensors[stored].shape or ()) is None:
        return None
    return _vector(graph, stored, ids, power)


def _weights(graph: Graph, op_id: int, channels: Ids, power: int, *, is_maker: bool) -> tuple[Edit, ...]:
    """Return the edits of the weights of a layer from the channels of its output (`is_maker`), or of its input."""
    edits = []
    for operand in operands_of(graph, op_id):
        if operand.role == "weight":
            ids = _weight_map(graph, op_id, operand, channels, is_maker=is_maker)
            if ids is None:
                raise BlockedError(_NOT_ALONG.format(graph.ops[op_id].type))
            edits.append(_exclusive(graph, operand.tensor, Edit(operand.root, ids, power, "weight")))
    return tuple(edits)


def _weight_map(graph: Graph, op_id: int, operand: StoredOperand, channels: Ids, *, is_maker: bool) -> Ids | None:
    shape = tuple(n for n in graph.tensors[operand.root].shape or () if isinstance(n, int))
    groups = graph.ops[op_id].attributes.get("group", 1)
    axis = operand.channel_axis if is_maker else operand.input_axis
    if axis is None or operand.channel_axis is None or operand.input_axis is None:
        return None
    if shape[axis] == channels.size:  # one axis holds all channels
        return along(channels, axis, len(shape)) if groups == 1 or axis == 0 else None
    if groups * shape[axis] != channels.size or len(shape) < 3:
        return None
    # axis 1 has the channels of one group, and axis 0 runs over the groups
    rows = np.repeat(channels.reshape(groups, shape[axis]), shape[0] // groups, axis=0)
    return rows.reshape(*rows.shape, *[1] * (len(shape) - 2))


def _vector(graph: Graph, tensor: int, ids: Ids, power: int) -> Edit:
    """Return the edit of a stored vector, read directly or through views."""
    own = broadcast_back(ids, graph.tensors[tensor].shape or ())
    if own is None:
        raise BlockedError("a parameter is computed, or has one value for several channels")
    root, own = at_root(graph, tensor, own)
    return _exclusive(graph, tensor, Edit(root, own, power))


def _exclusive(graph: Graph, tensor: int, edit: Edit) -> Edit:
    """Return the edit of what a tensor is stored as; raise `BlockedError` if something else reads that as well."""
    name, current = graph.tensors[edit.root].name, edit.root
    if not graph.tensors[edit.root].is_float:
        raise BlockedError(f"{name} is stored as {graph.tensors[edit.root].dtype}")
    while True:
        readers = graph.consumers[current]
        if len(readers) != 1 or current in graph.output_set:
            raise BlockedError(f"{name} is shared: other ops read it as well")
        if current == tensor:
            return edit
        current = graph.ops[readers[0]].outputs[0]
