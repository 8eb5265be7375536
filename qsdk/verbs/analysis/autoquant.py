"""The verb `autoquant`: try what the guides recommend, the cheapest first, until a budget is met.

Bits are taken away only where `max_bytes` or `smaller` asks for it. Activations are no bytes of a file and keep theirs.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

import numpy as np

from qsdk.core.config.config import QuantConfig, w8a8
from qsdk.core.config.for_dialect import TimedRuntime
from qsdk.core.errors import ConfigError
from qsdk.core.numerics.spec import axis_of
from qsdk.core.planning.plan import Decision
from qsdk.core.precision.advice import where_bits_buy_nothing
from qsdk.core.precision.mixed import EVALUATIONS, budget_remark, metric_value, require_budget
from qsdk.core.precision.search import LowerableWeight, choose_lowered, no_time_gained
from qsdk.core.report import Report
from qsdk.core.run_options import Run, SeededOptions, run_of
from qsdk.core.sims.state import SimState
from qsdk.progress import Progress, progress_of
from qsdk.verbs.analysis.noise import layers_of, noise_of_layers
from qsdk.verbs.analysis.precision import mixed_precision, times_in_float
from qsdk.verbs.analysis.profile import profile
from qsdk.verbs.analysis.sensitivity import sensitivity_report
from qsdk.verbs.bias import correct_bias
from qsdk.verbs.calibrate import calibrate
from qsdk.verbs.doors.choose import Sim, door_of
from qsdk.verbs.export import export
from qsdk.verbs.layers import adaround, gptq, seq_mse
from qsdk.verbs.quantize import quantize
from qsdk.verbs.rotate import obstacle_to_rotating, rotate
from qsdk.verbs.scaling import equalize, smooth_quant

_PRESET = "the preset, min_max"
_SLACK = 1.05  # of a measured time, as in `mixed_precision`
_TRIES = 6  # of choosing 4 bits again where the file turned out larger than expected
_NORMS = frozenset({"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"})


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


class _Budgets(SeededOptions, total=False):
    """What bounds the result beside the metric."""

    max_bytes: int | None
    max_ms: float | None
    runtime: TimedRuntime


def autoquant(
    model: Any,
    example: Any,
    data: Iterable[Any],
    metric: Callable[[Any], float],
    *,
    max_drop: float,
    config: QuantConfig | str | None = None,
    smaller: bool = False,
    **options: Unpack[_Budgets],
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
        smaller: use up `max_drop`: weights of 8 bits take 4 (slower on many runtimes) as far as the metric allows.
        config: to start from, or the name of a preset; None for `w8a8()`, with `max_ms` in ONNX Runtime
            `w8a8().for_dialect("onnxruntime")`.
        options: `max_bytes` that the file of `export(..., prefer="size")` may take. `max_ms`: milliseconds that a run
            of the exported file may take in `runtime` ("onnxruntime"); see `mixed_precision`. `forward`, `progress`,
            `seed`: see `qsdk.options`.

    Returns:
        A report with `sim`, the result, and `code` that repeats it. Rows: `step`, `metric`, `drop`, `bytes` (of that
        file), `passes` (time in float passes, without the metric), `kept`, `note`. Summary: `met`, `missed`,
        `budget_remark`, `reference`, `metric`, `drop`, `bytes`, `passes`, `evaluations`, `no_gain`, `ranking`; with
        `max_ms` also `ms`, `float_ms` and, of `profile`, `cures`.

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
    run = run_of(autoquant, options)
    max_bytes, max_ms = options.get("max_bytes"), options.get("max_ms")
    require_budget(metric, max_drop)
    steps = _recipe(run.seed)
    data = list(data) if isinstance(data, Iterator) else data
    times = {} if max_ms is None else {"max_ms": max_ms, "runtime": options.get("runtime", "onnxruntime")}
    total = 2 + (max_bytes is not None) + len(steps) + smaller
    with progress_of("autoquant", total, show=run.progress, unit="step") as bar:
        bar.now(_PRESET)
        fast = config is None and times.get("runtime") == "onnxruntime"
        first = w8a8().for_dialect("onnxruntime") if fast else config or w8a8()
        path = _Path(quantize(model, example, first), data, metric, max_drop, max_bytes, times, run, bar)
        line = f"config = qsdk.{config or 'w8a8'}()" + ('.for_dialect("onnxruntime")' if fast else "")
        path.start([] if isinstance(config, QuantConfig) else [line])
        path.improve(steps)
        if smaller:
            path.shrink()
        return path.finish()


@dataclass(frozen=True)
class _Step:
    """A call of a verb, and where it is worth one; `rounds` says that it rounds weights for good."""

    verb: Callable[..., Any]
    applies: Callable[[Sim], bool]
    options: Mapping[str, Any] = field(default_factory=dict)
    rounds: bool = False

    @property
    def name(self) -> str:
        """Return the name in the report."""
        return " ".join([self.verb.__name__, *(str(value) for key, value in self.options.items() if key != "seed")])


def _recipe(seed: int) -> list[_Step]:
    """Return all steps, the cheapest first."""
    seeded = {"seed": seed}
    return [
        *(_Step(calibrate, _has_ranges, {"method": method}) for method in ("tf_enhanced", "mse", "percentile")),
        _Step(rotate, lambda sim: _has_ranges(sim) and not obstacle_to_rotating(sim), seeded),
        _Step(equalize, _has_scales_per_tensor),
        _Step(smooth_quant, _has_norms, {"alpha": "auto"}),
        # seq_mse, the next step where weights are narrow, shifts the same biases for a fifth more passes
        _Step(correct_bias, lambda sim: bool(_weights(sim)) and not _has_narrow_weights(sim), seeded),
        _Step(seq_mse, _has_narrow_weights, seeded),
        _Step(gptq, _has_narrow_weights, seeded, rounds=True),
        _Step(adaround, _has_narrow_weights, seeded, rounds=True),
    ]


def _weights(sim: Sim) -> list[Decision]:
    return [d for d in sim.plan.decisions.values() if d.kind == "weight" and d.quantized]


def _free_weights(sim: Sim) -> list[tuple[Decision, int]]:
    """Return the weights that are not frozen, and their bits."""
    frozen = {site for site, encoding in sim.encodings.items() if encoding.frozen}
    return [(d, d.spec.dtype.bits) for d in _weights(sim) if d.spec is not None and d.site not in frozen]


def _has_ranges(sim: Sim) -> bool:
    return bool(sim.plan.calibrated_sites())


def _has_norms(sim: Sim) -> bool:
    return _has_ranges(sim) and any(d.op_type in _NORMS for d in sim.plan.decisions.values())


def _has_scales_per_tensor(sim: Sim) -> bool:
    specs = [d.spec for d in _weights(sim) if d.op_type != "Gather"]
    return any(spec is not None and axis_of(spec.granularity) is None for spec in specs)


def _has_narrow_weights(sim: Sim) -> bool:
    return any(bits < 8 for _, bits in _free_weights(sim))


@dataclass(frozen=True)
class _Place:
    """A place on the path, to go back to: the state of the sim, its metric, its bytes, the code and rows so far."""

    state: SimState
    metric: float = 0.0
    size: int = 0
    code: tuple[str, ...] = ()
    rows: int = 0


class _Path:
    """A sim on its way, with the budgets, and the steps so far.

    Attributes:
        times: arguments of `mixed_precision` for the budget of time.
        search: those for all of its budgets.
        reference: the metric of the float model.
        seconds: of processor time that one float pass over the data takes.
        measuring: seconds of processor time that the metric has taken.
        here: where the sim is.
        unrounded: the place before weights were rounded for good; None where none was.
        ranking: the rows of `sensitivity` that bits were last chosen by; empty where they were not.
        met: whether mixed precision met its budgets, the last time.
    """

    def __init__(
        self,
        sim: Sim,
        data: Iterable[Any],
        metric: Callable[[Any], float],
        max_drop: float,
        max_bytes: int | None,
        times: Mapping[str, Any],
        run: Run,
        bar: Progress,
    ) -> None:
        self.sim, self.data, self.metric, self.run, self.bar = sim, data, metric, run, bar
        self.max_drop, self.max_bytes, self.times = max_drop, max_bytes, times
        # of the verbs that are called here; a metric that calls others gives them its own
        self.shared: dict[str, Any] = {"forward": run.forward, "progress": run.progress}
        self.search = {**times, "max_drop": max_drop, "max_evaluations": EVALUATIONS}
        self.reference = self.seconds = self.measuring = 0.0
        self.evaluations, self.met = 0, True
        self.rows: list[dict[str, Any]] = []
        self.ranking: list[dict[str, Any]] = []
        self.here = _Place(sim.snapshot(weights=True))
        self.unrounded: _Place | None = None

    def fits(self, _: float, size: int) -> bool:
        """Return whether a file of so many bytes is within its budget."""
        return self.max_bytes is None or size <= self.max_bytes

    @property
    def misses(self) -> bool:
        """Return whether the metric is below its budget."""
        return self.reference - self.here.metric > self.max_drop

    def go_back(self, place: _Place) -> None:
        """Return to a place, with the sim."""
        self.sim.restore(place.state)
        self.here = place

    def measured(self) -> float:
        """Return the metric of the sim, count the call, and stop the clock of the steps meanwhile."""
        self.evaluations += 1
        begun = time.process_time()
        metric = metric_value(self.metric(self.sim))
        self.measuring += time.process_time() - begun
        return metric

    def float_pass(self) -> float:
        """Return the seconds of processor time that the float model takes for the data."""
        started = time.process_time()
        for _ in door_of(self.sim, self.run).outputs(self.data, in_float=True):
            pass
        return max(time.process_time() - started, 1e-9)

    def line(self, verb: str, first: str = "sim, data", **given: Any) -> str:
        """Return the line of Python that calls a verb."""
        shown = "".join(f", {key}={value!r}" for key, value in given.items())
        return f"qsdk.{verb}({first}{shown}{', forward=forward' if self.run.forward else ''})"

    def take(
        self,
        name: str,
        act: Callable[[], tuple[float | None, str]],
        lines: Sequence[str],
        keeps: Callable[[float, int], bool] = lambda metric, size: True,
        *,
        resizes: bool = True,
    ) -> bool:
        """Take a step and add its row; undo it, and return False, where `keeps` of its metric and bytes is not true.

        `act` returns the metric, or None for one to be measured, and a note.
        """
        self.bar.now(name)
        started = time.process_time() - self.measuring
        known, note = act()
        spent = time.process_time() - self.measuring - started
        metric = self.measured() if known is None else known
        size = exported_bytes(self.sim) if resizes else self.here.size
        kept = keeps(metric, size)
        row = {"step": name, "metric": metric, "drop": self.reference - metric, "bytes": size}
        self.rows.append({**row, "passes": spent / self.seconds, "kept": kept, "note": note})
        self.bar.log(metric=metric)
        if kept:
            state, code = self.sim.snapshot(weights=True), (*self.here.code, *lines)
            self.here = _Place(state, metric, size, code, len(self.rows))
        else:
            self.sim.restore(self.here.state)
        return kept

    def start(self, code: Sequence[str]) -> None:
        """Calibrate by min-max, and give 4 bits to the weights that matter least where the file is too large."""
        self.seconds = min(self.float_pass() for _ in range(2))  # the first one warms up
        lowered: list[str] = []

        def preset() -> tuple[None, str]:
            calibrate(self.sim, self.data, **self.shared)
            with door_of(self.sim).quantizing_only(()):
                self.reference = self.measured()
            return None, ""

        def lower() -> tuple[None, str]:
            lowered[:], self.ranking = _lower_weights(
                self.sim, self.data, self.here.size, self.max_bytes or 0, self.run
            )
            return None, "to fit into max_bytes"

        self.take(_PRESET, preset, code)
        self.bar.done(1 if self.max_bytes is None else 2)
        if self.max_bytes is not None and self.here.size > self.max_bytes:
            self.take("int4 in weights", lower, [])
            self.rows[-1]["step"] = f"int4 in {len(lowered)} weights"
        lines = [f'config = config.override({site!r}, weight="int4")' for site in lowered]
        lines += ["sim = qsdk.quantize(model, example, config)", self.line("calibrate")]
        self.here = replace(self.here, code=(*self.here.code, *lines))

    def improve(self, steps: Sequence[_Step]) -> None:
        """Take the steps until the metric is within its budget, and raise sites if it is not then."""
        unshifted: _Place | None = None  # before biases were shifted for the rounding of their weights
        for at, step in enumerate(steps):
            if not self.misses:
                return
            if step.applies(self.sim):
                if step.rounds and unshifted is not None:
                    if self.misses_with_float_weights(unshifted):
                        self.bar.done(len(steps) - at)
                        break
                    unshifted = None  # asked once
                unshifted = self.here if step.verb is seq_mse else unshifted
                self.call(step)
            self.bar.done()
        if self.misses:
            self.mix([step for step in steps if step.rounds])
            self.bar.done()

    def call(self, step: _Step) -> None:
        """Call a verb, and undo what it did unless the metric is better."""

        def act() -> tuple[None, str]:
            step.verb(self.sim, self.data, **step.options, **self.shared)
            return None, ""

        before = self.here
        line = self.line(step.verb.__name__, **step.options)
        if self.take(step.name, act, [line], lambda metric, _: metric > before.metric, resizes=False) and step.rounds:
            self.unrounded = self.unrounded or before

    def misses_with_float_weights(self, place: _Place) -> bool:
        """Return whether activations alone miss the budget, so that no better rounding of weights can meet it.

        Such a row is noted, in place of steps that take a third of all passes.
        """
        decisions = self.sim.plan.decisions.values()
        activations = frozenset(d.site for d in decisions if d.kind not in ("weight", "bias"))
        self.sim.restore(place.state)
        with door_of(self.sim).quantizing_only(activations):
            metric = self.measured()
        self.sim.restore(self.here.state)
        if missed := self.reference - metric > self.max_drop:
            why = "the metric with all weights in float: better rounding of them (gptq, adaround) would not do"
            self.say("quantize activations alone", metric=metric, drop=self.reference - metric, kept=False, note=why)
        return missed

    def say(self, step: str, **facts: Any) -> None:
        """Add a row of something that is no step."""
        self.rows.append({**dict.fromkeys(self.rows[0]), "step": step, **facts})

    def mixed(self, given: Mapping[str, Any], note: Callable[[int], str]) -> tuple[float, str]:
        """Raise sites, and return the metric and the note of how many."""
        report = mixed_precision(self.sim, self.data, lambda _: self.measured(), **given, **self.shared)
        self.ranking, self.met = report.summary["ranking"], report.summary["met"]
        return next(row["metric"] for row in report.rows if row["chosen"]), note(len(report.summary["raised"]))

    def mix(self, rounding: Sequence[_Step]) -> None:
        """Raise what must be wider, from before weights were rounded for good, and round what is left as it was.

        With `max_bytes`, activations alone where raised weights do not fit. If that ends no better than where the path
        is, it goes back.
        """
        before = self.here
        self.go_back(begin := self.unrounded or before)
        activations = {"levels": ({"activation": "uint16"},)}  # where no byte of weights is left
        tries: list[tuple[str, dict[str, Any]]] = [("mixed_precision", self.search)]
        tries += [] if self.max_bytes is None else [("mixed_precision of activations", activations | self.search)]
        for name, given in tries:
            line = self.line("mixed_precision", "sim, data, metric", **given)
            if self.take(name, partial(self.mixed, given, "{} raised".format), [line], self.fits):
                break
            self.rows[-1]["note"] += ": beyond max_bytes"
        for step in rounding:
            if self.misses and step.applies(self.sim):
                self.call(step)
        if self.here.metric < before.metric:
            self.go_back(before)
            self.say("back to before", metric=before.metric, kept=True)
            return
        for row in self.rows[begin.rows : before.rows]:
            if row["kept"]:
                row |= {"kept": False, "note": "put back: a rounded weight gains nothing from more bits"}

    def shrink(self) -> None:
        """Give 4 bits to the weights that the metric allows it for, and undo that if the file gets no smaller.

        This is done only where it was asked for: a drop that is allowed is no wish for it.
        """
        sites = [] if self.sim.config is None else _lowerable_weights(self.sim)
        if not sites or self.misses:
            return
        given = {"levels": ({"weight": "int8"},), **self.search}

        def act() -> tuple[float, str]:
            for site in sites:
                self.sim.set_precision(site, weight="int4")
            seq_mse(self.sim, self.data, seed=self.run.seed, **self.shared)
            return self.mixed(given, lambda raised: f"{len(sites) - raised} of {len(sites)} weights of 8 bits keep 4")

        before = self.here
        lines = [f"for site in {sites!r}:", '    sim.set_precision(site, weight="int4")', ""]
        lines += [self.line("seq_mse", seed=self.run.seed), self.line("mixed_precision", "sim, data, metric", **given)]
        self.take("int4 and back", act, lines, lambda _, size: self.met and size < before.size)

    def finish(self) -> AutoquantReport:
        """Return the report."""
        # a busy processor is slower for a while, so the unit of passes is measured at both ends
        unit = (self.seconds + self.float_pass()) / 2
        for row in self.rows:
            row["passes"] = row["passes"] and row["passes"] * self.seconds / unit
        metric, size = self.here.metric, self.here.size
        drop = self.reference - metric
        missed = [f"the metric is {drop:.4g} below float"] if self.misses else []
        missed += [] if self.fits(metric, size) else [f"the file has {size} bytes"]
        facts: dict[str, Any] = {"reference": self.reference, "metric": metric, "drop": drop, "bytes": size}
        no_gain = where_bits_buy_nothing(self.sim.plan, self.sim.encodings)
        if self.times:
            times = profile(self.sim, runtime=self.times["runtime"], progress=False).summary
            in_float = times_in_float(self.sim, self.times["runtime"])
            facts |= {"ms": float(times["ms"]), "float_ms": in_float.get("float_ms")}
            facts |= {"cures": times["cures"]} if "cures" in times else {}
            no_gain = [*no_time_gained(facts["ms"], facts["float_ms"] or np.inf, in_float.get("extra", {})), *no_gain]
            if facts["ms"] > self.times["max_ms"] * _SLACK:
                missed.append(f"a run takes {facts['ms']:.4g} ms")
        facts |= {"passes": sum(row["passes"] or 0.0 for row in self.rows), "evaluations": self.evaluations}
        facts |= {"no_gain": no_gain} if no_gain else {}
        facts |= {"ranking": self.ranking} if self.ranking else {}
        remark = budget_remark(self.max_drop, facts)
        summary = {"met": not missed, **({"missed": missed} if missed else {}), **remark, **facts}
        return AutoquantReport("Automatic quantization", self.rows, summary, self.sim, "\n".join(self.here.code))


def exported_bytes(sim: Sim) -> int:
    """Return the bytes of the model that `export(prefer="size")` writes, with external data, without encodings."""
    with TemporaryDirectory() as folder:
        export(sim, Path(folder) / "model.onnx", check=False, prefer="size")
        return sum(path.stat().st_size for path in Path(folder).iterdir() if path.suffix != ".json")


def _lowerable_weights(sim: Sim) -> list[str]:
    """Return the weights of 8 bits that may take fewer: those that share no encoding and are not frozen."""
    return [d.site for d, bits in _free_weights(sim) if not d.tied_to and bits == 8]


def _lower_weights(
    sim: Sim, data: Iterable[Any], size: int, max_bytes: int, run: Run
) -> tuple[list[str], list[dict[str, Any]]]:
    """Give 4 bits to the weights of 8 that matter least at the outputs, until the file of `size` bytes fits.

    Returns the sites, and the rows of `sensitivity` that they were chosen by.
    """
    if sim.config is None:
        raise ConfigError("a Q/DQ file has its own weights; give the float model, so that fewer bits can be chosen")
    config, before, sites = sim.config, sim.snapshot(), _lowerable_weights(sim)

    def take(chosen: Iterable[str]) -> int:
        sim.restore(before)
        lowered = config
        for site in chosen:
            lowered = lowered.override(site, weight="int4")
        sim.replan(lowered)
        return exported_bytes(sim)

    smallest = take(sites)
    if smallest > max_bytes:
        raise ConfigError(
            f"max_bytes={max_bytes}: the file has {size} bytes, and {smallest} with 4 bits in every weight of "
            "8; allow that much, or give a smaller config, such as one with int2 weights"
        )
    layers = layers_of(sim.plan)
    noise, _ = noise_of_layers(sim, data, layers, replace(run, seed=0))
    ranking = sensitivity_report(layers, noise, {}, {}).to_dict()["rows"]
    counts = {site: value.size for site, value in sim.stored_floats(sites).items()}
    weights = [LowerableWeight(site, counts.get(site, 0) // 2, noise.alone.get(site, 0.0)) for site in sites]
    wanted = size - max_bytes
    for _ in range(_TRIES):
        chosen = choose_lowered(weights, wanted) or sites
        found = take(chosen)
        if found <= max_bytes:
            return chosen, ranking
        wanted += found - max_bytes
    take(sites)
    return sites, ranking
