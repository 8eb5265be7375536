"""Planning of stored tensors: weights, biases and the constants that stay float."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from qsdk.core.config.config import QuantConfig
from qsdk.core.config.rules import Shape
from qsdk.core.errors import ConfigError
from qsdk.core.graph.graph import Graph, Tensor
from qsdk.core.graph.op_facts import LINEAR, RECURRENT
from qsdk.core.numerics.dtypes import DTYPES, BlockFormat, DType, int8, int32, level_dtype
from qsdk.core.numerics.spec import (
    Granularity,
    Kind,
    PerBlock,
    PerChannel,
    PerTensor,
    Role,
    Spec,
    float_spec,
    scale_digits,
    whole_blocks,
)
from qsdk.core.planning.context import PlanningContext
from qsdk.core.planning.fast_table import LAYERS_ON_CODES
from qsdk.core.planning.hardware import has_one_table, only_kernels, quantized_at
from qsdk.core.planning.operands import StoredOperand, is_scalar
from qsdk.core.planning.placement import NO_KERNEL, NOT_OF_TARGET, has_kernel
from qsdk.core.planning.plan import Decision
from qsdk.core.planning.ties import PASS_THROUGH
from qsdk.core.site import owner_of

_WITH_MATRICES = LINEAR | RECURRENT | {"Einsum"}
_INT8 = (int8, int8.strict)
_WEIGHT_CHOICES = ("weight", "per_channel", "block_size", "symmetric_weights", "two_level_scales", "scale_bits")


def plan_stored(context: PlanningContext, activations: Mapping[int, Decision]) -> dict[int, Decision]:
    """Decide weights, biases (whose inputs are decided before) and other stored tensors, by tensor id."""
    result: dict[int, Decision] = {}
    several_axes = _read_along_several_axes(context)
    for index, operands in context.operands.items():
        # weights before biases: a bias needs its weight's decision
        for operand in sorted(operands, key=lambda o: o.role == "bias"):
            if operand.root not in result:
                read = replace(operand, channel_axis=None) if operand.root in several_axes else operand
                result[operand.root] = _stored(context, index, read, activations, result)
            _alias(context, operand, result)
    _explain_rest(context, activations, result)
    if context.config.only_linear:
        _require_whole_blocks(result.values())
    return result


def with_look_ups(context: PlanningContext, activations: Mapping[int, Decision]) -> dict[int, Decision]:
    """Return the activations, in which rows of a table are tied to it: they are on its grid already.

    A grid of their own would round them again. What only moves the rows is on that grid as well.
    """
    result, members = dict(activations), dict[str, list[int]]()
    for tensor, decision in activations.items():
        members.setdefault(decision.encoding_site, []).append(tensor)
    for root, readers in context.readers.items():
        rows = [tensor for tensor in _rows_of(context, root) if tensor in activations]
        table = _stored(context, *readers[0], activations, {}) if rows else None
        if table is None or not table.quantized:
            continue
        for row in rows:
            shared = members[activations[row].encoding_site]
            moved = all(tensor in rows or activations[tensor].passes_through for tensor in shared)
            for tensor in shared if moved and activations[row].spec == table.spec else ():
                reason = f"holds rows of {table.site}"
                result[tensor] = replace(result[tensor], tied_to=table.site, passes_through=True, reason=reason)
    return result


def _rows_of(context: PlanningContext, root: int) -> list[int]:
    """Return what look-ups take from a stored tensor, where nothing else reads it."""
    readers = context.readers[root]
    alone = all(operand.role == "embedding" for _, operand in readers)
    return [tensor for op, _ in readers for tensor in context.graph.ops[op].outputs] if alone else []


def _as_its_rows(context: PlanningContext, root: int, activations: Mapping[int, Decision], spec: Spec) -> Spec:
    """Return the spec that all rows read from a table have, if it is one of as many bits with one scale."""
    specs = {activations[row].spec if row in activations else None for row in _rows_of(context, root)}
    wanted = next(iter(specs)) if len(specs) == 1 else None
    plain = wanted is not None and wanted.dtype.is_integer and not wanted.dynamic and wanted.fixed_range is None
    if not plain or wanted is None or {wanted.granularity, spec.granularity} != {PerTensor()}:
        return spec
    return wanted if wanted.dtype.bits == spec.dtype.bits and spec.dtype.is_integer else spec


def _exact_for_kernels(
    context: PlanningContext, root: int, spec: Spec | None, activations: Mapping[int, Decision]
) -> Spec | None:
    """Return the spec of an int8 weight or table in the dtype with which 8-bit kernels that multiply it are exact."""
    exact = context.config.exact_weights
    if exact is None or spec is None or spec.dtype not in _INT8 or isinstance(spec.granularity, PerBlock):
        return spec
    if not any(_in_8_bits(context, op, operand, activations) for op, operand in context.readers[root]):
        return spec
    if exact.exact_sums and not spec.symmetric:
        exact = DTYPES["int7"]  # where a zero point is part of every code
    return replace(spec, dtype=exact.strict if exact.signed and spec.dtype != int8 else exact)


def stands_for(dtype: DType, wanted: DType) -> bool:
    """Return whether a weight has the dtype that a rule asks for, or the exact one in the place of int8."""
    return dtype == wanted or (wanted in _INT8 and (dtype.exact_sums or dtype.container == "uint8" or dtype.bits == 7))


def _in_8_bits(context: PlanningContext, op: int, operand: StoredOperand, activations: Mapping[int, Decision]) -> bool:
    """Return whether a layer multiplies a stored tensor with codes of 8 bits or fewer."""
    made = context.graph.ops[op]
    if made.type == "LSTM":  # its kernel rounds input and state by itself
        return context.resolver.at(context.stored_place(op, operand.root)).wanted.compute == "int8"
    if made.type not in LAYERS_ON_CODES or operand.role != "weight":
        return False
    others = [tensor for tensor in made.inputs[:2] if tensor != operand.tensor]
    homes = [quantized_at(context, tensor, activations) for tensor in others]
    specs = [activations[home].spec for home in homes if home is not None]
    return None in homes or any(spec is not None and _narrow_integer(spec.dtype) for spec in specs)


def _require_whole_blocks(decisions: Iterable[Decision]) -> None:
    """Refuse blocks that do not divide the input channels of a linear layer: servers cannot read them."""
    blocks = [(d, d.spec.granularity) for d in decisions if d.spec and isinstance(d.spec.granularity, PerBlock)]
    lengths = {d.site: (d.shape[by.axis], by.size) for d, by in blocks if d.shape is not None}
    known = {site: (length, size) for site, (length, size) in lengths.items() if isinstance(length, int)}
    wrong = {site: (length, size) for site, (length, size) in known.items() if length % size}
    if not wrong:
        return
    site, (length, size) = next(iter(wrong.items()))
    more = f" (and of {len(wrong) - 1} others)" if len(wrong) > 1 else ""
    raise ConfigError(
        f"blocks of {size} do not divide the {length} input channels of {site}{more}, and a config for linear layers "
        f"alone (compressed-tensors) needs that; {whole_blocks([length], size)}: "
        f".override({owner_of(site)!r}, block_size=...); of all its layers with blocks, "
        f"{whole_blocks([length for length, _ in known.values()], size)}"
    )


def _read_along_several_axes(context: PlanningContext) -> frozenset[int]:
    """Return the root ids of weights that layers read along different axes (`w` here, `w.t()` there).

    The output channels of one layer are summed over by the other, so scales per channel would mix in those sums.
    """
    along = {root: {o.channel_axis for _, o in found if o.role == "weight"} for root, found in context.readers.items()}
    return frozenset(root for root, axes in along.items() if len(axes) > 1)


def _stored(
    context: PlanningContext,
    op: int,
    operand: StoredOperand,
    activations: Mapping[int, Decision],
    decisions: Mapping[int, Decision],
) -> Decision:
    facts, op_type = context.graph.tensors[operand.root], context.graph.ops[op].type
    role, reader = _role(context, op, operand)
    kind: Kind = "bias" if role == "bias" else "weight"
    name = facts.site or f"({facts.name})"
    bare = Decision(name, op_type, kind, None, "", shape=facts.shape, tensor_type=facts.dtype)
    if role == "statistic":
        return _statistic(context, op, operand, bare, reader)
    if is_scalar(context.graph, op, operand):
        return replace(bare, reason="a scalar constant")
    if facts.site is None:
        return replace(bare, reason="a stored tensor that no quantizer reads")
    choice = context.resolver.at(context.stored_place(op, operand.root))
    wanted = choice.wanted
    if role == "bias":
        return _bias(context, op, replace(bare, rule=choice.decided_by("bias")), wanted, activations, decisions)
    wide = _keeps_8_bits(role, wanted, named=choice.is_named("weight"))
    bare = replace(bare, rule=choice.decided_by(*(name for name in _WEIGHT_CHOICES if not (wide and name == "weight"))))
    in_blocks = choice.is_named("block_size") or (has_one_table(context.config) and _is_layer(context, operand.root))
    if role == "embedding" and in_blocks and len(facts.shape or ()) == 2:
        operand = replace(operand, input_axis=1)  # rows in blocks, as an output layer that shares the table reads them
    spec = _spec(operand, role, wanted, facts, wide=wide)
    if spec is not None and role == "embedding" and wanted.symmetric_weights is None and not choice.is_named("weight"):
        spec = _as_its_rows(context, operand.root, activations, spec)
    spec = _exact_for_kernels(context, operand.root, spec, activations)
    if spec is not None and wanted.only_linear and operand.root not in context.linear_weights.values():
        return replace(bare, reason="no weight of a linear layer alone, and the config quantizes nothing else")
    if spec is not None and not has_kernel(context, op):
        return replace(bare, reason=NOT_OF_TARGET)
    in_floats = not (op_type == "LSTM" and wanted.compute == "int8") and not choice.is_named("weight")
    if spec is not None and in_floats and _has_no_kernel(context, op, role, activations):
        return replace(bare, reason=NO_KERNEL)
    kept = f"; 8 bits: {wanted.weight} is for weights of layers, unless a rule names this one" if wide else ""
    if spec is not None and spec.dtype == context.config.exact_weights:
        kept += f"; {spec.dtype}, with which the 8-bit kernels of its processor are exact"
    return _kept_float(bare, _dtype(wanted)) if spec is None else replace(bare, spec=spec, reason=role + kept)


def _is_layer(context: PlanningContext, root: int) -> bool:
    """Return whether a linear layer multiplies with a stored tensor."""
    return any(context.is_linear(op, operand) for op, operand in context.readers[root])


def _has_no_kernel(context: PlanningContext, op: int, role: Role, activations: Mapping[int, Decision]) -> bool:
    """Return whether a constant or a norm's weight stands beside floats, where a config is for kernels alone."""
    made = context.graph.ops[op]
    if not only_kernels(context.config) or role == "embedding" or (role == "weight" and made.type in _WITH_MATRICES):
        return False
    group = context.groups.get(op)
    last = made if group is None else context.graph.ops[group.ops[-1]]
    is_norm = role == "weight"
    return is_norm or not any(t in activations and activations[t].quantized for t in last.outputs)


def _keeps_8_bits(role: Role, wanted: QuantConfig, *, named: bool) -> bool:
    """Return whether an embedding or the parameter of a norm keeps 8 bits where narrower weights are wanted."""
    dtype = wanted.weight.dtype if isinstance(wanted.weight, BlockFormat) else wanted.weight
    return role != "weight" and dtype.is_quantized and dtype.bits < 8 and not named


def _statistic(context: PlanningContext, op: int, operand: StoredOperand, bare: Decision, reader: str) -> Decision:
    """Decide a parameter that stays float, in a narrower float type if a rule asks for that.

    Those of a BatchNorm that the model reads by itself stay float32: torch updates them. `planning.islands` decides on
    those without a site.
    """
    reason = f"a parameter of {reader} that has no integer form of its own"
    choice = context.resolver.at(context.stored_place(op, operand.root))
    wanted, rule = choice.wanted.weight, choice.decided_by("weight")
    if not isinstance(wanted, DType) or wanted.is_quantized or float_spec(wanted, bare.tensor_type) is None:
        return replace(bare, reason=reason)
    facts = context.graph.tensors[operand.root]
    if context.graph.ops[op].type == "BatchNormalization" and facts.site is not None:
        source = "the config" if rule == "default" else f"the rule {rule}"
        return replace(bare, reason=f"{reason}; {source} rounds the result of the BatchNorm alone to {wanted}")
    if is_scalar(context.graph, op, operand):
        return replace(bare, reason=reason)
    return _kept_float(replace(bare, rule=rule), wanted)


def _spec(operand: StoredOperand, role: Role, wanted: QuantConfig, facts: Tensor, *, wide: bool) -> Spec | None:
    """Return the spec of a weight, an embedding or another constant; None where it stays in a float type."""
    form = wanted.weight if isinstance(wanted.weight, BlockFormat) else None
    dtype = form.dtype if form is not None else _dtype(wanted)
    if not dtype.is_quantized:
        return None
    if wide:
        dtype = int8
    granularity = _granularity(operand, wanted, facts.shape, wanted.block_size if form is None else form.block_size)
    by_choice = dtype.signed if wanted.symmetric_weights is None else wanted.symmetric_weights
    symmetric = by_choice or dtype.kind == "minifloat"
    scale_dtype = level_dtype(dtype) if wanted.two_level_scales else None
    if form is not None:
        scale_dtype = form.scale_dtype
    if not isinstance(granularity, PerBlock):
        scale_dtype = None
    # scales of two levels are products, which no narrow float holds
    digits = wanted.scale_bits if scale_dtype is not None else scale_digits(wanted.scale_bits, facts.dtype)
    return Spec(dtype, granularity, symmetric, digits, scale_dtype=scale_dtype)


def _dtype(wanted: QuantConfig) -> DType:
    assert isinstance(wanted.weight, DType)
    return wanted.weight


def _kept_float(bare: Decision, dtype: DType) -> Decision:
    by = "a rule" if bare.rule != "default" else "the config"
    return replace(bare, spec=float_spec(dtype, bare.tensor_type), reason=f"kept {dtype} by {by}")


def _role(context: PlanningContext, op: int, operand: StoredOperand) -> tuple[Role, str]:
    """Return the role of a stored tensor and the op or supergroup it has it in; the supergroup takes precedence."""
    group = context.groups.get(op)
    if group is not None and operand.root in group.roles:
        return group.roles[operand.root], group.name
    return operand.role, context.graph.ops[op].type


def _granularity(
    operand: StoredOperand, choice: QuantConfig, shape: Shape | None, block_size: int | None
) -> Granularity:
    axis = operand.input_axis
    if block_size is not None and axis is not None and shape is not None and shape[axis] != 1:
        return PerBlock(axis, block_size)
    if operand.of_experts and choice.per_channel and axis is not None and shape is not None:
        length = shape[axis]
        if isinstance(length, int):
            return PerBlock(axis, length)  # a scale for each output channel of each expert
    if choice.per_channel and operand.channel_axis is not None:
        return PerChannel(operand.channel_axis)
    return PerTensor()


def _bias(
    context: PlanningContext,
    op: int,
    bare: Decision,
    choice: QuantConfig,
    activations: Mapping[int, Decision],
    decisions: Mapping[int, Decision],
) -> Decision:
    if choice.bias.kind == "float":
        return _kept_float(bare, choice.bias)
    if context.graph.ops[op].type in ("Gather", "GatherND"):
        return replace(bare, reason="a bias of each expert, taken by its rows")
    head = context.groups[op].ops[0] if op in context.groups else op
    source = context.graph.ops[head].inputs[0]
    weight = next((o.root for o in context.operands[head] if o.role == "weight"), None)
    fed = activations.get(source) if source is not None else None
    held = decisions.get(weight) if weight is not None else None
    if fed is not None and (fed.dynamic or fed.tied_dynamically):
        return replace(bare, reason="the scale of its input is found while the model runs")
    for name, decision in (("input", fed), ("weight", held)):
        if decision is None or decision.spec is None or not _narrow_integer(decision.spec.dtype):
            return replace(bare, reason=f"its {name} is not an integer of 8 bits or fewer")
    assert fed is not None
    assert held is not None
    assert held.spec is not None
    if isinstance(held.spec.granularity, PerBlock):
        return replace(bare, reason="its weight has one scale per block, so no one scale fits an accumulator")
    per_channel = isinstance(held.spec.granularity, PerChannel)
    if per_channel and held.op_type == "ConvTranspose" and context.graph.ops[head].attributes.get("group", 1) != 1:
        return replace(bare, reason="its weight's scales are shared by groups, so they do not count its channels")
    spec = Spec(int32, PerChannel(0) if per_channel else PerTensor())
    sites = (fed.encoding_site, held.encoding_site)
    return replace(bare, spec=spec, reason="input scale x weight scale", bias_of=sites)


def _narrow_integer(dtype: DType) -> bool:
    return dtype.is_integer and dtype.bits <= 8


def _alias(context: PlanningContext, operand: StoredOperand, decisions: dict[int, Decision]) -> None:
    """Tie a site that reads a stored tensor through Identity (a shared weight) to that tensor's site."""
    graph = context.graph
    current, home = operand.tensor, decisions[operand.root]
    while current != operand.root:
        op = graph.ops[graph.producer[current]]
        site = graph.tensors[current].site
        if op.type == "Identity" and site is not None:
            tie = home.site if home.quantized else None
            reason = f"the same parameter as {home.site}"
            decisions[current] = replace(home, site=site, tied_to=tie, passes_through=False, reason=reason)
        source = op.inputs[0]
        assert source is not None
        current = source


def _explain_rest(
    context: PlanningContext, activations: Mapping[int, Decision], decisions: dict[int, Decision]
) -> None:
    """Record why the other stored tensors stay float: bounds, exponents, views, and tensors that nothing reads."""
    graph = context.graph
    for tensor, facts in enumerate(graph.tensors):
        if not facts.is_float or tensor in activations or tensor in decisions:
            continue
        readers = graph.consumers[tensor]
        op_type = graph.ops[readers[0]].type if readers else "Constant"
        reason = "no op reads it"
        if readers:
            group = context.groups.get(readers[0])
            reason = (
                f"a parameter of {group.name if group and group.roles else op_type} that has no integer form of its own"
            )
        if readers and op_type in PASS_THROUGH:
            reason = _reason_of_moved(graph, tensor, op_type)
        made = graph.ops[readers[0]].outputs if readers else ()
        if made and made[0] in context.steers:
            reason = f"a part of {context.steers[made[0]]}"
        root = graph.constant_root(tensor)
        if root is not None and root != tensor:
            reason = f"a view of {graph.tensors[root].site or graph.tensors[root].name}"
        site = facts.site or f"({facts.name})"
        decisions[tensor] = Decision(site, op_type, "weight", None, reason, shape=facts.shape, tensor_type=facts.dtype)


def _reason_of_moved(graph: Graph, tensor: int, op_type: str) -> str:
    """Return why a stored tensor stays float that ops move: they hand it on to a site, or to an op that computes."""
    current = tensor
    while (readers := graph.consumers[current]) and graph.ops[readers[0]].type in PASS_THROUGH:
        current = graph.ops[readers[0]].outputs[0]
        if graph.tensors[current].site is not None:
            return f"{op_type} hands it on to a site"
    reader = f" before {graph.ops[readers[0]].type} reads it" if readers else ""
    return f"{op_type} moves it{reader}; what an op reads as it is stored, or transposed, is quantized"
