"""The patches of its input that a convolution multiplies, gathered at sampled positions and never unfolded whole."""

import math

import torch
from torch import Tensor

from qsdk.core.layers.layer_problem import PatchGeometry

#: Patches per element of a patch that are sampled: more of them add little.
PATCHES = 16
#: Lower bound of the rows of data for a layer, if there are so many.
ROWS = 1024


def sample_positions(total: int, limit: int | None, generator: torch.Generator | None) -> Tensor:
    """Return `limit` of `total` positions, one at random per stratum: int64, ascending; all of them if few.

    They are on the generator's device, so that a seed draws the same ones wherever the data is.
    """
    device = generator.device if generator is not None else None
    if limit is None or total <= limit:
        return torch.arange(total, device=device)
    jitter = torch.rand(limit, generator=generator, dtype=torch.float64, device=device)
    return ((torch.arange(limit, device=device) + jitter) * (total / limit)).long().clamp_(max=total - 1)


def with_batch_axis(x: Tensor, geometry: PatchGeometry) -> Tensor:
    """Add a batch axis to an unbatched input, which PyTorch's convolutions accept as well."""
    return x[None] if x.dim() == len(geometry.kernel) + 1 else x


def output_positions(x: Tensor, geometry: PatchGeometry) -> int:
    """Return the number of patches that a convolution multiplies."""
    x = with_batch_axis(x, geometry)
    return x.shape[0] * math.prod(geometry.output_size(tuple(x.shape[2:])))


def gather_patches(x: Tensor, positions: Tensor, geometry: PatchGeometry) -> Tensor:
    """Return the patches that a convolution multiplies at some of its output positions.

    Args:
        x: [N, C, *spatial].
        positions: int64 [P], indices into the flattened [N, *output_size].
        geometry: of the convolution.

    Returns:
        [groups, P, C / groups * prod(kernel)], in the order of the weight's matrix.
    """
    sizes = tuple(x.shape[2:])
    sample, *outputs = torch.unravel_index(positions.to(x.device), (x.shape[0], *geometry.output_size(sizes)))
    flat = torch.zeros(len(positions), 1, dtype=torch.int64, device=x.device)
    inside = torch.ones_like(flat, dtype=torch.bool)
    for dim, (output, size) in enumerate(zip(outputs, sizes, strict=True)):
        index, valid = _taps(output, size, dim, geometry)
        flat = (flat[:, :, None] * size + index[:, None, :]).flatten(1)
        inside = (inside[:, :, None] & valid[:, None, :]).flatten(1)
    taken = _taken(x.flatten(2), sample[:, None], flat).mul_(inside[:, :, None])
    grouped = taken.reshape(*taken.shape[:2], geometry.groups, -1)
    return grouped.permute(2, 0, 3, 1).flatten(2)


def _taken(x: Tensor, sample: Tensor, index: Tensor) -> Tensor:
    """Return all channels [P, taps, C] of x [N, C, size] at indices [P, taps]."""
    if index.numel() < x.shape[0] * x.shape[2]:
        return x[sample, :, index]
    rows = x.mT.reshape(-1, x.shape[1]).index_select(0, (sample * x.shape[2] + index).flatten())
    return rows.reshape(*index.shape, -1)


def _taps(output: Tensor, size: int, dim: int, geometry: PatchGeometry) -> tuple[Tensor, Tensor]:
    """Return the input index of each kernel element along one dimension, [P, kernel], and whether it is inside."""
    stride, before = geometry.stride[dim], geometry.padding[dim][0]
    steps = torch.arange(geometry.kernel[dim], device=output.device) * geometry.dilation[dim]
    if geometry.transposed:
        reached = output[:, None] + before - steps
        index = reached.div(stride, rounding_mode="floor")
        valid = (reached % stride == 0) & (index >= 0) & (index < size)
        return index.clamp(0, size - 1), valid
    index = output[:, None] * stride - before + steps
    match geometry.mode:
        case "zeros":
            return index.clamp(0, size - 1), (index >= 0) & (index < size)
        case "reflect":
            index = size - 1 - (size - 1 - index.abs()).abs()
        case "circular":
            index = index % size
        case "replicate":
            index = index.clamp(0, size - 1)
    return index, torch.ones_like(index, dtype=torch.bool)
