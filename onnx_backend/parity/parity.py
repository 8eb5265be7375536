"""Compute parity with teacher forcing: every site of an exported model is fed the simulation's own input."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto

from onnx_backend.parity.cuts import find_cuts
from onnx_backend.parity.float_outputs import NoisyRuns, Verdict, free_outputs, unexplained, verdict
from onnx_backend.parity.teacher import RunOn, Teacher, raw_inputs
from onnx_backend.parity.written import ExpectedModel, compare_encodings, compare_stored, compare_written
from onnx_backend.passes.static_sizes import constant_sites
from onnx_backend.proto.graph_queries import producers
from onnx_backend.proto.model_io import load
from onnx_backend.qdq.narrow_regions import as_simulated
from onnx_backend.qdq.read import qdq_pairs
from qsdk.core.arrays import Array
from qsdk.core.comparing.tally import NOT_CAPTURED, OutputNoises, Tally
from qsdk.core.errors import DataError
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.report import Report

#: of one batch: the simulation's fake-quantized float32 values by site, the inputs by name; its outputs in graph order
Run = tuple[Mapping[str, Array], Sequence[Array]]
_UNEXPLAINED = (
    "each site is within a step, and this output of the whole model is further off than that explains: the runtime "
    "computes something else where it fuses more; export in its dialect, or with shapes="
)
_STORED = ("weight", "bias", "constant", "node")  # kinds of rows that are compared without data


def check(
    model: ModelProto,
    runs: Iterable[Run],
    stored: Mapping[str, Array],
    encodings: Mapping[str, Encoding],
    expected: ExpectedModel | None = None,
    on: RunOn | None = None,
    moving: Collection[str] = (),
) -> Report:
    """Compare a Q/DQ model with its simulation, site by site, each fed with the simulation's own input.

    Args:
        model: as exported.
        runs: of the simulation, one per batch. An output that is no site is compared with its outputs, fed with its
            values at the sites in front; all outputs count for the end-to-end figure.
        stored: site -> the simulation's fake-quantized weight or bias, float32, in its own layout.
        encodings: of the simulation.
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
    """
    model = as_simulated(load(model))
    pairs = qdq_pairs(model)
    # what the sim computes there, the file stores; the sites behind are compared. A file cannot excuse any other site
    computed = {pair.site for pair in pairs if pair.quantize is not None}
    constant = constant_sites(model) - computed - {pair.site for pair in pairs if pair.site in stored}
    stored = {site: value for site, value in stored.items() if site not in constant}
    pairs = [pair for pair in pairs if pair.site not in constant]
    encodings = {site: encoding for site, encoding in encodings.items() if site not in constant}
    tallies = {pair.site: Tally(pair.kind or ("weight" if pair.stored else "activation")) for pair in pairs}
    compare_encodings(pairs, encodings, tallies)
    compare_stored(model, pairs, stored, tallies)
    on = on or RunOn()
    paired, number = _PairedRun(model, encodings, tallies, on), None
    for number, (values, outputs) in enumerate(runs):
        batch = {name: value for name, value in values.items() if name not in constant}
        require_values(batch, paired.teacher.inputs, number)
        paired.compare(batch, outputs, moving)
    if number is None:
        raise DataError("there are no batches to compare on; give at least one (a generator can be used only once)")
    for name, ratio in paired.noise.ratios().items():
        paired.of_output(name).sqnr_db = ratio
    rewritten = 0 if expected is None else compare_written(model, expected, tallies)
    report = _report(tallies, paired.noise.decibels(), rewritten, paired.whole.title)
    return report if on.runtime is None else _with_first_off(report, model)


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
    makers, rows = producers(model.graph.node), {row["site"]: row for row in report.rows}
    for pair in qdq_pairs(model):
        if pair.quantize is not None and pair.site in rows and rows[pair.site]["max_lsb"] > 1:
            op = makers.get(pair.quantize.input[0])
            of = f" ({op.op_type} {op.name!r})" if op is not None else ""
            return Report(report.title, report.rows, {**report.summary, "first_off": f"{pair.site}{of}"})
    return report


def require_values(batch: Mapping[str, Array], inputs: Sequence[str], number: int) -> None:
    """Refuse a batch that has no values to compare."""
    given = {name: np.asarray(batch[name]) for name in inputs if name in batch}
    if given and not any(value.size for value in given.values()):
        shapes = ", ".join(f"{name}: {value.shape}" for name, value in given.items())
        raise DataError(f"batch {number} holds no values ({shapes}), so there is nothing to compare; leave it out")
    for name, value in given.items():
        if _is_nan(value).any():
            raise DataError(f"batch {number}: the input {name!r} holds NaN, so nothing can be compared; clean the data")


class _PairedRun:
    """A model beside the runs of its simulation: cut at the sites and fed with their values, and as a whole.

    Attributes:
        tallies: of the sites, and of the outputs that are none.
        noise: of each output of the whole model.
    """

    def __init__(
        self, model: ModelProto, encodings: Mapping[str, Encoding], tallies: dict[str, Tally], on: RunOn
    ) -> None:
        self.encodings, self.tallies, self.noise = encodings, tallies, OutputNoises()
        self.cuts, self.names = find_cuts(model), [value.name for value in model.graph.output]
        for cut in self.cuts:
            tallies.setdefault(cut.site, Tally(cut.kind))
        self.sites = {cut.read: cut.site for cut in self.cuts}
        self.teacher = Teacher(model, self.cuts, free_outputs(model, set(self.sites)), on)
        self.whole = on.open(model)
        # a runtime may fuse in the whole what it does not where a model is cut at its sites (of an ordinary session of
        # ONNX Runtime, `export` asks that itself)
        fuses = on.runtime not in (None, "onnxruntime")
        self.rounded = NoisyRuns(model, self.names, on.providers, steps=True) if fuses else None

    def of_output(self, name: str) -> Tally:
        """Return the tally of an output: of its site, or its own where it is none."""
        return self.tallies.setdefault(self.sites.get(name, f"{name}:output"), Tally("output"))

    def compare(self, batch: Mapping[str, Array], outputs: Sequence[Array], moving: Collection[str]) -> None:
        """Compare a batch: which sites it has, each of them and each other output as taught, and the whole."""
        self._compare_presence(batch, moving)
        if len(outputs) != len(self.names):
            self._fail(f"the model has {len(self.names)} outputs, the simulation {len(outputs)}")
            return
        wanted = {name: np.asarray(value) for name, value in zip(self.names, outputs, strict=True)}
        inputs = raw_inputs(batch, self.teacher.inputs)
        try:
            self._compare_taught(batch, wanted)
            self._compare_whole(inputs, wanted)
        except DataError as error:
            self._fail(str(error))

    def _fail(self, note: str) -> None:
        self.tallies.setdefault("the model", Tally("output")).fail(note)

    def _compare_presence(self, batch: Mapping[str, Array], moving: Collection[str]) -> None:
        given = set(batch) - set(self.teacher.inputs)
        for cut in self.cuts:
            if cut.site not in given and cut.site not in moving:
                self.tallies[cut.site].fail(NOT_CAPTURED)
        stored = {site for site, tally in self.tallies.items() if tally.kind in _STORED}
        for site in sorted(given - stored - {cut.site for cut in self.cuts}):
            self.tallies.setdefault(site, Tally("activation")).fail("the model has no such site")

    def _compare_taught(self, batch: Mapping[str, Array], wanted: Mapping[str, Array]) -> None:
        """Compare each site and each other output of the model, fed with the simulation's values before it."""
        forced = self.teacher.compare(batch, self.encodings, self.tallies)

        def judge(noisy: Mapping[str, Sequence[Array]]) -> dict[str, Verdict]:
            types = self.teacher.free
            return {n: verdict(got, wanted[n], noisy.get(n, ()), types[n]) for n, got in forced.free.items()}

        judged = judge({})
        if any(not one.passed for one in judged.values()):
            judged = judge(self.teacher.noisy(batch, forced))
        for name, one in judged.items():
            tally = self.of_output(name)
            tally.add(one.steps)
            if one.problem:
                tally.fail(one.problem)

    def _compare_whole(self, inputs: Mapping[str, Array], wanted: Mapping[str, Array]) -> None:
        """Compare the outputs of the whole model: their noise, their shapes, NaN, and if the sites explain the rest."""
        got = dict(zip(self.names, self.whole.run(inputs), strict=True))
        problems = {name: _problem(name, value, wanted[name]) for name, value in got.items()}
        fit = [name for name, value in got.items() if value.shape == wanted[name].shape]
        self.noise.add({name: got[name] for name in fit}, {name: wanted[name] for name in fit})
        fine = not any(problems.values()) and all(tally.largest <= 1 for tally in self.tallies.values())
        if self.rounded is not None and fine and any(np.any(value != wanted[name]) for name, value in got.items()):
            problems |= dict.fromkeys(unexplained(self.rounded, inputs, got, wanted), _UNEXPLAINED)
        for name, problem in problems.items():
            if problem:
                self.of_output(name).fail(problem)


def _problem(name: str, got: Array, wanted: Array) -> str:
    """Return what is wrong with an output that is no distance; "" for nothing."""
    if got.shape != wanted.shape:
        return f"the output {name!r} has the shape {got.shape}, the simulation's {wanted.shape}"
    if np.any(_is_nan(got) & ~_is_nan(wanted)):
        return "the model gives NaN where the simulation gives none"
    return ""


def _is_nan(values: Array) -> npt.NDArray[np.bool_]:
    return np.isnan(values.astype(np.float32)) if values.dtype.kind in "fV" else np.zeros(values.shape, np.bool_)
