"""The values that an ONNX model computes, by the names of its tensors, also taught by another side's."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto, ValueInfoProto, helper

from onnx_backend.data_passes.places import OnnxPlace, places_of
from onnx_backend.proto.graph_queries import names_in, unique
from onnx_backend.proto.model_io import load
from onnx_backend.proto.nodes import rename_inputs
from onnx_backend.proto.subgraphs import reads
from onnx_backend.runtime.feeds import as_feeds, run_session
from onnx_backend.runtime.providers import CPU_ONLY, Providers
from onnx_backend.runtime.session import simulation_session
from qsdk.core.comparing.place import Array, Place


class OnnxValues:
    """The tensors of an ONNX model, as the simulation computes them: Q/DQ as written.

    The values of a quantized tensor are what its readers read, behind DequantizeLinear.
    """

    def __init__(self, model: ModelProto, providers: Providers = CPU_ONLY) -> None:
        self._model, self._providers = model, providers
        self._found: list[OnnxPlace] = places_of(model)
        self._kinds: dict[str, np.dtype[Any]] = {}
        self._session: ort.InferenceSession | None = None
        self._taught: tuple[ort.InferenceSession, dict[str, str]] | None = None

    @property
    def places(self) -> Sequence[Place]:
        """Return the places in graph order; after the first run, only those that hold floats or codes."""
        return [found.facts for found in self._found]

    @property
    def teachable(self) -> bool:
        """Return whether the model computes on floats, so that it can go on from given ones."""
        return not any(found.facts.codes for found in self._found)

    def values(self, batch: Any, where: str) -> Mapping[str, Array]:
        """Return the values at every place, in float32, codes as they are; see `Side`."""
        if self._session is None:
            self._session = simulation_session(self._exposed(self._model), providers=self._providers)
        values = self._run(self._session, batch, where)
        if not self._kinds:
            self._kinds = {name: value.dtype for name, value in values.items()}
            self._found = [_with_epsilon(found, values) for found in self._found if _is_comparable(found, values)]
        return {found.facts.name: _plain(values[found.tensor]) for found in self._found}

    def taught(self, batch: Any, where: str, given: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the values where each is computed from the given ones; see `Side`."""
        if self._taught is None:
            self._taught = self._with_given(given)
        session, fed = self._taught
        extra = {fed[name]: value.astype(self._kind(name)) for name, value in given.items() if name in fed}
        inputs_given = {found.tensor: found.facts.name for found in self._found if found.facts.given}
        changed = {t: given[name].astype(self._kinds[t]) for t, name in inputs_given.items() if name in given}
        inputs = [value for value in session.get_inputs() if value.name not in extra]
        values = self._run(session, batch, where, inputs, {**changed, **extra})
        return {found.facts.name: _plain(values[found.tensor]) for found in self._found}

    def _run(
        self,
        session: ort.InferenceSession,
        batch: Any,
        where: str,
        inputs: Sequence[Any] | None = None,
        extra: Mapping[str, Array] | None = None,
    ) -> dict[str, Array]:
        feeds = as_feeds(batch, session.get_inputs() if inputs is None else inputs, where)
        results = run_session(session, {**feeds, **(extra or {})}, where)
        return {**feeds, **dict(zip((output.name for output in session.get_outputs()), results, strict=True))}

    def _kind(self, name: str) -> np.dtype[Any]:
        return self._kinds[next(found.tensor for found in self._found if found.facts.name == name)]

    def _exposed(self, model: ModelProto) -> ModelProto:
        """Return the model with every place as an output."""
        exposed = load(model)
        known = {value.name for value in (*exposed.graph.output, *exposed.graph.input)}
        wanted = [found.tensor for found in self._found if found.tensor not in known]
        exposed.graph.output.extend(ValueInfoProto(name=name) for name in dict.fromkeys(wanted))
        return exposed

    def _with_given(self, given: Mapping[str, Array]) -> tuple[ort.InferenceSession, dict[str, str]]:
        """Return a session whose nodes read new inputs in place of the given places, and place -> such an input."""
        model = self._exposed(self._model)
        taken = names_in(model.graph)
        fed, renamed = {}, {}
        for found in self._found:
            if found.facts.name in given and not found.facts.given:
                fed[found.facts.name] = unique(f"{found.tensor}/given", taken)
                renamed.update(dict.fromkeys(found.readers_read, fed[found.facts.name]))
        rename_inputs(model.graph.node, renamed)
        read = {name for node in model.graph.node for name in reads(node)}
        fed = {name: new for name, new in fed.items() if new in read}
        for name, new in fed.items():
            code = int(helper.np_dtype_to_tensor_dtype(self._kind(name)))
            model.graph.input.append(helper.make_tensor_value_info(new, code, None))
        del model.graph.value_info[:]
        return simulation_session(model, providers=self._providers), fed


def _is_comparable(found: OnnxPlace, values: Mapping[str, Array]) -> bool:
    kind = values[found.tensor].dtype.kind
    return kind in "iu" if found.facts.codes else kind == "f"


def _with_epsilon(found: OnnxPlace, values: Mapping[str, Array]) -> OnnxPlace:
    known = 0.0 if found.facts.codes else float(np.finfo(values[found.tensor].dtype).eps)
    return replace(found, facts=replace(found.facts, epsilon=max(known, found.facts.epsilon)))


def _plain(values: Array) -> Array:
    return values.astype(np.float32) if values.dtype.kind == "f" else values
