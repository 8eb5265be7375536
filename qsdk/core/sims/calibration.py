"""Calibration: the encodings that stored tensors and statistics of activations lead to."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qsdk.core.errors import CalibrationError, DataError
from qsdk.core.numerics.bias import with_room_for
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.spec import Spec
from qsdk.core.planning.plan import Decision, by_type
from qsdk.core.ranges.estimators import PERCENTILE, Estimator, estimator, range_of_stored
from qsdk.core.ranges.ranges import Range, encoding_from_range
from qsdk.core.ranges.statistics import (
    Gather,
    Statistics,
    activation_encodings,
    merge_over_ranks,
    observed_sites,
    single_process,
)
from qsdk.core.report import Report
from qsdk.core.sims.state import owns_encoding

Decisions = Mapping[str, Decision]
Stored = Mapping[str, npt.NDArray[Any]]
#: Runs the float model over the data and returns the statistics of these sites.
Observe = Callable[[Decisions, Estimator], Statistics]


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration.

    Attributes:
        encodings: site -> new encoding; frozen ones are not among them.
        report: one row for each.
        ranges: site -> range that was observed.
        parts: (site of an input, axis) -> largest magnitude at each index.
        longest: tokens of the longest text, see `Statistics.add_length`.
    """

    encodings: dict[str, Encoding]
    report: Report
    ranges: Mapping[str, Range]
    parts: Mapping[tuple[str, int], npt.NDArray[np.float32]]
    longest: int


def calibrate_sites(
    decisions: Decisions,
    own: Mapping[str, Encoding],
    stored: Stored,
    observe: Observe,
    *,
    method: str = "min_max",
    weight_method: str | None = None,
    percentile: float = PERCENTILE,
    gather: Gather = single_process,
    only_traced: Collection[str] = (),
) -> Calibration:
    """Find an encoding for every site that has one of its own: stored tensors at once, activations in one float pass.

    Args:
        decisions: of the plan, at the sites that are quantized.
        own: the present encodings; frozen ones stay.
        stored: site -> float value of every stored tensor.
        observe: is called unless only weights have ranges to find.
        method: for activations.
        weight_method: for stored tensors; `min_max` where it is None.
        percentile: of the method of that name.
        gather: returns what every rank passes to it; the statistics of all ranks count.
        only_traced: sites that the example did not reach, and that get no encoding if no batch does.

    Raises:
        ConfigError: an unknown method, or a percentile outside 50..100.
        DataError: no data, data the model does not take, or NaN or inf in it (names site and batch).
        CalibrationError: a site that no batch reached.
    """
    chosen = estimator(method, percentile)
    for_weights = estimator(weight_method or "min_max", percentile)
    frozen = {site for site, encoding in own.items() if encoding.frozen}
    found = weight_encodings(decisions, stored, for_weights, frozen)  # first: a broken one makes NaN of activations
    wanted, statistics = observed_sites(decisions.values()), Statistics(chosen)
    if wanted:
        statistics = merge_over_ranks(lambda: observe(wanted, chosen), gather)
    found |= activation_encodings(wanted.values(), statistics, frozen=frozen, known=own, only_traced=only_traced)
    make_room_for_biases(decisions, own, stored, found)
    rows = [_row(site, encoding) for site, encoding in found.items()]
    types = by_type([{"op_type": decisions[row["site"]].op_type, "dtype": row["dtype"]} for row in rows])
    facts = {"method": method, "sites": len(rows), **({"by_type": types} if types else {})}
    facts |= {"calibrated_length": statistics.longest} if statistics.longest else {}
    report = Report("Calibration", rows, facts)
    return Calibration(found, report, statistics.ranges, statistics.parts, statistics.longest)


def weight_encodings(
    decisions: Decisions, stored: Stored, chosen: Estimator, frozen: Collection[str]
) -> dict[str, Encoding]:
    """Return the encodings of stored tensors; a bias has none here: its follows from its input and weight.

    Raises:
        DataError: NaN or inf in a stored tensor; names the site.
    """
    found = {}
    for site in stored:
        decision = decisions[site]
        if decision.spec is None or decision.kind == "bias" or not owns_encoding(decision) or site in frozen:
            continue
        found[site] = _weight_encoding(site, stored, decision.spec, chosen)
    return found


def _weight_encoding(site: str, stored: Stored, spec: Spec, chosen: Estimator) -> Encoding:
    """Return the encoding of one stored tensor, whose value is dropped before the next one is read."""
    values = stored[site]
    try:
        found = range_of_stored(values, spec, chosen)
    except CalibrationError as error:
        if not np.isfinite(values).all():
            raise DataError(f"NaN or inf in the stored tensor at {site}; load weights that are finite") from error
        raise
    return encoding_from_range(found, spec)


def make_room_for_biases(
    decisions: Decisions, own: Mapping[str, Encoding], stored: Stored, found: dict[str, Encoding]
) -> None:
    """Widen the weight scales among the new encodings under which a bias would not fit int32.

    Args:
        decisions: of the plan.
        own: the present encodings.
        stored: site -> float value of every stored tensor.
        found: the new encodings; those of weights are replaced.
    """
    for site in stored:
        source, weight = decisions[site].bias_of or ("", "")
        known = found.get(source) or own.get(source)
        if weight in found and known is not None:  # else the bias has no scale yet
            spec = decisions[weight].spec
            found[weight] = with_room_for(stored[site], known, found[weight], None if spec is None else spec.scale_bits)


def _row(site: str, encoding: Encoding) -> dict[str, Any]:
    low, high = float(encoding.low.min()), float(encoding.high.max())
    return {"site": site, "dtype": encoding.dtype.name, "low": low, "high": high, "scales": encoding.scale.size}
