"""GPTQ: round column by column to any point of the grid; later columns make up for the error of earlier ones."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from qsdk.algorithms.solvers.heldout_check import HeldoutCheck, keep_nearest
from qsdk.algorithms.solvers.on_torch import cells_of_weights
from qsdk.algorithms.solvers.output_chunks import solve_in_chunks
from qsdk.algorithms.solvers.rounding import (
    BLOCK,
    SIDE_BY_SIDE,
    ErrorFeedback,
    Objective,
    WeightGrid,
    coordinate_descent,
    order_by_diagonal,
)
from qsdk.core.errors import ConfigError
from qsdk.core.layers.accumulators import fitted_encoding, limit_of
from qsdk.core.layers.layer_problem import LayerProblem, Solution
from qsdk.core.numerics.block_scales import changed_block_scales, round_up_to_digits
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.spec import PerBlock
from qsdk.core.numerics.sum_limits import SumLimit

Scales = Literal["search", "fixed"]
SCALES = ("search", "fixed")
#: factors of the scales to try; the first wins a tie
FACTORS = (1.0, 1.1, 0.9, 0.8, 0.7, 0.6, 0.5)
#: more of them beside accumulators of few bits, whose room may take larger scales
LARGER = (1.25, 1.5)
#: times that scales of blocks are fitted to codes
REFITS = 2
#: numbers of the systems that are solved at a time: of wide layers in small blocks, all would not fit in memory
SYSTEMS = 1 << 22


def solve(
    problem: LayerProblem,
    *,
    act_order: bool = True,
    block_size: int = BLOCK,
    damping: float | None = None,
    scales: Scales = "search",
    sweeps: int = 1,
    shift_bias: bool = True,
    accumulator_bits: int | None = None,
    accumulator_tile: int | None = None,
) -> Solution:
    """Round each weight to a point of the grid, for the smallest output error of the layer.

    The error is against the float outputs. An output for which nearest rounding with the old scales is better, on all
    data or on held-back data, keeps that; outputs that share a scale are compared together.

    Args:
        problem: with an encoding of its spec's granularity.
        act_order: round the columns by falling second moment of their inputs, else in their own order.
        block_size: columns that are rounded one by one before the others are updated; affects speed only.
        damping: share of the mean that is added to the diagonal of H; None for `rounding.damping_for`.
        scales: `search` also multiplies each output's scales by the best of some factors, by the error that remains
            after error feedback (one factor for all blocks of an output), and then gives each block the scale that is
            best for its codes; `fixed` keeps them.
        sweeps: of coordinate descent over the grid points afterwards, at most.
        shift_bias: whether the layer's bias, if there is one, absorbs the mean error.
        accumulator_bits: of the signed accumulator that no sum of products leaves; None for any.
        accumulator_tile: products that it adds up; None for all of an output.

    Returns:
        The rounded weight, every element exactly on the encoding's grid, the encoding, and relative errors.

    Source: Frantar et al. 2023, GPTQ, section 3; the float outputs as target after Nagel et al. 2020, AdaRound,
    section 3.4; accumulators of few bits after Colbert et al. 2024, AXE.
    """
    _require_options(problem, block_size, damping, scales, sweeps)
    factors = FACTORS if scales == "search" else (1.0,)
    options: dict[str, Any] = {"act_order": act_order, "damping": damping, "shift_bias": shift_bias}
    limit = _limit_of(problem, accumulator_bits, accumulator_tile)
    solver = partial(_solve, tried=factors, block_size=block_size, sweeps=sweeps, limit=limit, **options)
    return solve_in_chunks(problem, solver)


def _limit_of(problem: LayerProblem, bits: int | None, tile: int | None) -> SumLimit | None:
    if bits is not None:
        return limit_of(problem.site, problem.spec, problem.layout, problem.input_steps, bits, tile)
    return exact_limit(problem)


def exact_limit(problem: LayerProblem) -> SumLimit | None:
    """Return the limit within which kernels add products of a problem's codes exactly; None where they always do."""
    spec, plain = problem.spec, problem.spec.symmetric and not isinstance(problem.spec.granularity, PerBlock)
    if spec.dtype.exact_sums and plain:  # kernels add pairs of products with bytes in 16 bits
        return limit_of(problem.site, spec, problem.layout, 255, 16, 2)
    return None


def _solve(
    problem: LayerProblem,
    *,
    limit: SumLimit | None,
    tried: Sequence[float],
    act_order: bool,
    block_size: int,
    damping: float | None,
    sweeps: int,
    shift_bias: bool,
) -> Solution:
    """Solve a problem on torch; `tried` are the factors of the scales, for the rest see `solve`."""
    if (left := keep_nearest(problem)) is not None:
        return left
    if limit is not None:
        weight = problem.weight.cpu().numpy()
        fitted = fitted_encoding(problem.encoding, weight, problem.layout, problem.spec, limit)
        problem, tried = replace(problem, encoding=fitted), (*tried, *LARGER[: len(tried) - 1])
    check = HeldoutCheck.of(problem, shift_bias=shift_bias)
    objective = Objective.of(check.judged, damping)
    order = order_by_diagonal(objective.h)
    order = order if act_order else order.sort(-1).values

    cells = cells_of_weights(problem, problem.encoding)
    factors, grid, codes = _search_scales(problem, ErrorFeedback.of(objective, order), cells, tried, block_size, limit)
    fixed = WeightGrid.of(problem, problem.encoding, limit)
    rounded, result = _descend(objective, (fixed, grid), codes, sweeps)
    if len(tried) > 1 and limit is None and isinstance(problem.spec.granularity, PerBlock):
        factors, result = _refit_scales(problem, objective, cells, factors, result)
    plain = (fixed.nearest(objective.weight) * fixed.scale).mT
    errors, errors_of_result, errors_of_plain = (check.errors(found) for found in (rounded, result, plain))
    worse = errors.worse(errors_of_plain)
    rounded, errors = torch.where(worse[..., None], plain, rounded), errors_of_plain.where(worse, errors)
    factors[errors_of_result.worse(errors, units_of(cells))] = 1
    scaled, encoding = (factors != 1).any(-1), _scale_encoding(problem, factors, cells)
    rounded, errors = torch.where(scaled[..., None], result, rounded), errors_of_result.where(scaled, errors)
    return check.solution(encoding, rounded, plain, (errors, errors_of_plain))


def _descend(
    objective: Objective, grids: Sequence[WeightGrid], codes: Sequence[Tensor], sweeps: int
) -> tuple[Tensor, Tensor]:
    """Return W~ of both grids after coordinate descent, [groups, rows, K], side by side where that is faster."""
    if 2 * objective.weight.numel() <= SIDE_BY_SIDE:
        both, start = WeightGrid.concatenate(grids, 2), torch.cat(list(codes), 2)
        one, other = coordinate_descent(objective, both, start, sweeps).mul_(both.scale).mT.chunk(2, 1)
        return one, other
    one, other = (
        coordinate_descent(objective, grid, own, sweeps).mul_(grid.scale).mT
        for grid, own in zip(grids, codes, strict=True)
    )
    return one, other


def _refit_scales(
    problem: LayerProblem, objective: Objective, cells: Tensor, factors: Tensor, rounded: Tensor
) -> tuple[Tensor, Tensor]:
    """Return factors and W~ where the scales of blocks are the best ones for the codes, and these for the scales.

    Codes C of an output, a column for each block, have their least error with the scales s of `C H C' s = C (H W - L)`.
    """
    block: Tensor = torch.unique(cells[0, 0], return_inverse=True)[1]
    if not block.any() or int(units_of(cells).max()) + 1 < cells[..., 0].numel():  # one scale, or outputs share scales
        return factors, rounded
    wanted, least = objective.h @ objective.weight - objective.linear, objective(rounded.mT)
    for _ in range(REFITS):
        grid = WeightGrid.of(problem, _scale_encoding(problem, factors, cells))
        codes = grid.nearest(rounded.mT)
        best = _scales_for(objective.h, wanted, codes, grid.scale, block)
        # in steps of 1/1024: sums in another order, as in chunks of outputs, give the same
        tried = factors * (best / grid.scale).clamp_(0.5, 2).mul_(1024).round_().div_(1024).mT
        grid = WeightGrid.of(problem, _scale_encoding(problem, tried, cells))
        found = coordinate_descent(objective, grid, codes, 1).mul_(grid.scale)
        errors = objective(found)
        better = (errors < least)[..., None]
        factors, rounded = torch.where(better, tried, factors), torch.where(better, found.mT, rounded)
        least = torch.minimum(errors, least)
    grid = WeightGrid.of(problem, _scale_encoding(problem, factors, cells))  # scales may be stored beside a common one
    return factors, (grid.nearest(rounded.mT) * grid.scale).mT


def _scales_for(h: Tensor, wanted: Tensor, codes: Tensor, scale: Tensor, block: Tensor) -> Tensor:
    """Return the best scale of each weight, [groups, K, rows], near the old ones; `block` is that of each input."""
    count = int(block.max()) + 1
    first = (block == torch.arange(count, device=block.device)[:, None]).int().argmax(1)

    def summed(x: Tensor) -> Tensor:
        return x.new_zeros(len(x), count, x.shape[-1]).index_add_(1, block, x)

    def solved(rows: slice) -> Tensor:
        own, old = codes[..., rows], scale[:, first, rows].mT
        products = [summed(h[:, :, block == at] @ own[:, block == at] * own) for at in range(count)]
        matrix = torch.stack(products, -1).permute(0, 2, 1, 3).double()  # [groups, rows, blocks, blocks]
        diagonal = matrix.diagonal(dim1=-2, dim2=-1)
        kept = torch.where(diagonal > 0, 1e-3 * diagonal, 1)  # of a block of zeros, its scale
        diagonal.add_(kept)
        right = summed(wanted[..., rows] * own).mT + kept * old
        return torch.cholesky_solve(right[..., None], torch.linalg.cholesky(matrix))[..., 0].float()

    step = max(SYSTEMS // count**2, 1)
    found = [solved(slice(start, start + step)) for start in range(0, codes.shape[-1], step)]
    return torch.cat(found, 1).mT[:, block]


def _require_options(problem: LayerProblem, block_size: int, damping: float | None, scales: str, sweeps: int) -> None:
    site = problem.site
    if damping is not None and damping <= 0:
        raise ConfigError(f"{site}: a damping of {damping} is not positive")
    if scales not in SCALES:
        raise ConfigError(f"unknown scales {scales!r} of gptq; choose one of {', '.join(SCALES)}")
    if block_size < 1 or sweeps < 0:
        raise ConfigError(f"{site}: blocks of {block_size} and {sweeps} sweeps; give at least 1 and 0")


def units_of(cells: Tensor) -> Tensor:
    """Return a number for each output, equal for outputs that share scales: int64 [groups, rows]."""
    flat = cells.flatten(0, 1)
    unit = flat.amin(-1)
    while True:
        lowest = torch.full((int(flat.max()) + 1,), len(flat), device=flat.device).long() + int(flat.max())
        lowest.scatter_reduce_(0, flat.flatten(), unit[:, None].expand_as(flat).flatten(), "amin")
        joined = lowest[flat].amin(-1)
        if torch.equal(joined, unit):
            numbers: Tensor = torch.unique(unit, return_inverse=True)[1]
            return numbers.reshape(cells.shape[:2])
        unit = joined


def _search_scales(
    problem: LayerProblem,
    feedback: ErrorFeedback,
    cells: Tensor,
    factors: Sequence[float],
    block_size: int,
    limit: SumLimit | None,
) -> tuple[Tensor, WeightGrid, tuple[Tensor, Tensor]]:
    """Round by error feedback with the old scales, and with those multiplied by each output's best factor.

    Returns:
        The factors, float32 [groups, rows], the resulting grid, and the codes without and with them.
    """
    unit = units_of(cells)

    def grid_of(factor: float) -> WeightGrid:
        scaled = torch.full(cells.shape, factor, device=unit.device)
        return WeightGrid.of(problem, _scale_encoding(problem, scaled, cells), limit)

    search, first = _Search(unit), None
    side = max(SIDE_BY_SIDE // feedback.best.numel(), 1)
    for some in (factors[start : start + side] for start in range(0, len(factors), side)):
        grids = [grid_of(factor) for factor in some]
        codes, errors = (
            parts.chunk(len(some), -1) for parts in feedback.round(WeightGrid.concatenate(grids, 2), block_size)
        )
        first = codes[0] if first is None else first
        for found in zip(some, grids, codes, errors, strict=True):
            search.add(*found)
    assert first is not None
    factors_of_weights = search.factors[..., None].repeat(1, 1, cells.shape[-1])
    grid = WeightGrid.of(problem, _scale_encoding(problem, factors_of_weights, cells), limit)
    # rows are independent, unless the scales that their spec can store depend on all of them
    same = torch.equal(grid.scale, search.scale)
    result = search.codes if same else feedback.round(grid, block_size)[0]
    return factors_of_weights, grid, (first, result)


class _Search:
    """The best factor so far of each unit of outputs, with its scales and codes.

    Attributes:
        factors: float32 [groups, rows].
        scale: of each weight, float32 [groups, K, rows].
        codes: likewise.
    """

    def __init__(self, unit: Tensor) -> None:
        self.unit = unit
        self.factors = torch.ones(unit.shape, device=unit.device)
        self.scale = self.codes = torch.empty(0)
        self._lowest: Tensor | None = None

    def add(self, factor: float, grid: WeightGrid, codes: Tensor, errors: Tensor) -> None:
        """Keep a factor where the error of a unit, the sum over its outputs, is lower than with those before."""
        summed = torch.zeros(self.unit.numel(), device=errors.device)
        summed.index_add_(0, self.unit.flatten(), errors.flatten())
        if self._lowest is None:
            self._lowest, self.scale, self.codes = summed, grid.scale, codes
            self.factors.fill_(factor)
            return
        better = (summed < self._lowest)[self.unit]
        self._lowest = torch.minimum(summed, self._lowest)
        self.factors[better] = factor
        self.scale = torch.where(better[:, None], grid.scale, self.scale)
        self.codes = torch.where(better[:, None], codes, self.codes)


def _scale_encoding(problem: LayerProblem, factors: Tensor, cells: Tensor) -> Encoding:
    """Return the problem's encoding with each output's scales multiplied, restricted to what its spec can store."""
    encoding, spec = problem.encoding, problem.spec
    factor = torch.ones(encoding.scale.size, device=factors.device)
    factor[cells] = factors
    moved = factor.cpu().numpy().reshape(encoding.scale.shape)
    scale = encoding.scale * moved
    if spec.scale_bits is not None:
        scale = round_up_to_digits(scale, spec.scale_bits)
    return replace(encoding, scale=np.where(moved == 1, encoding.scale, changed_block_scales(encoding, scale, spec)))
