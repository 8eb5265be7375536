"""Collect statistics of activations, reduced inside the graph batch by batch, so that no activation is kept."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from operator import length_hint
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto

from onnx_backend.calibration.statistics_graph import SiteStatistics, statistics_graph
from onnx_backend.proto.inputs import tell_axes_apart
from onnx_backend.runtime.feeds import as_feeds, batches_of, run_session
from onnx_backend.runtime.providers import CPU_ONLY, Providers
from onnx_backend.runtime.repeated_session import RepeatedSession
from onnx_backend.runtime.session import is_small_convolutional
from qsdk.core.overlapped import cores, overlapped
from qsdk.core.planning.plan import Decision
from qsdk.core.ranges.estimators import Estimator
from qsdk.core.ranges.ranges import Range
from qsdk.core.ranges.statistics import Statistics, part_axes, require_finite
from qsdk.core.site import site_name

_AT_ONCE = 2  # batches
_Batch = tuple[int, dict[str, npt.NDArray[Any]]]  # number, and input name -> array


@dataclass(frozen=True)
class _Observing:
    """A session that observes sites, and what it is for."""

    marked: ModelProto
    wanted: Mapping[str, Decision]
    providers: Providers
    session: RepeatedSession
    watched: Sequence[SiteStatistics]


class SessionCache:
    """The sessions that observe a sim, with samples and without, kept until the observed sites change.

    Those that run batches side by side have a thread less for every run beside the first: each run brings its own.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[bool, int], _Observing] = {}
        self._judged: tuple[ModelProto, bool] | None = None

    def is_small_convolutional(self, marked: ModelProto) -> bool:
        """Return `session.is_small_convolutional` of a model, which is walked over once."""
        if self._judged is None or self._judged[0] is not marked:
            self._judged = marked, is_small_convolutional(marked)
        return self._judged[1]

    def open(
        self,
        marked: ModelProto,
        wanted: Mapping[str, Decision],
        providers: Providers,
        *,
        sampled: bool,
        at_once: int = 1,
    ) -> tuple[RepeatedSession, Sequence[SiteStatistics]]:
        """Return the session over the float model whose outputs are the statistics of the wanted sites.

        Args:
            marked: the float model with marks.
            wanted: the sites to observe.
            providers: to run on.
            sampled: whether it gives samples, too.
            at_once: batches that are run at once.
        """
        kept = self._kept.get((sampled, at_once))
        same = kept is not None and kept.marked is marked and kept.wanted == wanted and kept.providers == providers
        if kept is None or not same:
            model, watched = statistics_graph(marked, wanted, sampled=sampled)
            threads = cores() + 1 - at_once if at_once > 1 else 0
            session = RepeatedSession(model, providers, threads)
            kept = _Observing(marked, dict(wanted), providers, session, watched)
            self._kept[sampled, at_once] = kept
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
        marked: the float model with marks; `tell_axes_apart` may rename axes of its inputs.
        wanted: the sites to observe, see `statistics.observed`.
        batches: see `feeds.as_feeds`.
        chosen: the estimator; it names the statistics that it needs.
        progress: show a progress bar.
        sessions: keeps the session for the next call.
        providers: to run on.

    Raises:
        DataError: no data, data the model does not take, or NaN or inf in it (names site and batch).
    """
    cache = sessions or SessionCache()
    at_once = _AT_ONCE if length_hint(batches, _AT_ONCE) > 1 and _gains_by_more_at_once(cache, marked, providers) else 1
    session, watched = cache.open(marked, wanted, providers, sampled=chosen.reads_histogram, at_once=at_once)
    inputs, names = session.get_inputs(), [output.name for output in session.get_outputs()]
    # an iterator may write a batch over the one before
    copied = at_once > 1 and not isinstance(batches, list | tuple)

    statistics = Statistics(chosen)
    edges = {site for site, decision in wanted.items() if decision.kind == "input"}

    def read() -> Iterator[_Batch]:
        for number, batch in batches_of(batches, "calibrate", progress, skip_empty=False):
            feeds = as_feeds(batch, inputs, f"batch {number}")
            tell_axes_apart(marked, feeds)
            for site, value in ((site_name(name, "input"), value) for name, value in feeds.items()):
                for axis in part_axes(value.shape) if site in edges and value.size else ():
                    others = tuple(i for i in range(value.ndim) if i != axis)
                    largest = np.maximum(value.max(axis=others), -value.min(axis=others))
                    statistics.add_parts(site, axis, largest.astype(np.float32))
            yield number, {name: value.copy() for name, value in feeds.items()} if copied else feeds

    def run(batch: _Batch) -> tuple[int, dict[str, npt.NDArray[Any]]]:
        number, feeds = batch
        return number, dict(zip(names, run_session(session, feeds, f"batch {number}"), strict=True))

    with closing(overlapped(run, read(), at_once)) as results:
        for number, values in results:
            _add_statistics(watched, values, number, statistics)
            for item in watched:
                if item.shape:
                    statistics.add_length(wanted[item.site], values[item.shape].tolist())
            statistics.end_batch()
    return statistics


def _gains_by_more_at_once(cache: SessionCache, marked: ModelProto, providers: Providers) -> bool:
    """Return whether two runs side by side, which share the threads, take less time than one after the other.

    Small models do: the runtime splits a convolution over threads, but not what calibration adds, and the threads wait
    for each other at every node. Large models do not, and would hold the activations of two batches.
    """
    return providers == CPU_ONLY and cores() > 1 and cache.is_small_convolutional(marked)


def _add_statistics(
    watched: Sequence[SiteStatistics], values: Mapping[str, Any], number: int, statistics: Statistics
) -> None:
    """Add what a session has found in a batch: numbers of all sites at once, since calls cost more than values here."""
    numbers = [item for item in watched if not values[item.high].ndim]
    channels = [item for item in watched if values[item.high].ndim and not _is_empty(item, values)]
    low, high, check = (
        _numbers([getattr(item, name) for item in numbers], values) for name in ("low", "high", "check")
    )
    full = (high != -np.inf) | (high >= low)  # no value leaves the extremes of an empty tensor
    if not np.isfinite([low[full], high[full], check[full]]).all() or channels:
        _require_finite([item for item in watched if not _is_empty(item, values)], values, number)
    for item in channels:
        statistics.add(item.site, values[item.low], values[item.high])
    kept = [item for item, some in zip(numbers, full.tolist(), strict=True) if some]
    samples = {item.site: (values[item.sample], int(values[item.step].item())) for item in kept if item.sample}
    if kept:
        statistics.add_tensors([item.site for item in kept], Range(low[full], high[full]), samples)


def _numbers(names: Sequence[str], values: Mapping[str, Any]) -> npt.NDArray[np.float32]:
    """Return the numbers of these names, [N]; 0 for no name."""
    return np.array([values[name].item() if name else 0.0 for name in names], np.float32)


def _is_empty(item: SiteStatistics, values: Mapping[str, Any]) -> bool:
    """Return whether a tensor has no values: its largest one is minus infinity then."""
    high = values[item.high]
    return bool(high.max(initial=-np.inf) == -np.inf and np.all(high < (values[item.low] if item.low else 0)))


def _require_finite(watched: Iterable[SiteStatistics], values: Mapping[str, Any], number: int) -> None:
    """Raise an error that names the first site whose values are not finite."""
    for item in watched:
        read = [values[name] for name in (item.low, item.high, item.check) if name]
        require_finite(item.site, number, *read)
