"""Ops that compute each element from the elements at its place."""

from functools import reduce
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from qsdk.algorithms.graph_in_torch.values import DTYPES, Kernels


def _identity(x: Tensor) -> Tensor:
    return x


def _divide(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b, rounding_mode=None if a.is_floating_point() else "trunc")


def _modulo(a: Tensor, b: Tensor, *, fmod: int = 0) -> Tensor:
    return torch.fmod(a, b) if fmod else torch.remainder(a, b)


def _power(a: Tensor, b: Tensor) -> Tensor:
    return torch.pow(a, b).to(a.dtype)


def _add(*given: Tensor) -> Tensor:
    return reduce(torch.add, given)


def _mean(*given: Tensor) -> Tensor:
    return reduce(torch.add, given) / len(given)


def _largest(*given: Tensor) -> Tensor:
    return reduce(torch.maximum, given)


def _smallest(*given: Tensor) -> Tensor:
    return reduce(torch.minimum, given)


def _clip(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    if low is None or high is None or not x.is_floating_point() or low.requires_grad or high.requires_grad:
        return x if low is None and high is None else torch.clamp(x, low, high)
    least, most = float(low), float(high)
    if least > most:  # which ONNX allows
        return torch.clamp(x, low, high)
    return F.hardtanh(x, least, most)  # whose gradient is one kernel; that of a clamp to tensors takes three


# the other attributes of a cast are about float8, which no tensor of a float graph has
def _cast(x: Tensor, *, to: int, round_mode: str = "up", saturate: int = 1) -> Tensor:
    return x.to(DTYPES[to])


def _cast_like(x: Tensor, like: Tensor, *, round_mode: str = "up", saturate: int = 1) -> Tensor:
    return x.to(like.dtype)


def _is_infinite(x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    return (torch.isneginf(x) & bool(detect_negative)) | (torch.isposinf(x) & bool(detect_positive))


def _leaky_relu(x: Tensor, *, alpha: float = 0.01) -> Tensor:
    return torch.where(x < 0, x * alpha, x)


def _prelu(x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x < 0, x * slope, x)


def _elu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.elu(x, alpha)


def _selu(x: Tensor, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875) -> Tensor:
    return gamma * F.elu(x, alpha)


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return F.gelu(x, approximate=approximate)


def _hard_sigmoid(x: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    return torch.clamp(x * alpha + beta, 0, 1)


def _hard_swish(x: Tensor) -> Tensor:
    return x * _hard_sigmoid(x, alpha=1 / 6)


def _swish(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return x * torch.sigmoid(x * alpha)


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
        "Cast": _cast,
        "CastLike": _cast_like,
        "Clip": _clip,
        "Div": _divide,
        "Dropout": _dropout,
        "Elu": _elu,
        "Equal": torch.eq,
        "Gelu": _gelu,
        "Greater": torch.gt,
        "GreaterOrEqual": torch.ge,
        "HardSigmoid": _hard_sigmoid,
        "HardSwish": _hard_swish,
        "Identity": _identity,
        "IsInf": _is_infinite,
        "LeakyRelu": _leaky_relu,
        "Less": torch.lt,
        "LessOrEqual": torch.le,
        "Max": _largest,
        "Mean": _mean,
        "Min": _smallest,
        "Mish": F.mish,
        "Mod": _modulo,
        "PRelu": _prelu,
        "Pow": _power,
        "Selu": _selu,
        "Softplus": F.softplus,
        "Softsign": F.softsign,
        "Sum": _add,
        "Swish": _swish,
    }
)
