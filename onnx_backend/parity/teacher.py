"""Run an exported model with teacher forcing: every site is fed with the simulation's own values."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
from onnx import ModelProto

from onnx_backend.other_runtimes.choose import open_in, open_part
from onnx_backend.other_runtimes.runner import Runner
from onnx_backend.parity.cuts import Cut, chosen_behind, cut_at_values, cut_model
from onnx_backend.parity.float_outputs import NoisyRuns
from onnx_backend.proto.graph_queries import input_names, producers
from onnx_backend.runtime.feeds import as_declared, run_session
from onnx_backend.runtime.providers import CPU_ONLY, Providers
from onnx_backend.runtime.session import simulation_session
from qsdk.core.errors import DataError
from qsdk.core.numerics.dtypes import uint8
from qsdk.core.numerics.encoding import Encoding

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class RunOn:
    """What an exported model runs on when it is compared with its simulation.

    Attributes:
        providers: of ONNX Runtime, which then runs the model as the simulation does, Q/DQ as written.
        runtime: name of a runtime that runs it as an application would, with its own fusions; None for ONNX Runtime
            with these providers.
    """

    providers: Providers = CPU_ONLY
    runtime: str | None = None

    def open(self, model: ModelProto, *, whole: bool = True) -> Runner:
        """Open a model, as an application does, or a part of one.

        Raises:
            ConfigError: the runtime is unknown or not installed.
            ModelError: the runtime cannot compile the model.
        """
        if self.runtime is None:
            return _SimulationRunner(model, self.providers)
        return open_in(self.runtime, model) if whole else open_part(self.runtime, model)

    def cut(self, model: ModelProto, cuts: Sequence[Cut], free: Iterable[str]) -> tuple[ModelProto, dict[str, str]]:
        """Return the model cut at sites, and site -> name of its new input; see `cut_model` and `cut_at_values`.

        Another runtime fuses the pairs of the whole file, so each of its inputs gets the pair of its site.
        """
        return cut_model(model, cuts, [*free]) if self.runtime is None else cut_at_values(model, cuts, [*free])

    def comparable(self, model: ModelProto, cuts: Sequence[Cut]) -> list[Cut]:
        """Return the sites whose codes can be compared there: in another runtime, those that QuantizeLinear makes."""
        if self.runtime is None:
            return list(cuts)
        makers = producers(model.graph.node)
        return [cut for cut in cuts if makers[cut.compared].op_type == "QuantizeLinear"]


class _SimulationRunner:
    """A model in the session of a simulation."""

    def __init__(self, model: ModelProto, providers: Providers) -> None:
        self.title = "ONNX Runtime"
        self.session = simulation_session(model, providers=providers)
        # a graph input that only cut-off nodes read may be gone
        self.types = {value.name: value.type for value in self.session.get_inputs()}

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Run the model; see `Runner.run`."""
        known = {name: as_declared(value, self.types[name]) for name, value in feeds.items() if name in self.types}
        return run_session(self.session, known, "what the simulation gives")


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
    """The cut models in their runtime, one per set of sites that a batch brings.

    Attributes:
        cuts: the sites that are compared.
        free: name -> type of the outputs that are no sites.
        inputs: names of the model's inputs.
        chosen: see `chosen_behind`.
    """

    def __init__(self, model: ModelProto, cuts: Sequence[Cut], free: Mapping[str, str], on: RunOn) -> None:
        self.model, self.cuts, self.free, self.on = model, on.comparable(model, cuts), free, on
        self.inputs, self.chosen = input_names(model.graph), chosen_behind(model, cuts)
        self.opened: dict[frozenset[str], tuple[Runner, dict[str, str], NoisyRuns]] = {}

    def run(self, batch: Mapping[str, Array]) -> TeacherForced:
        """Run the cut model on the captured values of a batch.

        Raises:
            DataError: the runtime does not run it.
        """
        cuts = [cut for cut in self.cuts if cut.site in batch]
        if not cuts and not self.free:
            return TeacherForced({}, {}, {}, {})
        runner, fed, _ = self._opened(cuts)
        feeds = {**raw_inputs(batch, self.inputs), **{name: batch[site] for site, name in fed.items()}}
        values = iter(runner.run(feeds))
        codes = {cut.site: next(values) for cut in cuts}
        computed = {cut.site: Encoding(uint8, next(values), next(values)) for cut in cuts if cut.computed}
        return TeacherForced(codes, computed, {name: next(values) for name in self.free}, feeds)

    def noisy(self, batch: Mapping[str, Array], forced: TeacherForced) -> dict[str, list[Array]]:
        """Return the free outputs with noise of the size of rounding in everything between them and the sites."""
        *_, runs = self._opened([cut for cut in self.cuts if cut.site in batch])
        return runs.run(forced.feeds, forced.free)

    def _opened(self, cuts: Sequence[Cut]) -> tuple[Runner, dict[str, str], NoisyRuns]:
        key = frozenset(cut.site for cut in cuts)
        if key not in self.opened:
            model, fed = self.on.cut(self.model, cuts, self.free)
            noise = NoisyRuns(model, list(self.free), self.on.providers)
            self.opened[key] = self.on.open(model, whole=False), fed, noise
        return self.opened[key]


def raw_inputs(batch: Mapping[str, Array], names: Iterable[str]) -> dict[str, Array]:
    """Return the values of the graph inputs in a captured batch.

    Raises:
        DataError: one of them is missing.
    """
    missing = [name for name in names if name not in batch]
    if missing:
        raise DataError(f"the captures lack the graph input(s) {', '.join(missing)}; put them under their own names")
    return {name: batch[name] for name in names}
