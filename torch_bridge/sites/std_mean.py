"""`torch.std_mean` and `torch.var_mean` as two ops, so that a module that calls them has the same sites."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

StdAndMean = Callable[..., tuple[Tensor, Tensor]]


def decompose_std_mean(func: Callable[..., Any]) -> StdAndMean | None:
    """Return the function to run in the place of `torch.std_mean` or `torch.var_mean`; None in the place of others."""
    if func is torch.std_mean:
        return lambda *args, **kwargs: (torch.std(*args, **kwargs), _mean(*args, **kwargs))
    if func is torch.var_mean:
        return lambda *args, **kwargs: (torch.var(*args, **kwargs), _mean(*args, **kwargs))
    return None


def _mean(
    input: Tensor,
    dim: int | tuple[int, ...] | bool | None = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = 1,
) -> Tensor:
    """Return the mean, called as either overload of `torch.var_mean`; one takes `unbiased` in the place of `dim`."""
    axes = None if isinstance(dim, bool) else dim
    return torch.mean(input, axes, keepdim)
