"""The verb `sensitivity`: which layer's quantization costs how much at the model's outputs."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Unpack

from qsdk.core.errors import DataError
from qsdk.core.precision.metrics import metric_value, require_metric
from qsdk.core.precision.sensitivity import LayerSites, OutputNoise, layers_of, sensitivity_report
from qsdk.core.report import Report
from qsdk.core.run_options import SeededOptions, run_of
from qsdk.progress import bar
from qsdk.verbs.analysis.output_noise import estimate_noise, measure_noise
from qsdk.verbs.analysis.profile import ProfiledRuntime, ms_by_layer, profile
from qsdk.verbs.analysis.rounded_weights import rounded_facts
from qsdk.verbs.analysis.sampled_rows import row_count
from qsdk.verbs.doors.choose import Sim, door_of
from qsdk.verbs.doors.door import Forward

_SAMPLED_BATCHES = 2  # where layers are measured one at a time in place of an estimate


def sensitivity(
    sim: Sim,
    data: Iterable[Any],
    *,
    metric: Callable[[Any], float] | None = None,
    exact: bool = False,
    runtime: ProfiledRuntime | None = None,
    **options: Unpack[SeededOptions],
) -> Report:
    """Return what quantizing each layer alone costs at the model's outputs, worst first.

    By default one pass over a fifth of the rows of the data estimates all layers at once, to first order, from the
    gradients of random combinations of the outputs (Hutchinson 1990; see `qsdk.algorithms.noise_probe`): every fifth
    batch, or a part of one, if the model takes fewer rows; where it is little work, all rows with more gradients. A
    layer that no gradient tells of is measured with it alone quantized, as is each one of a model without gradients.

    Args:
        sim: calibrated, of either side; it is left as it is.
        data: as for `calibrate`; re-iterable, or kept as a list where layers are measured.
        metric: of the sim that it is called with, once per row, with that row alone quantized; larger is better.
        exact: measure every layer, on all data, in two passes per row: it alone quantized, and all but it.
        runtime: also time the exported file there, as `profile` does on random values.
        options: `forward`, `progress`, `seed`; see `qsdk.options`.

    Returns:
        Rows `layer`, `kind` (weights or activations), `dtype`, `sqnr_db` of the outputs when it alone is quantized,
        `sqnr_db_without` (when all but it is), `share` of the noise of all rows, `drop` of the metric (with one), the
        number of `sites`, `note` (where an estimate is uncertain), and with `runtime` `ms` of the layer (None: it is
        fused to another). Several outputs count equally, each in units of its own power. Summary: `sqnr_db` of the
        whole simulation, from the model as it was given, `layers`, `rows_with_80_percent` of the noise, `method`
        (estimated or measured), `samples` (rows of data that were used) of `samples_given`, `not_counted` (outputs that
        are 0 in all of them), `rounded` (weights stored as a verb or the file rounded them: see `remark`), and with a
        metric `reference` (the model as given), `metric`, `drop`, `float_now` (where verbs have changed the model).

    Raises:
        CalibrationError: the sim is not calibrated.
        ConfigError: a metric that is no function, or whose value is no number.
        DataError: no data, data that the model does not take, or no floating-point output other than 0.

    Examples:
        >>> import torch, qsdk
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)), torch.randn(32, 8)
        >>> sim = qsdk.quantize(model, x, qsdk.w4a8())
        >>> _ = qsdk.calibrate(sim, [x], progress=False)
        >>> report = qsdk.sensitivity(sim, [x], progress=False)
        >>> report.rows[0]["kind"]
        'weights'
    """
    run = run_of(sensitivity, options)
    _require_ready(sim, metric)
    times = None if runtime is None else profile(sim, runtime=runtime, progress=run.progress)
    layers = layers_of(sim.plan)
    noise, method = noise_of_layers(
        sim, data, layers, exact=exact, forward=run.forward, progress=run.progress, seed=run.seed
    )
    _require_signal(noise)
    facts, drops = _drops(sim, metric, layers, run.progress) if metric is not None else ({}, {})
    report = sensitivity_report(layers, noise, drops, {"method": method, **facts, **rounded_facts(sim)})
    return report if times is None else _with_ms(report, times)


def _require_ready(sim: Sim, metric: Callable[[Any], float] | None) -> None:
    """Raise an error for a wrong metric or sim, or a missing calibration, before the data is used up."""
    if metric is not None:
        require_metric(metric)
    door_of(sim)
    _ = sim.encodings


def _require_signal(noise: OutputNoise) -> None:
    """Raise an error where noise at the outputs has nothing to be compared with.

    Raises:
        DataError: names the remedy.
    """
    if not noise.signal > 0.0:
        raise DataError(
            "the model's outputs have no floating-point values other than 0, so no noise can be seen there; give "
            "forward= that returns the logits, or other data"
        )


def _with_ms(report: Report, times: Report) -> Report:
    by_layer = ms_by_layer(times)
    rows = [{**row, "ms": by_layer.get(row["layer"])} for row in report.rows]
    noisy = {"noisy": times.summary["noisy"]} if "noisy" in times.summary else {}
    return Report(report.title, rows, {**report.summary, **noisy})


def _drops(
    sim: Sim, metric: Callable[[Any], float], layers: Sequence[LayerSites], progress: bool
) -> tuple[dict[str, float], dict[LayerSites, float]]:
    """Return the metric as given, with nothing and with all quantized, and what it loses with each layer alone."""
    door = door_of(sim)
    with door.quantizing_only(()):
        in_float = reference = metric_value(metric(sim))
        with door.as_given() as moved:
            reference = metric_value(metric(sim)) if moved else in_float
    now = metric_value(metric(sim))
    drops: dict[LayerSites, float] = {}
    for layer in bar(layers, desc="metric of each layer", disable=not progress, leave=False):
        with door.quantizing_only(frozenset(layer.sites)):
            drops[layer] = in_float - metric_value(metric(sim))
    float_now = {"float_now": in_float} if moved else {}
    return {"reference": reference, **float_now, "metric": now, "drop": reference - now}, drops


def noise_of_layers(
    sim: Sim,
    data: Iterable[Any],
    layers: Sequence[LayerSites],
    *,
    exact: bool,
    forward: Forward | None,
    progress: bool,
    seed: int = 0,
) -> tuple[OutputNoise, str]:
    """Return the noise of layers at the outputs, and how it was found: `estimated` or `measured` and on what."""
    if exact:
        return measure_noise(sim, data, layers, forward=forward, progress=progress, reverse=True), "measured"
    batches = data if hasattr(data, "__len__") or not hasattr(data, "__next__") else list(data)
    found = estimate_noise(sim, batches, forward=forward, progress=progress, seed=seed)
    options: dict[str, Any] = {"forward": forward, "progress": progress, "reverse": False}
    if found is None:
        few = _first(batches, _SAMPLED_BATCHES)
        measured = measure_noise(sim, few, layers, **options)
        return measured, f"measured on {len(few)} batches: the model has no gradients"
    missed = [layer for layer in layers if found.unreached.intersection(layer.sites)]
    if not missed:
        return found.noise, "estimated"
    few = found.used[:_SAMPLED_BATCHES]
    measure_noise(sim, few, missed, known=found.noise, **options)
    return found.noise, f"estimated; {len(missed)} rows measured on {sum(map(row_count, few))} samples"


def _first(data: Iterable[Any], count: int) -> list[Any]:
    return [batch for _, batch in zip(range(count), data, strict=False)]
