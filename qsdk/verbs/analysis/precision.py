"""The verbs on precision: sites that one scale serves badly, and the few that must be wider."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Unpack

from onnx_backend.runtimes.registry import timed_runtime
from qsdk.core.config.for_dialect import TimedRuntime
from qsdk.core.precision import advice
from qsdk.core.precision.advice import SiteSample
from qsdk.core.precision.mixed import EVALUATIONS, KERNEL_LEVELS, LEVELS, in_float32, require_budget, search_precision
from qsdk.core.precision.search import TimeBudget
from qsdk.core.report import Report
from qsdk.core.run_options import DataOptions, Run, run_of
from qsdk.core.sims.replan import require_config
from qsdk.core.sims.state import put_back_on_error
from qsdk.core.sims.stateful import require_sim
from qsdk.progress import progress_of
from qsdk.verbs.analysis.noise import layers_of, noise_of_layers, rounded_facts
from qsdk.verbs.analysis.profile import ms_by_layer, profile
from qsdk.verbs.analysis.sensitivity import sensitivity_report
from qsdk.verbs.doors.choose import Sim, door_of


def advise(sim: Sim, data: Iterable[Any], **options: Unpack[DataOptions]) -> Report:
    """Name the sites that their encoding serves badly, each with the cheapest remedy.

    A site is named where a tie leaves it a fraction of its grid (the scores of a detector beside its boxes), where one
    channel takes the grid from the others, or where its SQNR is below 20 dB for another reason. The remedies, from the
    cheapest: untie, uint16, float16.

    Args:
        sim: calibrated, of either side.
        data: as for `calibrate`; one pass in float, of which a bounded sample is kept, and the pass of `sensitivity`.
        options: `forward`, `progress`; see `qsdk.options`.

    Returns:
        Rows `site`, `dtype`, `sqnr_db` (of its own values), `share` (of all noise at the model's outputs, the largest
        first), `finding`, `remedy` (a line for the config), `sqnr_db_then`. Summary: `sites`, `ranking`: the rows of
        `sensitivity`, and its `rounded`.

    Raises:
        CalibrationError: the sim is not calibrated.
        DataError: data that the model does not take.

    Examples:
        >>> import torch, qsdk
        >>> x = torch.randn(64, 8)
        >>> _ = qsdk.calibrate(sim := qsdk.quantize(torch.nn.Linear(8, 4), x, "w4a8"), [x], progress=False)
        >>> qsdk.analysis.advise(sim, [x], progress=False).summary["ranking"][0]["kind"]
        'weights'
    """
    run = run_of(advise, options)
    samples, noise, facts = _ranked(sim, data, run)
    report = advice.advise(sim.plan, sim.encodings, samples, noise)
    return Report(report.title, report.rows, {**report.summary, **facts})


def mixed_precision(
    sim: Sim,
    data: Iterable[Any],
    metric: Callable[[Any], float],
    *,
    max_drop: float | None = None,
    levels: Sequence[Mapping[str, str]] | None = None,
    max_evaluations: int = EVALUATIONS,
    max_ms: float | None = None,
    runtime: TimedRuntime | Callable[[Any], float] = "onnxruntime",
    **options: Unpack[DataOptions],
) -> Report:
    """Raise as few sites as possible to keep a metric within a budget of that of the original float model.

    `sensitivity` ranks the sites by the noise that each causes at the outputs. A bisection over that ranking and a
    pruning then call `metric` a dozen times at most, never twice for the same assignment. Frozen sites stay as they
    are, and the bias of a raised weight loses the shift that its old rounding needed.

    Args:
        sim: calibrated, of either side. Afterwards it has the chosen precision.
        data: as for `calibrate`.
        metric: called with the sim; larger is better.
        max_drop: always to be given: how much it may fall below that of the float model that was given to `quantize`.
        levels: the dtypes that a site may be raised to, the cheapest first, by `weight` and `activation`; None for
            int8 and uint16, then float16, and with `max_ms` in ONNX Runtime for weights in int8, then float32.
        max_evaluations: of the metric; the few that show whether a level suffices are made in any case.
        max_ms: milliseconds that a run of the exported file may take, to within 5 %. Sites are raised only as far as
            that allows, though the metric may then be missed. In ONNX Runtime a layer and what it reads are raised
            together, where its integer kernel would be lost.
        runtime: to measure in, by `profile` on random values; or a function of the sim that returns milliseconds.
        options: `forward`, `progress`; see `qsdk.options`.

    Returns:
        Rows by cost: `weight_bits` and `activation_bits` (means per element), `raised`, `metric`, `drop`, `chosen`,
        `pareto` (nothing cheaper is as good). Summary: `reference` (of the model that was given), `float_now` (of the
        values stored now), `met` (False: even with every site at the last level, which the sim then
        has), `budget_remark` (where `max_drop` lets it fall to 0), `evaluations`, `raised` (the sites), `left` (frozen
        ones), `no_gain` (where bits buy nothing, if anywhere), `advice` (rows of `advise`), `ranking` (rows of
        `sensitivity`, before the search); with `max_ms` also `ms`, `ms_before` and `float_ms` (`no_gain` says where
        integers are no faster), and `ms` of the measured rows.

    Raises:
        CalibrationError: the sim is not calibrated.
        ConfigError: a budget that is no number, or a metric that is NaN. The sim is unchanged by any error.
        DataError: data that the model does not take.

    Examples:
        >>> import torch, qsdk
        >>> model, x = torch.nn.Linear(4, 2), torch.randn(8, 4)
        >>> _ = qsdk.calibrate(sim := qsdk.quantize(model, x, qsdk.w4a8()), [x], progress=False)
        >>> def closeness(sim): return -float((sim(x) - model(x).detach()).abs().max())
        >>> qsdk.mixed_precision(sim, [x], closeness, max_drop=0.05, progress=False).summary["met"]
        True
    """
    run = run_of(mixed_precision, options)
    require_budget(metric, max_drop)
    assert max_drop is not None
    door, config = door_of(sim), require_config(sim.config)
    time = None if max_ms is None else TimeBudget(max_ms, _stopwatch(sim, runtime), **times_in_float(sim, runtime))
    if time is not None:
        time.kernels = runtime == "onnxruntime"
    levels = levels or (KERNEL_LEVELS if time is not None and time.kernels else LEVELS)
    samples, noise, facts = _ranked(sim, data, run)
    bounds: dict[str, Any] = {"max_drop": max_drop, "levels": levels, "max_evaluations": max_evaluations, "time": time}
    with _counted(metric, max_evaluations, run.progress) as counted:
        report = search_precision(sim, config, samples, noise, counted, as_given=door.as_given, **bounds)
    return Report(report.title, report.rows, {**report.summary, **facts})


def _ranked(sim: Sim, data: Iterable[Any], run: Run) -> tuple[dict[str, SiteSample], dict[str, float], dict[str, Any]]:
    """Return a sample and the noise at the outputs, over their power, of each site, and `ranking` and `rounded`."""
    require_sim(sim)
    batches = list(data) if isinstance(data, Iterator) else data
    _ = sim.encodings  # a missing calibration is reported before the data is used up
    samples: defaultdict[str, SiteSample] = defaultdict(SiteSample)
    door_of(sim, run).visit(batches, lambda site, x: samples[site].add(x), title="sample")
    layers = layers_of(sim.plan)
    found, _ = noise_of_layers(sim, batches, layers, run)
    if found.signal > 0.0:
        noise = {site: power / found.signal for site, power in found.alone.items()}
    else:  # outputs without floats, such as classes, show no noise: each site's own ranks it
        values = {site: sample.values for site, sample in samples.items()} | dict(sim.stored_floats(sim.encodings))
        noise = {s: advice.noise_to_signal(values[s], known) for s, known in sim.encodings.items() if s in values}
    ranking = sensitivity_report(layers, found, {}, {}).to_dict()["rows"]
    return samples, noise, {**rounded_facts(sim), "ranking": ranking}


@contextmanager
def _counted(metric: Callable[[Any], float], most: int, progress: bool) -> Iterator[Callable[[Any], float]]:
    """Yield a metric that moves a progress bar with every evaluation."""
    with progress_of("mixed_precision", most, show=progress, unit="evaluation") as bar:

        def counted(current: Any) -> float:
            value = metric(current)
            bar.now(f"metric {str(value)[:8]}")
            bar.done()
            return value

        yield counted


def _stopwatch(sim: Sim, runtime: TimedRuntime | Callable[[Any], float]) -> Callable[[], float]:
    """Return a function that measures the milliseconds of a sim as it is then."""
    if callable(runtime):
        return partial(runtime, sim)
    timed_runtime(runtime)
    return lambda: float(profile(sim, runtime=runtime, progress=False).summary["ms"])


def times_in_float(sim: Sim, runtime: TimedRuntime | Callable[[Any], float]) -> dict[str, Any]:
    """Return `float_ms`, the milliseconds of a sim with every site in float, and `extra`, what each layer takes more.

    Nothing of a Q/DQ file, which has no float model; a function that measures says nothing of layers.
    """
    if sim.config is None:
        return {}
    now = None if callable(runtime) else profile(sim, runtime=runtime, progress=False)
    with put_back_on_error(sim) as before:
        sim.replan(in_float32(sim.config))
        then = runtime(sim) if callable(runtime) else profile(sim, runtime=runtime, progress=False)
        sim.restore(before)
    if now is None or not isinstance(then, Report):
        return {"float_ms": then}
    found, in_float = ms_by_layer(now), ms_by_layer(then)
    layers = {*found, *in_float}
    extra = {layer: in_float.get(layer, 0.0) - found.get(layer, 0.0) for layer in layers}
    return {"float_ms": float(then.summary["ms"]), "extra": extra}
