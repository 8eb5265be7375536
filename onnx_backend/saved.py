"""Save and restore what an ONNX sim holds besides its state: the marked model, and notes on how it was opened."""

import math
from collections.abc import Mapping
from functools import partial
from io import BytesIO
from typing import IO, Any

import ml_dtypes
import numpy as np
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnx_backend.opening.from_float import Notes
from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import initializers
from onnx_backend.proto.lazy_tensors import as_stored, is_stub
from onnx_backend.proto.model_io import serialize
from onnx_backend.proto.write_file import outside_of, places_of, refer_to, with_stubs, write_data, write_message
from onnx_backend.runtime.providers import CPU_ONLY, read_providers
from onnx_backend.sim import OnnxSim
from qsdk.core.errors import FileFormatError
from qsdk.core.layers.expected_means import norms_to_json, read_norms
from qsdk.core.planning.plan import Plan
from qsdk.core.shared_folder import SharedFolder
from qsdk.core.sims.sim_file import WEIGHTS, Part, SimFile, plan_to_json, read_plan

MODEL, OPENED, _GIVEN = "model.onnx", "opened.onnx", "given/"
_REMEDY = "write it again with qsdk.save(sim, path)"


def facts_of(sim: OnnxSim) -> dict[str, Any]:
    """Return the notes of a sim as plain values."""
    notes = sim.notes
    return {
        "folded": list(notes.folded),
        "unfolded": dict(notes.unfolded),
        "reasons": dict(notes.reasons),
        "inside": plan_to_json(Plan({}, notes.inside)),
        "remarks": list(notes.remarks),
        "norms": norms_to_json(sim.folded_norms),
        "gone": dict(notes.gone),
        "given": list(sim.given.before),
        "providers": sim.providers.to_json(),
    }


def parts_of(sim: OnnxSim) -> dict[str, Part]:
    """Return the parts of a sim's file: its model, the Q/DQ model that it still runs, and weights replaced since.

    Large weights of a model that one message cannot hold make a part of their own. A Q/DQ file of more than 2 GiB is
    refused.
    """
    parts = {} if sim.opened is None else {OPENED: _written(serialize(sim.opened))}
    parts |= {
        f"{_GIVEN}{n}": partial(_write_given, tensor=tensor) for n, tensor in enumerate(sim.given.before.values())
    }
    model = sim.traced().model
    outside = outside_of(model, {})
    if sum(tensor.nbytes for tensor in outside.values()) <= sim.in_memory:
        return {MODEL: partial(write_message, model=model, outside=outside), **parts}
    light = with_stubs(model, outside)
    return {MODEL: _written(serialize(light)), WEIGHTS: partial(write_data, tensors=outside), **parts}


def restore_sim(file: SimFile, where: str) -> OnnxSim:
    """Return the sim that a file holds; a missing or damaged part is refused.

    Execution providers that are not installed here are passed over; `coverage` names them.
    """
    facts = file.facts
    try:
        notes = Notes(
            tuple(facts["folded"]),
            dict(facts["unfolded"]),
            dict(facts["reasons"]),
            read_plan(facts["inside"]).inside,
            tuple(facts["remarks"]),
            read_norms(facts.get("norms", {}), where),
            {str(name): str(owner) for name, owner in facts.get("gone", {}).items()},
        )
        providers = read_providers(facts.get("providers", CPU_ONLY.to_json()))
    except FileFormatError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FileFormatError(f"{where} is damaged ({error!r}); {_REMEDY}") from error
    opened = _read_model(file.parts, OPENED, where) if OPENED in file.parts else None
    model = _read_model(file.parts, MODEL, where)
    stubs = {t.name: as_stored(t) for t in model.graph.initializer if is_stub(t)}
    folder = SharedFolder() if stubs else None
    if folder is not None:
        file.unpack(WEIGHTS, folder.path / "weights")
        refer_to(model, folder.path / "weights", places_of(stubs))
    sim = OnnxSim.from_state(model, file.state, notes, opened)
    sim.run_on(providers)
    sim.weights_folder = folder
    _take_given(sim, facts.get("given", []), file.parts, where)
    return sim


def _take_given(sim: OnnxSim, names: Any, parts: Mapping[str, bytes], where: str) -> None:
    """Restore the user's values of the stored tensors of these names."""
    stored = initializers(sim.traced().model.graph)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FileFormatError(f"{where} is damaged (given={names!r}); {_REMEDY}")
    for number, name in enumerate(names):
        part = f"{_GIVEN}{number}"
        sim.given.before[name] = _read_given(parts.get(part, b""), stored.get(name), f"{part} in {where}")


def _write_given(stream: IO[bytes], tensor: TensorProto) -> None:
    values = array(tensor)
    if values.dtype == ml_dtypes.bfloat16:  # which NumPy's format does not know
        values = values.astype(np.float32)
    np.lib.format.write_array(stream, values, allow_pickle=False)


def _read_given(data: bytes, stored: TensorProto | None, where: str) -> TensorProto:
    try:
        values: Any = np.lib.format.read_array(BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise FileFormatError(f"{where} is damaged ({error}); {_REMEDY}") from error
    if stored is None or math.prod(stored.dims) != values.size or values.dtype.kind != "f":
        raise FileFormatError(f"{where} is no tensor of the model beside it; {_REMEDY}")
    dtype = helper.tensor_dtype_to_np_dtype(stored.data_type)
    return numpy_helper.from_array(values.astype(dtype), stored.name)


def _written(data: bytes) -> Part:
    def write(stream: IO[bytes]) -> None:
        stream.write(data)

    return write


def _read_model(parts: Mapping[str, bytes], name: str, where: str) -> ModelProto:
    model = ModelProto()
    try:
        model.ParseFromString(parts[name])
    except (KeyError, DecodeError) as error:
        raise FileFormatError(f"{name} is missing or damaged in {where}; write it again with qsdk.save") from error
    return model
