"""Compare a runtime's own session with the simulation of a Q/DQ file, site by site and end to end."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnxruntime as ort
from onnx import ModelProto

from onnx_backend.data_passes.overflow import overflow_reason
from onnx_backend.opening.normalize_qdq import normalize_qdq
from onnx_backend.parity.cuts import find_cuts
from onnx_backend.parity.parity import require_values
from onnx_backend.parity.teacher import RunOn, SessionRunner, Teacher
from onnx_backend.proto.model_io import load
from onnx_backend.runtime.feeds import as_feeds, batches_of, run_session
from onnx_backend.runtime.user_session import EndedProcessError, Level, UserSession, user_session
from onnx_backend.sim import OnnxSim
from qsdk.core.comparing.tally import OutputNoises, Tally
from qsdk.core.errors import ModelError
from qsdk.core.report import Report


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
    """
    sites_in = normalize_qdq(model)
    sim, cuts = OnnxSim.from_qdq(load(sites_in)), find_cuts(sites_in)
    whole = _session(model, level, entries)
    original = None if float_model is None else _session(float_model, "all", None)
    # no exact casts are cut, and no range that is computed while the model runs
    in_session = RunOn(opener=lambda part: SessionRunner(_session(part, level, entries), "what the simulation gives"))
    teacher = Teacher(sites_in, cuts, {}, in_session)
    tallies = {cut.site: Tally(cut.kind) for cut in teacher.cuts}
    names = [value.name for value in whole.get_outputs()]
    encodings, outputs, to_float = sim.encodings, OutputNoises(), OutputNoises()
    for number, batch in batches_of(data, "parity", progress, skip_empty=False):
        where = f"batch {number}"
        feeds = as_feeds(batch, whole.get_inputs(), where)
        require_values(feeds, list(feeds), number)
        got = dict(zip(names, run_session(whole, feeds, where), strict=True))
        outputs.add(got, dict(zip(names, sim.run(feeds), strict=True)))
        if original is not None:
            to_float.add(got, dict(zip(names, run_session(original, feeds, where), strict=True)))
        if teacher.cuts:
            teacher.compare(sim.capture(feeds), encodings, tallies)
    gates = [(outputs, least_sqnr_db), (to_float, least_float_sqnr_db)]
    return _report(tallies, gates, level, overflow_reason(sites_in), {cut.read: cut.site for cut in cuts})


def _report(
    tallies: Mapping[str, Tally],
    gates: Sequence[tuple[OutputNoises, float | None]],
    level: str,
    likely: str,
    site_of: Mapping[str, str],
) -> Report:
    rows: dict[str, dict[str, Any]] = {site: tally.row(site) for site, tally in tallies.items()}
    outputs, to_float = (noises for noises, _ in gates)
    for column, noises in (("sqnr_db", outputs), ("float_sqnr_db", to_float)):
        for name, ratio in noises.ratios().items():
            site = site_of.get(name, f"{name}:output")
            rows.setdefault(site, {"site": site, "kind": "output"})[column] = ratio
    worst = max((tally.largest for tally in tallies.values()), default=0.0)
    reasons = [] if worst <= 1 else [f"a site is {worst:g} steps off" + (f" ({likely})" if likely else "")]
    if any(noise.invented for noises, _ in gates for noise in noises.by_name.values()):
        reasons.append("an output is NaN or infinite where it should be finite")
    reasons += [short for noises, least in gates if (short := _shortfall(noises, least))]
    gated = any(least is not None and noises.by_name for noises, least in gates)
    if not gated and not any(tally.elements for tally in tallies.values()):
        reasons.append("nothing was compared: no site has codes of its own; say what the outputs must reach (min_sqnr)")
    largest = max((noise.largest for noise in outputs.by_name.values()), default=0.0)
    summary = {"session": f"onnxruntime {ort.__version__}, level {level}", "activations_max_lsb": worst}
    summary |= {"sqnr_db": outputs.decibels(), "outputs_max_difference": largest, "passed": not reasons}
    summary |= {"reason": "; ".join(reasons)} if reasons else {}
    summary |= {"float_sqnr_db": to_float.decibels()} if to_float.by_name else {}
    return Report("Parity of the session with the simulation", [*rows.values()], summary)


def _shortfall(noises: OutputNoises, least: float | None) -> str:
    """Return which output does not reach a ratio; "" for none."""
    worst = noises.worst()
    if least is None or (worst is not None and worst[1] >= least):
        return ""
    if worst is None:
        return f"no output is float, so that none can reach {least:g} dB; leave that limit out"
    return f"the output {worst[0]!r} reaches {worst[1]:.4g} dB, not {least:g}"


def _session(model: ModelProto, level: Level, entries: Mapping[str, str] | None) -> UserSession:
    try:
        return user_session(model, level=level, entries=entries)
    except (EndedProcessError, RuntimeError) as error:
        raise ModelError(
            f"the runtime cannot load the model at level {level!r}: {error}; export it with "
            "dialect='onnxruntime', or open the session at a lower level"
        ) from error
