"""Batches cut into parts of the size that a file with fixed sizes takes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any


def parts_of(batches: Iterable[Any], sizes: Sequence[Sequence[int]]) -> Iterator[Any]:
    """Yield batches in parts whose arrays have the first size of all inputs of a file, which have these sizes.

    A batch whose arrays have different first sizes, or no whole multiple, is yielded as it is.
    """
    wanted = {shape[0] if shape else 0 for shape in sizes}
    for batch in batches:
        given = {value.shape[0] if value.shape else 0 for value in _arrays(batch)}
        size, n = min(wanted, default=0), min(given, default=0)
        if len(wanted) == len(given) == 1 and size and n > size and n % size == 0:
            yield from (_part(batch, slice(at, at + size)) for at in range(0, n, size))
        else:
            yield batch


def _arrays(value: Any) -> Iterator[Any]:
    if hasattr(value, "shape"):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _arrays(one)


def _part(value: Any, rows: slice) -> Any:
    if hasattr(value, "shape"):
        return value[rows]
    if isinstance(value, Mapping):
        return {name: _part(one, rows) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_part(one, rows) for one in value] if isinstance(value, list) else tuple(_part(o, rows) for o in value)
    return value
