"""What schedules have changed for the time of a training: ranges that are observed or held, finer grids.

All of it ends with the training block, whatever ends that.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import unserializable_hook

from torch_bridge.quantizers.quantizer import Quantizer
from torch_bridge.sites.runtime import Runtime


class Observing(Protocol):
    """Observes ranges."""

    def close(self) -> None:
        """Stop."""


class Course:
    """What schedules have changed.

    Attributes:
        held: who holds ranges -> the sites whose scales and zero points no optimizer moves.
        bits: who has given sites finer grids -> of how many bits.
        observer: of ranges.
    """

    def __init__(self, quantizers: Sequence[Quantizer]) -> None:
        self.held: dict[Any, frozenset[str]] = {}
        self.bits: dict[Any, int] = {}
        self.observer: Observing | None = None
        self._quantizers = quantizers

    @property
    def busy(self) -> bool:
        """Whether it has put anything in the way of quantizers."""
        return self.observer is not None or bool(self.bits)

    def holds(self, site: str) -> bool:
        """Whether anybody holds the range of a site."""
        return any(site in sites for sites in self.held.values())

    def guard(self, quantizer: Quantizer) -> None:
        """Let what is learned for a site have a gradient of 0 while it is held: ranks wait for each other's."""
        for name in quantizer.learned_names:
            parameter = quantizer.owner._parameters[name]
            assert parameter is not None
            parameter.register_hook(unserializable_hook(partial(self._gradient, quantizer.site)))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Take everything back."""
        if self.observer is not None:
            self.observer.close()
        for quantizer in self._quantizers:
            quantizer.finer = None

    def _gradient(self, site: str, gradient: Tensor) -> Tensor | None:
        return gradient.new_zeros(()).expand_as(gradient) if self.holds(site) else None

    def before_step(self, *_: Any) -> None:
        """Take the gradients away, so that neither momentum nor weight decay moves what is held."""
        for quantizer in self._quantizers if self.held else ():
            if quantizer.learned_names and self.holds(quantizer.site):
                for name in quantizer.learned_names:
                    parameter = quantizer.owner._parameters[name]
                    assert parameter is not None
                    parameter.grad = None


@contextmanager
def on_course(runtime: Runtime, quantizers: Sequence[Quantizer]) -> Iterator[Course]:
    """Let schedules change a sim for a while."""
    course = runtime.course = Course(quantizers)
    handle = register_optimizer_step_pre_hook(course.before_step)
    try:
        yield course
    finally:
        handle.remove()
        runtime.course = None
        course.close()
