"""Save and restore what an ONNX sim holds besides its state: the marked model, and notes on how it was opened."""

from collections.abc import Mapping
from functools import partial
from typing import IO, Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import ModelProto

from onnx_backend.opening.from_float import Notes
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

MODEL, OPENED = "model.onnx", "opened.onnx"


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
    """Return the parts of a sim's file: its marked model, and the Q/DQ model it was opened from while it still runs it.

    Large weights of a model that one message cannot hold make a part of their own.

    Raises:
        ModelError: a Q/DQ file of more than 2 GiB.
    """
    opened = {} if sim.opened is None else {OPENED: _written(serialize(sim.opened))}
    model = sim.traced().model
    outside = outside_of(model, {})
    if sum(tensor.nbytes for tensor in outside.values()) <= sim.in_memory:
        return {MODEL: partial(write_message, model=model, outside=outside), **opened}
    light = with_stubs(model, outside)
    return {MODEL: _written(serialize(light)), WEIGHTS: partial(write_data, tensors=outside), **opened}


def restore_sim(file: SimFile, where: str) -> OnnxSim:
    """Return the sim that a file holds.

    Execution providers that are not installed here are passed over; `coverage` names them.

    Raises:
        FileFormatError: a part is missing or damaged.
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
        raise FileFormatError(f"{where} is damaged ({error!r}); write it again with qsdk.save(sim, path)") from error
    opened = _read(file.parts, OPENED, where) if OPENED in file.parts else None
    model = _read(file.parts, MODEL, where)
    stubs = {t.name: as_stored(t) for t in model.graph.initializer if is_stub(t)}
    if not stubs:
        sim = OnnxSim.from_state(model, file.state, notes, opened)
        sim.run_on(providers)
        return sim
    folder = SharedFolder()
    file.unpack(WEIGHTS, folder.path / "weights")
    refer_to(model, folder.path / "weights", places_of(stubs))
    sim = OnnxSim.from_state(model, file.state, notes, opened)
    sim.run_on(providers)
    sim.weights_folder = folder
    return sim


def _written(data: bytes) -> Part:
    def write(stream: IO[bytes]) -> None:
        stream.write(data)

    return write


def _read(parts: Mapping[str, bytes], name: str, where: str) -> ModelProto:
    model = ModelProto()
    try:
        model.ParseFromString(parts[name])
    except (KeyError, DecodeError) as error:
        raise FileFormatError(f"{name} is missing or damaged in {where}; write it again with qsdk.save") from error
    return model
