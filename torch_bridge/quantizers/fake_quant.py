"""Fake quantization of torch tensors: the exact formula of `qsdk.core.numerics.affine`, with the gradients of LSQ.

`clip(rint(x / s) + z, lo, hi) - z` is `clip(rint(x / s), lo - z, hi - z)` but for the sign of 0, so no pass adds the
zero point. On a CPU the bounds must be numbers: with tensors `clamp` is not vectorised (`benchmarks/fake_quant.py`).

With one scale on a CPU it is the part of a training step that costs most beside the model itself. The gradient of the
scale is that of LSQ (Esser et al. 2020, equation 3), summed as `(<g, y> - <passed, x>) / s`: inside the grid the
derivative is `(y - x) / s`, outside `y / s`. Compiled kernels see tensors as one dimension of unknown length, so that
each is compiled once for all models.
"""

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from qsdk.core.numerics import affine
from qsdk.core.numerics.dtypes import DType


def _forward(x: Tensor, step: Tensor, ends: Tensor) -> Tensor:
    return torch.clamp(torch.round(x / step), ends[0], ends[1]) * step + 0.0  # the runtimes have no -0.0


def _backward(gradient: Tensor, x: Tensor, step: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    low, high, below, above, ceiling = ends.unbind()
    result = torch.clamp(torch.round(x / step), low, high) * step
    passes = (x > below) & (x < above)
    passed = torch.where(passes, gradient, 0.0)
    inside = torch.where(passes, gradient * (result - x), 0.0).sum()
    clipped = torch.where(passes, 0.0, gradient * result).sum()
    return passed, torch.stack([inside, clipped, torch.where(x >= ceiling, gradient, 0.0).sum()])


@dataclass(frozen=True)
class CompiledKernels:
    """Compiled kernels for tensors of any shape, with one scale and numbers as bounds."""

    _forward: Callable[..., Tensor]
    _backward: Callable[..., tuple[Tensor, Tensor]]

    def forward(self, x: Tensor, scale: Tensor, low: float, high: float) -> Tensor:
        """Return x on the grid of levels low to high."""
        return _unflatten(self._forward(_flatten(x, x), scale.detach().reshape(()), torch.tensor((low, high))), x)

    def backward(
        self,
        gradient: Tensor,
        x: Tensor,
        scale: Tensor,
        levels: tuple[float, float],
        passing: tuple[float, float],
        ceiling: float,
    ) -> tuple[Tensor, list[float]]:
        """Return the gradient of x, which passes in an open interval, and three sums.

        The sums: of `g * (y - x)` where it passes, of `g * y` where it does not, and of g from `ceiling` on.
        """
        ends = torch.tensor((*levels, *passing, ceiling))
        passed, sums = self._backward(_flatten(gradient, x), _flatten(x, x), scale.detach().reshape(()), ends)
        return _unflatten(passed, x), sums.tolist()

    def __deepcopy__(self, memo: object) -> "CompiledKernels":
        return self

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _no_kernels, ()  # another process computes without kernels, rather than compile them again


def _no_kernels() -> None:
    return None


@functools.cache
def compiled_kernels() -> CompiledKernels | None:
    """Return the compiled kernels, or None with a warning where there is no compiler that works."""
    kernels = CompiledKernels(torch.compile(_forward, dynamic=True), torch.compile(_backward, dynamic=True))
    try:
        for length in (70, 90):  # two lengths, so that the compiler takes none for a constant
            x, scale = torch.linspace(-1.0, 1.0, length), torch.full((1,), 0.1)
            with torch.no_grad():
                kernels.forward(x, scale, -3.0, 3.0)
                kernels.backward(x, x, scale, (-3.0, 3.0), (-0.35, 0.35), 1.0)
    except Exception as error:  # whatever a missing or broken compiler raises
        lines = str(error).strip().splitlines() or [type(error).__name__]
        warnings.warn(f"torch.compile does not work here ({lines[0]}); training goes on without it", stacklevel=4)
        return None
    return kernels


def _flatten(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the elements of a tensor in the memory order of another one; a view where both have that order."""
    plain = tensor.detach()  # without the graph of gradients, which the compiler would follow
    return plain.permute(0, 2, 3, 1).reshape(-1) if _channels_last(like) else plain.reshape(-1)


def _unflatten(flat: Tensor, like: Tensor) -> Tensor:
    if _channels_last(like):
        n, c, h, w = like.shape
        return flat.view(n, h, w, c).permute(0, 3, 1, 2)
    return flat.view(like.shape)


def _channels_last(x: Tensor) -> bool:
    return x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


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
    point's that of Bhalgat et al. 2020 (LSQ+, section 3.1), whose offset is `-zero_point * scale`. Scale and zero point
    (whole numbers in x's dtype) broadcast against x.
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
    # a few rows at a time stay in the processor's cache from the first operation to the last, in float32 if x is not
    result, rows = torch.empty_like(x, dtype=scale.dtype), max(piece * len(x) // x.numel(), 1)
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


class _InPlaceOf(torch.autograd.Function):
    """Another tensor, with the gradient of the first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        return other.view_as(other)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of x."""
        return grads[0], None


def in_place_of(x: Tensor, other: Tensor) -> Tensor:
    """Return another tensor of x's shape, whose gradient goes to x."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return other
    return _InPlaceOf.apply(x, other)  # type: ignore[no-any-return, no-untyped-call]


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
    return torch.copysign(affine.round_to_float4(x.abs()).to(x.dtype), x)
