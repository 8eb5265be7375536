"""Forwards of all batches side by side, each suspended where it stands: one in float and one quantized."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from qsdk.core.sims.corrected_biases import float_biases
from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.batches import Forward, feed, progress_over
from torch_bridge.walk.layer_weights import LayerWeights
from torch_bridge.walk.offload import Spill
from torch_bridge.walk.paused_forward import Baton, Suspended, attributes_set_by


class ForwardPairs:
    """Begins, resumes and ends the forwards of a walk.

    Attributes:
        weights: what the float and the quantized forwards read.
        batches: how many have begun.
        float_seconds: spent in float forwards.
    """

    def __init__(
        self, sim: QuantSim, data: Iterable[Any], forward: Forward | None, max_memory: int | None = None
    ) -> None:
        """Read the first batch; what forwards hold beyond `max_memory` bytes goes to temporary files."""
        self.weights = LayerWeights(sim)
        self.batches = 0
        self.float_seconds = 0.0
        self._sim, self._forward = sim, forward
        self._numbered = progress_over(data, "layers", progress=False)
        self._first = next(self._numbered)
        self._baton = Baton(sim.runtime)
        self._spill = None if max_memory is None else Spill(max_memory)

    @property
    def running(self) -> Suspended | None:
        """The forward that has the baton; None outside of them."""
        return self._baton.running

    def look_at_first_batch(self, inside: Callable[[], AbstractContextManager[Any]]) -> None:
        """Run the first batch in float, inside a context, and find what forwards set on modules: each has its own."""

        def run() -> None:
            with inside(), self._sim.float_phase():
                self._feed(*self._first)

        random = torch.get_rng_state()
        try:
            self._baton.attributes = attributes_set_by(self._sim.model, run)
        finally:
            torch.set_rng_state(random)

    @contextmanager
    def started(self, watches: dict[bool, TorchFunctionMode] | None = None) -> Iterator[list[Suspended]]:
        """Inside, there are forwards of all batches, brought to their first stops.

        Afterwards they are unwound. What was written stays if the block succeeds and is taken back if it raises.

        Args:
            watches: entered by every float (False) and every quantized forward.
        """
        begun = []
        try:
            self.weights.start_from(float_biases(self._sim))
            try:
                for number, batch in chain([self._first], self._numbered):
                    self.batches += 1
                    for quantized in (False, True):
                        begun.append(self.begin(number, batch, quantized=quantized, watches=watches))
                        self.resume(begun[-1:])
                yield begun
            finally:
                self._baton.close()
                if self._spill is not None:
                    self._spill.close()
            self.weights.keep()
        except BaseException:
            self.weights.take_back()
            raise

    def begin(
        self, number: int, batch: Any, *, quantized: bool, watches: dict[bool, TorchFunctionMode] | None = None
    ) -> Suspended:
        """A forward that starts when it is first resumed."""

        def run() -> None:
            with ExitStack() as stack:
                if watches is not None:
                    stack.enter_context(watches[quantized])
                if self._spill is not None:
                    stack.enter_context(self._spill.tracking(begun))
                self._feed(number, batch)

        begun = self._baton.add(
            number, run, "visit" if quantized else "float", self.weights.visit if quantized else None
        )
        return begun

    def stop(self, at: Any) -> None:
        """Inside a forward: suspend it, standing at this."""
        self._baton.stop(at)

    def resume(self, forwards: Sequence[Suspended]) -> None:
        """Let forwards go on to their next stops, first those in float, with the weights as they were."""
        start = time.perf_counter()
        in_float = [one for one in forwards if not one.quantized]
        if in_float:
            with self.weights.floats():
                for one in in_float:
                    self._resume(one)
            self.float_seconds += time.perf_counter() - start
        for one in forwards:
            if one.quantized:
                self._resume(one)

    def _resume(self, one: Suspended) -> None:
        if self._spill is not None:
            self._spill.bring_back(one)
        self._baton.resume(one)
        if self._spill is not None:
            self._spill.stands(one, self.weights.read_now())

    @contextmanager
    def present(self, *forwards: Suspended) -> Iterator[None]:
        """Inside, the tensors of these forwards are in memory; what is to last longer must be copied."""
        if self._spill is None:
            yield
            return
        for one in forwards:
            self._spill.bring_back(one)
        yield
        for one in forwards:
            self._spill.stands(one, self.weights.read_now())

    @property
    def spills(self) -> bool:
        """Whether tensors of forwards may be away."""
        return self._spill is not None

    def _feed(self, number: int, batch: Any) -> None:
        feed(self._sim.model, batch, self._sim.example, self._forward, f"batch {number}")
