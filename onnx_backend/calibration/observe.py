"""Collect statistics of activations, reduced inside the graph batch by batch, so that no activation is kept."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto

from onnx_backend.calibration.statistics_graph import SiteStatistics, statistics_graph
from onnx_backend.runtime.feeds import as_feeds, batches_of, run_session
from onnx_backend.runtime.providers import CPU_ONLY, Providers
from onnx_backend.runtime.session import simulation_session
from qsdk.core.planning.plan import Decision
from qsdk.core.ranges.estimators import Estimator
from qsdk.core.ranges.histogram import sample_step
from qsdk.core.ranges.statistics import Statistics, require_finite


@dataclass
class SessionCache:
    """The session that observes a sim, kept between calibrations and rebuilt when the observed sites change."""

    marked: ModelProto | None = None
    wanted: Mapping[str, Decision] | None = None
    sampled: bool = False
    providers: Providers = CPU_ONLY
    session: ort.InferenceSession | None = None
    watched: Sequence[SiteStatistics] = ()

    def open(
        self, marked: ModelProto, wanted: Mapping[str, Decision], providers: Providers, *, sampled: bool
    ) -> tuple[ort.InferenceSession, Sequence[SiteStatistics]]:
        """Return the session over the float model whose outputs are the statistics of the wanted sites."""
        same = self.marked is marked and self.sampled == sampled and self.wanted == wanted
        same = same and self.providers == providers
        if self.session is None or not same:
            model, self.watched = statistics_graph(marked, wanted, sampled=sampled)
            self.session = simulation_session(model, runs_often=True, providers=providers)
            self.marked, self.wanted, self.sampled = marked, dict(wanted), sampled
            self.providers = providers
        return self.session, self.watched


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
