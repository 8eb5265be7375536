"""The search for the few sites that need more precision, or the few that may have less, within a budget.

The ranking comes with the candidates (the noise of each at the model's outputs). Raising more is taken to do no harm,
so nothing is evaluated that raises no more than what has failed; nor is anything evaluated twice.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from qsdk.core.errors import ConfigError

#: of each candidate: 0 if it is unchanged, else the level that it is raised to
Assignment = tuple[int, ...]
_PIECES = 8  # that pruning begins with: halves are hardly ever spared, and few evaluations are left
_NAMED, _NAMED_FROM = 3, 0.01  # layers in a remark, and the share of a run that one must lose
#: times are noisy: what is no further over the budget than this stays, and what was taken back must be within it
TOLERANCE = 0.05


def as_it_is(assignment: Assignment) -> Assignment:
    """Return an assignment in which nothing needs another candidate beside it."""
    return assignment


class Trial(NamedTuple):
    """An assignment and its metric."""

    assignment: Assignment
    metric: float


@dataclass
class Search:
    """The search for the cheapest assignment whose metric is at least `wanted`.

    Attributes:
        noise: of each candidate; the noisiest are raised first.
        options: per candidate, the levels that would raise it.
        levels: number of levels.
        evaluate: returns the metric of an assignment.
        wanted: the least metric allowed.
        most: evaluations to spend; after the first ones, which show whether a level suffices, the search stops there.
        close: raises what must be raised beside the others too.
        trials: everything evaluated, in order.
    """

    noise: Sequence[float]
    options: Sequence[frozenset[int]]
    levels: int
    evaluate: Callable[[Assignment], float]
    wanted: float
    most: int
    close: Callable[[Assignment], Assignment] = as_it_is
    trials: list[Trial] = field(default_factory=list)

    def run(self) -> tuple[Assignment, bool]:
        """Return the chosen assignment and whether it reaches the wanted metric; if not, all are at the top level."""
        base = (0,) * len(self.noise)
        if self._reaches(base):
            return base, True
        for level in range(1, self.levels + 1):
            full = self._raise_candidates(base, range(len(self.noise)), level)
            if full != base and self._reaches(full):
                return self._prune(*self._bisect(base, level)), True
            base = full
        return base, False

    def metric_of(self, assignment: Assignment) -> float:
        """Return the metric of an assignment, evaluated once."""
        known = next((trial.metric for trial in self.trials if trial.assignment == assignment), None)
        if known is None:
            known = self.evaluate(assignment)
            self.trials.append(Trial(assignment, known))
        return known

    def _reaches(self, assignment: Assignment) -> bool:
        return self.metric_of(assignment) >= self.wanted

    def _raise_candidates(self, base: Assignment, candidates: Sequence[int], level: int) -> Assignment:
        raised = list(base)
        for candidate in candidates:
            if level in self.options[candidate]:
                raised[candidate] = level
        return self.close(tuple(raised))

    def _bisect(self, base: Assignment, level: int) -> tuple[Assignment, list[int], int]:
        """Return the shortest prefix of the ranking that reaches the wanted metric, as far as bisection finds it."""
        ranked = sorted(range(len(self.noise)), key=lambda candidate: -self.noise[candidate])
        ranked = [candidate for candidate in ranked if level in self.options[candidate]]
        low, high = 0, len(ranked)
        while high - low > 1 and len(self.trials) < self.most:
            middle = (low + high) // 2
            if self._reaches(self._raise_candidates(base, ranked[:middle], level)):
                high = middle
            else:
                low = middle
        return base, ranked[:high], level

    def _prune(self, base: Assignment, raised: list[int], level: int) -> Assignment:
        """Lower raised candidates again where the metric allows it, in ever smaller pieces, the least noisy first."""
        kept, size = raised, -(-len(raised) // _PIECES)
        while size >= 1:
            end = len(kept)
            while end > 0 and len(self.trials) < self.most:
                fewer = kept[: max(end - size, 0)] + kept[end:]
                assignment = self._raise_candidates(base, fewer, level)
                if not self._raises_less_than_failed(assignment) and self._reaches(assignment):
                    kept = fewer
                end -= size
            size //= 2
        return self._raise_candidates(base, kept, level)

    def _raises_less_than_failed(self, assignment: Assignment) -> bool:
        """Return whether an assignment that raises all of this, or more, has failed."""
        return any(
            trial.metric < self.wanted and all(map(operator.le, assignment, trial.assignment)) for trial in self.trials
        )


@dataclass
class TimeBudget:
    """The milliseconds that a model may take.

    A search that would raise too much loses some of it. Two thresholds keep noise from deciding: what it asks for stays
    up to 5 % over the budget; where it takes more, candidates come back only within the budget itself. So a model that
    takes just what is allowed keeps its precision, whichever way a measurement falls. Where raising nothing takes too
    long already, its time is the limit: what costs no time is raised.

    Attributes:
        max_ms: the budget.
        measure: returns the milliseconds of the sim as it is now.
        most: measurements to spend, after which nothing is raised again.
        float_ms: milliseconds of the model in float, if they were measured.
        extra: layer -> milliseconds that it takes more in float than now, if they were measured.
        kernels: whether it is ONNX Runtime's integer kernels that are fast: a layer is raised with what it reads.
        times: every assignment that was measured.
    """

    max_ms: float
    measure: Callable[[], float]
    most: int = 32
    float_ms: float | None = None
    extra: Mapping[str, float] = field(default_factory=dict)
    kernels: bool = False
    times: dict[Assignment, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the budget."""
        given = self.max_ms
        if isinstance(given, bool) or not isinstance(given, int | float | np.number) or not given > 0.0:
            raise ConfigError(f"max_ms={given!r} is no budget; give the milliseconds of one run, a number above 0")

    def fitted(
        self,
        wanted: Assignment,
        ranked: Sequence[int],
        take: Callable[[Assignment], None],
        close: Callable[[Assignment], Assignment] = as_it_is,
    ) -> Assignment:
        """Return an assignment, or as much of it as the time allows.

        Args:
            wanted: what a search would raise.
            ranked: all candidates, those first that need it most.
            take: gives the sim the precision of an assignment.
            close: raises what must be raised beside the others too; nothing that is not raised in `wanted`.
        """
        nothing = (0,) * len(wanted)
        limit = max(self.max_ms, self._ms_of(nothing, take))
        if self._ms_of(wanted, take) <= (1.0 + TOLERANCE) * limit:
            return wanted

        def with_some(kept: Assignment, added: Sequence[int]) -> Assignment:
            """Return `kept` with those of some candidates raised that fit, by halves, the first ones first."""
            if len(self.times) >= self.most:
                return kept
            fuller = close(tuple(wanted[place] if place in added else level for place, level in enumerate(kept)))
            if self._ms_of(fuller, take) <= limit:
                return fuller
            if len(added) == 1:
                return kept
            middle = len(added) // 2
            return with_some(with_some(kept, added[:middle]), added[middle:])

        return with_some(nothing, [candidate for candidate in ranked if wanted[candidate]])

    def holds(self, assignment: Assignment) -> bool:
        """Return True if an assignment that was measured is within the budget and its tolerance."""
        return self.times[assignment] <= (1.0 + TOLERANCE) * self.max_ms

    def summary(self, chosen: Assignment) -> dict[str, float]:
        """Return the budget, and the times of the chosen assignment, of raising nothing and of the float model."""
        times = {"max_ms": self.max_ms, "ms": self.times[chosen], "ms_before": self.times[(0,) * len(chosen)]}
        return times if self.float_ms is None else {**times, "float_ms": self.float_ms}

    def no_gain(self, chosen: Assignment) -> list[str]:
        """Return a remark where integers gain no time."""
        return [] if self.float_ms is None else no_time_gained(self.times[chosen], self.float_ms, self.extra)

    def _ms_of(self, assignment: Assignment, take: Callable[[Assignment], None]) -> float:
        """Return the time of an assignment, measured once."""
        if assignment not in self.times:
            take(assignment)
            self.times[assignment] = float(self.measure())
        return self.times[assignment]


def no_time_gained(ms: float, float_ms: float, extra: Mapping[str, float]) -> list[str]:
    """Return a remark where a quantized model is no faster than the float one, beyond the noise of times.

    `extra` is how much more each layer takes in float; the layers that take less are named.
    """
    if ms <= (1.0 - TOLERANCE) * float_ms:
        return []
    slower = sorted((layer for layer, more in extra.items() if more < -_NAMED_FROM * ms), key=lambda one: extra[one])
    named = ", ".join(f"{layer} ({-extra[layer]:.2g} ms)" for layer in slower[:_NAMED])
    return [
        f"a run takes {ms:.3g} ms, {ms / float_ms:.3g} times the {float_ms:.3g} ms in float: integers gain no time here"
        f"{f'; they take longest, over float, in {named}' if named else ''}; "
        "qsdk.analysis.profile(sim) says what takes it, and its cures what would help; else keep the float model, or "
        "fewer bytes with weight_only"
    ]


class LowerableWeight(NamedTuple):
    """A weight that may take fewer bits: the bytes that this saves in a file, and its noise at the outputs then."""

    site: str
    saves: int
    noise: float


def choose_lowered(weights: Sequence[LowerableWeight], bytes_to_save: int) -> list[str] | None:
    """Return the sites to lower; None if all together save too little.

    Those that cost least noise per byte come first, or those that cost least noise: whichever ends with less. What then
    turns out not to be needed is taken back, the noisiest first.

    Examples:
        >>> weights = [LowerableWeight("a", 10, 1.0), LowerableWeight("b", 100, 2.0), LowerableWeight("c", 100, 9.0)]
        >>> choose_lowered(weights, 105), choose_lowered(weights, 90), choose_lowered(weights, 300)
        (['a', 'b'], ['b'], None)
    """
    useful = [weight for weight in weights if weight.saves > 0]
    if sum(weight.saves for weight in useful) < bytes_to_save:
        return None
    per_byte = sorted(useful, key=lambda weight: weight.noise / weight.saves)
    alone = sorted(useful, key=lambda weight: weight.noise)
    choices = [_enough(ranked, bytes_to_save) for ranked in (per_byte, alone)]
    best = min(choices, key=lambda chosen: sum(weight.noise for weight in chosen))
    return [weight.site for weight in weights if weight in best]


def _enough(ranked: Sequence[LowerableWeight], bytes_to_save: int) -> list[LowerableWeight]:
    """Return the first weights that save enough, without those that are not needed."""
    chosen: list[LowerableWeight] = []
    saved = 0
    for weight in ranked:
        if saved >= bytes_to_save:
            break
        chosen.append(weight)
        saved += weight.saves
    for weight in sorted(chosen, key=lambda weight: -weight.noise):
        if saved - weight.saves >= bytes_to_save:
            chosen.remove(weight)
            saved -= weight.saves
    return chosen
