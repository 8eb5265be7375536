"""Planning again: the encodings that a sim keeps when its config changes, and the verb `set_precision`."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import numpy as np

from qsdk.core.config.config import QuantConfig
from qsdk.core.config.rules import Rule, with_rule
from qsdk.core.errors import ConfigError
from qsdk.core.graph.graph import Graph
from qsdk.core.numerics.dtypes import DType, ElementType, dtype_named, element_type_named
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.spec import PerTensor
from qsdk.core.planning.make_plan import make_plan, stays, without_effect
from qsdk.core.planning.plan import Decision, Plan
from qsdk.core.ranges.estimators import estimator
from qsdk.core.ranges.ranges import Range, encoding_from_range
from qsdk.core.ranges.unrepresentable import left_float
from qsdk.core.report import Report
from qsdk.core.sims.calibration import encoding_of_stored, make_room_for_biases
from qsdk.core.sims.state import Methods, SimState, StoredReader, encoding_of, matched_sites, owns_encoding
from qsdk.core.site import matches, nearest_owners, owner_of

ChosenDtypes = Mapping[str, ElementType]


def replanned(
    state: SimState,
    graph: Graph,
    config: QuantConfig,
    stored: StoredReader,
    *,
    methods: Methods,
    extra_owners: Iterable[str] = (),
    kept_float: Mapping[str, str] | None = None,
) -> SimState:
    """Return the state after planning again with another config, without data.

    A site whose spec and ties are unchanged keeps its encoding, frozen or not. The others derive theirs from the range
    that the old encoding covers (weights from their values, by the method of the last calibration), and stay
    uncalibrated if there was none.

    Args:
        state: of the sim.
        graph: that it was planned from.
        config: the new one.
        stored: reads the stored tensors.
        methods: of the last calibration.
        extra_owners: owners that rules may name although they have no site.
        kept_float: site -> why a calibration leaves it float; None for the sites that earlier calibrations left float.
    """
    require_config(state.config)
    kept_float = left_float(state.plan) if kept_float is None else kept_float
    plan = make_plan(graph, config, extra_owners=extra_owners, kept_float=kept_float)
    return SimState(config, plan, _carried_over(state, plan, stored, methods))


def require_config(config: QuantConfig | None) -> QuantConfig:
    """Return the config of a sim that has one."""
    if config is None:
        raise ConfigError("a sim opened from a Q/DQ file has no config to change; quantize the float model instead")
    return config


def _carried_over(state: SimState, plan: Plan, stored: StoredReader, methods: Methods) -> dict[str, Encoding]:
    if not state.own:
        return {}
    result, from_values = {}, []
    members: dict[str, list[Decision]] = {}
    for decision in plan.decisions.values():
        if decision.quantized and not decision.passes_through:
            members.setdefault(decision.encoding_site, []).append(decision)
    for site, decision in plan.decisions.items():
        if not owns_encoding(decision):
            continue
        kept = _unchanged_encoding(state, decision, members[site])
        if kept is not None:
            result[site] = kept
        elif decision.kind == "weight":
            from_values.append(site)
        else:
            derived = _derive_encoding(state, decision, members[site])
            result |= {} if derived is None else {site: derived}
    chosen = estimator(methods.weight_method or "min_max", methods.percentile)
    values = stored([site for site in from_values if _was_ready(state, site)])
    result |= {site: encoding_of_stored(plan.decisions[site], value, chosen) for site, value in values.items()}
    biases = stored([site for site, decision in plan.decisions.items() if decision.bias_of])
    make_room_for_biases(plan.decisions, {}, biases, result)
    return {site: result[site] for site in plan.decisions if site in result}


def _was_ready(state: SimState, site: str) -> bool:
    """Return whether a weight had an encoding, or needed none."""
    before = state.plan.decisions.get(site)
    return before is None or not before.quantized or state.encoding(site) is not None


def _unchanged_encoding(state: SimState, home: Decision, members: list[Decision]) -> Encoding | None:
    """Return the encoding that all members of a class already had, if their spec is unchanged as well."""
    before = [state.plan.decisions.get(member.site) for member in members]
    if any(old is None or old.spec != home.spec or old.bias_of for old in before):
        return None
    encodings = [encoding_of(old, state.own) for old in before if old is not None]
    first = encodings[0]
    if first is None or any(other is None or other != first for other in encodings):
        return None
    return replace(first, frozen=all(encoding is not None and encoding.frozen for encoding in encodings))


def _derive_encoding(state: SimState, home: Decision, members: list[Decision]) -> Encoding | None:
    """Return an encoding of the new spec for the range that the old encodings covered; None if one was missing."""
    spec = home.spec
    assert spec is not None
    if spec.fixed_range is not None:
        low, high = (np.array([end], np.float32) for end in spec.fixed_range)
        return encoding_from_range(Range(low, high), spec)
    before = [state.encoding(member.site) for member in members]
    known = [_covered_range(encoding) for encoding in before if encoding is not None]
    if len(known) < len(members) or not isinstance(spec.granularity, PerTensor):
        return None
    merged = known[0]
    for other in known[1:]:
        merged = merged.merge(other)
    return encoding_from_range(merged, spec)


def _covered_range(encoding: Encoding) -> Range:
    low, high = encoding.low.min(keepdims=True).reshape(1), encoding.high.max(keepdims=True).reshape(1)
    largest = np.finfo(np.float32).max  # the end of a grid may lie just beyond float32
    return Range(low.clip(-largest, largest), high.clip(-largest, largest))


# --- set_precision ------------------------------------------------------------------------------------------------


def precision_config(
    plan: Plan,
    config: QuantConfig | None,
    match: str,
    dtype: DType | str | None,
    keywords: Mapping[str, ElementType | str | None],
    folded: Collection[str],
) -> tuple[QuantConfig, ChosenDtypes]:
    """Return the config with one more rule, and the dtypes that the rule chooses for weights, activations and biases.

    Args:
        plan: of the sim.
        config: of the sim.
        match: a pattern of owners or a site.
        dtype: applies to whatever it suits: a float dtype to weights, activations and biases; a signed one of 8 bits
            or fewer to weights; an unsigned one to activations; float8 and float4 to both. At a site: to that site.
        keywords: `weight`, `activation` and `bias`, where no dtype is given.
        folded: the owners of folded BatchNorms.
    """
    call = f"set_precision({match!r})"
    given: dict[str, ElementType] = {}
    for name, value in keywords.items():
        if value is not None:
            given[name] = (dtype_named if name == "bias" else element_type_named)(value)
    if (dtype is None) == (not given):
        raise ConfigError(f"{call} takes either a dtype or weight=, activation= and bias=; give one of them")
    site = plan.decisions.get(match)
    if dtype is not None:
        given = {**_dtypes_by_choice(call, dtype_named(dtype), site)}
    if site is not None and set(given) != {_option_name(site)}:
        raise ConfigError(f"{call}: {site.site} is one {site.kind}; give a dtype, or {_option_name(site)}=")
    _require_unfolded(call, plan, match, folded)
    changed = require_config(config).override(match, **given)  # type: ignore[arg-type]
    return replace(changed, rules=with_rule(changed.rules[:-1], changed.rules[-1])), given


def _dtypes_by_choice(call: str, dtype: DType, site: Decision | None) -> dict[str, DType]:
    if site is not None:
        return {_option_name(site): dtype}
    if dtype.kind == "float":
        return {"weight": dtype, "activation": dtype, "bias": dtype}
    if dtype.kind == "minifloat":
        return {"weight": dtype, "activation": dtype}
    if dtype.is_integer and not dtype.signed:
        return {"activation": dtype}
    if dtype.is_integer and dtype.bits <= 8:
        return {"weight": dtype}
    raise ConfigError(
        f"{call}: {dtype} could be meant for weights, activations or biases; say weight=, activation= or bias="
    )


def _option_name(decision: Decision) -> str:
    return decision.kind if decision.kind in ("weight", "bias") else "activation"


def _require_unfolded(call: str, plan: Plan, match: str, folded: Collection[str]) -> None:
    """Raise an error for a match that means only BatchNorms that were folded."""
    gone = [owner for owner in folded if matches(match, owner)]
    others = [d for d in matched_sites(plan, match) if d.op_type != "BatchNormalization"]
    if gone and not others:
        raise ConfigError(
            f"{call} names {', '.join(gone)}, a BatchNorm that was folded into its neighbour at quantize time; "
            "quantize with fold_batch_norm=False, or with a rule for it in the config, such as "
            f"config.skip({match!r}, dtype=float16)"
        )


def precision_report(before: SimState, after: SimState, match: str, chosen: ChosenDtypes) -> Report:
    """Return the sites whose dtype, granularity or encoding changed."""
    _require_effect(before.plan, after.plan, match, chosen, require_config(after.config).rules[-1])
    rows = []
    for site, new in after.plan.decisions.items():
        old = before.plan.decisions[site]
        if (old.spec, old.encoding_site, old.bias_of) == (new.spec, new.encoding_site, new.bias_of):
            continue
        encoding = "none"
        if new.quantized:
            encoding = "uncalibrated" if after.encoding(site) is None else "found"
        rows.append({"site": site, "before": _dtype_of(old).name, "after": _dtype_of(new).name, "encoding": encoding})
    uncalibrated = sum(row["encoding"] == "uncalibrated" for row in rows)
    return Report("Precision", rows, {"match": match, "changed": len(rows), "uncalibrated": uncalibrated})


def _require_effect(before: Plan, after: Plan, match: str, chosen: ChosenDtypes, rule: Rule) -> None:
    matched = matched_sites(after, match)
    affected = [d for site, d in after.decisions.items() if d.rule == str(rule) or d != before.decisions[site]]
    refused = without_effect(rule, [*matched, *affected])
    wanted = ", ".join(f"{name}={dtype}" for name, dtype in chosen.items())
    if refused is not None:
        raise ConfigError(f"set_precision({match!r}, {wanted}): {stays(refused)}")
    if any(_option_name(d) in chosen for d in (*matched, *affected)):
        return
    kinds = sorted({_option_name(d) for d in matched})
    having = [owner_of(d.site) for d in after.decisions.values() if _option_name(d) in chosen]
    near = ", ".join(nearest_owners(match, having) or list(dict.fromkeys(having))[:3])
    raise ConfigError(
        f"set_precision({match!r}, {wanted}) reaches nothing: what matches has only "
        f"{' and '.join(kinds) or 'no sites'}; owners that have one are: {near}"
    )


def _dtype_of(decision: Decision) -> DType:
    return dtype_named("float32") if decision.spec is None else decision.spec.dtype
