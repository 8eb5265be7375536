"""The verbs that scale channels: one stored tensor is divided by factors, and the next multiplied."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack

import numpy as np

from qsdk.core.channel_maps import equalize as equalizing
from qsdk.core.channel_maps.scale_groups import ScaleGroup, find_scale_groups
from qsdk.core.channel_maps.scalings import (
    FloatArray,
    Scalings,
    blocked_row,
    obstacle,
    row,
    specs_of,
    spread,
)
from qsdk.core.channel_maps.search import (
    ChannelObserver,
    FactorChoice,
    ObservedGroups,
    clip_all,
    observers_for,
    search_awq,
    search_smooth_quant,
)
from qsdk.core.errors import ConfigError
from qsdk.core.graph.graph import Graph, as_relu, clips_at_six
from qsdk.core.report import Report
from qsdk.core.run_options import DataOptions, Run, run_of
from qsdk.core.sims.biases import without_shifts
from qsdk.core.sims.state import put_back_on_error
from qsdk.core.sims.stateful import require_sim
from qsdk.verbs.calibrate import calibrate
from qsdk.verbs.doors.choose import Sim, door_of
from qsdk.verbs.doors.same_on_ranks import same_on_ranks

_ALPHAS = tuple(step / 20 for step in range(21))


@same_on_ranks
def equalize(
    sim: Sim,
    data: Iterable[Any] | None = None,
    *,
    absorb_bias: bool = True,
    relu6: Literal["keep", "relu"] = "keep",
    iterations: int = 50,
    **options: Unpack[DataOptions],
) -> Report:
    """Make the ranges of weights equal across layers, for weights with one scale per tensor (Nagel et al. 2019).

    Channel by channel, the weights that compute a tensor are divided, and those that read it multiplied, by
    `sqrt(r1 / r2)`, where r1 and r2 are the largest weights on either side; the float model computes the same. A
    channel of zeros keeps the factor 1. Layers that add to one tensor (a residual stream) are scaled together, with all
    that read it.

    Args:
        sim: of either side. A calibrated sim is calibrated again, with the method of the last time.
        data: batches as for `calibrate`; None will do where the sim has no activation to calibrate again.
        absorb_bias: move the lower bound of activations behind a ReLU into the biases of the next layers, where nothing
            is padded. The bound is the minimum over `data`, or without data the mean less three standard deviations
            of a folded BatchNorm (as in the paper; not exact).
        relu6: `keep` scales nothing across a ReLU6, which cuts all channels at 6; `relu` replaces it by a ReLU where
            that lets factors pass, which changes the float model wherever a value was above 6.
        iterations: upper bound of passes over all layers; it ends when nothing changes any more.
        options: `forward`, `progress`; see `qsdk.options`.

    Returns:
        Rows `group`, `spread_before`, `spread_after` (of the ranges of the producers' weights: largest over geometric
        mean), `absorbed` (channels), `smallest_factor`, `largest_factor`, `reason` (why a group is unchanged).

    Raises:
        ConfigError: an option that does not exist, or data that is missing.
        DataError: data that the model does not take. Whatever is raised, the sim is unchanged.

    Examples:
        >>> import torch, qsdk
        >>> layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        >>> _ = qsdk.calibrate(sim := qsdk.quantize(layers, x := torch.randn(64, 8), "w4a8"), [x], progress=False)
        >>> qsdk.equalize(sim, [x], progress=False).summary["scaled"]
        1
    """
    run = run_of(equalize, options)
    _require_equalizable(sim, data, relu6)
    started = time.perf_counter()
    with put_back_on_error(sim, weights=True), without_shifts(sim):
        graph, opened = _without_relu6(sim) if relu6 == "relu" else (door_of(sim).running_graph(), set())
        scalings, blocked = _scalings(sim, graph, equalizing.equalization_obstacle)
        numbers = range(len(scalings.groups))
        before = [spread(equalizing.ranges(scalings, number)[0]) for number in numbers]
        taken = equalizing.equalize(scalings, iterations)
        biases, absorbed, looked = _absorbed(sim, scalings, data, absorb_bias, run)
        after = [spread(equalizing.ranges(scalings, number)[0]) for number in numbers]
        door_of(sim).unbind(opened)
        passes = looked + _write(sim, scalings, biases, data, run)
        columns = [{"spread_before": before[n], "spread_after": after[n], "absorbed": absorbed[n]} for n in numbers]
        rows = [row(scalings.groups[n], graph, scalings.factors[n], **columns[n]) for n in numbers]
        facts = {"iterations": taken, "relu6_as_relu": len(opened), "float_passes": passes}
        return _report("Equalization", rows, blocked, sim, started, facts)


def _require_equalizable(sim: Sim, data: Iterable[Any] | None, relu6: str) -> None:
    require_sim(sim)
    if relu6 not in ("keep", "relu"):
        raise ConfigError(f"relu6={relu6!r}; give 'keep' or 'relu'")
    if data is None and any(sim.ready().values()) and sim.plan.calibrated_sites():
        raise ConfigError("the sim was calibrated, and its ranges will have changed: give data to calibrate it again")


@same_on_ranks
def smooth_quant(
    sim: Sim,
    data: Iterable[Any],
    *,
    alpha: float | Literal["auto"] = 0.5,
    **options: Unpack[DataOptions],
) -> Report:
    """Move outliers of activations into weights, by factors that leave the float model as it is (Xiao et al. 2023).

    The weights of each group of layers that read one tensor are multiplied by `amax(X)^alpha / amax(W)^(1 - alpha)` per
    channel; the norm or layer before is divided by it. Queries and keys, which are multiplied with each other, share
    factors likewise.

    Args:
        sim: of either side. A calibrated sim is calibrated again, with the method of the last time.
        data: batches as for `calibrate`, in a list or DataLoader: they are read twice.
        alpha: 0 leaves the outliers in the activations, 1 moves all of them. `auto` searches it for each group by the
            output error of its layers, with inputs and weights quantized as in the sim; a group that does not improve
            stays as it is. Try it where 0.5 loses accuracy.
        options: `forward`, `progress`; see `qsdk.options`.

    Returns:
        Rows `group`, `alpha`, `spread_before` and `spread_after` (of the inputs' channels: the largest magnitude over
        the geometric mean), `error_before` and `error_after` (relative, of the layers' outputs, by a sample),
        `smallest_factor`, `largest_factor`, `reason` (why a group stays as it is).

    Raises:
        ConfigError: an alpha outside 0..1.
        DataError: data that the model does not take. Whatever is raised, the sim is unchanged.

    Examples:
        >>> import torch, qsdk
        >>> model, x = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)), torch.randn(64, 8)
        >>> _ = qsdk.calibrate(sim := qsdk.quantize(model, x), [x], progress=False)
        >>> qsdk.smooth_quant(sim, [x], alpha="auto", progress=False).summary["scaled"]
        1
    """
    run = run_of(smooth_quant, options)
    require_sim(sim)
    if alpha != "auto" and not 0 <= float(alpha) <= 1:
        raise ConfigError(f"alpha={alpha!r}; give a number from 0 to 1, or 'auto'")
    alphas = _ALPHAS if alpha == "auto" else (float(alpha),)

    def search(seen: ObservedGroups, number: int) -> FactorChoice:
        return search_smooth_quant(seen, number, alphas)

    return _searched(sim, data, run, "SmoothQuant", search, lambda group: "")


@same_on_ranks
def awq(
    sim: Sim,
    data: Iterable[Any],
    *,
    grid: int = 20,
    clip: bool = True,
    **options: Unpack[DataOptions],
) -> Report:
    """Scale up the weights that multiply large activations, so that their grid is finer (Lin et al. 2024, AWQ).

    The weights of each group of layers that read one tensor are multiplied by `mean(|X|)^alpha` per channel, and the
    norm or layer before is divided by it; alpha is searched by the output error of the layers. The float model computes
    the same. Then each block (channel, tensor) of every weight may get a narrower range, where its part of the output
    gets closer by it.

    Args:
        sim: of either side. A calibrated sim is calibrated again, with the method of the last time.
        data: batches as for `calibrate`, in a list or DataLoader: they are read twice.
        grid: number of values of alpha to try, beside 0. More make a finer search that takes longer.
        clip: search narrower ranges as well; only in a calibrated sim.
        options: `forward`, `progress`; see `qsdk.options`.

    Returns:
        Rows as of `smooth_quant`; the summary has `clipped` (weights), and the mean of their layers' relative errors
        before and after it.

    Raises:
        ConfigError: a grid without a value.
        DataError: data that the model does not take. Whatever is raised, the sim is unchanged.

    Examples:
        >>> import torch, qsdk
        >>> model, x = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)), torch.randn(64, 8)
        >>> _ = qsdk.calibrate(sim := qsdk.quantize(model, x, qsdk.weight_only("int4")), [x], progress=False)
        >>> qsdk.awq(sim, [x], progress=False).summary["scaled"]
        1
    """
    run = run_of(awq, options)
    require_sim(sim)
    if grid < 1:
        raise ConfigError(f"grid={grid}; at least one value of alpha must be tried")

    def search(seen: ObservedGroups, number: int) -> FactorChoice:
        return search_awq(seen, number, grid)

    last = _clip if clip else None
    return _searched(sim, data, run, "AWQ", search, _without_layers, last)


def _searched(
    sim: Sim,
    data: Iterable[Any],
    run: Run,
    title: str,
    search: Callable[[ObservedGroups, int], FactorChoice],
    unfit: Callable[[ScaleGroup], str],
    last: Callable[[Sim, ObservedGroups], dict[str, Any]] | None = None,
) -> Report:
    started = time.perf_counter()
    with put_back_on_error(sim, weights=True), without_shifts(sim):
        scalings, blocked = _scalings(sim, door_of(sim).running_graph(), unfit)
        observers = observers_for(scalings.groups, sim.graph)
        _observe(sim, data, observers, run)
        blocks = {s: d.input_block for s, d in sim.plan.decisions.items() if d.input_block is not None}
        seen = ObservedGroups(scalings, observers, specs_of(sim.plan), blocks)
        rows = [_row_of(seen, number, search(seen, number)) for number in range(len(scalings.groups))]
        passes = 1 + _write(sim, scalings, {}, data, run)
        facts = {"float_passes": passes} | (last(sim, seen) if last is not None else {})
        return _report(title, rows, blocked, sim, started, facts)


def _row_of(seen: ObservedGroups, number: int, chosen: FactorChoice) -> dict[str, Any]:
    before = seen.shrinking(number)
    seen.scalings.multiply(number, chosen.factors)
    return row(
        seen.scalings.groups[number],
        seen.graph,
        chosen.factors,
        alpha=chosen.alpha,
        spread_before=spread(before),
        spread_after=spread(seen.shrinking(number)),
        error_before=chosen.error_before,
        error_after=chosen.error_after,
    )


def _clip(sim: Sim, seen: ObservedGroups) -> dict[str, Any]:
    """Narrow the ranges of the weights of a calibrated sim."""
    state = sim.snapshot()
    if not state.own:
        return {"clipped": "no: the sim is not calibrated"}
    clippings = clip_all(seen, state, lambda site: sim.stored_floats([site]).get(site))
    sim.restore(replace(state, own={**state.own, **{site: one.encoding for site, one in clippings.items()}}))
    errors = np.array([[one.error_before, one.error_after] for one in clippings.values()]).reshape(-1, 2)
    before, after = errors.mean(axis=0) if len(errors) else (0.0, 0.0)
    return {"clipped": len(clippings), "error_before_clipping": before, "error_after_clipping": after}


def _absorbed(
    sim: Sim, scalings: Scalings, data: Iterable[Any] | None, wanted: bool, run: Run
) -> tuple[dict[int, FloatArray], list[int], int]:
    """Return new biases by tensor id, the number of lowered channels of each group, and the passes it took."""
    graph = scalings.graph
    counts = [0] * len(scalings.groups)
    biases: dict[int, FloatArray] = {}
    observers: dict[int, ChannelObserver] = {}
    fit = [n for n, group in enumerate(scalings.groups) if wanted and not equalizing.absorption_obstacle(graph, group)]
    if data is not None and fit:
        observers = observers_for([scalings.groups[n] for n in fit], graph)
        _observe(sim, data, observers, run)
    for number in fit:
        group = scalings.groups[number]
        by = equalizing.activation_minimum(group, graph, observers, sim.folded_norms) / scalings.factors[number]
        counts[number] = int((by > 0).sum())
        if counts[number]:
            sim.folded_norms.pop(group.producers[0].owner(graph), None)  # its mean has moved
        biases.update(equalizing.shifted_biases(graph, group, scalings, by, biases))
    return biases, counts, 1 if observers else 0


# --- steps that all of them share -----------------------------------------------------------------------------------


def _without_relu6(sim: Sim) -> tuple[Graph, set[str]]:
    """Return the graph with a Relu for every ReLU6 that factors could then pass, and the sites of these."""
    clips = clips_at_six(sim.graph)
    trial = as_relu(sim.graph, clips)
    scalings, _ = _scalings(sim, trial, equalizing.equalization_obstacle)
    within = {tensor for group in scalings.groups for tensor in group.members}
    wanted = {site for site, op in clips.items() if trial.ops[op].outputs[0] in within}
    reasons = door_of(sim).why_bounded(clips, wanted)
    opened = {site for site, reason in reasons.items() if not reason}
    graph = door_of(sim).running_graph()
    already = set(clips) - set(clips_at_six(graph))
    return as_relu(sim.graph, opened | already), opened - already


def _scalings(sim: Sim, graph: Graph, unfit: Callable[[ScaleGroup], str]) -> tuple[Scalings, list[ScaleGroup]]:
    """Return the groups that can be scaled, with factors of 1, and those that cannot."""
    stored, own = door_of(sim).stored_values(), sim.snapshot().own
    groups = []
    for group in find_scale_groups(graph):
        roots = [edit.root for edit in group.edits]
        blocked = group.blocked or obstacle(roots, group.members, graph, sim.plan, own, stored) or unfit(group)
        groups.append(replace(group, blocked=blocked))
    return Scalings(graph, [g for g in groups if not g.blocked], stored), [g for g in groups if g.blocked]


def _without_layers(group: ScaleGroup) -> str:
    """Return why no layer reads a group, or "" where one does."""
    return "" if any(end.linear for end in group.consumers) else "no weight is multiplied with it"


def _observe(sim: Sim, data: Iterable[Any], observers: Mapping[int, ChannelObserver], run: Run) -> None:
    by_site = {sim.graph.tensors[tensor].site or "": observer for tensor, observer in observers.items()}
    door_of(sim, run).visit(data, lambda site, x: by_site[site].add(x), title="scaling", sites=by_site)


def _write(sim: Sim, scalings: Scalings, biases: Mapping[int, FloatArray], data: Iterable[Any] | None, run: Run) -> int:
    """Store the scaled tensors, and calibrate a calibrated sim again; return the number of passes."""
    calibrated, tensors = any(sim.ready().values()), sim.graph.tensors
    values = {tensors[root].name: scalings.value(root) for root in scalings.changed()}
    values |= {tensors[root].name: value for root, value in biases.items()}
    door_of(sim).store_values(values)
    sim.folded_norms.update(scalings.norms(sim.folded_norms))
    if not calibrated:
        return 0
    batches = [] if data is None else data
    calibrate(sim, batches, **sim.methods.options, forward=run.forward, progress=run.progress)
    return 1 if sim.plan.calibrated_sites() else 0


def _report(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    blocked: Sequence[ScaleGroup],
    sim: Sim,
    started: float,
    facts: Mapping[str, Any],
) -> Report:
    columns = [name for name in (rows[0] if rows else {}) if name not in ("group", "reason")]
    left = [blocked_row(group, sim.graph, columns) for group in blocked]
    again = sim.methods.method if any(sim.ready().values()) else "no: it was not calibrated before"
    summary = {"scaled": len(rows), "left": len(left), **facts, "calibrated_again": again}
    return Report(title, [*rows, *left], {**summary, "seconds": time.perf_counter() - started})
