"""Norms, reductions along axes, and ops that find elements by their size."""

from collections.abc import Callable, Sequence
from functools import reduce
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from qsdk.algorithms.graph_in_torch.values import DTYPES, Kernel, Kernels, ints


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


NORMS: Kernels = MappingProxyType(
    {
        "BatchNormalization": _batch_norm,
        "GroupNormalization": _group_norm,
        "InstanceNormalization": _instance_norm,
        "LayerNormalization": _layer_norm,
        "LpNormalization": _unit_length,
        "RMSNormalization": _rms_norm,
    }
)


def _reduction(compute: Callable[[Tensor, Sequence[int]], Tensor]) -> Kernel:
    """Return the kernel of a reduction from a function of a tensor and axes that keeps the axes with size 1."""

    def reduced(x: Tensor, axes: Tensor | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
        chosen = [] if axes is None else [axis % x.ndim for axis in ints(axes)]
        if not chosen and noop_with_empty_axes:
            return compute(x[..., None], [x.ndim])[..., 0]
        chosen = chosen or list(range(x.ndim))
        result = compute(x, chosen) if x.ndim else compute(x[None], [0])[0]
        return result if keepdims else result.reshape([n for axis, n in enumerate(result.shape) if axis not in chosen])

    return reduced


def _sum(x: Tensor, axes: Sequence[int]) -> Tensor:
    return x.sum(list(axes), keepdim=True, dtype=x.dtype)


def _product(x: Tensor, axes: Sequence[int]) -> Tensor:
    for axis in axes:
        x = x.prod(axis, keepdim=True, dtype=x.dtype)
    return x


def _length(x: Tensor, axes: Sequence[int]) -> Tensor:
    result: Tensor = torch.linalg.vector_norm(x, dim=tuple(axes), keepdim=True)  # its gradient at zero is zero
    return result


def _place_of_largest(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    if select_last_index:
        return x.shape[axis] - 1 - torch.argmax(x.flip(axis), axis, keepdim=bool(keepdims))
    return torch.argmax(x, axis, keepdim=bool(keepdims))


def _place_of_smallest(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    if select_last_index:
        return x.shape[axis] - 1 - torch.argmin(x.flip(axis), axis, keepdim=bool(keepdims))
    return torch.argmin(x, axis, keepdim=bool(keepdims))


def _top(x: Tensor, count: Tensor, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[Tensor, Tensor]:
    # unlike torch.topk, a stable sort puts the first of equal elements first, as ONNX asks
    values, places = torch.sort(x, dim=axis, descending=bool(largest), stable=True)
    return values.narrow(axis, 0, int(count)), places.narrow(axis, 0, int(count))


def _running_sum(x: Tensor, axis: Tensor, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    along = int(axis)
    turned = x.flip(along) if reverse else x
    result = torch.cumsum(turned, along, dtype=x.dtype)
    result = result - turned if exclusive else result
    return result.flip(along) if reverse else result


REDUCTIONS: Kernels = MappingProxyType(
    {
        "ArgMax": _place_of_largest,
        "ArgMin": _place_of_smallest,
        "CumSum": _running_sum,
        "LogSoftmax": lambda x, *, axis=-1: torch.log_softmax(x, axis),
        "ReduceL1": _reduction(lambda x, axes: _sum(x.abs(), axes)),
        "ReduceL2": _reduction(_length),
        "ReduceLogSumExp": _reduction(lambda x, axes: torch.logsumexp(x, tuple(axes), keepdim=True)),
        "ReduceMax": _reduction(lambda x, axes: torch.amax(x, tuple(axes), keepdim=True)),
        "ReduceMean": _reduction(lambda x, axes: x.mean(list(axes), keepdim=True)),
        "ReduceMin": _reduction(lambda x, axes: torch.amin(x, tuple(axes), keepdim=True)),
        "ReduceProd": _reduction(_product),
        "ReduceSum": _reduction(_sum),
        "ReduceSumSquare": _reduction(lambda x, axes: _sum(x * x, axes)),
        "Softmax": lambda x, *, axis=-1: torch.softmax(x, axis),
        "TopK": _top,
    }
)


# --- Ops that compute each element from the elements at its place -----------------------------------------------------


def _clip(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    if low is None or high is None or not x.is_floating_point() or low.requires_grad or high.requires_grad:
        return x if low is None and high is None else torch.clamp(x, low, high)
    least, most = float(low), float(high)
    if least > most:  # which ONNX allows
        return torch.clamp(x, low, high)
    return F.hardtanh(x, least, most)  # whose gradient is one kernel; that of a clamp to tensors takes three


def _is_infinite(x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    return (torch.isneginf(x) & bool(detect_negative)) | (torch.isposinf(x) & bool(detect_positive))


def _hard_sigmoid(x: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    return torch.clamp(x * alpha + beta, 0, 1)


def _dropout(x: Tensor, ratio: Tensor | None = None, training: Tensor | None = None, *, seed: int = 0) -> Tensor:
    if training is not None and bool(training):
        raise ValueError("it drops at random (training_mode is true)")
    return x


#: the ops that torch has under the same name, and the logical ones
_SAME = (
    "Abs Add Atan Ceil Cos Erf Exp Floor IsNaN Log Mul Neg Reciprocal Relu Round Sigmoid Sign Sin Sqrt Sub Tanh Where"
)
_LOGICAL = ("And", "Not", "Or")

ELEMENTWISE: Kernels = MappingProxyType(
    {
        **{name: getattr(torch, name.lower()) for name in _SAME.split()},
        **{name: getattr(torch, f"logical_{name.lower()}") for name in _LOGICAL},
        # the other attributes of a cast are about float8, which no tensor of a float graph has
        "Cast": lambda x, *, to, round_mode="up", saturate=1: x.to(DTYPES[to]),
        "CastLike": lambda x, like, *, round_mode="up", saturate=1: x.to(like.dtype),
        "Clip": _clip,
        "Div": lambda a, b: torch.div(a, b, rounding_mode=None if a.is_floating_point() else "trunc"),
        "Dropout": _dropout,
        "Elu": lambda x, *, alpha=1.0: F.elu(x, alpha),
        "Equal": torch.eq,
        "Gelu": lambda x, *, approximate="none": F.gelu(x, approximate=approximate),
        "Greater": torch.gt,
        "GreaterOrEqual": torch.ge,
        "HardSigmoid": _hard_sigmoid,
        "HardSwish": lambda x: x * _hard_sigmoid(x, alpha=1 / 6),
        "Identity": lambda x: x,
        "IsInf": _is_infinite,
        "LeakyRelu": lambda x, *, alpha=0.01: torch.where(x < 0, x * alpha, x),
        "Less": torch.lt,
        "LessOrEqual": torch.le,
        "Max": lambda *given: reduce(torch.maximum, given),
        "Mean": lambda *given: reduce(torch.add, given) / len(given),
        "Min": lambda *given: reduce(torch.minimum, given),
        "Mish": F.mish,
        "Mod": lambda a, b, *, fmod=0: torch.fmod(a, b) if fmod else torch.remainder(a, b),
        "PRelu": lambda x, slope: torch.where(x < 0, x * slope, x),
        "Pow": lambda a, b: torch.pow(a, b).to(a.dtype),
        "Selu": lambda x, *, alpha=1.6732631921768188, gamma=1.0507010221481323: gamma * F.elu(x, alpha),
        "Softplus": F.softplus,
        "Softsign": F.softsign,
        "Sum": lambda *given: reduce(torch.add, given),
        "Swish": lambda x, *, alpha=1.0: x * torch.sigmoid(x * alpha),
    }
)
