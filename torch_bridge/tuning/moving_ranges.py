"""Ranges of activations that follow a model's training, as a moving average.

The forward passes of one optimizer step are collected as extremes, and the ranges move once, when the step is done. So
they are the same for all micro-batches of a step, and a recomputation (activation checkpointing) finds the ranges that
the forward pass had, and extremes that are known already.
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
from qsdk.core.ranges.statistics import Statistics, activation_encodings, channel_axis, observed_sites
from torch_bridge.calibrate import calibrate_weights, install
from torch_bridge.quantizers.quantizer import Quantizer
from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.parameters import RANGES

#: replaces a tensor, in place, by the largest values over the ranks
Largest = Callable[[Tensor], None]


@dataclass(eq=False)
class ObservedRange:
    """The range of a quantizer, and the extremes of this step's forward passes so far.

    Attributes:
        quantizer: the one that has the encoding.
        spec: its spec.
        axis: of its channels, or None.
        seen: the largest of -x and of x, [2, scales].
        before: the encoding when observing began; that of an empty range, where there was none.
        has_range: whether there is a range to quantize with; until then the site is float.
    """

    quantizer: Quantizer
    spec: Spec
    axis: int | None
    seen: Tensor
    before: Encoding
    has_range: bool

    def __call__(self, x: Tensor) -> bool:
        """Add a tensor of a forward pass in train mode, and return whether to quantize it."""
        if self.quantizer.model.training and x.numel():
            with torch.no_grad():
                axes = [axis for axis in range(x.dim()) if axis != self.axis]
                ends = torch.stack([-x.amin(axes), x.amax(axes)]).reshape(2, -1)
                self.seen.copy_(torch.maximum(self.seen, ends.to(self.seen)))
        return self.has_range

    def set_range(self, end: Range) -> Encoding:
        """Set the range, reset what was learned of it, which is in the average already, and return the encoding."""
        encoding = encoding_from_range(end, self.spec)
        scale, zero_point = (self.quantizer.owner._buffers[name] for name in self.quantizer.buffer_names)
        if scale is None or zero_point is None:
            self.quantizer.set_encoding(encoding)
        else:  # in place, because others hold the buffers
            scale.copy_(torch.from_numpy(encoding.scale))
            zero_point.copy_(torch.from_numpy(encoding.zero_point))
        for name in self.quantizer.learned_names:
            self.quantizer.owner._parameters[name].data.zero_()  # type: ignore[union-attr]
        return encoding


@dataclass(eq=False)
class BiasObserver:
    """The observer at a bias, which is float as long as its input has no range."""

    source: ObservedRange

    @property
    def has_range(self) -> bool:
        """Return whether the input has a range."""
        return self.source.has_range

    def __call__(self, x: Tensor) -> bool:
        """Return whether to quantize."""
        return self.source.has_range


class RangeObserver:
    """The observer that moves the ranges of a sim's activations; fixed and frozen ones stay as they are.

    Weights that have no encoding get one from their values when it is made, and activations from the first step.

    Attributes:
        ranges: by the site that has the encoding.
        step: last step that it has observed, where a schedule counts.

    Args:
        sim: the sim.
        momentum: weight of the newest extremes, as in BatchNorm.
        largest: reduces over the ranks.
    """

    def __init__(self, sim: QuantSim, momentum: float, largest: Largest) -> None:
        self.step = 0
        self.momentum, self._largest, self._model = np.float32(momentum), largest, sim.model
        quantizers = sim.quantizers
        calibrate_weights(sim)
        wanted = observed_sites(quantizer.decision for quantizer in quantizers.values())
        fixed = activation_encodings(wanted.values(), Statistics(Estimator()), frozen=(), known=wanted)
        for site, encoding in fixed.items():
            if not quantizers[site].calibrated:
                quantizers[site].set_encoding(encoding)
        device = next(iter(sim.model.parameters()), torch.empty(0)).device
        homes = [site for site in wanted if site not in fixed and _may_move(quantizers[site])]
        self.ranges = {site: _observed_range(quantizers[site], device) for site in homes}
        self._observers = _observers(quantizers, self.ranges)
        total = sum(one.seen.shape[1] for one in self.ranges.values())
        sim.model.register_buffer(RANGES, torch.full((2, total), -torch.inf, device=device))
        for quantizer, observer in self._observers:
            quantizer.input_observer = observer

    def update(self, sim: QuantSim, held: frozenset[str]) -> None:
        """Move the ranges towards what was seen since the last time.

        Args:
            sim: the sim.
            held: sites whose range stays.

        Raises:
            DataError: NaN or inf was seen; names the sites.
        """
        if not self.ranges:
            return
        self._detect_loaded_encodings()
        average = sim.model._buffers[RANGES]
        assert average is not None
        together = torch.cat([one.seen for one in self.ranges.values()], 1).nan_to_num_(
            torch.inf, torch.inf, -torch.inf
        )
        self._largest(together)
        self.forget()
        seen, before = together.cpu().numpy(), average.cpu().numpy()
        encodings, start, first = {}, 0, {}
        for site, one in self.ranges.items():
            part = slice(start, start := start + one.seen.shape[1])
            new, old = seen[:, part], before[:, part]
            if site in held or one.quantizer.frozen or (new == -np.inf).all():
                continue
            if (new == np.inf).any():
                raise DataError(
                    f"NaN or inf at the site {site} while its range is observed; lower the learning rate, or clean the "
                    "data"
                )
            if (old == -np.inf).any():
                encoding = one.quantizer.encoding() if one.has_range else None
                old = new if encoding is None else np.stack([-encoding.low, encoding.high])
            before[:, part] = moved = old + self.momentum * (new - old)
            encodings[site] = one.set_range(Range(-moved[0], moved[1]))
            if not one.has_range:
                one.has_range, first[site] = True, encodings[site]
        average.copy_(torch.from_numpy(before))
        if first:
            install(sim, first)

    def forget(self) -> None:
        """Forget what was seen since the ranges last moved."""
        for one in self.ranges.values():
            one.seen.fill_(-torch.inf)

    def close(self) -> None:
        """Stop observing; a site that no forward pass has reached is uncalibrated again."""
        for quantizer, observer in self._observers:
            if quantizer.input_observer is observer:
                quantizer.input_observer = None
        self._model._buffers.pop(RANGES, None)
        self._detect_loaded_encodings()
        for one in self.ranges.values():
            if not one.has_range:
                one.quantizer.replace_encoding(None)

    def _detect_loaded_encodings(self) -> None:
        """Note that a site has a range where a checkpoint has brought its encoding."""
        for one in self.ranges.values():
            has = one.quantizer.owner._buffers[one.quantizer.buffer_names[0]] is not None
            one.has_range = one.has_range or (has and one.quantizer.encoding() != one.before)


def _may_move(quantizer: Quantizer) -> bool:
    return quantizer.owns_encoding and not quantizer.frozen


def _observed_range(quantizer: Quantizer, device: torch.device) -> ObservedRange:
    decision, spec = quantizer.decision, quantizer.decision.spec
    assert spec is not None
    axis, known, scales = channel_axis(decision), quantizer.calibrated, 1
    if axis is not None:
        count = (decision.shape or ())[axis] if decision.shape else None
        if known:
            count = quantizer.encoding().scale.size
        if not isinstance(count, int):
            raise CalibrationError(
                f"{quantizer.site} has channels whose number is not known; call qsdk.calibrate first"
            )
        scales, axis = count, axis % len(decision.shape or (None,) * (axis + 1))
    if not known:  # so that a scale can be learned from the start; nothing is quantized with it
        nothing = np.zeros(scales, np.float32)
        quantizer.set_encoding(encoding_from_range(Range(nothing, nothing), spec))
    seen = torch.full((2, scales), -torch.inf, device=device)
    return ObservedRange(quantizer, spec, axis, seen, quantizer.encoding(), known)


def _observers(
    quantizers: Mapping[str, Quantizer], ranges: Mapping[str, ObservedRange]
) -> list[tuple[Quantizer, ObservedRange | BiasObserver]]:
    """Return quantizers and their observers: members of a tie share a range, biases wait for that of their input."""
    result: list[tuple[Quantizer, ObservedRange | BiasObserver]] = []
    for quantizer in quantizers.values():
        decision = quantizer.decision
        if decision.bias_of is not None:
            source = quantizers[decision.bias_of[0]].decision.encoding_site
            if source in ranges:
                result.append((quantizer, BiasObserver(ranges[source])))
        elif decision.quantized and decision.encoding_site in ranges and not decision.passes_through:
            result.append((quantizer, ranges[decision.encoding_site]))
    return result
