"""Keep the stack that this thread handles signals on, which OpenVINO replaces while it compiles a model."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_SIZE = 64  # bytes, more than any system's `stack_t`
_SWITCH = getattr(ctypes.CDLL(None), "sigaltstack", None) if os.name == "posix" else None


@contextmanager
def kept_signal_stack() -> Iterator[None]:
    """Put the alternate signal stack of this thread (`sigaltstack(2)`) back at the end of the block.

    OpenVINO 2026.4 sets one of its own for each model that it compiles, and puts the one before back when the model is
    freed. Models that are not freed in reverse order leave one that is gone, and the next signal with a Python handler,
    such as the end of a DataLoader's worker, ends the process. With the stack put back after each compilation, all
    models find the same one, and every order is right.
    """
    before = signal_stack()
    try:
        yield
    finally:
        if _SWITCH is not None:
            _SWITCH(ctypes.create_string_buffer(before, _SIZE), None)


def signal_stack() -> bytes:
    """Return the system's description of this thread's alternate signal stack; empty where systems have none."""
    if _SWITCH is None:
        return b""
    found = ctypes.create_string_buffer(_SIZE)
    _SWITCH(None, found)
    return found.raw
