"""A lock that belongs to one object: a copy of the object has one of its own."""

from threading import RLock
from types import TracebackType
from typing import Any


class OwnLock:
    """A lock that its holder may take again, and that copies of the holder, also in another process, do not share."""

    def __init__(self) -> None:
        self._lock = RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnLock, ()
