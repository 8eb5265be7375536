"""A budget of measured time: as much is raised as fits into it, on times whose answer is known."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsdk import ConfigError
from qsdk.core.precision.search import Assignment, TimeBudget, no_time_gained


class Clock:
    """A model whose raised candidates take a known time each, beside 10 ms for the rest."""

    def __init__(self, costs: list[float]) -> None:
        self.costs, self.taken, self.measured = costs, (0,) * len(costs), 0

    def take(self, assignment: Assignment) -> None:
        self.taken = assignment

    def measure(self) -> float:
        self.measured += 1
        return 10.0 + sum(cost for cost, level in zip(self.costs, self.taken, strict=True) if level)

    def fitted(self, max_ms: float, wanted: Assignment, *, most: int = 64) -> Assignment:
        """The first candidates are those that need it most."""
        return TimeBudget(max_ms, self.measure, most).fitted(wanted, range(len(wanted)), self.take)


def test_what_fits_stays_whole():
    clock = Clock([1.0, 2.0, 3.0])
    assert clock.fitted(16.0, (1, 1, 2)) == (1, 1, 2)
    assert clock.measured == 2, "what was raised, and nothing raised"


def test_a_slow_one_is_left_out_though_it_needs_it_most():
    assert Clock([9.0, 1.0, 1.0, 0.0]).fitted(12.0, (1, 2, 1, 1)) == (0, 2, 1, 1)
    assert Clock([1.0, 1.0, 1.0, 1.0]).fitted(12.0, (1, 1, 1, 1)) == (1, 1, 0, 0)


def test_candidates_that_the_search_left_alone_stay():
    assert Clock([5.0, 5.0, 1.0]).fitted(11.0, (1, 0, 1)) == (0, 0, 1)


def test_what_costs_no_time_is_raised_where_the_model_is_too_slow_already():
    clock = Clock([1.0, 0.0, -2.0, 3.0])
    budget = TimeBudget(7.0, clock.measure)
    assert budget.fitted((1, 1, 1, 1), range(4), clock.take) == (0, 1, 1, 0)
    assert budget.summary((0, 1, 1, 0)) == {"max_ms": 7.0, "ms": 8.0, "ms_before": 10.0}
    assert not budget.holds((0, 1, 1, 0))
    assert Clock([1.0, 1.0]).fitted(9.0, (1, 1)) == (0, 0)


def test_noise_at_the_budget_changes_nothing():
    """A model that takes just what is allowed keeps all, whichever way a measurement falls."""
    for noise in (-0.04, -0.01, 0.0, 0.01, 0.04):
        clock = Clock([1.0, 1.0])
        budget = TimeBudget(12.0, lambda clock=clock, noise=noise: clock.measure() * (1 + noise))
        assert budget.fitted((1, 1), range(2), clock.take) == (1, 1)
        assert budget.holds((1, 1))


def test_what_was_taken_back_comes_back_within_the_budget_alone():
    assert Clock([0.5, 1.9, 1.0]).fitted(12.0, (1, 1, 1)) == (1, 0, 1), "12.4 ms are within the tolerance alone"
    assert Clock([0.5, 1.5, 1.0]).fitted(12.0, (1, 1, 1)) == (1, 1, 0)


def test_measuring_stops_at_the_number_that_was_given():
    clock = Clock([1.0] * 32)
    chosen = clock.fitted(20.0, (1,) * 32, most=5)
    assert clock.measured == 5
    assert 0 < sum(chosen) <= 10


@given(
    costs=st.lists(st.floats(0, 5), min_size=1, max_size=8),
    max_ms=st.floats(5, 40),
    levels=st.data(),
)
def test_the_result_fits_and_no_assignment_is_measured_twice(costs: list[float], max_ms: float, levels):
    wanted = tuple(levels.draw(st.integers(0, 2)) for _ in costs)
    clock = Clock(costs)
    budget = TimeBudget(max_ms, clock.measure, 64)
    chosen = budget.fitted(wanted, range(len(costs)), clock.take)
    assert all(level in (0, most) for level, most in zip(chosen, wanted, strict=True))
    limit = max(max_ms, 10.0)
    assert budget.times[chosen] <= 1.05 * limit
    assert clock.measured == len(budget.times)
    # nothing that was left out would fit beside what was kept
    if chosen != wanted:
        clock.take(chosen)
        now = clock.measure()
        left = [c for c, level, most in zip(costs, chosen, wanted, strict=True) if level != most]
        assert all(now + cost > limit * (1 - 1e-9) for cost in left)


def test_what_must_go_with_another_goes_with_it_or_not_at_all():
    """The second candidate takes 3 ms, and the first cannot be raised without it."""
    clock = Clock([0.0, 3.0, 1.0])

    def close(assignment: Assignment) -> Assignment:
        return (assignment[0], max(assignment[:2]), assignment[2])

    for max_ms, chosen in ((12.0, (0, 0, 1)), (13.1, (1, 1, 0)), (14.0, (1, 1, 1))):
        assert TimeBudget(max_ms, clock.measure).fitted((1, 1, 1), range(3), clock.take, close) == chosen


def test_layers_that_are_slower_in_integers_are_named_the_worst_first():
    extra = {"a": -1.0, "b": 2.0, "c": -3.0, "d": -0.01, "e": -0.5, "f": -0.4}
    (said,) = no_time_gained(10.0, 8.0, extra)
    assert "a run takes 10 ms, 1.25 times the 8 ms in float" in said
    assert "in c (3 ms), a (1 ms), e (0.5 ms);" in said
    assert no_time_gained(7.0, 8.0, extra) == []


@pytest.mark.parametrize("given_budget", [0, -1.0, math.nan, "5", True])
def test_a_budget_that_is_no_time_is_refused(given_budget):
    with pytest.raises(ConfigError, match=r"max_ms=.* is no budget; give the milliseconds of one run"):
        TimeBudget(given_budget, lambda: 1.0)
