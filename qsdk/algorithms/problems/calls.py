"""The calls of a step's layers on all ranks: their places, and what is known of their inputs beforehand."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qsdk.algorithms import ranks
from qsdk.algorithms.problems.moments import Bounds
from qsdk.core.errors import DataError
from qsdk.core.layers.layer_problem import Layer, PatchGeometry

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
    """Return the patches that a convolution multiplies at some output positions, in the order of its weight's matrix.

    Of x [N, C, *spatial] and positions int64 [P], indices into the flattened [N, *output_size], these are
    [groups, P, C / groups * prod(kernel)].
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


Place = tuple[int, int]


@dataclass(frozen=True)
class CallPlaces:
    """The places of the calls of all ranks in one order, which is that of one rank with all batches.

    The batches of N ranks are those of one rank dealt out in turn: rank r has r, r + N, r + 2 N and so on.

    Attributes:
        batches: number of batches of all ranks.
        places: of each rank's calls: the place of the batch among those that reach the layers, and of the call in it.
    """

    batches: int
    places: Sequence[Sequence[Place]]

    @classmethod
    def of(cls, everywhere: Sequence[tuple[int, Sequence[int], int]]) -> "CallPlaces":
        """Return the places of all calls, from the batches of each rank, those that reach the layers, and its calls."""
        world = len(everywhere)
        every = sorted(number * world + rank for rank, (_, reached, _) in enumerate(everywhere) for number in reached)
        order = {number: place for place, number in enumerate(every)}
        places = []
        for rank, (_, reached, calls) in enumerate(everywhere):
            if not reached or calls % len(reached):  # nobody knows which call is of which batch
                places.append([(number * world + rank, 0) for number in range(calls)])
            else:
                each = range(calls // len(reached))
                places.append([(order[number * world + rank], call) for number in reached for call in each])
        return cls(sum(count for count, _, _ in everywhere), places)

    @property
    def own(self) -> Sequence[Place]:
        """Return the places of this rank's calls."""
        return self.places[ranks.rank()]

    def rows_before(self, rows: Sequence[Sequence[int]], limit: int | None) -> dict[Place, int]:
        """Return for each place the number of rows of the calls before it."""
        pairs = [pair for own, mine in zip(self.places, rows, strict=True) for pair in zip(own, mine, strict=True)]
        result, before = {}, 0
        for place, count in sorted(pairs):
            result[place] = before
            before += count if limit is None else min(count, limit)
        return result


@dataclass(frozen=True)
class Surveyed:
    """What a rank has seen of an input.

    Attributes:
        rows: of each call.
        largest: |X~| and |X - X~|, float32 [2, features]; None where nothing was seen, or for an embedding.
    """

    rows: Sequence[int]
    largest: Tensor | None


class InputSurvey:
    """The largest values of the inputs of layers, and the number of rows."""

    def __init__(self, layer: Layer) -> None:
        """Start without inputs; `layer` is any of those that read the same rows."""
        self._layer = layer
        self._largest: Tensor | None = None
        self._rows: list[int] = []

    def add(self, number: int, x: Tensor, x_quantized: Tensor) -> None:
        """Look at the input of a call."""
        layer, (groups, _, k) = self._layer, self._layer.layout.matrix_shape
        if layer.layout.kind == "embedding":
            self._rows.append(x_quantized.numel())
            return
        where = f"{layer.site}, batch {number}"
        if x.shape != x_quantized.shape:
            raise DataError(f"{where}: inputs of different shapes: {tuple(x.shape)} and {tuple(x_quantized.shape)}")
        if layer.geometry is None and x.shape[-1] != groups * k:
            raise DataError(f"{where}: an input of {tuple(x.shape)} does not fit a weight with {groups * k} inputs")
        rows = x.shape[:-1].numel() if layer.geometry is None else output_positions(x, layer.geometry)
        self._rows.append(rows)
        if not x.numel():
            return
        axis = -1 if layer.geometry is None else -1 - len(layer.geometry.kernel)
        others = [at for at in range(x.dim()) if at != axis % x.dim()]
        pair = (x_quantized,) if x is x_quantized else (x_quantized, x - x_quantized)
        # on a processor, the infinity norm takes many times as long
        largest = torch.stack([torch.maximum(values.amax(others), -values.amin(others)) for values in pair])
        if not largest.isfinite().all():
            raise DataError(f"{where}: the layer's input holds NaN or an infinity")
        if len(pair) == 1:
            largest = torch.cat([largest, torch.zeros_like(largest)])
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)

    def result(self) -> Surveyed:
        """Return what was seen."""
        return Surveyed(self._rows, None if self._largest is None else self._largest.cpu())


def bounds_of(layer: Layer, everywhere: Sequence[Surveyed]) -> Bounds:
    """Return the bounds of the rows of a layer from the surveys of all ranks."""
    groups, _, k = layer.layout.matrix_shape
    found = [each.largest for each in everywhere if each.largest is not None]
    if not found:
        zeros = torch.zeros(groups, k, device="cpu")  # on the host, as what was seen is
        return Bounds(zeros, zeros, 0)
    largest = torch.stack(found).amax(0).reshape(2, groups, -1)
    taps = k // largest.shape[-1]  # a patch has as many elements of each channel
    x_quantized, difference = largest.repeat_interleave(taps, -1)
    return Bounds(x_quantized, difference, sum(sum(each.rows) for each in everywhere))


def owned(layers: Sequence[Layer], owners: Mapping[str, int]) -> list[tuple[slice, int]]:
    """Return the slices of the outputs of stacked layers, and the owner of each."""
    result, start = [], 0
    for layer in layers:
        stop = start + layer.layout.matrix_shape[1]
        result.append((slice(start, stop), owners.get(layer.site, 0)))
        start = stop
    return result
