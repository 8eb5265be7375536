"""Ops that compute each element from the elements at its place."""

from functools import reduce
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from qsdk.algorithms.graph_in_torch.values import DTYPES, Kernels


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
