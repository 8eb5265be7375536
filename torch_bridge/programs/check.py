"""Compare a program of `export(format="pt2e")` with its sim, site by site, and in ExecuTorch's kernels if asked."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from qsdk.core.arrays import Array
from qsdk.core.comparing.tally import NOT_CAPTURED, OutputNoises, Tally
from qsdk.core.errors import DataError, FileFormatError
from qsdk.core.report import Report
from torch_bridge.calibrate import stored_values
from torch_bridge.programs.write import DEQUANTIZES, SITES
from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.parameters import to_numpy
from torch_bridge.torch_values.pytree import tensors_of

#: of one batch: values by site and inputs by name, as simulated, and the outputs in order
Run = tuple[Mapping[str, Array], Sequence[Array]]
_STORED = ("weight", "bias")
_OUTPUTS_AGREE = 1e-3  # as a share of an output's largest value, where each site is fed with the sim's values


@dataclass(frozen=True)
class Loaded:
    """A program, the site of each of its dequantize ops in order, and the names of its inputs in the sim."""

    program: ExportedProgram
    sites: Sequence[str]
    inputs: Sequence[str]

    def given(self, values: Mapping[str, Array], number: int) -> list[Tensor]:
        """Return the program's inputs of a batch, in the dtypes that it takes."""
        lacking = [name for name in self.inputs if name not in values]
        if lacking:
            raise DataError(f"batch {number} lacks the input {lacking[0]}; give what the example had")
        names = set(self.program.graph_signature.user_inputs)
        places = [node.meta["val"] for node in self.program.graph.nodes if node.name in names]
        pairs = zip(self.inputs, places, strict=True)
        return [torch.from_numpy(np.array(values[name])).to(place.dtype) for name, place in pairs]


class Kernels(Protocol):
    """A program in another runtime, by codes: each site fed with the sim's values, and the whole."""

    title: str

    def codes(self, given: Sequence[Tensor], values: Mapping[str, Array]) -> tuple[dict[str, Array], list[Array]]:
        """Return the codes that each site gets, and the outputs, where sites in front have the sim's values.

        Where a site has none, nothing can be run.
        """
        ...

    def outputs(self, given: Sequence[Tensor]) -> list[Array]:
        """Return the outputs of the whole program."""
        ...


def opened(path: Path) -> Loaded:
    """Read a file that qsdk has written; a FileFormatError for another one, which names no sites."""
    extra = {SITES: ""}
    try:
        with path.open("rb") as file:
            program = torch.export.load(file, extra_files=extra)
    except OSError as error:
        raise FileFormatError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # torch raises what it likes of a file that is no program
        raise FileFormatError(f"{path} is no program of torch.export: {error}") from error
    try:
        facts = json.loads(extra[SITES])
        return Loaded(program, facts["sites"], facts["inputs"])
    except (ValueError, TypeError, KeyError) as error:
        raise FileFormatError(f"{path} names no sites of qsdk: compare a file that qsdk.export has written") from error


def check(sim: QuantSim, loaded: Loaded, runs: Iterable[Run], kernels: Kernels | None = None) -> Report:
    """Compare a program with its sim on the runs of some batches.

    Args:
        sim: that was exported.
        loaded: the program.
        runs: of the sim, one per batch.
        kernels: the program in another runtime, whose codes are compared as well.

    Returns:
        Rows `site`, `kind`, `max_lsb` and `mean_lsb` (each site fed with the sim's values), `elements`; summary
        `weights_max_lsb`, `activations_max_lsb`, `sqnr_db` of the worst output of a plain run, `passed`: 0 LSB on
        stored tensors, at most 1 elsewhere, outputs that the sites explain, and something compared. With `kernels`
        `max_lsb`, `sqnr_db` and `passed` are of that runtime, and `first_off` names the first site that is more than a
        step off.
    """
    paired, number = _Paired(sim, loaded, kernels), -1
    for number, (values, outputs) in enumerate(runs):
        paired.compare(values, outputs, number)
    if number < 0:
        raise DataError("there are no batches to compare on; give at least one (a generator can be used only once)")
    return paired.report()


class _Paired:
    """A program beside the runs of its sim."""

    def __init__(self, sim: QuantSim, loaded: Loaded, kernels: Kernels | None) -> None:
        self._sim, self._loaded, self._kernels = sim, loaded, kernels
        self._stored, self._noise, self._unexplained = stored_values(sim), OutputNoises(), ""
        self._module = loaded.program.module(check_guards=False)
        decisions = sim.plan.decisions
        unknown = [site for site in loaded.sites if site not in decisions or site not in sim.encodings]
        if unknown:
            raise FileFormatError(f"the program has the site {unknown[0]}, which the sim has not: it is of another sim")
        self._tallies = {site: Tally(decisions[site].kind) for site in dict.fromkeys(loaded.sites)}
        for site, one in decisions.items():
            known = one.kind not in _STORED and one.encoding_site in sim.encodings and not one.passes_through
            if known and site not in self._tallies:
                self._tallies[site] = Tally(one.kind)
                self._tallies[site].fail("the program does not quantize it, which the sim does")
        self._compare_grids()

    def _compare_grids(self) -> None:
        """Hold scales and zero points against the sim's: a value may be less than a step off on another grid."""
        made = [node for node in self._module.graph.nodes if node.target in DEQUANTIZES]
        for node, site in zip(made, self._loaded.sites, strict=True):
            encoding = self._sim.encodings[site]
            shift = 0 if encoding.dtype.signed else 1 << (encoding.dtype.bits - 1)
            scale, zero_point, *_ = grid_of(self._module, node)
            same = np.array_equal(np.ravel(scale).astype(np.float32), encoding.scale)
            if not same or not np.array_equal(np.ravel(zero_point), encoding.zero_point - shift):
                self._tallies[site].fail("the program's scale or zero point is not the sim's")

    def compare(self, values: Mapping[str, Array], outputs: Sequence[Array], number: int) -> None:
        """Compare all sites on a batch."""
        given = self._loaded.given(values, number)
        wanted = {**values, **{site: self._stored[site] for site in self._loaded.sites if site in self._stored}}
        with torch.no_grad():
            taught = _Taught(self._module, self._loaded.sites, wanted)
            ends = _arrays(taught.run(*(x.clone() for x in given)))
            codes: dict[str, Array] = {}
            if self._kernels is None:
                whole = _arrays(self._module(*(x.clone() for x in given)))
            else:
                (codes, ends), whole = self._kernels.codes(given, values), self._kernels.outputs(given)
        for site, found in taught.found.items():
            self._compare_site(site, found, codes.get(site), wanted.get(site))
        for at, (got, want) in enumerate(zip(ends, outputs, strict=bool(ends))):
            size = max(float(np.abs(want).max(initial=0.0)), 1e-6)
            near = got.shape == want.shape and np.allclose(got, want, _OUTPUTS_AGREE, _OUTPUTS_AGREE * size, True)
            if not near:
                self._unexplained = self._unexplained or f"output {at} is further off than the sites explain"
        names = [str(at) for at in range(len(outputs))]
        self._noise.add(dict(zip(names, whole, strict=True)), dict(zip(names, outputs, strict=True)))

    def _compare_site(self, site: str, found: Array, codes: Array | None, wanted: Array | None) -> None:
        tally, encoding = self._tallies[site], self._sim.encodings[site]
        if wanted is None:
            tally.fail(NOT_CAPTURED)
        elif wanted.shape != found.shape:
            tally.fail(f"the program gives it the shape {found.shape}, not {wanted.shape}")
        elif codes is None and self._kernels and tally.kind not in _STORED:
            tally.fail(f"{self._kernels.title} was not run: the simulation captured nothing at some site")
        elif codes is not None:  # signed ones in the program, moved by half of their size where the grid is unsigned
            shift = 0 if encoding.dtype.signed else 1 << (encoding.dtype.bits - 1)
            off = codes.astype(np.int64) + shift - encoding.quantize(wanted).astype(np.int64)
            tally.add(np.abs(off))
        else:
            tally.add_values(found, wanted, encoding, self._sim.plan.decisions[site].tensor_type)

    def report(self) -> Report:
        """Return the rows and the verdict."""
        held = [one.largest for one in self._tallies.values() if one.kind in _STORED]
        moving = {site: one for site, one in self._tallies.items() if one.kind not in _STORED}
        weights, activations = max(held, default=0.0), max((one.largest for one in moving.values()), default=0.0)
        compared = sum(one.elements for one in moving.values())
        summary: dict[str, Any] = {
            "weights_max_lsb": weights,
            "activations_max_lsb": activations,
            "sqnr_db": self._noise.decibels(),
            "passed": weights == 0 and activations <= 1 and not self._unexplained and compared > 0,
        }
        if self._unexplained or not compared:
            summary["reason"] = self._unexplained or "nothing was compared: no site has a value on this data"
        off = [site for site, one in moving.items() if one.largest > 1]
        if self._kernels and off:
            summary["first_off"] = off[0]
        title = self._kernels.title if self._kernels else f"PyTorch {torch.__version__}"
        return Report(f"Parity with {title}", [one.row(site) for site, one in self._tallies.items()], summary)


class _Taught(fx.Interpreter):
    """A run of a program in which what follows a site reads the sim's values; `found` is what the site computed."""

    def __init__(self, module: fx.GraphModule, sites: Sequence[str], wanted: Mapping[str, Array]) -> None:
        super().__init__(module)
        self._sites, self._wanted = iter(sites), wanted
        self.found: dict[str, Array] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run a node; behind a dequantize op goes the sim's value."""
        result = super().run_node(n)
        if n.target not in DEQUANTIZES:
            return result
        site = next(self._sites)
        self.found[site] = to_numpy(result)
        wanted = self._wanted.get(site)
        if wanted is None or wanted.shape != tuple(result.shape):
            return result
        return torch.from_numpy(np.array(wanted)).to(result)


def grid_of(module: nn.Module, node: fx.Node) -> tuple[Any, ...]:
    """Return the arguments of a quantize or dequantize op behind its tensor, with tensors in the place of names."""

    def value(one: Any) -> Any:
        return module.get_buffer(str(one.target)) if isinstance(one, fx.Node) else one

    return tuple(value(one) for one in node.args[1:])


def _arrays(outputs: Any) -> list[Array]:
    return [to_numpy(x) for x in tensors_of(outputs)]
