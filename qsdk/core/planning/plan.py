"""Plans: the decision for every tensor, and the reason. Plain frozen data."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from qsdk.core.errors import ConfigError
from qsdk.core.numerics.dtypes import DType
from qsdk.core.numerics.spec import Kind, Spec
from qsdk.core.patterns.supergroup import Supergroup
from qsdk.core.report import Report
from qsdk.core.site import nearest_in_words, owner_of

#: the `rule` of a decision that follows from the ranges of a calibration (`qsdk.core.ranges.unrepresentable`)
BY_CALIBRATION = "the calibration"
OF_CACHE = "keys and values of the cache"


class Turns(NamedTuple):
    """Pairs of values that turn with the position of a token.

    Attributes:
        layout: of n values in pairs: `halves` (i, i + n/2), or `pairs` (i, i + 1).
        size: n; the first ones along the axis.
        axis: that they lie along, counted from the last one.
    """

    layout: str
    size: int
    axis: int = -1


#: as an `input_block`: uint8 with the range of the whole tensor, as DynamicQuantizeLinear finds it
WHOLE = -1


@dataclass(frozen=True)
class Decision:
    """The plan's entry for one site.

    Attributes:
        site: its name; in parentheses where the tensor has none (inside an op, or a scalar).
        op_type: of the op that computes the tensor, or reads it if it is stored.
        kind: weight, bias, activation, input or output.
        spec: how it is to be quantized, or None where it stays float.
        reason: why.
        rule: the rule that decided, or "default".
        tied_to: the site whose encoding it shares, or None.
        passes_through: its values are already on the grid of `tied_to`, so quantizing again changes nothing.
        bias_of: `(input site, weight site)` whose scales multiply to a bias's scale.
        shape: of the tensor, where known.
        tensor_type: float type of the tensor in the model.
        computes_in: the narrow float type in which the op computes that makes the tensor (`planning.islands`), or "".
        turns: which values turn with the position of a token (`planning.turning`): their range is for every position.
        input_block: of a weight whose layers round their float input to int8: the input channels of each scale;
            `WHOLE` of a layer that rounds its input as a whole; with an LSTM's recurrent weight also its state in each
            step.
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
    tensor_type: str = "float32"
    computes_in: str = ""
    turns: Turns | None = None
    input_block: int | None = None

    @property
    def quantized(self) -> bool:
        """Return whether the site has an encoding (its own, shared or derived)."""
        return self.spec is not None and self.spec.has_encoding

    @property
    def dynamic(self) -> bool:
        """Return whether the site is quantized with a range found while the model runs."""
        return self.spec is not None and bool(self.spec.dynamic) and not self.quantized

    @property
    def tied_dynamically(self) -> bool:
        """Return whether the site only holds values of `tied_to`, which is quantized dynamically."""
        return self.spec is None and self.tied_to is not None

    @property
    def state(self) -> str:
        """Return `quantized`, `tied` or `float`."""
        if self.tied_to:
            return "tied"
        return "quantized" if self.quantized or self.dynamic else "float"

    @property
    def encoding_site(self) -> str:
        """Return the site that owns the encoding."""
        return self.tied_to or self.site


@dataclass(frozen=True)
class Plan:
    """The decision for each site, in graph order.

    Attributes:
        decisions: by site.
        inside: those for tensors without a site.
        groups: op of the graph -> the supergroup that it is quantized in. Not saved: it follows from graph and config.
    """

    decisions: Mapping[str, Decision]
    inside: tuple[Decision, ...] = ()
    groups: Mapping[int, Supergroup] = field(default_factory=dict, compare=False, repr=False)

    def calibrated_sites(self) -> list[str]:
        """Return the sites whose activation ranges must be observed."""
        return [d.site for d in self.decisions.values() if d.quantized and d.kind not in ("weight", "bias")]

    def only_weights(self) -> bool:
        """Return whether nothing that is computed is quantized, but for keys and values of a cache."""
        computed = (d for d in self.decisions.values() if d.kind not in ("weight", "bias"))
        owners = (self.decisions[d.encoding_site] for d in computed if d.quantized or d.dynamic)
        return all(owner.reason == OF_CACHE for owner in owners)


def casts_of(plan: Plan) -> dict[str, DType]:
    """Return float16 or bfloat16 for each site that is stored in one of them, by site."""
    specs = {site: decision.spec for site, decision in plan.decisions.items()}
    return {site: spec.dtype for site, spec in specs.items() if spec is not None and spec.dtype.kind == "float"}


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

    The rows given have `op_type` and `dtype`, and `state` where they can be float.
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
    """Return a sentence that says which rule decided a site and why."""
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
    block, rounds = decision.input_block, ""
    if block is not None:
        rounds = f"; its layer rounds its input to int8, per block of {block}"
        states = ", and its state in each step," if decision.op_type == "LSTM" else ""
        rounds = f"; its layer rounds its input{states} to uint8" if block == WHOLE else rounds
    return decision.reason + narrow + rounds


def _granularity(decision: Decision) -> str:
    spec = decision.spec
    if spec is None or not (decision.quantized or decision.dynamic):
        return ""
    if spec.blocks is not None:
        return f"per block of {spec.blocks.block_size} (last axis), dynamic"
    return f"per {'token' if spec.dynamic == 'token' else 'tensor'}, dynamic" if spec.dynamic else str(spec.granularity)


def _float(site: str, kind: str, reason: str) -> dict[str, Any]:
    facts = {"op_type": "", "kind": kind, "state": "float", "dtype": "float32", "granularity": ""}
    return {"site": site, **facts, "reason": reason}
