"""Memory that forwards have freed, and that the C library keeps: glibc keeps it for the thread that freed it."""

import ctypes
import os
from pathlib import Path

_MOST = 32 << 20
_STATM = Path("/proc/self/statm")
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" and _STATM.exists() else None


def give_back() -> None:
    """Give all memory that has been freed back to the system, where the C library can."""
    if _TRIM is not None:
        _TRIM(0)


class FreedMemory:
    """The bound on freed memory while many forwards run in turns, each in a thread of its own."""

    def __init__(self) -> None:
        self._least = _resident()

    def bound(self) -> None:
        """Give freed memory back once the process has grown by 32 MiB: not each time, since pages cost time to get."""
        now = _resident()
        if now - self._least > _MOST:
            give_back()
            self._least = _resident()
        self._least = min(self._least, now)


def _resident() -> int:
    """Return the bytes of this process that are in memory, 0 where nothing can be given back."""
    return 0 if _TRIM is None else int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
