"""One forward pass in float with gradients, whose tensors at sites a visitor sees and may replace."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.batches import Forward, feed
from torch_bridge.torch_values.module_state import snapshot_of, tensors_in
from torch_bridge.torch_values.pytree import floats_of
from torch_bridge.training.training import eval_mode


def visit_tensors(
    sim: QuantSim,
    batch: Any,
    visitor: Callable[[str, Tensor], Tensor],
    forward: Forward | None,
    where: str,
    *,
    everywhere: bool = False,
) -> list[Tensor]:
    """Return the floating-point outputs of the float model for a batch, with the graph of their gradients.

    Args:
        sim: is left as it is; its parameters get no gradients.
        batch: as for `calibrate`.
        visitor: called as (site, values); its result goes on in their place.
        forward: calls the model on a batch.
        where: names the batch in messages.
        everywhere: also take gradients through what the model runs under `torch.no_grad`. What it does there, such as
            writing to a tensor that a gradient needs, may be an error with gradients.

    Raises:
        DataError: the model does not take the batch.
    """
    through = _Gradients() if everywhere else nullcontext()
    with (
        eval_mode(sim.model),
        sim.runtime.in_phase("visit", visitor),
        _constant(sim.model),
        _without_graphs_in(sim.model),
        torch.enable_grad(),
        through,
    ):
        return floats_of(feed(sim.model, batch, sim.example, forward, where), caches=sim.example.has_cache)


class _Gradients(TorchFunctionMode):
    """The function mode in which gradients cannot be switched off, as `torch.no_grad` does."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function, unless it switches gradients off."""
        if func is torch._C._set_grad_enabled and not args[0]:
            return None
        return func(*args, **(kwargs or {}))


@contextmanager
def _without_graphs_in(model: nn.Module) -> Iterator[None]:
    """Put back the modules that have kept a tensor with a graph in the block, such as a table that grows on demand."""
    before = {module: snapshot_of(vars(module)) for module in model.modules()}
    try:
        yield
    finally:
        for module, image in before.items():
            if any(tensor.grad_fn is not None for tensor in tensors_in(vars(module))):
                image.restore()
        for buffer in model.buffers():
            if buffer.grad_fn is not None:  # written in place
                buffer.detach_()


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
