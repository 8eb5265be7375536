"""What sites do while a model runs: the phases of a sim, and what calls are given."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import Tensor

Phase = Literal["float", "quantize", "visit", "mark"]
Visitor = Callable[[str, Tensor], Tensor]


def given_to(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> tuple[Any, ...]:
    """What a call is given that it may write over, tensors in `out=` too."""
    if not kwargs:
        return args
    out = kwargs.get("out")
    return *args, *kwargs.values(), *(out if isinstance(out, tuple | list) else ())
