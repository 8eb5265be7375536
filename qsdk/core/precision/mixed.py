"""Mixed precision: raise the few sites that must be wider to keep a metric within a budget."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qsdk.core.callbacks import log
from qsdk.core.config.config import QuantConfig
from qsdk.core.config.rules import with_rule
from qsdk.core.errors import ConfigError
from qsdk.core.graph.graph import Graph
from qsdk.core.numerics.dtypes import DType, dtype_named, float32
from qsdk.core.numerics.spec import PerBlock
from qsdk.core.planning.fast_table import LAYERS_ON_CODES, kernel_of
from qsdk.core.planning.operands import operands_of
from qsdk.core.planning.plan import Decision, Plan
from qsdk.core.planning.ties import keeps_grid
from qsdk.core.precision.advice import FloatArray, SiteSample, advise, decibels, where_bits_buy_nothing
from qsdk.core.precision.search import Assignment, Search, TimeBudget, as_it_is
from qsdk.core.report import Report
from qsdk.core.sims.biases import shifts_put_back_on_error
from qsdk.core.sims.state import SimState, put_back_on_error
from qsdk.core.sims.stateful import StatefulSim
from qsdk.core.site import owner_of

Level = Mapping[str, DType]
#: first twice the bits, then float16
LEVELS = ({"weight": "int8", "activation": "uint16"}, {"weight": "float16", "activation": "float16"})
#: in integer kernels a layer has 8 bits all around, or is in floats: wider activations are dequantized in every run
KERNEL_LEVELS = ({"weight": "int8"}, {"weight": "float32", "activation": "float32"})
EVALUATIONS = 12  # of the metric, which may be an hour's work
_LEAST = 0.01  # of the budget; less time is the noise of times
_WORTHWHILE = 0.1  # of the metric that is missing


@dataclass(frozen=True)
class Candidate:
    """Sites that are raised together, because they share an encoding.

    Attributes:
        home: the site that owns the encoding.
        sites: all of them.
        choice: `weight` or `activation`, the config's word for their kind.
        dtype: the present one.
        elements: number of their values (of one batch, for activations).
        noise: theirs at the model's outputs, over the power of the outputs.
        frozen: whether they stay as they are.
        rows: sites that hold rows of a table and share its encoding, with no noise of their own.
    """

    home: str
    sites: tuple[str, ...]
    choice: str
    dtype: DType
    elements: int
    noise: float
    frozen: bool
    rows: tuple[str, ...] = ()


def search_precision(
    sim: StatefulSim,
    config: QuantConfig,
    samples: Mapping[str, SiteSample],
    noise: Mapping[str, float],
    metric: Callable[[Any], float],
    *,
    as_given: Callable[[], AbstractContextManager[bool]],
    max_drop: float,
    levels: Sequence[Mapping[str, str]],
    max_evaluations: int,
    time: TimeBudget | None,
) -> Report:
    """Raise as few sites as possible to keep `metric(sim)` within `max_drop` of the original model's in float32.

    The sim has the chosen precision afterwards, and is unchanged by an error. `noise` (of each site at the outputs,
    over their power) ranks the sites; `as_given` is a context in which stored tensors are the original model's, and
    yields whether verbs changed any; `levels` are the dtypes that a site may be raised to, the cheapest first. The
    search ends after `max_evaluations` of the metric, and the time may limit what is raised. See `qsdk.mixed_precision`
    for the report.
    """
    dtypes = [{choice: dtype_named(name) for choice, name in level.items()} for level in levels]
    with shifts_put_back_on_error(sim) as shifted, put_back_on_error(sim) as before:
        candidates = _candidates(sim, samples, noise)
        advice = advise(sim.plan, sim.encodings, samples, noise)

        def take(assignment: Assignment) -> None:
            sim.restore(before)
            if shifted:
                sim.store_floats(shifted)
            if any(assignment):
                sim.replan(_config_of(config, candidates, assignment, dtypes))

        def evaluate(assignment: Assignment) -> float:
            take(assignment)
            return metric_value(metric(sim))

        references, evaluations = _references(sim, config, metric, as_given, shifted)
        options = [frozenset(i for i, level in enumerate(dtypes, 1) if _raises(c, level)) for c in candidates]
        at_outputs, most = [candidate.noise for candidate in candidates], max_evaluations - evaluations
        wanted = references["reference"] - max_drop
        close: Callable[[Assignment], Assignment] = as_it_is
        if time is not None and time.kernels:
            close = _closing(sim, candidates, dtypes, options)
        search = Search(at_outputs, options, len(dtypes), evaluate, wanted, most, close)
        chosen, met = search.run() if time is None else _in_time(search, time, take, candidates)
        take(chosen)
    raised = [(c, dtypes[level - 1][c.choice]) for c, level in zip(candidates, chosen, strict=True) if level]
    facts: dict[str, Any] = {**references, "max_drop": max_drop, "met": met, **budget_remark(max_drop, references)}
    facts |= {"evaluations": len(search.trials) + evaluations} | ({} if time is None else time.summary(chosen))
    facts |= {"raised": [_raised(*one) for one in raised], "left": _left(before)}
    facts |= _no_gain(sim, search, chosen, [] if time is None else time.no_gain(chosen))
    rows = _rows(search, candidates, dtypes, references["reference"], chosen, time)
    return Report("Mixed precision", rows, {**facts, "advice": advice.to_dict()["rows"]})


def require_metric(metric: Any) -> None:
    """Raise an error for a metric that is no function."""
    if not callable(metric):
        raise ConfigError(
            f"metric={metric!r} is no function; give one of the sim whose value is a number, larger being better: "
            "lambda sim: accuracy(sim)"
        )


def metric_value(metric: Any) -> float:
    """Return what a metric has returned, as a number, which is logged."""
    try:
        value = float(metric)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the metric is {str(metric)[:40]!r}, which is no number; return one, such as float(correct / total)"
        ) from error
    if np.isnan(value):
        raise ConfigError("the metric is NaN; give a function of the sim whose value is a number, larger being better")
    log("metric", value)
    return value


def require_budget(metric: Any, max_drop: Any) -> None:
    """Raise an error for a metric that is no function, or a budget that is no number."""
    require_metric(metric)
    if isinstance(max_drop, bool) or not isinstance(max_drop, int | float | np.number) or not max_drop >= 0.0:
        raise ConfigError(
            f"max_drop={max_drop!r} is no budget; give a number from 0, in the metric's own unit: 0.01 where it "
            "is a share and may lose one percent (inf allows any loss)"
        )


def budget_remark(max_drop: float, references: Mapping[str, float]) -> dict[str, str]:
    """Return what to say of a budget that lets a metric fall to 0, as an entry of the summary; nothing of inf.

    A `reference` (the metric in float) below 0, such as an error turned round, has no 0 to fall to.
    """
    reference = references["reference"]
    if not 0.0 < reference <= max_drop or np.isinf(max_drop):
        return {}
    return {
        "budget_remark": f"max_drop={max_drop:g} lets the metric, which is {reference:.4g} in float, fall to 0 or "
        "below, so nearly any result meets it; it counts in the metric's own unit: "
        f"{reference / 100:.2g} is one percent"
    }


def in_float32(config: QuantConfig) -> QuantConfig:
    """Return a config with every site in float32."""
    return config.override("*", weight=float32, activation=float32, bias=float32)


def _references(
    sim: StatefulSim,
    config: QuantConfig,
    metric: Callable[[Any], float],
    as_given: Callable[[], AbstractContextManager[bool]],
    shifted: Mapping[str, FloatArray],
) -> tuple[dict[str, float], int]:
    """Return the metric in float32, of the original model and of the stored weights, and how often it was called."""
    in_float, before = in_float32(config), sim.snapshot()
    with as_given() as moved:
        sim.replan(in_float)
        given = now = metric_value(metric(sim))
        sim.restore(before)
    if moved:
        sim.replan(in_float)
        if shifted:
            sim.store_floats(shifted)
        now = metric_value(metric(sim))
    return {"reference": given, "float_now": now}, 1 + moved


def _closing(
    sim: StatefulSim, candidates: Sequence[Candidate], levels: Sequence[Level], options: Sequence[frozenset[int]]
) -> Callable[[Assignment], Assignment]:
    """Return what raises, to the first level in floats, all that lost its kernel with what an assignment raises."""
    layers, others = list(coded_layers(sim.graph, sim.plan)), sites_on_codes(sim.graph, sim.plan)
    before = {candidate.home: candidate.dtype for candidate in candidates}
    floats = [
        next((level for level in sorted(possible) if levels[level - 1][one.choice].kind == "float"), 0)
        for one, possible in zip(candidates, options, strict=True)
    ]

    def close(assignment: Assignment) -> Assignment:
        raised = {c.home: levels[at - 1][c.choice] for c, at in zip(candidates, assignment, strict=True) if at}
        lost = raised_with(layers, others, before, raised)
        both = zip(candidates, assignment, floats, strict=True)
        return tuple((in_float or level) if one.home in lost else level for one, level, in_float in both)

    return close


def _in_time(
    search: Search, time: TimeBudget, take: Callable[[Assignment], None], candidates: Sequence[Candidate]
) -> tuple[Assignment, bool]:
    """Return what the search would raise as far as the time allows, and whether both budgets hold.

    The first to be raised are those that take the most noise away for their time, with all that goes with them.
    """
    wanted, _ = search.run()

    def worth(candidate: int) -> float:
        alone = tuple(level if at == candidate else 0 for at, level in enumerate(wanted))
        together = [at for at, level in enumerate(search.close(alone)) if level]
        owners = {owner_of(site) for at in together for site in candidates[at].sites}
        spent = sum(max(time.extra.get(owner, 0.0), 0.0) for owner in owners)
        return sum(search.noise[at] for at in together) / (_LEAST * time.max_ms + spent)

    ranked = sorted(range(len(wanted)), key=worth, reverse=True)
    chosen = time.fitted(wanted, ranked, take, search.close)
    return chosen, search.metric_of(chosen) >= search.wanted and time.holds(chosen)


def _no_gain(sim: StatefulSim, search: Search, chosen: Assignment, of_time: list[str]) -> dict[str, list[str]]:
    """Return the entry that says where bits buy nothing; empty where they buy something everywhere."""
    remarks = [*of_time, *where_bits_buy_nothing(sim.plan, sim.encodings)]
    before, now = search.metric_of((0,) * len(chosen)), search.metric_of(chosen)
    if any(chosen) and now < search.wanted and now - before < _WORTHWHILE * (search.wanted - before):
        moved = f"what is raised moves the metric from {before:.6g} to {now:.6g}, and {search.wanted:.6g} is wanted"
        remarks.insert(0, f"{moved}: these bits buy next to nothing; look at what is left frozen, and at float_now")
    return {"no_gain": remarks} if remarks else {}


def _left(state: SimState) -> list[str]:
    """Return the sites that no search may raise, each with the reason."""
    rounded = (
        ", and what is stored there may be rounded to it (adaround, gptq, tune_blocks), so that more bits would change "
        "nothing"
    )
    return [
        f"{site}: frozen at {encoding.dtype}{rounded if state.plan.decisions[site].kind == 'weight' else ''}; "
        "sim.unfreeze lets it be raised"
        for site, encoding in state.own.items()
        if encoding.frozen
    ]


def _candidates(sim: StatefulSim, samples: Mapping[str, SiteSample], noise: Mapping[str, float]) -> list[Candidate]:
    classes: dict[str, list[Decision]] = {}
    for decision in sim.plan.decisions.values():
        if decision.quantized and decision.kind != "bias":
            classes.setdefault(decision.encoding_site, []).append(decision)
    encodings = sim.encodings
    stored = sim.stored_floats([d.site for members in classes.values() for d in members if d.kind == "weight"])
    elements = {site: sample.elements for site, sample in samples.items()}  # none where no batch reached a site
    elements |= {site: values.size for site, values in stored.items()}
    candidates = []
    for home, members in classes.items():
        stored_here = sim.plan.decisions[home].kind == "weight"
        choice = "weight" if stored_here else "activation"
        rows = tuple(member.site for member in members if stored_here and member.kind != "weight")
        sites = tuple(member.site for member in members if member.site not in rows)
        count, at_outputs = (sum(known.get(site, 0) for site in sites) for known in (elements, noise))
        known = encodings[home]
        candidates.append(Candidate(home, sites, choice, known.dtype, int(count), at_outputs, known.frozen, rows))
    return candidates


def _raises(candidate: Candidate, level: Level) -> bool:
    dtype = level.get(candidate.choice)
    return dtype is not None and not candidate.frozen and (dtype.bits > candidate.dtype.bits or dtype.kind == "float")


def _config_of(
    config: QuantConfig, candidates: Sequence[Candidate], assignment: Assignment, levels: Sequence[Level]
) -> QuantConfig:
    for candidate, level in zip(candidates, assignment, strict=True):
        wanted: Level = levels[level - 1] if level else {}
        chosen = dict.fromkeys(candidate.sites, candidate.choice) | dict.fromkeys(candidate.rows, "activation")
        for site, name in chosen.items():
            if name in wanted:
                choice: dict[str, Any] = {name: wanted[name]}
                config = config.override(site, **choice)
                config = replace(config, rules=with_rule(config.rules[:-1], config.rules[-1]))
    return config


def _raised(candidate: Candidate, dtype: DType) -> str:
    more = f" and {len(candidate.sites) - 1} tied" if len(candidate.sites) > 1 else ""
    at_outputs = f"({decibels(candidate.noise):.1f} dB at the outputs)"
    return f"{candidate.sites[0]}{more}: {candidate.dtype} -> {dtype} {at_outputs}"


def _rows(
    search: Search,
    candidates: Sequence[Candidate],
    levels: Sequence[Level],
    reference: float,
    chosen: Assignment,
    time: TimeBudget | None,
) -> list[dict[str, Any]]:
    """Return a row for each assignment that was tried, by its bits."""

    def bits(choice: str, assignment: Assignment) -> float:
        of_kind = [(c, level) for c, level in zip(candidates, assignment, strict=True) if c.choice == choice]
        widths = [c.elements * (levels[level - 1][choice] if level else c.dtype).bits for c, level in of_kind]
        return sum(widths) / (sum(candidate.elements for candidate, _ in of_kind) or 1)

    rows: list[dict[str, Any]] = []
    for assignment, metric in search.trials:
        row: dict[str, Any] = {f"{choice}_bits": bits(choice, assignment) for choice in ("weight", "activation")}
        row |= {"raised": sum(map(bool, assignment)), "metric": metric, "drop": reference - metric}
        row |= {} if time is None else {"ms": time.times.get(assignment)}
        rows.append(row | {"chosen": assignment == chosen})
    rows.sort(key=lambda row: (row["weight_bits"] + row["activation_bits"], -row["metric"]))
    best = -np.inf
    for row in rows:
        row["pareto"] = row["metric"] > best
        best = max(best, row["metric"])
    return rows


# --- Which sites ONNX Runtime's integer kernels take together: one that is raised alone costs a layer its kernel ------

# A layer that reads codes beside a raised weight, or floats beside codes of a weight, dequantizes in every run what it
# has as codes; a Conv whose result is no codes does too. What is fast says `qsdk.core.planning.fast_table`.

_BYTE = 8  # bits; narrower weights are stored in bytes where a kernel reads them


@dataclass(frozen=True)
class CodedLayer:
    """A layer that has an integer kernel, by the sites whose encodings it computes with.

    Attributes:
        op_type: of the layer.
        fed: what it reads as codes.
        weight: of the layer; None for a product of two activations.
        made: what it gives, where its kernel gives codes alone.
    """

    op_type: str
    fed: tuple[str, ...]
    weight: str | None
    made: tuple[str, ...] = ()

    @property
    def activations(self) -> tuple[str, ...]:
        """Return all but the weight."""
        return (*self.fed, *self.made)

    def has_kernel(self, dtype_of: Callable[[str], DType | None]) -> bool:
        """Return whether its kernel runs where sites have these dtypes, None for floats."""
        weight = "" if self.weight is None else f"/{_stored_in(dtype_of(self.weight))}"
        read = [dtype_of(site) for site in self.fed]
        return None not in [dtype_of(site) for site in self.made] and all(
            dtype is not None and kernel_of(self.op_type + weight, dtype.container) is not None for dtype in read
        )


def _stored_in(dtype: DType | None) -> str:
    if dtype is None or not dtype.is_integer or dtype.bits > _BYTE:
        return "floats"
    return "int8" if dtype.signed else "uint8"


def coded_layers(graph: Graph, plan: Plan) -> Iterator[CodedLayer]:
    """Yield the layers of a plan that ONNX Runtime computes on codes."""
    members = {group.ops[0]: group.ops[-1] for group in plan.groups.values()}
    for index, op in enumerate(graph.ops):
        if op.type not in LAYERS_ON_CODES:
            continue
        weight = next((o for o in operands_of(graph, index) if o.role == "weight" and o.tensor == op.inputs[1]), None)
        if weight is None and (op.type != "MatMul" or any(graph.constant_root(t) is not None for t in op.inputs)):
            continue
        decisions = [_quantized_at(graph, plan, t) for t in op.inputs[: 2 if weight is None else 1]]
        stored = [] if weight is None else [_stored_at(graph, plan, weight.tensor, weight.root)]
        made = [] if op.type != "Conv" else [_stored_at(graph, plan, graph.ops[members.get(index, index)].outputs[0])]
        found = [None if d is None else d.encoding_site for d in (*decisions, *stored, *made)]
        if None in found:
            continue
        sites = [site for site in found if site is not None]
        fed, rest = tuple(sites[: len(decisions)]), sites[len(decisions) :]
        layer = CodedLayer(op.type, fed, rest[0] if stored else None, tuple(rest[len(stored) :]))
        specs = {site: spec for site in sites if (spec := plan.decisions[site].spec) is not None}
        blocks = any(isinstance(spec.granularity, PerBlock) for spec in specs.values())
        if not blocks and layer.has_kernel({site: spec.dtype for site, spec in specs.items()}.get):
            yield layer


def _stored_at(graph: Graph, plan: Plan, *tensors: int) -> Decision | None:
    """Return the decision on the first of some tensors that is quantized."""
    decisions = (plan.decisions.get(graph.tensors[tensor].site or "") for tensor in tensors)
    return next((decision for decision in decisions if decision is not None and decision.quantized), None)


def _quantized_at(graph: Graph, plan: Plan, tensor: int | None) -> Decision | None:
    """Return the decision on a tensor, or on what it holds the values of."""
    while tensor is not None:
        decision = _stored_at(graph, plan, tensor)
        maker = graph.maker(tensor)
        if decision is not None or maker is None or not keeps_grid(graph, maker):
            return decision
        tensor = maker.inputs[0]
    return None


def sites_on_codes(graph: Graph, plan: Plan) -> frozenset[str]:
    """Return the sites whose codes an op other than a layer computes with: sums, products, Concats."""
    found = set[str]()
    for op in graph.ops:
        kernel = None if op.type in LAYERS_ON_CODES else kernel_of(op.type)
        if kernel is not None and kernel.startswith("Q"):
            floats = [t for t in (*op.inputs, *op.outputs) if t is not None and graph.tensors[t].is_float]
            around = [_quantized_at(graph, plan, t) for t in floats]
            sites = [d.encoding_site for d in around if d is not None and d.kind != "bias"]
            found.update(sites if len(sites) == len(floats) else ())
    return frozenset(found)


def raised_with(
    layers: Sequence[CodedLayer], others: frozenset[str], dtypes: Mapping[str, DType], raised: Mapping[str, DType]
) -> set[str]:
    """Return what is to be raised to floats beside some sites, so that nothing is dequantized for nothing.

    A layer that loses its kernel takes its weight with it, a product of activations both; and an activation that no
    kernel reads or writes as codes then goes too.

    Args:
        layers: those with kernels before anything is raised.
        others: sites that other kernels read or write.
        dtypes: site -> its dtype before.
        raised: site -> the dtype that it is raised to.
    """
    found = set[str]()

    def dtype_of(site: str) -> DType | None:
        dtype = None if site in found else raised.get(site, dtypes.get(site))
        return dtype if dtype is not None and dtype.is_integer else None

    size = -1
    while size != len(found):
        size = len(found)
        kept = [layer for layer in layers if layer.has_kernel(dtype_of)]
        on_codes = others.union(site for layer in kept for site in layer.activations)
        for layer in layers:
            if layer not in kept:
                lost = {*(layer.fed if layer.weight is None else [layer.weight]), *(set(layer.activations) - on_codes)}
                found.update(site for site in lost if dtype_of(site) is not None)
    return found
