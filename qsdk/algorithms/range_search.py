"""Searching the scales of one block of columns for the smallest loss."""

import numpy as np
import torch
from torch import Tensor

from qsdk.algorithms.layer_losses import Loss, Quadratic
from qsdk.core.encoding import FloatArray
from qsdk.core.layer_problem import LayerProblem
from qsdk.core.ranges import range_of, scale_and_zero_point

#: Blocks of more columns are searched roughly first: an exact loss costs as many operations per weight as columns.
WIDE = 128
#: Elements that are moved to a grid at a time: few enough to stay in a processor's cache.
CACHED = 1 << 18


def codes(weight: Tensor, scale: Tensor, zero_point: Tensor, lo: float, hi: float) -> Tensor:
    """Give `quantize(weight) - zero_point`: the formula of `core.affine` with fewer passes over memory."""
    rounded = torch.div(weight, scale).round_()
    if not zero_point.any():
        return rounded.clamp_(lo, hi)
    return rounded.clamp_(lo - zero_point, hi - zero_point)  # clip(r + z, lo, hi) - z, to the last bit


def on_grid(weight: Tensor, scale: Tensor, zero_point: Tensor, lo: float, hi: float) -> Tensor:
    """Give `fake_quantize(weight)`; scale and zero point broadcast against the weight."""
    return codes(weight, scale, zero_point, lo, hi).mul_(scale)


class Grids:
    """The grids that shares of a weight's range lead to; ranges contain 0."""

    def __init__(self, problem: LayerProblem) -> None:
        """Observe the range of the problem's weight."""
        self._spec, self._device = problem.spec, problem.weight.device
        full = range_of(problem.layout.from_matrix(problem.weight).cpu().numpy(), problem.spec)
        self._low, self._high = np.minimum(full.low, 0).reshape(-1), np.maximum(full.high, 0).reshape(-1)

    def common(self, share: float) -> tuple[Tensor, Tensor]:
        """Scales and zero points for one share of all ranges, float32 [scales]."""
        return self._grids(self._low * np.float32(share), self._high * np.float32(share))

    def of(self, scales: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Asymmetric grids of some scales, for shares of either end, [..., scales]."""
        at = scales.cpu().numpy()
        return self._grids(self._low[at] * low.cpu().numpy(), self._high[at] * high.cpu().numpy())

    def _grids(self, low: FloatArray, high: FloatArray) -> tuple[Tensor, Tensor]:
        scale, zero_point = scale_and_zero_point(low, high, self._spec)
        return torch.from_numpy(scale).to(self._device), torch.from_numpy(zero_point).to(self._device).float()


class Block:
    """Columns of a weight matrix in which each output has one scale; several outputs may have the same.

    Attributes:
        weight: float32 [groups, outputs, columns].
        grid: lowest and highest code.
        scales: which scales they are, int64 [units].
    """

    def __init__(
        self, weight: Tensor, cell: Tensor, grid: tuple[float, float], importance: Tensor | None = None
    ) -> None:
        """Look at a weight with scales `cell`, int64 [groups, outputs].

        Where outputs share a scale, their losses count as `importance` [groups, outputs] says; None for equally.
        """
        self.weight, self.grid = weight, grid
        self.scales, self._unit = torch.unique(cell, return_inverse=True)
        order = torch.arange(cell.numel(), device=cell.device).reshape(cell.shape)
        self._in_order = torch.equal(self._unit, order)
        self._importance = importance if len(self.scales) < cell.numel() else None

    @property
    def wide(self) -> bool:
        """Whether each output is searched for itself, roughly first."""
        return self.weight.shape[-1] > WIDE and self.weight.shape[0] == 1 and self._in_order

    def total(self, losses: Tensor) -> Tensor:
        """Sum losses of outputs [..., groups, outputs] to those of units, [..., units]."""
        if self._importance is not None:
            losses = losses * self._importance
        flat = losses.flatten(-2)
        if self._in_order:
            return flat
        zeros = torch.zeros(*flat.shape[:-1], len(self.scales), device=flat.device, dtype=flat.dtype)
        return zeros.index_add_(-1, self._unit.flatten(), flat)

    def codes(self, scale: Tensor, zero_point: Tensor, outputs: Tensor | None = None) -> Tensor:
        """The weights on the grids of units [..., units], zero points taken away; of some outputs alone, if given."""
        weight, unit = self._of(outputs)
        return codes(weight, scale[..., unit, None], zero_point[..., unit, None], *self.grid)

    def deviation(self, scale: Tensor, zero_point: Tensor, outputs: Tensor | None = None) -> Tensor:
        """How far the nearest grid points are from the weights, for grids of units [..., units]."""
        weight, unit = self._of(outputs)
        return self.codes(scale, zero_point, outputs).mul_(scale[..., unit, None]).sub_(weight)

    def _of(self, outputs: Tensor | None) -> tuple[Tensor, Tensor]:
        return (self.weight, self._unit) if outputs is None else (self.weight[:, outputs], self._unit[:, outputs])


def best_of(block: Block, loss: Loss, scales: Tensor, zero_points: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the best candidate of each unit, for scales and zero points [candidates, units].

    All are tried where that is cheap or where outputs share scales. In a wide block a rough loss says where to start,
    and the exact one goes from there, up or down, as long as it falls; the last candidate is never missed.

    Returns:
        Indices, int64 [units], and their losses.
    """
    if block.wide and isinstance(loss, Quadratic):
        return _climb(block, loss, scales, zero_points)
    found = []
    at_once = max(CACHED // block.weight.numel(), 1)
    for start in range(0, len(scales), at_once):
        some = slice(start, start + at_once)
        found.append(block.total(loss(block.deviation(scales[some], zero_points[some]))))
    lowest, best = torch.cat(found).min(0)
    return best, lowest


def _climb(block: Block, loss: Quadratic, scales: Tensor, zero_points: Tensor) -> tuple[Tensor, Tensor]:
    units = torch.arange(scales.shape[1], device=scales.device)

    def exact(choice: Tensor, outputs: Tensor | None = None) -> Tensor:
        scale, zero_point = (table[choice, units] for table in (scales, zero_points))
        return loss(block.deviation(scale, zero_point, outputs), outputs)[0]

    best = _rough(block, loss, scales, zero_points)
    lowest = exact(best)
    end = len(scales) - 1
    if not (torch.equal(scales[0], scales[end]) and torch.equal(zero_points[0], zero_points[end])):
        found = exact(torch.full_like(best, end))
        best, lowest = torch.where(found < lowest, end, best), torch.minimum(found, lowest)
    start = best.clone()
    for step in (1, -1):
        active = units[best == start]  # a loss that fell on one side rises on the other
        while len(active):
            active = active[(best[active] + step >= 0) & (best[active] + step <= end)]
            moved = best.clone()
            moved[active] += step
            found = exact(moved, active)
            falls = found < lowest[active]
            active = active[falls]
            lowest[active], best[active] = found[falls], moved[active]
    return best, lowest


def _rough(block: Block, loss: Quadratic, scales: Tensor, zero_points: Tensor) -> Tensor:
    """The best of every other candidate of each unit, by the loss without the products of different columns."""
    target, diagonal = loss.separable(block.weight)
    tried = torch.arange(len(scales) - 1, -1, -2).flip(0).tolist()
    found = torch.empty(len(tried), scales.shape[1], device=scales.device)
    rows = max(CACHED // block.weight.shape[-1], 1)
    for start in range(0, scales.shape[1], rows):
        some = slice(start, start + rows)
        for place, index in enumerate(tried):
            scale, zero_point = scales[index, some, None], zero_points[index, some, None]
            points = on_grid(block.weight[0, some], scale, zero_point, *block.grid)
            found[place, some] = points.sub_(target[0, some]).square_() @ diagonal[0]
    return torch.tensor(tried, device=scales.device)[found.argmin(0)]


def least_squares(block: Block, loss: Quadratic, scale: Tensor, zero_point: Tensor) -> Tensor:
    """The scales with which the codes that a grid gives have the smallest loss, float32 [units].

    Where that is no positive number, the scale is given back.
    """
    points = block.codes(scale, zero_point)
    product = points @ loss.h
    above = block.total((product * block.weight).sub_(points * loss.linear).sum(-1))
    below = block.total(product.mul_(points).sum(-1))
    found = above / below
    return torch.where(found.isfinite() & (found > 0), found, scale)
