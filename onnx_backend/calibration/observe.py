"""Collect statistics of activations, reduced inside the graph batch by batch, so that no activation is kept."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto

from onnx_backend.calibration.statistics_graph import SiteStatistics, statistics_graph
from onnx_backend.runtime.feeds import as_feeds, batches_of, run_session
from onnx_backend.runtime.providers import CPU_ONLY, Providers
from onnx_backend.runtime.repeated_session import RepeatedSession
from qsdk.core.planning.plan import Decision
from qsdk.core.ranges.estimators import Estimator
from qsdk.core.ranges.histogram import sample_step
from qsdk.core.ranges.statistics import Statistics, require_finite


@dataclass(frozen=True)
class _Observing:
    """A session that observes sites, and what it is for."""

    marked: ModelProto
    wanted: Mapping[str, Decision]
    providers: Providers
    session: RepeatedSession
    watched: Sequence[SiteStatistics]


class SessionCache:
    """The sessions that observe a sim, with samples and without, kept until the observed sites change."""

    def __init__(self) -> None:
        self._kept: dict[bool, _Observing] = {}

    def open(
        self, marked: ModelProto, wanted: Mapping[str, Decision], providers: Providers, *, sampled: bool
    ) -> tuple[RepeatedSession, Sequence[SiteStatistics]]:
        """Return the session over the float model whose outputs are the statistics of the wanted sites."""
        kept = self._kept.get(sampled)
        same = kept is not None and kept.marked is marked and kept.wanted == wanted and kept.providers == providers
        if kept is None or not same:
            model, watched = statistics_graph(marked, wanted, sampled=sampled)
            kept = _Observing(marked, dict(wanted), providers, RepeatedSession(model, providers), watched)
            self._kept[sampled] = kept
        return kept.session, kept.watched


def observe(
    marked: ModelProto,
    wanted: Mapping[str, Decision],
    batches: Iterable[Any],
    chosen: Estimator,
    *,
    progress: bool = True,
    sessions: SessionCache | None = None,
    providers: Providers = CPU_ONLY,
) -> Statistics:
    """Collect the statistics of activations in one float pass.

    Args:
        marked: the float model with marks.
        wanted: the sites to observe, see `statistics.observed`.
        batches: see `feeds.as_feeds`.
        chosen: the estimator; it names the statistics that it needs.
        progress: show a progress bar.
        sessions: keeps the session for the next call.
        providers: to run on.

    Raises:
        DataError: no data, data the model does not take, or NaN or inf in it (names site and batch).
    """
    session, watched = (sessions or SessionCache()).open(marked, wanted, providers, sampled=chosen.reads_histogram)
    names = [output.name for output in session.get_outputs()]
    statistics = Statistics(chosen)
    for number, batch in batches_of(batches, "calibrate", progress, skip_empty=False):
        where = f"batch {number}"
        found = run_session(session, as_feeds(batch, session.get_inputs(), where), where)
        values = dict(zip(names, found, strict=True))
        for item in watched:
            _add_statistics(item, values, number, statistics)
        statistics.end_batch()
    return statistics


def _add_statistics(item: SiteStatistics, values: Mapping[str, Any], number: int, statistics: Statistics) -> None:
    high = values[item.high]
    low = values[item.low] if item.low else np.float32(0)
    if high.max(initial=-np.inf) == -np.inf and np.all(high < low):
        return  # an empty tensor
    check = float(values[item.check]) if item.check else 0.0
    require_finite(item.site, number, low, high, check)
    if not item.sample:
        statistics.add(item.site, low, high)
    else:
        statistics.add(item.site, low, high, values[item.sample], sample_step(int(values[item.size])))
