"""A budget of measured time for a search: what it would raise is raised only as far as the time allows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from qsdk.core.errors import ConfigError
from qsdk.core.precision.search import Assignment

#: times are noisy: what is no further over the budget than this stays, and what was taken back must be within it
TOLERANCE = 0.05


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
        times: every assignment that was measured.
    """

    max_ms: float
    measure: Callable[[], float]
    most: int = 32
    float_ms: float | None = None
    times: dict[Assignment, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the budget.

        Raises:
            ConfigError: it is no positive number.
        """
        given = self.max_ms
        if isinstance(given, bool) or not isinstance(given, int | float | np.number) or not given > 0.0:
            raise ConfigError(f"max_ms={given!r} is no budget; give the milliseconds of one run, a number above 0")

    def fitted(self, wanted: Assignment, ranked: Sequence[int], take: Callable[[Assignment], None]) -> Assignment:
        """Return an assignment, or as much of it as the time allows.

        Args:
            wanted: what a search would raise.
            ranked: all candidates, those first that need it most.
            take: gives the sim the precision of an assignment.
        """
        nothing = (0,) * len(wanted)
        limit = max(self.max_ms, self._ms_of(nothing, take))
        if self._ms_of(wanted, take) <= (1.0 + TOLERANCE) * limit:
            return wanted

        def with_some(kept: Assignment, added: Sequence[int]) -> Assignment:
            """Return `kept` with those of some candidates raised that fit, by halves, the first ones first."""
            if len(self.times) >= self.most:
                return kept
            fuller = tuple(wanted[place] if place in added else level for place, level in enumerate(kept))
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
        return [] if self.float_ms is None else no_time_gained(self.times[chosen], self.float_ms)

    def _ms_of(self, assignment: Assignment, take: Callable[[Assignment], None]) -> float:
        """Return the time of an assignment, measured once."""
        if assignment not in self.times:
            take(assignment)
            self.times[assignment] = float(self.measure())
        return self.times[assignment]


def no_time_gained(ms: float, float_ms: float) -> list[str]:
    """Return a remark where a quantized model is no faster than the float one, beyond the noise of times."""
    if ms <= (1.0 - TOLERANCE) * float_ms:
        return []
    return [
        f"a run takes {ms:.3g} ms, and {float_ms:.3g} ms in float: integers gain no time here; "
        "qsdk.analysis.profile(sim) says what takes it, and its cures what would help; else keep the float model, or "
        "fewer bytes with weight_only"
    ]
