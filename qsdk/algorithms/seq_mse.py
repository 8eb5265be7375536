"""SeqMSE: the weight ranges that give a layer the smallest output error."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from qsdk.algorithms.moments import CHUNK
from qsdk.algorithms.on_torch import cells_of_weights, on_torch, scales_of_weights
from qsdk.core import affine
from qsdk.core.block_scales import confined
from qsdk.core.encoding import Encoding
from qsdk.core.errors import ConfigError
from qsdk.core.layer_problem import LayerProblem, Solution
from qsdk.core.ranges import Range, encoding_from_range, range_of


def solve(problem: LayerProblem, *, candidates: int = 20) -> Solution:
    """Choose each scale among the ranges (min, max) * i / candidates, and the one it has, by the layer's output error.

    Scales of different channels are independent; a shared scale is judged by the sum of what shares it. Blocks of one
    channel are chosen in turn, each given the others, so that the layer's error never rises.

    Args:
        problem: with an encoding of its spec's granularity.
        candidates: how many ranges.

    Returns:
        The encoding, and relative errors; the weight stays.

    Raises:
        ConfigError: the dtype is not an integer, or there are no candidates.

    Source: AIMET's sequential MSE (Qualcomm), here in closed form on second moments; the asymmetric objective after
    Nagel et al. 2020, AdaRound, section 3.4, blocks in turn as coordinate descent.
    """
    if candidates < 1:
        raise ConfigError(f"{candidates} candidates for {problem.site}; give at least 1")
    if not problem.spec.dtype.is_integer:
        raise ConfigError(f"{problem.site}: seq_mse searches integer grids, not {problem.spec.dtype}; skip the site")
    problem = on_torch(problem)
    before = problem.relative_error(fake_quantize(problem, problem.encoding))
    if problem.encoding.frozen:
        return Solution(problem.encoding, None, before, before, note="its encoding is frozen")
    cells = cells_of_weights(problem, problem.encoding)
    blocks = column_blocks(cells)
    if blocks is None:
        note = "its blocks reach across groups; let the block size divide a group's channels"
        return Solution(problem.encoding, None, before, before, note=note)
    ranges = _candidate_encodings(problem, candidates)
    encoding = _pick(ranges, _choose(problem, ranges, cells, blocks).cpu().numpy())
    encoding = replace(encoding, scale=confined(encoding.scale, problem.spec))
    after = problem.relative_error(fake_quantize(problem, encoding))
    if after >= before:  # equal up to rounding: do not move ranges for nothing
        return Solution(problem.encoding, None, before, before)
    return Solution(encoding, None, before, after)


def fake_quantize(problem: LayerProblem, encoding: Encoding) -> Tensor:
    """The weight matrix moved to the nearest point of an encoding's grid, float32 [groups, out_per_group, K]."""
    scale, zero_point = scales_of_weights(problem, encoding)
    moved: Tensor = affine.fake_quantize(problem.weight, scale, zero_point, encoding.dtype.lo, encoding.dtype.hi)
    return moved


def _candidate_encodings(problem: LayerProblem, candidates: int) -> list[Encoding]:
    stored = problem.layout.from_matrix(problem.weight).cpu().numpy()
    full = range_of(stored, problem.spec)
    shares = [i / candidates for i in range(1, candidates + 1)]
    return [
        problem.encoding,
        *(encoding_from_range(Range(full.low * share, full.high * share), problem.spec) for share in shares),
    ]


def _choose(problem: LayerProblem, encodings: list[Encoding], cells: Tensor, blocks: list[Tensor]) -> Tensor:
    """Index of the best encoding for each scale, int64 [scales]; blocks of columns in turn."""
    device, h = cells.device, problem.g_quantized
    scales = torch.from_numpy(np.stack([e.scale.reshape(-1) for e in encodings])).to(device)
    zero_points = torch.from_numpy(np.stack([e.zero_point.reshape(-1) for e in encodings])).float().to(device)
    grid = (problem.spec.dtype.lo, problem.spec.dtype.hi)
    # blocks descend from the better of what there is and min-max, so that the layer ends below both
    start = min((0, len(encodings) - 1), key=lambda i: problem.relative_error(fake_quantize(problem, encodings[i])))
    deviation = fake_quantize(problem, encodings[start]) - problem.weight
    linear = problem.linear_term()
    chosen = torch.full(scales.shape[1:], start, device=device)
    for columns in blocks:
        weight, cell = problem.weight[..., columns], cells[..., columns[0]]
        deviation[..., columns] = 0
        # what the block's own error meets: the input's drift and the errors of all other blocks
        others = linear[..., columns] + deviation @ h[:, :, columns]
        quadratic = h[:, columns][:, :, columns]
        losses = []
        for some in torch.split(torch.arange(len(encodings), device=device), max(CHUNK // weight.numel(), 1)):
            scale, zero_point = (v[some][:, cell, None] for v in (scales, zero_points))
            d = affine.fake_quantize(weight, scale, zero_point, *grid) - weight
            losses.append(((d @ quadratic + 2 * others) * d).sum(-1))
        sharing, place = torch.unique(cell.flatten(), return_inverse=True)
        summed = torch.zeros(len(encodings), len(sharing), device=device)
        best = summed.index_add_(1, place, torch.cat(losses).flatten(1)).argmin(0)
        chosen[sharing] = best
        scale, zero_point = (v[best, sharing][place].reshape(cell.shape)[..., None] for v in (scales, zero_points))
        deviation[..., columns] = affine.fake_quantize(weight, scale, zero_point, *grid) - weight
    return chosen


def column_blocks(cells: Tensor) -> list[Tensor] | None:
    """Split the columns of a weight matrix into runs that use one scale per row: int64 index tensors.

    None where the runs differ between groups, as they do when a block reaches from one group into the next.
    """
    _, block = torch.unique(cells[0, 0], return_inverse=True)
    blocks = [(block == index).nonzero()[:, 0] for index in range(int(block.max()) + 1)]
    uniform = all(bool((cells[..., columns] == cells[..., columns[:1]]).all()) for columns in blocks)
    return blocks if uniform else None


def _pick(encodings: list[Encoding], chosen: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Encoding:
    first, each = encodings[0], np.arange(len(chosen))
    scale = np.stack([e.scale.reshape(-1) for e in encodings])[chosen, each]
    zero_point = np.stack([e.zero_point.reshape(-1) for e in encodings])[chosen, each]
    shape = first.scale.shape
    return Encoding(first.dtype, scale.reshape(shape), zero_point.reshape(shape), first.axis, first.block_size)
