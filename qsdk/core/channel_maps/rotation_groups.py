"""Rotation groups: tensors that one rotation turns without changing the result of the model.

A group grows from a tensor both ways, through ops that are linear in its channels, up to the layers that write it and
down to the layers that read it: their weights take up the rotation. A norm commutes with it once its gain is uniform:
the gain of a norm that only layers read is folded into these. A group is rotated as a whole or not at all.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

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
    broadcast_on,
    channel_axis,
    channels_along,
    input_axis,
    is_linear,
    past_addend,
    propagate,
    stored_operand,
)
from qsdk.core.graph.graph import Graph
from qsdk.core.graph.op_facts import SELECTIONS, SHAPE_OPS, VIEWS
from qsdk.core.patterns.find import match_supergroups
from qsdk.core.patterns.norms import NORMS
from qsdk.core.patterns.supergroup import Supergroup
from qsdk.core.planning.operands import operands_of
from qsdk.core.planning.ties import find_caches, keeps_grid

# --- norms over the last axis, one op or spelled out, with their stored gain and shift --------------------------------


_LAST_AXIS = {"LayerNorm": True, "RMSNorm": False}  # supergroup -> whether it subtracts the mean
_OPS = {"LayerNormalization": True, "RMSNormalization": False}


@dataclass(frozen=True)
class NormOp:
    """A LayerNorm or RMSNorm over the last axis of a tensor.

    Attributes:
        ops: their ids; the last one computes the output.
        x: id of its input.
        output: id of its output.
        centres: whether it subtracts the mean.
        gain: id of the stored tensor that it multiplies by, if any.
        gain_offset: what is added to the stored tensor to give the gain (1 where the model stores gain - 1).
        shift: id of the stored tensor that it adds, if any.
    """

    ops: tuple[int, ...]
    x: int
    output: int
    centres: bool
    gain: int | None
    gain_offset: float
    shift: int | None


def find_norms(graph: Graph) -> Mapping[int, NormOp]:
    """Return, for each op inside a norm over the last axis, that norm; other ops are absent."""
    return {op: norm for norm in _norms(graph) for op in norm.ops}


def _norms(graph: Graph) -> Iterator[NormOp]:
    groups = {group.ops: group for group in match_supergroups(graph, NORMS).groups.values()}
    for group in groups.values():
        if group.name in _LAST_AXIS and tuple(group.facts.get("axes", ())) == (-1,):
            yield _of_group(graph, group)
    for index, op in enumerate(graph.ops):
        if op.type in _OPS and op.domain in ("", "ai.onnx") and op.inputs[0] is not None:
            rank = len(graph.tensors[op.inputs[0]].shape or ())
            if op.attributes.get("axis", -1) in (-1, rank - 1):
                stored = [_root(graph, tensor) for tensor in (*op.inputs[1:], None, None)[:2]]
                yield NormOp((index,), op.inputs[0], op.outputs[0], _OPS[op.type], stored[0], 0.0, stored[1])


def _of_group(graph: Graph, group: Supergroup) -> NormOp:
    gamma = group.tensors.get("gamma")
    added = [graph.ops[op] for op in group.ops if gamma in graph.ops[op].inputs and graph.ops[op].type == "Add"]
    return NormOp(
        group.ops,
        group.tensors["x"],
        graph.ops[group.ops[-1]].outputs[0],
        _LAST_AXIS[group.name],
        _root(graph, gamma),
        1.0 if added else 0.0,
        _root(graph, group.tensors.get("beta")),
    )


def _root(graph: Graph, tensor: int | None) -> int | None:
    origin = None if tensor is None else graph.origin(tensor)
    return None if origin is None else origin[0]


# --- groups -----------------------------------------------------------------------------------------------------------


#: returns the gain of a norm; None where it has none
Gains = Callable[[NormOp], npt.NDArray[np.float64] | None]
Role = Literal["writer", "reader", "vector"]

#: ops that only move channels or leave out whole rows
MOVES = VIEWS | {"Dropout", "Cast", "Expand", "Slice", "Gather"}
_LINEAR = MOVES | {"Neg", "Add", "Sub", "Sum", "MatMul", "ReduceMean", "ReduceSum", "Concat", "Split"}
_STORED_VIEWS = VIEWS | {"Cast", "Expand"}
_VALUES = "attention values"
_UNKNOWN_FORM = "a stored tensor in between is read in a form that cannot be followed"
_BEFORE_SOFTMAX = 6  # ops between a softmax and the product with the values


@dataclass(frozen=True, eq=False)
class RotatedTensor:
    """A stored tensor that takes up a rotation: `new[.., j] = sum(old[.., i] * rotation[i, j])` along one axis.

    Attributes:
        root: id of the stored tensor.
        ids: map of its elements to the channels of the rotation; -1 where it stays as it is.
        op: the op that reads it.
        role: `writer` of the group, `reader` of it, or a `vector` that is added.
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


@dataclass(frozen=True)
class FoldedNorm:
    """A norm whose gain moves into the layers that read it, by their ids."""

    norm: NormOp
    readers: tuple[int, ...]


@dataclass(frozen=True)
class RotationGroup:
    """Tensors with a common rotation.

    Attributes:
        kind: `residual stream` or `attention values`.
        size: of the rotation; a tensor of several blocks of it (heads) is turned block by block.
        seed: the tensor that the search started from.
        members: tensor id -> map of its channels to those of the rotation.
        rotated: the stored tensors that take up the rotation.
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
    rotated: Sequence[RotatedTensor] = ()
    folded: Sequence[FoldedNorm] = ()
    keeps_mean: bool = False
    ties: Sequence[int] = ()
    cached: bool = False
    blocked: str = ""

    @property
    def writers(self) -> list[RotatedTensor]:
        """Return the weights and tables that compute a tensor of the group."""
        return [one for one in self.rotated if one.role == "writer"]

    @property
    def readers(self) -> list[RotatedTensor]:
        """Return the weights that multiply a tensor of the group."""
        return [one for one in self.rotated if one.role == "reader"]


def find_rotation_groups(graph: Graph, gains: Gains, *, caches_stay: str = "") -> list[RotationGroup]:
    """Return the residual streams and the values of attention heads, blocked ones with the reason.

    `gains` returns the stored gain of each norm; `caches_stay` says why what caches of keys and values hold must stay
    as it is, "" where it may be turned.
    """
    norms, cached = find_norms(graph), cached_tensors(graph)
    result: list[RotationGroup] = []
    seen: set[int] = set()
    for kind, seed in _seeds(graph, norms):
        size = (graph.tensors[seed].shape or (None,))[-1]
        if seed in seen or not isinstance(size, int) or size < 2 or graph.origin(seed) is not None:
            continue
        caches = cached if kind == _VALUES else {}  # a residual stream that comes in and leaves belongs to the user
        group = _RotationFlood(graph, norms, gains, caches, size).grow(kind, seed)
        seen |= set(group.members)
        if group.cached and caches_stay:
            group = replace(group, blocked=group.blocked or caches_stay)
        if group.writers and group.readers:
            result.append(group)
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


def stored_readers(graph: Graph, root: int) -> Iterator[int]:
    """Yield the ops that read the values of a stored tensor, directly or through views of it."""
    pending = [root]
    while pending:
        for op_id in graph.consumers[pending.pop()]:
            op = graph.ops[op_id]
            if op.type in _STORED_VIEWS and op.inputs[0] is not None and graph.origin(op.outputs[0]) is not None:
                pending += op.outputs
            elif op.type not in SHAPE_OPS:
                yield op_id


class _RotationFlood(Flood):
    """A rotation group while it is searched; `cached` are the tensors that hold values of a cache."""

    def __init__(
        self, graph: Graph, norms: Mapping[int, NormOp], gains: Gains, cached: Mapping[int, int], size: int
    ) -> None:
        super().__init__(graph)
        self.norms, self.gains, self.cached, self.size = norms, gains, cached, size
        self.members: dict[int, Ids] = {}
        self.rotated: list[RotatedTensor] = []
        self.folded: dict[NormOp, FoldedNorm] = {}
        self.passed: set[NormOp] = set()

    def grow(self, kind: str, seed: int) -> RotationGroup:
        """Return the group that grows from a tensor, along its last axis."""
        self.join(seed, self.along_last(seed, np.arange(self.size)), -1)
        self.run(past_obstacles=True)  # to the end, even if it is blocked: no other search is to start in it
        rotated, ties = self.merged()
        caches = _edges_of_caches(self.graph, self.cached, self.members)
        self.block(_obstacle_in_caches(self.graph, caches, self.members))
        folded = [one for one in self.folded.values() if self.gain(one.norm) is not None]
        keeps_mean = any(norm.centres for norm in self.passed)
        facts = (rotated, folded, keeps_mean, ties, bool(caches), self.reason)
        return RotationGroup(kind, self.size, seed, self.members, *facts)

    def label(self, op_id: int) -> str:
        """Return the type and the name of an op for messages."""
        return f"{self.graph.ops[op_id].type} {super().label(op_id)}".rstrip()

    def along_last(self, tensor: int, ids: Ids) -> Ids:
        """Return the map of a tensor whose channels lie along its last axis."""
        return along(ids.reshape(-1), -1, len(self.graph.tensors[tensor].shape or ()))

    def join(self, tensor: int, ids: Ids, reader: int) -> None:
        """Add a tensor to the group; of a stored one, what is stored takes up the rotation."""
        facts = self.graph.tensors[tensor]
        shape, axis = facts.shape, channel_axis(ids)
        if (ids < 0).all():
            return
        if not facts.is_float or shape is None or len(shape) != ids.ndim or axis is None:
            self.block("the type or the rank of a tensor in between is not known")
        elif (isinstance(shape[axis], int) and shape[axis] != ids.shape[axis]) or not self.has_whole_blocks(ids):
            self.block("a tensor in between holds parts of the channels")
        elif self.graph.origin(tensor) is not None:
            self.rotate_stored(tensor, ids, reader, "vector")
        elif tensor not in self.members:
            if tensor in self.graph.output_set and tensor not in self.cached:
                self.block(f"{facts.site or facts.name} leaves the model")
            self.members[tensor] = ids
            self.queue.append(tensor)
        elif not np.array_equal(self.members[tensor], ids):
            self.block("two ways lead to different channels")

    def has_whole_blocks(self, ids: Ids) -> bool:
        """Return whether the channels come in whole blocks 0, 1, ..., size - 1, one behind the other."""
        turned = ids.reshape(-1)
        turned = turned[turned >= 0]
        tiled = np.tile(np.arange(self.size), turned.size // self.size)
        return turned.size % self.size == 0 and np.array_equal(turned, tiled)

    def rotate_stored(self, tensor: int, ids: Ids, reader: int, role: Role) -> None:
        """Note that a stored tensor, or the one that it is a view of, takes up the rotation."""
        try:
            root, own = at_root(self.graph, tensor, ids)
        except BlockedError:
            self.block(_UNKNOWN_FORM)
            return
        if channel_axis(own) is None or not self.graph.tensors[root].is_float:
            self.block(_UNKNOWN_FORM)
        else:
            self.rotated.append(RotatedTensor(root, own, reader, role))

    def enter(self, tensor: int) -> None:
        """Block at an input of the model, unless it comes from a cache."""
        if tensor not in self.cached:
            self.block("it is an input of the model")

    def visit(self, tensor: int, op_id: int, *, upward: bool) -> None:
        """Let layers and norms take up the rotation, or continue through an op that is linear in the channels."""
        op, ids, norm = self.graph.ops[op_id], self.members[tensor], self.norms.get(op_id)
        if norm is not None:
            if tensor == (norm.output if upward else norm.x):
                self.pass_norm(norm, ids, upward=upward)
            else:
                self.block(f"{self.label(op_id)} {'is' if upward else 'reads it'} inside a norm")
        elif is_linear(self.graph, op_id) and (upward or op.inputs[0] == tensor):
            self.rotate_layer(op_id, ids, is_writer=upward)
        elif upward and op.type == "Gather" and self.graph.origin(op.inputs[0] or 0) is not None:
            self.look_up(op_id, ids)
        else:
            for other, its_ids in self.step(tensor, op_id, ids).items():
                self.join(other, its_ids, op_id)

    # --- ops that are linear in the channels --------------------------------------------------------------------------

    def step(self, tensor: int, op_id: int, ids: Ids) -> Maps:
        """Return the maps of the tensors of an op that are turned if one of them is; raise `BlockedError`."""
        op = self.graph.ops[op_id]
        at = KnownTensor(self.graph, op, tensor, ids)
        if op.domain in STANDARD and op.type in ("Mul", "Div"):
            return _past_common_factor(at)
        if op.domain not in STANDARD or op.type not in _LINEAR:
            raise BlockedError("it is not linear in its channels")
        blocks = self.reshaped_blocks(at) if op.type == "Reshape" else None
        if blocks is not None:
            return blocks
        constant = stored_operand(self.graph, op_id)
        return propagate(at) if constant is None else past_addend(at, constant)

    def reshaped_blocks(self, at: KnownTensor) -> Maps | None:
        """Return the maps of whole blocks along the last axis that stay there, whatever the sizes before it, or None.

        Elements keep their order, so the place in its block is that of the element modulo the size, on either side.
        """
        other = at.made if at.forward else at.fed
        width = _width(at.graph, other)
        in_blocks = channel_axis(at.ids) == at.ids.ndim - 1 and at.ids.size % self.size == 0 and (at.ids >= 0).all()
        if not in_blocks or not isinstance(width, int) or width % self.size:
            return None
        return {other: self.along_last(other, np.tile(np.arange(self.size), width // self.size))}

    # --- norms --------------------------------------------------------------------------------------------------------

    def gain(self, norm: NormOp) -> npt.NDArray[np.float64] | None:
        """Return the gain of a norm where it is not the same for all channels."""
        gain = self.gains(norm)
        return None if gain is None or bool((gain == gain.reshape(-1)[0]).all()) else gain

    def pass_norm(self, norm: NormOp, ids: Ids, *, upward: bool) -> None:
        """Continue past a norm: fold its gain where layers alone read it, else make it part of the group."""
        if norm in self.passed:
            return
        self.passed.add(norm)
        if channel_axis(ids) != ids.ndim - 1 or not np.array_equal(ids.reshape(-1), np.arange(self.size)):
            self.block(f"{self.label(norm.ops[-1])}: a norm over other channels")
            return
        if not upward and self.fold(norm, ids):
            return
        if self.gain(norm) is not None:
            self.block(f"{self.label(norm.ops[-1])}: the gain of a norm that not only layers read is not uniform")
        self.rotate_shift(norm, ids)
        for tensor in (norm.x, norm.output):
            self.join(tensor, self.along_last(tensor, ids), norm.ops[-1])

    def fold(self, norm: NormOp, ids: Ids) -> bool:
        """Note that a norm's gain moves into the layers that read it; False if anything but layers reads it."""
        members, pending = {norm.output: self.along_last(norm.output, ids)}, [norm.output]
        readers: list[int] = []
        while pending:
            tensor = pending.pop()
            if tensor in self.graph.output_set:
                return False
            for op_id in self.graph.consumers[tensor]:
                op = self.graph.ops[op_id]
                if op.type in SHAPE_OPS:
                    continue
                if is_linear(self.graph, op_id) and op.inputs[0] == tensor:
                    readers.append(op_id)
                    continue
                if op.type not in MOVES or op_id in self.norms:
                    return False
                try:
                    maps = self.step(tensor, op_id, members[tensor])
                except BlockedError:
                    return False
                for other, its_ids in maps.items():
                    if other not in members:
                        members[other] = its_ids
                        pending.append(other)
        self.members.update(members)
        self.folded[norm] = FoldedNorm(norm, tuple(readers))
        for op_id in readers:
            fed = self.graph.ops[op_id].inputs[0]
            assert fed is not None
            self.rotate_layer(op_id, members[fed], is_writer=False, norm=norm)
        if self.gain(norm) is None:
            self.rotate_shift(norm, ids)
        return True

    def rotate_shift(self, norm: NormOp, ids: Ids) -> None:
        """Note that the stored shift of a norm, if it has one, takes up the rotation."""
        if norm.shift is not None:
            own = self.along_last(norm.shift, ids)
            readers = [op_id for op_id in stored_readers(self.graph, norm.shift) if op_id in norm.ops]
            self.rotated += [RotatedTensor(norm.shift, own, reader, "vector") for reader in readers]

    # --- layers -------------------------------------------------------------------------------------------------------

    def rotate_layer(self, op_id: int, ids: Ids, *, is_writer: bool, norm: NormOp | None = None) -> None:
        """Note that the weight of a layer, and the bias of a writer, take up the rotation."""
        op = self.graph.ops[op_id]
        channels = channels_along(ids, input_axis(self.graph, op_id))
        if channels is None or op.attributes.get("group", 1) != 1 or op.attributes.get("transA", 0):
            self.block(f"{self.label(op_id)}: its channels are not those of the rotation")
            return
        gain = norm if norm is not None and self.gain(norm) is not None else None
        for operand in operands_of(self.graph, op_id):
            axis = operand.channel_axis if is_writer else operand.input_axis
            if operand.role == "weight" and axis is not None:
                role: Role = "writer" if is_writer else "reader"
                own = along(channels, axis, len(self.graph.tensors[operand.root].shape or ()))
                self.rotated.append(RotatedTensor(operand.root, own, op_id, role, gain))
            elif operand.role == "weight":
                self.block(f"{self.label(op_id)}: its weight has no axis for the channels")
            elif is_writer:
                self.join(operand.tensor, self.along_last(operand.tensor, channels), op_id)

    def look_up(self, op_id: int, ids: Ids) -> None:
        """Note that the table of an embedding takes up the rotation."""
        op = self.graph.ops[op_id]
        table, channels = op.inputs[0], channels_along(ids, -1)
        assert table is not None
        rank = len(self.graph.tensors[table].shape or ())
        if channels is None or rank < 2 or op.attributes.get("axis", 0) % rank == rank - 1:
            self.block(f"{self.label(op_id)}: its channels are not those of the rotation")
        else:
            self.rotate_stored(table, self.along_last(table, channels), op_id, "writer")

    # --- the whole ----------------------------------------------------------------------------------------------------

    def merged(self) -> tuple[list[RotatedTensor], list[int]]:
        """Return each rotated tensor once, and the stored tensors that two readers need in different forms."""
        forms: dict[int, dict[tuple[int, bytes, int | None], RotatedTensor]] = {}
        for one in self.rotated:
            forms.setdefault(one.root, {})[one.form] = one
        for root in forms:
            self.require_known_readers(root, {one.op for one in self.rotated if one.root == root})
        for folded in self.folded.values():
            for own in (folded.norm.gain, folded.norm.shift):
                if own is not None and self.gain(folded.norm) is not None:
                    self.require_known_readers(own, {op for norm in self.folded for op in norm.ops})
        ties = []
        for root, by_form in forms.items():
            axes = {one.axis for one in by_form.values()}
            if len({(axis, ids) for axis, ids, _ in by_form}) > len(axes):
                self.block(f"{self.graph.tensors[root].name} is read along different channels")
            elif len(by_form) > len(axes):
                ties.append(root)
        return [one for by_form in forms.values() for one in by_form.values()], ties

    def require_known_readers(self, root: int, known: Collection[int]) -> None:
        """Block the group if another op than these reads a stored tensor."""
        others = [op for op in stored_readers(self.graph, root) if op not in known]
        if others or root in self.graph.output_set:
            user = self.label(others[0]) if others else "the model"
            self.block(f"{self.graph.tensors[root].name} is shared: {user} uses it as well")


def _past_common_factor(at: KnownTensor) -> Maps:
    """Return the maps of a product with one number for all channels."""
    axis = channel_axis(at.ids)
    assert axis is not None
    from_end = at.ids.ndim - axis
    operands = [tensor for tensor in at.op.inputs if tensor is not None]
    carriers = [t for t in operands if len(at.shape(t)) >= from_end and at.shape(t)[-from_end] != 1]
    if len(carriers) != 1 or (at.op.type == "Div" and carriers[0] != at.fed):
        raise BlockedError("its channels are multiplied by different numbers")
    if at.forward:
        return {at.made: broadcast_on(at.ids, len(at.shape(at.made)))}
    ids = broadcast_back(at.ids, at.shape(carriers[0]))
    if ids is None:
        at.lost()
    return {carriers[0]: ids}


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
                if operand.input_axis is not None:
                    width = (graph.tensors[operand.root].shape or ())[operand.input_axis]
                    return width if isinstance(width, int) else None
    return None


# --- caches of keys and values ----------------------------------------------------------------------------------------
# A rotation of each head's vector commutes with the Concat along the tokens, so a cache may hold turned values, as long
# as all that it hands from step to step is turned alike.


def cached_tensors(graph: Graph) -> Mapping[int, int]:
    """Return the tensors that hold values of a cache: tensor id -> the Concat that extends it.

    What is cut out of one tensor, as queries, keys and values are of a layer for all of them, goes separate ways.
    """
    movers = (index for index, op in enumerate(graph.ops) if keeps_grid(graph, op))
    return find_caches(graph, [index for index in movers if graph.ops[index].type not in SELECTIONS])


def _edges_of_caches(graph: Graph, cached: Mapping[int, int], members: Mapping[int, Ids]) -> list[list[int]]:
    """Return the inputs and outputs of the graph for each cache that a group enters."""
    edges: dict[int, list[int]] = {}
    for tensor in (*graph.inputs, *graph.outputs):
        if tensor in cached:
            edges.setdefault(cached[tensor], []).append(tensor)
    return [tensors for _, tensors in sorted(edges.items()) if any(tensor in members for tensor in tensors)]


def _obstacle_in_caches(graph: Graph, edges: Sequence[Sequence[int]], members: Mapping[int, Ids]) -> str:
    """Return why a cache cannot hold a group as it is turned, or ""."""
    for tensors in edges:
        forms = {(members[tensor].shape, members[tensor].tobytes()) for tensor in tensors if tensor in members}
        if len(forms) > 1 or any(tensor not in members for tensor in tensors):
            name = graph.tensors[tensors[-1]].site or graph.tensors[tensors[-1]].name
            return f"{name}: what comes out of a cache has other channels than what goes into it"
    return ""
