"""Fake quantization with one scale on a CPU, where a training step spends most of its time beside the model itself.

The gradient of the scale is that of LSQ (Esser et al. 2020, equation 3), summed as `(<g, y> - <passed, x>) / s`: inside
of the grid the derivative is `(y - x) / s`, outside `y / s`.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_bridge.quantizers.compiled_kernels import Kernels

_MANY_LEVELS = 4096
_LARGE = 32768


class Grid(NamedTuple):
    """What a fake quantization does besides its scale and zero point.

    Attributes:
        lo: smallest grid value.
        hi: largest grid value.
        gain: factor on the gradients of scale and zero point (LSQ section 2.2: `1 / sqrt(elements * hi)`).
        clipped_only: these gradients come from clipped elements alone, as those of PACT (Choi et al. 2018, section 3).
        keeps: the backward pass may read the result again, because nothing writes over it.
        rectifies: negative input counts as 0, so that a ReLU in front costs nothing; `runs_as_one_scale` only.
        ceiling: then larger input counts as this: 6 for a ReLU6.
        kernels: compiled ones, which make one pass of several; None for eager operations.
    """

    lo: float
    hi: float
    gain: float = 1.0
    clipped_only: bool = False
    keeps: bool = False
    rectifies: bool = False
    ceiling: float = math.inf
    kernels: Kernels | None = None


class OneScale(torch.autograd.Function):
    """Fake quantization with one scale on a CPU: four passes in place; backward one, and two dot products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid) -> Tensor:
        """Give x on its grid."""
        if (kernels := _worthwhile(grid, x)) is not None:
            result = kernels.forward(x, scale, *_levels(float(scale), float(zero_point), x.dtype, grid))
        else:
            result = on_one_grid(x, scale, zero_point, grid)
        read_again = grid.keeps and kernels is None and ctx.needs_input_grad[1]
        ctx.save_for_backward(x, scale, zero_point, *([result] if read_again else []))
        ctx.grid = grid
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Give the gradients of x, the scale and the zero point."""
        x, scale, zero_point, *kept = ctx.saved_tensors
        grid, gradient, step, zero = ctx.grid, grads[0], float(scale.detach()), float(zero_point.detach())
        bounds = _passing(x.dtype, step, zero, grid)
        # only the gradient of x can be differentiated again, and only by eager operations
        kernels = None if torch.is_grad_enabled() else _worthwhile(grid, x)
        if kernels is not None and ctx.needs_input_grad[1] and not ctx.needs_input_grad[2]:
            levels = _levels(step, zero, x.dtype, grid)
            passed, (inside, clipped, beyond) = kernels.backward(gradient, x, scale, levels, bounds, grid.ceiling)
            total = clipped + (0.0 if grid.clipped_only else inside) - _of_ceiling(beyond, step, zero, x.dtype, grid)
            return passed, torch.full_like(scale, total / step * grid.gain), None, None
        passed = torch.ops.aten.hardtanh_backward(gradient, x, *bounds)
        scale_grad = zero_grad = None
        with torch.no_grad():
            if ctx.needs_input_grad[1]:
                result = kept[0] if kept else on_one_grid(x, scale, zero_point, grid)
                total = _times_scale(gradient, passed, x, result, step, zero, grid)
                scale_grad = torch.full_like(scale, total / step * grid.gain)
            if ctx.needs_input_grad[2]:
                clipped = float(gradient.sum()) - float(passed.sum())
                zero_grad = torch.full_like(zero_point, -step * clipped * grid.gain)
        return passed, scale_grad, zero_grad, None


def runs_as_one_scale(x: Tensor, scale: Tensor) -> bool:
    """Whether scale and zero point may be read as numbers: one of each, no compiler, no GPU to wait for."""
    return scale.numel() == 1 and x.device.type == "cpu" and not torch.compiler.is_compiling()


def on_one_grid(x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid) -> Tensor:
    """Give x on a grid whose one scale and zero point are read as numbers."""
    low, high = _levels(float(scale), float(zero_point), x.dtype, grid)
    levels = (x / scale.reshape(())).round_().clamp_(low, high)
    # 0 + s * q, in one pass: the runtimes have no -0.0
    return torch.add(levels.new_zeros(()), levels, alpha=float(scale), out=levels)


def _levels(step: float, zero: float, dtype: torch.dtype, grid: Grid) -> tuple[float, float]:
    """The least and largest level, of the grid and of the bounds of the input on it."""
    low, high = grid.lo - zero, grid.hi - zero
    if grid.rectifies:
        # rounding keeps the order, so the bounds of the input may be applied to the levels
        return max(low, 0.0), min(high, _level(grid.ceiling, step, dtype))
    return low, high


def _passing(dtype: torch.dtype, step: float, zero: float, grid: Grid) -> tuple[float, float]:
    """The open interval of x in which the gradient passes: what rounds to a level of the grid, within the bounds."""
    number = _number(dtype)
    low, high = grid.lo - zero, grid.hi - zero
    below, above = number((low - 0.5) * step), number((high + 0.5) * step)
    if np.rint(below / number(step)) >= low:  # a tie that rounds into the grid
        below = np.nextafter(below, number(-math.inf))
    if np.rint(above / number(step)) <= high:
        above = np.nextafter(above, number(math.inf))
    if grid.rectifies:
        return max(float(below), 0.0), min(float(above), grid.ceiling)
    return float(below), float(above)


def _times_scale(
    gradient: Tensor, passed: Tensor, x: Tensor, result: Tensor, step: float, zero: float, grid: Grid
) -> float:
    """The scale's gradient times the scale: the sum of g * (y - x) where the gradient passes and of g * y elsewhere."""
    if grid.clipped_only:
        total = _dot(gradient - passed, result)
    elif grid.hi - grid.lo > _MANY_LEVELS:  # x and y agree in so many digits that a difference of sums has few left
        total = _dot(gradient - passed, result) + _dot(passed, result - x)
    else:
        total = _dot(gradient, result) - _dot(passed, x)
    if not math.isfinite(total) and bool(torch.isinf(x).any()):
        limit = torch.finfo(x.dtype).max  # an infinite x is clipped, and its part is 0
        return _times_scale(gradient, passed, x.clamp(-limit, limit), result, step, zero, grid)
    if grid.rectifies and grid.ceiling != math.inf:
        least = float(np.nextafter(_number(x.dtype)(grid.ceiling), 0, dtype=_number(x.dtype)))
        above = torch.ops.aten.hardtanh_backward(gradient, x, least, math.inf).sum()
        total -= _of_ceiling(float(above), step, zero, x.dtype, grid)
    return total


def _of_ceiling(above: float, step: float, zero: float, dtype: torch.dtype, grid: Grid) -> float:
    """What the gradient of elements above the ceiling counts too much: they are the ceiling, rounded, not clipped."""
    top = _level(grid.ceiling, step, dtype)
    if not grid.rectifies or top > grid.hi - zero:
        return 0.0
    return above * (top * step if grid.clipped_only else grid.ceiling)


def _worthwhile(grid: Grid, x: Tensor) -> Kernels | None:
    """The compiled kernels, where the tensor is so large that their call does not matter."""
    return grid.kernels if x.numel() >= _LARGE and x.dtype == torch.float32 else None


def _number(dtype: torch.dtype) -> type[np.floating[Any]]:
    return np.float64 if dtype == torch.float64 else np.float32


def _level(value: float, step: float, dtype: torch.dtype) -> float:
    """The whole number of steps that is nearest to a value, computed as it is for a tensor."""
    number = _number(dtype)
    return float(np.rint(number(value) / number(step)))


def _dot(one: Tensor, other: Tensor) -> float:
    if one.is_contiguous() and other.is_contiguous():
        return float(torch.dot(one.view(-1), other.view(-1)))
    layout = torch.channels_last
    if one.ndim == 4 and one.is_contiguous(memory_format=layout) and other.is_contiguous(memory_format=layout):
        return _dot(one.permute(0, 2, 3, 1), other.permute(0, 2, 3, 1))
    return float((one * other).sum())
