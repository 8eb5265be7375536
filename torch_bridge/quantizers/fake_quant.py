"""Fake quantization of torch tensors: the exact formula of `qsdk.core.numerics.affine`, with the gradients of LSQ.

`clip(rint(x / s) + z, lo, hi) - z` is `clip(rint(x / s), lo - z, hi - z)` but for the sign of 0, so no pass adds the
zero point. On a CPU the bounds must be numbers: with tensors `clamp` is not vectorised (`benchmarks/fake_quant.py`).
"""

from typing import Any

import torch
from torch import Tensor

from qsdk.core.numerics import affine
from qsdk.core.numerics.dtypes import DType
from torch_bridge.quantizers.per_tensor import (
    FakeQuantGrid,
    PerTensorFakeQuant,
    fake_quantize_per_tensor,
    runs_per_tensor,
)

_MINIFLOATS = {
    "float8e4m3fn": torch.float8_e4m3fn,
    "float8e4m3fnuz": torch.float8_e4m3fnuz,
    "float8e5m2": torch.float8_e5m2,
    "float8e5m2fnuz": torch.float8_e5m2fnuz,
}
_PIECE = 1 << 17  # elements of each thread that are quantized at a time
_FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class _BroadcastFakeQuant(torch.autograd.Function):
    """Fake quantization with scales that broadcast, in operations that torch.compile fuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, grid: FakeQuantGrid) -> Tensor:
        # the result is not saved: the model may write over it (`out += identity`)
        ctx.save_for_backward(x, scale, zero_point)
        ctx.grid, ctx.ends = grid, _bounds_as_numbers(x, zero_point, grid)
        return _round_and_clip(x, scale, ctx.ends or _bounds_as_tensors(zero_point, grid))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x (straight-through, 0 where clipped), scale and zero point (LSQ+)."""
        x, scale, zero_point = ctx.saved_tensors
        grid, gradient = ctx.grid, grads[0]
        ratio = x / scale
        levels = ratio.round()
        clipped = torch.clamp(levels, *(ctx.ends or _bounds_as_tensors(zero_point, grid)))
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


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, grid: FakeQuantGrid) -> Tensor:
    """Return x on its grid, as `qsdk.core.numerics.affine` computes it, differentiable in x, scale and zero point.

    The gradient passes straight through to x. The scale's gradient is equation 3 of Esser et al. 2020 (LSQ), the zero
    point's that of Bhalgat et al. 2020 (LSQ+, section 3.1), whose offset is `-zero_point * scale`.

    Args:
        x: float tensor.
        scale: broadcasts against x.
        zero_point: of scale's shape, whole numbers in x's dtype.
        grid: its ends and options.
    """
    one = runs_per_tensor(x, scale)
    if torch.is_grad_enabled() and (x.requires_grad or scale.requires_grad or zero_point.requires_grad):
        function = PerTensorFakeQuant if one else _BroadcastFakeQuant
        return function.apply(x, scale, zero_point, grid)  # type: ignore[no-any-return, no-untyped-call]
    return (
        fake_quantize_per_tensor(x, scale, zero_point, grid)
        if one
        else _fake_quantize_broadcast(x, scale, zero_point, grid)
    )


class _BiasFakeQuant(torch.autograd.Function):
    """Straight-through fake quantization of a bias on a grid that it never leaves; its scale is not learned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, lo: float, hi: float) -> Tensor:
        return _round_and_clip(x, scale, (lo, hi))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x (straight-through, 0 where clipped), scale and zero point (LSQ+)."""
        return grads[0], None, None, None


def fake_quantize_bias(x: Tensor, scale: Tensor, lo: float, hi: float) -> Tensor:
    """Return a bias on its grid, whose zero point is 0; the gradient of x passes straight through."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _BiasFakeQuant.apply(x, scale, lo, hi)  # type: ignore[no-any-return, no-untyped-call]
    return _round_and_clip(x, scale, (lo, hi))


def _fake_quantize_broadcast(x: Tensor, scale: Tensor, zero_point: Tensor, grid: FakeQuantGrid) -> Tensor:
    ends = _bounds_as_numbers(x, zero_point, grid)
    if ends is None:  # on other devices, and while compiling, where the number of threads cannot be asked either
        return _round_and_clip(x, scale, _bounds_as_tensors(zero_point, grid))
    piece = _PIECE * torch.get_num_threads()
    if x.numel() <= piece or scale.ndim != x.ndim:
        return _round_and_clip(x, scale, ends)
    # a few rows at a time stay in the processor's cache from the first operation to the last
    result, rows = torch.empty_like(x), max(piece * len(x) // x.numel(), 1)
    for first in range(0, len(x), rows):
        at = slice(first, first + rows)
        own = scale[at] if len(scale) == len(x) else scale
        torch.div(x[at], own, out=result[at]).round_().clamp_(*ends).mul_(own).add_(0.0)
    return result


def _round_and_clip(x: Tensor, scale: Tensor, ends: tuple[Any, Any]) -> Tensor:
    return (x / scale).round_().clamp_(*ends).mul_(scale).add_(0.0)  # the runtimes have no -0.0


def _bounds_as_tensors(zero_point: Tensor, grid: FakeQuantGrid) -> tuple[Tensor, Tensor]:
    """Return the least and largest level as tensors."""
    return grid.lo - zero_point, grid.hi - zero_point


def _bounds_as_numbers(x: Tensor, zero_point: Tensor, grid: FakeQuantGrid) -> tuple[float, float] | None:
    """Return the least and largest level as numbers, if all zero points are equal.

    Tensors are slow bounds on a CPU.
    """
    if x.device.type != "cpu" or not zero_point.numel() or torch.compiler.is_compiling():
        return None
    least, most = (float(bound) for bound in zero_point.detach().aminmax())
    return (grid.lo - least, grid.hi - least) if least == most else None


class _Clip(torch.autograd.Function):
    """A clip whose ends pass the gradient on, as `torch.clamp` did until torch 2.14: what lies there is not clipped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lo: float, hi: float) -> Tensor:
        result = x.clamp(lo, hi)
        ctx.save_for_backward(x == result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of x, 0 where clipped."""
        return torch.where(ctx.saved_tensors[0], grads[0], 0.0), None, None


def clip(x: Tensor, lo: float, hi: float) -> Tensor:
    """Return x within two bounds; the gradient passes where x is not beyond them, so at the bounds as well."""
    return _Clip.apply(x, lo, hi)  # type: ignore[no-any-return, no-untyped-call]


class _CastStraightThrough(torch.autograd.Function):
    """Straight-through rounding to another float type and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: DType) -> Tensor:
        return cast(x, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x (straight-through, 0 where clipped), scale and zero point (LSQ+)."""
        return grads[0], None


def cast_straight_through(x: Tensor, dtype: DType) -> Tensor:
    """Return x as it is read back after being stored in a float dtype; the gradient passes straight through."""
    return _CastStraightThrough.apply(x, dtype)  # type: ignore[no-any-return, no-untyped-call]


def fake_quantize_minifloat(x: Tensor, scale: Tensor, dtype: DType) -> Tensor:
    """Return x in a float8 or float4 dtype times its scale; the gradient passes straight through the cast."""
    return affine.fake_quantize_minifloat(x, scale, dtype, lambda v: cast_straight_through(v, dtype), clip)  # type: ignore[no-any-return]


def cast(x: Tensor, dtype: DType) -> Tensor:
    """Return x rounded to the values of a float dtype, in x's own dtype."""
    if dtype.name == "float4e2m1":
        return _round_to_float4(x)
    stored = _MINIFLOATS.get(dtype.name) or _FLOATS[dtype.name]
    return x.to(stored).to(x.dtype)


def _round_to_float4(x: Tensor) -> Tensor:
    """Return x at 0, 0.5, 1, 1.5, 2, 3, 4 or 6 and their negatives; a tie goes to the value with an even code."""
    magnitude = x.abs()
    # steps of 0.5 below 2, of 1 below 4, else of 2: in each of them the even multiple has the even code
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0)).to(x.dtype)
    return torch.copysign((magnitude / step).round_().mul_(step), x)
