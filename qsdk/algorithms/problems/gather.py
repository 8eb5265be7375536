"""Layer problems of a step of a walk: the statistics of its input for each of the layers that read it."""

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qsdk.algorithms import ranks
from qsdk.algorithms.problems.calls import (
    PATCHES,
    ROWS,
    CallPlaces,
    InputSurvey,
    Place,
    Surveyed,
    bounds_of,
    gather_patches,
    output_positions,
    owned,
    sample_positions,
    with_batch_axis,
)
from qsdk.algorithms.problems.moments import CHUNK, Bounds, Moments, Sums
from qsdk.core.errors import DataError
from qsdk.core.layers.layer_problem import Layer, LayerProblem, Walk, WalkStep


class EmbeddingPart:
    """The tables that are read at the same indices, and the number of reads of each row.

    A table has a group for each row, with one input: its second moment is the number of times that the row is read.
    Every row counts once more, since in use other rows are read than in some batches (Laplace's rule of succession).
    """

    def __init__(
        self, layers: Sequence[Layer], weights: Sequence[Tensor], held_back: int, before: Mapping[Place, int]
    ) -> None:
        """Start with counts of 0."""
        self._layers, self._weights, self._every, self._before = layers, weights, held_back, before
        self._counts = torch.zeros(2, len(weights[0]), dtype=torch.float64, device=weights[0].device)

    def add(self, number: int, x: Tensor, x_quantized: Tensor, place: Place) -> None:
        """Add one call's indices, those of the quantized model; its place is that among the calls of all ranks."""
        rows, indices = self._counts.shape[1], x_quantized.flatten().long().to(self._counts.device)
        if len(indices) and not -rows <= int(indices.min()) <= int(indices.max()) < rows:
            raise DataError(f"{self._layers[0].site}, batch {number}: an index is none of the {rows} rows of the table")
        at = torch.arange(len(indices), device=indices.device) + self._before[place]
        held = at % self._every == self._every - 1 if self._every else torch.zeros_like(at, dtype=torch.bool)
        for counts, own in zip(self._counts, (~held, held), strict=True):
            counts += torch.bincount(indices[own] % rows, minlength=rows)

    def problems(self, walk: Walk) -> Iterator[LayerProblem]:
        """Yield the tables' problems."""
        ranks.all_reduce_sum([self._counts])
        train, held_back = self._counts
        for layer, weight in zip(self._layers, self._weights, strict=True):
            guard = _table_problem(layer, walk, weight, held_back) if bool(held_back.any()) else None
            yield _table_problem(layer, walk, weight, train, guard)


def _table_problem(
    layer: Layer, walk: Walk, weight: Tensor, counts: Tensor, held_back: LayerProblem | None = None
) -> LayerProblem:
    rows = int(counts.sum())
    smoothed = (counts + 1).to(weight)
    nothing: Any = weight.new_zeros(()).expand_as(weight)
    share = (smoothed / smoothed.sum())[:, None]
    return LayerProblem(
        layer.site,
        layer.spec,
        walk.encoding(layer.site),
        layer.layout,
        weight,
        smoothed[:, None, None],
        nothing,
        nothing[..., 0],
        rows,
        float(smoothed.sum()),
        mean=share,
        mean_quantized=share,
        samples=(smoothed[:, None, None],) * 2,
        held_back=held_back,
    )


#: Distances of the seeds that samples are drawn with: primes, so that few coincide.
_BETWEEN_BATCHES, _BETWEEN_CALLS = 1_000_003, 7_919


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


def problems_of(
    step: WalkStep, walk: Walk, gathers: GatherOptions, seed: int, owners: Mapping[str, int] | None = None
) -> list[LayerProblem]:
    """Return the problems of a step's layers, in its order.

    Layers that read the same rows (all linear ones, convolutions of one geometry) share their second moments, and only
    the rank that owns a layer (the first, without `owners`) gets these and samples; the others have means. The inputs
    are read twice: once for their largest values, and once for the sums.
    """
    shared: dict[Any, list[Layer]] = {}
    for layer in step.layers:
        groups, _, k = layer.layout.matrix_shape
        shared.setdefault((layer.geometry, layer.layout.kind == "embedding", groups, k), []).append(layer)
    places, surveys, kept = _survey(step, walk, [layers[0] for layers in shared.values()])
    parts = [
        _part_of(layers, walk, gathers, seed, owned(layers, owners or {}), places, surveyed)
        for layers, surveyed in zip(shared.values(), surveys, strict=True)
    ]
    sites, failure = [layer.site for layer in step.layers], None
    try:
        for number, (place, (x, x_quantized)) in enumerate(zip(places.own, kept or step.inputs(), strict=True)):
            for part in parts:
                part.add(number, as_tensor(x), as_tensor(x_quantized), place)
    except Exception as error:  # whatever it is, the other ranks wait
        if ranks.world_size() == 1:
            raise
        failure = error
    ranks.require_same_layers(sites, failure)
    result = {problem.site: problem for part in parts for problem in part.problems(walk)}
    return [result[site] for site in sites]


def _survey(
    step: WalkStep, walk: Walk, layers: Sequence[Layer]
) -> tuple[CallPlaces, list[list[Surveyed]], list[tuple[Any, Any]]]:
    """Return the places of all ranks' calls, and for each of some layers what each rank has seen of its input.

    The inputs of this rank come along if they are small: reading them again may take forward passes.
    """
    surveys = [InputSurvey(layer) for layer in layers]
    calls, failure, elements = 0, None, 0
    kept: list[tuple[Any, Any]] = []
    try:
        for number, (x, x_quantized) in enumerate(step.inputs()):
            calls, elements = calls + 1, elements + 2 * math.prod(x.shape)
            if elements <= CHUNK:
                kept.append((x, x_quantized))
            else:
                kept.clear()
            for survey in surveys:
                survey.add(number, one := as_tensor(x), one if x is x_quantized else as_tensor(x_quantized))
    except Exception as error:  # whatever it is, the other ranks wait
        if ranks.world_size() == 1:
            raise
        failure = error
    own = walk.batches, list(step.reached), calls, [survey.result() for survey in surveys]
    everywhere = ranks.at_layers([layer.site for layer in step.layers], own, failure)
    places = CallPlaces.of([each[:3] for each in everywhere])
    return places, [[each[3][at] for each in everywhere] for at in range(len(layers))], kept


def _part_of(
    layers: Sequence[Layer],
    walk: Walk,
    gathers: GatherOptions,
    seed: int,
    owners: Sequence[tuple[slice, int]],
    places: CallPlaces,
    surveyed: Sequence[Surveyed],
) -> "_Part | EmbeddingPart":
    weights = [_matrix(walk, layer) for layer in layers]
    if layers[0].layout.kind == "embedding":
        before = places.rows_before([each.rows for each in surveyed], None)
        return EmbeddingPart(layers, weights, gathers.held_back, before)
    return _Part(layers, weights, gathers, seed, owners, places, surveyed)


class _Part:
    """Layers that read the same rows, and the sums over these."""

    def __init__(
        self,
        layers: Sequence[Layer],
        weights: Sequence[Tensor],
        gathers: GatherOptions,
        seed: int,
        owners: Sequence[tuple[slice, int]],
        places: CallPlaces,
        surveyed: Sequence[Surveyed],
    ) -> None:
        self._layers, self._weights, self._gathers, self._owners = layers, weights, gathers, owners
        self._batches, self._bounds = max(places.batches, 1), bounds_of(layers[0], surveyed)
        if gathers.second_moments:
            _require_summable(layers[0].site, self._bounds)
        self._by_batch = gathers.held_back > 0 and self._batches >= 2 * gathers.held_back
        counts = [[1] * len(each.rows) if self._means_of_patches else each.rows for each in surveyed]
        self._before = places.rows_before(counts, self._limit)
        self._seed = seed + zlib.crc32(layers[0].site.encode())
        self._generator = torch.Generator()
        self._samples: list[tuple[tuple[int, int], Tensor, Tensor]] = []
        self._moments: tuple[Moments, Moments] | None = None

    def add(self, number: int, x: Tensor, x_quantized: Tensor, place: tuple[int, int]) -> None:
        """Add one call's input, which has a place among those of all ranks."""
        if self._moments is None:
            self._weights = [weight.to(x.device) for weight in self._weights]
            self._moments = self._new_moments()
        # these samples depend neither on the layers before nor on which rank has which call
        self._generator.manual_seed(self._seed + place[0] * _BETWEEN_BATCHES + place[1] * _BETWEEN_CALLS)
        before = self._before[place]
        for rows, rows_quantized, weight in self._rows(x, x_quantized):
            split = self._split(place[0], before, rows.shape[1])
            for moments, own in zip(self._moments, split, strict=True):
                mine = (rows, rows_quantized) if own is None else (rows[:, own], rows_quantized[:, own])
                if not moments.add(*mine, weight, place):
                    where = f"{self._layers[0].site}, batch {number}"
                    raise DataError(f"{where}: the layer's input holds NaN or an infinity")
            before += rows.shape[1]
            if not self._means_of_patches:
                self._sample(rows, rows_quantized, place)
        if self._means_of_patches and self._gathers.samples:
            for rows, rows_quantized, _ in self._patches(x, x_quantized):
                self._sample(rows, rows_quantized, place)

    def problems(self, walk: Walk) -> Iterator[LayerProblem]:
        """Yield the layers' problems, each with its part of the sums."""
        train, held_back = (moments.finish(self._owners) for moments in self._moments or self._new_moments())
        samples = self._all_samples()
        for layer, weight, (part, _) in zip(self._layers, self._weights, self._owners, strict=True):
            guard = _problem(layer, walk, weight, held_back, part) if held_back.rows else None
            yield _problem(layer, walk, weight, train, part, samples=samples, held_back=guard)

    def _new_moments(self) -> tuple[Moments, Moments]:
        weight = torch.cat(list(self._weights), 1) if len(self._weights) > 1 else self._weights[0]
        second, k = self._gathers.second_moments, weight.shape[-1]
        # only a few errors are computed on held-back data: with its rows that is less work than with sums over them
        return Moments(weight, self._bounds, second=second), Moments(weight, self._bounds, second=second, few=2 * k)

    def _split(self, batch: int, before: int, rows: int) -> tuple[slice | Tensor | None, slice | Tensor | None]:
        """Return the rows that count and those that are held back, None for all; so many of all calls are before."""
        every, none = self._gathers.held_back, slice(0, 0)
        if self._by_batch:
            return (none, None) if batch % every == every - 1 else (None, none)
        if not every:
            return None, none
        index = torch.arange(before, before + rows, device=self._weights[0].device)
        held_back = index % every == every - 1
        return (~held_back).nonzero()[:, 0], held_back.nonzero()[:, 0]

    def _rows(self, x: Tensor, x_quantized: Tensor) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Yield the rows that the layers multiply, [groups, rows, K] each, and the number of rows each represents."""
        geometry, (groups, _, k) = self._layers[0].geometry, self._layers[0].layout.matrix_shape
        if geometry is not None and self._means_of_patches:
            yield from self._mean_patches(x, x_quantized)
        elif geometry is not None:
            yield from self._patches(x, x_quantized)
        else:
            rows, rows_quantized = (v.reshape(-1, groups, k).movedim(1, 0) for v in (x, x_quantized))
            total = rows.shape[1]
            chosen = self._sample_rows(total)
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
        x, x_quantized = (with_batch_axis(values, geometry) for values in (x, x_quantized))
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
        x, x_quantized = (with_batch_axis(values, geometry) for values in (x, x_quantized))
        total = output_positions(x, geometry)
        chosen = self._sample_rows(total)
        for some in torch.split(chosen, max(CHUNK // (groups * k), 1)):
            rows = gather_patches(x, some, geometry)
            rows_quantized = rows if x is x_quantized else gather_patches(x_quantized, some, geometry)
            yield rows, rows_quantized, total / len(chosen)

    def _sample_rows(self, total: int) -> Tensor:
        """Return the rows of one call to sample, so that all calls together reach the wanted number."""
        return sample_positions(total, self._limit, self._generator)

    @property
    def _limit(self) -> int | None:
        """Return the number of rows that are sampled of a call, at most; None for all."""
        layer = self._layers[0]
        per_input = self._gathers.rows or (None if layer.geometry is None else PATCHES)
        if per_input is None:
            return None
        return -(-max(per_input * layer.layout.matrix_shape[2], ROWS) // self._batches)

    def _sample(self, rows: Tensor, rows_quantized: Tensor, place: tuple[int, int]) -> None:
        if self._gathers.samples:
            limit = -(-self._gathers.samples // self._batches)
            chosen = sample_positions(rows.shape[1], limit, self._generator)
            self._samples.append((place, rows[:, chosen], rows_quantized[:, chosen]))

    def _all_samples(self) -> tuple[Tensor, Tensor] | None:
        if not self._gathers.samples:
            return None
        # as arrays, which are pickled faster than tensors
        own = [(place, x.cpu().numpy(), x_quantized.cpu().numpy()) for place, x, x_quantized in self._samples]
        every = ranks.gather_to(sorted({owner for _, owner in self._owners}), own)
        if every is None:
            return None
        ordered = sorted((each for some in every for each in some), key=lambda each: each[0])
        limit, device = self._gathers.samples, self._weights[0].device
        groups, _, k = self._layers[0].layout.matrix_shape
        nothing = np.zeros((groups, 0, k), np.float32)
        x = np.concatenate([nothing, *(each[1] for each in ordered)], 1)[:, :limit]
        x_quantized = np.concatenate([nothing, *(each[2] for each in ordered)], 1)[:, :limit]
        return torch.from_numpy(x).to(device), torch.from_numpy(x_quantized).to(device)


def _require_summable(site: str, bounds: Bounds) -> None:
    """Refuse inputs that are so large that float32 cannot add up their squares."""
    largest = max(float(bounds.x_quantized.max()), float(bounds.difference.max()))
    if largest * largest * bounds.count > torch.finfo(torch.float32).max:
        raise DataError(
            f"{site}: its inputs reach {largest:.2g}, and float32 cannot add up the squares of {bounds.count:.0f} such "
            "rows; give data in the range of real inputs, or scale the model's inputs"
        )


def as_tensor(values: Any) -> Tensor:
    """Return a tensor of the same values, float32 unless they are integers; it shares memory if possible."""
    if not isinstance(values, Tensor):  # torch.as_tensor would move tensors to the default device
        values = np.asarray(values)
        values = torch.from_numpy(values if values.flags.writeable else values.copy())
    tensor: Tensor = values.detach()
    return tensor.float() if tensor.is_floating_point() else tensor


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
        input_steps=layer.input_steps,
        **others,
    )
