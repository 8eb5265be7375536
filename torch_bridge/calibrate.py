"""Calibration: ranges of activations from streamed data, ranges of weights from their values."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qsdk.core.errors import DataError
from qsdk.core.numerics.bias import with_room_for
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.ranges.estimators import PERCENTILE, Estimator, estimator, range_of_stored
from qsdk.core.ranges.ranges import encoding_from_range
from qsdk.core.ranges.statistics import (
    Gather,
    Statistics,
    activation_encodings,
    alone,
    merge_over_ranks,
    observed_sites,
)
from qsdk.core.report import Report
from qsdk.core.sims.bias_remarks import with_notes
from qsdk.core.sims.methods import Methods
from torch_bridge.quantizers.observers import Observers
from torch_bridge.quantizers.quantizer import Quantizer
from torch_bridge.sim import QuantSim
from torch_bridge.stored_values import constants_at
from torch_bridge.torch_values.batches import Forward, feed, progress_over
from torch_bridge.torch_values.parameters import stored_tensor
from torch_bridge.training.training import eval_mode


def calibrate(
    sim: QuantSim,
    data: Iterable[Any],
    *,
    method: str = "min_max",
    weight_method: str | None = None,
    percentile: float = PERCENTILE,
    forward: Forward | None = None,
    progress: bool = True,
    gather: Gather = alone,
) -> Report:
    """Find an encoding for every site of the sim in one float pass over the data.

    `gather` returns what every rank passes to it, so that the statistics of all ranks count.

    Raises:
        ConfigError: an unknown method, or a percentile outside 50..100.
        DataError: no data, data the model does not take, or NaN or inf in it (names site and batch).
        CalibrationError: a site that no batch reached. In every case the sim stays as it was.
    """
    chosen = estimator(method, percentile)
    for_weights = estimator(weight_method or "min_max", percentile)
    quantizers = sim.quantizers
    wanted = observed_sites(quantizer.decision for quantizer in quantizers.values())
    statistics = Statistics(chosen)
    if wanted:  # otherwise only weights need ranges, and the data is not read
        statistics = merge_over_ranks(lambda: _observe(sim, data, Observers(wanted, chosen), forward, progress), gather)
    frozen = {site for site, quantizer in quantizers.items() if quantizer.frozen}
    known = {site for site, quantizer in quantizers.items() if quantizer.calibrated}
    activations = activation_encodings(wanted.values(), statistics, frozen=frozen, known=known)
    encodings = {
        **_weight_encodings(sim, for_weights),
        **{site: (quantizers[site], encoding) for site, encoding in activations.items()},
    }
    _make_room_for_biases(sim, encodings)
    for quantizer, encoding in encodings.values():
        quantizer.set_encoding(encoding)
    sim.methods = Methods(method, weight_method, percentile)
    rows = [_row(site, quantizer, encoding) for site, (quantizer, encoding) in encodings.items()]
    report = Report("Calibration", rows, {"method": method, "sites": len(rows)})
    report = sim.leave_coarse_float(report, statistics.ranges)
    return with_notes(report, sim.bias_remarks())


def _observe(
    sim: QuantSim, data: Iterable[Any], observers: Observers, forward: Forward | None, progress: bool
) -> Statistics:
    with eval_mode(sim.model), sim.runtime.in_phase("visit", observers.visit), torch.no_grad():
        for number, batch in progress_over(data, "calibrate", progress, skip_empty=False):
            feed(sim.model, batch, sim.example, forward, f"batch {number}")
            observers.end_batch(number)
    return observers.statistics


def calibrate_weights(sim: QuantSim) -> None:
    """Find an encoding from its values for every weight that has none.

    Raises:
        DataError: NaN or inf in a stored tensor; names the site.
    """
    for quantizer, encoding in _weight_encodings(sim, estimator("min_max")).values():
        if not quantizer.calibrated:
            quantizer.set_encoding(encoding)


def _weight_encodings(sim: QuantSim, chosen: Estimator) -> dict[str, tuple[Quantizer, Encoding]]:
    encodings = {}
    weights = {
        site: (quantizer, quantizer.decision.spec)
        for site, quantizer in sim.quantizers.items()
        if quantizer.decision.kind == "weight" and quantizer.owns_encoding and not quantizer.frozen
    }
    constants = constants_at(sim, weights)
    for site, (quantizer, spec) in weights.items():
        if spec is None:
            continue
        raw = constants[site] if site in constants else raw_value(sim, site)
        values = raw.detach().float().cpu().numpy()
        if not np.isfinite(values).all():
            raise DataError(f"NaN or inf in the stored tensor at {site}; load a checkpoint that is finite")
        estimate = range_of_stored(values, spec, chosen)
        encodings[site] = quantizer, encoding_from_range(estimate, spec)
    return encodings


def install(sim: QuantSim, activations: Mapping[str, Encoding]) -> None:
    """Set encodings at sites; scales of weights are widened where a bias would not fit int32 otherwise."""
    quantizers = sim.quantizers
    weights = {
        site: (q, q.encoding())
        for site, q in quantizers.items()
        if q.decision.kind == "weight" and q.owns_encoding and not q.frozen
    }
    encodings = {**weights, **{site: (quantizers[site], encoding) for site, encoding in activations.items()}}
    _make_room_for_biases(sim, encodings)
    for quantizer, encoding in encodings.values():
        quantizer.replace_encoding(encoding)


def _make_room_for_biases(sim: QuantSim, encodings: dict[str, tuple[Quantizer, Encoding]]) -> None:
    """Widen the weight scales under which a bias would not fit int32."""
    for site, quantizer in sim.quantizers.items():
        if quantizer.factors is None:
            continue
        source, weight = (factor.site for factor in quantizer.factors)
        if weight in encodings:
            known = encodings[source][1] if source in encodings else quantizer.factors[0].encoding()
            bias = raw_value(sim, site).detach().float().cpu().numpy()
            holder, encoding = encodings[weight]
            spec = holder.decision.spec
            encodings[weight] = holder, with_room_for(bias, known, encoding, None if spec is None else spec.scale_bits)


def raw_value(sim: QuantSim, site: str) -> Tensor:
    """Return the raw stored tensor at a weight or bias site."""
    return stored_tensor(sim.model, site)


def _row(site: str, quantizer: Quantizer, encoding: Encoding) -> dict[str, Any]:
    return {
        "site": site,
        "dtype": encoding.dtype.name,
        "low": float(encoding.low.min()),
        "high": float(encoding.high.max()),
        "scales": encoding.scale.size,
    }
