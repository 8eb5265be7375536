"""The verb `autoquant`: try what the guides recommend, the cheapest first, until a budget is met.

Bits are taken away only where `max_bytes` or `smaller` asks for it. Activations are no bytes of a file and keep theirs.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from qsdk.core.config.config import QuantConfig, w8a8
from qsdk.core.precision.mixed import budget_remark, require_budget
from qsdk.core.precision.no_gain import where_bits_buy_nothing
from qsdk.core.report import Report
from qsdk.progress import Progress, progress_of
from qsdk.verbs.analysis.autoquant_path import Path, Place, Stopwatch
from qsdk.verbs.analysis.autoquant_size import exported_bytes, lower_weights, lowerable_weights
from qsdk.verbs.analysis.autoquant_steps import Step, steps_to_try
from qsdk.verbs.analysis.precision import mixed_precision
from qsdk.verbs.analysis.profile import ProfiledRuntime, profile
from qsdk.verbs.doors.choose import Sim, door_of
from qsdk.verbs.doors.door import Forward
from qsdk.verbs.layers import seq_mse
from qsdk.verbs.quantize import calibrate, quantize

_PRESET = "the preset, min_max"
_EVALUATIONS = 12  # of the metric, in the search for mixed precision
_SLACK = 1.05  # of a measured time, as in `mixed_precision`
_BACK = ({"weight": "int8"},)  # for weights that were lowered to 4 bits
_ACTIVATIONS_ALONE = ({"activation": "uint16"},)  # where no byte of weights is left


@dataclass(frozen=True, repr=False)
class AutoquantReport(Report):
    """The path that `autoquant` has taken, and where it ended.

    Attributes:
        sim: the result, calibrated.
        code: the lines of Python that make it again.
    """

    sim: Any = field(default=None, compare=False)
    code: str = ""

    def full(self) -> str:
        """Return the whole report and the lines that repeat it."""
        return f"{super().full()}\n\nto repeat it:\n{self.code}"


@dataclass(frozen=True)
class _Budgets:
    """What the result has to keep: a drop of the metric, bytes of the file, milliseconds of a run in a runtime."""

    max_drop: float
    max_bytes: int | None
    max_ms: float | None
    runtime: ProfiledRuntime

    @property
    def of_time(self) -> dict[str, Any]:
        """Return the arguments of `mixed_precision` for the budget of time."""
        return {} if self.max_ms is None else {"max_ms": self.max_ms, "runtime": self.runtime}


def autoquant(
    model: Any,
    example: Any,
    data: Iterable[Any],
    metric: Callable[[Any], float],
    *,
    max_drop: float,
    max_bytes: int | None = None,
    max_ms: float | None = None,
    config: QuantConfig | str | None = None,
    smaller: bool = False,
    runtime: ProfiledRuntime = "onnxruntime",
    forward: Forward | None = None,
    progress: bool = True,
    seed: int = 0,
) -> AutoquantReport:
    """Quantize a model so that a metric stays within a budget of the float model's, in as few steps as that takes.

    The steps are the guide's, the cheapest first: ranges by min-max and other estimators, `rotate` (which unties
    nothing here), `equalize`, `smooth_quant`, `correct_bias` or, below 8 bits, `seq_mse`, `gptq`, `adaround`, at last
    `mixed_precision`, until one meets the budget. One that does not help is undone. If the preset is too large, the
    weights that matter least (`sensitivity`) take 4 bits at the start.

    Args:
        model: an nn.Module, an ONNX path or an onnx model; it is left as it is.
        example: as for `quantize`.
        data: as for `calibrate`; kept as a list if it can be read only once.
        metric: called with the sim; larger is better.
        max_drop: how far below the float model's it may fall.
        max_bytes: that the file of `export(..., prefer="size")` may take.
        max_ms: milliseconds that a run of the exported file may take; see `mixed_precision`.
        smaller: use up `max_drop`: weights of 8 bits take 4 (slower on many runtimes) as far as the metric allows.
        config: to start from, or the name of a preset; None for `w8a8()`.
        runtime: to measure `max_ms` in.
        forward: `(model, batch)`, to call the model yourself (PyTorch side).
        progress: show progress bars.
        seed: of all sampling; one seed gives one result (but `max_ms` measures time).

    Returns:
        A report with `sim`, the result, and `code` that repeats it. Rows: `step`, `metric`, `drop`, `bytes` (of that
        file), `passes` (time in float passes, without the metric), `kept`, `note`. Summary: `met`, `missed`,
        `budget_remark`, `reference`, `metric`, `drop`, `bytes`, `passes`, `evaluations`, `ms`, `no_gain`, `ranking`.

    Raises:
        ConfigError: a budget that is no number, a metric that is NaN, or `max_bytes` that even 4 bits exceed.
        DataError: data that the model does not take.

    Examples:
        >>> import torch, qsdk
        >>> model, x = torch.nn.Linear(4, 2), torch.randn(8, 4)
        >>> def closeness(sim): return -float((sim(x) - model(x).detach()).abs().max())
        >>> qsdk.autoquant(model, x, [x], closeness, max_drop=0.5, progress=False).summary["met"]
        True
    """
    require_budget(metric, max_drop)
    options, budgets = {"forward": forward, "progress": progress}, _Budgets(max_drop, max_bytes, max_ms, runtime)
    with _bar_over(steps := steps_to_try(seed), max_bytes is not None, smaller, show=progress) as bar:
        path = _start(model, example, data, metric, config, max_bytes, options, bar)
        _walk(path, steps, budgets)
        return _finish(_shrink(path, budgets, seed) if smaller else path, budgets)


def _bar_over(steps: Sequence[Step], lowers: bool, smaller: bool, *, show: bool) -> AbstractContextManager[Progress]:
    """Return the bar over all steps, the preset before them, what makes the file smaller, and mixed precision."""
    return progress_of("autoquant", 2 + lowers + len(steps) + smaller, show=show, unit="step")


def _walk(path: Path, steps: Sequence[Step], budgets: _Budgets) -> None:
    """Take the steps until the metric is within its budget, and raise sites if it is not then."""
    unshifted: Place | None = None
    for at, step in enumerate(steps):
        if path.reference - path.now <= budgets.max_drop:
            return
        if step.rounds and unshifted is not None and not step.why_not(path.sim):
            if path.misses_with_float_weights(unshifted, budgets.max_drop):
                for _ in steps[at:]:
                    path.bar.done()
                break
            unshifted = None  # asked once
        if step.verb is seq_mse:
            unshifted = path.held()
        path.try_step(step)
        path.bar.done()
    if path.reference - path.now > budgets.max_drop:
        _mix(path, [step for step in steps if step.rounds], budgets)
        path.bar.done()


def _start(
    model: Any,
    example: Any,
    data: Iterable[Any],
    metric: Callable[[Any], float],
    config: QuantConfig | str | None,
    max_bytes: int | None,
    options: Mapping[str, Any],
    bar: Progress,
) -> Path:
    """Return the path at the preset, calibrated by min-max, with 4 bits in weights where the file is too large."""
    data = list(data) if isinstance(data, Iterator) else data
    bar.now(_PRESET)
    sim = quantize(model, example, config or w8a8())
    seconds = min(_of_a_float_pass(sim, data, options["forward"]) for _ in range(2))  # the first one warms up
    path = Path(sim, data, metric, 0.0, seconds, options, bar)
    started = time.process_time()
    calibrate(sim, data, **options)
    spent = time.process_time() - started
    with door_of(sim).quantizing_only(()):
        path.reference = path.measured()
    path.now, path.size = path.measured(), exported_bytes(sim)
    path.note(_PRESET, path.now, path.size, spent, True)
    path.code = [] if isinstance(config, QuantConfig) else [f"config = qsdk.{config or 'w8a8'}()"]
    bar.done(1 if max_bytes is None else 2)
    if max_bytes is not None and path.size > max_bytes:
        bar.now("int4 in weights")
        started = time.process_time()
        lowered, path.size, path.ranking = lower_weights(sim, data, path.size, max_bytes, options)
        spent, path.now = time.process_time() - started, path.measured()
        path.note(f"int4 in {len(lowered)} weights", path.now, path.size, spent, True, "to fit into max_bytes")
        path.code += [f'config = config.override({site!r}, weight="int4")' for site in lowered]
    path.code += ["sim = qsdk.quantize(model, example, config)", f"qsdk.calibrate(sim, data{path.forwarded})"]
    return path


def _of_a_float_pass(sim: Sim, data: Iterable[Any], forward: Forward | None) -> float:
    """Return the seconds of processor time that the float model takes for the data."""
    started = time.process_time()
    for _ in door_of(sim).outputs(data, forward, in_float=True):
        pass
    return max(time.process_time() - started, 1e-9)


def _mix(path: Path, rounding: Sequence[Step], budgets: _Budgets) -> None:
    """Raise what must be wider, from before weights were rounded for good, and round what is left as it was.

    If that ends no better than where the path is, it goes back.
    """
    here = path.held()
    path.bar.now("mixed_precision")
    path.go_back(begin := path.unrounded or here)
    steps: Sequence[Mapping[str, Any]] = ({}, {"levels": _ACTIVATIONS_ALONE})
    for number, levels in enumerate(steps if budgets.max_bytes is not None else steps[:1]):
        before, seconds = path.held(), Stopwatch(path)
        given = {**levels, **budgets.of_time, "max_drop": budgets.max_drop, "max_evaluations": _EVALUATIONS}
        try:
            found = mixed_precision(path.sim, path.data, seconds.metric, **given, **path.options)
        except BaseException:
            path.go_back(here)
            raise
        spent, path.ranking = seconds.without_metric(), found.summary["ranking"]
        now, size = next(row["metric"] for row in found.rows if row["chosen"]), exported_bytes(path.sim)
        fits = budgets.max_bytes is None or size <= budgets.max_bytes
        note = f"{len(found.summary['raised'])} raised" + ("" if fits else ": beyond max_bytes")
        name = "mixed_precision" + (" of activations" if number else "")
        path.note(name, now, size, spent, fits, note)
        if fits:
            path.now, path.size = now, size
            path.code.append(_line_of_mixed_precision(given, path.forwarded))
            break
        path.go_back(before)
    for step in rounding:
        if path.reference - path.now > budgets.max_drop:
            path.try_step(step)
    if path.now >= here.now:
        path.mark_undone(begin, here)
    else:
        path.go_back(here)
        path.rows.append({**dict.fromkeys(path.rows[0]), "step": "back to before", "metric": path.now, "kept": True})


def _shrink(path: Path, budgets: _Budgets, seed: int) -> Path:
    """Give 4 bits to the weights that the metric allows it for, and undo that if the file gets no smaller.

    This is done only where it was asked for: a drop that is allowed is no wish for it. The path is returned.
    """
    sites = [] if path.sim.config is None else lowerable_weights(path.sim)
    if not sites or path.reference - path.now > budgets.max_drop:
        return path
    path.bar.now("int4 and back")
    before, seconds = path.held(), Stopwatch(path)
    given = {"max_drop": budgets.max_drop, "levels": _BACK, "max_evaluations": _EVALUATIONS, **budgets.of_time}
    try:
        for site in sites:
            path.sim.set_precision(site, weight="int4")
        seq_mse(path.sim, path.data, seed=seed, **path.options)
        found = mixed_precision(path.sim, path.data, seconds.metric, **given, **path.options)
        spent, size, path.ranking = seconds.without_metric(), exported_bytes(path.sim), found.summary["ranking"]
    except BaseException:
        path.go_back(before)
        raise
    now = next(row["metric"] for row in found.rows if row["chosen"])
    kept = found.summary["met"] and size < before.size
    note = f"{len(sites) - len(found.summary['raised'])} of {len(sites)} weights of 8 bits keep 4"
    path.note("int4 and back", now, size, spent, kept, note)
    if not kept:
        path.go_back(before)
        return path
    path.now, path.size = now, size
    path.code += [f"for site in {sites!r}:", '    sim.set_precision(site, weight="int4")', ""]
    path.code.append(f"qsdk.seq_mse(sim, data, seed={seed}{path.forwarded})")
    path.code.append(_line_of_mixed_precision(given, path.forwarded))
    return path


def _line_of_mixed_precision(given: Mapping[str, Any], forwarded: str) -> str:
    shown = "".join(f", {key}={value!r}" for key, value in given.items())
    return f"qsdk.mixed_precision(sim, data, metric{shown}{forwarded})"


def _finish(path: Path, budgets: _Budgets) -> AutoquantReport:
    # a busy processor is slower for a while, so the unit of passes is measured at both ends
    unit = (path.seconds + _of_a_float_pass(path.sim, path.data, path.options["forward"])) / 2
    for row in path.rows:
        row["passes"] = row["passes"] and row["passes"] * path.seconds / unit
    drop = path.reference - path.now
    missed = [f"the metric is {drop:.4g} below float"] if drop > budgets.max_drop else []
    if budgets.max_bytes is not None and path.size > budgets.max_bytes:
        missed.append(f"the file has {path.size} bytes")
    facts: dict[str, Any] = {"reference": path.reference, "metric": path.now, "drop": drop, "bytes": path.size}
    if budgets.max_ms is not None:
        facts["ms"] = float(profile(path.sim, runtime=budgets.runtime, progress=False).summary["ms"])
        if facts["ms"] > budgets.max_ms * _SLACK:
            missed.append(f"a run takes {facts['ms']:.4g} ms")
    facts |= {"passes": sum(row["passes"] or 0.0 for row in path.rows), "evaluations": path.evaluations}
    if no_gain := where_bits_buy_nothing(path.sim.plan, path.sim.encodings):
        facts["no_gain"] = no_gain
    if path.ranking:
        facts["ranking"] = path.ranking
    remark = budget_remark(budgets.max_drop, facts)
    summary = {"met": not missed, **({"missed": missed} if missed else {}), **remark, **facts}
    return AutoquantReport("Automatic quantization", path.rows, summary, path.sim, "\n".join(path.code))
