"""Layer problems of a step of a walk: the statistics of its input for each of the layers that read it."""

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qsdk.algorithms import ranks
from qsdk.algorithms.problems.embeddings import EmbeddingPart
from qsdk.algorithms.problems.moments import CHUNK, Moments, Sums
from qsdk.algorithms.problems.patches import PATCHES, ROWS, gather_patches, sample_positions
from qsdk.core.errors import DataError
from qsdk.core.layers.layer_problem import LayerProblem, PatchGeometry
from qsdk.core.layers.layer_walk import Layer, Walk, WalkStep


@dataclass(frozen=True)
class GatherOptions:
    """The statistics that a solver needs.

    Attributes:
        second_moments: of the inputs; without them there are means only.
        samples: upper bound of rows of the inputs to keep.
        held_back: every n-th batch is kept for `LayerProblem.held_back`, every n-th row where batches are few; 0 keeps
            none.
        rows: rows of data to sample for each input of a weight, at most, but no fewer than `ROWS` in all; None for
            `PATCHES` of a convolution, and all rows of other layers.
        every_patch: whether means without second moments are taken over all patches, else over those that second
            moments would be computed from.
    """

    second_moments: bool = True
    samples: int = 0
    held_back: int = 4
    rows: int | None = None
    every_patch: bool = True


def problems_of(step: WalkStep, walk: Walk, gathers: GatherOptions, seed: int) -> list[LayerProblem]:
    """Return the problems of a step's layers, in its order, reading its inputs once.

    Layers that read the same rows (all linear ones, convolutions of one geometry) share their second moments.

    Raises:
        DataError: an input does not fit its layer, or holds NaN or an infinity; names the layer and the batch.
    """
    shared: dict[Any, list[Layer]] = {}
    for layer in step.layers:
        groups, _, k = layer.layout.matrix_shape
        shared.setdefault((layer.geometry, layer.layout.kind == "embedding", groups, k), []).append(layer)
    parts = [_part_of(layers, walk, gathers, seed) for layers in shared.values()]
    failure = None
    try:
        for number, (x, x_quantized) in enumerate(step.inputs()):
            for part in parts:
                part.add(number, as_tensor(x), as_tensor(x_quantized))
    except DataError as error:
        if ranks.world_size() == 1:
            raise
        failure = str(error)
    ranks.require_same_layers([layer.site for layer in step.layers], failure)
    result = {problem.site: problem for part in parts for problem in part.problems(walk)}
    return [result[layer.site] for layer in step.layers]


def _part_of(layers: Sequence[Layer], walk: Walk, gathers: GatherOptions, seed: int) -> "_Part | EmbeddingPart":
    if layers[0].layout.kind == "embedding":
        return EmbeddingPart(layers, [_matrix(walk, layer) for layer in layers], gathers.held_back)
    return _Part(layers, walk, gathers, seed)


class _Part:
    """Layers that read the same rows, and the sums over these."""

    def __init__(self, layers: Sequence[Layer], walk: Walk, gathers: GatherOptions, seed: int) -> None:
        self._layers, self._gathers, self._batches = layers, gathers, max(walk.batches, 1)
        self._weights = [_matrix(walk, layer) for layer in layers]
        self._by_batch = gathers.held_back > 0 and self._batches >= 2 * gathers.held_back
        self._seen = 0
        # a generator of its own: these samples do not depend on the layers before
        self._generator = torch.Generator().manual_seed(seed + zlib.crc32(layers[0].site.encode()))
        self._samples: list[tuple[Tensor, Tensor]] = []
        self._moments: tuple[Moments, Moments] | None = None

    def add(self, number: int, x: Tensor, x_quantized: Tensor) -> None:
        """Add one call's input."""
        where = f"{self._layers[0].site}, batch {number}"
        if x.shape != x_quantized.shape:
            raise DataError(f"{where}: inputs of different shapes: {tuple(x.shape)} and {tuple(x_quantized.shape)}")
        if self._moments is None:
            self._weights = [weight.to(x.device) for weight in self._weights]
            self._moments = self._new_moments()
        for rows, rows_quantized, weight in self._rows(x, x_quantized, where):
            for moments, own in zip(self._moments, self._split(number, rows.shape[1]), strict=True):
                mine = (rows, rows_quantized) if own is None else (rows[:, own], rows_quantized[:, own])
                if not moments.add(*mine, weight):
                    raise DataError(f"{where}: the layer's input holds NaN or an infinity")
            self._seen += rows.shape[1]
            if not self._means_of_patches:
                self._sample(rows, rows_quantized)
        if self._means_of_patches and self._gathers.samples:
            for rows, rows_quantized, _ in self._patches(x, x_quantized):
                self._sample(rows, rows_quantized)

    def problems(self, walk: Walk) -> Iterator[LayerProblem]:
        """Yield the layers' problems, each with its part of the sums."""
        train, held_back = (moments.finish() for moments in self._moments or self._new_moments())
        samples = self._all_samples()
        start = 0
        for layer, weight in zip(self._layers, self._weights, strict=True):
            part = slice(start, start := start + weight.shape[1])
            guard = _problem(layer, walk, weight, held_back, part) if held_back.rows else None
            yield _problem(layer, walk, weight, train, part, samples=samples, held_back=guard)

    def _new_moments(self) -> tuple[Moments, Moments]:
        weight = torch.cat(self._weights, 1)
        second, k = self._gathers.second_moments, weight.shape[-1]
        # only a few errors are computed on held-back data: with its rows that is less work than with sums over them
        return Moments(weight, second=second), Moments(weight, second=second, few=2 * k)

    def _split(self, number: int, rows: int) -> tuple[slice | Tensor | None, slice | Tensor | None]:
        """Return the rows that count and those that are held back; None for all."""
        every, none = self._gathers.held_back, slice(0, 0)
        if self._by_batch:
            return (none, None) if number % every == every - 1 else (None, none)
        if not every:
            return None, none
        index = torch.arange(self._seen, self._seen + rows, device=self._weights[0].device)
        held_back = index % every == every - 1
        return (~held_back).nonzero()[:, 0], held_back.nonzero()[:, 0]

    def _rows(self, x: Tensor, x_quantized: Tensor, where: str) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Yield the rows that the layers multiply, [groups, rows, K] each, and the number of rows each represents."""
        geometry, (groups, _, k) = self._layers[0].geometry, self._layers[0].layout.matrix_shape
        if geometry is not None and self._means_of_patches:
            yield from self._mean_patches(x, x_quantized)
        elif geometry is not None:
            yield from self._patches(x, x_quantized)
        elif x.shape[-1] != groups * k:
            raise DataError(f"{where}: an input of {tuple(x.shape)} does not fit a weight with {groups * k} inputs")
        else:
            rows, rows_quantized = (v.reshape(-1, groups, k).movedim(1, 0) for v in (x, x_quantized))
            total = rows.shape[1]
            chosen = self._sample_rows(total, self._gathers.rows)
            if len(chosen) < total:
                rows, rows_quantized = rows[:, chosen], rows_quantized[:, chosen]
            yield rows, rows_quantized, total / max(len(chosen), 1)

    @property
    def _means_of_patches(self) -> bool:
        wanted = self._gathers.every_patch and not self._gathers.second_moments
        return wanted and self._layers[0].geometry is not None

    def _mean_patches(self, x: Tensor, x_quantized: Tensor) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Yield the mean of all patches as one row, computed from sums over the inputs without unfolding them."""
        geometry, (groups, _, k) = self._layers[0].geometry, self._layers[0].layout.matrix_shape
        assert geometry is not None
        x, x_quantized = (_with_batch_axis(values, geometry) for values in (x, x_quantized))
        sizes = geometry.output_size(tuple(x.shape[2:]))
        total, means = x.shape[0] * math.prod(sizes), []
        for values in (x, x_quantized):
            summed = values.sum(0, keepdim=True)
            parts = torch.split(torch.arange(math.prod(sizes), device=x.device), max(CHUNK // (groups * k), 1))
            rows = [gather_patches(summed, some, geometry).sum(1, keepdim=True) for some in parts]
            means.append(torch.stack(rows).sum(0) / total)
        yield means[0], means[1], float(total)

    def _patches(self, x: Tensor, x_quantized: Tensor) -> Iterator[tuple[Tensor, Tensor, float]]:
        geometry, (groups, _, k) = self._layers[0].geometry, self._layers[0].layout.matrix_shape
        assert geometry is not None
        x, x_quantized = (_with_batch_axis(values, geometry) for values in (x, x_quantized))
        total = x.shape[0] * math.prod(geometry.output_size(tuple(x.shape[2:])))
        chosen = self._sample_rows(total, self._gathers.rows or PATCHES)
        for some in torch.split(chosen, max(CHUNK // (groups * k), 1)):
            rows = gather_patches(x, some, geometry)
            rows_quantized = rows if x is x_quantized else gather_patches(x_quantized, some, geometry)
            yield rows, rows_quantized, total / len(chosen)

    def _sample_rows(self, total: int, per_input: int | None) -> Tensor:
        """Return the rows of one call to sample, so that all calls together reach the wanted number."""
        k = self._layers[0].layout.matrix_shape[2]
        wanted = None if per_input is None else max(per_input * k, ROWS)
        limit = None if wanted is None else -(-wanted // (self._batches * ranks.world_size()))
        return sample_positions(total, limit, self._generator)

    def _sample(self, rows: Tensor, rows_quantized: Tensor) -> None:
        if self._gathers.samples:
            limit = -(-self._gathers.samples // (self._batches * ranks.world_size()))
            chosen = sample_positions(rows.shape[1], limit, self._generator)
            self._samples.append((rows[:, chosen], rows_quantized[:, chosen]))

    def _all_samples(self) -> tuple[Tensor, Tensor] | None:
        if not self._gathers.samples:
            return None
        own = [torch.cat(parts, 1).cpu() for parts in zip(*self._samples, strict=True)]
        every = [parts for parts in ranks.all_gather(own) if parts]
        x, x_quantized = (torch.cat(parts, 1)[:, : self._gathers.samples] for parts in zip(*every, strict=True))
        device = self._weights[0].device
        return x.to(device), x_quantized.to(device)


def as_tensor(values: Any) -> Tensor:
    """Return a tensor of the same values, float32 unless they are integers; it shares memory if possible."""
    if not isinstance(values, Tensor):  # torch.as_tensor would move tensors to the default device
        values = np.asarray(values)
        values = torch.from_numpy(values if values.flags.writeable else values.copy())
    tensor: Tensor = values.detach()
    return tensor.float() if tensor.is_floating_point() else tensor


def _with_batch_axis(x: Tensor, geometry: PatchGeometry) -> Tensor:
    """Add a batch axis to an unbatched input, which PyTorch's convolutions accept as well."""
    return x[None] if x.dim() == len(geometry.kernel) + 1 else x


def _matrix(walk: Walk, layer: Layer) -> Tensor:
    matrix: Tensor = layer.layout.to_matrix(as_tensor(walk.weight(layer.site)))
    return matrix


def _problem(layer: Layer, walk: Walk, weight: Tensor, sums: Sums, part: slice, **others: Any) -> LayerProblem:
    linear, drifts = (None if values is None else values[:, part] for values in (sums.linear, sums.drifts))
    drifted = None if sums.drifted is None else sums.drifted[..., part]
    layout, bias = layer.layout, walk.bias(layer.site)
    return LayerProblem(
        layer.site,
        layer.spec,
        walk.encoding(layer.site),
        layout,
        weight,
        sums.h,
        linear,
        drifts,
        sums.rows,
        sums.count,
        sums.x_quantized,
        drifted,
        sums.roots,
        sums.mean,
        sums.mean_quantized,
        activation=layer.activation,
        bias=None if bias is None else as_tensor(bias).reshape(layout.matrix_shape[:2]).to(weight.device),
        **others,
    )
