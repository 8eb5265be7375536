"""Scales and zero points while they are learned: what an optimizer may do to its parameters keeps both valid.

A scale is what calibration found times 2**p, so it stays positive; p starts at 0. A scale of few digits is rounded to
them, and a power of two thus learned as its exponent (Jain et al. 2020, TQT, section 3.2). A zero point is what
calibration found plus p ranges, within the grid, so that the range keeps containing 0, and rounded. The gradients pass
through both roundings.
"""

import math
from typing import Any

import torch
from torch import Tensor

from qsdk.core.numerics.dtypes import float8e8m0
from qsdk.core.numerics.spec import Spec

_LOG2_FACTORS = (-20.0, 20.0)


def can_learn_scales(spec: Spec) -> bool:
    """Whether each scale can move by itself: not those that are small numbers times one per channel or tensor."""
    return spec.scale_dtype is None or spec.scale_dtype == float8e8m0


def learned_scale(base: Tensor, log2: Tensor, spec: Spec) -> Tensor:
    """Give `base * 2**log2`, rounded to the significant binary digits that the spec's scales have."""
    digits = spec.scale_bits if spec.scale_dtype is None else 1
    if torch.is_grad_enabled() and log2.requires_grad:
        return _Power.apply(base, log2, digits)  # type: ignore[no-any-return, no-untyped-call]
    return _power(base, log2, digits)


def learned_zero_point(base: Tensor, shift: Tensor, lo: float, hi: float) -> Tensor:
    """Give the whole number next to `base + shift * (hi - lo)` in the grid."""
    moved = (base + shift * (hi - lo)).clamp(lo, hi)
    found: Tensor = _Rounded.apply(moved)  # type: ignore[no-untyped-call]
    return found


class _Rounded(torch.autograd.Function):
    """Rounding, straight-through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _Power(torch.autograd.Function):
    """A power of two times a number, rounded to significant binary digits; as one operation it costs half as much."""

    @staticmethod
    def forward(ctx: Any, base: Tensor, log2: Tensor, digits: int | None) -> Tensor:
        scale = _power(base, log2, digits)
        ctx.save_for_backward(log2, scale)
        return scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        log2, scale = ctx.saved_tensors
        low, high = _LOG2_FACTORS
        inside = torch.ops.aten.hardtanh_backward(grads[0], log2, low, high)
        return None, inside.mul_(scale).mul_(math.log(2)), None


def _power(base: Tensor, log2: Tensor, digits: int | None) -> Tensor:
    # the clamp keeps scales, and the product that a bias has, positive and finite whatever an optimizer did
    scale = base * torch.exp2(log2.detach().clamp(*_LOG2_FACTORS))
    if digits is None:
        return scale
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp((mantissa * 2**digits).round(), exponent - digits)
