"""GPTQ: round column by column, each column making up for the errors of those before it, to any point of the grid."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from qsdk.algorithms.solvers.on_torch import cells_of_weights, on_torch
from qsdk.algorithms.solvers.rounding import (
    BLOCK,
    SIDE_BY_SIDE,
    Evidence,
    Grid,
    Objective,
    by_diagonal,
    descend,
    feedback,
    left_nearest,
)
from qsdk.core.errors import ConfigError
from qsdk.core.layers.layer_problem import LayerProblem, Solution
from qsdk.core.numerics.block_scales import restrict_block_scales, round_up_to_digits
from qsdk.core.numerics.encoding import Encoding

Scales = Literal["search", "fixed"]
SCALES = ("search", "fixed")
#: what the scales are tried at, times what they are; the first wins a tie
FACTORS = (1.0, 1.1, 0.9, 0.8, 0.7, 0.6, 0.5)


def solve(
    problem: LayerProblem,
    *,
    act_order: bool = True,
    block_size: int = BLOCK,
    damping: float | None = None,
    scales: Scales = "search",
    sweeps: int = 1,
    shift_bias: bool = True,
) -> Solution:
    """Round each weight to a point of the grid, for the smallest output error of the layer.

    The error is against the float outputs. An output for which nearest rounding with the scales as they were is better,
    on all data or on what was held back, keeps that; outputs that share a scale are judged together.

    Args:
        problem: with an encoding of its spec's granularity.
        act_order: settle the columns by falling second moment of their inputs, else as they come.
        block_size: columns that are settled one by one before the others hear of them; speed only.
        damping: share of the mean that is added to the diagonal of H; None for `rounding.damping_for`.
        scales: `search` also chooses each output's scales among multiples of what they are, by the error that error
            feedback leaves with them (all blocks of an output by one factor); `fixed` keeps them.
        sweeps: of coordinate descent over the grid points afterwards, at most.
        shift_bias: whether the layer's bias, if there is one, takes up the mean error.

    Returns:
        The rounded weight, every element exactly on the encoding's grid, the encoding, and relative errors.

    Raises:
        ConfigError: the dtype is not an integer, or an option is out of its range.

    Source: Frantar et al. 2023, GPTQ, section 3; the float outputs as target after Nagel et al. 2020, AdaRound,
    section 3.4.
    """
    _require_sensible(problem, block_size, damping, scales, sweeps)
    problem = on_torch(problem)
    fixed, weight = Grid.of(problem, problem.encoding), problem.weight.mT
    plain = (fixed.nearest(weight) * fixed.scale).mT
    left = left_nearest(problem, plain)
    if left is not None:
        return left
    evidence = Evidence.of(problem, shift_bias=shift_bias)
    objective = Objective.of(evidence.judged, damping)
    order = by_diagonal(objective.h)
    order = order if act_order else order.sort(-1).values

    cells = cells_of_weights(problem, problem.encoding)
    factors, grid, codes = _on_grids(
        problem, objective, order, cells, FACTORS if scales == "search" else (1.0,), block_size
    )
    both = Grid.stacked([fixed, grid], 2)
    rounded, found = (descend(objective, both, codes, sweeps) * both.scale).mT.chunk(2, 1)
    rounded = torch.where(evidence.worse(rounded, plain)[..., None], plain, rounded)
    factors[evidence.worse(found, rounded, units_of(cells))] = 1
    encoding = _scaled(problem, factors, cells)
    return evidence.solution(encoding, torch.where((factors != 1)[..., None], found, rounded), plain)


def _require_sensible(problem: LayerProblem, block_size: int, damping: float | None, scales: str, sweeps: int) -> None:
    site = problem.site
    if not problem.spec.dtype.is_integer:
        raise ConfigError(f"{site}: gptq needs an integer grid, not {problem.spec.dtype}; skip the site")
    if damping is not None and damping <= 0:
        raise ConfigError(f"{site}: a damping of {damping} is not positive")
    if scales not in SCALES:
        raise ConfigError(f"unknown scales {scales!r} of gptq; choose one of {', '.join(SCALES)}")
    if block_size < 1 or sweeps < 0:
        raise ConfigError(f"{site}: blocks of {block_size} and {sweeps} sweeps; give at least 1 and 0")


def units_of(cells: Tensor) -> Tensor:
    """Number the sets of outputs that share scales: int64 [groups, rows].

    Args:
        cells: which scale each weight uses, int64 [groups, rows, K].
    """
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


def _on_grids(
    problem: LayerProblem,
    objective: Objective,
    order: Tensor,
    cells: Tensor,
    factors: Sequence[float],
    block_size: int,
) -> tuple[Tensor, Grid, Tensor]:
    """Round by error feedback with the scales as they are, and multiplied by each output's best factor.

    Returns:
        The factors, float32 [groups, rows], the grid that they lead to, and codes: without and with them, beside each
        other along the rows.
    """
    unit = units_of(cells)
    grids = [Grid.of(problem, _scaled(problem, torch.full(unit.shape, f, device=unit.device), cells)) for f in factors]
    codes: list[Tensor] = []
    errors: list[Tensor] = []
    side = max(SIDE_BY_SIDE // objective.weight.numel(), 1)
    for some in (grids[start : start + side] for start in range(0, len(grids), side)):
        beside = Grid.stacked(some, 2)
        rounded = feedback(objective, beside, order=order, block_size=block_size)
        codes += rounded.chunk(len(some), 2)
        errors += objective.beside(len(some))(rounded * beside.scale).chunk(len(some), 1)
    summed = torch.zeros(len(grids), unit.numel(), device=unit.device)
    summed.index_add_(1, unit.flatten(), torch.stack(errors).flatten(1))
    best = summed.argmin(0)[unit]
    chosen = torch.tensor(factors, device=unit.device)[best]
    grid = Grid.of(problem, _scaled(problem, chosen, cells))

    def of_best(tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(tensors)).take_along_dim(best[None, :, None], 0)[0]

    # rows do not hear of each other, unless what their spec can store of a scale depends on all of them
    same = torch.equal(grid.scale, of_best([each.scale for each in grids]))
    found = of_best(codes) if same else feedback(objective, grid, order=order, block_size=block_size)
    return chosen, grid, torch.cat([codes[0], found], 2)


def _scaled(problem: LayerProblem, factors: Tensor, cells: Tensor) -> Encoding:
    """Return the problem's encoding with each output's scales multiplied, confined to what its spec can store."""
    encoding, spec = problem.encoding, problem.spec
    factor = torch.ones(encoding.scale.size, device=factors.device)
    factor[cells] = factors[..., None].expand(cells.shape)
    moved = factor.cpu().numpy().reshape(encoding.scale.shape)
    scale = encoding.scale * moved
    if spec.scale_bits is not None:
        scale = round_up_to_digits(scale, spec.scale_bits)
    return replace(encoding, scale=np.where(moved == 1, encoding.scale, restrict_block_scales(scale, spec)))
