"""Calibration: ranges of activations streamed from data, ranges of weights read at once."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qsdk.core.bias import with_room_for
from qsdk.core.encoding import Encoding
from qsdk.core.errors import CalibrationError, ConfigError, DataError
from qsdk.core.ranges import Range, encoding_from_range, range_of
from qsdk.core.report import Report
from torch_bridge.batches import Forward, feed, progress_over
from torch_bridge.observe import Observers
from torch_bridge.quantizer import Quantizer
from torch_bridge.sim import QuantSim
from torch_bridge.training import eval_mode

METHODS = {"min_max": "min_max", "post_training_tf": "min_max", "moving_average": "moving_average"}


def calibrate(
    sim: QuantSim,
    data: Iterable[Any],
    *,
    method: str = "min_max",
    weight_method: str | None = None,
    forward: Forward | None = None,
    progress: bool = True,
) -> Report:
    """Find an encoding for every site of the sim in one float pass over the data.

    Raises:
        ConfigError: an unknown method.
        DataError: no data, data the model does not take, or NaN or inf in it (names site and batch).
        CalibrationError: a site that no batch reached. In every case the sim stays as it was.
    """
    averaged = _checked(method) == "moving_average"
    _checked(weight_method or "min_max")
    wanted = _observed_quantizers(sim)
    observers = Observers({site: q.decision.op_type for site, q in wanted.items()}, averaged=averaged)
    with eval_mode(sim.model), sim.runtime.in_phase("visit", observers.visit), torch.no_grad():
        for number, batch in progress_over(data, "calibrate", progress):
            feed(sim.model, batch, sim.example, forward, f"batch {number}")
            observers.end_batch(number)
    found = {**_weight_encodings(sim), **_activation_encodings(wanted, observers.ranges())}
    _make_room_for_biases(sim, found)
    for quantizer, encoding in found.values():
        quantizer.set_encoding(encoding)
    rows = [_row(site, quantizer, encoding) for site, (quantizer, encoding) in found.items()]
    return Report("Calibration", rows, {"method": method, "sites": len(rows)})


def _checked(method: str) -> str:
    if method not in METHODS:
        raise ConfigError(f"unknown calibration method {method!r}; choose one of {', '.join(METHODS)}")
    return METHODS[method]


def _observed_quantizers(sim: QuantSim) -> dict[str, Quantizer]:
    """The sites whose range counts: those of tie classes too, but nothing that merely passes values on."""
    kinds = ("activation", "input", "output")
    return {
        site: quantizer
        for site, quantizer in sim.quantizers.items()
        if quantizer.decision.quantized and quantizer.decision.kind in kinds and not quantizer.decision.passes_through
    }


def _weight_encodings(sim: QuantSim) -> dict[str, tuple[Quantizer, Encoding]]:
    found = {}
    for site, quantizer in sim.quantizers.items():
        spec = quantizer.decision.spec
        if quantizer.decision.kind != "weight" or not quantizer.owns_encoding or quantizer.frozen or spec is None:
            continue
        raw = raw_value(sim, site)
        if not bool(torch.isfinite(raw).all()):
            raise DataError(f"NaN or inf in the stored tensor at {site}; load a checkpoint that is finite")
        observed = range_of(raw.detach().float().cpu().numpy(), spec)
        found[site] = quantizer, encoding_from_range(observed, spec)
    return found


def _make_room_for_biases(sim: QuantSim, found: dict[str, tuple[Quantizer, Encoding]]) -> None:
    """Widen the weight scales under which a bias would not fit int32."""
    for site, quantizer in sim.quantizers.items():
        if quantizer.factors is None:
            continue
        source, weight = (factor.site for factor in quantizer.factors)
        if weight in found:
            known = found[source][1] if source in found else quantizer.factors[0].encoding()
            bias = raw_value(sim, site).detach().float().cpu().numpy()
            found[weight] = found[weight][0], with_room_for(bias, known, found[weight][1])


def raw_value(sim: QuantSim, site: str) -> Tensor:
    """The raw stored tensor at a weight or bias site."""
    owner, _, port = site.rpartition(":")
    module = sim.model if owner == "self" else sim.model.get_submodule(owner)
    found = {**module._parameters, **module._buffers}[port]
    assert found is not None
    return found


def _activation_encodings(
    wanted: dict[str, Quantizer], ranges: dict[str, Range]
) -> dict[str, tuple[Quantizer, Encoding]]:
    merged: dict[str, Range] = {}
    for site, observed in ranges.items():
        home = wanted[site].decision.encoding_site
        merged[home] = merged[home].merge(observed) if home in merged else observed
    found, unseen = {}, []
    for site, quantizer in wanted.items():
        spec = quantizer.decision.spec
        if not quantizer.owns_encoding or quantizer.frozen or spec is None:
            continue
        if spec.fixed_range is not None:
            low, high = (np.array([end], np.float32) for end in spec.fixed_range)
            found[site] = quantizer, encoding_from_range(Range(low, high), spec)
        elif site in merged:
            found[site] = quantizer, encoding_from_range(merged[site], spec)
        elif not quantizer.calibrated:
            unseen.append(site)
    if unseen:
        raise CalibrationError(
            f"no batch reached {', '.join(unseen[:8])}; calibrate with data that takes this path through the model, or "
            "skip these owners"
        )
    return found


def _row(site: str, quantizer: Quantizer, encoding: Encoding) -> dict[str, Any]:
    return {
        "site": site,
        "dtype": encoding.dtype.name,
        "low": float(encoding.low.min()),
        "high": float(encoding.high.max()),
        "scales": encoding.scale.size,
    }
