"""The language of patterns: terms that describe how a tensor is computed, read backward from the output of a group."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from qsdk.core.graph.graph import Graph
from qsdk.core.numerics.spec import Role


@dataclass(frozen=True)
class Captured:
    """The state of a match so far.

    Attributes:
        tensors: name -> tensor id, of inputs and stored tensors.
        facts: name -> a fact noted by a `where`, such as the axes of a mean.
        ops: ids of the ops inside.
        roles: stored tensor (root id) -> its role.
    """

    tensors: Mapping[str, int] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    ops: frozenset[int] = frozenset()
    roles: Mapping[int, Role] = field(default_factory=dict)

    def noting(self, name: str, fact: Any) -> "Captured":
        """Return a copy with one more fact."""
        return Captured(self.tensors, {**self.facts, name: fact}, self.ops, self.roles)

    def inside(self, ops: frozenset[int]) -> "Captured":
        """Return a copy with more ops inside."""
        return Captured(self.tensors, self.facts, self.ops | ops, self.roles) if ops else self

    def naming(self, name: str, tensor: int) -> "Captured":
        """Return a copy with a tensor under a name."""
        return Captured({**self.tensors, name: tensor}, self.facts, self.ops, self.roles)

    def giving(self, root: int, role: Role) -> "Captured":
        """Return a copy in which a stored tensor has a role."""
        return Captured(self.tensors, self.facts, self.ops, {**self.roles, root: role})


#: (graph, op id, its output, captured so far) -> captured, or why the op does not fit
Where = Callable[[Graph, int, int, Captured], "Captured | str"]


@dataclass(frozen=True, eq=False)
class InputTensor:
    """A tensor that enters the group; the same name means the same tensor.

    Attributes:
        name: of the captured tensor.
        stored: its role if it is a stored tensor; None: it must be computed.
        test: returns why a tensor does not fit, or None.
    """

    name: str
    stored: Role | None = None
    test: Callable[[Graph, int], str | None] | None = None


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A stored floating-point tensor, matched through reshapes and casts."""

    name: str
    role: Role = "constant"
    test: Callable[[Graph, int], str | None] | None = None


@dataclass(frozen=True, eq=False)
class Number:
    """A one-element constant between `low` and `high`, inclusive; `says` names it in a near miss."""

    low: float
    high: float
    says: str


@dataclass(frozen=True, eq=False)
class Anything:
    """Any tensor that the group reads and does not describe (a mask, a shape)."""


@dataclass(frozen=True, eq=False)
class Node:
    """An op of one of the types, over operands; further inputs of the op are free."""

    types: frozenset[str]
    operands: tuple["Term", ...]
    where: Where | None = None

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Return the operands in matching order: ops first, since they fail soonest, numbers last."""
        ranks = [2 if isinstance(t, Number) else 0 if heads(t) else 1 for t in self.operands]
        return tuple(sorted(range(len(ranks)), key=ranks.__getitem__))


@dataclass(frozen=True, eq=False)
class AnyOf:
    """The first matching one of several spellings."""

    choices: tuple["Term", ...]

    @cached_property
    def flat(self) -> tuple["Term", ...]:
        """Return the choices, with nested ones in their place."""
        parts = (choice.flat if isinstance(choice, AnyOf) else (choice,) for choice in self.choices)
        return tuple(part for nested in parts for part in nested)

    @cached_property
    def types(self) -> frozenset[str]:
        """Return the op types that can compute it; none if a choice is no op."""
        plain = all(isinstance(choice, Node) for choice in self.flat)
        return heads(self) if plain else frozenset()

    def made_by(self, type: str) -> tuple["Term", ...]:
        """Return the choices that an op of this type can match."""
        known = self._made_by.get(type)
        if known is None:
            known = tuple(t for t in self.flat if not isinstance(t, Node) or type in t.types)
            self._made_by[type] = known
        return known

    @cached_property
    def _made_by(self) -> dict[str, tuple["Term", ...]]:
        return {}


Term = InputTensor | StoredTensor | Number | Anything | Node | AnyOf


def term(value: Term | str | float) -> Term:
    """Return a term: an input for a string, a number to 1e-3 of its size, or the term itself."""
    if isinstance(value, str):
        return InputTensor(value)
    if isinstance(value, int | float):
        slack = 1e-3 * abs(value)
        return Number(value - slack, value + slack, f"{value:.6g}")
    return value


def op(types: str, *operands: Term | str | float, where: Where | None = None) -> Node:
    """Return an op of the default domain; `types` may name several, as in `"Relu|Clip"`.

    Two operands of Add, Mul, Max, Min and Sum match in either order. Casts between floating-point types and Identity
    are skipped everywhere and never named.
    """
    return Node(frozenset(types.split("|")), tuple(term(value) for value in operands), where)


def any_of(*choices: Term | str | float) -> AnyOf:
    """Return several spellings of one thing, the preferred one first."""
    return AnyOf(tuple(term(choice) for choice in choices))


def amiss(node: Node, reason: str) -> Node:
    """Return a term for a common mistake: a match that contains it is a near miss, for this reason."""

    def noting(graph: Graph, op_id: int, tensor: int, found: Captured) -> Captured | str:
        captured = node.where(graph, op_id, tensor, found) if node.where else found
        return captured if isinstance(captured, str) else captured.noting("amiss", reason)

    return Node(node.types, node.operands, noting)


def stored(name: str, role: Role = "constant") -> StoredTensor:
    """Return a stored tensor: `constant` is quantized like a weight, `statistic` stays float."""
    return StoredTensor(name, role)


def number(low: float, high: float, says: str) -> Number:
    """Return a constant between two bounds; `says` completes "... stands where <says> was expected"."""
    return Number(low, high, says)


def product(*factors: Term | str | float) -> Term:
    """Return a product in any order and association."""
    terms = [term(factor) for factor in factors]
    if len(terms) == 1:
        return terms[0]
    spellings = []
    # every way to split the factors in two; the first one stays left, since Mul commutes
    for chosen in range(2 ** (len(terms) - 1) - 1):
        left = [terms[0]] + [t for bit, t in enumerate(terms[1:]) if chosen >> bit & 1]
        right = [t for t in terms if t not in left]
        spellings.append(op("Mul", product(*left), product(*right)))
    return any_of(*spellings)


@dataclass(frozen=True, eq=False)
class Pattern:
    """A supergroup to look for.

    The output is the last tensor of the group. Captured inputs stay outside and are quantized there, stored tensors are
    quantized by their role, and everything between stays float. `QuantConfig.pattern` adds one to a config.

    >>> relative = op("Div", "x", op("Add", op("Abs", "x"), 1.0))
    >>> softsign = Pattern("Softsign", relative)
    >>> snake = Pattern("Snake", op("Add", "x", op("Mul", op("Sin", product("x", stored("alpha"))), 0.5)))

    Attributes:
        name: of the group.
        output: how the group's output is computed.
        check: returns why a match of the structure is no such group, or None.
        named: returns the name of a match, where one structure serves several.
        near: ops, as in `op`, that make a partial match worth reporting. Without any, a near miss is only a whole match
            that `check`, another reader or a graph output forbids.
    """

    name: str
    output: Term
    check: Callable[[Graph, Captured], str | None] | None = None
    named: Callable[[Graph, Captured], str] | None = None
    near: tuple[str, ...] = ()

    def is_near(self, types: frozenset[str]) -> bool:
        """Return whether a partial match with ops of these types is worth reporting."""
        return bool(self.near) and all(types.intersection(wanted.split("|")) for wanted in self.near)

    @cached_property
    def anchors(self) -> frozenset[str]:
        """Return the op types that can compute the group's output."""
        return heads(self.output)


def heads(pattern: Term) -> frozenset[str]:
    """Return the op types that a term can start with; none for a term that is no op."""
    if isinstance(pattern, Node):
        return pattern.types
    if isinstance(pattern, AnyOf):
        return frozenset().union(*(heads(choice) for choice in pattern.flat))
    return frozenset()


def possible(pattern: Term, types: frozenset[str]) -> bool:
    """Return whether a graph with only these op types can hold a match."""
    if isinstance(pattern, Node):
        return bool(pattern.types & types) and all(possible(operand, types) for operand in pattern.operands)
    if isinstance(pattern, AnyOf):
        return any(possible(choice, types) for choice in pattern.flat)
    return True
