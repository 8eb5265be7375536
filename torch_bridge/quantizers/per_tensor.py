"""Fake quantization with one scale on a CPU, the part of a training step that costs most beside the model itself.

The gradient of the scale is that of LSQ (Esser et al. 2020, equation 3), summed as `(<g, y> - <passed, x>) / s`: inside
the grid the derivative is `(y - x) / s`, outside `y / s`.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_bridge.quantizers.compiled_kernels import CompiledKernels

_MANY_LEVELS = 4096
_COMPILED_FROM = 32768


class FakeQuantGrid(NamedTuple):
    """The grid and the options of one fake quantization; scale and zero point come separately.

    Attributes:
        lo: smallest grid value.
        hi: largest grid value.
        gain: factor on the gradients of scale and zero point (LSQ section 2.2: `1 / sqrt(elements * hi)`).
        clipped_only: these gradients come from clipped elements alone, as those of PACT (Choi et al. 2018, section 3).
        keeps_result: the backward pass may read the result again, because nothing writes over it.
        fuses_relu: negative input counts as 0, so that a ReLU in front costs nothing; `runs_per_tensor` only.
        ceiling: with `fuses_relu`, larger input counts as this: 6 for a ReLU6.
        kernels: compiled kernels, which need one pass instead of several; None for eager operations.
    """

    lo: float
    hi: float
    gain: float = 1.0
    clipped_only: bool = False
    keeps_result: bool = False
    fuses_relu: bool = False
    ceiling: float = math.inf
    kernels: CompiledKernels | None = None


class PerTensorFakeQuant(torch.autograd.Function):
    """Fake quantization with one scale on a CPU: forward four passes in place, backward one and two dot products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, grid: FakeQuantGrid) -> Tensor:
        """Return x on its grid."""
        if (kernels := _kernels_for(grid, x)) is not None:
            result = kernels.forward(x, scale, *_level_bounds(float(scale), float(zero_point), x.dtype, grid))
        else:
            result = fake_quantize_per_tensor(x, scale, zero_point, grid)
        read_again = grid.keeps_result and kernels is None and ctx.needs_input_grad[1]
        ctx.save_for_backward(x, scale, zero_point, *([result] if read_again else []))
        ctx.grid = grid
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, the scale and the zero point."""
        x, scale, zero_point, *kept = ctx.saved_tensors
        grid, gradient, step, zero = ctx.grid, grads[0], float(scale.detach()), float(zero_point.detach())
        bounds = _passing_interval(x.dtype, step, zero, grid)
        # only the gradient of x can be differentiated again, and only by eager operations
        kernels = None if torch.is_grad_enabled() else _kernels_for(grid, x)
        if kernels is not None and ctx.needs_input_grad[1] and not ctx.needs_input_grad[2]:
            levels = _level_bounds(step, zero, x.dtype, grid)
            passed, (inside, clipped, beyond) = kernels.backward(gradient, x, scale, levels, bounds, grid.ceiling)
            total = (
                clipped
                + (0.0 if grid.clipped_only else inside)
                - _ceiling_correction(beyond, step, zero, x.dtype, grid)
            )
            return passed, torch.full_like(scale, total / step * grid.gain), None, None
        passed = torch.ops.aten.hardtanh_backward(gradient, x, *bounds)
        scale_grad = zero_grad = None
        with torch.no_grad():
            if ctx.needs_input_grad[1]:
                result = kept[0] if kept else fake_quantize_per_tensor(x, scale, zero_point, grid)
                total = _scale_gradient_times_scale(gradient, passed, x, result, step, zero, grid)
                scale_grad = torch.full_like(scale, total / step * grid.gain)
            if ctx.needs_input_grad[2]:
                clipped = float(gradient.sum()) - float(passed.sum())
                zero_grad = torch.full_like(zero_point, -step * clipped * grid.gain)
        return passed, scale_grad, zero_grad, None


def runs_per_tensor(x: Tensor, scale: Tensor) -> bool:
    """Return whether scale and zero point may be read as numbers: one of each, no compiler, no GPU to wait for."""
    return scale.numel() == 1 and x.device.type == "cpu" and not torch.compiler.is_compiling()


def fake_quantize_per_tensor(x: Tensor, scale: Tensor, zero_point: Tensor, grid: FakeQuantGrid) -> Tensor:
    """Return x on a grid, with its one scale and zero point read as numbers."""
    low, high = _level_bounds(float(scale), float(zero_point), x.dtype, grid)
    levels = (x / scale.reshape(())).round_().clamp_(low, high)
    # 0 + s * q, in one pass: the runtimes have no -0.0
    return torch.add(levels.new_zeros(()), levels, alpha=float(scale), out=levels)


def _level_bounds(step: float, zero: float, dtype: torch.dtype, grid: FakeQuantGrid) -> tuple[float, float]:
    """Return the least and largest level that the grid and the bounds of the input allow."""
    low, high = grid.lo - zero, grid.hi - zero
    if grid.fuses_relu:
        # rounding keeps the order, so the bounds of the input may be applied to the levels
        return max(low, 0.0), min(high, _level(grid.ceiling, step, dtype))
    return low, high


def _passing_interval(dtype: torch.dtype, step: float, zero: float, grid: FakeQuantGrid) -> tuple[float, float]:
    """Return the open interval of x in which the gradient passes: what rounds to a level, within the input's bounds."""
    number = _numpy_float(dtype)
    low, high = grid.lo - zero, grid.hi - zero
    below, above = number((low - 0.5) * step), number((high + 0.5) * step)
    if np.rint(below / number(step)) >= low:  # a tie that rounds into the grid
        below = np.nextafter(below, number(-math.inf))
    if np.rint(above / number(step)) <= high:
        above = np.nextafter(above, number(math.inf))
    if grid.fuses_relu:
        return max(float(below), 0.0), min(float(above), grid.ceiling)
    return float(below), float(above)


def _scale_gradient_times_scale(
    gradient: Tensor, passed: Tensor, x: Tensor, result: Tensor, step: float, zero: float, grid: FakeQuantGrid
) -> float:
    """Return the scale's gradient times the scale.

    That is the sum of g * (y - x) where the gradient passes and of g * y elsewhere.
    """
    if grid.clipped_only:
        total = _dot(gradient - passed, result)
    elif grid.hi - grid.lo > _MANY_LEVELS:  # x and y agree in so many digits that a difference of sums has few left
        total = _dot(gradient - passed, result) + _dot(passed, result - x)
    else:
        total = _dot(gradient, result) - _dot(passed, x)
    if not math.isfinite(total) and bool(torch.isinf(x).any()):
        limit = torch.finfo(x.dtype).max  # an infinite x is clipped, and its part is 0
        return _scale_gradient_times_scale(gradient, passed, x.clamp(-limit, limit), result, step, zero, grid)
    if grid.fuses_relu and grid.ceiling != math.inf:
        least = float(np.nextafter(_numpy_float(x.dtype)(grid.ceiling), 0, dtype=_numpy_float(x.dtype)))
        above = torch.ops.aten.hardtanh_backward(gradient, x, least, math.inf).sum()
        total -= _ceiling_correction(float(above), step, zero, x.dtype, grid)
    return total


def _ceiling_correction(above: float, step: float, zero: float, dtype: torch.dtype, grid: FakeQuantGrid) -> float:
    """Return the part of the sum that counts elements above the ceiling as clipped: they are the ceiling, rounded."""
    top = _level(grid.ceiling, step, dtype)
    if not grid.fuses_relu or top > grid.hi - zero:
        return 0.0
    return above * (top * step if grid.clipped_only else grid.ceiling)


def _kernels_for(grid: FakeQuantGrid, x: Tensor) -> CompiledKernels | None:
    """Return the compiled kernels, if the tensor is large enough for their call not to matter."""
    return grid.kernels if x.numel() >= _COMPILED_FROM and x.dtype == torch.float32 else None


def _numpy_float(dtype: torch.dtype) -> type[np.floating[Any]]:
    return np.float64 if dtype == torch.float64 else np.float32


def _level(value: float, step: float, dtype: torch.dtype) -> float:
    """Return the level nearest to a value, computed as for a tensor."""
    number = _numpy_float(dtype)
    return float(np.rint(number(value) / number(step)))


def _dot(one: Tensor, other: Tensor) -> float:
    if one.is_contiguous() and other.is_contiguous():
        return float(torch.dot(one.view(-1), other.view(-1)))
    layout = torch.channels_last
    if one.ndim == 4 and one.is_contiguous(memory_format=layout) and other.is_contiguous(memory_format=layout):
        return _dot(one.permute(0, 2, 3, 1), other.permute(0, 2, 3, 1))
    return float((one * other).sum())
