"""GPTQ: round column by column, each column making up for the errors of those before it, to any point of the grid."""

from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from qsdk.algorithms.on_torch import cells_of_weights, on_torch
from qsdk.algorithms.rounding import BLOCK, SIDE_BY_SIDE, Evidence, Grid, Objective, by_diagonal, descend, feedback
from qsdk.core.block_scales import confined, shortened
from qsdk.core.encoding import Encoding
from qsdk.core.errors import ConfigError
from qsdk.core.layer_problem import LayerProblem, Solution

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
    if problem.encoding.frozen:
        error = problem.relative_error(plain)
        return Solution(problem.encoding, None, error, error, note="its encoding is frozen")
    evidence = Evidence.of(problem, shift_bias=shift_bias)
    objective = Objective.of(evidence.judged, damping)
    order = by_diagonal(objective.h)
    order = order if act_order else order.sort(-1).values

    def rounded_on(grid: Grid) -> Tensor:
        codes = feedback(objective, grid, order=order, block_size=block_size)
        return (descend(objective, grid, codes, sweeps) * grid.scale).mT

    rounded = rounded_on(fixed)
    rounded = torch.where(evidence.worse(rounded, plain)[..., None], plain, rounded)
    if scales == "fixed":
        return evidence.solution(problem.encoding, rounded, plain)
    cells = cells_of_weights(problem, problem.encoding)
    factors = _factors(problem, objective, order, cells, block_size)
    found = rounded_on(Grid.of(problem, _scaled(problem, factors, cells)))
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


def _factors(problem: LayerProblem, objective: Objective, order: Tensor, cells: Tensor, block_size: int) -> Tensor:
    """What each output's scales are best multiplied with, given error feedback: float32 [groups, rows]."""
    unit = units_of(cells)
    grids = [Grid.of(problem, _scaled(problem, torch.full(unit.shape, f, device=unit.device), cells)) for f in FACTORS]
    errors: list[Tensor] = []
    side = max(SIDE_BY_SIDE // objective.weight.numel(), 1)
    for some in (grids[start : start + side] for start in range(0, len(grids), side)):
        several, grid = objective.repeated(len(some)), Grid.stacked(some)
        codes = feedback(several, grid, order=order.repeat(len(some), 1), block_size=block_size)
        errors += several(codes * grid.scale).chunk(len(some))
    summed = torch.zeros(len(grids), unit.numel(), device=unit.device)
    summed.index_add_(1, unit.flatten(), torch.stack(errors).flatten(1))
    return torch.tensor(FACTORS, device=unit.device)[summed.argmin(0)][unit]


def _scaled(problem: LayerProblem, factors: Tensor, cells: Tensor) -> Encoding:
    """The problem's encoding with each output's scales multiplied, confined to what its spec can store."""
    encoding, spec = problem.encoding, problem.spec
    factor = torch.ones(encoding.scale.size, device=factors.device)
    factor[cells] = factors[..., None].expand(cells.shape)
    moved = factor.cpu().numpy().reshape(encoding.scale.shape)
    scale = encoding.scale * moved
    if spec.scale_bits is not None:
        scale = shortened(scale, spec.scale_bits)
    return replace(encoding, scale=np.where(moved == 1, encoding.scale, confined(scale, spec)))
