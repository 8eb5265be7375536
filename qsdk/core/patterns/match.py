"""Matching one pattern at one op, backward from the op's output, with the reason where it does not match."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from qsdk.core.graph.graph import Graph, Op
from qsdk.core.graph.op_facts import COMMUTATIVE, SHAPE_OPS
from qsdk.core.patterns.supergroup import NearMiss, Supergroup
from qsdk.core.patterns.terms import (
    AnyOf,
    Anything,
    Captured,
    InputTensor,
    Node,
    Number,
    Pattern,
    StoredTensor,
    Term,
    heads,
)

_PASSED = 8  # the longest row of casts and identities that is skipped
_NAMED = 4  # the most op types that a near miss lists
_MATCHES = 64  # tried matches of a pattern at one op, before it counts as not matching


@dataclass(frozen=True)
class PartialMatch:
    """A near miss, and the ops that did match."""

    near_miss: NearMiss
    ops: frozenset[int]


@dataclass(frozen=True)
class _Mismatch:
    """The place where a match failed: the ops so far, the tensor, and the expected term (or the reason)."""

    ops: frozenset[int]
    tensor: int | None
    wanted: Term | str


class PatternMatcher:
    """The matching of patterns on one graph; tensors behind casts and reshapes are cached."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._behind: dict[int, list[tuple[int, frozenset[int]]]] = {}
        self._furthest: _Mismatch | None = None

    def at(self, pattern: Pattern, op_id: int) -> Supergroup | PartialMatch | None:
        """Return the group that ends in this op, a near miss, or None.

        The first valid match is taken. A match whose inner tensors are read outside it is not valid.
        """
        tensor = self.graph.ops[op_id].outputs[0]
        self._furthest = None
        first_miss: PartialMatch | None = None
        for captured in islice(self._matches(pattern.output, tensor, Captured()), _MATCHES):
            reason = captured.facts.get("amiss") or (pattern.check and pattern.check(self.graph, captured))
            reason = reason or self._needed_outside(captured, op_id)
            if reason is None:
                return self._group(pattern, captured, op_id)
            first_miss = first_miss or PartialMatch(NearMiss(op_id, pattern.name, reason), captured.ops)
        return first_miss or self._partial(pattern, op_id)

    def _group(self, pattern: Pattern, captured: Captured, last: int) -> Supergroup:
        name = pattern.named(self.graph, captured) if pattern.named else pattern.name
        ops = (*sorted(captured.ops), *self._casts_back(captured, last))
        return Supergroup(ops, name, dict(captured.roles), dict(captured.tensors), dict(captured.facts))

    def _casts_back(self, captured: Captured, last: int) -> list[int]:
        """Return the Cast behind a group that restores the type of its input."""
        graph = self.graph
        output = graph.ops[last].outputs[0]
        entering = (tensor for tensor in captured.tensors.values() if self._stored_behind(tensor) is None)
        types = {graph.tensors[tensor].dtype for tensor in entering}
        reader = graph.sole_consumer(output)
        if graph.tensors[output].dtype in types or reader is None or not self._is_idle(graph.ops[reader]):
            return []
        return [reader] if graph.tensors[graph.ops[reader].outputs[0]].dtype in types else []

    def _needed_outside(self, captured: Captured, last: int) -> str | None:
        graph = self.graph
        for op_id in sorted(captured.ops - {last}):
            for tensor in graph.ops[op_id].outputs:
                named = f"{graph.tensors[tensor].name!r} inside it"
                if tensor in graph.output_set:
                    return f"{named} leaves the model"
                for reader in graph.consumers[tensor]:
                    outside = graph.ops[reader]
                    if reader not in captured.ops and outside.type not in SHAPE_OPS:
                        return f"{named} is read by {_label(graph, outside)} outside it"
        entering = (tensor for tensor in captured.tensors.values() if self._stored_behind(tensor) is None)
        if any(graph.producer.get(tensor) in captured.ops for tensor in entering):
            return "one of its inputs is made inside it"
        return None

    def _partial(self, pattern: Pattern, op_id: int) -> PartialMatch | None:
        """Return a near miss for the match that got furthest, if the pattern asks to report one so far."""
        furthest = self._furthest
        if furthest is None or not pattern.is_near(frozenset(self.graph.ops[op].type for op in furthest.ops)):
            return None
        return PartialMatch(NearMiss(op_id, pattern.name, self._in_words(furthest)), furthest.ops)

    def _in_words(self, difference: _Mismatch) -> str:
        if isinstance(difference.wanted, str):
            return difference.wanted
        return f"{self._describe(difference.tensor)} stands where {_expected(difference.wanted)} was expected"

    def _describe(self, tensor: int | None) -> str:
        if tensor is None:
            return "nothing"
        stored = self._stored_behind(tensor)
        if stored is not None:
            value = self.graph.scalar(stored[0])
            return f"the stored {self.graph.tensors[stored[0]].name!r}" if value is None else f"{value:.6g}"
        op = self._op_behind(tensor)
        return f"{self.graph.tensors[tensor].name!r}" if op is None else _label(self.graph, op)

    # terms

    def _matches(self, term: Term, tensor: int | None, found: Captured) -> Iterator[Captured]:
        """Yield every way in which a tensor can match a term."""
        if isinstance(term, Anything):
            yield found
        elif tensor is None:
            self._record_mismatch(found, tensor, term)
        elif isinstance(term, Node):
            yield from self._node(term, tensor, found)
        elif isinstance(term, AnyOf):
            yield from self._any_of(term, tensor, found)
        elif isinstance(term, InputTensor):
            yield from self._input(term, tensor, found)
        elif isinstance(term, StoredTensor):
            yield from self._stored(term, tensor, found)
        else:
            yield from self._number(term, tensor, found)

    def _node(self, node: Node, tensor: int, found: Captured) -> Iterator[Captured]:
        source, passed = self._chain(tensor)[0]
        made_by = self.graph.producer.get(source)
        op = None if made_by is None else self.graph.ops[made_by]
        if made_by is None or op is None or not _fits(node, op):
            self._record_mismatch(found, tensor, node)
            return
        inside = found.inside(passed | {made_by})
        for operands in _orders(node, op):
            if operands and not self._may_be(*operands[0]):
                self._record_mismatch(inside, operands[0][1], operands[0][0])
                continue
            for captured in self._all(operands, inside):
                done = node.where(self.graph, made_by, source, captured) if node.where else captured
                if isinstance(done, str):
                    self._record_mismatch(captured, source, done)
                else:
                    yield done

    def _may_be(self, term: Term, tensor: int | None) -> bool:
        """Return whether the op behind a tensor can match the term at all: a cheap test that most operands fail."""
        if tensor is None or not isinstance(term, Node | AnyOf) or not term.types:
            return True
        op = self._op_behind(tensor)
        return op is not None and op.type in term.types

    def _all(self, pairs: Sequence[tuple[Term, int | None]], found: Captured) -> Iterator[Captured]:
        if not pairs:
            yield found
            return
        (term, tensor), *others = pairs
        for captured in self._matches(term, tensor, found):
            yield from self._all(others, captured)

    def _any_of(self, term: AnyOf, tensor: int, found: Captured) -> Iterator[Captured]:
        op = self._op_behind(tensor)
        choices = term.made_by("" if op is None else op.type)
        for choice in choices:
            yield from self._matches(choice, tensor, found)
        if not choices:
            self._record_mismatch(found, tensor, term)

    def _input(self, term: InputTensor, tensor: int, found: Captured) -> Iterator[Captured]:
        known = found.tensors.get(term.name)
        behind = self._stored_behind(tensor)
        if behind is not None:
            # ops on constants alone are no near miss
            if term.stored is not None:
                yield from self._stored(StoredTensor(term.name, term.stored, term.test), tensor, found)
            return
        fits = False
        # float32 first: the quantized tensor is the float32 one, before or behind a Cast to another type
        chain = sorted(self._chain(tensor), key=lambda step: self.graph.tensors[step[0]].dtype != "float32")
        for source, passed in chain:
            if known is None or known == source:
                reason = term.test(self.graph, source) if term.test else None
                if reason is not None:
                    self._record_mismatch(found, tensor, reason)
                    return
                fits = True
                yield found.inside(passed).naming(term.name, source)
        if not fits:
            self._record_mismatch(found, tensor, term)

    def _stored(self, term: StoredTensor, tensor: int, found: Captured) -> Iterator[Captured]:
        behind = self._stored_behind(tensor)
        known = found.tensors.get(term.name)
        if behind is None or not self.graph.tensors[behind[0]].is_float or known not in (None, tensor):
            self._record_mismatch(found, tensor, term)
            return
        reason = term.test(self.graph, tensor) if term.test else None
        if reason is not None:
            self._record_mismatch(found, tensor, reason)
            return
        yield found.inside(behind[1]).naming(term.name, tensor).giving(behind[0], term.role)

    def _number(self, term: Number, tensor: int, found: Captured) -> Iterator[Captured]:
        behind = self._stored_behind(tensor)
        value = None if behind is None else self.graph.scalar(behind[0])
        if behind is None or value is None or not term.low <= value <= term.high:
            self._record_mismatch(found, tensor, term)
            return
        found = found.inside(behind[1])
        known = behind[0] in found.roles or not self.graph.tensors[behind[0]].is_float
        yield found if known else found.giving(behind[0], "statistic")

    def _record_mismatch(self, found: Captured, tensor: int | None, wanted: Term | str) -> None:
        if self._furthest is None or len(found.ops) > len(self._furthest.ops):
            self._furthest = _Mismatch(found.ops, tensor, wanted)

    # the sources of a tensor

    def _chain(self, tensor: int) -> list[tuple[int, frozenset[int]]]:
        """Return the sources of a tensor through casts and identities, furthest first, each with the ops between."""
        known = self._behind.get(tensor)
        if known is None:
            known, passed, current = [(tensor, frozenset[int]())], frozenset[int](), tensor
            while len(known) <= _PASSED:
                op = self.graph.maker(current)
                source = op.inputs[0] if op is not None and self._is_idle(op) else None
                if source is None:
                    break
                passed = passed | {self.graph.producer[current]}
                current = source
                known.insert(0, (current, passed))
            self._behind[tensor] = known
        return known

    def _op_behind(self, tensor: int) -> Op | None:
        """Return the op that computes a tensor, behind casts and identities."""
        return self.graph.maker(self._chain(tensor)[0][0])

    def _is_idle(self, op: Op) -> bool:
        """Return whether an op computes nothing: an Identity, or a Cast between floating-point types."""
        if op.type not in ("Cast", "Identity") or not op.inputs or op.inputs[0] is None:
            return False
        return all(self.graph.tensors[t].is_float for t in (op.inputs[0], *op.outputs))

    def _stored_behind(self, tensor: int) -> tuple[int, frozenset[int]] | None:
        """Return the stored tensor that a tensor is a form of, and the ops between that nothing else reads."""
        graph = self.graph
        result = graph.origin(tensor)
        if result is None:
            return None
        root, between = result
        own = (op for op in between if graph.sole_consumer(graph.ops[op].outputs[0]) is not None)
        return root, frozenset(op for op in own if graph.ops[op].type not in ("Identity", "Transpose"))


def _fits(node: Node, op: Op) -> bool:
    return op.type in node.types and op.domain in ("", "ai.onnx") and len(op.inputs) >= len(node.operands)


def _orders(node: Node, op: Op) -> list[list[tuple[Term, int | None]]]:
    """Return the operands paired with the op's inputs, in every order that the inputs may have."""
    orders = [[(node.operands[i], op.inputs[i]) for i in node.order]]
    if op.type in COMMUTATIVE and len(node.operands) == 2 == len(op.inputs) and op.inputs[0] != op.inputs[1]:
        orders.append([(node.operands[i], op.inputs[1 - i]) for i in node.order])
    return orders


def _expected(term: Term) -> str:
    if isinstance(term, Number):
        return term.says
    if isinstance(term, InputTensor):
        return f"the input {term.name!r}"
    if isinstance(term, StoredTensor):
        return f"the stored {term.name!r}"
    types = sorted(heads(term))
    return " or ".join(types) if 0 < len(types) <= _NAMED else "another op"


def _label(graph: Graph, op: Op) -> str:
    named = op.name or graph.tensors[op.outputs[0]].name
    return f"{op.type} {named!r}" if named else op.type
