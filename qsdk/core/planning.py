"""Planning: which spec each site gets and why. A pure function of the graph and the config, total over its tensors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from qsdk.core.config import QuantConfig
from qsdk.core.dtypes import DType, int8, int32
from qsdk.core.errors import ConfigError
from qsdk.core.graph import Graph
from qsdk.core.operands import Operand, operands_of
from qsdk.core.patterns import Supergroup, find_supergroups
from qsdk.core.site import matches, nearest_owners, owner_of
from qsdk.core.spec import Granularity, Kind, PerBlock, PerChannel, PerTensor, Spec
from qsdk.core.ties import PASS_THROUGH, Classes, find_ties, keeps_grid

_FIXED_RANGES = {"Softmax": (0.0, 1.0), "Sigmoid": (0.0, 1.0), "HardSigmoid": (0.0, 1.0), "Tanh": (-1.0, 1.0)}


@dataclass(frozen=True)
class Decision:
    """What the plan says about one site.

    Attributes:
        site: its name; in parentheses where the tensor has none (inside an op, or a scalar).
        op_type: the op that makes it, or reads it if it is stored.
        kind: weight, bias, activation, input or output.
        spec: what is wanted, or None where it stays float32.
        reason: why.
        rule: the rule that decided, or "default".
        tied_to: the site whose encoding it shares, or None.
        passes_through: its values are already on the grid of `tied_to`, so quantizing again changes nothing.
        bias_of: `(input site, weight site)` whose scales multiply to a bias's scale.
        shape: of the tensor, where known.
    """

    site: str
    op_type: str
    kind: Kind
    spec: Spec | None
    reason: str
    rule: str = "default"
    tied_to: str | None = None
    passes_through: bool = False
    bias_of: tuple[str, str] | None = None
    shape: tuple[int | str | None, ...] | None = None

    @property
    def quantized(self) -> bool:
        """Whether the site has an encoding (its own, shared or derived)."""
        return self.spec is not None and self.spec.dtype.is_quantized

    @property
    def state(self) -> str:
        """`quantized`, `tied` or `float`."""
        return "float" if not self.quantized else "tied" if self.tied_to else "quantized"

    @property
    def encoding_site(self) -> str:
        """The site that owns the encoding."""
        return self.tied_to or self.site


@dataclass(frozen=True)
class Plan:
    """Site -> decision, in graph order; `inside` holds the tensors that have no site."""

    decisions: Mapping[str, Decision]
    inside: tuple[Decision, ...] = ()

    def calibrated_sites(self) -> list[str]:
        """The sites whose activation ranges must be observed."""
        return [d.site for d in self.decisions.values() if d.quantized and d.kind not in ("weight", "bias")]


def make_plan(graph: Graph, config: QuantConfig, *, extra_owners: Iterable[str] = ()) -> Plan:
    """Decide every tensor of the graph.

    Args:
        graph: read by either door.
        config: defaults and rules.
        extra_owners: owners that rules may name although they have no site (a folded BatchNorm).

    Raises:
        ConfigError: a rule matches no owner.
    """
    _require_matches(graph, config, extra_owners)
    planner = _Planner(graph, config)
    activations = planner.activations()
    tied = planner.tie(activations)
    stored = planner.stored(tied)
    by_tensor = {**tied, **stored}
    sited = {graph.tensors[t].site: by_tensor[t] for t in range(len(graph.tensors)) if t in by_tensor}
    decisions = {site: decision for site, decision in sited.items() if site is not None}
    inside = [by_tensor[t] for t in sorted(by_tensor) if graph.tensors[t].site is None]
    return Plan(decisions, tuple(inside))


def _require_matches(graph: Graph, config: QuantConfig, extra_owners: Iterable[str]) -> None:
    owners = [owner_of(site) for site in graph.sites]
    known = [*owners, *extra_owners]
    for rule in config.rules:
        if not any(matches(rule.pattern, owner) for owner in known):
            near = ", ".join(nearest_owners(rule.pattern, known))
            raise ConfigError(f"the rule {rule} matches no owner in the model; the nearest are: {near}")


class _Planner:
    """The facts that the three steps of `make_plan` share."""

    def __init__(self, graph: Graph, config: QuantConfig) -> None:
        self.graph, self.config = graph, config
        self.groups: Mapping[int, Supergroup] = find_supergroups(graph)
        self.operands = {index: operands_of(graph, index) for index in range(len(graph.ops))}

    def owners(self, op: int) -> list[str]:
        """The owners a rule may use for an op's result: those of its whole group, outputs and stored operands."""
        return self._owners(self.groups[op].ops if op in self.groups else (op,))

    def owners_of_stored(self, op: int) -> list[str]:
        """The owners a rule may use for what an op stores: its own, so that skipping a Relu leaves its Conv alone."""
        return self._owners((op,))

    def _owners(self, members: Iterable[int]) -> list[str]:
        members = tuple(members)
        tensors = [t for member in members for t in self.graph.ops[member].outputs]
        tensors += [operand.root for member in members for operand in self.operands[member]]
        sites = [self.graph.tensors[t].site for t in tensors]
        return list(dict.fromkeys(owner_of(site) for site in sites if site is not None))

    def activations(self) -> dict[int, Decision]:
        """Decide graph inputs and op outputs, before ties."""
        found = {}
        for tensor in self.graph.inputs:
            if self.graph.tensors[tensor].is_float:
                found[tensor] = self._activation(tensor, "Input", [owner_of(self.graph.tensors[tensor].site or "")])
        for index, op in enumerate(self.graph.ops):
            for tensor in op.outputs:
                stored = self.graph.constant_root(tensor) is not None
                if self.graph.tensors[tensor].is_float and not stored:
                    found[tensor] = self._activation(tensor, op.type, self.owners(index), index)
        return found

    def _activation(self, tensor: int, op_type: str, owners: list[str], op: int | None = None) -> Decision:
        facts = self.graph.tensors[tensor]
        kind: Kind = "activation"
        if tensor in self.graph.inputs:
            kind = "input"
        elif tensor in self.graph.outputs:
            kind = "output"
        bare = Decision(facts.site or f"({facts.name})", op_type, kind, None, "", shape=facts.shape)
        group = self.groups.get(op) if op is not None else None
        if group is not None and group.ops[-1] != op:
            return replace(bare, reason=f"inside {group.name}")
        if facts.site is None and kind == "input":
            read = self.graph.consumers[tensor] or tensor in self.graph.outputs
            return replace(bare, reason="an input in a container that has no sites" if read else "no op reads it")
        if facts.site is None:
            return replace(bare, reason="inside a module or function whose output is the site")
        choice, rule = self.config.for_owners(*owners)
        dtype = choice.activation
        if not dtype.is_quantized:
            return replace(bare, spec=_float_spec(dtype), reason=f"kept {dtype} by a rule", rule=rule)
        symmetric = choice.symmetric_activations or dtype.kind == "minifloat"
        spec = Spec(dtype, PerTensor(), symmetric, choice.power_of_two, _FIXED_RANGES.get(op_type))
        reason = group.name if group is not None else op_type
        return replace(bare, spec=spec, reason=reason, rule=rule)

    def tie(self, activations: Mapping[int, Decision]) -> dict[int, Decision]:
        """Point every member of a tie class at its first site."""
        loose = {t: replace(d.spec, fixed_range=None) for t, d in activations.items() if d.quantized and d.spec}
        classes = find_ties(self.graph, loose)
        through = {tensor for tensor in loose if self._passes_through(tensor, classes)}
        ranges: dict[int, set[tuple[float, float] | None]] = {}
        for tensor in loose:
            spec = activations[tensor].spec
            if tensor not in through and spec is not None:
                ranges.setdefault(classes.find(tensor), set()).add(spec.fixed_range)
        found = dict(activations)
        for tensor in loose:
            first = classes.find(tensor)
            home, fixed = activations[first], ranges.get(first, {None})
            # a fixed range holds for a class only if all that enters it lives there
            shared = replace(loose[first], fixed_range=next(iter(fixed)) if len(fixed) == 1 else None)
            found[tensor] = replace(activations[tensor], spec=shared)
            if first != tensor:
                reason = f"shares the encoding of {home.site}"
                passes = tensor in through
                found[tensor] = replace(found[tensor], tied_to=home.site, passes_through=passes, reason=reason)
        return found

    def _passes_through(self, tensor: int, classes: Classes) -> bool:
        """Whether every value of a tensor comes from tensors of its own class."""
        made_by = self.graph.producer.get(tensor)
        if made_by is None or not keeps_grid(self.graph, self.graph.ops[made_by]):
            return False
        op = self.graph.ops[made_by]
        data = op.inputs if op.type == "Concat" else op.inputs[:1]
        return all(classes.find(t) == classes.find(tensor) for t in data if t is not None)

    def stored(self, activations: Mapping[int, Decision]) -> dict[int, Decision]:
        """Decide weights, biases and other stored tensors."""
        found: dict[int, Decision] = {}
        for index in range(len(self.graph.ops)):
            # weights before biases: a bias needs its weight's decision
            for operand in sorted(self.operands[index], key=lambda o: o.role == "bias"):
                if operand.root not in found:
                    found[operand.root] = self._stored(index, operand, activations, found)
                self._alias(operand, found)
        self._rest(activations, found)
        return found

    def _rest(self, activations: Mapping[int, Decision], found: dict[int, Decision]) -> None:
        """State why the other stored tensors stay float: bounds, exponents, views, and what nothing reads."""
        for tensor, facts in enumerate(self.graph.tensors):
            if not facts.is_float or tensor in activations or tensor in found:
                continue
            readers = [self.graph.ops[op].type for op in self.graph.consumers[tensor]]
            reason = f"a parameter of {readers[0]} that has no integer form of its own" if readers else "no op reads it"
            if readers and readers[0] in PASS_THROUGH:
                reason = f"{readers[0]} hands it on to a site"
            root = self.graph.constant_root(tensor)
            if root is not None and root != tensor:
                reason = f"a view of {self.graph.tensors[root].site or self.graph.tensors[root].name}"
            op_type = readers[0] if readers else "Constant"
            site = facts.site or f"({facts.name})"
            found[tensor] = Decision(site, op_type, "weight", None, reason, shape=facts.shape)

    def _alias(self, operand: Operand, found: dict[int, Decision]) -> None:
        """A site that reads a stored tensor through Identity (a shared weight) is tied to it."""
        current, home = operand.tensor, found[operand.root]
        while current != operand.root:
            op = self.graph.ops[self.graph.producer[current]]
            site = self.graph.tensors[current].site
            if op.type == "Identity" and site is not None:
                tie = home.site if home.quantized else None
                reason = f"the same parameter as {home.site}"
                found[current] = replace(home, site=site, tied_to=tie, passes_through=False, reason=reason)
            source = op.inputs[0]
            assert source is not None
            current = source

    def _stored(
        self, op: int, operand: Operand, activations: Mapping[int, Decision], found: Mapping[int, Decision]
    ) -> Decision:
        facts = self.graph.tensors[operand.root]
        op_type = self.graph.ops[op].type
        kind: Kind = "bias" if operand.role == "bias" else "weight"
        bare = Decision(facts.site or f"({facts.name})", op_type, kind, None, "", shape=facts.shape)
        if operand.role == "statistic":
            return replace(bare, reason=f"a parameter of {op_type} that has no integer form of its own")
        if facts.site is None:
            scalar = not any(n != 1 for n in facts.shape or ())
            return replace(bare, reason="a scalar constant" if scalar else "a stored tensor that no quantizer reads")
        choice, rule = self.config.for_owners(*self.owners_of_stored(op))
        bare = replace(bare, rule=rule)
        if operand.role == "bias":
            return self._bias(op, bare, choice, activations, found)
        dtype = choice.weight
        if not dtype.is_quantized:
            return replace(bare, spec=_float_spec(dtype), reason=f"kept {dtype} by a rule")
        if operand.role != "weight" and dtype.bits < 8 and not self._weight_is_named(op):
            dtype = int8
        granularity = _weight_granularity(operand, choice, facts.shape)
        symmetric = dtype.signed or dtype.kind == "minifloat"
        spec = Spec(dtype, granularity, symmetric, choice.power_of_two)
        return replace(bare, spec=spec, reason=operand.role)

    def _weight_is_named(self, op: int) -> bool:
        """Whether a rule asks for a weight dtype here by more than a bare `*`."""
        rules = tuple(rule for rule in self.config.rules if rule.weight is not None)
        named = replace(self.config, rules=rules)
        return any(named.names(owner) for owner in self.owners_of_stored(op))

    def _bias(
        self,
        op: int,
        bare: Decision,
        choice: QuantConfig,
        activations: Mapping[int, Decision],
        found: Mapping[int, Decision],
    ) -> Decision:
        if choice.bias.kind == "float":
            return replace(bare, spec=_float_spec(choice.bias), reason=f"kept {choice.bias} by a rule")
        head = self.groups[op].ops[0] if op in self.groups else op
        source = self.graph.ops[head].inputs[0]
        weight = next((o.root for o in self.operands[head] if o.role == "weight"), None)
        fed = activations.get(source) if source is not None else None
        held = found.get(weight) if weight is not None else None
        for name, decision in (("input", fed), ("weight", held)):
            if decision is None or decision.spec is None or not _narrow_integer(decision.spec.dtype):
                return replace(bare, reason=f"its {name} is not an integer of 8 bits or fewer")
        assert fed is not None
        assert held is not None
        assert held.spec is not None
        if isinstance(held.spec.granularity, PerBlock):
            return replace(bare, reason="its weight has one scale per block, so no one scale fits an accumulator")
        per_channel = isinstance(held.spec.granularity, PerChannel)
        if per_channel and held.op_type == "ConvTranspose" and self.graph.ops[head].attributes.get("group", 1) != 1:
            return replace(bare, reason="its weight's scales are shared by groups, so they do not count its channels")
        spec = Spec(int32, PerChannel(0) if per_channel else PerTensor())
        sites = (fed.encoding_site, held.encoding_site)
        return replace(bare, spec=spec, reason="input scale x weight scale", bias_of=sites)


def _narrow_integer(dtype: DType) -> bool:
    return dtype.is_integer and dtype.bits <= 8


def _float_spec(dtype: DType) -> Spec | None:
    return None if dtype.name == "float32" else Spec(dtype)


def _weight_granularity(
    operand: Operand, choice: QuantConfig, shape: tuple[int | str | None, ...] | None
) -> Granularity:
    axis = operand.input_axis
    if choice.block_size is not None and axis is not None and shape is not None and shape[axis] != 1:
        return PerBlock(axis, choice.block_size)
    if choice.per_channel and operand.channel_axis is not None:
        return PerChannel(operand.channel_axis)
    return PerTensor()
