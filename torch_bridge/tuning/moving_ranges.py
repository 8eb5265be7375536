"""Ranges of activations that follow what a model's training brings, as a moving average.

What the forward passes of one optimizer step bring is collected as extremes, and the ranges move once, when the step
is done. So they are the same for all micro-batches of a step, and a recomputation (activation checkpointing) finds the
ranges that the forward pass had, and the extremes that are known already.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qsdk.core.errors import CalibrationError, DataError
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.spec import Spec
from qsdk.core.ranges.estimators import Estimator
from qsdk.core.ranges.ranges import Range, encoding_from_range
from qsdk.core.ranges.statistics import Statistics, activation_encodings, channel_axis, observed
from torch_bridge.calibrate import calibrate_weights, install
from torch_bridge.quantizers.quantizer import Quantizer
from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.parameters import RANGES

#: replaces a tensor, in place, by the largest values over the ranks
Largest = Callable[[Tensor], None]


@dataclass(eq=False)
class ObservedRange:
    """A range and what this step's forward passes have brought so far.

    Attributes:
        home: the quantizer that has the encoding.
        spec: of it.
        axis: of its channels, or None.
        seen: the largest of -x and of x, [2, scales].
        before: the encoding when observing began; of nothing, where there was none.
        known: whether there is a range to quantize with; until then the site is float.
    """

    home: Quantizer
    spec: Spec
    axis: int | None
    seen: Tensor
    before: Encoding
    known: bool

    def __call__(self, x: Tensor) -> bool:
        """Take in a tensor that a forward pass in train mode brings, and tell whether to quantize it."""
        if self.home.model.training and x.numel():
            with torch.no_grad():
                axes = [axis for axis in range(x.dim()) if axis != self.axis]
                ends = torch.stack([-x.amin(axes), x.amax(axes)]).reshape(2, -1)
                self.seen.copy_(torch.maximum(self.seen, ends.to(self.seen)))
        return self.known

    def take(self, end: Range) -> Encoding:
        """Have this range; what was learned of it before is in the average already. Gives the encoding."""
        encoding = encoding_from_range(end, self.spec)
        scale, zero_point = (self.home.owner._buffers[name] for name in self.home.buffer_names)
        if scale is None or zero_point is None:
            self.home.set_encoding(encoding)
        else:  # in place, for whoever holds the buffers
            scale.copy_(torch.from_numpy(encoding.scale))
            zero_point.copy_(torch.from_numpy(encoding.zero_point))
        for name in self.home.learned_names:
            self.home.owner._parameters[name].data.zero_()  # type: ignore[union-attr]
        return encoding


@dataclass(eq=False)
class Awaiting:
    """Stands at a bias, which is float as long as its input is."""

    source: ObservedRange

    @property
    def known(self) -> bool:
        """Whether the input has a range."""
        return self.source.known

    def __call__(self, x: Tensor) -> bool:
        """Whether to quantize."""
        return self.source.known


class RangeObserver:
    """Moves the ranges of a sim's activations; fixed and frozen ones stay as they are.

    Weights that have no encoding get one from their values when it is made, and activations from the first step.

    Attributes:
        ranges: by the site that has the encoding.
        step: up to which it has observed, where a schedule counts.

    Args:
        sim: whose.
        momentum: what the newest extremes count for, as in BatchNorm.
        largest: over the ranks.
    """

    def __init__(self, sim: QuantSim, momentum: float, largest: Largest) -> None:
        self.step = 0
        self.momentum, self._largest, self._model = np.float32(momentum), largest, sim.model
        quantizers = sim.quantizers
        calibrate_weights(sim)
        wanted = observed(quantizer.decision for quantizer in quantizers.values())
        fixed = activation_encodings(wanted.values(), Statistics(Estimator()), frozen=(), known=wanted)
        for site, encoding in fixed.items():
            if not quantizers[site].calibrated:
                quantizers[site].set_encoding(encoding)
        device = next(iter(sim.model.parameters()), torch.empty(0)).device
        homes = [site for site in wanted if site not in fixed and _may_move(quantizers[site])]
        self.ranges = {site: _observed_range(quantizers[site], device) for site in homes}
        self._watched = _watched(quantizers, self.ranges)
        total = sum(one.seen.shape[1] for one in self.ranges.values())
        sim.model.register_buffer(RANGES, torch.full((2, total), -torch.inf, device=device))
        for quantizer, watch in self._watched:
            quantizer.watch = watch

    def moved(self, sim: QuantSim, held: frozenset[str]) -> None:
        """Move the ranges towards what was seen since the last time.

        Args:
            sim: whose they are.
            held: sites whose range stays.

        Raises:
            DataError: NaN or inf was seen; names the sites.
        """
        if not self.ranges:
            return
        self._learn_of_loaded()
        average = sim.model._buffers[RANGES]
        assert average is not None
        together = torch.cat([one.seen for one in self.ranges.values()], 1).nan_to_num_(
            torch.inf, torch.inf, -torch.inf
        )
        self._largest(together)
        self.forget()
        seen, before = together.cpu().numpy(), average.cpu().numpy()
        found, start, first = {}, 0, {}
        for site, one in self.ranges.items():
            part = slice(start, start := start + one.seen.shape[1])
            new, old = seen[:, part], before[:, part]
            if site in held or one.home.frozen or (new == -np.inf).all():
                continue
            if (new == np.inf).any():
                raise DataError(
                    f"NaN or inf at the site {site} while its range is observed; lower the learning rate, or clean the "
                    "data"
                )
            if (old == -np.inf).any():
                encoding = one.home.encoding() if one.known else None
                old = new if encoding is None else np.stack([-encoding.low, encoding.high])
            before[:, part] = moved = old + self.momentum * (new - old)
            found[site] = one.take(Range(-moved[0], moved[1]))
            if not one.known:
                one.known, first[site] = True, found[site]
        average.copy_(torch.from_numpy(before))
        if first:
            install(sim, first)

    def forget(self) -> None:
        """Forget what was seen since the ranges moved."""
        for one in self.ranges.values():
            one.seen.fill_(-torch.inf)

    def close(self) -> None:
        """Stop observing; a site that no forward pass has reached is uncalibrated again."""
        for quantizer, watch in self._watched:
            if quantizer.watch is watch:
                quantizer.watch = None
        self._model._buffers.pop(RANGES, None)
        self._learn_of_loaded()
        for one in self.ranges.values():
            if not one.known:
                one.home.become(None)

    def _learn_of_loaded(self) -> None:
        """Sites whose encoding a checkpoint has brought have a range."""
        for one in self.ranges.values():
            has = one.home.owner._buffers[one.home.buffer_names[0]] is not None
            one.known = one.known or (has and one.home.encoding() != one.before)


def _may_move(quantizer: Quantizer) -> bool:
    return quantizer.owns_encoding and not quantizer.frozen


def _observed_range(home: Quantizer, device: torch.device) -> ObservedRange:
    decision, spec = home.decision, home.decision.spec
    assert spec is not None
    axis, known, scales = channel_axis(decision), home.calibrated, 1
    if axis is not None:
        count = (decision.shape or ())[axis] if decision.shape else None
        if known:
            count = home.encoding().scale.size
        if not isinstance(count, int):
            raise CalibrationError(f"{home.site} has channels whose number is not known; call qsdk.calibrate first")
        scales, axis = count, axis % len(decision.shape or (None,) * (axis + 1))
    if not known:  # so that a scale can be learned from the start; nothing is quantized with it
        nothing = np.zeros(scales, np.float32)
        home.set_encoding(encoding_from_range(Range(nothing, nothing), spec))
    seen = torch.full((2, scales), -torch.inf, device=device)
    return ObservedRange(home, spec, axis, seen, home.encoding(), known)


def _watched(
    quantizers: Mapping[str, Quantizer], ranges: Mapping[str, ObservedRange]
) -> list[tuple[Quantizer, ObservedRange | Awaiting]]:
    """Quantizers and what stands at them: members of a tie share a range, biases await that of their input."""
    found: list[tuple[Quantizer, ObservedRange | Awaiting]] = []
    for quantizer in quantizers.values():
        decision = quantizer.decision
        if decision.bias_of is not None:
            source = quantizers[decision.bias_of[0]].decision.encoding_site
            if source in ranges:
                found.append((quantizer, Awaiting(ranges[source])))
        elif decision.quantized and decision.encoding_site in ranges and not decision.passes_through:
            found.append((quantizer, ranges[decision.encoding_site]))
    return found
