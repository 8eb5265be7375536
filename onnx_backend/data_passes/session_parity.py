"""Compare a runtime's own session with the simulation of a Q/DQ file, site by site and end to end."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnx import ModelProto

from onnx_backend.data_passes.overflow import overflow_reason
from onnx_backend.opening.normalize_qdq import normalize_qdq
from onnx_backend.parity.cuts import Cut, cut_at_codes, find_cuts
from onnx_backend.parity.parity import require_values
from onnx_backend.parity.tally import OutputNoises, in_units, lsb
from onnx_backend.proto.graph_queries import producers
from onnx_backend.proto.model_io import load
from onnx_backend.runtime.feeds import as_declared, as_feeds, batches_of, run_session
from onnx_backend.runtime.session import simulation_session
from onnx_backend.runtime.user_session import EndedProcessError, Level, UserSession, user_session
from onnx_backend.sim import OnnxSim
from qsdk.core.errors import ModelError
from qsdk.core.numerics.dtypes import DTYPES
from qsdk.core.numerics.encoding import Encoding, storage_type
from qsdk.core.report import Report

Array = npt.NDArray[Any]


@dataclass
class _SiteDifference:
    """The differences found at one site so far."""

    kind: str
    codes: np.dtype[Any]
    largest: float = 0.0
    total: float = 0.0
    elements: int = 0

    def steps(self, left: Array, right: Array) -> Array:
        """Return the differences of a batch, in steps of the codes' dtype."""
        return lsb(left.astype(self.codes), right.astype(self.codes))

    def add(self, steps: Array) -> None:
        """Add differences of some elements."""
        self.largest = max(self.largest, float(steps.max(initial=0)))
        self.total += float(steps.sum())
        self.elements += steps.size


class _OutputDifference(OutputNoises):
    """The noise of each float output, and the largest single difference of any output."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0.0
        self.elements = 0
        self.invented = 0  # values that are not finite where the wanted ones are

    def add(self, got: Mapping[str, Array], wanted: Mapping[str, Array]) -> None:
        """Add the outputs of a batch."""
        super().add(got, wanted)
        for name, right in wanted.items():
            left, exact = np.asarray(got[name], np.float64), np.asarray(right, np.float64)
            self.elements += exact.size
            self.invented += int(np.sum(np.isfinite(exact) & ~np.isfinite(left)))
            self.largest = max(self.largest, float(np.nan_to_num(np.abs(left - exact), nan=np.inf).max(initial=0)))

    def shortfall(self, least: float | None) -> str:
        """Return which output does not reach a ratio; "" for none."""
        worst = self.worst()
        if least is None or (worst is not None and worst[1] >= least):
            return ""
        if worst is None:
            return f"no output is float, so that none can reach {least:g} dB; leave that limit out"
        return f"the output {worst[0]!r} reaches {worst[1]:.4g} dB, not {least:g}"


def check_session(
    model: ModelProto,
    data: Iterable[Any],
    *,
    level: Level = "all",
    entries: Mapping[str, str] | None = None,
    least_sqnr_db: float | None = None,
    least_float_sqnr_db: float | None = None,
    float_model: ModelProto | None = None,
    progress: bool = True,
) -> Report:
    """Compare a session as an application opens it with the simulation of the same Q/DQ file.

    At every activation site both get the simulation's values at the sites before it, behind the pairs of nodes that
    the file has there, so that the session fuses what it fuses in the whole file; the codes are compared. End to end,
    the whole file runs in both.

    Args:
        model: a Q/DQ model, valid; that of another tool is cut in the normal form in which it is opened.
        data: batches: arrays, tuples in order or mappings by input name.
        level: of the session's graph optimization; `all` is the runtime's default.
        entries: configuration entries of the session, such as `session.qdq_matmulnbits_accuracy_level`.
        least_sqnr_db: the ratio that the outputs must reach to pass; None for no such test.
        least_float_sqnr_db: the ratio that they must reach against the outputs of the float model.
        float_model: the model that was quantized, to report the ratio to its outputs as well.
        progress: show a progress bar.

    Returns:
        Rows `site`, `kind`, `max_lsb`, `mean_lsb`, `elements`, of float outputs also `sqnr_db` and `float_sqnr_db` (one
        that is no site has no codes to compare); summary `activations_max_lsb`, `sqnr_db` (of the worst float output of
        the session against the simulation's), `outputs_max_difference`, `passed`: at most 1 LSB at every site, no NaN
        that the simulation has not, the ratios that are asked for at every float output, and something compared (else
        `reason`); with a float model `float_sqnr_db`.

    Raises:
        ModelError: the runtime cannot load the model in such a session.
        DataError: no data, or data the model does not take.
    """
    sites_in = normalize_qdq(model)
    sim = OnnxSim.from_qdq(load(sites_in))
    cuts = _cuttable(sites_in)
    whole = _session(model, level, entries)
    original = None if float_model is None else _session(float_model, "all", None)
    cut, fed = cut_at_codes(sites_in, cuts)
    exact, asked = (simulation_session(cut), _session(cut, level, entries)) if cuts else (None, None)
    sites = {cut.site: _SiteDifference(cut.kind, storage_type(DTYPES[cut.dtype])) for cut in cuts}
    names = [value.name for value in whole.get_outputs()]
    encodings, outputs, to_float = sim.encodings, _OutputDifference(), _OutputDifference()
    for number, batch in batches_of(data, "parity", progress, skip_empty=False):
        where = f"batch {number}"
        feeds = as_feeds(batch, whole.get_inputs(), where)
        require_values(feeds, list(feeds), number)
        got = dict(zip(names, run_session(whole, feeds, where), strict=True))
        outputs.add(got, dict(zip(names, sim.run(feeds), strict=True)))
        if original is not None:
            to_float.add(got, dict(zip(names, run_session(original, feeds, where), strict=True)))
        if exact is not None and asked is not None:
            captured = sim.capture(feeds)
            site_feeds = feeds | {name: captured[site] for site, name in fed.items()}
            codes = _run(asked, site_feeds, where), _run(exact, site_feeds, where)
            _compare_codes(cuts, codes, captured, encodings, sites)
    gates = [(outputs, least_sqnr_db), (to_float, least_float_sqnr_db)]
    return _report(sites, gates, level, overflow_reason(sites_in), {cut.read: cut.site for cut in cuts})


def _cuttable(model: ModelProto) -> list[Cut]:
    """Return the sites with codes of their own: no exact casts, and no range that is computed while the model runs."""
    makers = producers(model.graph.node)
    return [cut for cut in find_cuts(model) if makers[cut.compared].op_type == "QuantizeLinear"]


def _report(
    sites: Mapping[str, _SiteDifference],
    gates: Sequence[tuple[_OutputDifference, float | None]],
    level: str,
    likely: str,
    site_of: Mapping[str, str],
) -> Report:
    rows: dict[str, dict[str, Any]] = {
        site: {
            "site": site,
            "kind": found.kind,
            "max_lsb": found.largest,
            "mean_lsb": found.total / max(found.elements, 1),
            "elements": found.elements,
        }
        for site, found in sites.items()
    }
    outputs, to_float = (found for found, _ in gates)
    for column, noises in (("sqnr_db", outputs), ("float_sqnr_db", to_float)):
        for name, noise in noises.by_name.items():
            site = site_of.get(name, f"{name}:output")
            rows.setdefault(site, {"site": site, "kind": "output"})[column] = noise.decibels()
    worst = max((found.largest for found in sites.values()), default=0.0)
    reasons = [] if worst <= 1 else [f"a site is {worst:g} steps off" + (f" ({likely})" if likely else "")]
    if any(found.invented for found, _ in gates):
        reasons.append("an output is NaN or infinite where it should be finite")
    reasons += [short for found, least in gates if (short := found.shortfall(least))]
    gated = any(least is not None and found.elements for found, least in gates)
    if not gated and not any(found.elements for found in sites.values()):
        reasons.append("nothing was compared: no site has codes of its own; say what the outputs must reach (min_sqnr)")
    passed = not reasons
    reason = {} if passed else {"reason": "; ".join(reasons)}
    facts = {"session": f"onnxruntime {ort.__version__}, level {level}", "activations_max_lsb": worst}
    ends = {"sqnr_db": outputs.decibels(), "outputs_max_difference": outputs.largest, "passed": passed, **reason}
    distance = {"float_sqnr_db": to_float.decibels()} if to_float.elements else {}
    return Report("Parity of the session with the simulation", [*rows.values()], {**facts, **ends, **distance})


def _compare_codes(
    cuts: Sequence[Cut],
    codes: tuple[Sequence[Array], Sequence[Array]],
    captured: Mapping[str, Array],
    encodings: Mapping[str, Encoding],
    sites: Mapping[str, _SiteDifference],
) -> None:
    """Add the differences between the codes of two sessions on one batch, at every cut."""
    for cut, left, right in zip(cuts, *codes, strict=True):
        steps = sites[cut.site].steps(left, right)
        sites[cut.site].add(in_units(steps, captured[cut.site], encodings[cut.site], cut.tensor_type))


def _run(session: UserSession | ort.InferenceSession, feeds: Mapping[str, Array], where: str) -> list[Array]:
    known = {
        value.name: value.type for value in session.get_inputs()
    }  # an input that only cut-off nodes read may be gone
    return run_session(session, {n: as_declared(value, known[n]) for n, value in feeds.items() if n in known}, where)


def _session(model: ModelProto, level: Level, entries: Mapping[str, str] | None) -> UserSession:
    try:
        return user_session(model, level=level, entries=entries)
    except (EndedProcessError, RuntimeError) as error:
        raise ModelError(
            f"the runtime cannot load the model at level {level!r}: {error}; export it with "
            "dialect='onnxruntime', or open the session at a lower level"
        ) from error
