"""Searching for the few sites that need more precision: a bisection over a ranking, then pruning.

The ranking costs one pass of statistics (each site's own quantization noise over its signal); the metric is asked
about twice the logarithm of the number of candidates, and never twice for the same assignment.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Assignment = tuple[int, ...]


@dataclass(frozen=True)
class Trial:
    """An assignment (per candidate: 0 as it is, else the level it is raised to) and the metric it reached."""

    assignment: Assignment
    metric: float


@dataclass
class Search:
    """A search for the cheapest assignment whose metric is at least `wanted`.

    Attributes:
        noise: of each candidate, the larger the sooner it is raised.
        options: per candidate, the levels that would raise it.
        levels: how many levels there are.
        evaluate: asked for the metric of an assignment.
        wanted: the least metric allowed.
        most: evaluations to spend; pruning stops there.
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
        """Return the chosen assignment and whether it reaches what is wanted; else everything is at the top level."""
        base = (0,) * len(self.noise)
        if self._reaches(base):
            return base, True
        for level in range(1, self.levels + 1):
            full = self._raised(base, range(len(self.noise)), level)
            if full != base and self._reaches(full):
                return self._pruned(*self._bisected(base, level)), True
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

    def _raised(self, base: Assignment, candidates: Sequence[int], level: int) -> Assignment:
        raised = list(base)
        for candidate in candidates:
            if level in self.options[candidate]:
                raised[candidate] = level
        return tuple(raised)

    def _bisected(self, base: Assignment, level: int) -> tuple[Assignment, list[int], int]:
        """Return the shortest prefix of the ranking that reaches what is wanted, as far as bisection sees."""
        ranked = sorted(range(len(self.noise)), key=lambda candidate: -self.noise[candidate])
        ranked = [candidate for candidate in ranked if level in self.options[candidate]]
        low, high = 0, len(ranked)
        while high - low > 1:
            middle = (low + high) // 2
            if self._reaches(self._raised(base, ranked[:middle], level)):
                high = middle
            else:
                low = middle
        return base, ranked[:high], level

    def _pruned(self, base: Assignment, raised: list[int], level: int) -> Assignment:
        """Take back what is not needed, in ever smaller pieces, the quietest first."""
        kept, size = raised, len(raised) // 2
        while size >= 1:
            end = len(kept)
            while end > 0 and len(self.trials) < self.most:
                fewer = kept[: max(end - size, 0)] + kept[end:]
                if self._reaches(self._raised(base, fewer, level)):
                    kept = fewer
                end -= size
            size //= 2
        return self._raised(base, kept, level)
