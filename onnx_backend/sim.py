"""The sim of an ONNX model: graph, plan and encodings. It simulates by running the Q/DQ model it would export."""

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnx_backend.calibration.observe import SessionCache, observe
from onnx_backend.calibration.stored_tensors import simulated_tensors, stored_names, stored_tensors
from onnx_backend.lower import lower
from onnx_backend.opening.encodings_of_file import adopted_plan, float_in_file, note_replaced_encodings, with_flags
from onnx_backend.opening.from_float import Notes, OpenedFloat, with_reasons_of_file
from onnx_backend.opening.from_trace import TracedModel
from onnx_backend.opening.read_graph import inline_functions, read_graph
from onnx_backend.parity.cuts import session_with_reads
from onnx_backend.proto.external_data import FLOATS, files_read, float_array, is_reference, reference
from onnx_backend.proto.graph_queries import initializers
from onnx_backend.proto.lazy_tensors import with_large
from onnx_backend.proto.opsets import at_opset
from onnx_backend.proto.write_file import spool_large_tensors
from onnx_backend.qdq.marks import UnpackedQdq, mark, open_qdq
from onnx_backend.runtime.feeds import as_feeds, run_session
from onnx_backend.runtime.providers import CPU_ONLY, Providers, placement
from onnx_backend.runtime.session import RepeatedSession
from qsdk.core.arrays import Array
from qsdk.core.config.config import QuantConfig
from qsdk.core.config.for_dialect import AnyDialect
from qsdk.core.errors import ConfigError, ModelError
from qsdk.core.graph.graph import Graph
from qsdk.core.layers.expected_means import FoldedNorm
from qsdk.core.lazy_arrays import LazyArrays
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.planning.from_encodings import owned_encodings, with_groups
from qsdk.core.planning.plan import Plan, coverage_report
from qsdk.core.ranges.estimators import PERCENTILE
from qsdk.core.ranges.statistics import Gather, single_process
from qsdk.core.report import Report
from qsdk.core.shared_folder import PerCopyLock, SharedFolder
from qsdk.core.sims.biases import OriginalBiases, with_notes, with_reasons
from qsdk.core.sims.calibration import calibrate_sites
from qsdk.core.sims.replan import replanned
from qsdk.core.sims.state import Methods, SimState, encoding_of
from qsdk.core.sims.stateful import StatefulSim


class WeightSnapshot:
    """The stored tensors of a model at one moment: those that were changed since, copied just before."""

    def __init__(self) -> None:
        self.before: dict[str, TensorProto] = {}


class WeightEdits:
    """The stored tensors of one sim's model and the changes to them; the user's file stays as it is."""

    def __init__(self, model: ModelProto) -> None:
        self._model = model
        self._snapshots: weakref.WeakSet[WeightSnapshot] = weakref.WeakSet()

    def hold(self) -> WeightSnapshot:
        """Return a snapshot for `put_back`; it copies a tensor only just before that is replaced."""
        snapshot = WeightSnapshot()
        self._snapshots.add(snapshot)
        return snapshot

    def write(self, values: Mapping[str, Array]) -> None:
        """Replace stored float tensors, by name, by other values of the same shape, rounded to their type."""
        stored = initializers(self._model.graph)
        written = {name: _tensor(name, value, stored.get(name)) for name, value in values.items()}
        self._replace(stored, written)

    def put_back(self, snapshot: WeightSnapshot) -> None:
        """Restore the stored tensors of a snapshot."""
        if snapshot not in self._snapshots:
            raise ModelError(
                "the snapshot holds the weights of another sim; restore it in the sim that it was taken of"
            )
        self._replace(initializers(self._model.graph), dict(snapshot.before))

    def files_read(self) -> Iterator[Path]:
        """Yield the files that hold tensors which can be put back."""
        for snapshot in self._snapshots:
            yield from (reference(tensor)[0] for tensor in snapshot.before.values() if is_reference(tensor))

    def _replace(self, stored: Mapping[str, TensorProto], by: Mapping[str, TensorProto]) -> None:
        for name, tensor in by.items():
            lacking = [snapshot for snapshot in self._snapshots if name not in snapshot.before]
            if lacking:
                before = TensorProto()
                before.CopyFrom(stored[name])
                for snapshot in lacking:
                    snapshot.before[name] = before
            stored[name].CopyFrom(tensor)


def _tensor(name: str, value: Array, current: TensorProto | None) -> TensorProto:
    if current is None or current.data_type not in FLOATS:
        raise ModelError(f"the model stores no float tensor of the name {name!r}; only those can be changed")
    if tuple(current.dims) != value.shape:
        raise ModelError(f"{name} has the shape {tuple(current.dims)}, not {value.shape}")
    with np.errstate(over="ignore"):  # too large for a narrower type: infinite
        typed = np.ascontiguousarray(value).astype(helper.tensor_dtype_to_np_dtype(current.data_type))
    return numpy_helper.from_array(typed, name)


class OnnxSim(StatefulSim):
    """A simulated quantized ONNX model.

    Attributes:
        graph: the neutral graph of the model.
        plan (Plan): the decision for every site.
        config (QuantConfig | None): the user's config, or None for an opened Q/DQ file.
        notes: what opening changed in a float model.
        providers: ONNX Runtime's, on which it runs; see `run_on`.

    Examples:
        >>> import tempfile, torch, qsdk
        >>> path, layer = tempfile.mkdtemp() + "/float.onnx", torch.nn.Linear(4, 2).eval()
        >>> _ = torch.onnx.export(layer, (torch.randn(8, 4),), path, verbose=False)
        >>> qsdk.quantize(path)
        OnnxSim(1 ops: 4 quantized, 0 tied, 0 float; 0 of 4 quantized sites ready)
    """

    documented = (*StatefulSim.documented, "providers", "run_on", "placement", "qdq_model", "capture")

    def __init__(self, marked: ModelProto, graph: Graph, plan: Plan, config: QuantConfig | None = None) -> None:
        self.graph, self.plan, self.config = graph, plan, config
        self.notes, self.in_memory = Notes(), 2**30  # bytes of quantized weights; beyond that, a temporary file
        self.providers = CPU_ONLY
        self._marked = marked
        self._own: dict[str, Encoding] = {}
        self._lowered: ModelProto | None = None  # the Q/DQ model of the current encodings
        self._session: RepeatedSession | None = None
        self._capturing: tuple[ort.InferenceSession, dict[str, str]] | None = None
        self._observing = SessionCache()
        self._weights = WeightEdits(marked)
        self.given = self._weights.hold()  # the user's float values, where verbs have changed them since
        self._norms: dict[str, FoldedNorm] = {}
        self.original_biases: OriginalBiases = {}
        self._changing = PerCopyLock()  # sessions are built from one state, and dropped with it
        self._spools: list[SharedFolder] = []  # of the simulation
        self.weights_folder: SharedFolder | None = None  # of large weights of a saved sim

    @classmethod
    def from_opened_float(cls, opened: OpenedFloat, config: QuantConfig) -> "OnnxSim":
        """Return the sim of an opened float model and the config it was planned with; the sim keeps the model."""
        sim = cls(mark(opened.model, opened.graph, in_place=True), opened.graph, opened.plan, config)
        sim.notes, sim._norms = opened.notes, dict(opened.notes.norms)
        return sim

    @classmethod
    def from_qdq(cls, model: ModelProto, opened: UnpackedQdq | None = None) -> "OnnxSim":
        """Return the sim of a Q/DQ model with its own encodings, which simulates as the model does.

        Args:
            model: valid, and in normal form (see `normalize_qdq`); the sim keeps it.
            opened: the model without its pairs, where more was changed in it; the sim keeps it.
        """
        opened = opened or open_qdq(at_opset(inline_functions(model)))
        graph = read_graph(opened.model, modules=True)
        sim = cls(opened.model, graph, adopted_plan(graph, opened))
        sim._own, sim._lowered = owned_encodings(sim.plan, with_flags(model, opened.encodings)), model
        return sim

    @classmethod
    def from_state(
        cls, marked: ModelProto, state: SimState, notes: Notes, opened: ModelProto | None = None
    ) -> "OnnxSim":
        """Return the sim of a marked model with the state, the notes and the opened Q/DQ model of an earlier sim."""
        graph = read_graph(marked, modules=True)
        sim = cls(marked, graph, with_groups(graph, state.plan, state.config), state.config)
        sim.notes, sim._norms = notes, dict(notes.norms)
        sim._own, sim._lowered = dict(state.own), opened
        return sim

    @property
    def opened(self) -> ModelProto | None:
        """Return the Q/DQ model that an opened sim runs (the file's own until its encodings change), else None."""
        return self._lowered if self.config is None else None

    def calibrate(
        self,
        batches: Iterable[Any],
        method: str = "min_max",
        *,
        weight_method: str | None = None,
        percentile: float = PERCENTILE,
        progress: bool = True,
        gather: Gather = single_process,
    ) -> Report:
        """Find an encoding for every site: weights at once, activations in one streamed float pass.

        Args:
            batches: arrays (one input), tuples (inputs in order) or mappings by input name.
            method: for activations, see `qsdk.calibrate`.
            weight_method: for weights; `min_max` where it is None.
            percentile: share of the values, in percent, that `percentile` keeps below its upper end.
            progress: show a progress bar.
            gather: collects a value from every rank; the statistics of all ranks count.

        Raises:
            ConfigError: an unknown method, or a percentile outside 50..100.
            DataError: no data, data the model does not take, or NaN or inf in it (names site and batch).
            CalibrationError: a site that no batch reached. In every case the sim stays as it was.
        """
        on = self.providers
        found = calibrate_sites(
            self.plan.decisions,
            self._own,
            stored_tensors(self._marked, self.plan),
            lambda wanted, chosen: observe(
                self._marked, wanted, batches, chosen, progress=progress, sessions=self._observing, providers=on
            ),
            method=method,
            weight_method=weight_method,
            percentile=percentile,
            gather=gather,
        )
        report, own = found.report, {**self._own, **found.encodings}
        if self.config is None:
            report = note_replaced_encodings(report, self._own, own)
        self._set(own)
        self.methods = Methods(method, weight_method, percentile, found.longest)
        report = self.leave_float(report, found.ranges, found.parts)
        return with_notes(report, self.bias_remarks())

    def set_encoding(self, site: str, encoding: Encoding) -> None:
        """Set the encoding of a site that has one of its own.

        Raises:
            ConfigError: there is no such site, or its encoding is another site's or derived.
        """
        decision = self.plan.decisions.get(site)
        if decision is None or not decision.quantized or decision.tied_to or decision.bias_of:
            raise ConfigError(f"{site} has no encoding of its own; set that of {decision and decision.encoding_site}")
        self._set({**self._own, site: encoding})

    def change_stored(self, values: Mapping[str, Array]) -> None:
        """Replace stored float tensors, by their names in the graph, by other values of the same shape.

        Raises:
            ModelError: no stored float tensor has this name, or it has another shape; nothing is changed then.
        """
        with self._changing:
            self._weights.write(values)
            self._observing = SessionCache()
            self._set(self._own)

    def store_floats(self, values: Mapping[str, Array]) -> None:
        """Replace the stored tensors at sites by other values of the same shape; see `change_stored`."""
        names = self.stored_names()
        missing = sorted(set(values) - set(names))
        if missing:
            raise ModelError(f"the model stores no tensor at {', '.join(missing)}; name a weight or a bias")
        self.change_stored({names[site]: value for site, value in values.items()})

    def stored_by_name(self, name: str) -> Array | None:
        """Return the stored tensor of this name, a float one in float32; None if there is none."""
        return next((float_array(tensor) for tensor in self._marked.graph.initializer if tensor.name == name), None)

    def stored_names(self) -> dict[str, str]:
        """Return site -> name of the stored tensor there, for `change_stored`."""
        return stored_names(self._marked, self.plan)

    def snapshot(self, *, weights: bool = False) -> SimState:
        """Return the current state: config, plan and encodings, and with `weights` the stored tensors as well.

        Without weights it costs no more than a dictionary; with them, a copy of each tensor that is changed afterwards.
        """
        held = (self._weights.hold(), dict(self.folded_norms), dict(self.original_biases)) if weights else None
        return SimState(self.config, self.plan, dict(self._own), held, self.methods)

    def restore(self, state: SimState) -> None:
        """Return the sim to the state of a snapshot.

        Raises:
            ModelError: it holds the weights of another sim, or was taken before a rotation untied tensors.
        """
        self.require_still_tied(state.plan)
        with self._changing:
            if state.stored is not None:
                held, norms, biases = state.stored
                self._weights.put_back(held)
                self._norms, self.original_biases = dict(norms), dict(biases)
                self._observing = SessionCache()
            self.config, self.plan = state.config, state.plan
            self.methods = state.methods or self.methods
            self._set(dict(state.own))

    def planned(self, config: QuantConfig, *, kept_float: Mapping[str, str] | None = None) -> SimState:
        """Return the state that another config leads to, without data.

        Raises:
            ConfigError: a rule matches nothing, or the sim was opened from a Q/DQ file.
            DataError: NaN or inf in a weight whose encoding is derived anew.
        """
        extra = (*self.notes.folded, *self.notes.unfolded)
        before, stored, methods = self.snapshot(), self.stored_floats, self.methods
        state = replanned(
            before, self.graph, config, stored, methods=methods, extra_owners=extra, kept_float=kept_float
        )
        return replace(state, plan=with_reasons_of_file(state.plan, self.notes))

    @contextmanager
    def with_given_weights(self) -> Iterator[bool]:
        """Set the stored tensors to the user's own inside the block; yield True if verbs have changed any."""
        if not self.given.before:  # to restore what is stored already would cost the session
            yield False
            return
        before = self.snapshot(weights=True)
        _, *rest = before.stored
        self.restore(replace(before, stored=(self.given, *rest)))
        try:
            yield True
        finally:
            self.restore(before)

    @property
    def folded_norms(self) -> dict[str, FoldedNorm]:
        """Return owner of a layer -> mean and deviation of the BatchNorm folded into it, where they still hold."""
        return self._norms

    @property
    def folded(self) -> Collection[str]:
        """Return the owners of the BatchNorms that were folded."""
        return self.notes.folded

    @property
    def folded_away(self) -> Mapping[str, str]:
        """Return site or tensor that folding has left out -> the site that it is in now."""
        return self.notes.gone

    def ready(self) -> dict[str, bool]:
        """Return quantized site -> True if there is an encoding to quantize with."""
        needed = {s: d.bias_of or (d.encoding_site,) for s, d in self.plan.decisions.items() if d.quantized}
        return {site: all(name in self._own for name in names) for site, names in needed.items()}

    def encodings_where_ready(self) -> dict[str, Encoding]:
        """Return site -> encoding, without the sites that have none yet."""
        found = ((site, encoding_of(d, self._own)) for site, d in self.plan.decisions.items() if d.quantized)
        return {site: encoding for site, encoding in found if encoding is not None}

    def coverage(self) -> Report:
        """Return a row for every tensor: quantized, tied to another, or float and why; and the changes on opening."""
        plan = self.plan
        if self.config is None:
            plan = replace(plan, inside=(*plan.inside, *float_in_file(self.graph, plan)))
        report = with_reasons(coverage_report(plan), self.bias_remarks())
        facts = {**self.methods.facts, **self.notes.summary(), **self.providers.summary()}
        return Report(report.title, report.rows, {**report.summary, **facts})

    def files_read(self) -> set[Path]:
        """Return the files that hold large weights of this sim; they must not change while it is in use."""
        opened = set() if self._lowered is None else files_read(self._lowered)
        return files_read(self._marked) | opened | set(self._weights.files_read())

    def traced(self) -> TracedModel:
        """Return the float model with a mark at every site; it is to be read only."""
        return TracedModel(self._marked, {}, self.graph)

    def qdq_model(self, dialect: AnyDialect = "onnxruntime") -> ModelProto:
        """Return the model with Q/DQ, as it would be exported; islands are in float32 between casts that round.

        Raises:
            CalibrationError: sites have no encoding.
        """
        lowered = lower(self._marked, self.plan, self.encodings, dialect=dialect)
        if lowered.nbytes <= self.in_memory:
            return with_large(lowered.model, lowered.large)
        self._spools.append(SharedFolder())
        return spool_large_tensors(lowered.model, lowered.large, self._spools[-1].path / "weights")

    def __call__(self, *args: Any) -> list[Array]:
        """Simulate: the inputs in order, or one mapping by name."""
        return self.run(args if len(args) != 1 else args[0])

    def run(self, x: Any) -> list[Array]:
        """Simulate a batch (an array, a tuple in graph order or a mapping by name); return the outputs in graph order.

        Raises:
            CalibrationError: sites have no encoding.
            DataError: data the model does not take.
        """
        session = self._running()  # once: another thread may change the state now
        return run_session(session, as_feeds(x, session.get_inputs(), "the batch"), "the batch")

    def capture(self, x: Any) -> dict[str, Array]:
        """Simulate a batch; return site -> fake-quantized values, and input name -> values."""
        with self._changing:
            if self._capturing is None:
                self._capturing = session_with_reads(self._current(), self.providers)
            session, reads = self._capturing
        feeds = as_feeds(x, session.get_inputs(), "the batch")
        names = [output.name for output in session.get_outputs()]
        values = dict(zip(names, run_session(session, feeds, "the batch"), strict=True))
        return {**feeds, **{site: values[read] for site, read in reads.items()}}

    def stored_values(self) -> LazyArrays:
        """Return site -> fake-quantized value, float32, of every stored tensor that does not stay float32."""
        return simulated_tensors(self._marked, self.plan, self.encodings)

    def run_on(self, providers: Providers) -> None:
        """Run everything from now on (simulation, data passes, walks, parity) on these execution providers."""
        with self._changing:
            self.providers, self._session, self._capturing = providers, None, None

    def placement(self) -> Report:
        """Return which execution provider computes each node of the simulation; see `providers.placement`.

        Raises:
            CalibrationError: sites have no encoding.
        """
        return placement(self._running(), self.providers)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, which builds its own sessions."""
        with self._changing:
            return {**self.__dict__, "_session": None, "_capturing": None, "_observing": SessionCache()}

    def _set(self, own: dict[str, Encoding]) -> None:
        with self._changing:
            self._own, self._lowered, self._session, self._capturing = own, None, None, None
            self._spools = []

    def _current(self) -> ModelProto:
        if self._lowered is None:
            self._lowered = self.qdq_model()
        return self._lowered

    def _running(self) -> RepeatedSession:
        with self._changing:
            if self._session is None:
                self._session = RepeatedSession(self._current(), self.providers)
            return self._session

    def stored_floats(self, sites: Collection[str]) -> dict[str, Array]:
        """Return site -> float value of the stored tensors at these sites, as far as they are stored."""
        stored, wanted = stored_tensors(self._marked, self.plan), set(sites)
        return {site: stored[site] for site in stored if site in wanted}
