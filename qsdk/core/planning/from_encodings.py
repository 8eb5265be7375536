"""Plans that follow given encodings: those of a Q/DQ file, or of an encodings file for a float model."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from qsdk.core.config.config import QuantConfig
from qsdk.core.graph.graph import Graph, Op
from qsdk.core.numerics import affine
from qsdk.core.numerics.block_scales import scale_dtype_of
from qsdk.core.numerics.dtypes import DType
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.spec import Granularity, Kind, PerBlock, PerChannel, PerTensor, Spec
from qsdk.core.patterns.find import match_supergroups
from qsdk.core.patterns.supergroup import Supergroup
from qsdk.core.planning.context import PlanningContext
from qsdk.core.planning.operands import operands_of
from qsdk.core.planning.plan import Decision, Plan
from qsdk.core.planning.ties import keeps_grid, moved_inputs
from qsdk.core.planning.unquantizable import divisors

AS_GIVEN, THE_FILE = "as the file says", "the file"
_HOLDS_0 = "; its grid holds 0, where the op that divides by it or takes its logarithm gives infinity or NaN"


def plan_as_given(
    graph: Graph,
    encodings: Mapping[str, Encoding],
    casts: Mapping[str, DType],
    *,
    kinds: Mapping[str, Kind] | None = None,
    missing: str = "",
    dynamic: Mapping[str, Spec] | None = None,
    input_blocks: Mapping[str, int] | None = None,
) -> Plan:
    """Return the plan of a graph that quantizes the sites with given encodings, and nothing else.

    Args:
        graph: of the model.
        encodings: by site.
        casts: site -> float16 or bfloat16.
        kinds: of sites, where they are known; the others follow from the graph.
        missing: why the other sites stay float.
        dynamic: site -> spec, where the range is found while the model runs.
        input_blocks: of weights whose layers round their input; see `Decision`.
    """
    by_structure, readers = kinds_of(graph), _types_of_readers(graph)
    biases = {site: parts for site, parts in bias_parts(graph).items() if _is_product(site, parts, encodings)}
    result, as_given = {}, _reasons(graph)
    for site, tensor in graph.sites.items():
        facts = graph.tensors[tensor]
        maker = graph.producer.get(tensor)
        made_by = readers.get(tensor, "Input") if maker is None else graph.ops[maker].type
        spec = spec_of(encodings[site]) if site in encodings else Spec(casts[site]) if site in casts else None
        spec = (dynamic or {}).get(site, spec)
        reason, rule = (
            (missing, "default") if spec is None else (as_given[site] if site in encodings else AS_GIVEN, THE_FILE)
        )
        kind = (kinds or {}).get(site) or by_structure[site]
        decision = Decision(site, made_by, kind, spec, reason, rule, shape=facts.shape, tensor_type=facts.dtype)
        result[site] = replace(decision, bias_of=biases.get(site), input_block=(input_blocks or {}).get(site))
    _tie_what_passes_through(graph, result, encodings)
    return with_groups(graph, Plan(result))


def with_groups(graph: Graph, plan: Plan, config: QuantConfig | None = None) -> Plan:
    """Return the plan with the supergroups of its config, or of a plan without one, those that it leaves whole."""
    groups = match_supergroups(graph).groups if config is None else PlanningContext(graph, config).groups
    return replace(plan, groups=_unbroken(graph, groups, plan.decisions))


def _unbroken(
    graph: Graph, groups: Mapping[int, Supergroup], decisions: Mapping[str, Decision]
) -> dict[int, Supergroup]:
    """Return the supergroups inside of which no site has an encoding."""

    def is_whole(group: Supergroup) -> bool:
        inner = [graph.tensors[t].site for member in group.ops[:-1] for t in graph.ops[member].outputs]
        return all(site not in decisions or decisions[site].spec is None for site in inner if site is not None)

    return {op: group for op, group in groups.items() if is_whole(group)}


def _types_of_readers(graph: Graph) -> dict[int, str]:
    """Return the type of the op that reads each stored tensor, behind what only turns it round."""
    result = {t: "Constant" for t, facts in enumerate(graph.tensors) if facts.constant}
    result |= {t: graph.ops[readers[0]].type for t in result if (readers := graph.consumers[t])}
    for index in reversed(range(len(graph.ops))):
        result |= {operand.root: graph.ops[index].type for operand in operands_of(graph, index)}
    return result


def _reasons(graph: Graph) -> dict[str, str]:
    """Return why a site has its encoding, for every site; a grid that holds 0 does a divisor no good."""
    poles = divisors(graph)
    return {site: AS_GIVEN + (_HOLDS_0 if tensor in poles else "") for site, tensor in graph.sites.items()}


def _tie_what_passes_through(graph: Graph, decisions: dict[str, Decision], encodings: Mapping[str, Encoding]) -> None:
    """Tie the results of ops that only move values to their inputs, where both have one encoding.

    What is tied already, and what others are tied to, stays as it is.
    """
    settled = {name for site, d in decisions.items() if d.tied_to is not None for name in (site, d.tied_to)}
    for op in graph.ops:
        sources = _moved_sites(graph, op)
        if not sources:
            continue
        for output in op.outputs:
            site = graph.tensors[output].site or ""
            if site in settled:
                continue
            if site in encodings and all(encodings.get(source) == encodings[site] for source in sources):
                decisions[site] = replace(
                    decisions[site], tied_to=decisions[sources[0]].encoding_site, passes_through=True
                )
    for site, decision in decisions.items():
        if decision.bias_of is not None:
            decisions[site] = replace(decision, bias_of=_homes(decisions, decision.bias_of))


def _moved_sites(graph: Graph, op: Op) -> list[str]:
    """Return the sites whose values an op only moves, also through tensors without a site; "" where there is none."""
    if not keeps_grid(graph, op):
        return []
    result: list[str] = []
    for tensor in moved_inputs(op):
        maker = graph.producer.get(tensor)
        site = graph.tensors[tensor].site
        through = [] if site is not None or maker is None else _moved_sites(graph, graph.ops[maker])
        result += through or [site or ""]
    return result


def plan_with_given(graph: Graph, plan: Plan, encodings: Mapping[str, Encoding], casts: Mapping[str, DType]) -> Plan:
    """Return a plan in which the given encodings take precedence, and which is otherwise unchanged.

    Tied sites take the one encoding that is given for any of them. Where several different ones are given, those sites
    are untied, but for the results of ops that only move values on one grid.

    Args:
        graph: that the plan was made of.
        plan: of a config.
        encodings: by site.
        casts: site -> float16 or bfloat16.
    """
    result, as_given = dict(plan.decisions), _reasons(graph)
    for home, members in _classes(plan).items():
        stated = [site for site in members if site in encodings]
        if not stated:
            continue
        first = encodings[stated[0]]
        if all(encodings[site] == first for site in stated) and not any(site in casts for site in members):
            for site in members:
                reason = as_given[site] if site in encodings else f"{AS_GIVEN} of {stated[0]}"
                result[site] = replace(result[site], spec=spec_of(first), reason=reason, rule=THE_FILE)
            continue
        for site in members:
            result[site] = replace(result[site], passes_through=False)
        for site in (*stated, *((home,) if home not in encodings else ())):
            result[site] = replace(result[site], tied_to=None)
    for site, encoding in encodings.items():
        if result[site].rule != THE_FILE:
            alone = replace(result[site], tied_to=None, passes_through=False, bias_of=None, computes_in="")
            result[site] = replace(alone, spec=spec_of(encoding), reason=as_given[site], rule=THE_FILE)
    for site, dtype in casts.items():
        alone = replace(result[site], tied_to=None, passes_through=False, bias_of=None, computes_in="")
        result[site] = replace(alone, spec=Spec(dtype), reason=AS_GIVEN, rule=THE_FILE)
    _tie_what_passes_through(graph, result, encodings)
    _plan_biases(graph, result, encodings)
    return replace(plan, decisions=result, groups=_unbroken(graph, plan.groups, result))


def owned_encodings(plan: Plan, encodings: Mapping[str, Encoding]) -> dict[str, Encoding]:
    """Return the encodings by the site that owns them; each was given for that site or for one tied to it."""
    result: dict[str, Encoding] = {}
    for site, encoding in encodings.items():
        decision = plan.decisions[site]
        if decision.bias_of is None:
            result.setdefault(decision.encoding_site, encoding)
    return {site: result[site] for site in plan.decisions if site in result}


def misfit(encoding: Encoding, shape: tuple[int | str | None, ...] | None) -> str:
    """Return why an encoding does not fit a tensor of this shape; "" where it does, as far as is known."""
    axis = encoding.axis
    if shape is None or axis is None:
        return ""
    if not -len(shape) <= axis < len(shape):
        return f"axis {axis} does not exist in the shape {_text(shape)}"
    if encoding.block_size is not None and encoding.scale.ndim != len(shape):
        return f"scales of shape {encoding.scale.shape} are no blocks of a tensor of shape {_text(shape)}"
    known = tuple(n if isinstance(n, int) else _length(encoding, i, axis % len(shape)) for i, n in enumerate(shape))
    try:
        affine.align(encoding.scale, known, axis, encoding.block_size)
    except ValueError as error:
        return str(error)
    return ""


def _length(encoding: Encoding, index: int, axis: int) -> int:
    """Return a length for a dynamic dimension that fits the number of scales."""
    if encoding.block_size is not None:
        return int(encoding.scale.shape[index]) * (encoding.block_size if index == axis else 1)
    return int(encoding.scale.size) if index == axis else 1


def _text(shape: Iterable[int | str | None]) -> str:
    return "[" + ", ".join("?" if n is None else str(n) for n in shape) + "]"


def spec_of(encoding: Encoding) -> Spec:
    """Return the spec that an encoding fulfils."""
    return Spec(encoding.dtype, granularity_of(encoding), encoding.symmetric, scale_dtype=scale_dtype_of(encoding))


def granularity_of(encoding: Encoding) -> Granularity:
    """Return the granularity of an encoding."""
    if encoding.axis is None:
        return PerTensor()
    return PerChannel(encoding.axis) if encoding.block_size is None else PerBlock(encoding.axis, encoding.block_size)


def kinds_of(graph: Graph) -> dict[str, Kind]:
    """Return the kind of each site, as the structure of the graph shows it."""
    biases = {o.root for index in range(len(graph.ops)) for o in operands_of(graph, index) if o.role == "bias"}
    result: dict[str, Kind] = {}
    for site, tensor in graph.sites.items():
        if graph.tensors[tensor].constant:
            result[site] = "bias" if tensor in biases else "weight"
        elif tensor in graph.inputs:
            result[site] = "input"
        else:
            result[site] = "output" if tensor in graph.output_set else "activation"
    return result


def bias_parts(graph: Graph) -> dict[str, tuple[str, str]]:
    """Return, for the site of each bias, the sites of the input and the weight of its layer."""
    result: dict[str, tuple[str, str]] = {}
    for index, op in enumerate(graph.ops):
        for operand in operands_of(graph, index):
            bias = graph.tensors[operand.root].site
            if operand.role != "bias" or bias is None:
                continue
            head = index
            if op.type == "Add":
                head = graph.producer[next(t for t in op.inputs if t is not None and t != operand.tensor)]
            source, weight = graph.ops[head].inputs[:2]
            root = graph.constant_root(weight)
            if source is None or root is None:
                continue
            sites = (graph.tensors[source].site, graph.tensors[root].site)
            if sites[0] is not None and sites[1] is not None:
                result[bias] = (sites[0], sites[1])
    return result


def _is_product(bias: str, parts: tuple[str, str], encodings: Mapping[str, Encoding]) -> bool:
    """Return whether a bias's scales are those of input and weight, multiplied, to the last digit."""
    if bias not in encodings or any(part not in encodings for part in parts):
        return False
    product = np.multiply(encodings[parts[0]].scale, encodings[parts[1]].scale)
    return encodings[bias].symmetric and np.array_equal(product, encodings[bias].scale)


def _classes(plan: Plan) -> dict[str, list[str]]:
    """Return, by the site that owns an encoding, the sites that share it, itself included."""
    result: dict[str, list[str]] = {}
    for site, decision in plan.decisions.items():
        if decision.quantized and decision.bias_of is None:
            result.setdefault(decision.encoding_site, []).append(site)
    return result


def _plan_biases(graph: Graph, decisions: dict[str, Decision], encodings: Mapping[str, Encoding]) -> None:
    """Derive the int32 biases from the new specs of input and weight; where that is impossible, leave them float."""
    for site, parts in bias_parts(graph).items():
        decision = decisions[site]
        derived = decision.bias_of is not None and all(_is_narrow(decisions[part]) for part in parts)
        if derived or _is_product(site, parts, encodings):
            decisions[site] = replace(decision, bias_of=_homes(decisions, parts))
        elif decision.bias_of is not None:
            reason = "an int32 bias needs an input and a weight of 8 bits or fewer, and the file has others"
            decisions[site] = replace(decision, spec=None, bias_of=None, reason=reason)


def _homes(decisions: Mapping[str, Decision], parts: tuple[str, str]) -> tuple[str, str]:
    return decisions[parts[0]].encoding_site, decisions[parts[1]].encoding_site


def _is_narrow(decision: Decision) -> bool:
    spec = decision.spec
    if spec is None or not decision.quantized or isinstance(spec.granularity, PerBlock):
        return False
    return spec.dtype.is_integer and spec.dtype.bits <= 8
