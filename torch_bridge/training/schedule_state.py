"""What schedules have changed during a training: the ranges that are held, until the block ends, however that ends."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import unserializable_hook

from torch_bridge.quantizers.quantizer import Quantizer
from torch_bridge.sites.runtime import Runtime


class ScheduleState:
    """What schedules have changed in a sim.

    Attributes:
        held: schedule that holds ranges -> the sites whose scales and zero points no optimizer moves.
    """

    def __init__(self, quantizers: Sequence[Quantizer]) -> None:
        self.held: dict[Any, frozenset[str]] = {}
        self._quantizers = quantizers

    def holds(self, site: str) -> bool:
        """Return whether any schedule holds the range of a site."""
        return any(site in sites for sites in self.held.values())

    def zero_held_gradients(self, quantizer: Quantizer) -> None:
        """Make the gradients of a site's learned parameters 0 while its range is held.

        They are not None, because every rank waits for a gradient.
        """
        for name in quantizer.learned_names:
            parameter = quantizer.owner._parameters[name]
            assert parameter is not None
            parameter.register_hook(unserializable_hook(partial(self._gradient, quantizer.site)))  # type: ignore[no-untyped-call]

    def _gradient(self, site: str, gradient: Tensor) -> Tensor | None:
        return gradient.new_zeros(()).expand_as(gradient) if self.holds(site) else None

    def before_step(self, *_: Any) -> None:
        """Remove the gradients of held ranges, so that neither momentum nor weight decay moves them."""
        for quantizer in self._quantizers if self.held else ():
            if quantizer.learned_names and self.holds(quantizer.site):
                for name in quantizer.learned_names:
                    parameter = quantizer.owner._parameters[name]
                    assert parameter is not None
                    parameter.grad = None


@contextmanager
def tracking_schedules(runtime: Runtime, quantizers: Sequence[Quantizer]) -> Iterator[ScheduleState]:
    """Track what schedules change inside the block, and undo it afterwards."""
    schedule_state = runtime.schedule_state = ScheduleState(quantizers)
    handle = register_optimizer_step_pre_hook(schedule_state.before_step)
    try:
        yield schedule_state
    finally:
        handle.remove()
        runtime.schedule_state = None
