"""Planning of computed tensors: graph inputs and op outputs, and the encodings that they share."""

from collections.abc import Container, Mapping
from dataclasses import replace
from types import MappingProxyType

from qsdk.core.config.config import QuantConfig
from qsdk.core.errors import ConfigError
from qsdk.core.graph.graph import Op
from qsdk.core.numerics.dtypes import BlockFormat, DType, int8, uint8
from qsdk.core.numerics.spec import Dynamic, Granularity, Kind, PerChannel, PerTensor, Spec, float_spec, scale_digits
from qsdk.core.planning.context import PlanningContext, ResolvedConfig
from qsdk.core.planning.placement import NO_KERNEL, without_kernels
from qsdk.core.planning.plan import BY_CALIBRATION, OF_CACHE, Decision
from qsdk.core.planning.ties import (
    JOINS,
    Classes,
    find_assemblies,
    find_caches,
    find_mixed_signs,
    find_rescaled,
    find_ties,
    keeps_grid,
    moved_inputs,
)

#: ops whose values lie between fixed bounds, whatever the data
FIXED_RANGES = MappingProxyType(
    {
        **dict.fromkeys(("Softmax", "MaskedSoftmax", "GuardedSoftmax", "Sigmoid", "HardSigmoid"), (0.0, 1.0)),
        **dict.fromkeys(("Tanh", "Sin", "Cos"), (-1.0, 1.0)),
    }
)

#: the ops that may read a tensor with one scale per channel
_NORMS = frozenset({"LayerNorm", "LayerNormalization", "RMSNorm", "RMSNormalization"})
_SUMS = frozenset({"Add", "Sub"})

_ACTIVATION_CHOICES = (
    *("activation", "symmetric_activations", "dynamic_activations", "per_channel_activations", "fixed_range"),
    *("scale_bits", "tie", "supergroup"),
)


def plan_activations(context: PlanningContext) -> dict[int, Decision]:
    """Decide graph inputs and op outputs, ties included; return the decisions by tensor id."""
    graph = context.graph
    alone = without_kernels(context)
    assembled = {**alone, **_float_assemblies(context)}
    result = {}
    for tensor in graph.inputs:
        if graph.tensors[tensor].is_float:
            result[tensor] = _decide(context, tensor, None, alone)
    for index, op in enumerate(graph.ops):
        for tensor in op.outputs:
            if graph.tensors[tensor].is_float and graph.constant_root(tensor) is None:
                result[tensor] = _decide(context, tensor, index, assembled)
    cached = _cached(context, result)  # also where no kernel reads it: a cache has one grid from edge to edge
    return _tie(context, {**result, **cached}, assembled.keys() - cached)


def _cached(context: PlanningContext, activations: Mapping[int, Decision]) -> dict[int, Decision]:
    """Return the decisions for the tensors that hold keys and values of a cache, where the config has a dtype for it.

    With one scale per tensor, all that only moves these values is on their grid. With scales per head or channel, that
    are the tensors that a Concat joins and its result: what the new values were before is not quantized, and what
    reads the result holds its values.
    """
    rules = [rule for rule in context.config.rules if not rule.optional]
    wanted = [context.config.kv_cache, *(rule.kv_cache for rule in rules)]
    if not any(wanted):
        if context.config.kv_cache_scales or any(rule.kv_cache_scales for rule in rules):
            raise ConfigError("kv_cache_scales is chosen without kv_cache; choose the dtype of keys and values as well")
        return {}
    joined = find_caches(context.graph, _movers(context))
    if not joined:
        raise ConfigError(
            f"kv_cache={next(filter(None, wanted))}: the model takes and gives back no keys and values; give quantize "
            "an example of one step, with past_key_values"
        )
    choices = _cache_choices(context, joined)
    _require_kv_rules_apply(context, choices)
    result = {}
    for tensor, concat in joined.items():
        choice = choices[concat]
        if tensor in activations and choice.wanted.kv_cache is not None and activations[tensor].site[0] != "(":
            result[tensor] = _cached_decision(context, activations[tensor], tensor, concat, choice)
    return result


def _cache_choices(context: PlanningContext, joined: Mapping[int, int]) -> dict[int, ResolvedConfig]:
    """Return the config of each cache by the Concat that extends it; the names at the edges of the model name it too.

    They tell keys from values, which are joined by ops with the same names.
    """
    result = {}
    for concat in dict.fromkeys(joined.values()):
        place = context.result_place(context.graph.ops[concat].outputs[0], concat)
        edges = [context.result_place(tensor, None) for tensor in context.graph.inputs if joined.get(tensor) == concat]
        owners = [name for at in (place, *edges) for name in at.owners]
        sites = [name for at in (place, *edges) for name in at.sites]
        result[concat] = context.resolver.at(replace(place, owners=tuple(owners), sites=tuple(sites)))
    return result


def _require_kv_rules_apply(context: PlanningContext, choices: Mapping[int, ResolvedConfig]) -> None:
    """Refuse a rule that chooses a dtype or scales of keys and values where none are kept."""
    concats = {concat: context.graph.ops[concat].outputs[0] for concat in choices}
    applied = [rule for choice in choices.values() for rule in choice.rules]
    for rule in context.config.rules:
        if (rule.kv_cache or rule.kv_cache_scales) and not rule.optional and rule not in applied:
            places = ", ".join(context.graph.tensors[tensor].site or "?" for tensor in list(concats.values())[:3])
            raise ConfigError(f"the rule {rule} matches no keys and values of a cache; they are joined at {places}")


def _cached_decision(
    context: PlanningContext, bare: Decision, tensor: int, concat: int, choice: ResolvedConfig
) -> Decision:
    graph, dtype, scales = context.graph, choice.wanted.kv_cache, choice.wanted.kv_cache_scales or "tensor"
    assert dtype is not None
    rule = choice.decided_by("kv_cache", "kv_cache_scales")
    if not dtype.is_quantized:
        return replace(bare, spec=float_spec(dtype, graph.tensors[tensor].dtype), reason="kept by kv_cache", rule=rule)
    granularity: Granularity = PerTensor()
    op = graph.ops[concat]
    joined = op.outputs[0]
    if scales == "token":
        return _by_token(context, bare, tensor, op, dtype, rule)
    if scales != "tensor":
        if tensor != joined and tensor not in op.inputs:
            return _beside_cache(context, bare, tensor, joined, rule)
        shape = graph.tensors[joined].shape
        if shape is None or len(shape) != 4:
            raise ConfigError(
                f"kv_cache_scales={scales!r} at {bare.site}: its shape {shape} is not [batch, heads, tokens, channels]"
                "; choose 'tensor'"
            )
        granularity = PerChannel(1 if scales == "head" else 3)
    symmetric = dtype.signed or dtype.kind == "minifloat" or choice.wanted.symmetric_activations
    spec = Spec(dtype, granularity, symmetric, scale_digits(choice.wanted.scale_bits, graph.tensors[tensor].dtype))
    return replace(bare, spec=spec, reason=OF_CACHE, rule=rule)


def _by_token(context: PlanningContext, bare: Decision, tensor: int, concat: Op, dtype: DType, rule: str) -> Decision:
    """Return the decision for a tensor of a cache whose rows have scales of their own: new rows alone are quantized."""
    graph, edges = context.graph, set(context.graph.inputs)
    new = [t for t in concat.inputs if t is not None and edges.isdisjoint({t, *_sources(context, t)})]
    home = graph.tensors[new[0]].site if len(new) == 1 and len(concat.inputs) == 2 else None
    if home is None or not dtype.is_integer or not dtype.signed or dtype.container not in ("int8", "int4"):
        found = f"{dtype} at {bare.site}" if home is not None else f"{graph.tensors[concat.outputs[0]].site}"
        raise ConfigError(
            f"kv_cache_scales='token' is for int8 or int4, and for new tokens that one Concat joins to those before, "
            f"not for {found}; choose 'head' or 'channel'"
        )
    if tensor == new[0]:
        spec = Spec(dtype, PerTensor(), symmetric=True, dynamic="token")
        return replace(bare, spec=spec, reason=OF_CACHE, rule=rule)
    if tensor in _sources(context, new[0]):
        return replace(bare, spec=None, reason=f"quantized where it becomes {home}", rule=rule)
    return replace(bare, spec=None, tied_to=home, reason=f"holds values of {home}", rule=rule)


def _beside_cache(context: PlanningContext, bare: Decision, tensor: int, joined: int, rule: str) -> Decision:
    """Return the decision for what moves values into a cache with several scales, or out of it: no grid of its own."""
    home = context.graph.tensors[joined].site
    if joined in _sources(context, tensor):
        return replace(bare, spec=None, tied_to=home, reason=f"holds values of {home}", rule=rule)
    return replace(bare, spec=None, reason=f"quantized where {home} joins it", rule=rule)


def _sources(context: PlanningContext, tensor: int) -> set[int]:
    """Return the tensors whose values a tensor holds."""
    result, left = set[int](), [tensor]
    movers = frozenset(_movers(context))
    while left:
        made_by = context.graph.producer.get(left.pop())
        if made_by is not None and made_by in movers:
            op = context.graph.ops[made_by]
            new = set(moved_inputs(op)) - result
            result |= new
            left += new
    return result


def _float_assemblies(context: PlanningContext) -> dict[int, str]:
    """Return, by tensor id, why a Concat that leaves the model stays float: its parts keep their own encodings."""
    choices = {index: _ties(context, index) for index in _movers(context)} | dict.fromkeys(context.groups, True)
    return find_assemblies(context.graph, choices, FIXED_RANGES)


def _movers(context: PlanningContext) -> list[int]:
    graph = context.graph
    movers = (index for index, op in enumerate(graph.ops) if op.outputs and keeps_grid(graph, op))
    return [index for index in movers if index not in context.groups]  # inside a supergroup it only computes


def _ties(context: PlanningContext, op: int) -> bool | None:
    return context.result_choice(context.graph.ops[op].outputs[0], op).wanted.tie


def _decide(context: PlanningContext, tensor: int, op: int | None, assembled: Mapping[int, str]) -> Decision:
    graph, facts = context.graph, context.graph.tensors[tensor]
    op_type = "Input" if op is None else graph.ops[op].type
    kind: Kind = "input" if tensor in context.inputs else "output" if tensor in context.outputs else "activation"
    name = facts.site or f"({facts.name})"
    bare = Decision(name, op_type, kind, None, "", shape=facts.shape, tensor_type=facts.dtype)
    group = None if op is None else context.groups.get(op)
    if group is not None and group.ops[-1] != op:
        return replace(bare, reason=f"inside {group.name}")
    if facts.site is None and not graph.reads_values(tensor):
        return replace(bare, reason="no op reads its values")
    if facts.site is None and kind == "input":
        return replace(bare, reason="an input in a container that has no sites")
    steers = context.steers.get(tensor)
    if facts.site is None:
        return replace(bare, reason=steers or "inside a module or function whose output is the site")
    choice = context.result_choice(tensor, op)
    wanted, rule = choice.wanted, choice.decided_by(*_ACTIVATION_CHOICES, *((kind,) if kind != "activation" else ()))
    own = {"input": wanted.input, "output": wanted.output}.get(kind)
    dtype = wanted.activation if own is None else own
    if not dtype.is_quantized:
        by = "a rule" if rule != "default" else "the config"
        kept = dtype if isinstance(dtype, DType) else dtype.dtype
        return replace(bare, spec=float_spec(kept, facts.dtype), reason=f"kept {dtype} by {by}", rule=rule)
    if context.config.only_linear and tensor not in context.linear_reads:
        return replace(bare, reason="no quantized linear layer reads it, and the config quantizes nothing else")
    if steers is not None:
        return replace(bare, reason=steers, rule=BY_CALIBRATION if tensor in context.kept_float else rule)
    lasting = assembled.get(tensor) == NO_KERNEL and (dtype.bits != 8 or choice.is_named("activation"))
    if tensor in assembled and not lasting:
        return replace(bare, reason=assembled[tensor], rule=rule)
    if isinstance(dtype, BlockFormat):
        return _in_blocks(context, replace(bare, rule=rule), tensor, op_type if group is None else group.name, dtype)
    symmetric = wanted.symmetric_activations or dtype.kind == "minifloat"
    fixed = _fixed_range(wanted, op_type if group is None or group.name not in FIXED_RANGES else group.name)
    per_channel = wanted.per_channel_activations and fixed is None
    granularity = _granularity(context, tensor, op) if per_channel else PerTensor()
    spec = Spec(dtype, granularity, symmetric, scale_digits(wanted.scale_bits, facts.dtype), fixed)
    if wanted.dynamic_activations:
        spec = _dynamic_spec(wanted.dynamic_activations, dtype, symmetric)
    missed = context.near_misses.get(op) if op is not None and group is None else None
    reason = op_type if missed is None else f"{op_type} ({missed})"
    return replace(bare, spec=spec, reason=reason if group is None else group.name, rule=rule)


def _in_blocks(context: PlanningContext, bare: Decision, tensor: int, reason: str, form: BlockFormat) -> Decision:
    """Return the decision for a tensor that is to be in blocks: those of what linear layers sum over, its last axis."""
    if tensor not in context.linear_reads:
        return replace(
            bare, reason=f"no quantized linear layer reads it, and blocks of {form} are for what one sums over"
        )
    return replace(bare, spec=Spec(form.dtype, dynamic=form.name), reason=reason)


def _dynamic_spec(dynamic: Dynamic, dtype: DType, symmetric: bool) -> Spec:
    if dynamic == "token":  # the one form that runtimes have: signed, without zero points
        dtype, symmetric = int8 if dtype == uint8 else dtype, True
    return Spec(dtype, PerTensor(), symmetric, dynamic=dynamic)


def _granularity(context: PlanningContext, tensor: int, op: int | None) -> Granularity:
    """Return per channel of the last axis if only sums and layer normalizations read a tensor, else per tensor.

    A product of matrices would add up integers of different scales, and what moves values would move their axis.
    """
    graph = context.graph
    shape = graph.tensors[tensor].shape
    made_here = op is not None and not keeps_grid(graph, graph.ops[op]) and tensor not in context.outputs
    if not made_here or shape is None or len(shape) < 2 or not isinstance(shape[-1], int):
        return PerTensor()
    normed, summed = _readers(context, tensor)
    separate = len(normed) + len(summed) == len(graph.consumers[tensor])
    residual = normed or any(_readers(context, total)[0] for index in summed for total in graph.ops[index].outputs)
    return PerChannel(len(shape) - 1) if separate and residual else PerTensor()


def _readers(context: PlanningContext, tensor: int) -> tuple[list[int], list[int]]:
    """Return the layer normalizations and the sums that read a tensor: op ids."""
    graph, groups = context.graph, context.groups
    readers = graph.consumers[tensor]
    names = [groups[reader].name if reader in groups else graph.ops[reader].type for reader in readers]
    normed = [reader for reader, name in zip(readers, names, strict=True) if name in _NORMS]
    return normed, [reader for reader, name in zip(readers, names, strict=True) if name in _SUMS]


def _fixed_range(wanted: QuantConfig, op_type: str) -> tuple[float, float] | None:
    if wanted.fixed_range is None:
        return FIXED_RANGES.get(op_type)
    return None if wanted.fixed_range == "observed" else wanted.fixed_range


def _tie(
    context: PlanningContext, activations: Mapping[int, Decision], assembled: Container[int]
) -> dict[int, Decision]:
    """Return the decisions with every member of a tie class pointing to the first site of the class."""
    tied = ((t, d) for t, d in activations.items() if d.quantized and d.spec and d.spec.blocks is None)
    loose = {t: _comparable(d.spec, d.tensor_type) for t, d in tied if d.spec}
    ties = {index: _ties(context, index) for index in _movers(context)}
    asymmetric = {t for t, spec in loose.items() if not spec.symmetric}
    mixed = {index for index in find_mixed_signs(context.graph, FIXED_RANGES) if ties.get(index) is None}
    untied = {index for index, wanted in ties.items() if wanted is False}
    untied |= {index for index in find_rescaled(context.graph) if ties.get(index) is None}
    untied |= {index for index in ties if context.graph.ops[index].outputs[0] in assembled}
    untied |= {index for index in mixed if asymmetric.issuperset(context.graph.ops[index].outputs)}
    classes = find_ties(context.graph, loose, untied | context.groups.keys())
    through = {tensor for tensor in loose if _passes_through(context, tensor, classes)}
    ranges: dict[int, set[tuple[float, float] | None]] = {}
    digits: dict[int, set[int]] = {}
    for tensor in loose:
        spec = activations[tensor].spec
        if tensor not in through and spec is not None:
            ranges.setdefault(classes.find(tensor), set()).add(spec.fixed_range)
        if spec is not None and spec.scale_bits is not None:
            digits.setdefault(classes.find(tensor), set()).add(spec.scale_bits)
    result = _tie_dynamic(context, activations)
    for tensor in loose:
        first = classes.find(tensor)
        home, fixed = activations[first], ranges.get(first, {None})
        # a fixed range holds for a class only if all that enters it lives there
        bound = next(iter(fixed)) if len(fixed) == 1 else None
        shared = replace(loose[first], fixed_range=bound, scale_bits=min(digits.get(first, ()), default=None))
        result[tensor] = replace(activations[tensor], spec=shared)
        if first != tensor:
            reason = f"shares the encoding of {home.site}"
            passes = tensor in through
            result[tensor] = replace(result[tensor], tied_to=home.site, passes_through=passes, reason=reason)
    return result


def _comparable(spec: Spec, tensor_type: str) -> Spec:
    """Return what must be equal in the specs of tensors that are tied; a Cast may stand between them."""
    of_its_type = spec.scale_bits == scale_digits(None, tensor_type)
    return replace(spec, fixed_range=None, scale_bits=None if of_its_type else spec.scale_bits)


def _tie_dynamic(context: PlanningContext, activations: Mapping[int, Decision]) -> dict[int, Decision]:
    """Return the decisions, in which tensors that only move values of a dynamically quantized one are tied to it."""
    result = dict(activations)
    for index in _movers(context):
        op, source = context.graph.ops[index], context.graph.ops[index].inputs[0]
        home = None if source is None else result.get(source)
        if op.type in JOINS or home is None or not (home.dynamic or home.tied_dynamically):
            continue
        for tensor in op.outputs:
            own = result[tensor].spec if tensor in result and result[tensor].dynamic else None
            if own is not None and own.blocks is None:  # blocks are along another axis, or begin elsewhere
                reason = f"holds values of {home.encoding_site}, which is quantized dynamically"
                result[tensor] = replace(result[tensor], spec=None, tied_to=home.encoding_site, reason=reason)
    return result


def _passes_through(context: PlanningContext, tensor: int, classes: Classes) -> bool:
    """Return whether every value of a tensor comes from tensors of its own class."""
    op = context.graph.maker(tensor)
    if op is None or not keeps_grid(context.graph, op):
        return False
    return all(classes.find(t) == classes.find(tensor) for t in moved_inputs(op))
