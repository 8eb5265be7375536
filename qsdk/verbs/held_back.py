"""Batches that a verb holds back, to judge its result by the model's own outputs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from qsdk.algorithms import ranks

#: one batch of so many is held back
EVERY = 4


class HeldBack:
    """The data without every fourth batch, which is held back.

    Of fewer batches all are used, and the first is held back too.
    """

    def __init__(self, data: Iterable[Any]) -> None:
        """Read nothing yet."""
        self.batches: list[Any] = []
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        """Yield the other batches."""
        self.batches = []
        first = None
        for number, batch in enumerate(self._data):
            if number % EVERY == EVERY - 1:
                self.batches.append(batch)
                continue
            first = [batch] if first is None else first
            yield batch
        self.batches = self.batches or first or []

    def others(self) -> Iterable[Any]:
        """Return the data without the held-back batches; it can be read again if the data can."""
        one_batch = isinstance(self._data, Mapping) or hasattr(self._data, "__array__")
        if one_batch or not isinstance(self._data, Iterable):
            return self._data  # whoever reads it raises the error
        return iter(self) if isinstance(self._data, Iterator) else self


def output_error(
    wanted: Sequence[Sequence[npt.NDArray[np.float32]]], outputs: Sequence[Sequence[npt.NDArray[np.float32]]]
) -> float | None:
    """Return the squared error of outputs relative to their energy, over all batches and ranks, averaged over outputs.

    Values that are not finite are left out. None where there are no outputs.
    """
    sums = np.zeros((2, max(map(len, wanted), default=0)))
    for exact, given in zip(wanted, outputs, strict=True):
        for index, (y, x) in enumerate(zip(exact, given, strict=True)):
            finite = np.isfinite(y) & np.isfinite(x)
            exactly, missed = y[finite].astype(np.float64), (x - y)[finite].astype(np.float64)
            sums[:, index] += float(missed @ missed), float(exactly @ exactly)
    total = torch.from_numpy(sums)
    ranks.all_reduce_sum([total])
    errors, energies = total
    return None if not len(errors) else float((errors / energies.clip(torch.finfo(torch.float64).tiny)).mean())
