"""Matching one pattern at one op, backward from the op's output, and saying why it does not match."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from qsdk.core.graph.graph import Graph, Op
from qsdk.core.patterns.supergroup import NearMiss, Supergroup
from qsdk.core.patterns.terms import (
    COMMUTATIVE,
    AnyOf,
    Anything,
    Captured,
    Input,
    Node,
    Number,
    Pattern,
    Stored,
    Term,
    heads,
)

_READ_NO_VALUES = frozenset({"Shape", "Size"})
_PASSED = 8  # casts and identities in a row that are looked through
_NAMED = 4  # op types that a near miss lists
_MATCHES = 64  # of one pattern at one op that are tried before it counts as not matching


@dataclass(frozen=True)
class Miss:
    """A near miss, and the ops that it got right."""

    said: NearMiss
    ops: frozenset[int]


@dataclass(frozen=True)
class _Difference:
    """Where a match failed: after which ops, at which tensor, and the term (or the reason) that was wanted there."""

    ops: frozenset[int]
    tensor: int | None
    wanted: Term | str


class PatternMatcher:
    """Matches patterns on one graph, and remembers what lies behind its casts and reshapes."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._behind: dict[int, list[tuple[int, frozenset[int]]]] = {}
        self._furthest: _Difference | None = None

    def at(self, pattern: Pattern, op_id: int) -> Supergroup | Miss | None:
        """Return the group that ends in this op, a near miss, or None.

        The first match that may be a group is taken; a match whose inner tensors are needed outside is none.
        """
        tensor = self.graph.ops[op_id].outputs[0]
        self._furthest = None
        refused: Miss | None = None
        for captured in islice(self._matches(pattern.output, tensor, Captured()), _MATCHES):
            reason = captured.facts.get("amiss") or (pattern.check and pattern.check(self.graph, captured))
            reason = reason or self._needed_outside(captured, op_id)
            if reason is None:
                return self._group(pattern, captured, op_id)
            refused = refused or self._miss(pattern, op_id, captured.ops, reason)
        return refused or self._partial(pattern, op_id)

    def _group(self, pattern: Pattern, captured: Captured, last: int) -> Supergroup:
        name = pattern.named(self.graph, captured) if pattern.named else pattern.name
        ops = (*sorted(captured.ops), *self._casts_back(captured, last))
        return Supergroup(ops, name, dict(captured.roles), dict(captured.tensors), dict(captured.facts))

    def _casts_back(self, captured: Captured, last: int) -> list[int]:
        """Return the Cast behind a group that gives its output the type of its input again."""
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
                    if reader not in captured.ops and outside.type not in _READ_NO_VALUES:
                        return f"{named} is read by {_label(graph, outside)} outside it"
        entering = (tensor for tensor in captured.tensors.values() if self._stored_behind(tensor) is None)
        if any(graph.producer.get(tensor) in captured.ops for tensor in entering):
            return "one of its inputs is made inside it"
        return None

    def _miss(self, pattern: Pattern, op_id: int, ops: frozenset[int], reason: str) -> Miss:
        return Miss(NearMiss(op_id, pattern.name, reason), ops)

    def _partial(self, pattern: Pattern, op_id: int) -> Miss | None:
        """Return a near miss for the match that got furthest, if it got as far as the pattern wants reported."""
        furthest = self._furthest
        if furthest is None or not pattern.is_near(frozenset(self.graph.ops[op].type for op in furthest.ops)):
            return None
        return self._miss(pattern, op_id, furthest.ops, self._in_words(furthest))

    def _in_words(self, difference: _Difference) -> str:
        if isinstance(difference.wanted, str):
            return difference.wanted
        return f"{self._described(difference.tensor)} stands where {_expected(difference.wanted)} was expected"

    def _described(self, tensor: int | None) -> str:
        if tensor is None:
            return "nothing"
        stored = self._stored_behind(tensor)
        if stored is not None:
            value = self.graph.scalar(stored[0])
            return f"the stored {self.graph.tensors[stored[0]].name!r}" if value is None else f"{value:.6g}"
        made_by = self.graph.producer.get(self._chain(tensor)[0][0])
        return (
            f"{self.graph.tensors[tensor].name!r}" if made_by is None else _label(self.graph, self.graph.ops[made_by])
        )

    # terms

    def _matches(self, term: Term, tensor: int | None, found: Captured) -> Iterator[Captured]:
        """Yield every way in which a tensor can be a term."""
        if isinstance(term, Anything):
            yield found
        elif tensor is None:
            self._differs(found, tensor, term)
        elif isinstance(term, Node):
            yield from self._node(term, tensor, found)
        elif isinstance(term, AnyOf):
            yield from self._any_of(term, tensor, found)
        elif isinstance(term, Input):
            yield from self._input(term, tensor, found)
        elif isinstance(term, Stored):
            yield from self._stored(term, tensor, found)
        else:
            yield from self._number(term, tensor, found)

    def _node(self, node: Node, tensor: int, found: Captured) -> Iterator[Captured]:
        source, passed = self._chain(tensor)[0]
        made_by = self.graph.producer.get(source)
        op = None if made_by is None else self.graph.ops[made_by]
        if made_by is None or op is None or not _fits(node, op):
            self._differs(found, tensor, node)
            return
        inside = found.inside(passed | {made_by})
        for operands in _orders(node, op):
            if operands and not self._may_be(*operands[0]):
                self._differs(inside, operands[0][1], operands[0][0])
                continue
            for captured in self._all(operands, inside):
                done = node.where(self.graph, made_by, source, captured) if node.where else captured
                if isinstance(done, str):
                    self._differs(captured, source, done)
                else:
                    yield done

    def _may_be(self, term: Term, tensor: int | None) -> bool:
        """Return whether the op behind a tensor can match the term at all: a cheap test that most operands fail."""
        if tensor is None or not isinstance(term, Node | AnyOf) or not term.types:
            return True
        made_by = self.graph.producer.get(self._chain(tensor)[0][0])
        return made_by is not None and self.graph.ops[made_by].type in term.types

    def _all(self, pairs: Sequence[tuple[Term, int | None]], found: Captured) -> Iterator[Captured]:
        if not pairs:
            yield found
            return
        (term, tensor), *others = pairs
        for captured in self._matches(term, tensor, found):
            yield from self._all(others, captured)

    def _any_of(self, term: AnyOf, tensor: int, found: Captured) -> Iterator[Captured]:
        made_by = self.graph.producer.get(self._chain(tensor)[0][0])
        choices = term.made_by("" if made_by is None else self.graph.ops[made_by].type)
        for choice in choices:
            yield from self._matches(choice, tensor, found)
        if not choices:
            self._differs(found, tensor, term)

    def _input(self, term: Input, tensor: int, found: Captured) -> Iterator[Captured]:
        known = found.tensors.get(term.name)
        behind = self._stored_behind(tensor)
        if behind is not None:
            # what computes on constants alone is no near miss
            if term.stored is not None:
                yield from self._stored(Stored(term.name, term.stored, term.test), tensor, found)
            return
        fits = False
        # float32 first: what is quantized stands there, before a Cast to another type or behind it
        chain = sorted(self._chain(tensor), key=lambda step: self.graph.tensors[step[0]].dtype != "float32")
        for source, passed in chain:
            if known is None or known == source:
                reason = term.test(self.graph, source) if term.test else None
                if reason is not None:
                    self._differs(found, tensor, reason)
                    return
                fits = True
                yield found.inside(passed).naming(term.name, source)
        if not fits:
            self._differs(found, tensor, term)

    def _stored(self, term: Stored, tensor: int, found: Captured) -> Iterator[Captured]:
        behind = self._stored_behind(tensor)
        known = found.tensors.get(term.name)
        if behind is None or not self.graph.tensors[behind[0]].is_float or known not in (None, tensor):
            self._differs(found, tensor, term)
            return
        reason = term.test(self.graph, tensor) if term.test else None
        if reason is not None:
            self._differs(found, tensor, reason)
            return
        yield found.inside(behind[1]).naming(term.name, tensor).giving(behind[0], term.role)

    def _number(self, term: Number, tensor: int, found: Captured) -> Iterator[Captured]:
        behind = self._stored_behind(tensor)
        value = None if behind is None else self.graph.scalar(behind[0])
        if behind is None or value is None or not term.low <= value <= term.high:
            self._differs(found, tensor, term)
            return
        found = found.inside(behind[1])
        known = behind[0] in found.roles or not self.graph.tensors[behind[0]].is_float
        yield found if known else found.giving(behind[0], "statistic")

    def _differs(self, found: Captured, tensor: int | None, wanted: Term | str) -> None:
        if self._furthest is None or len(found.ops) > len(self._furthest.ops):
            self._furthest = _Difference(found.ops, tensor, wanted)

    # what lies behind a tensor

    def _chain(self, tensor: int) -> list[tuple[int, frozenset[int]]]:
        """What a tensor is behind casts and identities, furthest first, each with the ops in between."""
        known = self._behind.get(tensor)
        if known is None:
            known, passed, current = [(tensor, frozenset[int]())], frozenset[int](), tensor
            while len(known) <= _PASSED:
                made_by = self.graph.producer.get(current)
                if made_by is None or not self._is_idle(self.graph.ops[made_by]):
                    break
                source = self.graph.ops[made_by].inputs[0]
                assert source is not None
                current, passed = source, passed | {made_by}
                known.insert(0, (current, passed))
            self._behind[tensor] = known
        return known

    def _is_idle(self, op: Op) -> bool:
        """Return whether an op computes nothing: an Identity, or a Cast between floating-point types."""
        if op.type not in ("Cast", "Identity") or not op.inputs or op.inputs[0] is None:
            return False
        return all(self.graph.tensors[t].is_float for t in (op.inputs[0], *op.outputs))

    def _stored_behind(self, tensor: int) -> tuple[int, frozenset[int]] | None:
        """Return the stored tensor that a tensor is a form of, and the ops between that nothing else reads."""
        graph = self.graph
        found = graph.origin(tensor)
        if found is None:
            return None
        root, between = found
        own = (op for op in between if graph.sole_consumer(graph.ops[op].outputs[0]) is not None)
        return root, frozenset(op for op in own if graph.ops[op].type not in ("Identity", "Transpose"))


def _fits(node: Node, op: Op) -> bool:
    return op.type in node.types and op.domain in ("", "ai.onnx") and len(op.inputs) >= len(node.operands)


def _orders(node: Node, op: Op) -> list[list[tuple[Term, int | None]]]:
    """Return the operands beside the op's inputs, in every order that the inputs may have."""
    orders = [[(node.operands[i], op.inputs[i]) for i in node.order]]
    if op.type in COMMUTATIVE and len(node.operands) == 2 == len(op.inputs) and op.inputs[0] != op.inputs[1]:
        orders.append([(node.operands[i], op.inputs[1 - i]) for i in node.order])
    return orders


def _expected(term: Term) -> str:
    if isinstance(term, Number):
        return term.says
    if isinstance(term, Input):
        return f"the input {term.name!r}"
    if isinstance(term, Stored):
        return f"the stored {term.name!r}"
    types = sorted(heads(term))
    return " or ".join(types) if 0 < len(types) <= _NAMED else "another op"


def _label(graph: Graph, op: Op) -> str:
    named = op.name or graph.tensors[op.outputs[0]].name
    return f"{op.type} {named!r}" if named else op.type
