"""The verb `report`: one HTML page about a quantized model, for people who would rather look than read."""

import os
from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from onnx import ModelProto

from onnx_backend.proto import model_io
from onnx_backend.proto.sizes import file_bytes, sizes
from onnx_backend.qdq.fast_forms import with_pairs
from onnx_backend.sim import OnnxSim
from onnx_backend.sim_with_encodings import open_with_config
from qsdk.core.atomic_files import write_text
from qsdk.core.config.config import w8a8
from qsdk.core.errors import ConfigError, ModelError
from qsdk.core.planning.from_encodings import owned_encodings, plan_as_given
from qsdk.core.precision.advice import decibels
from qsdk.core.report import Report
from qsdk.core.run_options import DataOptions, Run, run_of
from qsdk.core.sims.stateful import require_sim
from qsdk.verbs.analysis.noise import OutputWeights, can_afford_each, layers_of, rounded_weights
from qsdk.verbs.analysis.page.facts import Measured, ModelFacts, model_facts
from qsdk.verbs.analysis.page.page import page
from qsdk.verbs.analysis.profile import exported
from qsdk.verbs.analysis.profile import profile as profiled
from qsdk.verbs.analysis.sensitivity import sensitivity
from qsdk.verbs.doors.choose import Sim, door_of
from qsdk.verbs.doors.onnx_door import require_no_forward
from qsdk.verbs.qdq_files import OnnxSource, validate

_FILES = (str, os.PathLike, ModelProto)
_DRAWING = "qsdk.verbs.analysis.page.plots"  # imports matplotlib, which is optional
_NO_FLOAT_WEIGHTS = (
    "The file holds quantized weights, so all noise here is that of the activations alone. Give the float model as "
    "well (float_model= or --float) to see that of the weights."
)


def report(
    sim_or_file: Sim | OnnxSource,
    out: str | os.PathLike[str],
    *,
    data: Iterable[Any] | None = None,
    float_model: OnnxSource | None = None,
    against: Sim | OnnxSource | None = None,
    profile: Report | bool = False,
    **options: Unpack[DataOptions],
) -> Report:
    """Write one HTML page about a quantized model, which needs no other file and no network.

    It shows the network in order: histograms with their ranges, scales, reasons; with data also which layers cause the
    noise at the outputs. The pictures need matplotlib: `pip install 'qsdk[report]'`.

    Args:
        sim_or_file: a calibrated sim of either side, or an ONNX file with Q/DQ.
        out: the file to write.
        data: batches, as for `sensitivity` (`exact` where that takes seconds) and the values of activations.
        float_model: the float ONNX file behind one with Q/DQ, to compare its outputs and weights with.
        against: another sim or file to compare with, on the same data.
        profile: the result of `qsdk.analysis.profile`, for the milliseconds of each layer; True to measure it here.
        options: `forward`, `progress`; see `qsdk.options`.

    Returns:
        Rows as the layers on the page: `layer`, `op_type`, `dtypes`, `share` of the noise and `sqnr_db` of the outputs
        with it alone quantized (None without data), `bytes`, `clipped` (the largest share at one of its sites), `ms`.
        Summary: `path`, `page_bytes`, `sentence`, the sizes of `export`, `sqnr_db`, `layers`, `against` (its sentence).

    Raises:
        ConfigError: matplotlib is not installed, or `float_model` is given for a sim.
        CalibrationError: the sim is not calibrated.
        DataError: no data, or data that the model does not take.
        FileFormatError: a file cannot be read, or is invalid.
        ExportError: the page cannot be written; what was there is left as it was.

    Examples:
        >>> import tempfile, torch, qsdk
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)), torch.randn(32, 8)
        >>> sim = qsdk.quantize(model, x)
        >>> _ = qsdk.calibrate(sim, [x], progress=False)
        >>> path = tempfile.mkdtemp() + "/page.html"
        >>> [row["layer"] for row in qsdk.report(sim, path, data=[x], progress=False).rows]
        ['input', '0', '1']
    """
    run = run_of(report, options)
    drawing = _drawing()
    models = [sim_or_file, *([] if against is None else [against])]
    if float_model is not None and not any(isinstance(given, _FILES) for given in models):
        raise ConfigError("a sim holds its float model itself; leave out float_model=, which is for files")
    batches = data if data is None or hasattr(data, "__len__") or not hasattr(data, "__next__") else list(data)
    pages: list[ModelFacts] = []
    for given in models:
        measured = _measured(given, batches, float_model, run)
        if profile is True:
            measured = replace(measured, profile=profiled(measured.file, batches, progress=run.progress))
        elif given is sim_or_file and isinstance(profile, Report):
            measured = replace(measured, profile=profile)
        pages.append(model_facts(measured, batches, run, pages[0] if pages else None))
    write_text(out, text := page(pages, drawing.Artist()))
    first = pages[0]
    summary = {"path": os.fspath(out), "page_bytes": len(text.encode()), "sentence": first.sentence}
    summary |= {**first.sizes.summary, "sqnr_db": first.sqnr_db, "layers": len(first.layers)}
    summary |= {"against": pages[1].sentence} if len(pages) > 1 else {}
    columns = ("op_type", "dtypes", "share", "sqnr_db", "bytes", "clipped", "ms")
    rows = [{"layer": layer.name, **{name: getattr(layer, name) for name in columns}} for layer in first.layers]
    return Report("Report", rows, summary)


def _drawing() -> Any:
    """Return the module that draws."""
    try:
        return import_module(_DRAWING)
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("matplotlib"):
            raise
        raise ConfigError("the pictures of a report need matplotlib; install it: pip install 'qsdk[report]'") from error


def opened_file(model: ModelProto, source: OnnxSource) -> OnnxSim:
    """Return the sim of an ONNX file as it is: with the encodings that it holds, and the rest as float by a rule.

    The loaded model is changed; `source` may be a path with an encodings file beside it.
    """
    sim = open_with_config(with_pairs(model), source, w8a8().skip("*", optional=True))
    state, encodings = sim.snapshot(), sim.encodings
    kinds = {site: decision.kind for site, decision in state.plan.decisions.items()}
    # ops that only move values add no noise: the plan of the file ties their results to their inputs
    given = plan_as_given(sim.graph, encodings, {}, kinds=kinds).decisions
    decisions = {site: given[site] if site in encodings else d for site, d in state.plan.decisions.items()}
    plan = replace(state.plan, decisions=decisions)
    sim.restore(replace(state, plan=plan, own=owned_encodings(plan, encodings)))
    return sim


def _measured(
    given: Sim | OnnxSource, data: Iterable[Any] | None, float_model: OnnxSource | None, run: Run
) -> Measured:
    """Measure what a page shows of a model."""
    if isinstance(given, _FILES):
        require_no_forward(run.forward)
        return _measured_file(given, data, float_model, run)
    require_sim(given)
    _ = given.encodings  # a missing calibration is reported before the data is used up
    name = "ONNX model" if isinstance(given, OnnxSim) else type(given.model).__name__.removeprefix("Quantized")
    file, written = exported(given, "onnxruntime", "size")
    measured = Measured(name, given, file, sizes(with_pairs(file), written.summary["bytes"]))
    if data is None or not layers_of(given.plan):
        return measured
    rows = _sensitivity(given, data, run)
    measured = replace(measured, sensitivity=rows, sqnr_db=rows.summary["sqnr_db"], remarks=(_how(rows),))
    count = len(rows.summary.get("rounded", ()))
    if not count:
        return measured
    with door_of(given).as_given():
        lost = len(rounded_weights(given))
    remark = (
        f"{count} weights hold the values that they were rounded to, by adaround or the like, so the shares of the "
        "layers leave out what that cost"
    )
    if not lost:
        remark += "; the noise of the whole is counted from the model as it was given."
        return replace(measured, remarks=(*measured.remarks, remark))
    remark += f", and {lost} of them came so: compare with the model that you began with."
    noise = f"the noise of all but {lost} weights that came rounded"
    return replace(measured, remarks=(*measured.remarks, remark), noise=noise)


def _measured_file(
    source: OnnxSource, data: Iterable[Any] | None, float_model: OnnxSource | None, run: Run
) -> Measured:
    """Measure what a page shows of a file."""
    file = model_io.load(source)
    name = "ONNX model" if isinstance(source, ModelProto) else Path(source).name
    sim = opened_file(model_io.load(file), source)
    measured = Measured(name, sim, file, sizes(file, file_bytes(source, file)), findings=validate(file))
    if data is None or not layers_of(sim.plan):
        return measured
    if float_model is None:
        rows = _sensitivity(sim, data, run)
        alone = replace(measured, noise="the noise of their activations", sqnr_db=rows.summary["sqnr_db"])
        return replace(alone, sensitivity=rows, remarks=(_how(rows), _NO_FLOAT_WEIGHTS))
    in_float = opened_file(model_io.load(float_model), float_model)
    sqnr = _sqnr(sim, in_float, data)
    remarks = _take_float_weights(sim, in_float)
    rows = _sensitivity(sim, data, run)
    return replace(measured, sensitivity=rows, remarks=(_how(rows), *remarks), sqnr_db=sqnr)


def _sensitivity(sim: Sim, data: Iterable[Any], run: Run) -> Report:
    """Return what each layer costs: measured one at a time where that is a matter of seconds, else estimated."""
    exact = can_afford_each(data, sim.plan, len(layers_of(sim.plan)))
    return sensitivity(sim, data, exact=exact, forward=run.forward, progress=run.progress)


def _how(sensitivity: Report) -> str:
    """Return in words how the noise of the layers was found."""
    facts = sensitivity.summary
    samples = f"{facts['samples']} of {facts['samples_given']} samples"
    if facts["method"] == "measured":
        return f"The noise of each layer is measured with it alone quantized, on {samples}."
    estimated = f"The noise of the layers is {facts['method']}, on {samples}"
    return f"{estimated}; qsdk.sensitivity(exact=True) measures each layer alone."


def _sqnr(sim: Sim, in_float: OnnxSim, data: Iterable[Any]) -> float:
    """Return the SQNR of a sim's outputs against those of another model in float."""
    weights, noise, signal = OutputWeights(), 0.0, 0.0
    ours = door_of(sim).outputs(data, in_float=False)
    for left, right in zip(ours, door_of(in_float).outputs(data, in_float=True), strict=True):
        if [np.shape(y) for y in left] != [np.shape(y) for y in right]:
            raise ModelError("float_model has other outputs than the quantized model; give the one it was made from")
        weights.learn([right])
        signal += weights.power(right)
        noise += weights.power_of_changes([left], [right])
    return decibels(noise / signal) if signal > 0.0 else 0.0


def _take_float_weights(sim: OnnxSim, in_float: OnnxSim) -> tuple[str, ...]:
    """Store the weights of the float model in the sim of a file, and return a remark where some are not found."""
    quantized = set(sim.encodings)
    wanted = [d.site for d in sim.plan.decisions.values() if d.kind in ("weight", "bias") and d.site in quantized]
    held = sim.stored_floats(wanted)
    there = in_float.stored_floats([site for site in wanted if site in in_float.plan.decisions])
    found = {site: x for site, x in there.items() if site in held and held[site].shape == x.shape}
    sim.store_floats(found)
    if len(found) == len(wanted):
        return ()
    few = f"{len(found)} of {len(wanted)} weights and biases have a counterpart of the same name in the float model"
    return (f"{few}; the noise of the others is not in the shares of the layers.",)
