"""Forwards of all batches side by side, each paused where it is: one in float and one quantized."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from qsdk.core.freed_memory import FreedMemory
from qsdk.core.sims.biases import float_biases
from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.batches import Forward, feed, progress_over
from torch_bridge.walk.float_products import float_products
from torch_bridge.walk.layer_weights import LayerWeights
from torch_bridge.walk.offload import Offloader
from torch_bridge.walk.paused_forward import PausedForward, Scheduler, attributes_set_by


class ForwardPairs:
    """The float and the quantized forwards of a walk: it starts, resumes and ends them.

    Attributes:
        weights: the weights that float and quantized forwards read.
        batches: number of batches that were started.
        float_seconds: spent in float forwards.
    """

    def __init__(
        self, sim: QuantSim, data: Iterable[Any], forward: Forward | None, max_memory: int | None = None
    ) -> None:
        """Read the first batch; beyond `max_memory` bytes, tensors of forwards go to temporary files."""
        self.weights = LayerWeights(sim)
        self.batches = 0
        self.float_seconds = 0.0
        self._sim, self._forward = sim, forward
        self._batches = progress_over(data, "layers", progress=False)
        self._first = next(self._batches)
        self._scheduler = Scheduler(sim.runtime)
        self._offloader = None if max_memory is None else Offloader(max_memory)
        self._freed = FreedMemory()

    @property
    def running(self) -> PausedForward | None:
        """Return the forward that runs now; None outside of forwards."""
        return self._scheduler.running

    def run_first_batch(self, inside: Callable[[], AbstractContextManager[Any]]) -> None:
        """Run the first batch in float, inside a context, and find what forwards set on modules.

        From then on, each forward has its own values there.
        """

        def run() -> None:
            with float_products(self._sim.model), inside(), self._sim.float_phase():
                self._feed(*self._first)

        random = torch.get_rng_state()
        try:
            self._scheduler.attributes = attributes_set_by(self._sim.model, run)
        finally:
            torch.set_rng_state(random)

    @contextmanager
    def started(self, modes: dict[bool, TorchFunctionMode] | None = None) -> Iterator[list[PausedForward]]:
        """Start forwards of all batches, run them to their first pauses, and return them; after the block, end them.

        What was written stays if the block succeeds and is undone if it raises.

        Args:
            modes: entered by every float (False) and every quantized forward (True).
        """
        forwards = []
        try:
            self.weights.set_floats(float_biases(self._sim))
            try:
                for number, batch in chain([self._first], self._batches):
                    self.batches += 1
                    for quantized in (False, True):
                        forwards.append(self.add_forward(number, batch, quantized=quantized, modes=modes))
                        self.resume(forwards[-1:])
                yield forwards
            finally:
                self._scheduler.close()
                if self._offloader is not None:
                    self._offloader.close()
            self.weights.keep()
        except BaseException:
            self.weights.undo()
            raise

    def add_forward(
        self,
        number: int,
        batch: Any,
        *,
        quantized: bool,
        modes: dict[bool, TorchFunctionMode] | None = None,
    ) -> PausedForward:
        """Return a forward that starts when it is first resumed."""

        def run() -> None:
            with ExitStack() as stack:
                stack.enter_context(float_products(self._sim.model))  # before the modes that know weights by identity
                if modes is not None:
                    stack.enter_context(modes[quantized])
                if self._offloader is not None:
                    stack.enter_context(self._offloader.tracker_for(paused))
                self._feed(number, batch)

        paused = self._scheduler.add(
            number, run, "visit" if quantized else "float", self.weights.visit if quantized else None
        )
        return paused

    def pause(self, at: Any) -> None:
        """Pause the running forward, from inside it."""
        self._scheduler.pause(at)

    def resume(self, forwards: Sequence[PausedForward]) -> None:
        """Run forwards to their next pauses, first those in float, with the weights as they were."""
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

    def end(self, forwards: Sequence[PausedForward]) -> None:
        """End forwards where they are paused: what comes behind is needed no more."""
        for one in forwards:
            self._scheduler.end(one)

    def _resume(self, one: PausedForward) -> None:
        if self._offloader is not None:
            self._offloader.load(one)
        self._scheduler.resume(one)
        if self._offloader is not None:
            self._offloader.after_pause(one, self.weights.cached_tensors())
        self._freed.bound()

    @contextmanager
    def in_memory(self, *forwards: PausedForward) -> Iterator[None]:
        """Keep the tensors of these forwards in memory inside the block; copy what is to last longer."""
        if self._offloader is None:
            yield
            return
        for one in forwards:
            self._offloader.load(one)
        yield
        for one in forwards:
            self._offloader.after_pause(one, self.weights.cached_tensors())

    @property
    def offloads(self) -> bool:
        """Return whether tensors of forwards may be in files."""
        return self._offloader is not None

    def _feed(self, number: int, batch: Any) -> None:
        feed(self._sim.model, batch, self._sim.example, self._forward, f"batch {number}")
