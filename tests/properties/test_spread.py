"""The default run takes some parametrizations of a test, and CI all of them."""

from itertools import product

import pytest
from spread import chosen

pytest_plugins = ["pytester"]
CONFTEST = """
import pytest
from spread import spread_parametrizations

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    spread_parametrizations(items)
"""
EXAMPLE = """
import pytest

@pytest.mark.spread(3)
@pytest.mark.parametrize("dtype", ["int4", "int8", "int16"])
@pytest.mark.parametrize("op", ["Add", "Mul", pytest.param("Div", marks=pytest.mark.slow)])
def test_an_op(dtype, op): ...

def test_other(): ...
"""


def cross(*lengths: int) -> list[tuple[tuple[str, int], ...]]:
    return [tuple((f"p{at}", value) for at, value in enumerate(form)) for form in product(*map(range, lengths))]


@pytest.mark.parametrize(("lengths", "number"), [((7,), 3), ((4, 3), 4), ((5, 2, 2), 5), ((6, 6), 6), ((2, 2), 9)])
def test_every_value_occurs_where_the_number_allows_it(lengths: tuple[int, ...], number: int):
    forms = cross(*lengths)
    taken = chosen(forms, number)
    assert len(taken) == len(set(taken)) == min(number, len(forms))
    for parameter, length in enumerate(lengths):
        values = {dict(forms[at])[f"p{parameter}"] for at in taken}
        assert len(values) == min(length, number)


def test_a_list_is_taken_from_its_first_to_its_last():
    assert chosen(cross(9), 3) == [0, 4, 8]
    assert chosen(cross(9), 1) == [0]


def test_what_is_left_out_is_slow(pytester: pytest.Pytester):
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nmarkers =\n  slow\n  spread(n)")
    pytester.makepyfile(EXAMPLE)
    assert pytester.inline_run("-m", "not slow").countoutcomes() == [4, 0, 0]
    assert pytester.inline_run("-m", "slow").countoutcomes() == [6, 0, 0]
    assert pytester.inline_run().countoutcomes() == [10, 0, 0]
