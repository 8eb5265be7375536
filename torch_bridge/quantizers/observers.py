"""Observation of a running model: one reduction per extreme, a sample for histograms, one GPU wait per batch."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from qsdk.core.planning.plan import Decision, Turns
from qsdk.core.planning.turning import pair_places
from qsdk.core.ranges.estimators import Estimator
from qsdk.core.ranges.histogram import sample_step
from qsdk.core.ranges.statistics import Statistics, channel_axis, part_axes, reads_histogram, require_finite


class Observers:
    """The collector of statistics at the wanted sites.

    `amin` and `amax` are faster than one `aminmax` on a CPU. A Relu needs only the maximum: its minimum is not below 0,
    and a range contains 0 anyway.

    Attributes:
        statistics: of the batches that have ended.
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
        """Add the batch to the statistics.

        Raises:
            DataError: NaN or an infinity; names the site and the batch.
        """
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
