"""Calibration: ranges of activations from streamed data, ranges of weights from their values."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qsdk.core.lazy_arrays import LazyArrays
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.patterns.experts import stacks_of
from qsdk.core.planning.plan import Decision, Turns
from qsdk.core.planning.turning import pair_places
from qsdk.core.ranges.estimators import PERCENTILE, Estimator
from qsdk.core.ranges.histogram import sample_step
from qsdk.core.ranges.statistics import (
    Gather,
    Statistics,
    channel_axis,
    part_axes,
    reads_histogram,
    require_finite,
    single_process,
)
from qsdk.core.report import Report
from qsdk.core.sims.biases import with_notes
from qsdk.core.sims.calibration import calibrate_sites, make_room_for_biases
from qsdk.core.sims.state import Methods
from torch_bridge.prepare import run_example
from torch_bridge.sim import QuantSim
from torch_bridge.sites.experts import CountTokens
from torch_bridge.torch_values.batches import Forward, feed, progress_over
from torch_bridge.torch_values.parameters import find_stored, stored_tensor, to_float32
from torch_bridge.training.training import eval_mode


class Observers:
    """The collector of statistics at the wanted sites.

    `amin` and `amax` are faster than one `aminmax` on a CPU. A Relu needs only the maximum: its minimum is not below 0,
    and a range contains 0 anyway.
    """

    def __init__(self, wanted: Mapping[str, Decision], chosen: Estimator) -> None:
        self.statistics = Statistics(chosen)
        self._nonnegative = {site: decision.op_type == "Relu" for site, decision in wanted.items()}
        self._sampled = {site for site, decision in wanted.items() if reads_histogram(decision, chosen)}
        self._axes = {site: axis for site, d in wanted.items() if (axis := channel_axis(d)) is not None}
        self._turning = {site: (decision, decision.turns) for site, decision in wanted.items() if decision.turns}
        self._pending: list[Tensor] = []
        self._pending_sites: list[tuple[str, bool]] = []  # site of each pending value, and whether it is a maximum
        self._samples: dict[str, list[tuple[Tensor, int]]] = {}
        self._edges = {site for site, decision in wanted.items() if decision.kind == "input"}
        self._parts: list[tuple[str, int, Tensor]] = []  # largest magnitudes of rows or columns of inputs
        self._channels: list[tuple[str, Tensor, Tensor]] = []  # extremes of each channel

    def visit(self, site: str, x: Tensor) -> Tensor:
        """Reduce the tensor at a site, if its range is wanted, and return it unchanged."""
        if site in self._turning:
            decision, turns = self._turning[site]
            self.statistics.add_length(decision, x.shape)
            self._visit(site, _at_any_position(x.detach(), turns))
        else:
            self._visit(site, x)
        return x

    def _visit(self, site: str, x: Tensor) -> None:
        nonnegative = self._nonnegative.get(site)
        for part in part_axes(x.shape) if site in self._edges and x.numel() else ():
            others = [axis for axis in range(x.dim()) if axis != part]
            self._parts.append((site, part, torch.maximum(x.detach().amax(others), -x.detach().amin(others))))
        if site in self._axes and x.numel():
            others = [axis for axis in range(x.dim()) if axis != self._axes[site]]
            self._channels.append((site, x.detach().amin(others), x.detach().amax(others)))
        elif nonnegative is not None and x.numel():
            self._pending.append(x.amax())
            self._pending_sites.append((site, True))
            if not nonnegative:
                self._pending.append(x.amin())
                self._pending_sites.append((site, False))
            if site in self._sampled:
                step = sample_step(x.numel())
                # a copy: the model may write over the tensor, and a view would keep all of it
                sample = x.detach().reshape(-1)[::step].to(torch.float32, copy=True)
                self._samples.setdefault(site, []).append((sample, step))

    def end_batch(self, number: int) -> None:
        """Add the batch to the statistics."""
        for site, *ends in self._channels:
            low, high = (end.float().cpu().numpy() for end in ends)
            require_finite(site, number, low, high)
            self.statistics.add(site, low, high)
        parts, self._channels, self._parts = self._parts, [], []
        waiting = [*self._pending, *(largest for _, _, largest in parts)]
        if not waiting:
            return
        # all in one copy, so that the host waits for its device once
        values = torch.cat([value.to(waiting[0].device, torch.float32).reshape(-1) for value in waiting]).tolist()
        at = len(self._pending)
        for site, axis, largest in parts:
            self.statistics.add_parts(site, axis, np.array(values[at : at + len(largest)], np.float32))
            at += len(largest)
        seen: dict[str, list[tuple[float, float]]] = {}
        for (site, is_high), value in zip(self._pending_sites, values, strict=False):
            require_finite(site, number, value)
            calls = seen.setdefault(site, [])
            if is_high:  # the first value of every call
                calls.append((0.0 if self._nonnegative[site] else value, value))
            else:
                calls[-1] = (value, calls[-1][1])
        samples = self._samples
        self._pending, self._pending_sites, self._samples = [], [], {}
        for site, calls in seen.items():
            self._add(site, calls, samples.get(site))

    def _add(self, site: str, calls: list[tuple[float, float]], samples: list[tuple[Tensor, int]] | None) -> None:
        if samples is None:
            self.statistics.add(site, min(low for low, _ in calls), max(high for _, high in calls))
            return
        for (low, high), (sample, step) in zip(calls, samples, strict=True):
            self.statistics.add(site, low, high, sample.cpu().numpy(), step)


def _at_any_position(x: Tensor, turns: Turns) -> Tensor:
    """Return the ends that values come to which turn with the position, and all others as they are; all twice."""
    first, second, place = (torch.from_numpy(at).to(x.device) for at in pair_places(turns))
    values = x.float().transpose(-1, turns.axis)
    a, b = values[..., first], values[..., second]
    ends, rest = (a * a + b * b).sqrt()[..., place], values[..., turns.size :]
    return torch.cat([torch.cat([end, rest], -1).transpose(-1, turns.axis) for end in (ends, -ends)])


def stored_values(sim: QuantSim) -> LazyArrays:
    """Return site -> fake-quantized value, float32, of every stored tensor, as the simulation reads it."""
    of_kind = [site for site, quantizer in sim.quantizers.items() if quantizer.decision.kind in ("weight", "bias")]
    constants = constants_at(sim, [site for site in of_kind if sim.quantizers[site].owns_encoding])

    def value(site: str) -> npt.NDArray[np.float32]:
        raw = constants[site] if site in constants else stored_tensor(sim.model, site).detach()
        with torch.no_grad():
            return to_float32(sim.quantizers[site](raw))

    named = [site for site in of_kind if site in constants or find_stored(sim.model, site) is not None]
    return LazyArrays(named, value)


def constants_at(sim: QuantSim, sites: Iterable[str]) -> dict[str, Tensor]:
    """Return the float values at those of the sites where no parameter or buffer is stored.

    A module may keep a tensor as a plain attribute, such as the coordinates of a detector's grid: it is a constant of
    the trace, and its value is found by a run on the sim's example.
    """
    wanted = {site for site in sites if find_stored(sim.model, site) is None}
    result: dict[str, Tensor] = {}

    def visit(site: str, x: Tensor) -> Tensor:
        if site in wanted:
            result[site] = x.detach().clone()
        return x

    if wanted:
        with eval_mode(sim.model), sim.runtime.in_phase("visit", visit), torch.no_grad():
            run_example(sim.model, sim.current_example)
    return result


_UNREACHED = (
    "only the trace has it, and no batch took this path (a mask that hides nothing is left out); quantize again and "
    "calibrate with data that does, to have it on a grid"
)
_MOVES_UNREACHED = "it holds values of a site that only the trace has and no batch reached; quantize again, see there"


def calibrate(
    sim: QuantSim,
    data: Iterable[Any],
    *,
    method: str = "min_max",
    weight_method: str | None = None,
    percentile: float = PERCENTILE,
    forward: Forward | None = None,
    progress: bool = True,
    gather: Gather = single_process,
) -> Report:
    """Find an encoding for every site of the sim in one float pass over the data.

    `gather` returns what every rank passes to it, so that the statistics of all ranks count.
    """
    quantizers = sim.quantizers
    found = calibrate_sites(
        _decisions(sim),
        sim.snapshot().own,
        _stored(sim),
        lambda wanted, chosen: _observe(sim, data, Observers(wanted, chosen), forward, progress),
        method=method,
        weight_method=weight_method,
        percentile=percentile,
        gather=gather,
        only_traced=sim.not_exercised,
    )
    while found.encodings:  # each is dropped once it is copied: those of small blocks are not small
        site, encoding = found.encodings.popitem()
        quantizers[site].set_encoding(encoding)
    sim.methods = Methods(method, weight_method, percentile, found.longest)
    new = sim.quantizers
    unseen = [site for site in sim.not_exercised if site in new and site not in found.ranges]
    if all(new[site].calibrated for site in unseen):
        unseen = []  # they only move values
    # what moves the values of such a site has no encoding either, though batches reach it
    moved = [site for site in (sim.plan.calibrated_sites() if unseen else ()) if not new[site].calibrated]
    unreached = {**dict.fromkeys(moved, _MOVES_UNREACHED), **dict.fromkeys(unseen, _UNREACHED)}
    return with_notes(sim.leave_float(found.report, found.ranges, found.parts, unreached), sim.bias_remarks())


def _observe(
    sim: QuantSim, data: Iterable[Any], observers: Observers, forward: Forward | None, progress: bool
) -> Statistics:
    tokens = CountTokens(stacks_of_experts(sim))
    with eval_mode(sim.model), sim.runtime.in_phase("visit", observers.visit), torch.no_grad(), tokens:
        for number, batch in progress_over(data, "calibrate", progress, skip_empty=False):
            feed(sim.model, batch, sim.example, forward, f"batch {number}")
            observers.end_batch(number)
            observers.statistics.end_batch()
    sim.tokens_of_experts = {site: tuple(counts.tolist()) for site, counts in tokens.counts.items()}
    return observers.statistics


def stacks_of_experts(sim: QuantSim) -> dict[str, Tensor]:
    """Return the stored stacks of matrices of experts, by site."""
    graph = sim.graph
    roots = (graph.constant_root(graph.ops[index].inputs[0]) for index in stacks_of(graph))
    sites = {graph.tensors[root].site for root in roots if root is not None}
    stored = {site: find_stored(sim.model, site) for site in sites if site is not None}
    return {site: stack for site, stack in stored.items() if stack is not None}


def install(sim: QuantSim, activations: Mapping[str, Encoding]) -> None:
    """Set encodings at sites; scales of weights are widened where a bias would not fit int32 otherwise."""
    found = dict(activations)
    make_room_for_biases(_decisions(sim), sim.snapshot().own, _stored(sim), found)
    for site, encoding in found.items():
        sim.quantizers[site].replace_encoding(encoding)


def _decisions(sim: QuantSim) -> dict[str, Decision]:
    """Return the decision at every site with a quantizer."""
    return {site: quantizer.decision for site, quantizer in sim.quantizers.items()}


def _stored(sim: QuantSim) -> LazyArrays:
    """Return the float value of every weight and bias by its site."""
    sites = [site for site, quantizer in sim.quantizers.items() if quantizer.decision.kind in ("weight", "bias")]
    constants = constants_at(sim, [site for site in sites if sim.quantizers[site].owns_encoding])

    def value(site: str) -> npt.NDArray[np.float32]:
        raw = constants[site] if site in constants else stored_tensor(sim.model, site)
        return to_float32(raw)

    return LazyArrays(sites, value)
