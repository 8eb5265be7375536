"""Regions: activations that can be divided by factors per channel without changing the result of the model.

From the input of a layer the factors are followed both ways: up to the ops whose stored tensors are divided (a layer, a
norm), down to the layers whose weights are multiplied, through all ops between that commute with the factors. A region
is scaled as a whole or not at all.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from qsdk.core.graph.graph import Graph
from qsdk.core.graph.op_facts import SHAPE_OPS
from qsdk.core.scaling.channels import Ids
from qsdk.core.scaling.edits import (
    Edit,
    End,
    addend_edit,
    consumer_edit,
    input_axis,
    is_linear,
    producer_edit,
    stored_operand,
)
from qsdk.core.scaling.propagation import (
    KnownTensor,
    Propagation,
    operands_that_may_carry,
    propagate,
    propagate_to_operand,
)

_TRIES = 16  # of the operands of products


@dataclass(frozen=True)
class ScaledTensor:
    """A tensor of a region.

    Attributes:
        ids: its map.
        power: -1 where it is divided by the factors, +1 where it is multiplied (the other operand of a product).
    """

    ids: Ids
    power: int


@dataclass(frozen=True)
class Region:
    """Tensors with common factors.

    Attributes:
        channels: number of factors.
        members: tensor id -> how it is scaled.
        ends: the ops whose stored tensors change, in the order of the graph.
        between: edits of stored tensors that are added inside the region.
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
        """Return the layers and norms that read a tensor of the region."""
        return [end for end in self.ends if end.reads is not None]

    @property
    def producers(self) -> list[End]:
        """Return the layers and norms that compute a tensor of the region."""
        return [end for end in self.ends if end.reads is None]

    def label(self, graph: Graph) -> str:
        """Return a name made of its ends: `norm -> query, key, value`."""
        makers, readers = ([end.owner(graph) for end in ends] for ends in (self.producers, self.consumers))
        if not readers:
            return " x ".join(dict.fromkeys(makers))
        return f"{', '.join(dict.fromkeys(makers))} -> {', '.join(dict.fromkeys(readers))}"


def find_regions(graph: Graph) -> list[Region]:
    """Return the regions around the inputs of layers, and around left operands of products of computed tensors.

    Blocked regions of layers are included, with the reason.
    """
    result: list[Region] = []
    seen: set[int] = set()
    for seed in _seeds(graph):
        if seed.tensor in seen:
            continue
        region = replace(_region(graph, seed), seed=seed.tensor)
        if not region.blocked or seed.of_layer:
            result.append(region)
        seen |= {seed.tensor} if region.blocked else set(region.members)
    return result


@dataclass(frozen=True)
class _Seed:
    """A tensor that a region may grow from.

    Attributes:
        tensor: its id.
        ways: the axes that its channels may lie along, the best way first.
        of_layer: whether a layer reads it.
    """

    tensor: int
    ways: tuple[tuple[int, ...], ...]
    of_layer: bool


def _seeds(graph: Graph) -> Iterator[_Seed]:
    for index, op in enumerate(graph.ops):
        computed = [t for t in op.inputs[:2] if t is not None and graph.origin(t) is None]
        if is_linear(graph, index):
            yield _Seed(computed[0], ((input_axis(graph, index),),), True)
        elif op.type == "MatMul" and len(computed) == 2:
            # of two products with heads, [batch, heads, rows, width], each head has channels of its own
            heads = ((1, -1),) if len(graph.tensors[computed[0]].shape or ()) == 4 else ()
            yield _Seed(computed[0], (*heads, (-1,)), False)


def _region(graph: Graph, seed: _Seed) -> Region:
    """Return the region that grows from a seed; if its first way is blocked, another operand of a product is tried."""
    pending: list[tuple[tuple[int, ...], dict[int, int]]] = [(axes, {}) for axes in seed.ways]
    blocked = None
    for _ in range(_TRIES):
        if not pending:
            break
        axes, chosen = pending.pop(0)
        growing = _Growing(graph, chosen)
        region = growing.grow(seed.tensor, axes)
        if not region.blocked:
            return region
        blocked = blocked or region
        for op, carriers in growing.open.items():
            if op not in chosen:
                pending.extend((axes, {**chosen, op: other}) for other in carriers[1:])
    assert blocked is not None
    return blocked


class _Growing:
    """A region while it is searched."""

    def __init__(self, graph: Graph, chosen: Mapping[int, int]) -> None:
        self.graph, self.chosen = graph, chosen
        self.open: dict[int, list[int]] = {}  # products whose carrier could be another one
        self.members: dict[int, ScaledTensor] = {}
        self.ends: dict[tuple[int, int], End] = {}
        self.between: dict[int, Edit] = {}
        self.queue: list[int] = []
        self.same: list[int] = []  # union-find over ids
        self.reason = ""

    def grow(self, seed: int, axes: Sequence[int]) -> Region:
        """Return the region that grows from a tensor, whose channels lie along these axes."""
        shape = self.graph.tensors[seed].shape or ()
        along = {axis % len(shape) for axis in axes if -len(shape) <= axis < len(shape)}
        sizes = [size if axis in along else 1 for axis, size in enumerate(shape)]
        known = tuple(size for size in sizes if isinstance(size, int))
        if len(along) < len(axes) or len(known) < len(shape):
            return Region(0, {}, blocked="how many channels it has is unknown")
        self.join(seed, self.new(known), -1)
        while self.queue and not self.reason:
            tensor = self.queue.pop()
            self.up(tensor)
            for op_id in self.graph.consumers[tensor]:
                self.down(tensor, op_id)
        return self.region()

    def new(self, shape: tuple[int, ...]) -> Ids:
        """Return ids that no tensor has yet, in an array of this shape."""
        count = int(np.prod(shape))
        start = len(self.same)
        self.same.extend(range(start, start + count))
        return np.arange(start, start + count, dtype=np.int64).reshape(shape)

    def join(self, tensor: int, ids: Ids, power: int) -> None:
        """Add a tensor to the region."""
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
            first, second = self.root(i), self.root(j)
            self.same[max(first, second)] = min(first, second)

    def root(self, i: int) -> int:
        """Return the smallest id of the same channel."""
        while self.same[i] != i:
            self.same[i] = self.same[self.same[i]]
            i = self.same[i]
        return i

    def block(self, reason: str) -> None:
        """Note why the region cannot be scaled; the first reason holds."""
        self.reason = self.reason or reason

    def up(self, tensor: int) -> None:
        """Continue at the op that computes a tensor."""
        op_id = self.graph.producer.get(tensor)
        if op_id is None:
            self.block("it is an input of the model" if tensor in self.graph.inputs else "it is stored as it is")
            return
        member = self.members[tensor]
        end = producer_edit(self.graph, op_id, member.ids, -member.power)
        if end is None:
            self.through(tensor, op_id, up=True)
        elif isinstance(end, str):
            self.block(f"{self.label(op_id)}: {end}")
        else:
            self.ends[op_id, tensor] = end

    def down(self, tensor: int, op_id: int) -> None:
        """Continue at an op that reads a tensor."""
        if self.graph.ops[op_id].type in SHAPE_OPS:
            return
        member = self.members[tensor]
        end = consumer_edit(self.graph, op_id, tensor, member.ids, -member.power)
        if end is None:
            self.through(tensor, op_id, up=False)
        elif isinstance(end, str):
            self.block(f"{self.label(op_id)}: {end}")
        else:
            self.ends[op_id, tensor] = end

    def through(self, tensor: int, op_id: int, *, up: bool) -> None:
        """Continue through an op without stored tensors, or with one that is added or is a single number."""
        op, member = self.graph.ops[op_id], self.members[tensor]
        at = KnownTensor(self.graph, op, tensor, member.ids, self.new)
        constant = stored_operand(self.graph, op_id)
        if constant is not None:
            step = self.past_stored_operand(at, op_id, constant, member)
        elif up and op.type == "Mul":
            carriers = operands_that_may_carry(self.graph, op)
            self.open.setdefault(op_id, carriers)
            step = propagate_to_operand(at, self.chosen.get(op_id, carriers[0]))
        else:
            step = propagate(at)
        if step.blocked:
            self.block(f"{self.label(op_id)}: {step.blocked}")
        for other, ids in step.tensors.items():
            self.join(other, ids, -member.power if other in step.inverse else member.power)

    def past_stored_operand(self, at: KnownTensor, op_id: int, constant: int, member: ScaledTensor) -> Propagation:
        """Return the tensors behind an elementwise op with one stored operand."""
        op = at.op
        data = next(t for t in op.inputs if t is not None and t != constant)
        rank = max(len(at.shape(data)), len(at.shape(constant)))
        if op.type in ("Mul", "Div"):
            if (self.graph.tensors[constant].shape or ()) not in ((), (1,)) or (op.type == "Div" and data != at.fed):
                return propagate(replace(at, op=replace(op, type=f"{op.type} by a stored tensor")))
        else:
            whole = at.ids.reshape((1,) * (rank - at.ids.ndim) + at.ids.shape)
            edit = addend_edit(self.graph, constant, whole, -member.power)
            if isinstance(edit, str):
                return Propagation(blocked=edit)
            self.between[op_id] = edit
        if rank != len(at.shape(data)):
            return Propagation(blocked=f"{op.type} adds axes")
        return Propagation({at.made if at.forward else data: at.ids})

    def label(self, op_id: int) -> str:
        """Return the name of an op for messages: the site of its output, else its own name."""
        return self.graph.tensors[self.graph.ops[op_id].outputs[0]].site or self.graph.ops[op_id].name

    def region(self) -> Region:
        """Return what was found, with the channels numbered from 0 on."""
        if self.reason:
            return Region(0, self.members, tuple(self.ends.values()), blocked=self.reason)
        roots = np.array([self.root(i) for i in range(len(self.same))], np.int64)
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
        return Region(used.size, members, ends, between)
