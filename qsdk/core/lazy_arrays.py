"""Arrays by name that are computed when they are asked for, so that only one at a time is in memory."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]


class LazyArrays(Mapping[str, Array]):
    """A mapping whose names are known and whose arrays are computed at every access.

    Args:
        names: in order.
        make: returns the array of a name.
    """

    def __init__(self, names: Iterable[str], make: Callable[[str], Array]) -> None:
        self._names, self._make = dict.fromkeys(names), make

    def __getitem__(self, name: str) -> Array:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
