"""What int32 biases need: the original values of those that solvers shift, and remarks on those that int32 changes."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from qsdk.core.arrays import Array
from qsdk.core.errors import FileFormatError
from qsdk.core.graph.graph import Graph
from qsdk.core.layers.graph_layers import graph_layers
from qsdk.core.numerics.bias import bias_remark
from qsdk.core.planning.plan import Plan
from qsdk.core.report import Report
from qsdk.core.sims.state import SimState, StoredReader

_HALF = (np.float16, ml_dtypes.bfloat16)
#: site -> the original bias, and the shifted one
OriginalBiases = dict[str, tuple[Array, Array]]


class HasBiases(Protocol):
    """The part of a sim, of either side, that concerns its biases."""

    original_biases: OriginalBiases
    plan: Plan
    graph: Graph

    def snapshot(self, *, weights: bool = False) -> SimState:
        """Return the present state."""
        ...

    def stored_floats(self, sites: Collection[str]) -> Mapping[str, Array]:
        """Return the stored tensors at sites."""
        ...

    def store_floats(self, values: Mapping[str, Array]) -> None:
        """Store other values at sites."""
        ...


@contextmanager
def noting_shifts(sim: HasBiases) -> Iterator[dict[str, Array]]:
    """Record the original values of the biases that the block shifts.

    Yields a dict for the block to fill: site of a bias -> how far the float model's bias must move where its weight is
    replaced by the rounded one for good, so that the mean of the float model's output stays the same.
    """
    rounded: dict[str, Array] = {}
    sites = [site for site, decision in sim.plan.decisions.items() if decision.kind == "bias"]
    before = {site: values.copy() for site, values in sim.stored_floats(sites).items()}
    yield rounded
    known = {site: original for site, (original, _) in _still_shifted(sim, before).items()}
    for site, values in sim.stored_floats(sites).items():
        if not np.array_equal(values, before[site]):
            original = known.get(site, before[site])
            moved = rounded[site].reshape(original.shape).astype(original.dtype) if site in rounded else 0
            sim.original_biases[site] = original + moved, values.copy()


@contextmanager
def without_shifts(sim: HasBiases, *, rounds: bool = True) -> Iterator[None]:
    """Restore the biases of the float model for the duration of the block.

    Afterwards the shift is applied again to each bias that is unchanged and whose weight still has its encoding; to all
    of them if the block raises. With `rounds`, the block freezes the weights that it rounds: a newly frozen one counts
    as changed.
    """
    exact = float_biases(sim)
    if not exact:
        yield
        return
    shifted = {site: sim.original_biases[site][1] for site in exact}
    before = sim.snapshot()
    sim.store_floats(exact)
    stored = {site: values.copy() for site, values in sim.stored_floats(list(exact)).items()}  # as its dtype rounds it
    try:
        yield
    except BaseException:
        sim.store_floats(shifted)
        raise
    after, now = sim.snapshot(), sim.stored_floats(list(exact))
    weights = {result.layer.bias: result.layer.site for result in graph_layers(sim.graph, sim.plan, frozen=())[0]}
    same = {site for site, weight in weights.items() if _is_unchanged(before, after, weight, rounds)}
    sim.store_floats(
        {site: shifted[site] for site in exact if site in same and np.array_equal(now[site], stored[site])}
    )


@contextmanager
def shifts_put_back_on_error(sim: HasBiases) -> Iterator[dict[str, Array]]:
    """Yield the shifted biases by site, and store them again if the block raises."""
    shifted = {site: sim.original_biases[site][1] for site in float_biases(sim)}
    try:
        yield shifted
    except BaseException:
        if shifted:
            sim.store_floats(shifted)
        raise


def _is_unchanged(before: SimState, after: SimState, weight: str, rounds: bool) -> bool:
    """Return whether a weight has the same encoding as before and, with `rounds`, is as frozen as before."""
    old, new = before.encoding(weight), after.encoding(weight)
    return old == new and not (rounds and (old and old.frozen) != (new and new.frozen))


def rounded_for_good(sim: HasBiases) -> set[str]:
    """Return the weights that are frozen beside a bias that was shifted with them: their float values are lost."""
    shifted, state = float_biases(sim), sim.snapshot()
    layers = [result.layer for result in graph_layers(sim.graph, sim.plan, frozen=())[0]]
    return {layer.site for layer in layers if layer.bias in shifted and state.own[layer.site].frozen}


def take_back_shifts(sim: HasBiases) -> None:
    """Restore the original value of every bias that was shifted and has not changed otherwise since."""
    shifted = _still_shifted(sim, sim.stored_floats(list(sim.original_biases)))
    sim.store_floats({site: original for site, (original, _) in shifted.items()})
    sim.original_biases.clear()


def float_biases(sim: HasBiases) -> dict[str, Array]:
    """Return the original biases of the float model at the sites where shifted ones are stored."""
    if not sim.original_biases:
        return {}  # without a walk over the model
    now = sim.stored_floats(list(sim.original_biases))
    return {site: original for site, (original, _) in _still_shifted(sim, now).items()}


def _still_shifted(sim: HasBiases, now: Mapping[str, Array]) -> OriginalBiases:
    pairs = sim.original_biases.items()
    return {site: pair for site, pair in pairs if site in now and _is_stored_as(now[site], pair[1])}


def _is_stored_as(now: Array, shifted: Array) -> bool:
    """Return whether a bias is the shifted one, or that in the half precision to which the model was converted."""
    if np.array_equal(now, shifted):
        return True
    with np.errstate(over="ignore"):
        return any(np.array_equal(now, shifted.astype(half).astype(now.dtype)) for half in _HALF)


def biases_to_json(sim: HasBiases) -> dict[str, list[float]]:
    """Return the original values of the shifted biases as lists of numbers, for a file."""
    return {site: original.tolist() for site, original in float_biases(sim).items()}


def read_biases(given: Any, sim: HasBiases, where: str) -> OriginalBiases:
    """Return the biases that `biases_to_json` wrote into the file `where`, for a sim that has the shifted ones."""
    try:
        originals = {str(site): np.array(values, np.float32) for site, values in dict(given).items()}
    except (TypeError, ValueError) as error:
        raise FileFormatError(f"{where} is damaged ({error!r}); write it again with qsdk.save(sim, path)") from error
    now = sim.stored_floats(list(originals))
    return {site: (values, now[site].copy()) for site, values in originals.items() if site in now}


def bias_remarks(state: SimState, stored: StoredReader) -> dict[str, str]:
    """Return a remark by site for each bias that int32 clips or rounds to 0, or that widened its weight's scale.

    Biases without an encoding yet are left out.
    """
    sites = [site for site, decision in state.plan.decisions.items() if decision.bias_of is not None]
    result = {}
    for site, values in stored(sites).items():
        encoding = state.encoding(site)
        remark = "" if encoding is None else bias_remark(values, encoding)
        if remark:
            result[site] = remark
    return result


def with_reasons(coverage: Report, remarks: Mapping[str, str]) -> Report:
    """Return a coverage report with the remarks added to the reasons."""
    rows = [
        {**row, "reason": f"{row['reason']}; {remarks[row['site']]}"} if row["site"] in remarks else row
        for row in coverage.rows
    ]
    return Report(coverage.title, rows, coverage.summary)


def with_left_float(report: Report, kept_float: Mapping[str, str]) -> Report:
    """Return a report of calibration in which sites left float have no range, but the reason as `note`."""
    rows = [row for row in report.rows if row["site"] not in kept_float]
    rows += [{"site": site, "dtype": "float32", "note": reason} for site, reason in kept_float.items()]
    return Report(report.title, rows, {**report.summary, "left_float": len(kept_float)})


def with_erased(report: Report, plan: Plan, remarks: Mapping[str, str]) -> Report:
    """Return a report of calibration with a note at each site whose grid erases a part of it."""
    if not remarks:
        return report
    specs = {site: plan.decisions[site].spec for site in remarks}
    return _noted(report, remarks, {site: str(spec and spec.dtype) for site, spec in specs.items()}, "erased_parts")


def with_notes(report: Report, remarks: Mapping[str, str]) -> Report:
    """Return a report of calibration or export with the remarks as `note`, in the site's row or in a new one."""
    return _noted(report, remarks, dict.fromkeys(remarks, "int32"), "bias_notes")


def _noted(report: Report, remarks: Mapping[str, str], dtypes: Mapping[str, str], counted: str) -> Report:
    known = {row["site"] for row in report.rows}
    rows = [{**row, "note": remarks[row["site"]]} if row["site"] in remarks else row for row in report.rows]
    new = [site for site in remarks if site not in known]
    rows += [{"site": site, "dtype": dtypes[site], "note": remarks[site]} for site in new]
    return Report(report.title, rows, {**report.summary, counted: len(remarks)})
