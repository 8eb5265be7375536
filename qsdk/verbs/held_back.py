"""Batches that a verb holds back, to judge by the model's own outputs whether what it did is better."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from onnx_backend.data_passes import outputs as onnx_outputs
from onnx_backend.sim import OnnxSim
from qsdk.algorithms import ranks
from qsdk.verbs.quantize import Forward, Sim
from torch_bridge.data_passes import outputs as torch_outputs

#: batches, of which one is held back
EVERY = 4


class HeldBack:
    """The data without every fourth batch, which is kept; where there are fewer, all are given, and the first is kept.

    Attributes:
        batches: those that were kept, once the data has been read.
    """

    def __init__(self, data: Iterable[Any]) -> None:
        """Read nothing yet."""
        self.batches: list[Any] = []
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        """The other batches."""
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
        """The data without what is held back: to be read once if the data can be, more often otherwise."""
        one_batch = isinstance(self._data, Mapping) or hasattr(self._data, "__array__")
        if one_batch or not isinstance(self._data, Iterable):
            return self._data  # whoever reads it says what is wrong with it
        return iter(self) if isinstance(self._data, Iterator) else self


def outputs_of(
    sim: Sim, batches: Iterable[Any], forward: Forward | None, *, in_float: bool = False
) -> list[list[npt.NDArray[np.float32]]]:
    """The floating-point outputs of each batch, of the simulation or of the model in float, at either door."""
    if isinstance(sim, OnnxSim):
        return list(onnx_outputs.outputs(sim, batches, in_float=in_float))
    return list(torch_outputs.outputs(sim, batches, forward, in_float=in_float))


def output_error(
    wanted: Sequence[Sequence[npt.NDArray[np.float32]]], found: Sequence[Sequence[npt.NDArray[np.float32]]]
) -> float | None:
    """The squared error of outputs over their energy, summed over the batches of all ranks, on average over outputs.

    Values that are not finite are left out. None where there are no outputs.
    """
    sums = np.zeros((2, max(map(len, wanted), default=0)))
    for exact, given in zip(wanted, found, strict=True):
        for index, (y, x) in enumerate(zip(exact, given, strict=True)):
            finite = np.isfinite(y) & np.isfinite(x)
            exactly, missed = y[finite].astype(np.float64), (x - y)[finite].astype(np.float64)
            sums[:, index] += float(missed @ missed), float(exactly @ exactly)
    total = torch.from_numpy(sums)
    ranks.all_reduce_sum([total])
    errors, energies = total
    return None if not len(errors) else float((errors / energies.clip(torch.finfo(torch.float64).tiny)).mean())
