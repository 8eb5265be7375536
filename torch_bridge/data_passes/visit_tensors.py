"""One forward pass in float with gradients, whose tensors at sites a visitor sees and may replace."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.batches import Forward, feed
from torch_bridge.torch_values.pytree import floats_of
from torch_bridge.training.training import eval_mode


def visit_tensors(
    sim: QuantSim, batch: Any, visitor: Callable[[str, Tensor], Tensor], forward: Forward | None, where: str
) -> list[Tensor]:
    """Return the floating-point outputs of the float model for a batch, with the graph of their gradients.

    Args:
        sim: is left as it is; its parameters get no gradients.
        batch: as for `calibrate`.
        visitor: called as (site, values); its result goes on in their place.
        forward: calls the model on a batch.
        where: names the batch in messages.

    Raises:
        DataError: the model does not take the batch.
    """
    with eval_mode(sim.model), sim.runtime.in_phase("visit", visitor), _constant(sim.model), torch.enable_grad():
        return floats_of(feed(sim.model, batch, sim.example, forward, where), caches=sim.example.has_cache)


@contextmanager
def _constant(model: nn.Module) -> Iterator[None]:
    """Keep gradients from the model's own parameters inside the block."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
