"""Layer problems of embedding tables: a row is read or not, so the statistics are counts of reads."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qsdk.algorithms import ranks
from qsdk.algorithms.problems.calls import Place
from qsdk.core.errors import DataError
from qsdk.core.layers.layer_problem import LayerProblem
from qsdk.core.layers.layer_walk import Layer, Walk


class EmbeddingPart:
    """The tables that are read at the same indices, and the number of reads of each row.

    A table has a group for each row, with one input: its second moment is the number of times that the row is read.
    Every row counts once more, since in use other rows are read than in some batches (Laplace's rule of succession).
    """

    def __init__(
        self, layers: Sequence[Layer], weights: Sequence[Tensor], held_back: int, before: Mapping[Place, int]
    ) -> None:
        """Start with counts of 0.

        Args:
            layers: the tables.
            weights: of each.
            held_back: every n-th index is held back; none if it is 0.
            before: number of indices before each call.
        """
        self._layers, self._weights, self._every, self._before = layers, weights, held_back, before
        self._counts = torch.zeros(2, len(weights[0]), dtype=torch.float64, device=weights[0].device)

    def add(self, number: int, x: Tensor, x_quantized: Tensor, place: Place) -> None:
        """Add one call's indices, those of the quantized model; its place is that among the calls of all ranks.

        Raises:
            DataError: an index is no row of the table; names the layer and the batch.
        """
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
            guard = _problem(layer, walk, weight, held_back) if bool(held_back.any()) else None
            yield _problem(layer, walk, weight, train, guard)


def _problem(
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
