"""Saved sims: one zip file with a manifest, the plan, the encodings and what each side adds. It contains no code."""

import json
import os
import shutil
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

from qsdk.core.atomic_files import write_atomically
from qsdk.core.config.config import QuantConfig
from qsdk.core.encodings import qsdk_format
from qsdk.core.errors import FileFormatError, QsdkError
from qsdk.core.numerics.dtypes import dtype_named
from qsdk.core.numerics.spec import Granularity, PerBlock, PerChannel, PerTensor, Spec, axis_of, block_size_of
from qsdk.core.planning.plan import Decision, Plan, Turns, casts_of
from qsdk.core.read_files import first_line_of, require_modest_size, require_readable
from qsdk.core.sims.state import SimState

_TUPLES = ("bias_of", "shape")
#: fields that explain a decision and are no part of it
_WORDS = ("reason", "rule", "shape", "tensor_type", "turns")
#: fields that only some decisions have
_RARE = ("computes_in", "turns", "input_block")


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain values for JSON."""
    return {
        "decisions": [_decision_to_json(decision) for decision in plan.decisions.values()],
        "inside": [_decision_to_json(decision) for decision in plan.inside],
    }


def read_plan(data: Mapping[str, Any]) -> Plan:
    """Return the plan that `plan_to_json` wrote."""
    decisions = [_read_decision(entry) for entry in data["decisions"]]
    return Plan({decision.site: decision for decision in decisions}, tuple(map(_read_decision, data["inside"])))


def different_sites(left: Plan, right: Plan) -> list[str]:
    """Return the sites that two plans decide differently, or that only one of them has."""
    names = dict.fromkeys((*left.decisions, *right.decisions))
    return [name for name in names if _facts(left.decisions.get(name)) != _facts(right.decisions.get(name))]


def _facts(decision: Decision | None) -> dict[str, Any] | None:
    return None if decision is None else {name: value for name, value in vars(decision).items() if name not in _WORDS}


def _decision_to_json(decision: Decision) -> dict[str, Any]:
    facts = {name: value for name, value in vars(decision).items() if value or name not in _RARE}
    return {**facts, "spec": None if decision.spec is None else _spec_to_json(decision.spec)}


def _spec_to_json(spec: Spec) -> dict[str, Any]:
    where = {"axis": axis_of(spec.granularity), "block_size": block_size_of(spec.granularity)}
    facts = {name: value for name, value in vars(spec).items() if name != "granularity"}
    scale_dtype = None if spec.scale_dtype is None else spec.scale_dtype.name
    return {**facts, "dtype": spec.dtype.name, "scale_dtype": scale_dtype, **where}


def _read_decision(entry: Mapping[str, Any]) -> Decision:
    # an older file lacks the float type of the tensor, which was float32, islands, what turns, and blocks
    later = {"tensor_type": "float32", "computes_in": "", "turns": None, "input_block": None}
    given = {field.name: entry[field.name] for field in fields(Decision) if field.name not in later}
    given |= {name: entry.get(name, default) for name, default in later.items()}
    for name in _TUPLES:
        given[name] = None if given[name] is None else tuple(given[name])
    given["turns"] = None if given["turns"] is None else Turns(*given["turns"])
    return Decision(**{**given, "spec": None if given["spec"] is None else _read_spec(given["spec"])})


def _read_spec(entry: Mapping[str, Any]) -> Spec:
    # an older file lacks the options that did not exist yet
    given = {field.name: entry[field.name] for field in fields(Spec) if field.name in entry}
    if entry.get("power_of_two"):
        given["scale_bits"] = 1
    axis, size = entry["axis"], entry["block_size"]
    granularity: Granularity = PerTensor()
    if axis is not None:
        granularity = PerChannel(axis) if size is None else PerBlock(axis, size)
    fixed = given["fixed_range"]
    given["fixed_range"] = None if fixed is None else tuple(fixed)
    if given.get("scale_dtype") is not None:
        given["scale_dtype"] = dtype_named(given["scale_dtype"])
    return Spec(**{**given, "dtype": dtype_named(given["dtype"]), "granularity": granularity})


FORMAT = "qsdk.sim"
VERSION = 1
WEIGHTS = "weights.data"  # the part that is too large to be read whole
_MANIFEST, _PLAN, _ENCODINGS = "manifest.json", "plan.json", "encodings.json"
#: writes a part of the file into an open stream
Part = Callable[[IO[bytes]], Any]


@dataclass(frozen=True)
class SimFile:
    """The content of a saved sim.

    Attributes:
        door: the side of the sim, `torch` or `onnx`.
        state: config, plan and encodings.
        facts: further plain values of that side.
        parts: name -> content of the files that that side added, except weights.
        path: of the file.
    """

    door: str
    state: SimState
    facts: Mapping[str, Any]
    parts: Mapping[str, bytes]
    path: Path

    def unpack(self, name: str, target: Path) -> None:
        """Write the content of a part to a file, without reading it into memory."""
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(name) as source, target.open("wb") as file:
                shutil.copyfileobj(source, file, 2**20)
        except (zipfile.BadZipFile, EOFError, KeyError) as error:
            raise FileFormatError(
                f"{name} is missing or damaged in {self.path}; write it again with qsdk.save(sim, path)"
            ) from error


def write_sim(
    path: str | os.PathLike[str], door: str, state: SimState, facts: Mapping[str, Any], parts: Mapping[str, Part]
) -> None:
    """Write the state of a sim and the parts that its side adds, all or nothing."""
    config = None if state.config is None else state.config.to_dict()
    manifest = {"format": FORMAT, "version": VERSION, "door": door, "config": config, "facts": dict(facts)}
    texts = {
        _MANIFEST: json.dumps(manifest, indent=1),
        _PLAN: json.dumps(plan_to_json(state.plan)),
        _ENCODINGS: qsdk_format.dumps(state.own, {"tool": "qsdk"}, casts_of(state.plan)),
    }

    def write(temporary: Path) -> None:
        with zipfile.ZipFile(temporary, "w") as archive:
            for name, text in texts.items():
                archive.writestr(name, text)
            for name, part in parts.items():
                with archive.open(name, "w", force_zip64=True) as stream:
                    part(stream)

    write_atomically(path, write)


def read_sim(path: str | os.PathLike[str]) -> SimFile:
    """Return the sim that `write_sim` wrote."""
    where = os.fspath(path)
    size = require_readable(path, "check the path, or write one with qsdk.save(sim, path)").stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            require_modest_size(archive, size, where)
            contents = {name: archive.read(name) for name in archive.namelist() if name != WEIGHTS}
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError) as error:
        raise FileFormatError(
            f"{where} is truncated or no saved sim ({error}); write it again with qsdk.save(sim, path)"
        ) from error
    manifest = _manifest(contents, where)
    try:
        config = manifest["config"]
        texts = {name: contents.pop(name).decode() for name in (_PLAN, _ENCODINGS)}
        state = SimState(
            None if config is None else QuantConfig.from_dict(config, where=where).of_saved_sim(),
            read_plan(json.loads(texts[_PLAN])),
            dict(qsdk_format.loads(texts[_ENCODINGS], f"{_ENCODINGS} in {where}").encodings),
        )
        return SimFile(str(manifest["door"]), state, dict(manifest["facts"]), contents, Path(path))
    except FileFormatError:
        raise
    except (QsdkError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise FileFormatError(
            f"{where} is damaged ({first_line_of(error)}); write it again with qsdk.save(sim, path)"
        ) from error


def _manifest(contents: dict[str, bytes], where: str) -> Mapping[str, Any]:
    if _MANIFEST not in contents:
        # the tail of a file cut short may be an archive within it
        raise FileFormatError(
            f"{where} is truncated or no saved sim (it has no {_MANIFEST}); write it again with qsdk.save(sim, path), "
            "or, if torch.save wrote a state_dict: sim.model.load_state_dict(torch.load(path))"
        )
    try:
        manifest = json.loads(contents.pop(_MANIFEST))
    except (ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise FileFormatError(f"{where} is no {FORMAT} file; write one with qsdk.save(sim, path)")
    version = manifest.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise FileFormatError(f"{where} has version {version!r}, this qsdk reads up to {VERSION}; update qsdk")
    return manifest
