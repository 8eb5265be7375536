"""Calibration: ranges of activations from streamed data, ranges of weights from their values."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from qsdk.core.lazy_arrays import LazyArrays
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.planning.plan import Decision
from qsdk.core.ranges.estimators import PERCENTILE
from qsdk.core.ranges.statistics import Gather, Statistics, single_process
from qsdk.core.report import Report
from qsdk.core.sims.biases import with_notes
from qsdk.core.sims.calibration import calibrate_sites, make_room_for_biases
from qsdk.core.sims.state import Methods
from torch_bridge.quantizers.observers import Observers
from torch_bridge.sim import QuantSim
from torch_bridge.stored_values import constants_at
from torch_bridge.torch_values.batches import Forward, feed, progress_over
from torch_bridge.torch_values.parameters import stored_tensor, to_float32
from torch_bridge.training.training import eval_mode

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

    Raises:
        ConfigError: an unknown method, or a percentile outside 50..100.
        DataError: no data, data the model does not take, or NaN or inf in it (names site and batch).
        CalibrationError: a site that the example reached and no batch. In every case the sim stays as it was.
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
    return with_notes(sim.leave_coarse_float(found.report, found.ranges, found.parts, unreached), sim.bias_remarks())


def _observe(
    sim: QuantSim, data: Iterable[Any], observers: Observers, forward: Forward | None, progress: bool
) -> Statistics:
    with eval_mode(sim.model), sim.runtime.in_phase("visit", observers.visit), torch.no_grad():
        for number, batch in progress_over(data, "calibrate", progress, skip_empty=False):
            feed(sim.model, batch, sim.example, forward, f"batch {number}")
            observers.end_batch(number)
            observers.statistics.end_batch()
    return observers.statistics


def install(sim: QuantSim, activations: Mapping[str, Encoding]) -> None:
    """Set encodings at sites; scales of weights are widened where a bias would not fit int32 otherwise."""
    quantizers, own = sim.quantizers, sim.snapshot().own
    weights = {
        site: encoding
        for site, encoding in own.items()
        if quantizers[site].decision.kind == "weight" and not encoding.frozen
    }
    found = {**weights, **activations}
    make_room_for_biases(_decisions(sim), own, _stored(sim), found)
    for site, encoding in found.items():
        quantizers[site].replace_encoding(encoding)


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
