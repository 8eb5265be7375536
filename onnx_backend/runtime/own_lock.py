"""A lock that belongs to one object: a copy of the object has one of its own."""

from threading import RLock
from types import TracebackType
from typing import Any


class OwnLock:
    """A lock that its holder may take again, and that a deep copy does not share."""

    def __init__(self) -> None:
        self._lock = RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def __deepcopy__(self, memo: dict[int, Any]) -> "OwnLock":
        return OwnLock()
