"""The search for the few sites that need more precision: a bisection over a ranking, then pruning.

The ranking comes with the candidates (the noise of each at the model's outputs). Raising more is taken to do no harm,
so nothing is evaluated that raises no more than what has failed; nor is anything evaluated twice.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Assignment = tuple[int, ...]

_PIECES = 8  # that pruning begins with: halves are hardly ever spared, and few evaluations are left


@dataclass(frozen=True)
class Trial:
    """An assignment (per candidate: 0 if unchanged, else the level it is raised to) and its metric."""

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
        trials: everything evaluated, in order.
    """

    noise: Sequence[float]
    options: Sequence[frozenset[int]]
    levels: int
    evaluate: Callable[[Assignment], float]
    wanted: float
    most: int
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
        return tuple(raised)

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
