"""Flat kernels of fake quantization for training on a CPU: one pass over memory instead of several.

torch.compile makes them. They see tensors as one dimension of unknown length, so that each is compiled once for all
models.
"""

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


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
