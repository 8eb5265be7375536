"""Which parametrizations of a test the default run takes: `@pytest.mark.spread(n)`.

A test of forty combinations of dtype, granularity and op finds nearly all that it can find with six of them, chosen
well. `spread(n)` takes n, chosen such that as many values of each parameter occur as can, and marks the others slow:
CI runs them after the default tests.
"""

from collections.abc import Iterator, Sequence

import pytest


def spread_parametrizations(items: Sequence[pytest.Item]) -> None:
    """Mark slow what the default run leaves out of each test that is marked `spread`."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        quick = item.get_closest_marker("spread") and not item.get_closest_marker("slow")
        if quick and isinstance(item, pytest.Function):
            tests.setdefault(item.nodeid.split("[")[0], []).append(item)
    for forms in tests.values():
        marker = forms[0].get_closest_marker("spread")
        assert marker is not None
        (number,) = marker.args
        values = [tuple(form.callspec.indices.items()) for form in forms]
        for left_out in set(range(len(forms))) - set(chosen(values, number)):
            forms[left_out].add_marker("slow")


def chosen(forms: Sequence[tuple[tuple[str, int], ...]], number: int) -> list[int]:
    """Choose `number` of the forms, each given by its (parameter, value) pairs: as many pairs occur as can."""
    taken: list[int] = []
    seen: set[tuple[str, int]] = set()
    left = list(_evenly(len(forms), number))
    while left and len(taken) < number:
        best = max(left, key=lambda at: len(set(forms[at]) - seen))  # the first of equals
        taken.append(best)
        seen.update(forms[best])
        left.remove(best)
    return sorted(taken)


def _evenly(length: int, number: int) -> Iterator[int]:
    """Yield each place of a list once, first `number` of them from its first to its last at equal steps."""
    steps = [round(at * (length - 1) / max(number - 1, 1)) for at in range(min(number, length))]
    yield from dict.fromkeys([*steps, *range(length)])
