"""Rounding a layer's weights together: error feedback over the columns, then coordinate descent.

The layer's output error as a function of the deviation d = W~ - W is `d H d' + 2 d L'` and a constant, with H the
second moments of the quantized inputs and L the problem's linear term. Everything here is transposed, [groups, K,
rows], so that the column of one input is contiguous, and works on any number of groups and rows at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from qsdk.algorithms.solvers.on_torch import scales_of_weights
from qsdk.core.layers.layer_problem import LayerProblem
from qsdk.core.numerics import affine
from qsdk.core.numerics.dtypes import DType, float4e2m1, int8
from qsdk.core.numerics.encoding import Encoding, storage_type
from qsdk.core.numerics.sum_limits import SumLimit

#: Columns that are rounded one by one before the others are updated by one matrix product.
BLOCK = 128
#: Up to so many weights are rounded side by side in several ways; beyond, that is no faster.
SIDE_BY_SIDE = 1 << 18


@dataclass(frozen=True)
class WeightGrid:
    """The values that each weight may take: `code * scale`, codes being whole numbers or those of a narrow float.

    Attributes:
        scale: float32 [groups, K, rows].
        lowest: smallest code less the zero point, likewise; a view of one number where all are equal.
        highest: largest code, likewise.
        dtype: of the codes; any integer one for whole numbers.
        limit: of the sums of codes of one sign; None for none.
    """

    scale: Tensor
    lowest: Tensor
    highest: Tensor
    dtype: DType = int8
    limit: SumLimit | None = None

    @classmethod
    def of(cls, problem: LayerProblem, encoding: Encoding, limit: SumLimit | None = None) -> "WeightGrid":
        """Return all points of an encoding's grid, for each weight of a problem."""
        scale, zero_point = (v.mT for v in scales_of_weights(problem, encoding))
        scale = scale.contiguous()
        if encoding.symmetric:
            low, high = (scale.new_tensor(end).expand_as(scale) for end in (encoding.dtype.lo, encoding.dtype.hi))
            return cls(scale, low, high, encoding.dtype, limit)
        zero_point = zero_point.contiguous()
        return cls(scale, encoding.dtype.lo - zero_point, encoding.dtype.hi - zero_point, encoding.dtype)

    @classmethod
    def concatenate(cls, grids: Sequence["WeightGrid"], dim: int = 0) -> "WeightGrid":
        """Return grids concatenated along the groups, or side by side along the rows."""
        if len(grids) == 1:
            return grids[0]
        scale = torch.cat([grid.scale for grid in grids], dim)
        low, high = (_concatenated([getattr(g, name) for g in grids], dim, scale) for name in _ENDS)
        return cls(scale, low, high, grids[0].dtype, grids[0].limit)

    def around(self, weight: Tensor) -> "WeightGrid":
        """Return the grid points right below and above each weight, [groups, K, rows]; one where it is on the grid."""
        position = self._within(weight) / self.scale
        if not self.dtype.is_integer:
            return WeightGrid(self.scale, *_around(position, self.dtype), self.dtype)
        # a weight on the grid has no choice, although its quotient may miss the integer by an ulp
        nearest = position.round()
        position = torch.where((position - nearest).abs() <= 2e-7 * nearest.abs(), nearest, position)
        below, above = (codes.clamp(self.lowest, self.highest) for codes in (position.floor(), position.ceil()))
        return WeightGrid(self.scale, below, above, self.dtype, self.limit)

    def nearest(self, weight: Tensor) -> Tensor:
        """Return the codes nearest to a weight, half to even."""
        return rounded_(self._within(weight) / self.scale, self.dtype, self.lowest, self.highest)

    def _within(self, weight: Tensor) -> Tensor:
        """Return a weight whose nearest codes are within the limit of their sums."""
        if self.limit is None:
            return weight
        found: Tensor = self.limit.within(weight.mT, self.scale.mT, self.dtype.lo, self.dtype.hi).mT
        return found


class _Room:
    """The room that codes have within the limit of their sums, while columns get their codes one by one."""

    def __init__(self, limit: SumLimit, columns: Tensor, codes: Tensor) -> None:
        """Start with codes [groups, K, rows]; what is taken then has the order of columns, int64 [groups, K]."""
        self._most, self._tile_of = limit.most, torch.from_numpy(limit.tile_of).to(columns.device)[columns]
        self._used = [limit.sums((sign * codes).clamp(min=0).mT).mT.contiguous() for sign in (1, -1)]

    def take(self, i: int, code: Tensor, instead_of: Tensor | None = None) -> Tensor:
        """Return a column's codes [groups, rows], clipped to the room without their old ones, and note them."""
        at = self._tile_of[:, i, None, None].expand(-1, 1, code.shape[-1])
        old = torch.zeros_like(code) if instead_of is None else instead_of
        above, below = (
            self._most - used.gather(1, at)[:, 0] + (sign * old).clamp(min=0)
            for used, sign in zip(self._used, (1, -1), strict=True)
        )
        code = torch.minimum(torch.maximum(code, -below), above)
        for used, sign in zip(self._used, (1, -1), strict=True):
            used.scatter_add_(1, at, ((sign * code).clamp(min=0) - (sign * old).clamp(min=0))[:, None])
        return code


_ENDS = ("lowest", "highest")


def rounded_(position: Tensor, dtype: DType, lowest: Tensor, highest: Tensor) -> Tensor:
    """Return the codes nearest to positions within two ends, in place; half to even."""
    position.clamp_(lowest, highest)
    if dtype.is_integer:
        return position.round_()
    if dtype == float4e2m1:
        return position.copy_(affine.round_to_float4(position.abs()) * position.sign())
    return position.copy_(position.to(_FLOAT8[dtype.name]))


_FLOAT8 = MappingProxyType(
    {
        "float8e4m3fn": torch.float8_e4m3fn,
        "float8e4m3fnuz": torch.float8_e4m3fnuz,
        "float8e5m2": torch.float8_e5m2,
        "float8e5m2fnuz": torch.float8_e5m2fnuz,
    }
)


def _around(position: Tensor, dtype: DType) -> tuple[Tensor, Tensor]:
    """Return the values of a narrow float right below and above positions, the same one where that is one of them."""
    values = np.unique(np.arange(1 << dtype.bits, dtype=np.uint8).view(storage_type(dtype)).astype(np.float32))
    levels = torch.from_numpy(values[np.isfinite(values)]).to(position.device)
    inside = position.contiguous().clamp(levels[0], levels[-1])
    at = torch.searchsorted(levels, inside, right=True) - 1
    # a weight on the grid has no choice, although its quotient may miss the value by an ulp
    after = (at + 1).clamp_(max=len(levels) - 1)
    below = torch.where((levels[after] - inside).abs() <= 2e-7 * inside.abs(), levels[after], levels[at])
    above = torch.where((inside - below).abs() <= 2e-7 * inside.abs(), below, levels[after])
    return below, above


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
        optimum: the weight with the smallest error, on no grid, likewise.
    """

    weight: Tensor
    h: Tensor
    linear: Tensor
    optimum: Tensor

    @classmethod
    def of(cls, problem: LayerProblem, damping: float | None) -> "Objective":
        """Return the objective of a problem on torch, made robust against unseen data; see `damp` and `by_chance`."""
        h = damp(problem.g_quantized, damping_for(problem) if damping is None else damping, noise_in(problem))
        weight, linear = (x.mT.contiguous() for x in (problem.weight, problem.linear_term))
        return cls.of_terms(weight, h, linear, drift=float(problem.drift.sum()), rows=problem.rows)

    @classmethod
    def of_terms(
        cls, weight: Tensor, h: Tensor, linear: Tensor, *, drift: float = 0.0, rows: int | None = None
    ) -> "Objective":
        """Return the objective of these terms (see its attributes); `drift` is the error of W itself.

        With a number of rows of data, the share of the linear term that is due to chance is taken off (`by_chance`).
        """
        if not linear.any():
            return cls(weight, h, linear, weight)
        # float64: otherwise the error of the factor would decide near-ties of many correlated inputs
        pull = torch.cholesky_solve(linear.double(), torch.linalg.cholesky(h.double())).float()
        if rows is not None:
            kept = 1 - by_chance(float((pull.double() * linear).sum()), drift, linear.shape[1] / max(rows, 1))
            linear, pull = linear * kept, pull.mul_(kept)
        return cls(weight, h, linear, weight - pull)

    def __call__(self, rounded: Tensor) -> Tensor:
        """Return the error per row, [groups, rows]."""
        d = rounded - self.weight
        return (d * (self.h @ d + 2 * self.linear)).sum(1)

    def beside(self, count: int) -> "Objective":
        """Return the objective repeated along the rows."""
        if count == 1:
            return self
        weight, linear, optimum = (x.repeat(1, 1, count) for x in (self.weight, self.linear, self.optimum))
        return Objective(weight, self.h, linear, optimum)

    def repeated(self, count: int) -> "Objective":
        """Return the objective repeated along the groups."""
        return Objective(*(x.repeat(count, 1, 1) for x in (self.weight, self.h, self.linear, self.optimum)))


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


def by_chance(gain: float, drift: float, inputs_per_row: float) -> float:
    """Return the share of the linear term's gain that is due to chance, 0 to 1.

    A regression of the drift of the quantized inputs on K inputs lowers the error on its own rows even without any true
    relation, by K over the number of rows times the remaining error.

    Source: James and Stein 1961, in the form of an F test whose statistic is subtracted instead of compared.
    """
    return min(inputs_per_row * max(drift - gain, 0) / gain, 1.0) if gain > 0 else 0.0


@dataclass(frozen=True)
class ErrorFeedback:
    """An objective whose columns are rounded in a given order, with the factors of its second moments.

    With `P H P' = F F'`, F a lower triangle and P the reversed order, the error of W~ is the sum over the columns of
    `F_ii^2 (w~_i - t_i)^2`, where `t_i` is the best value of column i given those that were rounded before it. Each
    column is rounded to its target.

    Attributes:
        rows: of the terms below, seen as [groups * K, rows], from the last that is rounded to the first; int64.
        slopes: of the targets in the columns rounded before, float32 [groups, K, K].
        pivots: `F_ii^2`, float32 [groups, K, 1].
        best: the optimum of the objective in this order, float32 [groups, K, rows].

    Source: Frantar et al. 2023, GPTQ, section 3, as Babai's nearest plane (Chen et al. 2025).
    """

    rows: Tensor
    slopes: Tensor
    pivots: Tensor
    best: Tensor

    @classmethod
    def of(cls, objective: Objective, order: Tensor) -> "ErrorFeedback":
        """Return the factors of an objective for an order of its columns, int64 [groups, K]."""
        groups, columns = order.shape
        rows = (order.flip(-1) + columns * torch.arange(groups, device=order.device)[:, None]).flatten()
        # float64 for the same reason as in `Objective.of_terms`
        factor = torch.linalg.cholesky(_selected(_selected(objective.h, rows).mT, rows).double())
        diagonal = factor.diagonal(dim1=-2, dim2=-1)[:, :, None].clone()
        # in place: of a wide layer these matrices are the largest part of the memory
        slopes = factor.div_(diagonal.mT).mT.float()
        return cls(rows, slopes, diagonal.square_().float(), _selected(objective.optimum, rows))

    def round(self, grid: WeightGrid, block_size: int = BLOCK) -> tuple[Tensor, Tensor]:
        """Round column by column, while the remaining columns make up for the errors of those before.

        The rest is updated by one matrix product for each `block_size` columns. Returned are codes, float32 [groups, K,
        rows], and the error of each row less that of the optimum, [groups, rows]; a grid may have the objective's rows
        several times.
        """
        scale, lowest, highest = (
            x if _number(x) is not None else _selected(x, self.rows) for x in (grid.scale, grid.lowest, grid.highest)
        )
        best, slopes = self.best, self.slopes
        if scale.shape[-1] > best.shape[-1]:
            best = best.repeat(1, 1, scale.shape[-1] // best.shape[-1])
        target, miss, codes = best.clone(), torch.empty_like(best), torch.empty_like(best)
        errors = best.new_zeros(len(best), best.shape[-1])
        room, above, below = self._room(grid, best)
        for stop in range(best.shape[1], 0, -block_size):
            start = max(stop - block_size, 0)
            for i in range(stop - 1, start - 1, -1):
                wanted = target[:, i]
                if room is not None:
                    wanted = wanted - wanted.clamp(-below[:, i], above[:, i])
                code = rounded_(wanted / scale[:, i], grid.dtype, lowest[:, i], highest[:, i])
                codes[:, i] = code = code if room is None else room.take(i, code)
                value = code.mul_(scale[:, i])
                errors.addcmul_((value - target[:, i]).square_(), self.pivots[:, i])
                miss[:, i] = value.sub_(best[:, i])
                target[:, start:i].addcmul_(slopes[:, start:i, i : i + 1], miss[:, i : i + 1], value=-1)
            target[:, :start].baddbmm_(slopes[:, :start, start:stop], miss[:, start:stop], alpha=-1)
        in_order = torch.empty_like(codes)
        in_order.flatten(0, 1).index_copy_(0, self.rows, codes.flatten(0, 1))
        return in_order, errors

    def _room(self, grid: WeightGrid, best: Tensor) -> tuple["_Room | None", Tensor, Tensor]:
        """Return the room of codes, and what weights lose so that it lasts for all columns, in their order.

        The thresholds are those of the optimum (Colbert et al. 2024, AXE, section 3).
        """
        limit, columns = grid.limit, self.rows.reshape(best.shape[:2]) % best.shape[1]
        if limit is None:
            return None, best, best
        in_order = torch.empty_like(best)
        in_order.flatten(0, 1).index_copy_(0, self.rows, best.flatten(0, 1))
        lost = limit.thresholds(in_order.mT, grid.scale.mT, grid.dtype.lo, grid.dtype.hi)
        above, below = (_selected(x[..., limit.tile_of].mT.contiguous(), self.rows) for x in lost)
        return _Room(limit, columns, torch.zeros_like(best)), above, below


def _selected(x: Tensor, rows: Tensor) -> Tensor:
    """Return the rows of each group of a tensor [groups, K, rows] in another order; `rows` counts through all groups.

    Whole rows are copied, which takes a fraction of the time of `take_along_dim`.
    """
    return x.flatten(0, 1).index_select(0, rows).reshape(x.shape)


def order_by_diagonal(h: Tensor) -> Tensor:
    """Return the columns by falling diagonal, int64 [groups, K]: "act-order"."""
    return h.diagonal(dim1=-2, dim2=-1).argsort(dim=-1, descending=True, stable=True)


def coordinate_descent(objective: Objective, grid: WeightGrid, codes: Tensor, sweeps: int) -> Tensor:
    """Move each weight in turn to its best grid point, given all others, until no move lowers the error.

    From codes to codes, float32 [groups, K, rows], in so many sweeps over all columns at most. A grid may have the rows
    of the objective several times.
    """
    codes, h = codes.clone(), objective.h
    wide = objective.beside(codes.shape[-1] // objective.weight.shape[-1])
    slope = torch.baddbmm(wide.linear, h, codes * grid.scale - wide.weight)
    curvature = h.diagonal(dim1=-2, dim2=-1)[:, :, None] * grid.scale
    # in codes; weights without data have no slope and stay
    pull = torch.where(curvature > 0, -1 / curvature, 0)
    columns = torch.arange(h.shape[-1], device=h.device).expand(len(h), -1)
    room = None if grid.limit is None else _Room(grid.limit, columns, codes)
    for sweep in range(sweeps):
        before = codes.clone()
        for start in range(0, h.shape[-1], BLOCK):
            block = slice(start, start + BLOCK)
            inner, local, old = h[:, block, block], slope[:, block].clone(), before[:, block]
            change = torch.empty_like(local)
            for i in range(inner.shape[-1]):
                at = start + i
                code = torch.addcmul(old[:, i], local[:, i], pull[:, at])
                code = rounded_(code, grid.dtype, grid.lowest[:, at], grid.highest[:, at])
                code = code if room is None else room.take(at, code, old[:, i])
                codes[:, at] = code
                change[:, i] = code.sub_(old[:, i]).mul_(grid.scale[:, at])
                local[:, i + 1 :].addcmul_(inner[:, i + 1 :, i : i + 1], change[:, i : i + 1])
            left = slice(0 if sweep < sweeps - 1 else start + BLOCK, None)  # nothing reads the others any more
            slope[:, left] += h[:, left, block] @ change
        if torch.equal(codes, before):
            break
    return codes
