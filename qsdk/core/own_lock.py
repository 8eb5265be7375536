"""A lock that belongs to one object: a copy of the object has one of its own."""

from _thread import RLock
from typing import Any


class OwnLock(RLock):  # type: ignore[misc]  # may be subclassed, although typeshed says it is final
    """A lock that its holder may take again, and that copies of the holder, also in another process, do not share.

    Taking and releasing it runs no Python code, so that no interrupt can come in between and leave it taken.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnLock, ()
