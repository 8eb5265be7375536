"""Saved sims: one zip file with a manifest, the plan, the encodings and what each side adds. It contains no code."""

import json
import os
import shutil
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from qsdk.core.atomic_files import write_atomically
from qsdk.core.config.config import QuantConfig
from qsdk.core.encodings import qsdk_format
from qsdk.core.errors import FileFormatError, QsdkError
from qsdk.core.planning.plan import casts_of
from qsdk.core.read_files import first_line_of, require_modest_size, require_readable
from qsdk.core.sims.plan_json import plan_to_json, read_plan
from qsdk.core.sims.state import SimState

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
        """Write the content of a part to a file, without reading it into memory.

        Raises:
            FileFormatError: the part is missing or damaged.
        """
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
    """Write the state of a sim and the parts that its side adds, all or nothing.

    Raises:
        ConfigError: the config holds patterns, which are Python.
        ExportError: the folder cannot be written; the target is left as it was.
    """
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
    """Return the sim that `write_sim` wrote.

    Raises:
        FileFormatError: the file is missing, truncated, foreign or of a later version.
    """
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
