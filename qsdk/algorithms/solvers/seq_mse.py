"""SeqMSE: choose the weight ranges with the smallest output error of a layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from qsdk.algorithms.solvers.on_torch import cells_of_weights, on_torch, one_thread_for, scales_of_weights
from qsdk.algorithms.solvers.outputs import SampledOutputs
from qsdk.algorithms.solvers.range_search import (
    AbsoluteLosses,
    Block,
    Columns,
    Grids,
    Loss,
    Quadratic,
    ScaleChoice,
    SquaredLosses,
    best_of,
    least_squares,
    on_grid,
)
from qsdk.algorithms.solvers.rounding import WeightGrid
from qsdk.core.errors import ConfigError
from qsdk.core.layers.layer_problem import LayerProblem, Solution
from qsdk.core.numerics.block_scales import restrict_block_scales
from qsdk.core.numerics.encoding import Encoding

LossName = Literal["mse", "l1", "sqnr"]
LOSSES = ("mse", "l1", "sqnr")
#: Upper bound of the weights of an embedding table that are searched, where all share one range.
TABLE = 1 << 19
#: Rows of inputs for the absolute error, and for means behind activation functions.
SAMPLES = 1024
#: Rows per input for the squared error: few are enough, since scales are far fewer than weights.
ROWS = 2
ACROSS_GROUPS = "its blocks reach across groups; let the block size divide a group's channels"


def solve(
    problem: LayerProblem,
    *,
    candidates: int = 20,
    loss: LossName = "mse",
    refine: bool = True,
    shift_bias: bool = True,
) -> Solution:
    """Choose each scale among the ranges (min, max) * i / candidates and its present one, by the layer's output error.

    Scales of different channels are independent; a shared scale is judged by the sum of the errors that it affects.
    Blocks of one channel are chosen in turn, with the others fixed, so that the layer's error never rises. Asymmetric
    ranges are searched by a common share first, then at either end. A channel whose error on held-back data does not
    fall keeps its old range.

    Args:
        problem: with an encoding of its spec's granularity.
        candidates: number of ranges.
        loss: `mse`, the squared error; `sqnr`, the squared error relative to each output's own energy, which differs
            where outputs share a scale; `l1`, the absolute error on samples of the inputs.
        refine: whether to replace each chosen scale by the best one for its codes, where the codes of that scale are
            better again.
        shift_bias: whether the layer's bias, if there is one, absorbs the mean error: that behind the layer's
            activation function, where it is known and the problem has samples.

    Returns:
        The encoding, and relative errors (then behind the function as well); the weight stays.

    Source: AIMET's sequential MSE (Qualcomm), here in closed form on second moments; the asymmetric objective after
    Nagel et al. 2020, AdaRound, section 3.4, blocks in turn as coordinate descent.
    """
    _require_searchable(problem, candidates, loss)
    problem = on_torch(problem)
    table = problem.layout.kind == "embedding" and problem.encoding.scale.size == 1
    if table and problem.weight.numel() > TABLE:
        return _of_large_table(problem, candidates=candidates, loss=loss, refine=refine)
    shifts = shift_bias and problem.bias is not None and problem.mean is not None
    behind = shifts and problem.activation is not None and problem.samples is not None
    judged = problem.centered() if shifts and not behind else problem
    old = fake_quantize(problem, problem.encoding)
    cells = cells_of_weights(problem, problem.encoding)
    blocks = column_blocks(cells)
    note = "its encoding is frozen" if problem.encoding.frozen else ACROSS_GROUPS if blocks is None else ""
    if not problem.spec.dtype.is_integer:
        note = note or f"the scales of integers are searched, not those of {problem.spec.dtype}"
    result = None if note else _search(judged, old, cells, blocks or [], candidates, loss, refine)
    errors = judged.errors(old) if result is None else result.errors_before
    if result is None:
        before = _before(problem, judged, old, errors)
        return Solution(problem.encoding, None, before, before, note=note)
    better = _better(judged, cells, loss, (old, result.weight), (errors, result.errors))
    encoding = result.encoding if better.all() else merge_encodings(problem.encoding, result.encoding, cells[~better])
    new = result.weight if better.all() else torch.where(better[..., None], result.weight, old)
    if behind:
        return _shifted_behind(problem, encoding, old, new)
    before = _before(problem, judged, old, errors)
    after = judged.relative(torch.where(better, result.errors, errors))
    return Solution(encoding, None, before, after, bias_shift=_shift(problem, new) if shifts else None)


def _before(problem: LayerProblem, judged: LayerProblem, old: Tensor, errors: Tensor) -> float:
    """Return the relative error before, from the errors of the judged problem, which may lack those of the mean."""
    centered = judged is not problem
    result: float = judged.relative(errors + problem.count * problem.mean_error(old) ** 2 if centered else errors)
    return result


def _shifted_behind(problem: LayerProblem, encoding: Encoding, old: Tensor, new: Tensor) -> Solution:
    """Return a new encoding with the shift of the bias that restores the mean behind the activation function.

    To restore the mean in front of it would raise outputs that the function clips, and leave fewer of them above 0. The
    errors are those behind the function, on samples.
    """
    outputs = SampledOutputs.of(problem)
    before = outputs.relative(outputs.errors(outputs.given(old)))
    shift, errors = outputs.corrected(outputs.given(new))
    return Solution(encoding, None, before, outputs.relative(errors), bias_shift=shift)


def _of_large_table(problem: LayerProblem, *, candidates: int, loss: LossName, refine: bool) -> Solution:
    """Search the one range of an embedding table on some of its rows.

    Rows are sorted by the number of reads, and every n-th represents the others; rows with the largest weights, which a
    range may cut off, are all included. The errors are those of these rows.
    """
    every = -(-problem.weight.numel() // TABLE)
    some = problem.g_quantized.flatten().argsort(descending=True, stable=True)[::every]
    largest = problem.weight.abs().amax((1, 2)).argsort(descending=True, stable=True)[: len(some)]
    largest = largest[~torch.isin(largest, some)]
    rows = torch.cat([some, largest])
    counts = torch.cat([torch.full_like(some, every), torch.ones_like(largest)])[:, None, None]
    layout = replace(problem.layout, shape=(len(rows), *problem.layout.shape[1:]), groups=len(rows))

    def few(whole: LayerProblem) -> LayerProblem:
        arrays: dict[str, Any] = {
            name: getattr(whole, name)[rows] for name in ("weight", "h", "linear", "drifts", "mean", "mean_quantized")
        }
        samples, guard = whole.samples, whole.held_back
        arrays |= {"h": arrays["h"] * counts, "samples": samples and (samples[0][rows] * counts,) * 2}
        return replace(whole, layout=layout, held_back=guard and few(guard), **arrays)

    return solve(few(problem), candidates=candidates, loss=loss, refine=refine)


def _require_searchable(problem: LayerProblem, candidates: int, loss: str) -> None:
    if candidates < 1:
        raise ConfigError(f"{candidates} candidates for {problem.site}; give at least 1")
    if loss not in LOSSES:
        raise ConfigError(f"unknown loss {loss!r}; choose one of {', '.join(LOSSES)}")
    if loss == "l1" and problem.samples is None:
        raise ConfigError(f"{problem.site}: the loss l1 needs samples of the layer's inputs")


def fake_quantize(problem: LayerProblem, encoding: Encoding) -> Tensor:
    """Return the fake-quantized weight matrix for an encoding, float32 [groups, out_per_group, K]."""
    if not encoding.dtype.is_integer:
        grid = WeightGrid.of(problem, encoding)
        return (grid.nearest(problem.weight.mT) * grid.scale).mT
    return on_grid(problem.weight, *scales_of_weights(problem, encoding), *_grid(problem))


def _grid(problem: LayerProblem) -> tuple[float, float]:
    return problem.spec.dtype.lo, problem.spec.dtype.hi


@dataclass(frozen=True)
class _SearchResult:
    """The result of a search.

    Attributes:
        encoding: the best of the candidates, which may be worse than the old one.
        weight: on its grid, [groups, outputs, K].
        errors: squared errors of each output with it, [groups, outputs].
        errors_before: with the old encoding.
    """

    encoding: Encoding
    weight: Tensor
    errors: Tensor
    errors_before: Tensor


def _search(
    problem: LayerProblem,
    old: Tensor,
    cells: Tensor,
    blocks: Sequence[Columns],
    candidates: int,
    loss: LossName,
    refine: bool,
) -> _SearchResult:
    """Search the blocks of columns in turn, with the others fixed, from the better of the old encoding and min-max."""
    grids, spec, encoding = Grids(problem), problem.spec, problem.encoding
    shares = torch.arange(1, candidates + 1, device=cells.device) / candidates
    now = [torch.from_numpy(v.reshape(-1)).to(cells.device).float() for v in (encoding.scale, encoding.zero_point)]
    tried = [now, *(grids.common(float(share)) for share in shares)]
    scales, zero_points = (torch.stack(each) for each in zip(*tried, strict=True))
    squared = SquaredLosses(problem, old - problem.weight)
    before = squared.errors.clone()
    start, squared = _start(problem, squared, cells, scales, zero_points)
    scale, zero_point = scales[start].clone(), zero_points[start].clone()
    losses = AbsoluteLosses(problem, squared.deviation) if loss == "l1" else squared
    importance = _importance(problem) if loss == "sqnr" else None
    for columns in blocks:
        cell = cells[..., columns][..., 0]
        block = Block(problem.weight[..., columns], cell, _grid(problem), importance)
        with one_thread_for(block.weight):
            own, at = losses.of(columns), block.scales
            choice = best_of(block, own, scales[:, at], zero_points[:, at])
            best = scales[choice.index, at], zero_points[choice.index, at]
            if not spec.symmetric:
                best, choice = _search_ends(block, own, grids, shares.to(cells.device), choice, best)
            if refine and isinstance(own, Quadratic) and spec.scales_are_free:
                best, choice = _refine(block, own, *best, choice, grids.least[at])
            if losses is squared:
                best, choice = _keep_if_worse(block, squared, columns, (scale[at], zero_point[at]), best, choice)
            scale[at], zero_point[at] = best
        losses.fix_columns(columns, choice.deviation, block.of_outputs(choice.losses))
    shape = encoding.scale.shape
    values = (
        restrict_block_scales(scale.cpu().numpy().reshape(shape), spec),
        zero_point.int().cpu().numpy().reshape(shape),
    )
    result = Encoding(encoding.dtype, *values, encoding.axis, encoding.block_size)
    if losses is squared and spec.scales_are_free:
        return _SearchResult(result, squared.deviation + problem.weight, squared.errors, before)
    weight = fake_quantize(problem, result)
    return _SearchResult(result, weight, problem.errors(weight), before)


def _start(
    problem: LayerProblem, now: SquaredLosses, cells: Tensor, scales: Tensor, zero_points: Tensor
) -> tuple[int, SquaredLosses]:
    """Return the better of the first and the last grid, and the losses from there."""
    if torch.equal(scales[0], scales[-1]) and torch.equal(zero_points[0], zero_points[-1]):
        return 0, now
    weight = on_grid(problem.weight, scales[-1][cells], zero_points[-1][cells], *_grid(problem))
    last = SquaredLosses(problem, weight - problem.weight)
    return (-1, last) if last.errors.sum() < now.errors.sum() else (0, now)


def _search_ends(
    block: Block, loss: Loss, grids: Grids, shares: Tensor, choice: ScaleChoice, best: tuple[Tensor, Tensor]
) -> tuple[tuple[Tensor, Tensor], ScaleChoice]:
    """Search the lower and then the upper end of asymmetric ranges, with the other end fixed."""
    ends = [torch.cat([shares[-1:], shares])[choice.index]] * 2
    for end in range(2):
        other = ends[1 - end].expand(len(shares), -1)
        moved = shares[:, None].expand(-1, len(choice.index))
        low, high = (moved, other) if end == 0 else (other, moved)
        scales, zero_points = grids.of(block.scales, low, high)
        scales, zero_points = (
            torch.cat([new, old[None]]) for new, old in zip((scales, zero_points), best, strict=True)
        )
        choice = best_of(block, loss, scales, zero_points)
        index = choice.index
        units = torch.arange(len(index), device=index.device)
        best = scales[index, units], zero_points[index, units]
        ends[end] = torch.where(index < len(shares), shares[index.clamp(max=len(shares) - 1)], ends[end])
    return best, choice


def _keep_if_worse(
    block: Block,
    losses: SquaredLosses,
    columns: Columns,
    now: tuple[Tensor, Tensor],
    best: tuple[Tensor, Tensor],
    choice: ScaleChoice,
) -> tuple[tuple[Tensor, Tensor], ScaleChoice]:
    """Keep the old scales where the chosen ones are worse."""
    known = block.total(losses.now)
    worse = choice.losses > known
    if not worse.any():
        return best, choice
    kept = block.of_units(worse)[..., None]
    deviation = torch.where(kept, losses.deviation[..., columns], choice.deviation)
    scale, zero_point = (torch.where(worse, old, new) for old, new in zip(now, best, strict=True))
    return (scale, zero_point), replace(choice, losses=torch.minimum(known, choice.losses), deviation=deviation)


def _refine(
    block: Block, loss: Quadratic, scale: Tensor, zero_point: Tensor, choice: ScaleChoice, least: Tensor
) -> tuple[tuple[Tensor, Tensor], ScaleChoice]:
    """Replace scales by the best ones for their codes, none below the `least`, where that lowers the loss."""
    other = torch.maximum(least_squares(block, loss, scale, choice), least)
    deviation = block.deviation(other, zero_point)
    losses = block.total(loss(deviation))
    falls = losses < choice.losses
    kept = ~block.of_units(falls)[..., None]
    return (torch.where(falls, other, scale), zero_point), replace(
        choice,
        losses=torch.minimum(losses, choice.losses),
        deviation=torch.where(kept, choice.deviation, deviation),
        product=None,
    )


def _importance(problem: LayerProblem) -> Tensor:
    """Return one over each output's energy, [groups, outputs]; 0 where an output has none."""
    energy: Tensor = problem.energy
    if problem.layout.kind == "embedding":  # an output is a column of the table, for any row
        energy = energy.sum(0, keepdim=True).expand_as(energy)
    return torch.where(energy > 0, 1 / energy, 0)


def _better(
    problem: LayerProblem, cells: Tensor, loss: LossName, weights: Sequence[Tensor], errors: Sequence[Tensor]
) -> Tensor:
    """Return the outputs whose loss falls, and whose squared error on held-back data does: bool [groups, outputs].

    All or none where outputs share scales.
    """
    own = [AbsoluteLosses(problem, weight - problem.weight).now() for weight in weights] if loss == "l1" else errors
    pairs = [own]
    if problem.held_back is not None:
        pairs.append([problem.held_back.errors(weight) for weight in weights])
    better = torch.ones_like(errors[0], dtype=torch.bool)
    shared = int(torch.bincount(cells[..., 0].flatten()).max()) > 1
    importance = _importance(problem) if loss == "sqnr" and shared else torch.ones_like(errors[0])
    for old, new in pairs:
        better &= (new * importance).sum() < (old * importance).sum() if shared else new < old
    return better


def _shift(problem: LayerProblem, weight: Tensor) -> Tensor:
    """Return the shift of the bias that removes the mean error, [groups, outputs]; 0 if it hurts on held-back data."""
    shift: Tensor = problem.mean_error(weight)
    if problem.held_back is None:
        return shift
    seen = problem.held_back.mean_error(weight)
    return torch.where((seen - shift).abs() < seen.abs(), shift, 0)


def merge_encodings(old: Encoding, new: Encoding, keep: Tensor) -> Encoding:
    """Return the new encoding with some of the old scales, given as indices into the flattened scale."""
    flat = np.zeros(old.scale.size, np.bool_)
    flat[keep.cpu().numpy()] = True
    mask = flat.reshape(old.scale.shape)
    scale, zero_point = np.where(mask, old.scale, new.scale), np.where(mask, old.zero_point, new.zero_point)
    return replace(new, scale=scale, zero_point=zero_point)


def column_blocks(cells: Tensor) -> list[Columns] | None:
    """Split the columns of a weight matrix into blocks that use one scale per row.

    None where the blocks differ between groups, as when a block reaches from one group into the next.
    """
    scales, block = torch.unique(cells[0, 0], return_inverse=True)
    blocks: list[Columns] = []
    for index in range(len(scales)):
        columns = (block == index).nonzero()[:, 0]
        start, stop = int(columns[0]), int(columns[-1]) + 1
        blocks.append(slice(start, stop) if stop - start == len(columns) else columns)
    uniform = all(bool((cells[..., columns] == cells[..., columns][..., :1]).all()) for columns in blocks)
    return blocks if uniform else None
