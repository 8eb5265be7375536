"""The calls of a step's layers on all ranks: their places, and what is known of their inputs beforehand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qsdk.algorithms import ranks
from qsdk.algorithms.problems.moments import Bounds
from qsdk.algorithms.problems.patches import output_positions
from qsdk.core.errors import DataError
from qsdk.core.layers.layer_walk import Layer

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
        """Return the places of all calls.

        Args:
            everywhere: of each rank the number of its batches, those that reach the layers, and the number of calls.
        """
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
        """Return for each place the number of rows of the calls before it.

        Args:
            rows: of each rank's calls.
            limit: of the rows of a call that count; None for all.
        """
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
        """Look at the input of a call.

        Raises:
            DataError: it does not fit the layer, or holds NaN or an infinity.
        """
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
