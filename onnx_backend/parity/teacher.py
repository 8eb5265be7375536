"""Run a model with teacher forcing: every site is fed with the simulation's own values, and its codes are tallied."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnxruntime as ort
from onnx import ModelProto

from onnx_backend.parity.cuts import Cut, Way, chosen_behind, cut_model
from onnx_backend.parity.float_outputs import NoisyRuns
from onnx_backend.proto.graph_queries import input_names, producers
from onnx_backend.runtime.feeds import as_declared, run_session
from onnx_backend.runtime.providers import CPU_ONLY, Providers
from onnx_backend.runtime.session import simulation_session
from onnx_backend.runtime.user_session import UserSession
from onnx_backend.runtimes.registry import open_in
from onnx_backend.runtimes.runner import Runner
from qsdk.core.arrays import Array
from qsdk.core.comparing.tally import FLOATS, Tally, float_lsb
from qsdk.core.errors import DataError
from qsdk.core.numerics.dtypes import int8, uint8
from qsdk.core.numerics.encoding import Encoding

_TIES = "a TopK in front broke ties of equal values otherwise; the values are those of the simulation"


class SessionRunner:
    """A model in a session of ONNX Runtime."""

    def __init__(self, session: ort.InferenceSession | UserSession, where: str) -> None:
        self.title, self.session, self.where = "ONNX Runtime", session, where
        # a graph input that only cut-off nodes read may be gone
        self.types = {value.name: value.type for value in session.get_inputs()}

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Run the model; see `Runner.run`."""
        known = {name: as_declared(value, self.types[name]) for name, value in feeds.items() if name in self.types}
        return run_session(self.session, known, self.where)


@dataclass(frozen=True)
class RunOn:
    """What a model runs on when it is compared with its simulation.

    Attributes:
        providers: of ONNX Runtime, which then runs the model as the simulation does, Q/DQ as written.
        runtime: name of a runtime that runs it as an application would, with its own fusions; None for ONNX Runtime
            with these providers.
        opener: opens a session with fusions of its own, in place of both.
    """

    providers: Providers = CPU_ONLY
    runtime: str | None = None
    opener: Callable[[ModelProto], Runner] | None = None

    @property
    def way(self) -> Way:
        """Return how sites are cut: what fuses the pairs of the whole file gets the pair of each site at its inputs."""
        return "codes" if self.opener else "values" if self.runtime else "reads"

    def open(self, model: ModelProto, *, whole: bool = True) -> Runner:
        """Open a model, as an application does, or a part of one."""
        if self.opener is not None:
            return self.opener(model)
        if self.runtime is not None:
            return open_in(self.runtime, model, whole=whole)
        return SessionRunner(simulation_session(model, providers=self.providers), "what the simulation gives")

    def comparable(self, model: ModelProto, cuts: Sequence[Cut]) -> list[Cut]:
        """Return the sites whose codes can be compared there: where pairs may fuse, those that QuantizeLinear makes."""
        makers = producers(model.graph.node)
        return [cut for cut in cuts if self.way == "reads" or makers[cut.compared].op_type == "QuantizeLinear"]


@dataclass(frozen=True)
class TeacherForced:
    """The results of a model on one batch when it is fed with the simulation's values.

    Attributes:
        codes: at every site that the batch captured; of another runtime, the values that readers of the site read.
        computed: the encodings that the model computed.
        free: the outputs that are no sites.
        feeds: the values that it was fed with.
    """

    codes: Mapping[str, Array]
    computed: Mapping[str, Encoding]
    free: Mapping[str, Array]
    feeds: Mapping[str, Array]


class Teacher:
    """The cut models in their runtime, one per set of sites in a batch; `free` are the outputs that are no sites."""

    def __init__(self, model: ModelProto, cuts: Sequence[Cut], free: Mapping[str, str], on: RunOn) -> None:
        self.model, self.cuts, self.free, self.on = model, on.comparable(model, cuts), free, on
        self.inputs, self.chosen = input_names(model.graph), chosen_behind(model, cuts)
        self.opened: dict[frozenset[str], tuple[Runner, dict[str, str], NoisyRuns]] = {}

    def run(self, batch: Mapping[str, Array]) -> TeacherForced:
        """Run the cut model on the captured values of a batch."""
        cuts = [cut for cut in self.cuts if cut.site in batch]
        if not cuts and not self.free:
            return TeacherForced({}, {}, {}, {})
        runner, fed, _ = self._opened(cuts)
        feeds = {**raw_inputs(batch, self.inputs), **{name: batch[site] for site, name in fed.items()}}
        values = iter(runner.run(feeds))
        codes = {cut.site: next(values) for cut in cuts}
        computed = {cut.site: _computed(cut, codes[cut.site], values) for cut in cuts if cut.computed}
        return TeacherForced(codes, computed, {name: next(values) for name in self.free}, feeds)

    def compare(
        self, batch: Mapping[str, Array], encodings: Mapping[str, Encoding], tallies: Mapping[str, Tally]
    ) -> TeacherForced:
        """Run the cut model on a batch, and add the differences at every site that the batch captured."""
        forced = self.run(batch)
        for cut in self.cuts:
            if cut.site in forced.codes:
                known = forced.computed if cut.computed else encodings
                add = partial(_add, cut, known.get(cut.site), self.on.way)
                got, simulated, tally = forced.codes[cut.site], np.asarray(batch[cut.site]), tallies[cut.site]
                if any(_has_ties(np.asarray(batch[site])) for site in self.chosen.get(cut.site, ()) if site in batch):
                    got, simulated = _in_any_order(add, got, simulated, tally)
                add(got, simulated, tally)
        return forced

    def noisy(self, batch: Mapping[str, Array], forced: TeacherForced) -> dict[str, list[Array]]:
        """Return the free outputs with noise of the size of rounding in everything between them and the sites."""
        *_, runs = self._opened([cut for cut in self.cuts if cut.site in batch])
        return runs.run(forced.feeds, forced.free)

    def _opened(self, cuts: Sequence[Cut]) -> tuple[Runner, dict[str, str], NoisyRuns]:
        key = frozenset(cut.site for cut in cuts)
        if key not in self.opened:
            model, fed = cut_model(self.model, cuts, self.free, self.on.way)
            noise = NoisyRuns(model, list(self.free), self.on.providers)
            self.opened[key] = self.on.open(model, whole=False), fed, noise
        return self.opened[key]


def _computed(cut: Cut, codes: Array, values: Iterator[Array]) -> Encoding:
    """Return the encoding that a model has computed at a site: one for the tensor, or a scale for each row."""
    scale, *zero_point = (next(values) for _ in cut.computed)
    if zero_point:
        return Encoding(uint8, scale, zero_point[0])
    return Encoding(int8, scale, np.zeros(scale.shape, np.int32), axis=codes.ndim - 1, block_size=codes.shape[-1])


def raw_inputs(batch: Mapping[str, Array], names: Iterable[str]) -> dict[str, Array]:
    """Return the values of the graph inputs in a captured batch."""
    missing = [name for name in names if name not in batch]
    if missing:
        raise DataError(f"the captures lack the graph input(s) {', '.join(missing)}; put them under their own names")
    return {name: batch[name] for name in names}


def _add(cut: Cut, encoding: Encoding | None, way: Way, got: Array, simulated: Array, tally: Tally) -> None:
    """Add what a model gives at a site beside the simulation's values there."""
    if got.shape != simulated.shape:
        tally.fail(f"the model gives the shape {got.shape}, the simulation {simulated.shape}")
    elif way == "values" and encoding is not None:
        tally.add_values(got, simulated, encoding, cut.tensor_type)
    elif way != "values" and cut.dtype in FLOATS:
        with np.errstate(over="ignore"):
            tally.add(float_lsb(got.astype(FLOATS[cut.dtype]), simulated.astype(FLOATS[cut.dtype])))
    elif way != "values" and np.isnan(simulated.astype(np.float32)).any():
        tally.fail("the simulation gives NaN here, which no code stands for")
    elif encoding is not None:
        tally.add_codes(got, simulated, encoding, cut.tensor_type)


def _has_ties(values: Array) -> bool:
    """Return True if a value stands twice in a row."""
    ordered = np.sort(values, axis=-1)
    return bool(np.any(ordered[..., 1:] == ordered[..., :-1]))


def _in_any_order(
    add: Callable[[Array, Array, Tally], None], got: Array, simulated: Array, tally: Tally
) -> tuple[Array, Array]:
    """Return both sides' values as they are, or in order along an axis where they then agree: ties broken otherwise."""
    for axis in (None, *range(-1, -simulated.ndim - 1, -1)) if got.shape == simulated.shape else ():
        both = (got, simulated) if axis is None else (np.sort(got, axis=axis), np.sort(simulated, axis=axis))
        trial = Tally(tally.kind)
        add(*both, trial)
        if trial.largest <= 1:
            tally.remark = tally.remark if axis is None else _TIES
            return both
    return got, simulated
