"""The operator library of torch's exporter: read once in a process, where the exporter reads it at every trace."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

try:
    from torch.onnx._internal.exporter import _registration as registration
except ImportError:  # another torch keeps it elsewhere; tracing is slower then, and the same
    registration = None  # type: ignore[assignment]

_READ = "get_torchlib_ops"


@contextmanager
def operators_read_once() -> Iterator[None]:
    """Let torch's exporter find the operators that an earlier trace has read.

    Each call of `torch.onnx.export` parses the source of some 500 functions again, which takes about as long as tracing
    a small model. Operators that somebody adds to the library itself after the first trace are not seen; translations
    of custom ops are none of them.
    """
    library: Any = getattr(registration, "onnxscript_apis", None)
    read = getattr(library, _READ, None)
    if read is None or hasattr(read, "cache_info"):  # nothing to remember, or another thread is tracing too
        yield
        return
    setattr(library, _READ, _remembered(read))
    try:
        yield
    finally:
        setattr(library, _READ, read)


@cache
def _remembered(read: Callable[[], Any]) -> Callable[[], Any]:
    return cache(read)
