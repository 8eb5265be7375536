"""Compare a `.tflite` file with its sim, site by site, and LiteRT's reference kernels with their prediction."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from onnx_backend.litert import reference
from onnx_backend.litert.program import EXTRA, Grid, Program, from_bytes, to_bytes
from onnx_backend.runtimes.runner import installed_package
from qsdk.core.arrays import Array
from qsdk.core.comparing.tally import NOT_CAPTURED, OutputNoises, Tally
from qsdk.core.errors import DataError, FileFormatError, ModelError
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.report import Report

Run = tuple[Mapping[str, Array], Sequence[Array]]
_SHIFTS = {"uint8": 128, "uint4": 8, "uint16": 1 << 15}


def opened(path: Path) -> Program:
    """Read a file that qsdk has written; a FileFormatError for another one, which names no sites."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FileFormatError(f"cannot read {path}: {error.strerror}") from error
    program = from_bytes(data, str(path))
    if "sites" not in program.facts:
        raise FileFormatError(f"{path} names no sites of qsdk: compare a file that qsdk.export has written")
    return program


def input_sites(program: Program) -> list[str]:
    """Return the site of each input, in order."""
    by_tensor = {facts["tensor"]: site for site, facts in reversed(program.facts["sites"].items())}
    return [by_tensor[number] for number in program.inputs]


def check(
    program: Program, runs: Iterable[Run], stored: Mapping[str, Array], encodings: Mapping[str, Encoding]
) -> Report:
    """Compare a program with its sim on the runs of some batches.

    Args:
        program: of an exported file.
        runs: of the simulation, one per batch: values by site, inputs by name; its outputs in order.
        stored: site -> the simulation's fake-quantized weight or bias, float32, in its own layout.
        encodings: of the simulation.

    Returns:
        Rows `site`, `kind`, `max_lsb` and `mean_lsb` (reference kernels, each site fed with the simulation's values),
        `elements`, `xnnpack_max_lsb`; summary `weights_max_lsb`, `activations_max_lsb`, `xnnpack_max_lsb`,
        `differing_from_prediction` (codes of all tensors of a whole run of the reference kernels, of `predicted`),
        `sqnr_db` of the worst output, `passed`: 0 LSB on stored tensors, at most 1 elsewhere, no code that was
        predicted otherwise, and something compared.
    """
    sites: dict[str, dict[str, Any]] = program.facts["sites"]
    tallies = {site: Tally(facts["kind"]) for site, facts in sites.items()}
    paired, number = _Paired(program, tallies), -1
    _compare_stored(program, stored, tallies)
    _compare_grids(program, encodings, tallies)
    for site in encodings.keys() - tallies.keys():
        tallies[site] = Tally("constant" if site in stored else "activation")
        if site in stored:  # such as the slope of a LEAKY_RELU: what reads it is compared
            tallies[site].remark = "no tensor of the file: an option of what reads it"
        else:
            tallies[site].fail("no tensor of the file is on its grid")
    for number, run in enumerate(runs):
        paired.compare(run, number)
    if number < 0:
        raise DataError("there are no batches to compare on; give at least one (a generator can be used only once)")
    return paired.report()


def _compare_stored(program: Program, stored: Mapping[str, Array], tallies: Mapping[str, Tally]) -> None:
    for site, facts in program.facts["sites"].items():
        if facts["kind"] not in ("weight", "bias", "constant"):
            continue
        if site not in stored:
            tallies[site].fail("the simulation stores nothing here")
            continue
        tensor, values = program.tensors[facts["tensor"]], np.asarray(stored[site], np.float64)
        if facts.get("own_perm"):
            values = values.transpose(facts["own_perm"])
        try:
            held = values.reshape(facts["shape"]).transpose(facts["perm"]).reshape(tensor.shape)
        except ValueError:
            tallies[site].fail(f"the file's shape is {facts['shape']}, the simulation's {list(values.shape)}")
            continue
        assert tensor.grid is not None
        assert tensor.value is not None
        steps = held / _along(tensor.grid, tensor.shape)
        # the float32 of a large bias is not exactly a multiple of its scale
        off = np.abs(steps - (tensor.value.astype(np.int64) - tensor.grid.zero))
        tallies[site].add(np.rint(off) if facts["kind"] == "bias" else np.round(off, 3))


def _along(grid: Grid, shape: Sequence[int]) -> Array:
    """Return the scales of a stored tensor in a shape that goes with its own."""
    sizes = [1] * len(shape)
    if grid.scale.size > 1:
        sizes[grid.axis] = grid.scale.size
    return np.asarray(grid.scale.astype(np.float64).reshape(sizes))


def _compare_grids(program: Program, encodings: Mapping[str, Encoding], tallies: Mapping[str, Tally]) -> None:
    """Hold the scales and zero points of activations against the simulation's: both are the sim's own."""
    for site, facts in program.facts["sites"].items():
        grid, encoding = program.tensors[facts["tensor"]].grid, encodings.get(site)
        if encoding is None or facts["kind"] in ("weight", "bias", "constant"):
            continue
        zero = encoding.zero_point - _SHIFTS.get(encoding.dtype.container, 0)
        if grid is None or not (np.array_equal(grid.scale, encoding.scale) and np.array_equal(grid.zero_point, zero)):
            tallies[site].fail("the file's scale or zero point is not the simulation's")


class _Paired:
    """A program beside the runs of its simulation."""

    def __init__(self, program: Program, tallies: dict[str, Tally]) -> None:
        self.program, self.tallies, self.noise = program, tallies, OutputNoises()
        facts = program.facts["sites"]
        self.sites = {site: facts[site] for site in facts if facts[site]["kind"] not in ("weight", "bias", "constant")}
        self.cut, self.fed = cut(program, [one["tensor"] for one in self.sites.values()])
        self.taught = LiteRt(self.cut, reference=True)
        self.fast = LiteRt(self.cut, reference=False)
        self.whole = LiteRt(program, reference=True)
        self.in_xnnpack: dict[str, int] = {}
        self.differing = self.predicted = 0

    def compare(self, run: Run, number: int) -> None:
        """Compare all sites on a batch of the size that the file has."""
        values, wanted = run
        self._require_sizes(values, number)
        feeds = [self._codes(site, values[site]) for site in input_sites(self.program)]
        self._compare_sites(values, number)
        made = [number for op in self.program.ops for number in op.outputs]
        got, predicted = self.whole.run(feeds, made), reference.run(self.program, feeds)
        self.differing += sum(int(np.sum(got[one].astype(np.int64) != predicted[one])) for one in made)
        self.predicted += sum(got[one].size for one in made)
        names = list(self.program.facts["outputs"])
        found = [self._output(got | dict(zip(self.program.inputs, feeds, strict=True)), n) for n in names]
        self.noise.add(dict(zip(names, found, strict=True)), dict(zip(names, wanted, strict=True)))

    def _compare_sites(self, part: Mapping[str, Array], number: int) -> None:
        numbers = {
            self.fed[facts["tensor"]]: site
            for site, facts in reversed(self.sites.items())
            if facts["tensor"] in self.fed
        }
        lacking = [site for site in numbers.values() if site not in part]
        if lacking:
            raise DataError(f"batch {number} has no value at {lacking[0]}, so nothing behind it can be compared")
        feeds = [self._codes(numbers[one], part[numbers[one]]) for one in self.cut.inputs]
        got, fast = self.taught.run(feeds, self.cut.outputs), self.fast.run(feeds, self.cut.outputs)
        for site, facts in self.sites.items():
            tensor = facts["tensor"]
            if site not in part:
                self.tallies[site].fail(NOT_CAPTURED)
            elif self.program.tensors[tensor].value is not None:  # what follows from stored tensors alone
                stored = self.program.tensors[tensor].value
                self.tallies[site].add(np.abs(stored - self._codes(site, part[site])))
            elif tensor in got:
                wanted = self._codes(site, part[site])
                self.tallies[site].add(np.abs(got[tensor].astype(np.int64) - wanted))
                off = int(np.abs(fast[tensor].astype(np.int64) - wanted).max(initial=0))
                self.in_xnnpack[site] = max(self.in_xnnpack.get(site, 0), off)

    def _codes(self, site: str, values: Array) -> Array:
        facts = self.sites[site]
        held = values.reshape(facts["shape"]).transpose(facts["perm"])
        tensor = facts["tensor"]
        return quantized(self.program, tensor, held).reshape(self.program.tensors[tensor].shape)

    def _output(self, codes: Mapping[int, Array], name: str) -> Array:
        facts = self.program.facts["outputs"][name]
        grid = self.program.tensors[facts["tensor"]].grid
        assert grid is not None
        values = (codes[facts["tensor"]].astype(np.float32) - grid.zero) * grid.scale[0]
        return np.asarray(values.transpose(np.argsort(facts["perm"])))

    def _require_sizes(self, values: Mapping[str, Array], number: int) -> None:
        """Raise an error for a batch of other sizes than the file has."""
        for site, facts in self.sites.items():
            shape, wanted = values[site].shape if site in values else (), tuple(facts["shape"])
            if site not in values or values[site].size == int(np.prod(wanted)):
                continue
            if shape[1:] == wanted[1:]:
                raise DataError(
                    f"batch {number} has {shape[0]} samples and the file takes {wanted[0]} at a time; give whole "
                    "multiples, or export with shapes="
                )
            raise DataError(
                f"batch {number}: {site} has the shape {shape} and the file {wanted}; "
                "give batches of the sizes that the file was written for, or export with shapes="
            )

    def report(self) -> Report:
        """Return the rows and the verdict."""
        held = [one.largest for one in self.tallies.values() if one.kind in ("weight", "bias", "constant")]
        moving = [one for one in self.tallies.values() if one.kind not in ("weight", "bias", "constant")]
        weights, activations = max(held, default=0.0), max((one.largest for one in moving), default=0.0)
        xnnpack, worst = max(self.in_xnnpack.values(), default=0), self.noise.worst()
        compared = sum(one.elements for one in moving)
        rows = [
            {**tally.row(site), **({"xnnpack_max_lsb": self.in_xnnpack[site]} if site in self.in_xnnpack else {})}
            for site, tally in self.tallies.items()
        ]
        version = installed_package("importlib.metadata", "litert").version("ai-edge-litert")
        summary = {
            "weights_max_lsb": weights,
            "activations_max_lsb": activations,
            "xnnpack_max_lsb": xnnpack,
            "predicted": self.predicted,
            "differing_from_prediction": self.differing,
            "sqnr_db": None if worst is None else worst[1],
            "passed": weights == 0 and activations <= 1 and xnnpack <= 1 and not self.differing and compared > 0,
        }
        return Report(f"Parity with LiteRT {version}", rows, summary)


# --- LiteRT's interpreter: a program run by its reference kernels or by those of an application, and cut at its sites


class LiteRt:
    """A program in the installed interpreter; `reference` for its reference kernels, else XNNPACK's on one thread."""

    def __init__(self, program: Program, *, reference: bool) -> None:
        package = installed_package("ai_edge_litert.interpreter", EXTRA)
        kinds = package.OpResolverType
        self.program = program
        try:
            self._interpreter = package.Interpreter(
                model_content=to_bytes(program),
                num_threads=1,
                experimental_op_resolver_type=kinds.BUILTIN_REF if reference else kinds.AUTO,
                experimental_preserve_all_tensors=reference,
            )
            self._interpreter.allocate_tensors()
        except (ValueError, RuntimeError) as error:
            raise ModelError(f"LiteRT cannot open the file: {error}") from error

    def run(self, feeds: Sequence[Array], wanted: Sequence[int]) -> dict[int, Array]:
        """Return the codes of these tensors when the inputs have those; without `reference`, outputs alone."""
        for number, feed in zip(self.program.inputs, feeds, strict=True):
            tensor = self.program.tensors[number]
            self._interpreter.set_tensor(number, feed.astype(tensor.dtype).reshape(tensor.shape))
        try:
            self._interpreter.invoke()
        except (ValueError, RuntimeError) as error:
            raise ModelError(f"LiteRT cannot run the file: {error}") from error
        return {number: self._interpreter.get_tensor(number) for number in wanted}


def cut(program: Program, sites: Sequence[int]) -> tuple[Program, Mapping[int, int]]:
    """Return a program whose ops read an input of its own in place of each of these tensors, which leave the model.

    What is returned besides has the number of the input by that of the tensor.
    """
    found = Program(list(program.tensors), [], list(program.inputs), [], program.facts)
    read = {number for op in program.ops for number in op.inputs}
    fed = {number: number for number in program.inputs}
    for number in sites:
        if number in read and number not in fed:
            tensor = program.tensors[number]
            fed[number] = found.add(replace(tensor, name=f"{tensor.name}/fed"))
            found.inputs.append(fed[number])
    found.ops = [replace(op, inputs=tuple(fed.get(number, number) for number in op.inputs)) for op in program.ops]
    made = {number for op in program.ops for number in op.outputs}
    found.outputs = [number for number in dict.fromkeys(sites) if number in made]
    return found, fed


def quantized(program: Program, number: int, values: Array) -> Array:
    """Return values as the codes of a tensor, in int64; an input of whole numbers is them itself."""
    grid = program.tensors[number].grid
    if grid is None:
        return np.asarray(values, np.int64)
    low, high = grid.bounds
    codes = np.rint(values.astype(np.float32) / grid.scale[0]).astype(np.float64) + grid.zero
    return np.asarray(np.nan_to_num(np.clip(codes, low, high), nan=low), np.int64)
