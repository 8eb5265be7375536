"""SeqMSE: the weight ranges that give a layer the smallest output error."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from qsdk.algorithms.layer_losses import AbsoluteLosses, ColumnLosses, Loss, Quadratic, SquaredLosses
from qsdk.algorithms.on_torch import cells_of_weights, on_torch, scales_of_weights
from qsdk.algorithms.range_search import Block, Grids, best_of, least_squares, on_grid
from qsdk.core.block_scales import confined
from qsdk.core.encoding import Encoding
from qsdk.core.errors import ConfigError
from qsdk.core.layer_problem import LayerProblem, Solution

LossName = Literal["mse", "l1", "sqnr"]
LOSSES = ("mse", "l1", "sqnr")
#: Rows of inputs that the absolute error is measured on.
SAMPLES = 1024


def solve(
    problem: LayerProblem,
    *,
    candidates: int = 20,
    loss: LossName = "mse",
    refine: bool = True,
    shift_bias: bool = True,
) -> Solution:
    """Choose each scale among the ranges (min, max) * i / candidates, and the one it has, by the layer's output error.

    Scales of different channels are independent; a shared scale is judged by the sum of what shares it. Blocks of one
    channel are chosen in turn, each given the others, so that the layer's error never rises. Asymmetric ranges are
    searched by a common share first, then at either end. A channel whose error on held-back data does not fall keeps
    the range it had.

    Args:
        problem: with an encoding of its spec's granularity.
        candidates: how many ranges.
        loss: `mse`, the squared error; `sqnr`, the squared error relative to each output's own energy, which differs
            where outputs share a scale; `l1`, the absolute error on samples of the inputs.
        refine: whether to replace each chosen scale by the best one for the codes it leads to, where the codes of
            that scale are better again.
        shift_bias: whether the layer's bias, if there is one, takes up the mean error.

    Returns:
        The encoding, and relative errors; the weight stays.

    Raises:
        ConfigError: the dtype is not an integer, there are no candidates, or the loss is unknown or lacks samples.

    Source: AIMET's sequential MSE (Qualcomm), here in closed form on second moments; the asymmetric objective after
    Nagel et al. 2020, AdaRound, section 3.4, blocks in turn as coordinate descent.
    """
    _require_searchable(problem, candidates, loss)
    problem = on_torch(problem)
    shifts = shift_bias and problem.has_bias and problem.mean is not None
    judged = problem.centered() if shifts else problem
    old = fake_quantize(problem, problem.encoding)
    errors = judged.errors(old)
    before = judged.relative(errors + problem.count * problem.mean_error(old) ** 2 if shifts else errors)
    if problem.encoding.frozen:
        return Solution(problem.encoding, None, before, before, note="its encoding is frozen")
    cells = cells_of_weights(problem, problem.encoding)
    blocks = column_blocks(cells)
    if blocks is None:
        note = "its blocks reach across groups; let the block size divide a group's channels"
        return Solution(problem.encoding, None, before, before, note=note)
    found = _search(judged, cells, blocks, candidates, loss, refine)
    new = fake_quantize(problem, found)
    new_errors = judged.errors(new)
    better = _better(judged, cells, loss, (old, new), (errors, new_errors))
    chosen = torch.where(better[..., None], new, old)
    after = judged.relative(torch.where(better, new_errors, errors))
    shift = _shift(problem, chosen) if shifts else None
    return Solution(_mixed(problem.encoding, found, cells[~better]), None, before, after, bias_shift=shift)


def _require_searchable(problem: LayerProblem, candidates: int, loss: str) -> None:
    if candidates < 1:
        raise ConfigError(f"{candidates} candidates for {problem.site}; give at least 1")
    if loss not in LOSSES:
        raise ConfigError(f"unknown loss {loss!r}; choose one of {', '.join(LOSSES)}")
    if loss == "l1" and problem.samples is None:
        raise ConfigError(f"{problem.site}: the loss l1 needs samples of the layer's inputs")
    if not problem.spec.dtype.is_integer:
        raise ConfigError(f"{problem.site}: seq_mse searches integer grids, not {problem.spec.dtype}; skip the site")


def fake_quantize(problem: LayerProblem, encoding: Encoding) -> Tensor:
    """The weight matrix moved to the nearest point of an encoding's grid, float32 [groups, out_per_group, K]."""
    scale, zero_point = scales_of_weights(problem, encoding)
    return on_grid(problem.weight, scale, zero_point, encoding.dtype.lo, encoding.dtype.hi)


def _search(
    problem: LayerProblem, cells: Tensor, blocks: list[Tensor], candidates: int, loss: LossName, refine: bool
) -> Encoding:
    """Search the blocks of columns in turn, each given the others, from the better of what there is and min-max."""
    grids, spec, encoding = Grids(problem), problem.spec, problem.encoding
    shares = torch.arange(1, candidates + 1) / candidates
    now = [torch.from_numpy(v.reshape(-1)).to(cells.device).float() for v in (encoding.scale, encoding.zero_point)]
    found = [now, *(grids.common(float(share)) for share in shares)]
    scales, zero_points = (torch.stack(each) for each in zip(*found, strict=True))
    start, deviation = _start(problem, cells, scales, zero_points)
    scale, zero_point = scales[start].clone(), zero_points[start].clone()
    losses: ColumnLosses = AbsoluteLosses(problem, deviation) if loss == "l1" else SquaredLosses(problem, deviation)
    importance = _importance(problem) if loss == "sqnr" else None
    for columns in blocks:
        block = Block(problem.weight[..., columns], cells[..., columns[0]], (spec.dtype.lo, spec.dtype.hi), importance)
        own, at = losses.of(columns), block.scales
        chosen, lowest = best_of(block, own, scales[:, at], zero_points[:, at])
        best = scales[chosen, at], zero_points[chosen, at]
        if not spec.symmetric:
            best, lowest = _search_ends(block, own, grids, shares.to(cells.device), chosen, best)
        if refine and isinstance(own, Quadratic) and spec.scales_are_free:
            best = _refined(block, own, *best, lowest)
        scale[at], zero_point[at] = best
        losses.settle(columns, block.deviation(*best))
    shape = encoding.scale.shape
    values = confined(scale.cpu().numpy().reshape(shape), spec), zero_point.int().cpu().numpy().reshape(shape)
    return Encoding(encoding.dtype, *values, encoding.axis, encoding.block_size)


def _start(problem: LayerProblem, cells: Tensor, scales: Tensor, zero_points: Tensor) -> tuple[int, Tensor]:
    """Which of the first and the last grid is better, and the weight's deviation on it."""
    same = torch.equal(scales[0], scales[-1]) and torch.equal(zero_points[0], zero_points[-1])
    lo, hi = problem.spec.dtype.lo, problem.spec.dtype.hi
    tried = {
        index: on_grid(problem.weight, scales[index][cells], zero_points[index][cells], lo, hi)
        for index in ([0] if same else [0, -1])
    }
    start = 0 if same else min(tried, key=lambda index: problem.relative_error(tried[index]))
    return start, tried[start] - problem.weight


def _search_ends(
    block: Block, loss: Loss, grids: Grids, shares: Tensor, chosen: Tensor, best: tuple[Tensor, Tensor]
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Search the lower and then the upper end of asymmetric ranges, the other end as it is."""
    ends = [torch.cat([shares[-1:], shares])[chosen]] * 2
    for end in range(2):
        other = ends[1 - end].expand(len(shares), -1)
        moved = shares[:, None].expand(-1, len(chosen))
        low, high = (moved, other) if end == 0 else (other, moved)
        scales, zero_points = grids.of(block.scales, low, high)
        scales, zero_points = (
            torch.cat([new, old[None]]) for new, old in zip((scales, zero_points), best, strict=True)
        )
        index, lowest = best_of(block, loss, scales, zero_points)
        units = torch.arange(len(index), device=index.device)
        best = scales[index, units], zero_points[index, units]
        ends[end] = torch.where(index < len(shares), shares[index.clamp(max=len(shares) - 1)], ends[end])
    return best, lowest


def _refined(block: Block, loss: Quadratic, scale: Tensor, zero_point: Tensor, lowest: Tensor) -> tuple[Tensor, Tensor]:
    """Replace scales by the best ones for the codes that they lead to, where that lowers the loss."""
    other = least_squares(block, loss, scale, zero_point)
    falls = block.total(loss(block.deviation(other, zero_point))) < lowest
    return torch.where(falls, other, scale), zero_point


def _importance(problem: LayerProblem) -> Tensor:
    """One over each output's energy, [groups, outputs]; 0 where an output has none."""
    energy: Tensor = problem.energy()
    return torch.where(energy > 0, 1 / energy, 0)


def _better(
    problem: LayerProblem, cells: Tensor, loss: LossName, weights: Sequence[Tensor], errors: Sequence[Tensor]
) -> Tensor:
    """The outputs whose loss falls, and on held-back data the squared error: bool [groups, outputs].

    All or none where outputs share scales.
    """
    own = [AbsoluteLosses(problem, weight - problem.weight).now() for weight in weights] if loss == "l1" else errors
    pairs = [own]
    if problem.held_back is not None:
        pairs.append([problem.held_back.errors(weight) for weight in weights])
    better = torch.ones_like(errors[0], dtype=torch.bool)
    shared = len(torch.unique(cells[..., 0])) < better.numel()
    importance = _importance(problem) if loss == "sqnr" and shared else torch.ones_like(errors[0])
    for old, new in pairs:
        better &= (new * importance).sum() < (old * importance).sum() if shared else new < old
    return better


def _shift(problem: LayerProblem, weight: Tensor) -> Tensor:
    """The shift of the bias that takes the mean error away, [groups, outputs]; 0 where held-back data knows better."""
    shift: Tensor = problem.mean_error(weight)
    if problem.held_back is None:
        return shift
    seen = problem.held_back.mean_error(weight)
    return torch.where((seen - shift).abs() < seen.abs(), shift, 0)


def _mixed(old: Encoding, new: Encoding, keep: Tensor) -> Encoding:
    """The new encoding with some of the old one's scales, given as indices into the flattened scale."""
    flat = np.zeros(old.scale.size, np.bool_)
    flat[keep.cpu().numpy()] = True
    mask = flat.reshape(old.scale.shape)
    scale, zero_point = np.where(mask, old.scale, new.scale), np.where(mask, old.zero_point, new.zero_point)
    return replace(new, scale=scale, zero_point=zero_point)


def column_blocks(cells: Tensor) -> list[Tensor] | None:
    """Split the columns of a weight matrix into runs that use one scale per row: int64 index tensors.

    None where the runs differ between groups, as they do when a block reaches from one group into the next.
    """
    _, block = torch.unique(cells[0, 0], return_inverse=True)
    blocks = [(block == index).nonzero()[:, 0] for index in range(int(block.max()) + 1)]
    uniform = all(bool((cells[..., columns] == cells[..., columns[:1]]).all()) for columns in blocks)
    return blocks if uniform else None
