"""Rounding a layer's weights together: error feedback over the columns, then coordinate descent.

The layer's output error as a function of the deviation d = W~ - W is `d H d' + 2 d L'` and a constant, with H the
second moments of the quantized inputs and L the problem's linear term. Everything here is transposed, [groups, K,
rows], so that the column of one input is contiguous, and works on any number of groups and rows at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qsdk.algorithms.solvers.on_torch import scales_of_weights
from qsdk.core.layers.layer_problem import LayerProblem, Solution
from qsdk.core.numerics.encoding import Encoding

#: Columns that are rounded one by one before the others are updated by one matrix product.
BLOCK = 128
#: Up to so many weights are rounded side by side in several ways; beyond, that is no faster.
SIDE_BY_SIDE = 1 << 18
#: Weights of an embedding whose error is computed at once.
ROWS_OF_TABLE = 1 << 20


@dataclass(frozen=True)
class WeightGrid:
    """The values that each weight may take: `code * scale` with an integer code from `lowest` to `highest`.

    Attributes:
        scale: float32 [groups, K, rows].
        lowest: smallest code less the zero point, likewise; a view of one number where all are equal.
        highest: largest code, likewise.
    """

    scale: Tensor
    lowest: Tensor
    highest: Tensor

    @classmethod
    def of(cls, problem: LayerProblem, encoding: Encoding) -> "WeightGrid":
        """Return all points of an encoding's grid, for each weight of a problem."""
        scale, zero_point = (v.mT for v in scales_of_weights(problem, encoding))
        scale = scale.contiguous()
        if encoding.symmetric:
            ends = (scale.new_tensor(end).expand_as(scale) for end in (encoding.dtype.lo, encoding.dtype.hi))
            return cls(scale, *ends)
        zero_point = zero_point.contiguous()
        return cls(scale, encoding.dtype.lo - zero_point, encoding.dtype.hi - zero_point)

    @classmethod
    def concatenate(cls, grids: Sequence["WeightGrid"], dim: int = 0) -> "WeightGrid":
        """Return grids concatenated along the groups, or side by side along the rows."""
        if len(grids) == 1:
            return grids[0]
        scale = torch.cat([grid.scale for grid in grids], dim)
        return cls(scale, *(_concatenated([getattr(g, name) for g in grids], dim, scale) for name in _ENDS))

    def around(self, weight: Tensor) -> "WeightGrid":
        """Return the grid points right below and above each weight, [groups, K, rows]; one where it is on the grid."""
        position = weight / self.scale
        # a weight on the grid has no choice, although its quotient may miss the integer by an ulp
        nearest = position.round()
        position = torch.where((position - nearest).abs() <= 2e-7 * nearest.abs(), nearest, position)
        below, above = (codes.clamp(self.lowest, self.highest) for codes in (position.floor(), position.ceil()))
        return WeightGrid(self.scale, below, above)

    def nearest(self, weight: Tensor) -> Tensor:
        """Return the codes nearest to a weight, half to even."""
        return (weight / self.scale).round().clamp(self.lowest, self.highest)


_ENDS = ("lowest", "highest")


def _concatenated(ends: Sequence[Tensor], dim: int, like: Tensor) -> Tensor:
    """Return ends of grids concatenated: one number for all elements of `like` where it is one."""
    numbers = [_number(end) for end in ends]
    if None not in numbers and len(set(numbers)) == 1:
        return ends[0].flatten()[0].expand_as(like)
    return torch.cat(list(ends), dim)


def _number(values: Tensor) -> float | None:
    """Return the number that a view repeats; None for other tensors."""
    return None if any(values.stride()) or not values.numel() else float(values.flatten()[0])


@dataclass(frozen=True)
class Objective:
    """The layer's output error `d H d' + 2 d L'`, up to a constant.

    Attributes:
        weight: W, float32 [groups, K, rows].
        h: H, float32 [groups, K, K], positive definite.
        linear: L, float32 [groups, K, rows].
    """

    weight: Tensor
    h: Tensor
    linear: Tensor

    @classmethod
    def of(cls, problem: LayerProblem, damping: float | None) -> "Objective":
        """Return the objective of a problem on torch, made robust against unseen data; see `damp` and `shrink`."""
        h = damp(problem.g_quantized, damping_for(problem) if damping is None else damping, noise_in(problem))
        weight, linear = (x.mT.contiguous() for x in (problem.weight, problem.linear_term()))
        return cls(weight, h, shrink(linear, h, float(problem.drift().sum()), problem.rows))

    def __call__(self, rounded: Tensor) -> Tensor:
        """Return the error per row, [groups, rows]."""
        d = rounded - self.weight
        return (d * (self.h @ d + 2 * self.linear)).sum(1)

    def beside(self, count: int) -> "Objective":
        """Return the objective repeated along the rows."""
        if count == 1:
            return self
        return replace(self, weight=self.weight.repeat(1, 1, count), linear=self.linear.repeat(1, 1, count))

    def repeated(self, count: int) -> "Objective":
        """Return the objective repeated along the groups."""
        return Objective(*(x.repeat(count, 1, 1) for x in (self.weight, self.h, self.linear)))


def damping_for(problem: LayerProblem) -> float:
    """Return the damping for unseen data: 0.03, or the ratio of inputs to rows where rows are few.

    With it the error on unseen data is within 3 % of the one with the best damping, for 8 to 20,000 rows of 96
    correlated inputs. Without it, a solution fitted to few rows is worse than nearest rounding.
    """
    inputs: int = problem.weight.shape[-1]
    return max(0.03, inputs / max(problem.rows, 1))


def noise_in(problem: LayerProblem) -> Tensor | None:
    """Return the rounding noise of inputs that never vary, after their mean is removed from H, [groups, K]."""
    if not problem.without_mean or problem.mean_quantized is None:
        return None
    mean: Tensor = problem.mean_quantized
    result: Tensor = 64 * torch.finfo(torch.float32).eps * mean.shape[-1] ** 0.5 * problem.count * mean.square()
    return result


def damp(h: Tensor, damping: float, noise: Tensor | None = None) -> Tensor:
    """Return H with a share of its mean, and its noise, added to the diagonal, which makes it positive definite.

    Weights then stay in directions that the data does not cover, and inputs without data round to nearest.
    """
    result = h.clone()
    diagonal = result.diagonal(dim1=-2, dim2=-1)
    mean = diagonal.mean(-1)
    added = torch.where(mean > 0, damping * mean, torch.ones_like(mean))[:, None]
    diagonal += added if noise is None else added + noise
    return result


def shrink(linear: Tensor, h: Tensor, drift: float, rows: int) -> Tensor:
    """Return the linear term less the share of its gain that is due to chance.

    A regression of the drift of the quantized inputs on K inputs lowers the error on its own rows even without any true
    relation, by K over the number of rows times the remaining error.

    Args:
        linear: L, float32 [groups, K, rows].
        h: H, float32 [groups, K, K], positive definite.
        drift: the error of W itself.
        rows: of data.

    Source: James and Stein 1961, in the form of an F test whose statistic is subtracted instead of compared.
    """
    factor = torch.linalg.cholesky(h.double())
    gain = float((torch.cholesky_solve(linear.double(), factor) * linear).sum())
    if gain <= 0:
        return linear
    by_chance = linear.shape[1] / max(rows, 1) * max(drift - gain, 0)
    return linear * max(1 - by_chance / gain, 0)


def with_held_back(problem: LayerProblem) -> LayerProblem:
    """Return the problem with the statistics of all data, the held-back data included."""
    other = problem.held_back
    if other is None or not other.rows:
        return problem
    count = problem.count + other.count

    def mean(one: Tensor | None, two: Tensor | None) -> Tensor | None:
        return None if one is None or two is None else (problem.count * one + other.count * two) / count

    return replace(
        problem,
        h=problem.g_quantized + other.g_quantized,
        x_quantized=None,
        drifted=None,
        roots=None,
        linear=problem.linear_term() + other.linear_term(),
        drifts=problem.drift() + other.drift(),
        rows=problem.rows + other.rows,
        count=count,
        mean=mean(problem.mean, other.mean),
        mean_quantized=mean(problem.mean_quantized, other.mean_quantized),
        held_back=None,
    )


def keep_nearest(problem: LayerProblem) -> Solution | None:
    """Return the solution for a problem that rounding cannot improve (a frozen encoding, an embedding); else None.

    In an embedding, each weight is an output of its own. Nothing can make up for its error, so nearest is best.
    """
    if problem.layout.kind == "embedding":
        error = _error_of_embedding(problem)
    elif problem.encoding.frozen:
        grid = WeightGrid.of(problem, problem.encoding)
        error = problem.relative_error((grid.nearest(problem.weight.mT) * grid.scale).mT)
    else:
        return None
    note = "its encoding is frozen" if problem.encoding.frozen else "each weight is read by itself: nearest is best"
    return Solution(problem.encoding, None, error, error, note=note)


def _error_of_embedding(problem: LayerProblem) -> float:
    """Return the relative error of the nearest codes, some rows of the table at a time: tables are large."""
    (scale, zero_point), dtype = scales_of_weights(problem, problem.encoding), problem.encoding.dtype
    weight, h, linear, drifts = problem.weight, problem.g_quantized, problem.linear_term(), problem.drift()
    error = energy = 0.0
    step = max(1, ROWS_OF_TABLE // weight[0].numel())
    for rows in (slice(start, start + step) for start in range(0, len(weight), step)):
        codes = (weight[rows] / scale[rows]).round()
        nearest = codes.clamp(dtype.lo - zero_point[rows], dtype.hi - zero_point[rows]) * scale[rows]
        d, drift = nearest - weight[rows], float(drifts[rows].sum())
        error += float(((d * h[rows] + 2 * linear[rows]) * d).sum()) + drift
        energy += float(((weight[rows] * h[rows] - 2 * linear[rows]) * weight[rows]).sum()) + drift
    return max(error, 0.0) / energy if energy > 0 else 0.0


def error_feedback(
    objective: Objective, grid: WeightGrid, *, order: Tensor | None = None, block_size: int = BLOCK
) -> Tensor:
    """Round column by column, while the remaining columns make up for the errors of those before.

    Args:
        objective: to minimize.
        grid: to round to; with the rows of the objective, once or several times.
        order: of the columns, int64 [groups, K]; by falling diagonal where it is None.
        block_size: columns that are rounded one by one before the others are updated by one matrix product.

    Returns:
        Codes, float32 [groups, K, rows].

    Source: Frantar et al. 2023, GPTQ, section 3, as Babai's nearest plane (Chen et al. 2025).
    """
    h = objective.h
    if order is None:
        order = order_by_diagonal(h)
    order = order.flip(-1)[:, :, None]  # rounded from the last to the first, so that the factor is a lower triangle
    scale, lowest, highest = (
        x if _number(x) is not None else x.take_along_dim(order, 1) for x in (grid.scale, grid.lowest, grid.highest)
    )
    # float64: otherwise the error of the factor would decide near-ties of many correlated inputs
    factor = torch.linalg.cholesky(h.take_along_dim(order, 1).take_along_dim(order.mT, 2).double())
    shift = torch.cholesky_solve(objective.linear.take_along_dim(order, 1).double(), factor).float()
    best = objective.weight.take_along_dim(order, 1).sub_(shift)
    if scale.shape[-1] > best.shape[-1]:
        best = best.repeat(1, 1, scale.shape[-1] // best.shape[-1])
    # in place, and let go: of a wide layer these matrices are the largest part of the memory
    slopes = factor.div_(factor.diagonal(dim1=-2, dim2=-1)[:, None, :].clone()).mT.float()
    del factor, shift
    target, miss, codes = best.clone(), torch.empty_like(best), torch.empty_like(best)
    for stop in range(h.shape[-1], 0, -block_size):
        start = max(stop - block_size, 0)
        for i in range(stop - 1, start - 1, -1):
            code = (target[:, i] / scale[:, i]).round_().clamp_(lowest[:, i], highest[:, i])
            codes[:, i] = code
            miss[:, i] = code.mul_(scale[:, i]).sub_(best[:, i])
            target[:, start:i].addcmul_(slopes[:, start:i, i : i + 1], miss[:, i : i + 1], value=-1)
        target[:, :start].baddbmm_(slopes[:, :start, start:stop], miss[:, start:stop], alpha=-1)
    return torch.empty_like(codes).scatter_(1, order.expand_as(codes), codes)


def order_by_diagonal(h: Tensor) -> Tensor:
    """Return the columns by falling diagonal, int64 [groups, K]: "act-order"."""
    return h.diagonal(dim1=-2, dim2=-1).argsort(dim=-1, descending=True, stable=True)


def coordinate_descent(objective: Objective, grid: WeightGrid, codes: Tensor, sweeps: int) -> Tensor:
    """Move each weight in turn to its best grid point, given all others, until no move lowers the error.

    Args:
        objective: to minimize.
        grid: to stay on; with the rows of the objective, once or several times.
        codes: to start from, float32 [groups, K, rows].
        sweeps: over all columns, at most.

    Returns:
        Codes, float32 [groups, K, rows].
    """
    codes, h = codes.clone(), objective.h
    wide = objective.beside(codes.shape[-1] // objective.weight.shape[-1])
    slope = torch.baddbmm(wide.linear, h, codes * grid.scale - wide.weight)
    curvature = h.diagonal(dim1=-2, dim2=-1)[:, :, None] * grid.scale
    # in codes; weights without data have no slope and stay
    pull = torch.where(curvature > 0, -1 / curvature, 0)
    for _ in range(sweeps):
        before = codes.clone()
        for start in range(0, h.shape[-1], BLOCK):
            block = slice(start, start + BLOCK)
            inner, local, old = h[:, block, block], slope[:, block].clone(), before[:, block]
            change = torch.empty_like(local)
            for i in range(inner.shape[-1]):
                at = start + i
                code = torch.addcmul(old[:, i], local[:, i], pull[:, at]).round_()
                codes[:, at] = code.clamp_(grid.lowest[:, at], grid.highest[:, at])
                change[:, i] = code.sub_(old[:, i]).mul_(grid.scale[:, at])
                local[:, i + 1 :].addcmul_(inner[:, i + 1 :, i : i + 1], change[:, i : i + 1])
            slope += h[:, :, block] @ change
        if torch.equal(codes, before):
            break
    return codes


@dataclass(frozen=True)
class Evidence:
    """A problem with the statistics of all data, and the criteria for solutions.

    Attributes:
        data: the problem, on torch, held-back data included.
        judged: the same, without the mean error if the bias absorbs that.
        held_back: the problem with held-back data alone, likewise; None where nothing was held back.
        shifts: whether the bias absorbs the mean error.
    """

    data: LayerProblem
    judged: LayerProblem
    held_back: LayerProblem | None
    shifts: bool

    @classmethod
    def of(cls, problem: LayerProblem, *, shift_bias: bool) -> "Evidence":
        """Return the evidence for a problem on torch; the bias is only shifted where there is one."""
        data, held_back = with_held_back(problem), problem.held_back
        if not (shift_bias and problem.has_bias and data.mean is not None):
            return cls(data, data, held_back, shifts=False)
        return cls(data, data.centered(), held_back and held_back.centered(), shifts=True)

    def worse(self, found: Tensor, plain: Tensor, unit: Tensor | None = None) -> Tensor:
        """Return where a solution has a higher error than another, on all data or on held-back data, [groups, rows].

        Args:
            found: W~, float32 [groups, rows, K].
            plain: another W~.
            unit: int64 [groups, rows]; outputs of one unit are compared by their sum.
        """
        result = torch.zeros(found.shape[:2], dtype=torch.bool, device=found.device)
        for problem in (self.judged, self.held_back):
            if problem is not None:
                gain = problem.errors(plain) - problem.errors(found)
                if unit is not None:
                    gain = torch.zeros(gain.numel(), device=gain.device).index_add_(0, unit.flatten(), gain.flatten())[
                        unit
                    ]
                result |= gain < 0
        return result

    def solution(self, encoding: Encoding, rounded: Tensor, plain: Tensor) -> Solution:
        """Return a rounded weight on an encoding's grid as a solution; `plain` is the weight before."""
        shift = self.data.mean_error(rounded) if self.shifts else None
        before, after = self.data.relative_error(plain), self.judged.relative_error(rounded)
        return Solution(encoding, rounded, before, after, bias_shift=shift)
