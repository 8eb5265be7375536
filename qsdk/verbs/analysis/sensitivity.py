"""The verb `sensitivity`: which layer's quantization costs how much at the model's outputs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Unpack

from qsdk.core.config.for_dialect import TimedRuntime
from qsdk.core.errors import DataError
from qsdk.core.precision.advice import decibels
from qsdk.core.precision.mixed import metric_value, require_metric
from qsdk.core.report import Report
from qsdk.core.run_options import SeededOptions, run_of
from qsdk.progress import bar
from qsdk.verbs.analysis.noise import LayerSites, OutputNoise, layers_of, noise_of_layers, rounded_facts
from qsdk.verbs.analysis.profile import ms_by_layer, profile
from qsdk.verbs.doors.choose import Sim, door_of

#: of the noise of a row, where few random signs make up most of it: it may be more than 3 dB off
_UNCERTAIN = 0.3
#: dB; noise as strong as the signal saturates what gradients add up linearly
_BEYOND_FIRST_ORDER = 6.0
_MOST_NOISE = 0.8


def sensitivity(
    sim: Sim,
    data: Iterable[Any],
    *,
    metric: Callable[[Any], float] | None = None,
    exact: bool = False,
    runtime: TimedRuntime | None = None,
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
    if metric is not None:  # what is wrong with the arguments is said before the data is used up
        require_metric(metric)
    door_of(sim)
    _ = sim.encodings
    times = None if runtime is None else profile(sim, runtime=runtime, progress=run.progress)
    layers = layers_of(sim.plan)
    noise, method = noise_of_layers(sim, data, layers, run, exact=exact)
    if not noise.signal > 0.0:
        raise DataError(
            "the model's outputs have no floating-point values other than 0, so no noise can be seen there; give "
            "forward= that returns the logits, or other data"
        )
    facts, drops = _drops(sim, metric, layers, run.progress) if metric is not None else ({}, {})
    report = sensitivity_report(layers, noise, drops, {"method": method, **facts, **rounded_facts(sim)})
    return report if times is None else _with_ms(report, times)


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


def sensitivity_report(
    layers: Sequence[LayerSites], noise: OutputNoise, drops: Mapping[LayerSites, float], facts: Mapping[str, Any]
) -> Report:
    """Return the rows of all layers, worst first, and the summary; `drops` is what a metric loses with each alone."""
    total = sum(noise.of(layer) for layer in layers) or 1.0
    rows: list[dict[str, Any]] = []
    notes = [_note(layer, noise) for layer in layers]
    for layer, note in zip(layers, notes, strict=True):
        share = noise.of(layer) / total
        rest = noise.without.get(layer, noise.stored + (noise.all_quantized - noise.stored) * (1.0 - share))
        row: dict[str, Any] = {"layer": layer.layer, "kind": layer.kind, "dtype": layer.dtype}
        row |= {"sqnr_db": _sqnr(noise.of(layer), noise), "sqnr_db_without": _sqnr(rest, noise), "share": share}
        row |= ({"drop": drops[layer]} if layer in drops else {}) | {"sites": len(layer.sites)}
        rows.append(row | ({"note": note} if any(notes) else {}))
    rows.sort(key=lambda row: (-row.get("drop", 0.0), row["sqnr_db"]))
    shares = list(accumulate(sorted((row["share"] for row in rows), reverse=True)))
    worst = next((count for count, reached in enumerate(shares, start=1) if reached >= _MOST_NOISE), len(rows))
    summary = {"sqnr_db": _sqnr(noise.all_quantized, noise), "layers": len({row["layer"] for row in rows})}
    summary |= {"samples": noise.samples, "samples_given": noise.samples_given}
    if noise.silent:
        facts = {**facts, "not_counted": [f"output {index}: it is 0 in all batches used" for index in noise.silent]}
    return Report("Sensitivity", rows, {**summary, "rows_with_80_percent": worst, **facts})


def _note(layer: LayerSites, noise: OutputNoise) -> str:
    """Return what a reader must know of the estimate of a layer; nothing of one that is sure, or was measured."""
    error = noise.relative_error(layer)
    beyond = error > 0.0 and _sqnr(noise.of(layer), noise) < _BEYOND_FIRST_ORDER
    return "estimate is uncertain" if beyond or error > _UNCERTAIN else ""


def _sqnr(power: float, noise: OutputNoise) -> float:
    return decibels(max(power, 0.0) / noise.signal) if noise.signal > 0.0 else 0.0
