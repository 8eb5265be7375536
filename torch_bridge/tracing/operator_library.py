"""What torch's exporter looks up anew at every trace, though it does not change: looked up once."""

import typing
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

from torch_bridge.tracing.exporter_modules import composites, kernels, registration


@contextmanager
def operators_read_once() -> Iterator[None]:
    """Let torch's exporter find what it has looked up before.

    Each call of `torch.onnx.export` does the following anew, which takes longer than translating a small model:

    - it parses the source of some 500 functions, its operator library, and derives the signature of each. Operators
      that somebody adds to the library itself after the first trace are not seen; translations of custom ops are none
      of them;
    - it lists the ops that torch composes of others, some 50 times: once per namespace of ops and pass. Here it lists
      them once per call;
    - it evaluates the annotation `Callable[_P, _T]` for some 10,000 kernels. `collections.abc` makes a new object of
      it each time, `typing` finds the one that it has made.
    """
    with ExitStack() as stack:
        library, signatures = (getattr(registration, name, None) for name in ("onnxscript_apis", "_schemas"))
        stack.enter_context(_replaced(library, "get_torchlib_ops", _remembered))
        stack.enter_context(_replaced(signatures, "op_signature_from_function", _remembered))
        stack.enter_context(_replaced(composites, "_materialize_cpp_cia_ops", cache))
        stack.enter_context(_replaced(kernels, "Callable", lambda _: typing.Callable))
        yield


@contextmanager
def _replaced(owner: Any, name: str, replacement: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute of a module inside the block."""
    before = getattr(owner, name, None)
    if before is None or before is typing.Callable or hasattr(before, "cache_info"):
        yield  # there is nothing to replace, or another thread is tracing too
        return
    setattr(owner, name, replacement(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


@cache
def _remembered(read: Callable[..., Any]) -> Callable[..., Any]:
    return cache(read)
