"""Second moments of a layer's float and quantized inputs, streamed batch by batch."""

import math

import torch
from torch import Tensor

from qsdk.core.errors import DataError
from qsdk.core.layer_problem import PatchGeometry, WeightLayout

#: Elements of patches gathered at a time: 64 MiB of float32.
CHUNK = 1 << 24


def patches_wanted(k: int) -> int:
    """How many patches of length k determine a layer: 16 k, and no fewer than 1024; all patches add little."""
    return max(16 * k, 1024)


class Moments:
    """Streaming sums of XX', XX~' and X~X~' for the inputs of one layer.

    A linear layer's inputs are [..., K] and all count. A convolution's are [N, C, *spatial]; `patches_wanted(K)`
    patches are sampled uniformly over all batches, and weighted so that the sums estimate those over all patches.

    Attributes:
        g: XX', float32 [groups, K, K].
        c: XX~', likewise.
        g_quantized: X~X~', likewise.
        rows: rows of data seen (patches sampled).
    """

    def __init__(
        self,
        layout: WeightLayout,
        geometry: PatchGeometry | None = None,
        *,
        batches: int | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Start at zero.

        Args:
            layout: of the layer's weight.
            geometry: of a convolution, None for a linear layer.
            batches: how many updates share a convolution's patches; None takes all patches.
            generator: of the sampling, on the CPU.
            device: where the sums live.
        """
        groups, _, k = layout.matrix_shape
        self.g, self.c, self.g_quantized = (torch.zeros(groups, k, k, device=device) for _ in range(3))
        self.rows = 0
        self._geometry = geometry
        self._limit = None if batches is None else -(-patches_wanted(k) // batches)
        self._generator = generator

    @torch.no_grad()
    def update(self, x_float: Tensor, x_quantized: Tensor) -> None:
        """Add a batch: the layer's input in the float model and in the quantized one, of the same shape.

        Raises:
            DataError: the shapes differ or do not fit the layer, or an input holds NaN or an infinity.
        """
        if x_float.shape != x_quantized.shape:
            raise DataError(f"inputs of different shapes: {tuple(x_float.shape)} and {tuple(x_quantized.shape)}")
        if not (x_float.isfinite().all() and x_quantized.isfinite().all()):
            raise DataError("the layer's input holds NaN or an infinity")
        if self._geometry is None:
            self._add_rows(x_float, x_quantized)
        else:
            self._add_patches(x_float, x_quantized, self._geometry)

    def _add_rows(self, x_float: Tensor, x_quantized: Tensor) -> None:
        k = self.g.shape[-1]
        if x_float.shape[-1] != k:
            raise DataError(f"an input of shape {tuple(x_float.shape)} does not fit a weight with {k} inputs")
        self._add(x_float.reshape(1, -1, k), x_quantized.reshape(1, -1, k), x_quantized is x_float, 1.0)

    def _add_patches(self, x_float: Tensor, x_quantized: Tensor, geometry: PatchGeometry) -> None:
        dims = len(geometry.kernel)
        if x_float.dim() == dims + 1:  # PyTorch's convolutions take unbatched inputs
            x_float, x_quantized = x_float[None], x_quantized[None]
        sizes = geometry.output_size(tuple(x_float.shape[2:]))
        total = x_float.shape[0] * math.prod(sizes)
        chosen = sample_positions(total, self._limit, self._generator)
        same, weight = x_quantized is x_float, total / max(len(chosen), 1)
        for some in torch.split(chosen, max(CHUNK // (self.g.shape[0] * self.g.shape[-1]), 1)):
            patches = gather_patches(x_float, some, geometry)
            other = patches if same else gather_patches(x_quantized, some, geometry)
            self._add(patches, other, same, weight)

    def _add(self, x: Tensor, x_quantized: Tensor, same: bool, weight: float) -> None:
        x, x_quantized = (rows.to(self.g.device, torch.float32) for rows in (x, x_quantized))
        g = x.mT @ x
        self.g.add_(g, alpha=weight)
        self.c.add_(g if same else x.mT @ x_quantized, alpha=weight)
        self.g_quantized.add_(g if same else x_quantized.mT @ x_quantized, alpha=weight)
        self.rows += x.shape[1]


def sample_positions(total: int, limit: int | None, generator: torch.Generator | None) -> Tensor:
    """Draw `limit` of `total` positions, uniformly, one per stratum: int64, ascending; all of them if they are few."""
    if limit is None or total <= limit:
        return torch.arange(total)
    jitter = torch.rand(limit, generator=generator, dtype=torch.float64)
    return ((torch.arange(limit) + jitter) * (total / limit)).long().clamp_(max=total - 1)


def gather_patches(x: Tensor, positions: Tensor, geometry: PatchGeometry) -> Tensor:
    """Give what a convolution multiplies at some of its output positions.

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
    taken = x.flatten(2)[sample[:, None], :, flat] * inside[:, :, None]  # [P, taps, C]
    grouped = taken.reshape(*taken.shape[:2], geometry.groups, -1)
    return grouped.permute(2, 0, 3, 1).flatten(2)


def _taps(output: Tensor, size: int, dim: int, geometry: PatchGeometry) -> tuple[Tensor, Tensor]:
    """Input index of each kernel element along one dimension, [P, kernel], and whether it lies inside the input."""
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
