"""The outputs of a sim and of its float model, batch by batch."""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.batches import Forward, feed
from torch_bridge.torch_values.pytree import floats_of
from torch_bridge.training.training import eval_mode


def outputs(
    sim: QuantSim, batches: Iterable[Any], forward: Forward | None, *, in_float: bool
) -> Iterator[list[npt.NDArray[np.float32]]]:
    """Yield the floating-point outputs of each batch, in order, of the simulation or in float.

    Raises:
        DataError: a batch that the model does not take.
    """
    for number, batch in enumerate(batches):
        with eval_mode(sim.model), torch.no_grad(), sim.float_phase() if in_float else nullcontext():
            result = feed(sim.model, batch, sim.example, forward, f"batch {number}")
            tensors = floats_of(result, caches=sim.example.has_cache)
        yield [y.float().cpu().numpy() for y in tensors]
