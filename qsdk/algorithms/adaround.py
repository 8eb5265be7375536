"""AdaRound: round each weight down or up so that the layer's output error is smallest."""

import torch
from torch import Tensor

from qsdk.algorithms.on_torch import on_torch, scales_of_weights
from qsdk.core import affine
from qsdk.core.errors import ConfigError
from qsdk.core.layer_problem import LayerProblem, Solution

#: Columns that are settled one by one before the others hear of them in one matrix product.
BLOCK = 128


def solve(problem: LayerProblem, *, iterations: int = 5, damping: float = 0.03) -> Solution:
    """Round each weight to the grid point below or above it, for the smallest output error of the layer.

    Error feedback column by column, then coordinate descent on the rounding choices until none pays. A channel for
    which nearest rounding is better keeps it, so that the error is never above that of nearest rounding.

    Args:
        problem: with the encoding whose grid is used; it is not changed.
        iterations: sweeps of coordinate descent at most; later ones gain little.
        damping: share of the mean second moment that is added to the diagonal, so that directions which the data does
            not show keep their weights; with few rows per input more of it helps.

    Returns:
        The rounded weight, every element exactly on the grid, and relative errors.

    Raises:
        ConfigError: the dtype is not an integer, or the damping is not positive.

    Source: the problem is that of Nagel et al. 2020, AdaRound, sections 3.1 to 3.4, with its asymmetric
    reconstruction; the solution is Frantar et al. 2023, GPTQ, section 3, in the form of Babai's nearest plane (Chen et
    al. 2025), kept between floor and ceil, then coordinate descent. No relaxation is left to harden at the end.
    """
    if not problem.spec.dtype.is_integer:
        raise ConfigError(f"{problem.site}: adaround needs an integer grid, not {problem.spec.dtype}; skip the site")
    if damping <= 0:
        raise ConfigError(f"{problem.site}: a damping of {damping} is not positive")
    problem = on_torch(problem)
    scale, zero_point = scales_of_weights(problem, problem.encoding)
    below, above, nearest = neighbours(problem, scale, zero_point)
    low, high = (((q - zero_point) * scale - problem.weight).mT.contiguous() for q in (below, above))
    h = damped(problem.g_quantized, damping)
    linear = problem.linear_term().mT.contiguous()
    up = descend(h, linear, low, high, feedback(h, linear, low, high), iterations)
    rounded = affine.dequantize(torch.where(up.mT, above, below), scale, zero_point)
    plain = affine.dequantize(nearest, scale, zero_point)
    worse = problem.errors(rounded) > problem.errors(plain)
    rounded = torch.where(worse[..., None], plain, rounded)
    return Solution(problem.encoding, rounded, problem.relative_error(plain), problem.relative_error(rounded))


def neighbours(problem: LayerProblem, scale: Tensor, zero_point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The grid point below each weight, the one above, and the nearest: float32 [groups, out_per_group, K] each."""
    lo, hi = problem.encoding.dtype.lo, problem.encoding.dtype.hi
    position = problem.weight / scale
    # a weight that is on the grid has no choice, though its quotient may miss the integer by an ulp
    whole = position.round()
    position = torch.where((position - whole).abs() <= 2e-7 * whole.abs(), whole, position)
    below, above, nearest = (
        (rounded + zero_point).clip(lo, hi) for rounded in (position.floor(), position.ceil(), position.round())
    )
    return below, above, nearest


def damped(h: Tensor, damping: float) -> Tensor:
    """Add a share of its mean to the diagonal of each [K, K] matrix, so that it is positive definite."""
    mean = h.diagonal(dim1=-2, dim2=-1).mean(-1)
    added = torch.where(mean > 0, damping * mean, torch.ones_like(mean))
    return h + torch.diag_embed(added[:, None].expand(-1, h.shape[-1]))


def feedback(h: Tensor, linear: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Choose `low` or `high` column by column, each making up for the errors of those before it.

    Weights come transposed, so that a column is contiguous.

    Args:
        h: [groups, K, K], positive definite.
        linear: [groups, K, rows].
        low: deviation of the rounded-down weights, [groups, K, rows].
        high: deviation of the rounded-up weights, likewise.

    Returns:
        Where to round up, bool [groups, K, rows].

    Source: Frantar et al. 2023, GPTQ, section 3, as Babai's nearest plane; largest diagonal first.
    """
    order = h.diagonal(dim1=-2, dim2=-1).argsort(-1)[:, :, None]  # settled from the last, the largest, to the first
    h = h.take_along_dim(order, 1).take_along_dim(order.mT, 2)
    linear, low, high = (x.take_along_dim(order, 1) for x in (linear, low, high))
    # float64: the factor's error, not the data's, would decide near-ties of long, correlated inputs
    factor = torch.linalg.cholesky(h.double())
    best = -torch.cholesky_solve(linear.double(), factor).float()
    slopes = (factor / factor.diagonal(dim1=-2, dim2=-1)[:, None, :]).mT.float()
    target, miss, up = best.clone(), torch.zeros_like(low), torch.zeros_like(low, dtype=torch.bool)
    middle, choice = (low + high) / 2, high > low
    for stop in range(h.shape[-1], 0, -BLOCK):
        start = max(stop - BLOCK, 0)
        for i in range(stop - 1, start - 1, -1):
            up[:, i] = (target[:, i] > middle[:, i]) & choice[:, i]
            miss[:, i] = torch.where(up[:, i], high[:, i], low[:, i]) - best[:, i]
            target[:, start:i].addcmul_(slopes[:, start:i, i : i + 1], miss[:, i : i + 1], value=-1)
        target[:, :start] -= slopes[:, :start, start:stop] @ miss[:, start:stop]
    return torch.empty_like(up).scatter_(1, order.expand_as(up), up)


def descend(h: Tensor, linear: Tensor, low: Tensor, high: Tensor, up: Tensor, sweeps: int) -> Tensor:
    """Flip rounding choices, column by column, wherever that lowers `d h d' + 2 d linear'`.

    Args:
        h: [groups, K, K].
        linear: [groups, K, rows].
        low: deviation of the rounded-down weights, [groups, K, rows].
        high: deviation of the rounded-up weights, likewise.
        up: where to round up at first, bool.
        sweeps: over all columns, at most; fewer when a sweep flips nothing.

    Returns:
        Where to round up, bool [groups, K, rows].
    """
    d = torch.where(up, high, low)
    flip = low + high - 2 * d  # the change that each weight's other choice would make
    slope = h @ d + linear
    for _ in range(sweeps):
        flips = torch.zeros_like(flip)
        # flipping pays where flip * (2 slope + flip * curvature) < 0
        half = flip * h.diagonal(dim1=-2, dim2=-1)[:, :, None] / 2
        for start in range(0, h.shape[-1], BLOCK):
            block = slice(start, start + BLOCK)
            inner, local, change = h[:, block, block], slope[:, block] + half[:, block], flips[:, block]
            for i in range(inner.shape[-1]):
                step = flip[:, start + i]
                change[:, i] = torch.where(step * local[:, i] < 0, step, 0)
                local[:, i + 1 :].addcmul_(inner[:, i + 1 :, i : i + 1], change[:, i : i + 1])
            slope += h[:, :, block] @ change
        flip -= 2 * flips
        up = up ^ (flips != 0)
        if not flips.any():
            break
    return up
