"""Fake quantization on torch tensors: the exact formula of `qsdk.core.numerics.affine`, and the gradients of LSQ.

`clip(rint(x / s) + z, lo, hi) - z` is `clip(rint(x / s), lo - z, hi - z)` but for the sign of 0, so no pass adds the
zero point. On a CPU the bounds must be numbers: with tensors `clamp` is not vectorised (`benchmarks/fake_quant.py`).
"""

from typing import Any

import torch
from torch import Tensor

from qsdk.core.numerics import affine
from qsdk.core.numerics.dtypes import DType
from torch_bridge.quantizers.per_tensor import Grid, OneScale, on_one_grid, runs_as_one_scale

_MINIFLOATS = {
    "float8e4m3fn": torch.float8_e4m3fn,
    "float8e4m3fnuz": torch.float8_e4m3fnuz,
    "float8e5m2": torch.float8_e5m2,
    "float8e5m2fnuz": torch.float8_e5m2fnuz,
}
_FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
# float4e2m1: the values of its grid, and the midpoints between them with the side a tie falls on (to even)
_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class _ManyScales(torch.autograd.Function):
    """Fake quantization with scales that broadcast, in operations that a compiler fuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid) -> Tensor:
        # not the result: the model may write over it in place (`out += identity`)
        ctx.save_for_backward(x, scale, zero_point)
        ctx.grid, ctx.ends = grid, _numbers(x, zero_point, grid)
        return _between(x, scale, ctx.ends or _ends(zero_point, grid))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, zero_point = ctx.saved_tensors
        grid, gradient = ctx.grid, grads[0]
        ratio = x / scale
        levels = ratio.round()
        clipped = torch.clamp(levels, *(ctx.ends or _ends(zero_point, grid)))
        inside = levels == clipped
        scale_grad = zero_grad = None
        if ctx.needs_input_grad[1]:
            # inside: round(x/s) - x/s; clipped: the end of the grid
            error = torch.where(inside, 0.0 if grid.clipped_only else levels - ratio, clipped)
            scale_grad = (gradient * error).sum_to_size(scale.shape) * grid.gain
        if ctx.needs_input_grad[2]:
            outside = torch.where(inside, 0.0, gradient * scale)
            zero_grad = outside.sum_to_size(zero_point.shape) * -grid.gain
        return torch.where(inside, gradient, 0.0), scale_grad, zero_grad, None


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid) -> Tensor:
    """Return x on its grid, as `qsdk.core.numerics.affine` computes it, differentiable in x, scale and zero point.

    Straight-through in x. The scale's gradient is equation 3 of Esser et al. 2020 (LSQ), the zero point's that of
    Bhalgat et al. 2020 (LSQ+, section 3.1), whose offset is `-zero_point * scale`.

    Args:
        x: float tensor.
        scale: broadcasts against x.
        zero_point: of scale's shape, whole numbers in x's dtype.
        grid: its ends, and what else happens on the way.
    """
    one = runs_as_one_scale(x, scale)
    if torch.is_grad_enabled() and (x.requires_grad or scale.requires_grad or zero_point.requires_grad):
        function = OneScale if one else _ManyScales
        return function.apply(x, scale, zero_point, grid)  # type: ignore[no-any-return, no-untyped-call]
    return on_one_grid(x, scale, zero_point, grid) if one else _on_grid(x, scale, zero_point, grid)


class _Through(torch.autograd.Function):
    """Fake quantization on a grid that is never left, straight-through; the scales are not learned by it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, lo: float, hi: float) -> Tensor:
        return _between(x, scale, (lo, hi))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None, None


def quantize_through(x: Tensor, scale: Tensor, lo: float, hi: float) -> Tensor:
    """Give a bias on its grid, whose zero point is 0; the gradient of x passes straight through, the scale has none."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Through.apply(x, scale, lo, hi)  # type: ignore[no-any-return, no-untyped-call]
    return _between(x, scale, (lo, hi))


def _on_grid(x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid) -> Tensor:
    return _between(x, scale, _numbers(x, zero_point, grid) or _ends(zero_point, grid))


def _between(x: Tensor, scale: Tensor, ends: tuple[Any, Any]) -> Tensor:
    return (x / scale).round_().clamp_(*ends).mul_(scale).add_(0.0)  # the runtimes have no -0.0


def _ends(zero_point: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """The least and largest level."""
    return grid.lo - zero_point, grid.hi - zero_point


def _numbers(x: Tensor, zero_point: Tensor, grid: Grid) -> tuple[float, float] | None:
    """The same as numbers, where all zero points are the same: tensors are slow bounds on a CPU."""
    if x.device.type != "cpu" or not zero_point.numel() or torch.compiler.is_compiling():
        return None
    least, most = (float(bound) for bound in zero_point.detach().aminmax())
    return (grid.lo - least, grid.hi - least) if least == most else None


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
