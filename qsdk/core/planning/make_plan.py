"""Planning: which spec each site gets and why.

A pure function of the graph and the config; no tensor is left undecided.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from qsdk.core.config.config import QuantConfig
from qsdk.core.config.rules import Place, Rule
from qsdk.core.errors import ConfigError
from qsdk.core.graph.graph import Graph
from qsdk.core.graph.op_facts import RECURRENT
from qsdk.core.numerics.dtypes import BlockFormat, DType
from qsdk.core.numerics.spec import PerBlock, Spec, float_spec
from qsdk.core.planning.activations import plan_activations
from qsdk.core.planning.context import PlanningContext
from qsdk.core.planning.hardware import constrain_matmuls, constrain_norms, has_one_table, only_kernels
from qsdk.core.planning.islands import with_islands
from qsdk.core.planning.plan import WHOLE, Decision, Plan
from qsdk.core.planning.stored import plan_stored, stands_for, with_look_ups
from qsdk.core.planning.turning import with_turning
from qsdk.core.site import nearest_in_words, nearest_owners, owner_of

_WITHOUT_BLOCKS = 32
_LENGTHS = frozenset({16, 32, 64, 128, 256})  # those that the kernel has
_BYTES = frozenset({"int8", "uint8"})  # in which the kernel of LSTM reads weights
_OF_LAYERS = "each of its layers rounds it to uint8; what else reads it has its values"
_LEAST_BITS = 3  # weights of 2 bits have kernels for some lengths alone


#: types that files for onnxruntime-genai turn into the first
_FLOATS = ("float32", "bfloat16", "float16")


def with_int8_inputs(
    context: PlanningContext, activations: Mapping[int, Decision], stored: Mapping[int, Decision]
) -> dict[int, Decision]:
    """Return the decisions on stored tensors, in which those of layers that compute in int8 have an input block."""
    result, types = dict(stored), _FLOATS if has_one_table(context.config) else _FLOATS[:1]
    for tensor, readers in context.readers_by_site.items():
        inputs = [context.graph.ops[op].inputs[0] for op, operand in readers if context.is_linear(op, operand)]
        wanted = {context.resolver.at(context.stored_place(op, tensor)).wanted.compute for op, _ in readers}
        alone = tensor in stored and len(inputs) == len(readers) and wanted == {"int8"}
        block = input_block(stored[tensor], types) if alone else None
        if block is not None and all(t is not None and _is_float(context.graph, activations, t, types) for t in inputs):
            result[tensor] = replace(stored[tensor], input_block=block)
    for index, op in enumerate(context.graph.ops):
        if op.type == "LSTM" and _rounds_states(context, index, activations, stored):
            root = context.operands[index][1].root
            result[root] = replace(stored[root], input_block=WHOLE)
    return result


def with_rounding_layers(
    context: PlanningContext, activations: Mapping[int, Decision], stored: Mapping[int, Decision]
) -> tuple[dict[int, Decision], dict[int, Decision]]:
    """Return both kinds of decisions, in which layers round what others read as well: a residual sum has its values.

    For ONNX Runtime's kernels alone, and for ranges found while the model runs: as its own tool puts them in front of
    each layer, and no node of the file gives back what the layers have rounded.
    """
    floats, blocks = dict(activations), dict(stored)
    moved = {decision.tied_to for decision in activations.values()}
    for tensor, decision in activations.items() if only_kernels(context.config) else ():
        found = decision.spec is not None and decision.spec.dynamic is True and decision.site not in moved
        roots = _weights_of_readers(context, tensor, stored) if found else None
        if roots and _is_float(context.graph, {}, tensor):
            floats[tensor] = replace(decision, spec=None, reason=_OF_LAYERS)
            blocks |= {root: replace(stored[root], input_block=WHOLE) for root in roots}
    return floats, blocks


def _weights_of_readers(context: PlanningContext, tensor: int, stored: Mapping[int, Decision]) -> list[int] | None:
    """Return the weights of 8 bits that a tensor is multiplied with; None where their layers alone read its codes."""
    graph, roots = context.graph, list[int]()
    readers = list(graph.consumers[tensor])
    for index in readers:
        op = graph.ops[index]
        if op.type not in ("MatMul", "Gemm"):
            if op.type in RECURRENT:
                return None
            continue
        root = next((o.root for o in context.operands[index] if o.role == "weight"), None)
        spec = None if root is None else stored[root].spec
        if root is None or spec is None or spec.dtype.container not in _BYTES or op.inputs[0] != tensor:
            return None
        if len(context.readers[root]) != 1 or stored[root].tied_to is not None or stored[root].input_block is not None:
            return None
        roots.append(root)
    return roots if len(roots) < len(readers) or tensor in context.outputs else None


def _rounds_states(
    context: PlanningContext, index: int, activations: Mapping[int, Decision], stored: Mapping[int, Decision]
) -> bool:
    """Return whether an LSTM computes in int8: with two stored weights of 8 bits, and an input in floats."""
    op, graph = context.graph.ops[index], context.graph
    weights = [o for o in context.operands[index] if o.tensor in op.inputs[1:3]]
    if len(weights) != 2 or op.attributes.get("layout", 0) or op.inputs[0] is None:
        return False
    for one in weights:
        spec, decision = stored[one.root].spec, stored[one.root]
        alone = one.tensor == one.root and len(context.readers[one.root]) == 1 and decision.tied_to is None
        if not alone or spec is None or spec.dtype.container not in _BYTES or decision.tensor_type != "float32":
            return False
    fed = activations.get(op.inputs[0])
    static = fed is not None and (fed.quantized or (fed.spec is not None and fed.spec.dynamic == "token"))
    wanted = context.resolver.at(context.stored_place(index, weights[1].root)).wanted.compute
    return wanted == "int8" and graph.tensors[op.inputs[0]].dtype == "float32" and not static


def input_block(decision: Decision, types: Sequence[str]) -> int | None:
    """Return the block in which the kernel of a layer with this weight rounds its input; None where there is none.

    `types` are those of tensors that will be float32 where the kernel reads them.
    """
    spec, shape = decision.spec, decision.shape
    if not _has_kernel(decision, spec, types) or spec is None or shape is None or len(shape) != 2:
        return None
    if not isinstance(spec.granularity, PerBlock):
        return _WITHOUT_BLOCKS
    return spec.granularity.size if spec.granularity.size in _LENGTHS else None


def _has_kernel(decision: Decision, spec: Spec | None, types: Sequence[str]) -> bool:
    if spec is None or not spec.dtype.is_integer or decision.tensor_type not in types:
        return False
    return _LEAST_BITS <= spec.dtype.bits <= 8


def _is_float(
    graph: Graph, activations: Mapping[int, Decision], tensor: int, types: Sequence[str] = ("float32",)
) -> bool:
    """Return whether a tensor is a matrix of a float type, or a stack of them, that is read as it is."""
    decision, facts = activations.get(tensor), graph.tensors[tensor]
    shape = facts.shape
    quantized = decision is not None and (decision.spec is not None or decision.tied_to is not None)
    return facts.dtype in types and not quantized and shape is not None and len(shape) > 1 and not facts.constant


#: choices of a rule that are about stored tensors alone, and about inputs of the model alone
_OF_STORED = frozenset(
    {"weight", "bias", "per_channel", "block_size", "symmetric_weights", "two_level_scales", "compute"}
)
_OF_INPUTS = frozenset({"input"})


def make_plan(
    graph: Graph,
    config: QuantConfig,
    *,
    extra_owners: Iterable[str] = (),
    kept_float: Mapping[str, str] | None = None,
) -> Plan:
    """Decide every tensor of the graph.

    Args:
        graph: of the model, read by either side.
        config: defaults and rules.
        extra_owners: owners that rules may name although they have no site (a folded BatchNorm).
        kept_float: site -> why a calibration has left it float.
    """
    context = PlanningContext(graph, config, kept_float or {})
    _require_matches(context, tuple(extra_owners))
    wanted = plan_activations(context)
    activations = with_look_ups(context, constrain_matmuls(context, wanted))
    activations = with_turning(graph, context.groups, activations)
    stored = plan_stored(context, activations)
    _require_dtypes(context, [*wanted.values(), *stored.values()])
    stored = with_int8_inputs(context, activations, constrain_norms(context, activations, stored))
    activations, stored = with_rounding_layers(context, activations, stored)
    by_tensor = with_islands(graph, context.groups, {**activations, **stored})
    decisions, inside = {}, []
    for tensor in sorted(by_tensor):
        site = graph.tensors[tensor].site
        if site is None:
            inside.append(by_tensor[tensor])
        else:
            decisions[site] = by_tensor[tensor]
    return Plan(decisions, tuple(inside), context.groups)


def _require_matches(context: PlanningContext, extra_owners: tuple[str, ...]) -> None:
    """Raise an error for a rule that matches nothing. One without conditions may name an owner that has no place."""
    rules = context.config.rules
    if all(rule.optional for rule in rules):
        return
    matcher, sites = context.resolver.matcher, context.graph.sites
    modules = filter(None, (op.module for op in context.graph.ops))
    owners = [*dict.fromkeys([*map(owner_of, sites), *modules]), *extra_owners]
    named = frozenset[int]().union(*map(matcher.of_owner, owners), *map(matcher.of_site, sites))
    for place in context.places():
        matcher.matching(place)
    for index, rule in enumerate(rules):
        if not (rule.optional or rule.accepted) and index in matcher.matched and rule.is_specific:
            _require_effect(context, index)
        if rule.optional or index in matcher.matched or (index in named and not rule.conditional):
            continue
        if index not in named:
            what = "site" if ":" in rule.pattern else "owner"
            known = list(context.graph.sites) if ":" in rule.pattern else owners
            near = nearest_in_words(rule.pattern, known)
            raise ConfigError(f"the rule {rule} matches no {what} in the model; {near}")
        places = [place for place in context.places() if index in matcher.named(place)]
        raise ConfigError(f"the rule {rule} matches {_unmet_condition(rule, places)}")


def _require_effect(context: PlanningContext, index: int) -> None:
    """Raise an error for a rule that only makes choices of a kind that none of its places has: bits of a Relu's weight.

    A `bias=` beside layers without biases is let be: nothing is left at another precision than the rule says.
    """
    rule, found = context.config.rules[index], context.resolver.matcher
    choices = set(rule.choices)
    results = [place for place in context.results() if index in found.named(place) and rule.fits(place)]
    if choices - _OF_STORED - _OF_INPUTS and results:
        return
    if choices & _OF_INPUTS and any("Input" in place.op_types for place in results):
        return
    stored = list(context.stored())
    if choices & _OF_STORED and any(index in found.named(place) and rule.fits(place) for place in stored):
        return
    if choices <= _OF_INPUTS:
        what, remedy = "is no input of the model", "; what a layer reads is an activation of the owner that computes it"
        places = [place for place in context.results() if "Input" in place.op_types]
    elif choices <= _OF_STORED | _OF_INPUTS:
        what, remedy, places = "has only activations", "", stored
    else:
        what, remedy, places = "is a stored tensor", "", list(context.results())
    holders = list(dict.fromkeys(owner_of(site) for place in places for site in place.sites if site))
    near = nearest_owners(rule.pattern.partition(":")[0], holders) or holders[:3]
    others = f"owners that have one are: {', '.join(near)}" if near else "nothing in the model has one"
    raise ConfigError(f"the rule {rule} reaches nothing: what matches {what}; {others}{remedy}")


def _require_dtypes(context: PlanningContext, decisions: Iterable[Decision]) -> None:
    """Raise an error for a rule that leaves all that it decides at other dtypes: a divisor that stays float.

    A rule of which another one, or a calibration, decides some part is let be; what a chip needs instead comes later.
    """
    rules, matcher = context.config.rules, context.resolver.matcher
    judged = {
        index: rule for index, rule in enumerate(rules) if rule.is_specific and not (rule.optional or rule.accepted)
    }
    by_site = {decision.site: decision for decision in decisions}
    # a shared parameter under its second name: the rule is for the copy that `rotate` may make of it
    graph = context.graph
    copies = {site for site, tensor in graph.sites.items() if graph.constant_root(tensor) not in (None, tensor)}
    matched: dict[int, dict[str, Decision]] = {index: {} for index in judged}
    for place in context.places() if judged else ():
        known = {site: by_site[site] for site in place.sites if site in by_site}
        for index in matched.keys() & set(matcher.matching(place)):
            matched[index] |= known
    for index, rule in judged.items():
        found = [decision for site, decision in matched[index].items() if site not in copies]
        refused = without_effect(rule, found) if {d.rule for d in found} <= {"default", str(rule)} else None
        if refused is not None:
            raise ConfigError(f"the rule {rule} has no effect: {stays(refused)}; leave the rule out")


def without_effect(rule: Rule, decisions: Iterable[Decision]) -> Decision | None:
    """Return the first of the decisions that should have one of a rule's dtypes, if none of them has it."""
    wanted = [(decision, dtype) for decision in decisions if (dtype := _wanted(rule, decision)) is not None]
    return None if any(_has(*pair) for pair in wanted) else next((decision for decision, _ in wanted), None)


def stays(decision: Decision) -> str:
    """Return in words at which dtype a site stays, and why."""
    dtype = decision.tensor_type if decision.spec is None else decision.spec.dtype
    return f"{decision.site} stays {dtype}: {decision.reason}"


def _wanted(rule: Rule, decision: Decision) -> DType | None:
    """Return the dtype that a rule chooses for a site."""
    chosen = {"weight": rule.weight, "bias": rule.bias, "input": rule.input, "output": rule.output}.get(decision.kind)
    if chosen is None and decision.kind not in ("weight", "bias"):
        chosen = rule.activation
    return chosen.dtype if isinstance(chosen, BlockFormat) else chosen


def _has(decision: Decision, wanted: DType) -> bool:
    """Return whether a site has a dtype, or, where a range found while the model runs decides on it, any."""
    if wanted.kind == "float":
        return decision.spec == float_spec(wanted, decision.tensor_type)
    if decision.kind == "weight" and decision.spec is not None:
        return stands_for(decision.spec.dtype, wanted)
    return (
        decision.dynamic or decision.tied_dynamically or (decision.spec is not None and decision.spec.dtype == wanted)
    )


def _unmet_condition(rule: Rule, places: list[Place]) -> str:
    """Return the condition of a rule that no place meets among those that its pattern matches."""
    if not any(rule.fits_op_type(place.op_types) for place in places):
        present = sorted({op_type for place in places for op_type in place.op_types})
        return f"no op of that type; there are: {', '.join(present)}"
    near = [p for p in places if rule.fits_op_type(p.op_types)]
    shown = "; ".join(f"{p.owners[0]}: {p.dtype} {p.shape}" for p in near[:3] if p.owners)
    return f"no tensor of that shape and dtype; the nearest are: {shown}"
