"""The noise that each site's quantization causes at a sim's outputs: estimated by gradients, or measured."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from qsdk.algorithms.noise_probe import NoiseProbe
from qsdk.core.errors import DataError, QsdkError
from qsdk.core.precision.sensitivity import LayerSites, OutputNoise
from qsdk.progress import bar, over_batches
from qsdk.verbs.analysis.rounded_weights import outputs_as_given
from qsdk.verbs.analysis.sampled_rows import Sampled, row_count, sampled
from qsdk.verbs.doors.choose import Sim, door_of
from qsdk.verbs.doors.door import Door, Forward

FloatArrays = Sequence[npt.NDArray[np.float32]]
#: what a model raises that does not take fewer rows than it was made for
_REFUSALS = (QsdkError, RuntimeError, TypeError, ValueError, IndexError)
#: batches whose rows compare the simulation with the model as it was given
_COMPARED = 4


@dataclass
class OutputWeights:
    """What the power of each output counts for: each output as much as another one, whatever its unit.

    Attributes:
        values: of each output; 0 for one that has been 0 in every batch so far.
    """

    values: list[float] = field(default_factory=list)

    def learn(self, batches: Sequence[FloatArrays]) -> None:
        """Give a weight to every output that has none yet and is not 0 in all of these batches, in float."""
        for index in range(max(map(len, batches), default=0)):
            count = sum(outputs[index].size for outputs in batches)
            power = sum(float(_squares(outputs[index]).sum()) for outputs in batches)
            self.values += [0.0] * (index + 1 - len(self.values))
            if self.values[index] == 0.0 and power > 0.0:
                self.values[index] = count / power

    def power(self, outputs: FloatArrays) -> float:
        """Return the weighted power of a batch of outputs."""
        return sum(w * float(_squares(y).sum()) for w, y in zip(self.values, outputs, strict=True))

    def power_of_changes(self, changed: Iterable[FloatArrays], in_float: Iterable[FloatArrays]) -> float:
        """Return the weighted power of the differences between outputs, over batches."""
        with np.errstate(invalid="ignore"):  # infinite in both
            return sum(
                self.power([left - right for left, right in zip(ys, exact, strict=True)])
                for ys, exact in zip(changed, in_float, strict=True)
            )

    @property
    def silent(self) -> list[int]:
        """Return the outputs that have been 0 in every batch: nothing says how much their noise counts."""
        return [index for index, value in enumerate(self.values) if value == 0.0]


def _squares(y: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    return np.square(np.where(np.isfinite(y), y, 0.0).astype(np.float64))


@dataclass(frozen=True)
class Estimate:
    """The noise of every site to first order.

    Attributes:
        noise: at the outputs.
        unreached: the sites whose noise no gradient shows.
        used: some of the rows of data it was found on, in batches.
    """

    noise: OutputNoise
    unreached: set[str]
    used: list[Any]


def estimate_noise(
    sim: Sim, data: Iterable[Any], *, forward: Forward | None, progress: bool, seed: int
) -> Estimate | None:
    """Return the noise of every site to first order.

    About a fifth of the rows are used, with a forward pass in float, one in the simulation, and a backward pass. Where
    that is little work, all rows are, and more backward passes.

    Returns:
        None where the model has no gradients.

    Raises:
        CalibrationError: the sim is not calibrated.
        DataError: no data, or data that the model does not take.
    """
    door, noise, weights = door_of(sim), OutputNoise(), OutputWeights()
    stored = {site for site, decision in sim.plan.decisions.items() if decision.kind in ("weight", "bias")}
    axes = {site: encoding.axis or 0 for site, encoding in sim.encodings.items() if site in stored}
    weights_alone = {site for site in stored if sim.plan.decisions[site].kind == "weight"}
    probe = NoiseProbe(door.fake_quantizer(), {**dict.fromkeys(stored, 0), **axes}, seed, weights_alone)
    kept: list[tuple[Any, FloatArrays]] = []
    ways = [(whole, *way) for whole in (False, True) for way in ((True, True), (True, False), (False, False))]
    for sample in sampled(_batches(data, progress), sim.plan):
        found = _probed(door, sample, probe, weights, forward, ways)
        if found is None:
            return None
        used, in_float = found
        noise.signal += weights.power(in_float)
        noise.samples += row_count(used)
        noise.samples_given += sample.samples
        quantized = list(door.outputs([used], forward, in_float=False))
        noise.all_quantized += weights.power_of_changes(quantized, [in_float])
        kept += [(used, quantized[0])] if len(kept) < _COMPARED else []
    _compare_with_given(sim, noise, weights, kept, forward)
    noise.alone, noise.variance, noise.silent = probe.noise, probe.variance, weights.silent
    return Estimate(noise, probe.unknown(), [used for used, _ in kept])


def _probed(
    door: Door,
    sample: Sampled,
    probe: NoiseProbe,
    weights: OutputWeights,
    forward: Forward | None,
    ways: list[tuple[bool, bool, bool]],
) -> tuple[Any, FloatArrays] | None:
    """Return the rows of a sample that the model takes, and its outputs in float, once the probe has measured them.

    Args:
        door: of the sim.
        sample: of the data.
        probe: to measure with.
        weights: of the outputs; they learn.
        forward: calls the module on a batch.
        ways: to run it, the best first: whether on all rows of the batch, whether with gradients where the model
            forbids them, and whether errors of weights are carried forward. One that it refuses, such as a file whose
            batch size is fixed, is taken from the list.

    Returns:
        None where the model has no gradients.
    """
    where = f"batch {sample.number}"
    while True:
        whole, everywhere, carries = ways[0]
        used = sample.batch if whole else sample.used
        try:
            with probe.watch(row_count(used) * sample.passes, carries=carries):
                outputs = door.visited_outputs(used, probe.visit, forward, where, everywhere=everywhere)
            if outputs is None or not any(y.requires_grad for y in outputs):
                return None
            in_float = [_to_numpy(y) for y in outputs]
            weights.learn([in_float])
            probe.measure(outputs, weights.values, sample.passes)
        except _REFUSALS:
            if used is sample.batch and not everywhere:
                raise
            probe.forget()
            del ways[0]
        else:
            return used, in_float


def _compare_with_given(
    sim: Sim,
    noise: OutputNoise,
    weights: OutputWeights,
    kept: Sequence[tuple[Any, FloatArrays]],
    forward: Forward | None,
) -> None:
    """Count the noise of everything from the model as it was given, where verbs have changed stored values since.

    Args:
        sim: calibrated.
        noise: whose `all_quantized` is replaced then, in its own unit.
        weights: of the outputs.
        kept: some batches, and the simulation's outputs for them.
        forward: calls the module on a batch.
    """
    given = outputs_as_given(sim, [batch for batch, _ in kept], forward)
    signal = 0.0 if given is None else sum(weights.power(outputs) for outputs in given)
    if given is not None and signal > 0.0:
        changes = weights.power_of_changes([quantized for _, quantized in kept], given)
        all_now, noise.all_quantized = noise.all_quantized, noise.signal * changes / signal
        noise.stored = max(noise.all_quantized - all_now, 0.0)


def measure_noise(
    sim: Sim,
    data: Iterable[Any],
    layers: Sequence[LayerSites],
    *,
    forward: Forward | None,
    progress: bool,
    reverse: bool,
    known: OutputNoise | None = None,
) -> OutputNoise:
    """Return the noise of each layer, measured with it alone quantized: one pass over the data for each.

    Args:
        sim: calibrated.
        data: batches.
        layers: to be measured.
        forward: calls the module on a batch.
        progress: show a progress bar.
        reverse: measure also with all but the layer quantized, in one more pass for each.
        known: an estimate to fill in, in its units; None to start anew.

    Raises:
        DataError: no data, or data that the model does not take.
    """
    door, weights = door_of(sim), OutputWeights()
    batches = [batch for _, batch in _batches(data, progress=False)]
    rows = sum(map(row_count, batches))
    in_float = list(door.outputs(batches, forward, in_float=True))
    weights.learn(in_float)
    signal = sum(weights.power(outputs) for outputs in in_float)
    noise = OutputNoise(signal, silent=weights.silent, samples=rows, samples_given=rows) if known is None else known
    unit = noise.signal / signal if signal > 0.0 else 0.0
    every = frozenset(site for site, decision in sim.plan.decisions.items() if decision.spec is not None)

    def with_only(sites: Iterable[str], exact: Sequence[FloatArrays] = in_float) -> float:
        with door.quantizing_only(frozenset(sites)):
            return unit * weights.power_of_changes(door.outputs(batches, forward, in_float=False), exact)

    if known is None:
        given = outputs_as_given(sim, batches, forward) or in_float
        noise.all_quantized = with_only(every, given) * signal / (sum(map(weights.power, given)) or 1.0)
    for layer in bar(layers, desc="sensitivity", unit="layer", disable=not progress, leave=False):
        noise.alone |= dict.fromkeys(layer.sites, 0.0) | {layer.sites[0]: with_only(layer.sites)}
        noise.variance |= dict.fromkeys(layer.sites, 0.0)
        if reverse:
            noise.without[layer] = with_only(every.difference(layer.sites))
    return noise


def _batches(data: Iterable[Any], progress: bool) -> Iterator[tuple[int, Any]]:
    """Yield numbered batches, with a progress bar.

    Raises:
        DataError: there is none, or the data is no iterable of batches.
    """
    if isinstance(data, Tensor | np.ndarray | str | bytes | Mapping):
        raise DataError(f"data must be an iterable of batches, got {type(data).__name__}; wrap one batch in a list")
    number = -1
    for number, batch in enumerate(over_batches(data, "sensitivity", progress)):
        yield number, batch
    if number < 0:
        raise DataError("the data is empty; give at least one batch")


def _to_numpy(y: Tensor) -> npt.NDArray[np.float32]:
    return y.detach().float().cpu().numpy()
