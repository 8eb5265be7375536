"""Walking the layers of a sim in the order they run: one float pass and one quantized pass over the data in all.

Every batch has two suspended forwards, one in float and one quantized. When all stand before a layer they give its
inputs; after it has been solved and written they go on, the float ones with the weights as they were.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qsdk.core.layers.layer_walk import Layer
from qsdk.core.numerics.encoding import Encoding
from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.batches import Forward, progress_over, require_reiterable
from torch_bridge.training.training import eval_mode
from torch_bridge.walk.forward_pairs import ForwardPairs
from torch_bridge.walk.layer_hooks import Came, find_stops, settling, stopping, watches
from torch_bridge.walk.paused_forward import Suspended


@dataclass(frozen=True)
class _Step:
    layers: Sequence[Layer]
    pairs: Callable[[], Iterator[tuple[Tensor, Tensor]]]

    def inputs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The inputs of the layers, call by call."""
        for x, x_quantized in self.pairs():
            yield _as_float(x), _as_float(x_quantized)


def _as_float(x: Tensor) -> Tensor:
    return x.detach().float() if x.is_floating_point() else x.detach()


class LayerWalk:
    """The walk over a sim's layers (`qsdk.core.layers.layer_walk.Walk`)."""

    def __init__(self, sim: QuantSim, data: Iterable[Any], forward: Forward | None, max_memory: int | None) -> None:
        """Find the layers; see `walk_layers`."""
        self._sim, self._data = sim, data
        self._pairs = ForwardPairs(sim, data, forward, max_memory)
        self._stops = find_stops(sim)
        self._pairs.look_at_first_batch(lambda: settling(sim, self._stops))
        self._weights = self._pairs.weights
        self._weights.hold(self._stops.read_early())
        self._watches = watches(sim, self._stops, self._weights.held_now, self._reached)
        self._order = {site: at for at, site in enumerate(self._stops.by_site)}
        self._forwards: list[Suspended] = []
        self._collecting: dict[Suspended, tuple[str, list[Tensor]]] = {}
        self._given: dict[Suspended, list[Came]] = {}
        self._whole = {site for site, stop in self._stops.by_site.items() if stop.repeated}
        self._solved: set[str] = set()
        self._done: set[str] = set()

    @property
    def batches(self) -> int:
        """How many batches the data has."""
        return self._pairs.batches

    @property
    def float_seconds(self) -> float:
        """Seconds spent in the float model so far."""
        return self._pairs.float_seconds

    @property
    def layers(self) -> Sequence[Layer]:
        """All layers, in the order of the graph."""
        return [stop.layer for stop in self._stops.by_site.values()]

    @property
    def left(self) -> dict[str, str]:
        """Weight sites that cannot be solved, and why."""
        return self._stops.left

    def weight(self, site: str) -> Tensor:
        """The stored weight in the float model, float32."""
        return self._weights.original(site)

    def bias(self, site: str) -> Tensor | None:
        """The stored bias of a layer in the float model, float32; None where it has none."""
        bias = self._stops.by_site[site].layer.bias
        return self._weights.original(bias) if bias else None

    def encoding(self, site: str) -> Encoding:
        """The encoding that a weight has now."""
        return self._sim.quantizers[site].encoding()

    def write(
        self, site: str, *, encoding: Encoding | None = None, weight: Any | None = None, bias_shift: Any | None = None
    ) -> None:
        """Change the quantized model at a layer, as `Walk.write` says."""
        self._weights.write(site, encoding=encoding, weight=weight, frozen=weight is not None)
        if bias_shift is not None:
            self._weights.shift(self._stops.by_site[site].layer.bias, bias_shift)

    @contextmanager
    def started(self) -> Iterator[None]:
        """Inside, there are forwards of all batches, that stand before their first layers; the walk ends with it."""
        with stopping(self._sim, self._stops, self._reached), self._pairs.started(self._watches) as self._forwards:
            yield

    def __iter__(self) -> Iterator[_Step]:
        """The steps."""
        while (site := self._next_site()) is not None:
            sites: Sequence[str] = (site,)
            if site in self._whole or site in self._solved:
                self._done.add(site)
                yield self._step(sites, partial(self._all_calls, site))
            elif pairs := self._standing_before(site):
                sites = [name for name in self._stops.group_of(site) if name not in self._solved]
                self._solved.update(sites)
                yield self._step(sites, partial(self._inputs, pairs))
                pairs.clear()
            self._go_on(sites)

    def _step(self, sites: Sequence[str], pairs: Callable[[], Iterator[tuple[Tensor, Tensor]]]) -> _Step:
        return _Step([self._stops.by_site[site].layer for site in sites], pairs)

    def _reached(self, site: str, x: Tensor) -> None:
        """A forward comes to a layer: it stops there, unless the layer has been dealt with."""
        one = self._pairs.running
        if one is None:
            return
        if one in self._collecting:
            wanted, found = self._collecting[one]
            if site == wanted:
                found.append(x)
            return
        came = Came.to(site, x)
        if site in self._done or any(came.repeats(known) for known in self._given.get(one, ()) if known.site == site):
            return
        self._given.pop(one, None)
        self._pairs.stop(came)

    def _next_site(self) -> str | None:
        """The first layer in the order of the graph that any forward stands before."""
        self._forwards = [one for one in self._forwards if not one.finished]
        return min((one.at.site for one in self._forwards), key=self._order.__getitem__, default=None)

    def _standing_before(self, site: str) -> list[tuple[Suspended, Suspended]]:
        """The forwards, float and quantized, of the batches that both stand before a layer."""
        found: dict[bool, dict[int, Suspended]] = {False: {}, True: {}}
        for one in self._forwards:
            if one.at.site == site:
                found[one.quantized][one.number] = one
        return [(one, found[True][number]) for number, one in found[False].items() if number in found[True]]

    def _inputs(self, pairs: Sequence[tuple[Suspended, Suspended]]) -> Iterator[tuple[Tensor, Tensor]]:
        """The inputs of the layer that forwards stand before."""
        for pair in pairs:
            with self._pairs.present(*pair):
                x, x_quantized = (one.at.x.clone() if self._pairs.spills else one.at.x for one in pair)
            yield x, x_quantized

    def _all_calls(self, site: str) -> Iterator[tuple[Tensor, Tensor]]:
        """The inputs of a layer that forwards call several times, by forwards of their own, as the model is now."""
        require_reiterable(self._data, f"the layer {site}, which a batch calls several times,")
        for number, batch in progress_over(self._data, "layers", progress=False):
            both: list[list[Tensor]] = []
            for quantized in (False, True):
                one = self._pairs.begin(number, batch, quantized=quantized, watches=self._watches)
                both.append([])
                self._collecting[one] = (site, both[-1])
                self._pairs.resume([one])
                del self._collecting[one]
            yield from zip(*both, strict=False)

    def _go_on(self, sites: Sequence[str]) -> None:
        """Let the forwards that stand before the first of these layers go on; all of them are dealt with."""
        going = [one for one in self._forwards if one.at.site == sites[0]]
        self._weights.forget()
        for one in going:
            self._given[one] = [replace(one.at, site=site) for site in sites]
        self._pairs.resume(going)
        for one in going:
            if one.finished:
                self._given.pop(one, None)
        self._weights.release(self._stops.read_early(sites))


@contextmanager
def walk_layers(
    sim: QuantSim, data: Iterable[Any], *, forward: Forward | None = None, max_memory: int | None = None
) -> Iterator[LayerWalk]:
    """Walk the layers of a sim (`layers.layer_walk.Walk` of the core) in eval mode, one pass in float, one quantized.

    A layer that a batch calls several times costs a pass of either kind more, since its weight is one for all calls.

    Args:
        sim: calibrated.
        data: batches.
        forward: calls the model on a batch.
        max_memory: bytes that forwards may hold where they stand; beyond it, tensors go to temporary files. None: no
            bound.

    Raises:
        DataError: no data, data that the model does not take, or more batches than there can be forwards in flight.
        CalibrationError: a site has no encoding yet. Whatever is raised, here or inside the block, the sim stays as
            it was.
    """
    _ = sim.encodings  # names the sites that have none
    with sim.alone(), eval_mode(sim.model), torch.no_grad():
        walk = LayerWalk(sim, data, forward, max_memory)
        with walk.started():
            yield walk
