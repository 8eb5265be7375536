"""A rotation learned on the manifold of orthogonal matrices: the least noise of quantization for what it turns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float64]

_STEPS, _RATE, _MOMENTUM = 100, 0.05, 0.9


@dataclass(frozen=True)
class Turned:
    """Vectors that a rotation turns, and the grid that they are quantized on afterwards.

    Attributes:
        rows: float32 [n, size]; a sample of them is enough.
        levels: of the grid, less one.
        symmetric: whether the grid is around 0.
        ranges: what has a range of its own: the whole `tensor`, each `row` or each `column`, or a whole number: each
            run of so many values of a row.
    """

    rows: npt.NDArray[np.float32]
    levels: float
    symmetric: bool
    ranges: Literal["tensor", "row", "column"] | int


@dataclass(frozen=True)
class LearnedRotation:
    """The result of learning.

    Attributes:
        rotation: orthogonal, [size, size].
        before: noise over signal of all that is turned, summed, without it.
        after: likewise, with it; never more.
    """

    rotation: Floats
    before: float
    after: float


def learn_rotation(turned: Sequence[Turned], size: int, *, keeps_mean: bool) -> LearnedRotation:
    """Return the rotation [size, size] after which the noise of quantization is least, as far as descent finds it.

    The noise of a value is a twelfth of its squared step, as for errors spread evenly over a step. Steps of descent
    with momentum follow Cayley's transform, so that the matrix stays orthogonal (Li et al. 2020; Liu et al. 2024,
    SpinQuant, which descends the loss of the whole model instead). With `keeps_mean` it leaves the mean of a vector.
    """
    groups = [(one, torch.from_numpy(np.ascontiguousarray(one.rows, np.float32))) for one in turned]
    rotation = torch.eye(size, dtype=torch.float64)
    best, momentum = rotation, torch.zeros_like(rotation)
    noises: list[float] = []
    for step in range(_STEPS + 1):
        current = rotation.float().requires_grad_()
        noise = torch.stack([_noise(one, rows @ current) for one, rows in groups]).sum()
        (gradient,) = torch.autograd.grad(noise, current)
        if not noises or noise.item() < min(noises):
            best = rotation
        noises.append(noise.item())
        momentum = _MOMENTUM * momentum + _tangent(gradient.double(), rotation, keeps_mean=keeps_mean)
        rate = _RATE * (1 - step / _STEPS) * size**0.5 / max(float(momentum.norm()), 1e-30)
        rotation = _cayley(-rate * momentum) @ rotation
    return LearnedRotation(best.numpy(), noises[0], min(noises))


def _noise(one: Turned, x: Tensor) -> Tensor:
    """Return the noise over the signal of vectors, by the ranges that they have."""
    if isinstance(one.ranges, int):
        x = x[:, : x.shape[1] // one.ranges * one.ranges].reshape(-1, one.ranges)
    axes = {"tensor": (0, 1), "column": (0,)}.get(str(one.ranges), (1,))
    width = 2 * x.abs().amax(axes) if one.symmetric else x.amax(axes).clamp(min=0) - x.amin(axes).clamp(max=0)
    return (width / one.levels).square().mean() / 12 / x.detach().square().mean().clamp(min=1e-30)


def _tangent(gradient: Tensor, rotation: Tensor, *, keeps_mean: bool) -> Tensor:
    """Return the skew-symmetric matrix along which the rotation follows a gradient."""
    product = gradient @ rotation.T
    skew = product - product.T
    if keeps_mean:  # what turns the vector of ones is taken out
        skew = skew - skew.mean(0, keepdim=True)
        skew = skew - skew.mean(1, keepdim=True)
    return skew


def _cayley(skew: Tensor) -> Tensor:
    """Return the orthogonal matrix `(1 - skew / 2)^-1 (1 + skew / 2)`."""
    one = torch.eye(len(skew), dtype=skew.dtype)
    result: Tensor = torch.linalg.solve(one - skew / 2, one + skew / 2)
    return result
