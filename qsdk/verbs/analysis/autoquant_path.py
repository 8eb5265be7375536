"""The path of `autoquant`: a sim on its way, its metric and size, the steps so far, and the places to go back to."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from qsdk.core.precision.metrics import metric_value
from qsdk.core.sims.state import SimState
from qsdk.progress import Progress
from qsdk.verbs.analysis.autoquant_steps import Step
from qsdk.verbs.doors.choose import Sim, door_of


class Stopwatch:
    """A clock that stands still while the metric of a path is evaluated."""

    def __init__(self, path: "Path") -> None:
        self._path, self._started, self._paused = path, time.process_time(), 0.0

    def metric(self, sim: Sim) -> float:
        """Return the metric of the path's sim."""
        begun = time.process_time()
        try:
            return self._path.measured()
        finally:
            self._paused += time.process_time() - begun

    def without_metric(self) -> float:
        """Return the seconds so far."""
        return time.process_time() - self._started - self._paused


@dataclass(frozen=True)
class Place:
    """A place on the path, to go back to: the state of the sim, its metric, its bytes, the code and rows so far."""

    state: SimState
    now: float
    size: int
    code: tuple[str, ...]
    rows: int


@dataclass
class Path:
    """A sim on its way, the metric now, and the steps so far.

    Attributes:
        sim: with the steps that were kept.
        data: batches, re-iterable.
        metric: called with the sim.
        reference: the metric of the float model.
        seconds: of processor time that one float pass over the data takes.
        options: `forward` and `progress` of every verb.
        bar: of the steps.
        now: the metric of the sim.
        size: bytes of its file.
        rows: one for each step tried.
        code: the lines that repeat the kept ones.
        unrounded: the place before weights were rounded for good; None where none was.
        evaluations: calls of the metric.
        ranking: the rows of `sensitivity` that bits were last chosen by; empty where they were not.
    """

    sim: Sim
    data: Iterable[Any]
    metric: Callable[[Any], float]
    reference: float
    seconds: float
    options: Mapping[str, Any]
    bar: Progress
    now: float = 0.0
    size: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    code: list[str] = field(default_factory=list)
    unrounded: Place | None = None
    evaluations: int = 0
    ranking: list[dict[str, Any]] = field(default_factory=list)

    @property
    def forwarded(self) -> str:
        """Return the argument `forward` of a line of code, where there is one."""
        return ", forward=forward" if self.options["forward"] else ""

    def held(self) -> Place:
        """Return the place where the path is."""
        return Place(self.sim.snapshot(weights=True), self.now, self.size, tuple(self.code), len(self.rows))

    def go_back(self, place: Place) -> None:
        """Return to a place, with the sim."""
        self.sim.restore(place.state)
        self.now, self.size, self.code = place.now, place.size, list(place.code)

    def mark_undone(self, since: Place, until: Place) -> None:
        """Say of the steps between two places that mixed precision has put them back."""
        for row in self.rows[since.rows : until.rows]:
            if row["kept"]:
                row |= {"kept": False, "note": "put back: a rounded weight gains nothing from more bits"}

    def measured(self) -> float:
        """Return the metric of the sim, and count the call."""
        self.evaluations += 1
        return metric_value(self.metric(self.sim))

    def note(self, step: str, metric: float, size: int, seconds: float, kept: bool, note: str = "") -> None:
        """Add the row of a step."""
        row = {"step": step, "metric": metric, "drop": self.reference - metric, "bytes": size}
        self.rows.append({**row, "passes": seconds / self.seconds, "kept": kept, "note": note})
        self.bar.log(metric=metric)

    def misses_with_float_weights(self, place: Place, max_drop: float) -> bool:
        """Return whether activations alone miss the budget, so that no better rounding of weights can meet it.

        Such a row is noted, in place of steps that take a third of all passes.

        Args:
            place: before biases were shifted for the rounding of their weights.
            max_drop: that the metric may fall below the float model's.
        """
        here, decisions = self.held(), self.sim.plan.decisions.values()
        activations = frozenset(d.site for d in decisions if d.kind not in ("weight", "bias"))
        self.sim.restore(place.state)
        try:
            with door_of(self.sim).quantizing_only(activations):
                found = self.measured()
        finally:
            self.go_back(here)
        if missed := self.reference - found > max_drop:
            why = "the metric with all weights in float: better rounding of them (gptq, adaround) would not do"
            row = {"step": "quantize activations alone", "metric": found, "drop": self.reference - found}
            self.rows.append({**dict.fromkeys(self.rows[0]), **row, "kept": False, "note": why})
        return missed

    def try_step(self, step: Step) -> None:
        """Take a step, and undo it unless the metric is better."""
        started, why_not = time.process_time(), step.why_not(self.sim)
        if why_not:
            return
        self.bar.now(step.name)
        before = self.held()
        try:
            step.run(self.sim, self.data, self.options)
            spent = time.process_time() - started
            found = self.measured()
        except BaseException:
            self.go_back(before)
            raise
        kept = found > self.now
        self.note(step.name, found, self.size, spent, kept)
        if not kept:
            self.go_back(before)
            return
        self.now = found
        self.code.append(step.code(self.forwarded))
        if step.rounds and self.unrounded is None:
            self.unrounded = before
