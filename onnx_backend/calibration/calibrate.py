"""Calibrate: ranges of activations are streamed from data, ranges of stored tensors are read at once."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto

from onnx_backend.calibration.observe import SessionCache, observe
from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import initializers
from onnx_backend.proto.nodes import attributes, is_mark
from qsdk.core.errors import DataError
from qsdk.core.lazy_arrays import LazyArrays
from qsdk.core.numerics.bias import with_room_for
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.planning.plan import Plan
from qsdk.core.ranges.estimators import PERCENTILE, Estimator, estimator, range_of_stored
from qsdk.core.ranges.ranges import Range, encoding_from_range
from qsdk.core.ranges.statistics import (
    Gather,
    Statistics,
    activation_encodings,
    alone,
    merge_over_ranks,
    observed_sites,
)
from qsdk.core.report import Report


def find_encodings(
    marked: ModelProto,
    plan: Plan,
    own: Mapping[str, Encoding],
    batches: Iterable[Any],
    *,
    method: str = "min_max",
    weight_method: str | None = None,
    percentile: float = PERCENTILE,
    progress: bool = True,
    sessions: SessionCache | None = None,
    gather: Gather = alone,
) -> tuple[dict[str, Encoding], Report, Mapping[str, Range]]:
    """Find an encoding for every site that has one of its own: stored tensors at once, activations in one float pass.

    Args:
        marked: the float model with a mark at every site.
        plan: the decision for each site.
        own: the current encodings; frozen ones stay.
        batches: see `feeds.as_feeds`.
        method: for activations.
        weight_method: for stored tensors; `min_max` where it is None.
        percentile: of the method of that name.
        progress: show a progress bar.
        sessions: keeps the observing session for the next call.
        gather: collects a value from every rank; the statistics of all ranks count.

    Returns:
        Site -> encoding, in place of `own`; one row for every encoding that was found; and site -> the range seen.

    Raises:
        ConfigError: an unknown method, or a percentile outside 50..100.
        DataError: no data, data the model does not take, or NaN or inf in it (names site and batch).
        CalibrationError: a site that no batch reached.
    """
    chosen = estimator(method, percentile)
    for_weights = estimator(weight_method or "min_max", percentile)
    frozen = {site: encoding for site, encoding in own.items() if encoding.frozen}
    stored = stored_tensors(marked, plan)
    found = _weight_encodings(plan, stored, for_weights)
    wanted = observed_sites(plan.decisions.values())
    statistics = Statistics(chosen)
    if wanted:  # else only weights need ranges, and the data is not needed

        def observing() -> Statistics:
            return observe(marked, wanted, batches, chosen, progress=progress, sessions=sessions)

        statistics = merge_over_ranks(observing, gather)
    found.update(activation_encodings(wanted.values(), statistics, frozen=frozen, known=own))
    _make_room_for_biases(plan, stored, found, {**own, **found, **frozen}, frozen)
    rows = [_row(site, encoding) for site, encoding in found.items() if site not in frozen]
    report = Report("Calibration", rows, {"method": method, "sites": len(rows)})
    return {**own, **found, **frozen}, report, statistics.ranges


def stored_tensors(marked: ModelProto, plan: Plan) -> LazyArrays:
    """Return site -> float value of every marked stored tensor."""
    stored, found = initializers(marked.graph), stored_names(marked, plan)
    return LazyArrays(found, lambda site: array(stored[found[site]]))


def stored_names(marked: ModelProto, plan: Plan) -> dict[str, str]:
    """Return site -> name of the stored tensor there, for every marked one."""
    stored = initializers(marked.graph)
    roots: dict[str, str] = {}
    found: dict[str, str] = {}
    for node in marked.graph.node:
        if is_mark(node):
            root = roots[node.output[0]] = roots.get(node.input[0], node.input[0])
            site = str(attributes(node)["key"])
            if root in stored and site in plan.decisions:
                found[site] = root
    return found


def _weight_encodings(plan: Plan, stored: Mapping[str, npt.NDArray[Any]], chosen: Estimator) -> dict[str, Encoding]:
    found = {}
    for site in stored:
        decision = plan.decisions[site]
        if decision.spec is None or not decision.quantized or decision.tied_to or decision.kind == "bias":
            continue  # a bias follows from its input and weight, or keeps the encoding of its file
        values = stored[site]
        if not np.isfinite(values).all():
            raise DataError(f"NaN or inf in the stored tensor at {site}; load a model that is finite")
        found[site] = encoding_from_range(range_of_stored(values, decision.spec, chosen), decision.spec)
    return found


def _make_room_for_biases(
    plan: Plan,
    stored: Mapping[str, npt.NDArray[Any]],
    found: dict[str, Encoding],
    known: Mapping[str, Encoding],
    frozen: Collection[str],
) -> None:
    """Widen the weight scales under which a bias would not fit int32."""
    for site in stored:
        source, weight = plan.decisions[site].bias_of or ("", "")
        if weight in found and weight not in frozen:
            spec = plan.decisions[weight].spec
            found[weight] = with_room_for(
                stored[site], known[source], found[weight], None if spec is None else spec.scale_bits
            )


def _row(site: str, encoding: Encoding) -> dict[str, Any]:
    low, high = float(encoding.low.min()), float(encoding.high.max())
    return {"site": site, "dtype": encoding.dtype.name, "low": low, "high": high, "scales": encoding.scale.size}
