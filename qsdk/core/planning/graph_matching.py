"""Matching the tensors of two graphs of one network.

The same network reaches the two doors in two spellings: the trace of a module computes shapes at run time, keeps
weights behind a Transpose and shows every view that the code makes; a file written by an exporter has all that
folded. Names carry no information. Matched are the parts that both spellings share:

- graph inputs, by position;
- ops that compute (everything but Reshape, Transpose, Squeeze, Unsqueeze, Flatten, Expand, Identity and idle Casts),
  by type, by the matched tensors that they read, and by the ops that read their results;
- their outputs and their stored operands, by position (a stored tensor is the one behind its Transposes);
- views between two matched ops, by their types along the way; a view that only one side makes stays unmatched.

A tensor that depends on no input and on no stored table (a shape, a mask made from one) counts as a constant, however
it is computed. `Where(IsNaN(x), 0, x)` behind a Softmax belongs to it: some spellings guard rows that a mask leaves
empty, others do not. A file exported with fixed sizes has more folded than that (position embeddings become one
constant); it matches up to there.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from qsdk.core.graph.graph import Graph, Op
from qsdk.core.graph.op_facts import COMMUTATIVE, SHAPE_OPS, VIEWS

_VIEWS = VIEWS | {"Expand"}
_SPREADING = frozenset({"Tile"})  # broadcasts a stored tensor when sizes are dynamic, as Expand does
_COMMUTATIVE = COMMUTATIVE | {"And", "Or", "Equal"}
_STORED = -1  # any tensor that depends on no input
_ABSENT = -2


def match_graphs(left: Graph, right: Graph) -> Mapping[int, int]:
    """Map the tensors of one graph to those of another that play the same part, by structure alone.

    Returns:
        Left tensor id -> right tensor id, for inputs, op outputs and stored tensors. A tensor without a counterpart is
        absent: a view that one side does not make, or everything behind an op that the other side does not have.
        Time is linear in the number of ops.
    """
    return _Matching(_Reduced(left), _Reduced(right)).run()


class _Reduced:
    """A graph without its views: every tensor is identified with the tensor that it is a view of."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.fixed = self._fixed()
        self.guard_of: dict[int, int] = {}  # Softmax output -> output of its guard against NaN
        self.guards: set[int] = set()
        for index in range(len(graph.ops)):
            self._find_guard(index)
        self.origin = self._origins()
        self.computing = [i for i in range(len(graph.ops)) if self._computes(i)]

    def _fixed(self) -> set[int]:
        """Return the constants, and the tensors that depend on constants and shapes without reading a table."""
        graph = self.graph
        result = {index for index, tensor in enumerate(graph.tensors) if tensor.constant}
        for op in graph.ops:
            read = self.read(op)
            if op.type in SHAPE_OPS or (all(t in result for t in read) and not self._looks_up(op, read)):
                result.update(op.outputs)
        return result

    def read(self, op: Op) -> list[int]:
        """Return the tensors whose values an op reads, without those that only give a type or sizes."""
        count = 1 if op.type in ("CastLike", "Split") or self.is_view(op) else len(op.inputs)
        return [t for t in op.inputs[:count] if t is not None]

    def _looks_up(self, op: Op, read: Sequence[int]) -> bool:
        """Return whether an op computes with a stored tensor larger than a scalar, so that its result is data."""
        if self.is_view(op) or op.type in _SPREADING:
            return False
        stored = [self.graph.tensors[root] for t in read if (root := self.stored_root(t)) is not None]
        return any(tensor.is_float and any(n != 1 for n in tensor.shape or ()) for tensor in stored)

    def is_computed(self, tensor: int) -> bool:
        """Return whether an op makes the tensor."""
        return tensor in self.graph.producer

    def stored_root(self, tensor: int) -> int | None:
        """Return the stored tensor behind views and copies of it, or None if the tensor is computed."""
        current = tensor
        while not self.graph.tensors[current].constant:
            op = self.graph.maker(current)
            if op is None or op.inputs[0] is None or not (self.is_view(op) or op.type in _SPREADING):
                return None
            current = op.inputs[0]
        return current

    def _find_guard(self, index: int) -> None:
        graph, op = self.graph, self.graph.ops[index]
        if op.type != "Softmax":
            return
        readers = graph.consumers[op.outputs[0]]
        tests = [r for r in readers if graph.ops[r].type == "IsNaN"]
        chosen = [r for r in readers if graph.ops[r].type == "Where"]
        if len(readers) == 2 and len(tests) == 1 and len(chosen) == 1:
            where = graph.ops[chosen[0]]
            if where.inputs[0] == graph.ops[tests[0]].outputs[0] and where.inputs[2] == op.outputs[0]:
                self.guard_of[op.outputs[0]] = where.outputs[0]
                self.guards.update((tests[0], chosen[0]))

    def is_view(self, op: Op) -> bool:
        """Return whether an op returns the elements of its first input unchanged."""
        if op.type in _VIEWS:
            return True
        if op.type not in ("Cast", "CastLike") or op.inputs[0] is None:
            return False
        return self.graph.tensors[op.inputs[0]].dtype == self.graph.tensors[op.outputs[0]].dtype

    def _computes(self, index: int) -> bool:
        op = self.graph.ops[index]
        return not (self.is_view(op) or index in self.guards or all(t in self.fixed for t in op.outputs))

    def _origins(self) -> dict[int, int]:
        """Return the tensor that each tensor is a view of."""
        result = {index: index for index in range(len(self.graph.tensors))}
        for op in self.graph.ops:
            if self.is_view(op) and op.inputs[0] is not None and op.outputs[0] not in self.fixed:
                result[op.outputs[0]] = result[op.inputs[0]]
        return result

    def result(self, tensor: int) -> int:
        """Return an op's output as others read it: behind its guard."""
        return self.guard_of.get(tensor, tensor)

    @cached_property
    def readers(self) -> Mapping[int, list[tuple[int, int]]]:
        """Return, by origin, the computing ops that read it and the positions where they do."""
        result: dict[int, list[tuple[int, int]]] = {}
        for index in self.computing:
            op = self.graph.ops[index]
            for position, tensor in enumerate(op.inputs):
                if tensor is not None and tensor not in self.fixed:
                    place = 0 if op.type in _COMMUTATIVE else position
                    result.setdefault(self.origin[tensor], []).append((index, place))
        return result

    @cached_property
    def colours(self) -> Mapping[int, int]:
        """Return, by computing op, a hash of all that its results lead to; it tells equal siblings (Q, K, V) apart."""
        leaving = {self.origin[t]: number for number, t in enumerate(self.graph.outputs)}
        result: dict[int, int] = {}
        for index in reversed(self.computing):
            op = self.graph.ops[index]
            seen = []
            for output in (self.result(t) for t in op.outputs):
                users = sorted((result[reader], place) for reader, place in self.readers.get(output, ()))
                seen.append((leaving.get(output, -1), tuple(users)))
            result[index] = hash((op.type, tuple(seen)))
        return result

    def key(self, index: int, renamed: Mapping[int, int] | None = None) -> tuple[object, ...] | None:
        """Return an op's key: its type and its inputs, in the tensor ids of the other graph if `renamed` is given."""
        op = self.graph.ops[index]
        read = []
        for tensor in op.inputs[: 1 if op.type == "Split" else None]:
            if tensor is None or tensor in self.fixed:
                read.append(_ABSENT if tensor is None else _STORED)
                continue
            origin: int | None = self.origin[tensor]
            if renamed is not None and origin is not None:
                origin = renamed.get(origin)
            if origin is None:
                return None
            read.append(origin)
        while read and read[-1] == _ABSENT:
            read.pop()
        return (op.type, *(sorted(read) if op.type in _COMMUTATIVE else read))

    def bounds(self, index: int) -> tuple[object, ...]:
        """Return the small stored operands of an op, which select the part that a Slice or Gather takes."""
        op = self.graph.ops[index]
        values = [self.graph.value(t) for t in op.inputs]
        return tuple(None if v is None or v.dtype.kind not in "iub" else tuple(np.ravel(v).tolist()) for v in values)


@dataclass
class _Matching:
    left: _Reduced
    right: _Reduced
    found: dict[int, int] = field(default_factory=dict)

    def run(self) -> Mapping[int, int]:
        """Match op by op, then the views, and return tensor of the left graph -> tensor of the right one."""
        left, right = self.left.graph, self.right.graph
        self.found.update(zip(left.inputs, right.inputs, strict=False))
        waiting: dict[tuple[object, ...], list[int]] = {}
        taken: dict[tuple[object, ...], list[int]] = {}
        for index in self.right.computing:
            key = self.right.key(index)
            assert key is not None
            waiting.setdefault(key, []).append(index)
        for index in self.left.computing:
            key = self.left.key(index, self.found)
            if key is None:
                continue
            # an exporter merges equal ops, so that one of them may represent several
            candidates = waiting.get(key) or taken.get(key, [])
            if candidates:
                chosen = min(candidates, key=functools.partial(self._unlike, index))
                self._pair(left.ops[index], right.ops[chosen])
                if candidates is waiting.get(key):
                    candidates.remove(chosen)
                    taken.setdefault(key, []).append(chosen)
        self._pair_views()
        return dict(sorted(self.found.items()))

    def _unlike(self, index: int, other: int) -> tuple[bool, bool]:
        """Return a sort key for candidates, False first; the order of the ops decides between equals."""
        bounds = self.left.bounds(index) != self.right.bounds(other)
        return bounds, self.left.colours[index] != self.right.colours[other]

    def _pair(self, one: Op, other: Op) -> None:
        for mine, theirs in zip(one.outputs, other.outputs, strict=False):
            self.found[self.left.result(mine)] = self.right.result(theirs)
            if mine in self.left.guard_of and theirs in self.right.guard_of:
                self.found[mine] = theirs
        mine_stored = [t for t in one.inputs if t is not None and t in self.left.fixed]
        theirs_stored = [t for t in other.inputs if t is not None and t in self.right.fixed]
        for mine, theirs in zip(mine_stored, theirs_stored, strict=False):
            root, other_root = self.left.stored_root(mine), self.right.stored_root(theirs)
            if root is not None and other_root is not None:
                self.found.setdefault(root, other_root)
            if mine != root and theirs != other_root and self.left.is_computed(mine) and self.right.is_computed(theirs):
                self.found.setdefault(mine, theirs)

    def _pair_views(self) -> None:
        """Match views by the matched tensor they start from, their types along the way, and their number."""
        theirs: dict[tuple[object, ...], list[int]] = {}
        for tensor, key in _view_keys(self.right, None):
            theirs.setdefault(key, []).append(tensor)
        for tensor, key in _view_keys(self.left, self.found):
            if theirs.get(key):
                self.found[tensor] = theirs[key].pop(0)


def _view_keys(side: _Reduced, renamed: Mapping[int, int] | None) -> Iterable[tuple[int, tuple[object, ...]]]:
    paths: dict[int, tuple[str, ...]] = {}
    for op in side.graph.ops:
        if not side.is_view(op) or op.inputs[0] is None or op.outputs[0] in side.fixed:
            continue
        output = op.outputs[0]
        paths[output] = (*paths.get(op.inputs[0], ()), op.type)
        origin = side.origin[output] if renamed is None else renamed.get(side.origin[output])
        if origin is not None:
            yield output, (origin, paths[output])
