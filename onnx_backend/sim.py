"""The sim of an ONNX model: graph, plan and encodings. It simulates by running the Q/DQ model it would export."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnx import ModelProto, TensorProto, helper

from onnx_backend import parity
from onnx_backend.adopt import adopted_plan
from onnx_backend.feeding import as_feeds, batches_of, run_session
from onnx_backend.marks import mark, open_qdq
from onnx_backend.model import array, at_opset, attributes, initializers, is_mark, lift_constants, load
from onnx_backend.observe import METHODS, observe
from onnx_backend.qdq import insert
from onnx_backend.read_graph import inlined, read_graph
from onnx_backend.runtime_table import Dialect
from onnx_backend.session import simulation_session
from onnx_backend.validate import require_valid
from qsdk.core.bias import with_room_for
from qsdk.core.config import QuantConfig
from qsdk.core.coverage import coverage_report, explanation
from qsdk.core.encoding import Encoding
from qsdk.core.errors import CalibrationError, ConfigError, DataError, ModelError
from qsdk.core.graph import Graph
from qsdk.core.planning import Decision, Plan, make_plan
from qsdk.core.ranges import encoding_from_range, range_of
from qsdk.core.report import Report
from qsdk.core.site import matches, nearest_owners, owner_of
from qsdk.core.spec import axis_of

Array = npt.NDArray[Any]
_QUANTIZED_OPS = frozenset({"QuantizeLinear", "DequantizeLinear", "QLinearConv", "QLinearMatMul", "ConvInteger"})


class OnnxSim:
    """A simulated quantized ONNX model.

    Attributes:
        graph: what was read from the model.
        plan: what was decided for every site.
        config: what was asked for, or None for an opened Q/DQ file.
    """

    def __init__(self, marked: ModelProto, graph: Graph, plan: Plan, config: QuantConfig | None = None) -> None:
        self.graph, self.plan, self.config = graph, plan, config
        self._marked = marked
        self._own: dict[str, Encoding] = {}
        self._lowered: ModelProto | None = None  # of the encodings as they are
        self._session: ort.InferenceSession | None = None

    @classmethod
    def from_float(cls, source: str | os.PathLike[str] | bytes | ModelProto, config: QuantConfig) -> "OnnxSim":
        """Plan the quantization of a float ONNX model, raised to opset 21 if it is older.

        Raises:
            FileFormatError: the file cannot be read.
            ModelError: the model is quantized already, is float16, or cannot be read or raised.
            ConfigError: a rule matches nothing.
        """
        model = at_opset(inlined(load(source)))
        lift_constants(model)
        for node in model.graph.node:
            if node.op_type in _QUANTIZED_OPS:
                named = node.name or node.output[0]
                raise ModelError(
                    f"the model is quantized already (node {named!r}); pass config=None to adopt its encodings, or "
                    "quantize the float model it came from"
                )
        graph = read_graph(model)
        narrow = [t.name for t in graph.tensors if t.dtype in ("float16", "bfloat16", "float64")]
        if narrow:
            raise ModelError(f"the tensor {narrow[0]!r} is not float32; quantize the float32 model")
        return cls(mark(model, graph), graph, make_plan(graph, config), config)

    @classmethod
    def from_qdq(cls, source: str | os.PathLike[str] | bytes | ModelProto) -> "OnnxSim":
        """Open an exported Q/DQ model: its encodings come back by value, and it simulates as the file does.

        Raises:
            FileFormatError: the file cannot be read or is invalid; names the node.
        """
        model = load(source)
        require_valid(model, "the model" if isinstance(source, bytes | ModelProto) else os.fspath(source))
        opened = open_qdq(at_opset(inlined(model)))
        graph = read_graph(opened.model)
        sim = cls(opened.model, graph, adopted_plan(graph, opened))
        sim._own = {site: e for site, e in opened.encodings.items() if sim.plan.decisions[site].bias_of is None}
        sim._lowered = model
        return sim

    def calibrate(
        self,
        batches: Iterable[Any],
        method: str = "min_max",
        *,
        weight_method: str | None = None,
        progress: bool = True,
    ) -> Report:
        """Find an encoding for every site: weights at once, activations in one streamed float pass.

        Args:
            batches: arrays (one input), tuples (inputs in order) or mappings by input name.
            method: `min_max` (also `post_training_tf`) or `moving_average`.
            weight_method: `min_max`.
            progress: show a progress bar.

        Raises:
            ConfigError: an unknown method.
            DataError: no data, data the model does not take, or NaN or inf in it (names site and batch).
            CalibrationError: a site that no batch reached. In every case the sim stays as it was.
        """
        for name in (method, weight_method or "min_max"):
            if name not in METHODS:
                raise ConfigError(f"unknown calibration method {name!r}; choose one of {', '.join(METHODS)}")
        found = self._weight_encodings()
        found.update(observe(self._marked, self.plan, batches, METHODS[method], progress=progress))
        frozen = {site: encoding for site, encoding in self._own.items() if encoding.frozen}
        self._make_room_for_biases(found, frozen)
        self._set({**self._own, **found, **frozen})
        rows = [_row(site, encoding) for site, encoding in found.items() if site not in frozen]
        return Report("Calibration", rows, {"method": method, "sites": len(rows)})

    def set_encoding(self, site: str, encoding: Encoding) -> None:
        """Install the encoding of a site that has one of its own.

        Raises:
            ConfigError: there is no such site, or its encoding is another site's or derived.
        """
        decision = self.plan.decisions.get(site)
        if decision is None or not decision.quantized or decision.tied_to or decision.bias_of:
            raise ConfigError(f"{site} has no encoding of its own; set that of {decision and decision.encoding_site}")
        self._set({**self._own, site: encoding})

    def freeze(self, match: str = "*") -> int:
        """Freeze the encodings of all owners that match, so that calibration leaves them; gives their number.

        Raises:
            ConfigError: nothing matches.
        """
        found = [site for site in self._own if matches(match, owner_of(site))]
        if not found:
            near = ", ".join(nearest_owners(match, [owner_of(site) for site in self._own]))
            raise ConfigError(f"freeze({match!r}) matches no owner with an encoding; the nearest are: {near}")
        self._own.update({site: replace(self._own[site], frozen=True) for site in found})
        return len(found)

    @property
    def encodings(self) -> dict[str, Encoding]:
        """Site -> encoding for every quantized site: own, shared and derived.

        Raises:
            CalibrationError: lists the sites that have none.
        """
        missing = [site for site, ready in self.ready().items() if not ready]
        if missing:
            shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            raise CalibrationError(f"these sites have no encoding: {shown}; call qsdk.calibrate(sim, batches) first")
        return self.encodings_where_ready()

    def ready(self) -> dict[str, bool]:
        """Quantized site -> whether there is an encoding to quantize with."""
        found = {}
        for site, decision in self.plan.decisions.items():
            if decision.quantized:
                needed = decision.bias_of or (decision.encoding_site,)
                found[site] = all(name in self._own for name in needed)
        return found

    def encodings_where_ready(self) -> dict[str, Encoding]:
        """Site -> encoding, without the sites that have none yet."""
        ready = self.ready()
        return {site: self._encoding(self.plan.decisions[site]) for site, is_ready in ready.items() if is_ready}

    def coverage(self) -> Report:
        """List every tensor: quantized, tied to another, or float and why."""
        return coverage_report(self.plan)

    def explain(self, site: str) -> str:
        """Say which rule decided a site and why.

        Raises:
            ConfigError: there is no such site.
        """
        return explanation(self.plan, site)

    def marked(self) -> ModelProto:
        """A copy of the float model with a mark at every site."""
        return load(self._marked)

    def qdq_model(self, dialect: Dialect = "onnxruntime") -> ModelProto:
        """The model with Q/DQ, as exported.

        Raises:
            CalibrationError: sites have no encoding.
        """
        return insert(self._marked, self.plan, self.encodings, dialect=dialect)[0]

    def __call__(self, *args: Any) -> list[Array]:
        """Simulate: the inputs in order, or one mapping by name."""
        return self.run(args if len(args) != 1 else args[0])

    def run(self, x: Any) -> list[Array]:
        """Simulate a batch: an array, a tuple in graph order or a mapping by name; gives the outputs in graph order.

        Raises:
            CalibrationError: sites have no encoding.
            DataError: data the model does not take.
        """
        return run_session(self._running(), as_feeds(x, self._running().get_inputs(), "the batch"), "the batch")

    def capture(self, x: Any) -> dict[str, Array]:
        """Simulate a batch and give site -> fake-quantized values, and input name -> values."""
        lowered = self._current()
        cuts = parity.find_cuts(lowered)
        exposed = load(lowered)
        known = {value.name for value in exposed.graph.output}
        reads = [cut.read for cut in cuts]
        wanted = [name for name in dict.fromkeys(reads) if name not in known]
        exposed.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in wanted)
        session = simulation_session(exposed)
        feeds = as_feeds(x, session.get_inputs(), "the batch")
        names = [output.name for output in session.get_outputs()]
        values = dict(zip(names, run_session(session, feeds, "the batch"), strict=True))
        return {**feeds, **{cut.site: values[cut.read] for cut in cuts}}

    def stored_values(self) -> dict[str, npt.NDArray[np.float32]]:
        """Site -> fake-quantized value of every stored tensor that does not stay float32."""
        found = {}
        encodings = self.encodings
        for site, values in self._stored():
            spec = self.plan.decisions[site].spec
            if site in encodings:
                found[site] = encodings[site].fake_quantize(values)
            elif spec is not None:
                code = TensorProto.FLOAT16 if spec.dtype.name == "float16" else TensorProto.BFLOAT16
                narrow = values.astype(helper.tensor_dtype_to_np_dtype(code))
                found[site] = np.asarray(narrow, np.float32)
        return found

    def check_parity(self, model: ModelProto, data: Iterable[Any], *, progress: bool = True) -> Report:
        """Compare an exported model with this sim, site by site, each fed with the sim's own input.

        Raises:
            CalibrationError: sites have no encoding.
            DataError: no data, or data the model does not take.
        """
        outputs: list[list[Array]] = []

        def captures() -> Iterable[Mapping[str, Array]]:
            for _, batch in batches_of(data, "parity", progress):
                outputs.append(self.run(batch))
                yield self.capture(batch)

        def reference() -> Iterable[list[Array]]:
            while outputs:
                yield outputs.pop(0)

        return parity.check(model, captures(), self.stored_values(), self.encodings, reference())

    # --- the parts ------------------------------------------------------------------------------------------------

    def _set(self, own: dict[str, Encoding]) -> None:
        self._own, self._lowered, self._session = own, None, None

    def _current(self) -> ModelProto:
        if self._lowered is None:
            self._lowered = self.qdq_model()
        return self._lowered

    def _running(self) -> ort.InferenceSession:
        if self._session is None:
            self._session = simulation_session(self._current())
        return self._session

    def _stored(self) -> Iterator[tuple[str, Array]]:
        """Site -> float value of every marked stored tensor."""
        stored = initializers(self._marked.graph)
        roots: dict[str, str] = {}
        for node in self._marked.graph.node:
            if is_mark(node):
                root = roots[node.output[0]] = roots.get(node.input[0], node.input[0])
                site = str(attributes(node)["key"])
                if root in stored and site in self.plan.decisions:
                    yield site, array(stored[root])

    def _weight_encodings(self) -> dict[str, Encoding]:
        found = {}
        for site, values in self._stored():
            decision = self.plan.decisions[site]
            if decision.spec is None or not decision.quantized or decision.tied_to or decision.kind == "bias":
                continue  # a bias follows from its input and weight, or keeps what its file said
            if not np.isfinite(values).all():
                raise DataError(f"NaN or inf in the stored tensor at {site}; load a model that is finite")
            found[site] = encoding_from_range(range_of(values, decision.spec), decision.spec)
        return found

    def _make_room_for_biases(self, found: dict[str, Encoding], frozen: Mapping[str, Encoding]) -> None:
        """Widen the weight scales under which a bias would not fit int32."""
        for site, bias in self._stored():
            source, weight = self.plan.decisions[site].bias_of or ("", "")
            if weight in found and weight not in frozen:
                known = frozen[source] if source in frozen else found[source]
                found[weight] = with_room_for(bias, known, found[weight])

    def _encoding(self, decision: Decision) -> Encoding:
        if decision.bias_of is None:
            return self._own[decision.encoding_site]
        spec, (source, weight) = decision.spec, (self._own[site] for site in decision.bias_of)
        assert spec is not None
        scale = source.scale * weight.scale
        return Encoding(spec.dtype, scale, np.zeros(scale.shape, np.int32), axis_of(spec.granularity))


def _row(site: str, encoding: Encoding) -> dict[str, Any]:
    low, high = float(encoding.low.min()), float(encoding.high.max())
    return {"site": site, "dtype": encoding.dtype.name, "low": low, "high": high, "scales": encoding.scale.size}
