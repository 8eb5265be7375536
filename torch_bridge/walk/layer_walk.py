"""A walk over the layers of a sim in the order they run: one float pass and one quantized pass over the data in all.

Every batch has two paused forwards, one in float and one quantized. When all are paused before a layer, they give its
inputs; after it has been solved and written they go on, the float ones with the weights as they were.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qsdk.core.layers.layer_problem import Layer
from qsdk.core.numerics.encoding import Encoding
from torch_bridge.quantizers.quantizer import fake_quantize_blocks
from torch_bridge.sim import QuantSim
from torch_bridge.sites.experts import mark_unrouted, routing_to_all
from torch_bridge.torch_values.batches import Forward, progress_over, require_reiterable
from torch_bridge.training.training import eval_mode
from torch_bridge.walk.forward_pairs import ForwardPairs, LayerWeights
from torch_bridge.walk.hooked_layers import (
    LayerInput,
    find_hooked_layers,
    hooks_before_layers,
    resolving_readers,
    weight_read_modes,
)
from torch_bridge.walk.paused_forward import PausedForward


@dataclass(frozen=True)
class _Step:
    layers: Sequence[Layer]
    reached: Sequence[int]
    pairs: Callable[[], Iterator[tuple[Tensor, Tensor]]]

    def inputs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the float and the quantized inputs of the layers, call by call."""
        for x, x_quantized in self.pairs():
            yield _as_float(x), _as_float(x_quantized)


def _as_float(x: Tensor) -> Tensor:
    return x.detach().float() if x.is_floating_point() else x.detach()


class LayerWalk:
    """The walk over a sim's layers (`qsdk.core.layers.layer_problem.Walk`)."""

    def __init__(
        self,
        sim: QuantSim,
        data: Iterable[Any],
        forward: Forward | None,
        max_memory: int | None,
        *,
        all_experts: bool = False,
    ) -> None:
        """Find the layers; see `walk_layers`."""
        self._sim, self._data = sim, data
        self._pairs = ForwardPairs(sim, data, forward, max_memory)
        self._hooked = find_hooked_layers(sim)
        self._pairs.run_first_batch(lambda: resolving_readers(sim, self._hooked))
        self._weights = self._pairs.weights
        self._weights.hold(self._hooked.read_early())
        self._weight_read_modes = weight_read_modes(sim, self._hooked, self._weights.held_tensors, self._on_layer)
        self._order = {site: at for at, site in enumerate(self._hooked.by_site)}
        self._forwards: list[PausedForward] = []
        self._collecting: dict[PausedForward, tuple[str, list[Tensor]]] = {}
        self._inputs_given: dict[PausedForward, list[LayerInput]] = {}
        self._repeated = {site for site, hooked in self._hooked.by_site.items() if hooked.repeated}
        stacks = {site: hooked for site, hooked in self._hooked.by_site.items() if hooked.experts}
        self._experts = SolvedExperts(self._weights, sim, {s: hooked.experts for s, hooked in stacks.items()})
        self.tokens_of_experts: dict[str, tuple[int, ...]] = {}
        self._to_all = list(stacks) if all_experts else []
        self._routed: dict[tuple[PausedForward | None, str], Tensor] = {}
        self._solved: set[str] = set()
        self._done: set[str] = set()

    @property
    def batches(self) -> int:
        """Return the number of batches."""
        return self._pairs.batches

    @property
    def float_seconds(self) -> float:
        """Return the seconds spent in the float model so far."""
        return self._pairs.float_seconds

    @property
    def layers(self) -> Sequence[Layer]:
        """Return all layers, in the order of the graph."""
        return [layer for hooked in self._hooked.by_site.values() for layer in hooked.experts or (hooked.layer,)]

    @property
    def left(self) -> dict[str, str]:
        """Return weight site -> reason, for weights that cannot be solved."""
        return self._hooked.left

    def weight(self, site: str) -> Tensor:
        """Return the stored weight in the float model, float32."""
        return self._experts.weight(site) if site in self._experts else self._weights.original(site)

    def bias(self, site: str) -> Tensor | None:
        """Return the stored bias of a layer in the float model, float32; None where it has none."""
        bias = "" if site in self._experts else self._hooked.by_site[site].layer.bias
        return self._weights.original(bias) if bias else None

    def encoding(self, site: str) -> Encoding:
        """Return the encoding that a weight has now."""
        return self._experts.encoding(site) if site in self._experts else self._sim.quantizers[site].encoding()

    def write(
        self, site: str, *, encoding: Encoding | None = None, weight: Any | None = None, bias_shift: Any | None = None
    ) -> None:
        """Change the quantized model at a layer, see `Walk.write`."""
        if site in self._experts:
            self._experts.write(site, encoding, weight)
            return
        self._weights.write(site, encoding=encoding, weight=weight, frozen=weight is not None)
        if bias_shift is not None:
            self._weights.shift(self._hooked.by_site[site].layer.bias, bias_shift)

    @contextmanager
    def started(self) -> Iterator[None]:
        """Run forwards of all batches up to their first layers; the walk ends with the block."""
        with (
            hooks_before_layers(self._sim, self._hooked, self._on_layer),
            routing_to_all(self._sim.model, self._to_all, self._note_routed),
            self._pairs.started(self._weight_read_modes) as self._forwards,
        ):
            yield

    def __iter__(self) -> Iterator[_Step]:
        """Yield the steps."""
        while (site := self._next_site()) is not None:
            sites: Sequence[str] = (site,)
            if site in self._repeated or site in self._solved:
                self._done.add(site)
                yield self._step(sites, range(self.batches), partial(self._all_calls, site))
            elif (pairs := self._pairs_paused_at(site)) and self._hooked.by_site[site].experts:
                self._solved.add(site)
                for layer in self._hooked.by_site[site].experts:
                    rows = partial(self._expert_inputs, pairs, layer)
                    yield _Step([layer], [one.number for one, _ in pairs], rows)
                self._experts.store(site)
                self.tokens_of_experts[site] = self._tokens_of_experts(pairs)
                pairs.clear()
            elif pairs:
                sites = [name for name in self._hooked.group_of(site) if name not in self._solved]
                self._solved.update(sites)
                yield self._step(sites, [one.number for one, _ in pairs], partial(self._inputs, pairs))
                pairs.clear()
            self._resume_from(sites)

    def _step(
        self, sites: Sequence[str], reached: Sequence[int], pairs: Callable[[], Iterator[tuple[Tensor, Tensor]]]
    ) -> _Step:
        return _Step([self._hooked.by_site[site].layer for site in sites], reached, pairs)

    def _on_layer(self, site: str, x: Tensor, numbers: Tensor | None) -> None:
        """Pause a forward that has reached a layer, unless the layer is done."""
        one = self._pairs.running
        if one is None:
            return
        if one in self._collecting:
            wanted, inputs = self._collecting[one]
            if site == wanted:
                inputs.append(x.clone())  # the pass goes on, and may write over it
            return
        routed = self._routed.get((one, site))
        if routed is not None and numbers is not None:
            numbers = mark_unrouted(numbers, routed)
        layer_input = LayerInput.to(site, x, numbers)
        if site in self._done or any(
            layer_input.repeats(known) for known in self._inputs_given.get(one, ()) if known.site == site
        ):
            return
        self._inputs_given.pop(one, None)
        self._pairs.pause(layer_input)

    def _note_routed(self, sites: Sequence[str], routed: Tensor) -> None:
        for site in sites:
            self._routed[self._pairs.running, site] = routed

    def _next_site(self) -> str | None:
        """Return the first layer in the order of the graph before which a forward is paused."""
        self._forwards = [one for one in self._forwards if not one.finished]
        return min((one.at.site for one in self._forwards), key=self._order.__getitem__, default=None)

    def _pairs_paused_at(self, site: str) -> list[tuple[PausedForward, PausedForward]]:
        """Return the float and quantized forwards of the batches of which both are paused before a layer."""
        result: dict[bool, dict[int, PausedForward]] = {False: {}, True: {}}
        for one in self._forwards:
            if one.at.site == site:
                result[one.quantized][one.number] = one
        return [(one, result[True][number]) for number, one in result[False].items() if number in result[True]]

    def _inputs(self, pairs: Sequence[tuple[PausedForward, PausedForward]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the inputs of the layer before which forwards are paused."""
        for pair in pairs:
            with self._pairs.in_memory(*pair):
                x, x_quantized = (one.at.x.clone() if self._pairs.offloads else one.at.x for one in pair)
            yield x, self._rounded(pairs[0][0].at.site, x_quantized)

    def _tokens_of_experts(self, pairs: Sequence[tuple[PausedForward, PausedForward]]) -> tuple[int, ...]:
        """Return how many tokens the routers of the quantized model chose each expert of a stack for."""
        count = len(self._hooked.by_site[pairs[0][1].at.site].experts)
        counts = [torch.bincount(pair[1].at.numbers, minlength=count)[:count].cpu() for pair in pairs]
        return tuple(torch.stack(counts).sum(0).tolist())

    def _expert_inputs(
        self, pairs: Sequence[tuple[PausedForward, PausedForward]], layer: Layer
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rows of one expert, those of the quantized model twice: a float one may route other tokens to it.

        Where every token went through all experts, one to which fewer than it has inputs were routed gets all.
        """
        numbers = [pair[1].at.numbers for pair in pairs]
        if sum(int((own == layer.expert).sum()) for own in numbers) < layer.layout.matrix_shape[2]:
            count = len(self._hooked.by_site[pairs[0][1].at.site].experts)
            numbers = [own % count for own in numbers]
        for pair, own in zip(pairs, numbers, strict=True):
            with self._pairs.in_memory(*pair):
                reached = pair[1].at
                rows = reached.x.reshape(-1, reached.x.shape[-1])[own == layer.expert].clone()
            yield rows, rows

    def _all_calls(self, site: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the inputs of a layer that a batch calls several times, from forwards of their own.

        They run the model as it is now.
        """
        require_reiterable(self._data, f"the layer {site}, which a batch calls several times,")
        for number, batch in progress_over(self._data, "layers", progress=False):
            both: list[list[Tensor]] = []
            for quantized in (False, True):
                one = self._pairs.add_forward(number, batch, quantized=quantized, modes=self._weight_read_modes)
                both.append([])
                self._collecting[one] = (site, both[-1])
                self._pairs.resume([one])
                del self._collecting[one]
            yield from ((x, self._rounded(site, rounded)) for x, rounded in zip(*both, strict=False))

    def _rounded(self, site: str, x: Tensor) -> Tensor:
        """Return the input of a layer as the quantized model multiplies it; a function is given it so."""
        block = self._sim.plan.decisions[site].input_block
        return x if block is None or self._hooked.by_site[site].module is None else fake_quantize_blocks(x, block)

    def _resume_from(self, sites: Sequence[str]) -> None:
        """Resume the forwards that are paused before the first of these layers, all of which are done.

        Behind the last layer of all, forwards in float go on alone: their time is what passes are counted in, and one
        that reaches a layer again shows that it is to be solved again. The quantized ones would show nothing more.
        """
        going = [one for one in self._forwards if one.at.site == sites[0]]
        if self._hooked.by_site.keys() <= self._solved | self._done:
            self._pairs.end([one for one in going if one.quantized])
            going = [one for one in going if not one.quantized]
        self._weights.drop_cache()
        for one in going:
            self._inputs_given[one] = [replace(one.at, site=site) for site in sites]
        self._pairs.resume(going)
        for one in going:
            if one.finished:
                self._inputs_given.pop(one, None)
        self._weights.release(self._hooked.read_early(sites))


@contextmanager
def walk_layers(
    sim: QuantSim,
    data: Iterable[Any],
    *,
    forward: Forward | None = None,
    max_memory: int | None = None,
    all_experts: bool = False,
) -> Iterator[LayerWalk]:
    """Walk the layers of a sim in eval mode, with one pass in float and one quantized.

    The walk is a `qsdk.core.layers.layer_problem.Walk`. A layer that a batch calls several times costs one more pass of
    either kind, since its weight is one for all calls. Beyond `max_memory` bytes, tensors of paused forwards go to
    temporary files. With `all_experts` every token runs through all experts of a mixture. Whatever is raised, here or
    inside the block, the sim stays as it was.
    """
    _ = sim.encodings  # raises where a site has no encoding
    with sim.alone(), eval_mode(sim.model), torch.no_grad():
        walk = LayerWalk(sim, data, forward, max_memory, all_experts=all_experts)
        with walk.started():
            yield walk
        sim.tokens_of_experts = {**sim.tokens_of_experts, **walk.tokens_of_experts}


# --- stacks of experts: solved one by one, stored when all are --------------------------------------------------------


@dataclass
class _Stack:
    """A stack that is being solved: its values, its encoding, and whether values were written."""

    values: Tensor
    encoding: Encoding
    rounded: bool = False


class SolvedExperts:
    """The experts of a walk, by the site of each: `...:down_proj[3]`."""

    def __init__(self, weights: LayerWeights, sim: QuantSim, stacks: Mapping[str, Sequence[Layer]]) -> None:
        self._weights, self._sim = weights, sim
        self._places = {layer.site: (site, number) for site, own in stacks.items() for number, layer in enumerate(own)}
        self._open: dict[str, _Stack] = {}

    def __contains__(self, site: str) -> bool:
        return site in self._places

    def weight(self, site: str) -> Tensor:
        """Return the weight of an expert in the float model, float32."""
        stack, number = self._places[site]
        return self._weights.original(stack)[number]

    def encoding(self, site: str) -> Encoding:
        """Return the encoding that the weight of an expert has now, as that of a matrix."""
        stack, number = self._places[site]
        held = self._open.get(stack)
        whole = self._sim.quantizers[stack].encoding() if held is None else held.encoding
        axis = None if whole.axis is None else whole.axis - 1
        return replace(whole, scale=whole.scale[number], zero_point=whole.zero_point[number], axis=axis)

    def write(self, site: str, encoding: Encoding | None, weight: Tensor | None) -> None:
        """Keep what an expert gets until its stack is stored: copying whole stacks for each expert takes long."""
        stack, number = self._places[site]
        if stack not in self._open:
            values = self._weights.original(stack).clone()
            self._open[stack] = _Stack(values, self._sim.quantizers[stack].encoding())
        held = self._open[stack]
        if encoding is not None:
            scale, zero_point = np.array(held.encoding.scale), np.array(held.encoding.zero_point)
            scale[number], zero_point[number] = encoding.scale, encoding.zero_point
            held.encoding = replace(held.encoding, scale=scale, zero_point=zero_point)
        if weight is not None:
            held.values[number], held.rounded = weight, True

    def store(self, stack: str) -> None:
        """Change the quantized model at a stack, as its experts were written."""
        held = self._open.pop(stack, None)
        if held is not None:
            values = held.values if held.rounded else None
            self._weights.write(stack, encoding=held.encoding, weight=values, frozen=held.rounded)
