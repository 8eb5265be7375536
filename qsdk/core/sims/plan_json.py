"""Plans as JSON: every decision in full, and the differences between two plans."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from qsdk.core.numerics.dtypes import dtype_named
from qsdk.core.numerics.spec import Granularity, PerBlock, PerChannel, PerTensor, Spec, axis_of, block_size_of
from qsdk.core.planning.plan import Decision, Plan, Turns

_TUPLES = ("bias_of", "shape")
#: fields that explain a decision and are no part of it
_WORDS = ("reason", "rule", "shape", "tensor_type", "turns")
#: fields that only some decisions have
_RARE = ("computes_in", "turns", "input_block")


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain values for JSON."""
    return {
        "decisions": [_decision_to_json(decision) for decision in plan.decisions.values()],
        "inside": [_decision_to_json(decision) for decision in plan.inside],
    }


def read_plan(data: Mapping[str, Any]) -> Plan:
    """Return the plan that `plan_to_json` wrote.

    Raises:
        KeyError, TypeError, ValueError: the data is something else.
    """
    decisions = [_read_decision(entry) for entry in data["decisions"]]
    return Plan({decision.site: decision for decision in decisions}, tuple(map(_read_decision, data["inside"])))


def different_sites(left: Plan, right: Plan) -> list[str]:
    """Return the sites that two plans decide differently, or that only one of them has."""
    names = dict.fromkeys((*left.decisions, *right.decisions))
    return [name for name in names if _facts(left.decisions.get(name)) != _facts(right.decisions.get(name))]


def _facts(decision: Decision | None) -> dict[str, Any] | None:
    return None if decision is None else {name: value for name, value in vars(decision).items() if name not in _WORDS}


def _decision_to_json(decision: Decision) -> dict[str, Any]:
    facts = {name: value for name, value in vars(decision).items() if value or name not in _RARE}
    return {**facts, "spec": None if decision.spec is None else _spec_to_json(decision.spec)}


def _spec_to_json(spec: Spec) -> dict[str, Any]:
    where = {"axis": axis_of(spec.granularity), "block_size": block_size_of(spec.granularity)}
    facts = {name: value for name, value in vars(spec).items() if name != "granularity"}
    scale_dtype = None if spec.scale_dtype is None else spec.scale_dtype.name
    return {**facts, "dtype": spec.dtype.name, "scale_dtype": scale_dtype, **where}


def _read_decision(entry: Mapping[str, Any]) -> Decision:
    # an older file lacks the float type of the tensor, which was float32, islands, what turns, and blocks
    later = {"tensor_type": "float32", "computes_in": "", "turns": None, "input_block": None}
    given = {field.name: entry[field.name] for field in fields(Decision) if field.name not in later}
    given |= {name: entry.get(name, default) for name, default in later.items()}
    for name in _TUPLES:
        given[name] = None if given[name] is None else tuple(given[name])
    given["turns"] = None if given["turns"] is None else Turns(*given["turns"])
    return Decision(**{**given, "spec": None if given["spec"] is None else _read_spec(given["spec"])})


def _read_spec(entry: Mapping[str, Any]) -> Spec:
    # an older file lacks the options that did not exist yet
    given = {field.name: entry[field.name] for field in fields(Spec) if field.name in entry}
    if entry.get("power_of_two"):
        given["scale_bits"] = 1
    axis, size = entry["axis"], entry["block_size"]
    granularity: Granularity = PerTensor()
    if axis is not None:
        granularity = PerChannel(axis) if size is None else PerBlock(axis, size)
    fixed = given["fixed_range"]
    given["fixed_range"] = None if fixed is None else tuple(fixed)
    if given.get("scale_dtype") is not None:
        given["scale_dtype"] = dtype_named(given["scale_dtype"])
    return Spec(**{**given, "dtype": dtype_named(given["dtype"]), "granularity": granularity})
