"""Compute parity with teacher forcing: every site of an exported model is fed the simulation's own input."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnx import ModelProto

from onnx_backend.parity.cuts import Cut, cut_model, find_cuts
from onnx_backend.parity.expected_model import ExpectedModel, compare_written
from onnx_backend.parity.float_outputs import NoisyRuns, Verdict, free_outputs, verdict
from onnx_backend.parity.stored_tensors import compare_encodings, compare_stored
from onnx_backend.parity.tally import FLOATS, Noise, Tally, float_lsb, in_units, lsb
from onnx_backend.proto.graph_queries import input_names
from onnx_backend.proto.model_io import load
from onnx_backend.qdq.islands.narrow import widened
from onnx_backend.qdq.read import qdq_pairs
from onnx_backend.runtime.feeds import as_declared, run_session
from onnx_backend.runtime.providers import CPU_ONLY, Providers
from onnx_backend.runtime.session import simulation_session
from qsdk.core.errors import DataError
from qsdk.core.numerics.dtypes import uint8
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.report import Report

Array = npt.NDArray[Any]
_STORED = ("weight", "bias", "constant", "node")  # kinds of rows that are compared without data


def check(
    model: ModelProto,
    captures: Iterable[Mapping[str, Array]],
    stored: Mapping[str, Array],
    encodings: Mapping[str, Encoding],
    reference: Iterable[Sequence[Array]] | None = None,
    expected: ExpectedModel | None = None,
    providers: Providers = CPU_ONLY,
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
        providers: to run the model on.

    Returns:
        Rows `site`, `kind`, `max_lsb` (ulp for floats; of an output that is no site, in units of the error that float
        rounding explains), `mean_lsb`, `elements` (and `note` where something is wrong); summary `weights_max_lsb`,
        `activations_max_lsb`, `sqnr_db`, `passed`: 0 LSB on stored tensors, at most 1 on activations and outputs, no
        site missing on either side, no NaN that the simulation has not, no node altered, and something compared.

    Raises:
        FileFormatError: the model cannot be read or loaded.
        DataError: no batches, or one of nothing or with NaN.
    """
    model = widened(load(model))
    found = qdq_pairs(model)
    tallies = {place.site: Tally(place.kind or ("weight" if place.stored else "activation")) for place in found}
    compare_encodings(found, encodings, tallies)
    compare_stored(model, found, stored, tallies)
    sqnr = _compare_activations(model, captures, reference, encodings, tallies, providers)
    rewritten = 0 if expected is None else compare_written(model, expected, tallies)
    return _report(tallies, sqnr, rewritten)


def _report(tallies: Mapping[str, Tally], sqnr: float | None, rewritten: int) -> Report:
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
    return Report("Parity with ONNX Runtime", [tally.row(site) for site, tally in tallies.items()], summary)


@dataclass(frozen=True)
class _TeacherForced:
    """The results of a model on one batch when it is fed with the simulation's values.

    Attributes:
        codes: at every site that the batch captured.
        computed: the encodings that the model computed.
        free: the outputs that are no sites.
        feeds: the values that it was fed with.
    """

    codes: Mapping[str, Array]
    computed: Mapping[str, Encoding]
    free: Mapping[str, Array]
    feeds: Mapping[str, Array]


class _Teacher:
    """The sessions over cut models, one per set of sites that a batch brings."""

    def __init__(self, model: ModelProto, cuts: Sequence[Cut], free: Mapping[str, str], providers: Providers) -> None:
        self.model, self.cuts, self.free, self.providers = model, cuts, free, providers
        self.inputs = input_names(model.graph)
        self.sessions: dict[frozenset[str], tuple[ort.InferenceSession, dict[str, str], NoisyRuns]] = {}

    def run(self, batch: Mapping[str, Array]) -> _TeacherForced:
        """Run the cut model on the captured values of a batch.

        Raises:
            DataError: the runtime does not run it.
        """
        cuts = [cut for cut in self.cuts if cut.site in batch]
        if not cuts and not self.free:
            return _TeacherForced({}, {}, {}, {})
        session, fed, _ = self._opened(cuts)
        feeds = {**raw_inputs(batch, self.inputs), **{name: batch[site] for site, name in fed.items()}}
        # a graph input that only cut-off nodes read may be gone
        types = {value.name: value.type for value in session.get_inputs()}
        feeds = {name: as_declared(value, types[name]) for name, value in feeds.items() if name in types}
        values = iter(run_session(session, feeds, "what the simulation gives"))
        codes = {cut.site: next(values) for cut in cuts}
        computed = {cut.site: Encoding(uint8, next(values), next(values)) for cut in cuts if cut.computed}
        return _TeacherForced(codes, computed, {name: next(values) for name in self.free}, feeds)

    def noisy(self, batch: Mapping[str, Array], forced: _TeacherForced) -> dict[str, list[Array]]:
        """Return the free outputs with noise of the size of rounding in everything between them and the sites."""
        *_, runs = self._opened([cut for cut in self.cuts if cut.site in batch])
        return runs.run(forced.feeds, forced.free)

    def _opened(self, cuts: Sequence[Cut]) -> tuple[ort.InferenceSession, dict[str, str], NoisyRuns]:
        key = frozenset(cut.site for cut in cuts)
        if key not in self.sessions:
            model, fed = cut_model(self.model, cuts, self.free)
            session = simulation_session(model, providers=self.providers)
            self.sessions[key] = session, fed, NoisyRuns(model, list(self.free), self.providers)
        return self.sessions[key]


def raw_inputs(batch: Mapping[str, Array], names: Iterable[str]) -> dict[str, Array]:
    """Return the values of the graph inputs in a captured batch.

    Raises:
        DataError: one of them is missing.
    """
    missing = [name for name in names if name not in batch]
    if missing:
        raise DataError(f"the captures lack the graph input(s) {', '.join(missing)}; put them under their own names")
    return {name: batch[name] for name in names}


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
    providers: Providers,
) -> float | None:
    """Fill the tallies, one batch in memory at a time; return the end-to-end signal-to-noise ratio in dB."""
    cuts = find_cuts(model)
    for cut in cuts:
        tallies.setdefault(cut.site, Tally(cut.kind))
    free = free_outputs(model, {cut.read for cut in cuts}) if reference is not None else {}
    teacher, noise = _Teacher(model, cuts, free, providers), Noise()
    whole = simulation_session(model, providers=providers) if reference is not None else None
    names = [value.name for value in model.graph.output]
    batches = 0
    for batch, outputs in _paired(captures, reference):
        require_values(batch, teacher.inputs, batches)
        batches += 1
        _compare_presence(batch, teacher.inputs, cuts, tallies)
        if outputs is not None and len(outputs) != len(names):
            _fail_whole(tallies, f"the model has {len(names)} outputs, the simulation {len(outputs)}")
            continue
        wanted, feeds = dict(zip(names, outputs or (), strict=False)), raw_inputs(batch, teacher.inputs)
        try:
            _compare_taught(teacher, batch, wanted, encodings, tallies)
            if whole is not None:
                got = run_session(whole, feeds, f"batch {batches - 1}")
                _compare_ends(dict(zip(names, got, strict=True)), wanted, noise, tallies)
        except DataError as error:
            _fail_whole(tallies, str(error))
    if not batches:
        raise DataError("there are no batches to compare on; give at least one (a generator can be used only once)")
    return noise.decibels() if whole is not None else None


def _fail_whole(tallies: dict[str, Tally], note: str) -> None:
    tallies.setdefault("the model", Tally("output")).fail(note)


def _compare_presence(
    batch: Mapping[str, Array], inputs: Sequence[str], cuts: Sequence[Cut], tallies: dict[str, Tally]
) -> None:
    given = set(batch) - set(inputs)
    for cut in cuts:
        if cut.site not in given:
            tallies[cut.site].fail("the simulation captured nothing here")
    stored = {site for site, tally in tallies.items() if tally.kind in _STORED}
    for site in sorted(given - stored - {cut.site for cut in cuts}):
        tallies.setdefault(site, Tally("activation")).fail("the model has no such site")


def _compare_taught(
    teacher: _Teacher,
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
            _compare(cut, forced.codes[cut.site], np.asarray(batch[cut.site]), known, tallies[cut.site])

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


def _compare_ends(
    got: Mapping[str, Array], wanted: Mapping[str, Array], noise: Noise, tallies: dict[str, Tally]
) -> None:
    """Compare the outputs of the whole model on the batch: their error, and NaN that the simulation has not."""
    for name, value in got.items():
        right = np.asarray(wanted[name])
        if value.shape != right.shape:
            note = f"the output {name!r} has the shape {value.shape}, the simulation's {right.shape}"
            tallies.setdefault(f"{name}:output", Tally("output")).fail(note)
            continue
        if np.any(_is_nan(value) & ~_is_nan(right)):
            note = "the model gives NaN where the simulation gives none"
            tallies.setdefault(f"{name}:output", Tally("output")).fail(note)
        noise.add([value], [right])


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
