"""ReLUs that the quantizer behind them computes on the way: clipping the levels clips the values."""

from collections.abc import Mapping
from math import inf
from typing import Any

from torch import Tensor, nn


def relu_ceiling(module: nn.Module) -> float | None:
    """Return the upper bound of a ReLU (infinite) or ReLU6 module; None for any other module."""
    if isinstance(module, nn.ReLU):
        return inf
    return module.max_val if isinstance(module, nn.ReLU6) and module.min_val == 0 else None


def relu_ceiling_of_call(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> float | None:
    """Return the upper bound of a call of `relu` or `relu6` with one floating-point tensor; None for any other call."""
    bound = inf if name == "relu" else 6.0 if name == "relu6" else None
    if bound is None or len(args) != 1 or (kwargs or {}).keys() - {"inplace"}:
        return None
    return bound if isinstance(args[0], Tensor) and args[0].is_floating_point() else None
