"""What a saved sim of an ONNX model holds besides its state: the marked model, and notes on how it came in."""

from collections.abc import Mapping
from typing import IO, Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import ModelProto

from onnx_backend.model import serialized
from onnx_backend.open_float import Notes
from onnx_backend.sim import OnnxSim
from qsdk.core.errors import FileFormatError
from qsdk.core.planning.plan import Plan
from qsdk.core.sims.plan_json import plain_plan, read_plan
from qsdk.core.sims.sim_file import Part, SimFile

MODEL, OPENED = "model.onnx", "opened.onnx"


def facts_of(sim: OnnxSim) -> dict[str, Any]:
    """The notes of a sim as plain values."""
    notes = sim.notes
    return {
        "folded": list(notes.folded),
        "unfolded": dict(notes.unfolded),
        "reasons": dict(notes.reasons),
        "inside": plain_plan(Plan({}, notes.inside)),
        "remarks": list(notes.remarks),
    }


def parts_of(sim: OnnxSim) -> dict[str, Part]:
    """The parts of a sim's file: its marked model, and the Q/DQ file it was opened from as long as it is that one.

    Raises:
        ModelError: the model is larger than 2 GiB.
    """
    models = {MODEL: sim.marked()} | ({} if sim.opened is None else {OPENED: sim.opened})
    return {name: _written(serialized(model)) for name, model in models.items()}


def restored(file: SimFile, where: str) -> OnnxSim:
    """The sim that was saved.

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
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(f"{where} is damaged ({error!r}); write it again with qsdk.save(sim, path)") from error
    opened = _read(file.parts, OPENED, where) if OPENED in file.parts else None
    return OnnxSim.from_state(_read(file.parts, MODEL, where), file.state, notes, opened)


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
