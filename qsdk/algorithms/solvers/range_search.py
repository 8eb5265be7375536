"""Searching the scales of one block of columns for the smallest loss."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from qsdk.algorithms.solvers.on_torch import one_thread_for
from qsdk.core.layers.layer_problem import LayerProblem
from qsdk.core.numerics.encoding import FloatArray
from qsdk.core.numerics.exact_sums import least_scale
from qsdk.core.ranges.ranges import range_of, scale_and_zero_point

#: Columns of a weight matrix: a run of them, or the indices of any.
Columns = slice | Tensor


class Loss(Protocol):
    """A function of the deviation of some columns, without constant terms."""

    def __call__(self, deviation: Tensor) -> Tensor:
        """Return the error of each output, [..., groups, outputs], for a deviation [..., groups, outputs, columns]."""


class Quadratic:
    """The loss `d H d' + 2 d L'`, with H and L of the columns.

    Attributes:
        h: [groups, columns, columns].
        linear: [groups, outputs, columns].
    """

    def __init__(self, h: Tensor, linear: Tensor, weight_product: Tensor | None = None) -> None:
        """Store H and L, and the product of the columns' weight with H if it is known already."""
        self.h, self.linear, self._weight_product = h, linear, weight_product

    def __call__(self, deviation: Tensor) -> Tensor:
        """Return the error of each output."""
        product = deviation * self.h if deviation.shape[-1] == 1 else deviation @ self.h
        return self.of_product(deviation, product)

    def of_product(self, deviation: Tensor, product: Tensor, outputs: Tensor | None = None) -> Tensor:
        """Return the same from a given `deviation H`, for all outputs or for the given indices."""
        linear = self.linear if outputs is None else self.linear[:, outputs]
        return torch.add(product, linear, alpha=2).mul_(deviation).sum(-1)

    def weight_product(self, weight: Tensor) -> Tensor:
        """Return `W H` for the columns' weight."""
        return weight @ self.h if self._weight_product is None else self._weight_product

    def separable(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss without products of different columns: `sum of diagonal * (W~ - target)^2`.

        Returns:
            The target, [groups, outputs, columns], and the diagonal, [groups, columns].
        """
        diagonal = self.h.diagonal(dim1=-2, dim2=-1)
        return weight - self.linear / diagonal.clamp(min=torch.finfo(torch.float32).tiny)[:, None], diagonal


class SquaredLosses:
    """The losses `||WX - W~X~||^2`, computed from second moments.

    Attributes:
        errors: of each output with the present deviation, [groups, outputs].
        deviation: of the whole weight, [groups, outputs, K].
        now: value of the last returned loss with it, [groups, outputs].
    """

    now: Tensor

    def __init__(self, problem: LayerProblem, deviation: Tensor) -> None:
        """Start from a deviation of the whole weight, which is changed later."""
        self.deviation = deviation
        self._problem, self._h, linear = problem, problem.g_quantized, problem.linear_term
        product = deviation @ self._h
        self._drifts = problem.drift
        self.errors: Tensor = torch.add(product, linear, alpha=2).mul_(deviation).sum(-1) + self._drifts
        self._slope = product.add_(linear)  # per column: the drift and the errors of all columns

    def of(self, columns: Columns) -> Quadratic:
        """Return the loss of the deviation of these columns, with that of all others fixed."""
        if self._are_all(columns):
            self._loss = Quadratic(self._h, self._problem.linear_term, self._problem.weight_product)
            self.now = self.errors - self._drifts
        else:
            own, inner = self.deviation[..., columns], self._h[:, columns][:, :, columns]
            product = own @ inner
            self._loss = Quadratic(inner, self._slope[..., columns] - product)
            self.now = self._loss.of_product(own, product)
        return self._loss

    def fix_columns(self, columns: Columns, deviation: Tensor, losses: Tensor | None = None) -> None:
        """Fix the deviation of these columns."""
        result = self._loss(deviation) if losses is None else losses
        if self._are_all(columns):
            self.errors, self.deviation = result + self._drifts, deviation
            return
        self.errors += result - self.now
        moved = deviation - self.deviation[..., columns]
        self.deviation[..., columns] = deviation
        later = slice(columns.stop, None) if isinstance(columns, slice) else slice(None)
        self._slope[..., later].baddbmm_(moved, self._h[:, columns][..., later])

    def _are_all(self, columns: Columns) -> bool:
        return isinstance(columns, slice) and columns.stop - columns.start == self.deviation.shape[-1]


class Absolute:
    """The loss `sum |e + d X~'|` over rows of X~, with e the error of all other columns.

    Attributes:
        x: [groups, columns, rows].
        error: [groups, outputs, rows].
    """

    def __init__(self, x: Tensor, error: Tensor) -> None:
        self.x, self.error = x, error

    def __call__(self, deviation: Tensor) -> Tensor:
        """Return the error of each output."""
        return torch.matmul(deviation, self.x).add_(self.error).abs_().sum(-1)


class AbsoluteLosses:
    """The losses `sum |WX - W~X~|`, computed from samples of the inputs."""

    def __init__(self, problem: LayerProblem, deviation: Tensor) -> None:
        """Start from a deviation of the whole weight, with the samples of the problem."""
        assert problem.samples is not None
        x, x_quantized = (rows.mT for rows in problem.samples)
        self._x, self._deviation = x_quantized, deviation.clone()
        self._error = problem.weight @ (x_quantized - x) + deviation @ x_quantized

    def now(self) -> Tensor:
        """Return the error of each output with the present deviation, [groups, outputs]."""
        errors: Tensor = self._error.abs().sum(-1)
        return errors

    def of(self, columns: Columns) -> Absolute:
        """Return the loss of the deviation of these columns, with that of all others fixed."""
        x = self._x[:, columns]
        self._error -= self._deviation[..., columns] @ x
        self._deviation[..., columns] = 0
        return Absolute(x, self._error)

    def fix_columns(self, columns: Columns, deviation: Tensor, losses: Tensor | None = None) -> None:
        """Fix the deviation of these columns."""
        self._deviation[..., columns] = deviation
        self._error = self._error + deviation @ self._x[:, columns]


#: Blocks of more weights are searched roughly first.
WIDE = 1 << 14
#: Up to so many columns the rough loss decides alone: products of the columns with each other hardly matter.
NARROW = 128
#: Rows that are left in a search are copied where they are at most such a share.
WORTH_COPYING = 0.75
#: Elements that are quantized at a time: few enough to stay in a processor's cache.
CACHED = 1 << 18


def codes(weight: Tensor, scale: Tensor, zero_point: Tensor, lo: float, hi: float) -> Tensor:
    """Return `quantize(weight) - zero_point`: the formula of `core.numerics.affine` with fewer passes over memory."""
    return clip_codes(torch.div(weight, scale), zero_point, lo, hi)


def clip_codes(position: Tensor, zero_point: Tensor, lo: float, hi: float) -> Tensor:
    """Round positions on a grid to its codes less the zero points; the input is overwritten."""
    rounded = position.round_()
    if not zero_point.any():
        return rounded.clamp_(lo, hi)
    return rounded.clamp_(lo - zero_point, hi - zero_point)  # clip(r + z, lo, hi) - z, to the last bit


def on_grid(weight: Tensor, scale: Tensor, zero_point: Tensor, lo: float, hi: float) -> Tensor:
    """Return `fake_quantize(weight)`; scale and zero point broadcast against the weight."""
    return codes(weight, scale, zero_point, lo, hi).mul_(scale)


class Grids:
    """The grids of shares of a weight's range; ranges contain 0."""

    def __init__(self, problem: LayerProblem) -> None:
        """Observe the range of the problem's weight."""
        self._spec, self._device = problem.spec, problem.weight.device
        stored = problem.layout.from_matrix(problem.weight).cpu().numpy()
        full = range_of(stored, problem.spec)
        self._low, self._high = np.minimum(full.low, 0).reshape(-1), np.maximum(full.high, 0).reshape(-1)
        exact = problem.spec.dtype.exact_sums
        least = least_scale(stored, problem.encoding.axis) if exact else np.zeros(self._low.shape, np.float32)
        self.least = torch.from_numpy(least).to(self._device)  # no scale is to be smaller

    def common(self, share: float) -> tuple[Tensor, Tensor]:
        """Return scales and zero points for one share of all ranges, float32 [scales]."""
        return self._grids(self._low * np.float32(share), self._high * np.float32(share), self.least)

    def of(self, scales: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return the asymmetric grids of some scales, for shares of either end, [..., scales]."""
        at = scales.cpu().numpy()
        return self._grids(self._low[at] * low.cpu().numpy(), self._high[at] * high.cpu().numpy(), self.least[scales])

    def _grids(self, low: FloatArray, high: FloatArray, least: Tensor) -> tuple[Tensor, Tensor]:
        found = scale_and_zero_point(low, high, self._spec)
        scale, zero_point = (torch.from_numpy(values).to(self._device) for values in found)
        return torch.maximum(scale, least), zero_point.float()


class Block:
    """Columns of a weight matrix in which each output has one scale; outputs may share one.

    Attributes:
        weight: float32 [groups, outputs, columns].
        grid: lowest and highest code.
        scales: indices of their scales, int64 [units].
    """

    def __init__(
        self, weight: Tensor, cell: Tensor, grid: tuple[float, float], importance: Tensor | None = None
    ) -> None:
        """Store a weight with scale indices `cell`, int64 [groups, outputs].

        Where outputs share a scale, their losses are weighted by `importance` [groups, outputs]; None for equal
        weights.
        """
        self.weight, self.grid = weight, grid
        used = torch.bincount(cell.flatten()) > 0
        self.scales, self._unit = used.nonzero()[:, 0], (used.cumsum(0) - 1)[cell]
        order = torch.arange(cell.numel(), device=cell.device).reshape(cell.shape)
        self._in_order = torch.equal(self._unit, order)
        self._importance = importance if len(self.scales) < cell.numel() else None

    @property
    def wide(self) -> bool:
        """Return whether each output is searched by itself, roughly first."""
        return self.weight.numel() > WIDE and self.weight.shape[0] == 1 and self._in_order

    @property
    def narrow(self) -> bool:
        """Return whether there are so few columns that their products with each other hardly matter."""
        return self.weight.shape[-1] <= NARROW

    def total(self, losses: Tensor) -> Tensor:
        """Return the sums over units of losses of outputs [..., groups, outputs]: [..., units]."""
        if self._importance is not None:
            losses = losses * self._importance
        flat = losses.flatten(-2)
        if self._in_order:
            return flat
        zeros = torch.zeros(*flat.shape[:-1], len(self.scales), device=flat.device, dtype=flat.dtype)
        return zeros.index_add_(-1, self._unit.flatten(), flat)

    def of_units(self, values: Tensor) -> Tensor:
        """Return values of units [units] repeated for their outputs, [groups, outputs]."""
        return values[self._unit]

    def of_outputs(self, losses: Tensor) -> Tensor | None:
        """Return the losses of units as those of outputs, [groups, outputs]; None where outputs share scales."""
        return losses.reshape(self._unit.shape) if self._in_order and self._importance is None else None

    def deviation(self, scale: Tensor, zero_point: Tensor, outputs: Tensor | None = None) -> Tensor:
        """Return the distance of the nearest grid points from the weights, for grids of units [..., units].

        With indices of `outputs`, of these alone.
        """
        weight, unit = self.weight, self._unit
        if outputs is not None:
            weight, unit = weight[:, outputs], unit[:, outputs]
        scale = scale[..., unit, None]
        return on_grid(weight, scale, zero_point[..., unit, None], *self.grid).sub_(weight)


@dataclass(frozen=True)
class ScaleChoice:
    """The result of a search.

    Attributes:
        index: of the candidates, int64 [units].
        losses: [units].
        deviation: with the chosen grids, [groups, outputs, columns].
        product: the deviation times H, likewise, where the loss has an H and outputs are searched one by one.
    """

    index: Tensor
    losses: Tensor
    deviation: Tensor
    product: Tensor | None = None


def best_of(block: Block, loss: Loss, scales: Tensor, zero_points: Tensor) -> ScaleChoice:
    """Return the best candidate of each unit, for scales and zero points [candidates, units].

    All are tried where that is cheap or where outputs share scales. Elsewhere a rough loss chooses. In a block of many
    columns the exact loss continues from there, up or down, as long as it falls; the last candidate is always tried.
    """
    if block.wide and isinstance(loss, Quadratic):
        climb = _Descent(block, loss, scales, zero_points, step=1 if block.narrow else 2)
        return climb.start() if block.narrow else climb.choice()
    result = []
    at_once = max(CACHED // block.weight.numel(), 1)
    for start in range(0, len(scales), at_once):
        some = slice(start, start + at_once)
        result.append(block.total(loss(block.deviation(scales[some], zero_points[some]))))
    lowest, best = torch.cat(result).min(0)
    units = torch.arange(len(best), device=best.device)
    return ScaleChoice(best, lowest, block.deviation(scales[best, units], zero_points[best, units]))


class _Descent:
    """The descent of each unit through the candidates to one whose neighbours are no better."""

    def __init__(self, block: Block, loss: Quadratic, scales: Tensor, zero_points: Tensor, *, step: int) -> None:
        self._block, self._loss, self._scales, self._zero_points = block, loss, scales, zero_points
        self._units = torch.arange(scales.shape[1], device=scales.device)
        self._best = _rough(block, loss, scales, zero_points, step)
        self._lowest, self._deviation, self._product = self._exact(self._best)

    def start(self) -> ScaleChoice:
        """Return the present candidates."""
        return ScaleChoice(self._best, self._lowest, self._deviation, self._product)

    def choice(self) -> ScaleChoice:
        """Move as long as the loss falls, and return the final candidates."""
        end = len(self._scales) - 1
        if any(not torch.equal(table[0], table[end]) for table in (self._scales, self._zero_points)):
            self._try(self._units[self._best != end], torch.full_like(self._best, end))
        start = self._best.clone()
        for step in (1, -1):
            active = self._units[self._best == start]  # where the loss fell on one side, it rises on the other
            while len(active):
                moved = (self._best + step).clamp(0, end)
                active = self._try(active[moved[active] != self._best[active]], moved)
        return self.start()

    def _try(self, active: Tensor, moved: Tensor) -> Tensor:
        """Move units to other candidates where that lowers their loss, and return those that moved."""
        losses, deviation, product = self._exact(moved, active)
        falls = losses < self._lowest[active]
        better = active[falls]
        self._best[better], self._lowest[better] = moved[better], losses[falls]
        self._deviation[:, better], self._product[:, better] = deviation[:, falls], product[:, falls]
        return better

    def _exact(self, choice: Tensor, outputs: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        scale, zero_point = (table[choice, self._units] for table in (self._scales, self._zero_points))
        deviation = self._block.deviation(scale, zero_point, outputs)
        product = deviation @ self._loss.h
        return self._loss.of_product(deviation, product, outputs)[0], deviation, product


def _rough(block: Block, loss: Quadratic, scales: Tensor, zero_points: Tensor, step: int) -> Tensor:
    """Return the best of every `step`-th candidate of each unit, by the loss without products of different columns."""
    target, diagonal = loss.separable(block.weight)
    parts = []
    for some in torch.split(torch.arange(scales.shape[1], device=scales.device), max(CACHED // target.shape[-1], 1)):
        rows = slice(int(some[0]), int(some[-1]) + 1)
        # copied, since the rows of a few columns lie far apart
        search = _RoughSearch(block.weight[0, rows].contiguous(), target[0, rows], diagonal[0], block.grid)
        with one_thread_for(target[0, rows]):
            parts.append(search.best(scales[:, rows], zero_points[:, rows], step))
    return torch.cat(parts)


class _RoughSearch:
    """The search of each row's scale for the smallest `sum of diagonal * (fake_quantize(weight) - target)^2`."""

    def __init__(self, weight: Tensor, target: Tensor, diagonal: Tensor, grid: tuple[float, float]) -> None:
        self._weight, self._target, self._diagonal, self._grid = weight, target, diagonal, grid

    def best(self, scales: Tensor, zero_points: Tensor, step: int) -> Tensor:
        """Return the best of every `step`-th candidate of each row, from the last to the first; int64 [rows].

        A row leaves the search once no grid that is left reaches far enough: by the distances of its targets from the
        grids' ends alone, its loss would be above the lowest one.
        """
        end, (lo, hi) = len(scales) - 1, self._grid
        scale, zero_point = (table.flip(0)[:end:step] for table in (scales, zero_points))
        low, high = (lo - zero_point) * scale, (hi - zero_point) * scale
        best, lowest = torch.zeros_like(scales[0], dtype=torch.int64), torch.full_like(scales[0], torch.inf)
        rows, weight, target, start = torch.arange(len(best), device=best.device), self._weight, self._target, 0
        while start < len(scale) and len(rows):
            stop = start + max(CACHED // weight.numel(), 1)
            found, at = self._losses(weight, target, scale[start:stop], zero_point[start:stop]).min(0)
            best[rows] = torch.where(found < lowest[rows], at + start, best[rows])
            lowest[rows] = torch.minimum(lowest[rows], found)
            start = stop
            if start < len(scale):
                least = self._least(target, low[start:].amin(0), high[start:].amax(0))
                left = (least <= lowest[rows]).nonzero()[:, 0]
                if len(left) < WORTH_COPYING * len(rows):
                    rows, weight, target = rows[left], weight[left], target[left]
                    scale, zero_point, low, high = (table[:, left] for table in (scale, zero_point, low, high))
        best = end - step * best
        same = torch.equal(scales[0], scales[end]) and torch.equal(zero_points[0], zero_points[end])
        if end % step == 0 and not same:
            found = self._losses(self._weight, self._target, scales[:1], zero_points[:1])[0]
            best[found < lowest] = 0
        return best

    def _losses(self, weight: Tensor, target: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """Return the losses [candidates, rows] with grids [candidates, rows]."""
        # a product, which is faster than a quotient and off by an ulp
        points = clip_codes(weight * (1 / scale)[..., None], zero_point[..., None], *self._grid)
        squares = points.mul_(scale[..., None]).sub_(target).square_()
        return torch.stack([one @ self._diagonal for one in squares])  # faster than one product

    def _least(self, target: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Return the losses of points as near to the targets as ranges allow."""
        reached = torch.maximum(torch.minimum(target, high[:, None]), low[:, None])  # faster than clamp with tensors
        return reached.sub_(target).square_() @ self._diagonal


def least_squares(block: Block, loss: Quadratic, scale: Tensor, choice: ScaleChoice) -> Tensor:
    """Return the scales for which the codes of a choice have the smallest loss, float32 [units].

    Where that is no positive number, the scale is unchanged.
    """
    points = choice.deviation + block.weight
    product = choice.deviation @ loss.h if choice.product is None else choice.product
    product = product + loss.weight_product(block.weight)
    below = block.total((product * points).sum(-1))
    above = block.total(product.mul_(block.weight).sub_(points.mul_(loss.linear)).sum(-1))
    result = scale * above / below
    return torch.where(result.isfinite() & (result > 0), result, scale)
