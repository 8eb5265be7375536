"""The facts that all steps of planning need: the graph, its supergroups and operands, the config at each place."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from qsdk.core.config.config import QuantConfig
from qsdk.core.config.rules import Place, Rule, RuleMatcher
from qsdk.core.graph.graph import Graph
from qsdk.core.numerics.dtypes import DType, float32
from qsdk.core.patterns.chains import find_chains, is_chain
from qsdk.core.patterns.experts import OF_ROUTER, chosen_tensors, routers_of
from qsdk.core.patterns.find import PATTERNS, match_supergroups
from qsdk.core.patterns.linear import SLOPES
from qsdk.core.patterns.supergroup import Supergroup
from qsdk.core.planning.operands import StoredOperand, operands_of
from qsdk.core.planning.unquantizable import becomes_integers, guarded_divisors, infinite_tensors, steering_tensors
from qsdk.core.site import owner_of


@dataclass(frozen=True)
class ResolvedConfig:
    """The config at one place.

    Attributes:
        wanted: the config with every matching rule applied; its own `rules` are still all rules of the config.
        rules: those that match, in order.
    """

    wanted: QuantConfig
    rules: tuple[Rule, ...] = ()

    def decided_by(self, *names: str) -> str:
        """Return the last rule that makes one of these choices, or "default"."""
        for rule in reversed(self.rules):
            if any(getattr(rule, name) is not None for name in names):
                return str(rule)
        return "default"

    def is_named(self, name: str) -> bool:
        """Return whether a rule with more than a bare `*` makes this choice."""
        return any(getattr(rule, name) is not None and rule.is_specific for rule in self.rules)


class Resolver:
    """The config by place; equal sets of matching rules are resolved once."""

    def __init__(self, config: QuantConfig) -> None:
        self.config = config
        self.matcher = RuleMatcher(config.rules)
        self._found: dict[tuple[int, ...], ResolvedConfig] = {(): ResolvedConfig(config)}

    def at(self, place: Place) -> ResolvedConfig:
        """Return the config at a place."""
        matching = self.matcher.matching(place)
        if matching not in self._found:
            rules = tuple(self.config.rules[index] for index in matching)
            self._found[matching] = ResolvedConfig(_applied(self.config, rules), rules)
        return self._found[matching]


def _applied(config: QuantConfig, rules: Sequence[Rule]) -> QuantConfig:
    wanted = config
    for rule in rules:
        changes = rule.choices
        if "activation" in changes:  # it covers inputs and outputs too
            changes = {"input": None, "output": None, **changes}
        wanted = replace(wanted, **changes)
    return wanted


#: the name of a supergroup -> the ONNX type of the same op, where the two differ
ONNX_NAMES = MappingProxyType(
    {
        "LayerNorm": "LayerNormalization",
        "RMSNorm": "RMSNormalization",
        "GroupNorm": "GroupNormalization",
        "SiLU": "Swish",
        "MaskedSoftmax": "Softmax",
        "GuardedSoftmax": "Softmax",
    }
)
#: dtypes that the codes of integer kernels are stored in
_BYTES = frozenset({"int8", "uint8"})

NO_ELEMENTS = "it has no elements"


class PlanningContext:
    """The facts that the steps of `make_plan` share."""

    def __init__(self, graph: Graph, config: QuantConfig, kept_float: Mapping[str, str] = MappingProxyType({})) -> None:
        self.graph, self.config = graph, config
        self.kept_float = {graph.sites[site]: reason for site, reason in kept_float.items() if site in graph.sites}
        self.resolver = Resolver(config)
        self.operands = {index: operands_of(graph, index) for index in range(len(graph.ops))}
        self.inputs, self.outputs = frozenset(graph.inputs), frozenset(graph.outputs)
        self.groups: Mapping[int, Supergroup] = {}
        wanted, names = (*config.patterns, *PATTERNS), config.supergroups
        result = match_supergroups(graph, [pattern for pattern in wanted if names is None or pattern.name in names])
        self.near_misses = {miss.op: miss for miss in result.near_misses}
        self.steers = dict(steering_tensors(graph, result.masks)) | dict.fromkeys(
            result.masks, "a mask of MaskedSoftmax: it only hides scores, and no grid serves it"
        )
        self.groups = self._wanted_groups(result.groups)
        counted = becomes_integers(graph)
        empty = {t: NO_ELEMENTS for t, facts in enumerate(graph.tensors) if facts.is_float and 0 in (facts.shape or ())}
        no_grid = {**guarded_divisors(graph), **counted, **infinite_tensors(graph), **empty}
        chosen = chosen_tensors(graph)
        experts = {**chosen, **self._of_routers()}
        self.steers |= {**self._outside_groups({**no_grid, **experts}), **self.kept_float}
        for op, group in self.groups.items():
            self.operands[op] = operands_of(graph, op, group.roles)
        for index, made in enumerate(graph.ops):
            layer = any(o.role in ("weight", "embedding", "bias") for o in self.operands[index])
            if made.outputs and all(
                t in self.steers and not (layer and (t in counted or t in chosen)) for t in made.outputs
            ):
                self.operands[index] = []  # its stored operands stay float

    @cached_property
    def readers(self) -> Mapping[int, list[tuple[int, StoredOperand]]]:
        """Return, by stored tensor, the ops that read it, each with the operand that it is there."""
        result: dict[int, list[tuple[int, StoredOperand]]] = {}
        for index, operands in self.operands.items():
            for operand in operands:
                result.setdefault(operand.root, []).append((index, operand))
        return result

    @cached_property
    def readers_by_site(self) -> Mapping[int, list[tuple[int, StoredOperand]]]:
        """Return `readers` by the tensor at whose site they read: of a shared parameter, that has one for each name."""
        result: dict[int, list[tuple[int, StoredOperand]]] = {}
        for found in self.readers.values():
            for op, operand in found:
                tensor: int | None = operand.tensor
                while tensor is not None and tensor != operand.root and self.graph.tensors[tensor].site is None:
                    tensor = self.graph.ops[self.graph.producer[tensor]].inputs[0]
                result.setdefault(operand.root if tensor is None else tensor, []).append((op, operand))
        return result

    def is_linear(self, op: int, operand: StoredOperand) -> bool:
        """Return whether an op is a linear layer that multiplies with a stored tensor."""
        node = self.graph.ops[op]
        return node.type in ("Gemm", "MatMul") and operand.role == "weight" and operand.tensor == node.inputs[1]

    @cached_property
    def linear_weights(self) -> Mapping[int, int]:
        """Return, by op id, the stored tensor that a linear layer multiplies with, where the config quantizes it.

        A table that an embedding reads as well is not one of them.
        """
        shared = {root for root, readers in self.readers.items() if any(o.role == "embedding" for _, o in readers)}
        result = {}
        for index, operands in self.operands.items():
            for one in (one for one in operands if self.is_linear(index, one) and one.root not in shared):
                weight = self.resolver.at(self.stored_place(index, one.root)).wanted.weight
                if not isinstance(weight, DType) or weight.is_quantized:
                    result[index] = one.root
        return result

    @cached_property
    def linear_reads(self) -> frozenset[int | None]:
        """Return the tensors that linear layers with a quantized weight read."""
        return frozenset(self.graph.ops[op].inputs[0] for op in self.linear_weights)

    def result_choice(self, tensor: int, op: int | None) -> ResolvedConfig:
        """Return the config that applies to an op's result, or to a graph input (`op` is None)."""
        return self.resolver.at(self.result_place(tensor, op))

    def result_place(self, tensor: int, op: int | None) -> Place:
        """Return the place of an op's result, or of a graph input (`op` is None). A supergroup is one place."""
        facts = self.graph.tensors[tensor]
        if op is None:
            site = facts.site or ""
            return Place((owner_of(site),), ("Input",), facts.dtype, facts.shape, (site,))
        members = self.groups[op].ops if op in self.groups else (op,)
        made = (self.graph.tensors[t].site for member in members for t in self.graph.ops[member].outputs)
        sites = tuple(site for site in made if site is not None) if len(members) > 1 else (facts.site or "",)
        return Place(self._owners(members), self.types_of(op), facts.dtype, facts.shape, sites)

    def stored_place(self, op: int, tensor: int) -> Place:
        """Return the place of a stored tensor.

        It has its own op only, so that skipping a Relu leaves its Conv as it is.
        """
        facts, own = self.graph.tensors[tensor], self.graph.ops[op].type
        group = self.groups.get(op)
        # the Mul inside a LayerNorm is known as part of it only by the pattern's name
        types = (own,) if group is None or tensor not in group.roles else (own, *_names(group))
        return Place(self._owners((op,)), types, facts.dtype, facts.shape, (facts.site or "",))

    def places(self) -> Iterable[Place]:
        """Yield every place of the graph, including those of ops inside a supergroup."""
        yield from self.results()
        for index, operands in self.operands.items():
            for operand in operands:
                yield self.stored_place(index, operand.root)

    def results(self) -> Iterable[Place]:
        """Yield the places of the inputs and of what ops compute."""
        for tensor in self.graph.inputs:
            yield self.result_place(tensor, None)
        for index, op in enumerate(self.graph.ops):
            for tensor in op.outputs:
                yield self.result_place(tensor, index)

    def stored(self) -> Iterable[Place]:
        """Yield the places of stored tensors, those included that stay float because of what their op computes.

        A parameter that two layers share has a place under the name of either.
        """
        for index, op in enumerate(self.graph.ops):
            roots = {operand.root for operand in self.operands[index]}  # of a PRelu or a norm also what was reshaped
            for tensor in op.inputs:
                root = self.graph.constant_root(tensor)
                if tensor is not None and root is not None:
                    roots |= {root, tensor} if self.graph.tensors[tensor].site else {root}
            for root in sorted(roots):
                if self.graph.tensors[root].is_float:
                    yield self.stored_place(index, root)

    def _of_routers(self) -> dict[int, str]:
        """Return what routers of experts compute, with the reason; not of those that a rule puts on a grid."""
        result: dict[int, str] = {}
        for head, tensors in routers_of(self.graph).items():
            stored = (self.resolver.at(self.stored_place(head, o.root)) for o in self.operands[head])
            chosen = [(choice.is_named("weight"), choice.wanted.weight) for choice in stored]
            made = self.result_choice(self.graph.ops[head].outputs[0], head)
            chosen.append((made.is_named("activation"), made.wanted.activation))
            if not any(named and (not isinstance(one, DType) or one.is_quantized) for named, one in chosen):
                result |= dict.fromkeys(tensors, OF_ROUTER)
        return result

    def _outside_groups(self, reasons: Mapping[int, str]) -> dict[int, str]:
        """Return the reasons of those tensors that are not inside a supergroup, where nothing is quantized anyway."""
        makers = {tensor: self.graph.producer.get(tensor, -1) for tensor in reasons}
        inside = {t for t, op in makers.items() if op in self.groups and self.groups[op].ops[-1] != op}
        return {tensor: reason for tensor, reason in reasons.items() if tensor not in inside | self.steers.keys()}

    def _wanted_groups(self, matched: Mapping[int, Supergroup]) -> Mapping[int, Supergroup]:
        result = dict(matched)
        if self.config.supergroups is not None:
            result = {op: group for op, group in matched.items() if not is_chain(group.name)}
            result |= find_chains(self.graph, filter(is_chain, self.config.supergroups), result)
        asked = self.config.supergroup is False or any(rule.supergroup is not None for rule in self.config.rules)
        # rules are applied to every member as if it were alone
        choices = {op: self._is_one_op(op, group) for op, group in result.items() if asked or self._is_slope(op)}
        alone = {op for op, one in choices.items() if not one}
        groups = {op: _without_last(group) if group.ops[-1] in alone else group for op, group in result.items()}
        return {op: group for op, group in groups.items() if op in group.ops and alone.isdisjoint(group.ops)}

    def _is_slope(self, op: int) -> bool:
        return self.graph.ops[op].type in SLOPES

    def _is_one_op(self, op: int, group: Supergroup) -> bool:
        """Return whether an op is quantized as one with its group: as the config says, else as ONNX Runtime runs it.

        That has an integer kernel for a Conv of 8 bits only if its own result has a pair.
        """
        wanted = self.result_choice(self.graph.ops[op].outputs[0], op).wanted
        if wanted.supergroup is not None or self.config.supergroups is not None or not self._is_slope(op):
            return wanted.supergroup is not False
        dtypes: list[object] = [float32 if wanted.dynamic_activations else wanted.activation]
        if self.graph.ops[group.ops[0]].type == "Conv":
            stored = (o.root for o in self.operands[group.ops[0]] if o.role == "weight")
            dtypes += [self.resolver.at(self.stored_place(group.ops[0], root)).wanted.weight for root in stored]
        return len(dtypes) < 2 or not all(
            isinstance(one, DType) and one.is_integer and one.container in _BYTES for one in dtypes
        )

    def types_of(self, op: int) -> tuple[str, ...]:
        """Return the op types of a result: those of the members of a chain, else the name of the supergroup."""
        group = self.groups.get(op)
        if group is None:
            return (self.graph.ops[op].type,)
        types = [self.graph.ops[member].type for member in group.ops]
        if not is_chain(group.name):
            return _names(group)
        # the Add of a linear layer is its bias, not a sum of two activations
        return tuple(t for before, t in zip(["", *types], types, strict=False) if (before, t) != ("MatMul", "Add"))

    def _owners(self, members: Iterable[int]) -> tuple[str, ...]:
        members = tuple(members)
        tensors = [t for member in members for t in self.graph.ops[member].outputs]
        tensors += [operand.root for member in members for operand in self.operands[member]]
        sites = [self.graph.tensors[t].site for t in tensors]
        modules = [self.graph.ops[member].module for member in members]  # further names, which no site has
        return tuple(dict.fromkeys([*(owner_of(site) for site in sites if site is not None), *filter(None, modules)]))


def _without_last(group: Supergroup) -> Supergroup:
    """Return a chain without its last op, or a supergroup of another kind without any op."""
    left = group.ops[:-1] if is_chain(group.name) and len(group.ops) > 2 else ()
    return Supergroup(left, group.name.rpartition("+")[0])


def _names(group: Supergroup) -> tuple[str, ...]:
    return (group.name, ONNX_NAMES[group.name]) if group.name in ONNX_NAMES else (group.name,)
