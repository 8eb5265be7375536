"""The search for the few sites that must be wider, on metrics whose answer is known."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsdk.core.precision.search import Assignment, Search


def additive(costs: list[float], halved: float = 0.0):
    """A metric that loses each candidate's cost until it is raised; level 2 removes what level 1 leaves."""

    def evaluate(assignment: Assignment) -> float:
        lost = {0: 1.0, 1: halved, 2: 0.0}
        return -sum(cost * lost[level] for cost, level in zip(costs, assignment, strict=True))

    return evaluate


def search(noise, evaluate, wanted, *, levels=1, options=None, most=64) -> Search:
    given_options = options or [frozenset(range(1, levels + 1))] * len(noise)
    return Search(noise, given_options, levels, evaluate, wanted, most)


def test_nothing_is_raised_where_the_budget_already_holds():
    made = search([1.0, 2.0], additive([1.0, 2.0]), wanted=-math.inf)
    assert made.run() == ((0, 0), True)
    assert len(made.trials) == 1


def test_the_noisiest_candidates_are_raised_until_the_budget_holds():
    costs = [0.1, 5.0, 0.2, 3.0, 0.1]
    assert search(costs, additive(costs), wanted=-0.5).run() == ((0, 1, 0, 1, 0), True)


def test_a_wrong_ranking_is_pruned():
    noise, costs = [9.0, 8.0, 7.0, 6.0], [0.0, 0.0, 0.0, 1.0]
    assert search(noise, additive(costs), wanted=-0.5).run() == ((0, 0, 0, 1), True)


def test_the_next_level_is_for_what_the_first_cannot_save():
    costs = [4.0, 1.0]
    made = search(costs, additive(costs, halved=0.5), wanted=-1.0, levels=2)
    assert made.run() == ((2, 1), True)


def test_candidates_without_a_level_stay_as_they_are():
    options = [frozenset(), frozenset({1})]
    assert search([2.0, 1.0], additive([1.0, 1.0]), -1.0, options=options).run() == ((0, 1), True)


def test_an_unreachable_budget_ends_at_the_top_level_and_says_so():
    made = search([1.0, 2.0], lambda assignment: -1.0, wanted=0.0, levels=2)
    assert made.run() == ((2, 2), False)


def test_what_raises_less_than_what_failed_is_not_evaluated():
    noise = [9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0]
    made = search(noise, additive([0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0]), wanted=-0.5)
    assert made.run() == ((0, 1, 0, 0, 0, 1, 0, 0), True)
    failed = [trial.assignment for trial in made.trials if trial.metric < made.wanted]
    raised = [{i for i, level in enumerate(assignment) if level} for assignment in failed]
    assert not any(later < earlier for at, later in enumerate(raised[1:], 1) for earlier in raised[1:at])


@pytest.mark.parametrize("most", [3, 5, 11])
def test_bisection_too_stops_at_the_number_of_evaluations_that_was_given(most: int):
    costs = [1.0] * 118
    made = search(costs, additive(costs), wanted=-40.5, most=most)
    chosen, met = made.run()
    assert met
    assert len(made.trials) <= most
    assert additive(costs)(chosen) >= -40.5


def test_pruning_stops_at_the_number_of_evaluations_that_was_given():
    noise = [1.0] * 64
    made = search(noise, additive(noise), wanted=-0.5, most=9)
    assert made.run()[1]
    assert len(made.trials) <= 9


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=24), st.floats(0.0, 4.0))
def test_the_result_reaches_what_is_wanted_and_no_assignment_is_evaluated_twice(costs: list[float], budget: float):
    asked = []
    inner = additive(costs)

    def evaluate(assignment: Assignment) -> float:
        asked.append(assignment)
        return inner(assignment)

    chosen, met = search(costs, evaluate, -budget).run()
    assert met
    assert inner(chosen) >= -budget
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize("count", [8, 64, 512])
def test_the_number_of_evaluations_grows_with_the_logarithm(count: int):
    costs = [float(i == count // 3) for i in range(count)]
    made = search(costs, additive(costs), wanted=-0.5)
    made.run()
    assert len(made.trials) <= 2 + 2 * math.log2(count)
