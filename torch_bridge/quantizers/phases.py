"""The phases of a sim, which decide what sites do while a model runs, and the arguments of a call."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import Tensor

Phase = Literal["float", "quantize", "visit", "mark"]
Visitor = Callable[[str, Tensor], Tensor]


def call_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> tuple[Any, ...]:
    """Return the arguments of a call, including tensors in `out=`: the tensors that the call may write over."""
    if not kwargs:
        return args
    out = kwargs.get("out")
    return *args, *kwargs.values(), *(out if isinstance(out, tuple | list) else ())
