"""Calibration: the encodings that stored tensors and statistics of activations lead to."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qsdk.core.errors import CalibrationError, DataError
from qsdk.core.numerics.bias import with_room_for
from qsdk.core.numerics.encoding import Encoding
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
    """Return the encodings of stored tensors; a bias has none here: its follows from its input and weight."""
    own = [site for site in stored if decisions[site].kind != "bias" and owns_encoding(decisions[site])]
    # each value is dropped before the next one is read
    return {site: encoding_of_stored(decisions[site], stored[site], chosen) for site in own if site not in frozen}


def encoding_of_stored(decision: Decision, values: npt.NDArray[Any], chosen: Estimator) -> Encoding:
    """Return the encoding of one stored tensor."""
    assert decision.spec is not None
    try:
        return encoding_from_range(range_of_stored(values, decision.spec, chosen), decision.spec)
    except CalibrationError as error:
        if not np.isfinite(values).all():
            raise DataError(
                f"NaN or inf in the stored tensor at {decision.site}; load weights that are finite"
            ) from error
        raise


def make_room_for_biases(
    decisions: Decisions, own: Mapping[str, Encoding], stored: Stored, found: dict[str, Encoding]
) -> None:
    """Widen the weight scales under which a bias would not fit int32, where its input or weight has a new encoding.

    Args:
        decisions: of the plan.
        own: the present encodings; frozen ones stay.
        stored: site -> float value of every stored tensor.
        found: the new encodings; those of weights are replaced.
    """
    for site, decision in decisions.items():
        if decision.bias_of is None or site not in stored or found.keys().isdisjoint(decision.bias_of):
            continue
        source, weight = (found.get(part) or own.get(part) for part in decision.bias_of)
        if source is not None and weight is not None and not weight.frozen:  # else the bias has no scale yet
            home = decision.bias_of[1]
            spec = decisions[home].spec
            found[home] = with_room_for(stored[site], source, weight, None if spec is None else spec.scale_bits)


def _row(site: str, encoding: Encoding) -> dict[str, Any]:
    low, high = float(encoding.low.min()), float(encoding.high.max())
    return {"site": site, "dtype": encoding.dtype.name, "low": low, "high": high, "scales": encoding.scale.size}
