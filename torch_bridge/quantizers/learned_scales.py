"""Scales and zero points while they are learned: whatever an optimizer does to its parameters, both stay valid.

A scale is the calibrated one times 2**p, so it stays positive; p starts at 0. A scale of few digits is rounded to them,
and a power of two is thus learned as its exponent (Jain et al. 2020, TQT, section 3.2). A zero point is the calibrated
one plus p ranges, rounded within the grid, so that the range keeps containing 0. The gradients pass through both
roundings.
"""

import math
from typing import Any

import torch
from torch import Tensor

from qsdk.core.numerics.dtypes import float8e8m0
from qsdk.core.numerics.spec import Spec
from torch_bridge.quantizers.fake_quant import clip

_LOG2_FACTORS = (-20.0, 20.0)


def can_learn_scales(spec: Spec) -> bool:
    """Return whether each scale can change on its own.

    It cannot where a scale is a small number times one factor per channel or tensor.
    """
    return spec.scale_dtype is None or spec.scale_dtype == float8e8m0


def learned_scale(base: Tensor, log2: Tensor, spec: Spec) -> Tensor:
    """Return `base * 2**log2`, rounded to the number of significant binary digits of the spec's scales."""
    digits = spec.scale_bits if spec.scale_dtype is None else 1
    if torch.is_grad_enabled() and log2.requires_grad:
        return _RoundedPowerOfTwo.apply(base, log2, digits)  # type: ignore[no-any-return, no-untyped-call]
    return _rounded_power_of_two(base, log2, digits)


def learned_zero_point(base: Tensor, shift: Tensor, lo: float, hi: float) -> Tensor:
    """Return the integer of the grid that is nearest to `base + shift * (hi - lo)`."""
    moved = clip(base + shift * (hi - lo), lo, hi)  # one at an end of the grid, as behind a ReLU, is learned too
    result: Tensor = _RoundStraightThrough.apply(moved)  # type: ignore[no-untyped-call]
    return result


class _RoundStraightThrough(torch.autograd.Function):
    """Straight-through rounding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _RoundedPowerOfTwo(torch.autograd.Function):
    """A power of two times a number, rounded to significant binary digits; as one operation it costs half as much."""

    @staticmethod
    def forward(ctx: Any, base: Tensor, log2: Tensor, digits: int | None) -> Tensor:
        scale = _rounded_power_of_two(base, log2, digits)
        ctx.save_for_backward(log2, scale)
        return scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        log2, scale = ctx.saved_tensors
        low, high = _LOG2_FACTORS
        inside = torch.ops.aten.hardtanh_backward(grads[0], log2, low, high)
        return None, inside.mul_(scale).mul_(math.log(2)), None


def _rounded_power_of_two(base: Tensor, log2: Tensor, digits: int | None) -> Tensor:
    # the clamp keeps scales, and their product for a bias, positive and finite whatever the optimizer does
    scale = base * torch.exp2(log2.detach().clamp(*_LOG2_FACTORS))
    if digits is None:
        return scale
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp((mantissa * 2**digits).round(), exponent - digits)
