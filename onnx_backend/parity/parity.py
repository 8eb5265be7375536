"""Compute parity with teacher forcing: every site of an exported model is fed the simulation's own input."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto

from onnx_backend.parity.cuts import Cut, find_cuts
from onnx_backend.parity.expected_model import ExpectedModel, compare_written
from onnx_backend.parity.float_outputs import NoisyRuns, Verdict, free_outputs, unexplained, verdict
from onnx_backend.parity.stored_tensors import compare_encodings, compare_stored
from onnx_backend.parity.tally import FLOATS, NOT_CAPTURED, OutputNoises, Tally, float_lsb, in_units, last_place, lsb
from onnx_backend.parity.teacher import RunOn, Teacher, raw_inputs
from onnx_backend.passes.decided_sizes import constant_sites
from onnx_backend.proto.graph_queries import producers
from onnx_backend.proto.model_io import load
from onnx_backend.qdq.islands.narrow import as_simulated
from onnx_backend.qdq.read import FLOAT32, qdq_pairs
from qsdk.core.errors import DataError
from qsdk.core.numerics import affine
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.report import Report

Array = npt.NDArray[Any]
_DIGITS = 3  # of a difference in steps; less is float rounding of the values
_UNEXPLAINED = (
    "each site is within a step, and this output of the whole model is further off than that explains: the runtime "
    "computes something else where it fuses more; export in its dialect, or with shapes="
)
_TIES = "a TopK in front broke ties of equal values otherwise; the values are those of the simulation"
_STORED = ("weight", "bias", "constant", "node")  # kinds of rows that are compared without data


def check(
    model: ModelProto,
    captures: Iterable[Mapping[str, Array]],
    stored: Mapping[str, Array],
    encodings: Mapping[str, Encoding],
    reference: Iterable[Sequence[Array]] | None = None,
    expected: ExpectedModel | None = None,
    on: RunOn | None = None,
    moving: Collection[str] = (),
) -> Report:
    """Compare a Q/DQ model with its simulation, site by site, each fed with the simulation's own input.

    Args:
        model: as exported.
        captures: per batch: site -> the simulation's fake-quantized float32 values, and graph input name -> its values.
        stored: site -> the simulation's fake-quantized weight or bias, float32, in its own layout.
        encodings: of the simulation.
        reference: per batch: the simulation's outputs in graph order. An output that is no site is compared with them,
            fed with the simulation's values at the sites before it; all count for the end-to-end figure.
        expected: what the sim would write now, to compare nodes and float numbers; None to skip that.
        on: what to run the model on; None for ONNX Runtime on the CPU.
        moving: sites that a batch may lack, because what is there only moves values, and a step with a cache may not.

    Returns:
        Rows `site`, `kind`, `max_lsb` (ulp for floats; of an output that is no site, in units of the error that float
        rounding explains), `mean_lsb`, `elements` (`sqnr_db` of a float output from end to end, and `note` where
        something is wrong); summary `weights_max_lsb`, `activations_max_lsb`, `sqnr_db` (of the worst float output),
        `passed`: 0 LSB on stored tensors, at most 1 on activations and outputs, no site missing on either side, no NaN
        that the simulation has not, no output of another runtime further off than its sites explain, no node altered,
        and something compared.

    Raises:
        FileFormatError: the model cannot be read or loaded.
        DataError: no batches, or one of nothing or with NaN.
    """
    model = as_simulated(load(model))
    places = qdq_pairs(model)
    # what the sim computes there, the file stores; the sites behind are compared. A file cannot excuse any other site
    computed = {place.site for place in places if place.quantize is not None}
    constant = constant_sites(model) - computed - {place.site for place in places if place.site in stored}
    stored = {site: value for site, value in stored.items() if site not in constant}
    found = [place for place in places if place.site not in constant]
    encodings = {site: encoding for site, encoding in encodings.items() if site not in constant}
    given = ({name: value for name, value in batch.items() if name not in constant} for batch in captures)
    tallies = {place.site: Tally(place.kind or ("weight" if place.stored else "activation")) for place in found}
    compare_encodings(found, encodings, tallies)
    compare_stored(model, found, stored, tallies)
    place = on or RunOn()
    sqnr, title = _compare_activations(model, given, reference, encodings, tallies, place, moving)
    rewritten = 0 if expected is None else compare_written(model, expected, tallies)
    report = _report(tallies, sqnr, rewritten, title)
    return report if place.runtime is None else _with_first_off(report, model)


def _report(tallies: Mapping[str, Tally], sqnr: float | None, rewritten: int, title: str) -> Report:
    stored = [t.largest for t in tallies.values() if t.kind in _STORED]
    activations = [t.largest for t in tallies.values() if t.kind not in _STORED]
    compared = sum(t.elements for t in tallies.values() if t.kind not in _STORED)
    weights_max, activations_max = max(stored, default=0.0), max(activations, default=0.0)
    summary: dict[str, Any] = {
        "weights_max_lsb": weights_max,
        "activations_max_lsb": activations_max,
        "sqnr_db": sqnr,
        "passed": weights_max == 0 and activations_max <= 1 and compared > 0,
    }
    if not compared:
        summary["reason"] = "nothing was compared: no site and no output has a value on this data"
    if rewritten:
        summary["nodes written in another way"] = rewritten
    return Report(f"Parity with {title}", [tally.row(site) for site, tally in tallies.items()], summary)


def _with_first_off(report: Report, model: ModelProto) -> Report:
    """Name the first site in graph order that is more than a step off, and the op behind it."""
    makers = producers(model.graph.node)
    for place in qdq_pairs(model):
        row = next((row for row in report.rows if row["site"] == place.site), None)
        if place.quantize is None or row is None or row["max_lsb"] <= 1:
            continue
        op = makers.get(place.quantize.input[0])
        of = f" ({op.op_type} {op.name!r})" if op is not None else ""
        return Report(report.title, report.rows, {**report.summary, "first_off": f"{place.site}{of}"})
    return report


def require_values(batch: Mapping[str, Array], inputs: Sequence[str], number: int) -> None:
    """Refuse a batch that has no values to compare.

    Raises:
        DataError: it holds no value at all, or NaN.
    """
    given = {name: np.asarray(batch[name]) for name in inputs if name in batch}
    if given and not any(value.size for value in given.values()):
        shapes = ", ".join(f"{name}: {value.shape}" for name, value in given.items())
        raise DataError(f"batch {number} holds no values ({shapes}), so there is nothing to compare; leave it out")
    for name, value in given.items():
        if value.dtype.kind in "fV" and np.isnan(value.astype(np.float32)).any():
            raise DataError(f"batch {number}: the input {name!r} holds NaN, so nothing can be compared; clean the data")


def _compare_activations(
    model: ModelProto,
    captures: Iterable[Mapping[str, Array]],
    reference: Iterable[Sequence[Array]] | None,
    encodings: Mapping[str, Encoding],
    tallies: dict[str, Tally],
    on: RunOn,
    moving: Collection[str],
) -> tuple[float | None, str]:
    """Fill the tallies, one batch in memory at a time; return the ratio from end to end in dB, and the runtime."""
    cuts = find_cuts(model)
    for cut in cuts:
        tallies.setdefault(cut.site, Tally(cut.kind))
    free = free_outputs(model, {cut.read for cut in cuts}) if reference is not None else {}
    teacher = Teacher(model, cuts, free, on)
    whole = _WholeRuns(model, cuts, on) if reference is not None or on.runtime else None
    names = [value.name for value in model.graph.output]
    batches = 0
    for batch, outputs in _paired(captures, reference):
        require_values(batch, teacher.inputs, batches)
        batches += 1
        _compare_presence(batch, teacher.inputs, cuts, moving, tallies)
        if outputs is not None and len(outputs) != len(names):
            _fail_whole(tallies, f"the model has {len(names)} outputs, the simulation {len(outputs)}")
            continue
        wanted, feeds = dict(zip(names, outputs or (), strict=False)), raw_inputs(batch, teacher.inputs)
        try:
            _compare_taught(teacher, batch, wanted, encodings, tallies)
            if reference is not None and whole is not None:
                whole.compare(feeds, wanted, tallies)
        except DataError as error:
            _fail_whole(tallies, str(error))
    if not batches:
        raise DataError("there are no batches to compare on; give at least one (a generator can be used only once)")
    if whole is None:
        return None, "ONNX Runtime"
    for name, noise in whole.noise.by_name.items():
        tallies.setdefault(whole.site_of(name), Tally("output")).sqnr_db = noise.decibels()
    return whole.noise.decibels(), whole.title


def _fail_whole(tallies: dict[str, Tally], note: str) -> None:
    tallies.setdefault("the model", Tally("output")).fail(note)


def _compare_presence(
    batch: Mapping[str, Array],
    inputs: Sequence[str],
    cuts: Sequence[Cut],
    moving: Collection[str],
    tallies: dict[str, Tally],
) -> None:
    given = set(batch) - set(inputs)
    for cut in cuts:
        if cut.site not in given and cut.site not in moving:
            tallies[cut.site].fail(NOT_CAPTURED)
    stored = {site for site, tally in tallies.items() if tally.kind in _STORED}
    for site in sorted(given - stored - {cut.site for cut in cuts}):
        tallies.setdefault(site, Tally("activation")).fail("the model has no such site")


def _compare_taught(
    teacher: Teacher,
    batch: Mapping[str, Array],
    wanted: Mapping[str, Array],
    encodings: Mapping[str, Encoding],
    tallies: dict[str, Tally],
) -> None:
    """Compare each site and each other output of the model, fed with the simulation's values before it."""
    forced = teacher.run(batch)
    for cut in teacher.cuts:
        if cut.site in forced.codes:
            known = forced.computed if cut.computed else encodings
            compare = _compare if teacher.on.runtime is None else compare_values
            got, captured, tally = forced.codes[cut.site], np.asarray(batch[cut.site]), tallies[cut.site]
            if any(_has_ties(np.asarray(batch[site])) for site in teacher.chosen.get(cut.site, ()) if site in batch):
                got, captured = _in_any_order(partial(compare, cut), got, captured, known, tally)
            compare(cut, got, captured, known, tally)

    def judge(noisy: Mapping[str, Sequence[Array]]) -> dict[str, Verdict]:
        return {
            name: verdict(value, np.asarray(wanted[name]), noisy.get(name, ()), teacher.free[name])
            for name, value in forced.free.items()
        }

    found = judge({})
    if any(not judged.passed for judged in found.values()):
        found = judge(teacher.noisy(batch, forced))
    for name, judged in found.items():
        tally = tallies.setdefault(f"{name}:output", Tally("output"))
        tally.add(judged.steps)
        if judged.problem:
            tally.fail(judged.problem)


def _has_ties(values: Array) -> bool:
    """Return True if a value stands twice in a row."""
    ordered = np.sort(values, axis=-1)
    return bool(np.any(ordered[..., 1:] == ordered[..., :-1]))


def _in_any_order(
    compare: Callable[[Array, Array, Mapping[str, Encoding], Tally], None],
    got: Array,
    captured: Array,
    encodings: Mapping[str, Encoding],
    tally: Tally,
) -> tuple[Array, Array]:
    """Return both sides' values as they are, or in order along an axis where they then agree: ties broken otherwise."""
    for axis in (None, *range(-1, -captured.ndim - 1, -1)) if got.shape == captured.shape else ():
        both = (got, captured) if axis is None else (np.sort(got, axis=axis), np.sort(captured, axis=axis))
        trial = Tally(tally.kind)
        compare(*both, encodings, trial)
        if trial.largest <= 1:
            tally.remark = tally.remark if axis is None else _TIES
            return both
    return got, captured


class _WholeRuns:
    """The whole model in its runtime, beside the outputs of the simulation.

    Attributes:
        title: of the runtime.
        noise: of each float output.
    """

    def __init__(self, model: ModelProto, cuts: Sequence[Cut], on: RunOn) -> None:
        self.names = [value.name for value in model.graph.output]
        self.runner, self.noise = on.open(model), OutputNoises()
        self.title = self.runner.title
        # a runtime may fuse in the whole what it does not where a model is cut at its sites (of an ordinary session of
        # ONNX Runtime, `export` asks that itself)
        self.rounded = (
            None if on.runtime in (None, "onnxruntime") else NoisyRuns(model, self.names, on.providers, steps=True)
        )
        self._sites = {cut.read: cut.site for cut in cuts}

    def compare(self, feeds: Mapping[str, Array], wanted: Mapping[str, Array], tallies: dict[str, Tally]) -> None:
        """Compare the outputs on a batch: their noise, their shapes, NaN, and whether the sites explain the rest."""
        got = dict(zip(self.names, self.runner.run(feeds), strict=True))
        problems = {name: _problem(name, value, np.asarray(wanted[name])) for name, value in got.items()}
        fit = [name for name, value in got.items() if value.shape == np.shape(wanted[name])]
        self.noise.add(*({name: np.asarray(values[name]) for name in fit} for values in (got, wanted)))
        fine = not any(problems.values()) and all(tally.largest <= 1 for tally in tallies.values())
        if self.rounded is not None and fine and any(np.any(value != wanted[name]) for name, value in got.items()):
            problems |= dict.fromkeys(unexplained(self.rounded, feeds, got, wanted), _UNEXPLAINED)
        for name, problem in problems.items():
            tally = tallies.setdefault(self.site_of(name), Tally("output")) if problem else None
            if tally is not None:
                tally.fail(problem)

    def site_of(self, output: str) -> str:
        """Return the site of an output, or what its row is called where it is none."""
        return self._sites.get(output, f"{output}:output")


def _problem(name: str, got: Array, wanted: Array) -> str:
    """Return what is wrong with an output that is no distance; "" for nothing."""
    if got.shape != wanted.shape:
        return f"the output {name!r} has the shape {got.shape}, the simulation's {wanted.shape}"
    if np.any(_is_nan(got) & ~_is_nan(wanted)):
        return "the model gives NaN where the simulation gives none"
    return ""


def _is_nan(values: Array) -> npt.NDArray[np.bool_]:
    return np.isnan(values.astype(np.float32)) if values.dtype.kind in "fV" else np.zeros(values.shape, np.bool_)


def _paired(
    captures: Iterable[Mapping[str, Array]], reference: Iterable[Sequence[Array]] | None
) -> Iterator[tuple[Mapping[str, Array], Sequence[Array] | None]]:
    if reference is None:
        yield from ((batch, None) for batch in captures)
        return
    outputs = iter(reference)
    for batch in captures:
        expected = next(outputs, None)
        if expected is None:
            raise DataError("the reference outputs end before the captures; give one per batch")
        yield batch, expected


def _compare(cut: Cut, got: Array, captured: Array, encodings: Mapping[str, Encoding], tally: Tally) -> None:
    if got.shape != captured.shape:
        tally.fail(f"the model gives the shape {got.shape}, the simulation {captured.shape}")
    elif np.isnan(captured.astype(np.float32)).any() and cut.dtype not in FLOATS:
        tally.fail("the simulation gives NaN here, which no code stands for")
    elif cut.dtype in FLOATS:
        with np.errstate(over="ignore"):
            tally.add(float_lsb(got.astype(FLOATS[cut.dtype]), captured.astype(FLOATS[cut.dtype])))
    elif cut.site in encodings:
        wanted = encodings[cut.site].quantize(captured)
        steps = lsb(got.astype(wanted.dtype), wanted)
        tally.add(in_units(steps, captured, encodings[cut.site], cut.tensor_type))


def compare_values(cut: Cut, got: Array, captured: Array, encodings: Mapping[str, Encoding], tally: Tally) -> None:
    """Compare what the readers of a site read, in steps of its scale; a removed rounding is a part of a step."""
    if got.shape != captured.shape:
        tally.fail(f"the model gives the shape {got.shape}, the simulation {captured.shape}")
    elif cut.site in encodings:
        known = encodings[cut.site]
        step = affine.align(known.scale, captured.shape, known.axis, known.block_size)
        steps = np.abs(got.astype(np.float64) - captured.astype(np.float64)) / step
        # either side rounds what it dequantizes to its float type
        whole, larger = np.rint(steps), np.fmax(np.abs(got), np.abs(captured))
        rounded_in = cut.tensor_type if cut.tensor_type in FLOATS else FLOAT32
        with np.errstate(invalid="ignore"):
            steps = np.where(np.abs(steps - whole) * step <= last_place(larger, rounded_in), whole, steps)
        exact = np.round(np.where(np.isnan(steps), np.inf, steps), _DIGITS)
        tally.add(in_units(exact, captured, known, cut.tensor_type))
