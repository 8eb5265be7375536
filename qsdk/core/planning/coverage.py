"""Coverage: the report of what the plan decided, the same for both sides."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from qsdk.core.errors import ConfigError
from qsdk.core.planning.plan import Decision, Plan
from qsdk.core.report import Report
from qsdk.core.site import nearest_in_words, owner_of


def coverage_report(
    plan: Plan,
    *,
    not_exercised: Collection[str] = (),
    dead: Sequence[str] = (),
    only_training: Mapping[str, str] | None = None,
) -> Report:
    """Return the report of every tensor: its state, dtype, granularity, and the reason for them.

    Args:
        plan: of the sim.
        not_exercised: sites that the example did not reach.
        dead: sites whose values reach no output.
        only_training: site -> kind, for tensors that a forward computes in train mode alone.
    """
    rows = [_row(decision, decision.site in not_exercised) for decision in plan.decisions.values()]
    rows += [_row(decision, False) for decision in plan.inside]
    rows += [_float(site, "activation", "dead: its value reaches no output") for site in dead]
    rows += [_float(site, kind, "runs only in training") for site, kind in (only_training or {}).items()]
    states = [row["state"] for row in rows]
    summary = {state.replace(" ", "_"): states.count(state) for state in ("quantized", "tied", "float")}
    groups = {"by_type": by_type(rows), "float_because": _float_because(rows)}
    facts = {**summary, "not_exercised": states.count("not exercised")}
    return Report("Coverage", rows, {**facts, **{name: group for name, group in groups.items() if group}})


def by_type(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per op type, the most frequent first: its sites, how many are not quantized, and their dtypes.

    Args:
        rows: with `op_type` and `dtype`, and with `state` where they can be float.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["op_type"] or "other", []).append(row)
    ordered = sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    result = []
    for op_type, held in ordered:
        dtypes = Counter(row["dtype"] for row in held).most_common()
        floats = {"float": sum(row["state"] == "float" for row in held)} if "state" in held[0] else {}
        listed = ", ".join(f"{count} {name}" for name, count in dtypes)
        result.append({"op_type": op_type, "sites": len(held), **floats, "dtypes": listed})
    return result


def _float_because(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the reasons for which sites are float, the most frequent first."""
    reasons = Counter(row["reason"] for row in rows if row["state"] == "float")
    return [{"sites": count, "reason": reason} for reason, count in reasons.most_common()]


def explanation(plan: Plan, site: str) -> str:
    """Return a sentence that says which rule decided a site and why.

    Raises:
        ConfigError: there is no such site.
    """
    result = plan.decisions.get(site)
    if result is None:
        near = nearest_in_words(owner_of(site), [owner_of(s) for s in plan.decisions], "the nearest owners are")
        raise ConfigError(f"there is no site {site}; {near}")
    what = (
        result.tensor_type
        if result.spec is None
        else ", ".join(filter(None, (result.spec.dtype.name, _granularity(result))))
    )
    return f"{site} is {result.state} ({what}): {_reason(result)}; decided by {result.rule}"


def _row(decision: Decision, not_exercised: bool) -> dict[str, Any]:
    spec = decision.spec
    return {
        "site": decision.site,
        "op_type": decision.op_type,
        "kind": decision.kind,
        "state": "not exercised" if not_exercised and decision.quantized else decision.state,
        "dtype": decision.tensor_type if spec is None else spec.dtype.name,
        "granularity": _granularity(decision),
        "reason": _reason(decision) if decision.rule == "default" else f"{_reason(decision)} [{decision.rule}]",
    }


def _reason(decision: Decision) -> str:
    narrow = f", computed in {decision.computes_in}" if decision.computes_in else ""
    block = decision.input_block
    return decision.reason + narrow + (f"; its layer rounds its input to int8, per block of {block}" if block else "")


def _granularity(decision: Decision) -> str:
    if decision.dynamic:
        return f"per {'token' if decision.spec is not None and decision.spec.dynamic == 'token' else 'tensor'}, dynamic"
    return str(decision.spec.granularity) if decision.spec is not None and decision.quantized else ""


def _float(site: str, kind: str, reason: str) -> dict[str, Any]:
    facts = {"op_type": "", "kind": kind, "state": "float", "dtype": "float32", "granularity": ""}
    return {"site": site, **facts, "reason": reason}
