"""Fake quantization on torch tensors: the exact formula of `qsdk.core.affine` in place, and the gradients of LSQ.

Its bounds are numbers: `clamp` with tensors as bounds would save the two passes over the zero point, but is not
vectorised on a CPU and takes two to three times as long (`benchmarks/fake_quant.py`).
"""

from typing import Any

import torch
from torch import Tensor

from qsdk.core import affine
from qsdk.core.dtypes import DType

_MINIFLOATS = {
    "float8e4m3fn": torch.float8_e4m3fn,
    "float8e4m3fnuz": torch.float8_e4m3fnuz,
    "float8e5m2": torch.float8_e5m2,
    "float8e5m2fnuz": torch.float8_e5m2fnuz,
}
_FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
# float4e2m1: the values of its grid, and the midpoints between them with the side a tie falls on (to even)
_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class _FakeQuantize(torch.autograd.Function):
    """Straight-through in x; the scale's gradient is Esser et al. 2020 (LSQ), equation 3, with its gradient scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, lo: float, hi: float, gain: float) -> Tensor:
        # not the result: the model may write over it in place (`out += identity`)
        ctx.save_for_backward(x, scale, zero_point)
        ctx.grid = (lo, hi, gain)
        return _on_grid(x, scale, zero_point, lo, hi)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, zero_point = ctx.saved_tensors
        lo, hi, gain = ctx.grid
        ratio = x / scale
        levels = ratio.round()
        clipped = (levels + zero_point).clamp_(lo, hi).sub_(zero_point)
        inside = levels == clipped
        passed, scale_grad = grads[0] * inside, None
        if ctx.needs_input_grad[1]:
            # inside: round(x/s) - x/s; clipped: the end of the grid
            per_element = grads[0] * (clipped - ratio * inside)
            scale_grad = per_element.sum_to_size(scale.shape) * gain
        return passed, scale_grad, None, None, None, None


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, lo: float, hi: float, gain: float = 1.0) -> Tensor:
    """Give x on its grid, bit-identical to `qsdk.core.affine.fake_quantize`, differentiable in x and scale.

    Args:
        x: float tensor.
        scale: broadcasts against x.
        zero_point: of scale's shape, whole numbers in x's dtype.
        lo: smallest grid value.
        hi: largest grid value.
        gain: factor on the scale's gradient (LSQ section 2.2: `1 / sqrt(elements * hi)`).
    """
    if torch.is_grad_enabled() and (x.requires_grad or scale.requires_grad):
        return _FakeQuantize.apply(x, scale, zero_point, lo, hi, gain)  # type: ignore[no-any-return, no-untyped-call]
    return _on_grid(x, scale, zero_point, lo, hi)


def _on_grid(x: Tensor, scale: Tensor, zero_point: Tensor, lo: float, hi: float) -> Tensor:
    return (x / scale).round_().add_(zero_point).clamp_(lo, hi).sub_(zero_point).mul_(scale)


class _Cast(torch.autograd.Function):
    """A rounding to another float type and back, straight-through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: DType) -> Tensor:
        return cast(x, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


def cast_through(x: Tensor, dtype: DType) -> Tensor:
    """Store x in a float dtype and read it back; the gradient passes straight through."""
    return _Cast.apply(x, dtype)  # type: ignore[no-any-return, no-untyped-call]


def fake_quantize_minifloat(x: Tensor, scale: Tensor, dtype: DType) -> Tensor:
    """Give x in a float8 or float4 type times its scale; the gradient passes straight through the cast."""
    return affine.fake_quantize_minifloat(x, scale, dtype, lambda v: cast_through(v, dtype))  # type: ignore[no-any-return]


def cast(x: Tensor, dtype: DType) -> Tensor:
    """Round x to the values of a float dtype, in x's own type."""
    if dtype.name == "float4e2m1":
        return _round_to_float4(x)
    stored = _MINIFLOATS.get(dtype.name) or _FLOATS[dtype.name]
    return x.to(stored).to(x.dtype)


def _round_to_float4(x: Tensor) -> Tensor:
    values = torch.tensor(_FLOAT4, dtype=x.dtype, device=x.device)
    middles = (values[1:] + values[:-1]) / 2
    magnitude = x.abs()
    # a tie goes to the value with an even code: below for middles at even positions, above for odd ones
    below = torch.bucketize(magnitude, middles)
    above = torch.bucketize(magnitude, middles, right=True)
    index = torch.where(below % 2 == 0, below, above)
    return torch.copysign(values[index], x)
