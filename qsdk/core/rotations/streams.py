"""Streams: tensors that one rotation turns without changing the result of the model.

A stream grows from a tensor both ways, through ops that are linear in its channels, up to the layers that write it and
down to the layers that read it: their weights take up the rotation. A norm commutes with it once its gain is uniform:
the gain of a norm that only layers read is folded into these. A stream is rotated as a whole or not at all.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from qsdk.core.graph.graph import Graph
from qsdk.core.graph.op_facts import SHAPE_OPS
from qsdk.core.planning.operands import operands_of
from qsdk.core.rotations.cached_values import cached_tensors, edges_of_caches, obstacle_in_caches
from qsdk.core.rotations.norm_ops import NormOp, find_norms
from qsdk.core.rotations.steps import MOVES, step
from qsdk.core.rotations.turns import (
    Role,
    Turn,
    channel_axis,
    channels_of,
    stored_readers,
    turn_of_stored,
    whole_blocks,
)
from qsdk.core.scaling.channels import Ids, along
from qsdk.core.scaling.edits import input_axis, is_linear
from qsdk.core.scaling.propagation import Propagation

#: returns the gain of a norm; None where it has none
Gains = Callable[[NormOp], npt.NDArray[np.float64] | None]

_VALUES = "attention values"
_BEFORE_SOFTMAX = 6  # ops between a softmax and the product with the values


@dataclass(frozen=True)
class FoldedNorm:
    """A norm whose gain moves into the layers that read it.

    Attributes:
        norm: the norm.
        readers: ids of these layers.
    """

    norm: NormOp
    readers: tuple[int, ...]


@dataclass(frozen=True)
class Stream:
    """Tensors with a common rotation.

    Attributes:
        kind: `residual stream` or `attention values`.
        size: of the rotation; a tensor of several blocks of it (heads) is turned block by block.
        seed: the tensor that the search started from.
        members: tensor id -> map of its channels to those of the rotation.
        turns: the stored tensors that take up the rotation.
        folded: norms whose gain moves into their readers.
        keeps_mean: whether a LayerNorm is among them: the rotation must then leave the mean over channels as it is.
        ties: stored tensors that one reader needs with a gain and another without: a copy each would do.
        cached: whether a cache hands tensors of it from step to step.
        blocked: why it cannot be rotated, or "".
    """

    kind: str
    size: int
    seed: int
    members: Mapping[int, Ids]
    turns: Sequence[Turn] = ()
    folded: Sequence[FoldedNorm] = ()
    keeps_mean: bool = False
    ties: Sequence[int] = ()
    cached: bool = False
    blocked: str = ""

    @property
    def writers(self) -> list[Turn]:
        """Return the weights and tables that compute a tensor of the stream."""
        return [turn for turn in self.turns if turn.role == "writer"]

    @property
    def readers(self) -> list[Turn]:
        """Return the weights that multiply a tensor of the stream."""
        return [turn for turn in self.turns if turn.role == "reader"]


def find_streams(graph: Graph, gains: Gains, *, caches_stay: str = "") -> list[Stream]:
    """Return the residual streams and the values of attention heads, blocked ones with the reason.

    Args:
        graph: of the model.
        gains: the stored gain of each norm.
        caches_stay: why what caches of keys and values hold must stay as it is; "" where it may be turned.
    """
    norms, cached = find_norms(graph), cached_tensors(graph)
    result: list[Stream] = []
    seen: set[int] = set()
    for kind, seed in _seeds(graph, norms):
        size = (graph.tensors[seed].shape or (None,))[-1]
        if seed in seen or not isinstance(size, int) or size < 2:
            continue
        caches = cached if kind == _VALUES else {}  # a residual stream that comes in and leaves belongs to the user
        stream = _Growing(graph, norms, gains, caches, kind, size).grow(seed)
        seen |= set(stream.members)
        if stream.cached and caches_stay:
            stream = replace(stream, blocked=stream.blocked or caches_stay)
        if stream.writers and stream.readers:
            result.append(stream)
    return result


def _seeds(graph: Graph, norms: Mapping[int, NormOp]) -> Iterator[tuple[str, int]]:
    for norm in dict.fromkeys(norms[op] for op in sorted(norms)):
        yield "residual stream", norm.x
    for op in graph.ops:
        computed = [t for t in op.inputs if t is not None and graph.origin(t) is None]
        if op.type == "MatMul" and len(computed) == 2 and _is_softmax(graph, computed[0]):
            yield _VALUES, op.outputs[0]


def _is_softmax(graph: Graph, tensor: int) -> bool:
    """Return whether a tensor is a softmax, behind casts and a guard against rows without a score."""
    pending = [tensor]
    for _ in range(_BEFORE_SOFTMAX):
        made_by = graph.producer.get(pending.pop()) if pending else None
        if made_by is None:
            continue
        op = graph.ops[made_by]
        if op.type == "Softmax":
            return True
        if op.type in ("Where", "Cast", "Identity", "Dropout", "Mul"):
            pending += [t for t in op.inputs if t is not None and graph.tensors[t].is_float]
    return False


@dataclass
class _Growing:
    """A stream while it is searched."""

    graph: Graph
    norms: Mapping[int, NormOp]
    gains: Gains
    cached: Mapping[int, int]
    kind: str
    size: int
    members: dict[int, Ids] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    folded: dict[NormOp, FoldedNorm] = field(default_factory=dict)
    passed: set[NormOp] = field(default_factory=set)
    queue: list[int] = field(default_factory=list)
    reason: str = ""

    def grow(self, seed: int) -> Stream:
        """Return the stream that grows from a tensor, along its last axis."""
        rank = len(self.graph.tensors[seed].shape or ())
        self.join(seed, along(np.arange(self.size), -1, rank), None)
        while self.queue:  # to the end, even if it is blocked: no other search is to start in it
            tensor = self.queue.pop()
            self.up(tensor)
            for op_id in self.graph.consumers[tensor]:
                self.down(tensor, op_id)
        keeps_mean = any(norm.centres for norm in self.passed)
        turns, ties = self.merged()
        caches = edges_of_caches(self.graph, self.cached, self.members)
        self.block(obstacle_in_caches(self.graph, caches, self.members))
        folded = [one for one in self.folded.values() if self.gain(one.norm) is not None]
        facts = (turns, folded, keeps_mean, ties, bool(caches), self.reason)
        return Stream(self.kind, self.size, seed, self.members, *facts)

    def block(self, reason: str) -> None:
        """Note why the stream cannot be rotated; the first reason holds."""
        self.reason = self.reason or reason

    def label(self, op_id: int) -> str:
        """Return the name of an op for messages: the site of its output, else its own name."""
        op = self.graph.ops[op_id]
        return f"{op.type} {self.graph.tensors[op.outputs[0]].site or op.name}".rstrip()

    def join(self, tensor: int, ids: Ids, reader: int | None) -> None:
        """Add a tensor to the stream; of a stored one, turn what is stored."""
        facts = self.graph.tensors[tensor]
        shape = facts.shape
        if (ids < 0).all():
            return
        axis = channel_axis(ids)
        if not facts.is_float or shape is None or len(shape) != ids.ndim or axis is None:
            self.block("the type or the rank of a tensor in between is not known")
        elif (isinstance(shape[axis], int) and shape[axis] != ids.shape[axis]) or not whole_blocks(ids, self.size):
            self.block("a tensor in between holds parts of the channels")
        elif self.graph.origin(tensor) is not None:
            self.turn_stored(tensor, ids, reader, "vector")
        elif tensor not in self.members:
            if tensor in self.graph.output_set and tensor not in self.cached:
                self.block(f"{facts.site or facts.name} leaves the model")
            self.members[tensor] = ids
            self.queue.append(tensor)
        elif not np.array_equal(self.members[tensor], ids):
            self.block("two ways lead to different channels")

    def turn_stored(self, tensor: int, ids: Ids, reader: int | None, role: Role) -> None:
        """Note that a stored tensor, or the one that it is a view of, takes up the rotation."""
        turn = None if reader is None else turn_of_stored(self.graph, tensor, ids, reader, role)
        if turn is None:
            self.block("a stored tensor in between is read in a form that cannot be followed")
        else:
            self.turns.append(turn)

    def up(self, tensor: int) -> None:
        """Continue at the op that computes a tensor."""
        op_id = self.graph.producer.get(tensor)
        if op_id is None:
            if tensor not in self.cached:
                self.block("it is an input of the model")
            return
        op, ids = self.graph.ops[op_id], self.members[tensor]
        norm = self.norms.get(op_id)
        if norm is not None:
            self.carry(norm, ids) if tensor == norm.output else self.block(f"{self.label(op_id)} is inside a norm")
        elif is_linear(self.graph, op_id):
            self.turn_layer(op_id, ids, is_writer=True)
        elif op.type == "Gather" and op.inputs[0] is not None and self.graph.origin(op.inputs[0]) is not None:
            self.look_up(op_id, ids)
        else:
            self.through(tensor, op_id)

    def down(self, tensor: int, op_id: int) -> None:
        """Continue at an op that reads a tensor."""
        op, ids = self.graph.ops[op_id], self.members[tensor]
        norm = self.norms.get(op_id)
        if op.type in SHAPE_OPS:
            return
        if norm is not None:
            self.read_by(norm, ids) if tensor == norm.x else self.block(f"{self.label(op_id)} reads it inside a norm")
        elif is_linear(self.graph, op_id) and op.inputs[0] == tensor:
            self.turn_layer(op_id, ids, is_writer=False)
        else:
            self.through(tensor, op_id)

    def through(self, tensor: int, op_id: int) -> None:
        """Continue through an op that is linear in the channels."""
        step = self.step(tensor, op_id, self.members[tensor])
        if step.blocked:
            self.block(f"{self.label(op_id)}: {step.blocked}")
        for other, ids in step.tensors.items():
            self.join(other, ids, op_id)

    def step(self, tensor: int, op_id: int, ids: Ids) -> Propagation:
        """Return the tensors of an op that are turned if one of them is."""
        return step(self.graph, op_id, tensor, ids, self.size)

    # --- norms -----------------------------------------------------------------------------------------------------

    def gain(self, norm: NormOp) -> npt.NDArray[np.float64] | None:
        """Return the gain of a norm where it is not the same for all channels."""
        gain = self.gains(norm)
        return None if gain is None or bool((gain == gain.reshape(-1)[0]).all()) else gain

    def fits(self, norm: NormOp, ids: Ids) -> bool:
        """Return whether the rotation turns what the norm takes as one vector; if not, the stream is blocked."""
        fits = channel_axis(ids) == ids.ndim - 1 and np.array_equal(ids.reshape(-1), np.arange(self.size))
        if not fits:
            self.block(f"{self.label(norm.ops[-1])}: a norm over other channels")
        self.passed.add(norm)
        return fits

    def read_by(self, norm: NormOp, ids: Ids) -> None:
        """Continue behind a norm that reads the stream, as far as layers alone read it; else as part of the stream."""
        if norm in self.passed or not self.fits(norm, ids):
            return
        behind = self.behind(norm.output, along(ids.reshape(-1), -1, len(self.graph.tensors[norm.output].shape or ())))
        if behind is None:
            self.carry_through(norm, ids)
            return
        members, readers = behind
        self.members.update(members)
        self.folded[norm] = FoldedNorm(norm, tuple(readers))
        for op_id in readers:
            fed = self.graph.ops[op_id].inputs[0]
            assert fed is not None
            self.turn_layer(op_id, members[fed], is_writer=False, norm=norm)
        if norm.shift is not None and self.gain(norm) is None:
            self.turn_shift(norm, ids)

    def behind(self, tensor: int, ids: Ids) -> tuple[dict[int, Ids], list[int]] | None:
        """Return the tensors and the layers behind a norm, or None if anything but layers reads it."""
        members, pending = {tensor: ids}, [tensor]
        readers: list[int] = []
        while pending:
            current = pending.pop()
            if current in self.graph.output_set:
                return None
            for op_id in self.graph.consumers[current]:
                op = self.graph.ops[op_id]
                if op.type in SHAPE_OPS:
                    continue
                if is_linear(self.graph, op_id) and op.inputs[0] == current:
                    readers.append(op_id)
                    continue
                step = self.step(current, op_id, members[current]) if op.type in MOVES else Propagation(blocked="no")
                if step.blocked or op_id in self.norms:
                    return None
                for other, its_ids in step.tensors.items():
                    if other not in members:
                        members[other] = its_ids
                        pending.append(other)
        return members, readers

    def carry(self, norm: NormOp, ids: Ids) -> None:
        """Continue before a norm whose output is part of the stream."""
        if norm in self.passed or not self.fits(norm, ids):
            return
        self.carry_through(norm, ids)

    def carry_through(self, norm: NormOp, ids: Ids) -> None:
        """Make a norm part of the stream, which takes a uniform gain."""
        if self.gain(norm) is not None:
            self.block(f"{self.label(norm.ops[-1])}: the gain of a norm that not only layers read is not uniform")
        if norm.shift is not None:
            self.turn_shift(norm, ids)
        for tensor in (norm.x, norm.output):
            rank = len(self.graph.tensors[tensor].shape or ())
            self.join(tensor, along(ids.reshape(-1), -1, rank), norm.ops[-1])

    def turn_shift(self, norm: NormOp, ids: Ids) -> None:
        """Turn the stored shift of a norm."""
        assert norm.shift is not None
        rank = len(self.graph.tensors[norm.shift].shape or ())
        for reader in stored_readers(self.graph, norm.shift):
            if reader in norm.ops:
                self.turns.append(Turn(norm.shift, along(ids.reshape(-1), -1, rank), reader, "vector"))

    # --- layers ----------------------------------------------------------------------------------------------------

    def turn_layer(self, op_id: int, ids: Ids, *, is_writer: bool, norm: NormOp | None = None) -> None:
        """Note that the weight of a layer, and the bias of a writer, take up the rotation."""
        op = self.graph.ops[op_id]
        channels = channels_of(ids, input_axis(self.graph, op_id))
        groups, turned = op.attributes.get("group", 1), op.attributes.get("transA", 0)
        if channels is None or groups != 1 or turned:
            self.block(f"{self.label(op_id)}: its channels are not those of the rotation")
            return
        gain = norm if norm is not None and self.gain(norm) is not None else None
        for operand in operands_of(self.graph, op_id):
            rank = len(self.graph.tensors[operand.root].shape or ())
            axis = operand.channel_axis if is_writer else operand.input_axis
            if operand.role == "weight" and axis is not None:
                role: Role = "writer" if is_writer else "reader"
                self.turns.append(Turn(operand.root, along(channels, axis, rank), op_id, role, gain))
            elif operand.role == "weight":
                self.block(f"{self.label(op_id)}: its weight has no axis for the channels")
            elif is_writer:
                self.join(
                    operand.tensor, along(channels, -1, len(self.graph.tensors[operand.tensor].shape or ())), op_id
                )

    def look_up(self, op_id: int, ids: Ids) -> None:
        """Note that the table of an embedding takes up the rotation."""
        op = self.graph.ops[op_id]
        table, channels = op.inputs[0], channels_of(ids, -1)
        assert table is not None
        rank = len(self.graph.tensors[table].shape or ())
        if channels is None or rank < 2 or op.attributes.get("axis", 0) % rank == rank - 1:
            self.block(f"{self.label(op_id)}: its channels are not those of the rotation")
        else:
            self.turn_stored(table, along(channels, -1, rank), op_id, "writer")

    # --- the whole -------------------------------------------------------------------------------------------------

    def merged(self) -> tuple[list[Turn], list[int]]:
        """Return each turn once, and the stored tensors that two readers need in different forms."""
        forms: dict[int, dict[tuple[int, bytes, int | None], Turn]] = {}
        for turn in self.turns:
            forms.setdefault(turn.root, {})[turn.form] = turn
        for root in forms:
            self.require_known_readers(root, {turn.op for turn in self.turns if turn.root == root})
        for one in self.folded.values():
            for own in (one.norm.gain, one.norm.shift):
                if own is not None and self.gain(one.norm) is not None:
                    self.require_known_readers(own, {op for norm in self.folded for op in norm.ops})
        ties = []
        for root, by_form in forms.items():
            axes = {turn.axis for turn in by_form.values()}
            if len({(axis, ids) for axis, ids, _ in by_form}) > len(axes):
                self.block(f"{self.graph.tensors[root].name} is read along different channels")
            elif len(by_form) > len(axes):
                ties.append(root)
        return [turn for by_form in forms.values() for turn in by_form.values()], ties

    def require_known_readers(self, root: int, known: Collection[int]) -> None:
        """Block the stream if another op than these reads a stored tensor."""
        left = [op for op in stored_readers(self.graph, root) if op not in known]
        if left or root in self.graph.output_set:
            user = self.label(left[0]) if left else "the model"
            self.block(f"{self.graph.tensors[root].name} is shared: {user} uses it as well")
