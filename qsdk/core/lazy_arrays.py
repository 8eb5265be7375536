"""Values by name that are computed when they are asked for, so that only one at a time is in memory."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from qsdk.core.arrays import Array

T = TypeVar("T")


class LazyMapping(Mapping[str, T], Generic[T]):
    """A mapping whose names are known and whose values are computed at every access."""

    def __init__(self, names: Iterable[str], make: Callable[[str], T]) -> None:
        self._names, self._make = dict.fromkeys(names), make

    def __getitem__(self, name: str) -> T:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class LazyArrays(LazyMapping[Array]):
    """Arrays by name, computed at every access."""
