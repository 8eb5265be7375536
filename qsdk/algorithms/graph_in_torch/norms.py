"""Ops that normalize."""

from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from qsdk.algorithms.graph_in_torch.values import Kernels


def _standardized(x: Tensor, axes: list[int], epsilon: float) -> Tensor:
    centred = x - x.mean(axes, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(axes, keepdim=True) + epsilon)


def _per_channel(values: Tensor, rank: int) -> Tensor:
    return values.reshape(-1, *[1] * (rank - 2))


def _batch_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    mean: Tensor,
    variance: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
) -> Tensor:
    if training_mode:
        raise ValueError("it normalizes with the statistics of the batch (training_mode is 1)")
    factor = scale * torch.rsqrt(variance + epsilon)
    return (x - _per_channel(mean, x.ndim)) * _per_channel(factor, x.ndim) + _per_channel(shift, x.ndim)


def _layer_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Tensor:
    result = _standardized(x, list(range(axis % x.ndim, x.ndim)), epsilon) * scale
    return result if shift is None else result + shift


def _rms_norm(x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> Tensor:
    axes = list(range(axis % x.ndim, x.ndim))
    return x * torch.rsqrt(x.square().mean(axes, keepdim=True) + epsilon) * scale


def _instance_norm(x: Tensor, scale: Tensor, shift: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    result = _standardized(x, list(range(2, x.ndim)), epsilon)
    return result * _per_channel(scale, x.ndim) + _per_channel(shift, x.ndim)


def _group_norm(
    x: Tensor, scale: Tensor, shift: Tensor, *, num_groups: int, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    result = _standardized(x.reshape(x.shape[0], num_groups, -1), [2], epsilon).reshape(x.shape)
    return result * _per_channel(scale, x.ndim) + _per_channel(shift, x.ndim)


def _unit_length(x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    length = torch.linalg.vector_norm(x, ord=p, dim=axis, keepdim=True)
    return x / torch.where(length == 0, 1, length)  # what is zero everywhere stays zero


def _mean_variance_norm(x: Tensor, *, axes: tuple[int, ...] = (0, 2, 3)) -> Tensor:
    return _standardized(x, list(axes), 1e-9)


def _across_channels(x: Tensor, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Tensor:
    around = [0, 0] * (x.ndim - 2) + [(size - 1) // 2, size // 2]
    energy = F.pad(x * x, around).unfold(1, size, 1).sum(-1)
    return x / (bias + alpha / size * energy) ** beta


NORMS: Kernels = MappingProxyType(
    {
        "BatchNormalization": _batch_norm,
        "GroupNormalization": _group_norm,
        "InstanceNormalization": _instance_norm,
        "LRN": _across_channels,
        "LayerNormalization": _layer_norm,
        "LpNormalization": _unit_length,
        "MeanVarianceNormalization": _mean_variance_norm,
        "RMSNormalization": _rms_norm,
    }
)
