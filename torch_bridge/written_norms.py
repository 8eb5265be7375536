"""BatchNorm as it is written into a trace: torch's exporter fails on statistics that are sites, and misreads others."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

OPSET = 21


def _batch_norm(
    input: Tensor,  # as torch calls it
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Write `F.batch_norm` of x [N, C, ...] as one op, or as ops on the batch itself where that is what it reads.

    The exporter takes the running statistics even where `training` says not to, so it is not shown them; what they
    become is no result.
    """
    if training or running_mean is None or running_var is None:
        return F.batch_norm(input, None, None, weight, bias, True, momentum, eps)
    gain = running_var.new_ones(running_var.shape) if weight is None else weight
    shift = running_mean.new_zeros(running_mean.shape) if bias is None else bias
    read = (input, gain, shift, running_mean, running_var)
    return torch.onnx.ops.symbolic(
        "BatchNormalization", read, {"epsilon": eps}, dtype=input.dtype, shape=input.shape, version=OPSET
    )


def _native_batch_norm(
    input: Tensor,  # as torch calls it
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Write `torch.batch_norm`, which takes the same in another order."""
    return _batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def as_written(func: Callable[..., Any]) -> Callable[..., Any]:
    """What is traced in the place of a torch function: mostly the function itself."""
    if func is F.batch_norm:
        return _batch_norm
    return _native_batch_norm if func is torch.batch_norm else func
