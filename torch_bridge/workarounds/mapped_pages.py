"""The pages of mapped files that are in memory: which files are mapped where, and how their pages are given back."""

import ctypes
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

_PAGEOUT = 21  # MADV_PAGEOUT of Linux 5.4: the system may drop these pages; what they hold is never lost
_EVERY = 0.02  # seconds between two looks at the memory
_MAPS, _MEMORY = Path("/proc/self/maps"), Path("/proc/self/statm")


def mapped_ranges(folders: Sequence[str]) -> list[tuple[int, int]]:
    """Return the address ranges, first and last + 1, at which files of these folders are mapped.

    It is empty on systems without `/proc/self/maps`.
    """
    if not _MAPS.exists():
        return []
    inside = tuple(os.path.join(folder, "") for folder in folders)
    result = []
    for line in _MAPS.read_text(errors="surrogateescape").splitlines():
        place, *_, path = line.split(maxsplit=5)
        if path.startswith(inside):
            first, _, last = place.partition("-")
            result.append((int(first, 16), int(last, 16)))
    return result


def release_pages(folders: Sequence[str]) -> None:
    """Give the pages of all mapped files of these folders back to the system; they are read again when needed."""
    advise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
    if advise is not None:
        for first, last in mapped_ranges(folders):
            advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _PAGEOUT)


def limit_pages(owner: object, folders: Sequence[str], limit: int) -> None:
    """Keep the pages of mapped files below a limit for as long as `owner` lives.

    A thread looks at the memory of the process and releases the pages where they have grown by more than the limit. The
    weights of a model that lies in files are read in many places, by torch above all; each would have to release what
    it has read. `limit` counts bytes of mapped files beyond those that are in memory now.
    """
    if not (_MAPS.exists() and _MEMORY.exists()):
        return  # the system drops clean pages by itself when memory is short
    stop = threading.Event()
    thread = threading.Thread(
        target=_release_over, args=(stop, tuple(folders), _pages_of_files() + limit), name="qsdk weights", daemon=True
    )
    thread.start()
    weakref.finalize(owner, stop.set)


def _release_over(stop: threading.Event, folders: Sequence[str], limit: int) -> None:
    while not stop.wait(_EVERY):
        if _pages_of_files() > limit:
            release_pages(folders)


def _pages_of_files() -> int:
    """Return the bytes of this process's pages that belong to files."""
    return int(_MEMORY.read_text().split()[2]) * os.sysconf("SC_PAGE_SIZE")
