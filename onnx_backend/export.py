"""Export: a sim to an ONNX file with its encodings beside it. The model file is written last and commits the rest."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import onnx
from onnx import ModelProto

from onnx_backend import model as onnx_model
from onnx_backend.qdq import insert
from onnx_backend.runtime_table import Dialect
from onnx_backend.skeleton import checkable
from qsdk.core import encodings_file
from qsdk.core.encoding import Encoding
from qsdk.core.errors import CalibrationError, ConfigError, ExportError, FileFormatError
from qsdk.core.files import write_with_companions
from qsdk.core.planning.plan import Plan, casts_of
from qsdk.core.report import Report

ENCODINGS_KEY, HASH_KEY = "qsdk.encodings", "qsdk.encodings.sha256"
_OPSETS = range(21, 26)


def encodings_path(path: str | os.PathLike[str]) -> Path:
    """Where the encodings of a model file stand: `model.onnx` -> `model.encodings.json`."""
    return Path(path).with_suffix(".encodings.json")


def write_model(
    marked: ModelProto,
    plan: Plan,
    encodings: Mapping[str, Encoding],
    path: str | os.PathLike[str],
    *,
    opset: int,
    dialect: Dialect,
    provenance: Mapping[str, Any],
) -> Report:
    """Lower a marked model, check it and write it with its encodings; nothing is ever half-written.

    Raises:
        ConfigError: an opset or dialect that cannot be written.
        ExportError: the folder cannot be written, or the lowered model is invalid.
    """
    if opset not in _OPSETS:
        raise ConfigError(f"opset {opset} cannot be written; choose one of {_OPSETS[0]} to {_OPSETS[-1]}")
    if dialect not in ("onnxruntime", "onnx"):
        raise ConfigError(f'dialect={dialect!r} is unknown; choose "onnxruntime" or "onnx"')
    lowered, rows = insert(marked, plan, encodings, dialect=dialect)
    lowered = onnx_model.at_opset(lowered, opset)
    text = encodings_file.dumps(encodings, provenance, casts_of(plan))
    _set_properties(lowered, {ENCODINGS_KEY: text, HASH_KEY: hashlib.sha256(text.encode()).hexdigest()})
    try:
        onnx.checker.check_model(checkable(lowered), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportError(f"the lowered model is invalid, which is a defect of qsdk: {error}") from error
    companion = encodings_path(path)
    write_with_companions(path, onnx_model.serialized(lowered), {companion: text})
    saved = sum(int(row["zero_point_bytes_saved"]) for row in rows)
    return Report("Export", rows, {"zero_point_bytes_saved": saved, "paths": [str(path), str(companion)]})


def _set_properties(model: ModelProto, properties: Mapping[str, str]) -> None:
    """Write properties in place of those that an opened file brought along."""
    kept = [entry for entry in model.metadata_props if entry.key not in properties]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    for key, value in properties.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value


def require_companion(model: ModelProto, path: str | os.PathLike[str]) -> None:
    """Refuse a model whose encodings file beside it is another one's; a missing file is no error.

    Raises:
        FileFormatError: the hashes differ.
    """
    said = {entry.key: entry.value for entry in model.metadata_props}.get(HASH_KEY)
    companion = encodings_path(path)
    if said is None or not companion.exists():
        return
    if hashlib.sha256(companion.read_bytes()).hexdigest() != said:
        raise FileFormatError(
            f"{companion} does not belong to {path}: an export was interrupted or one file was replaced; export again, "
            "or delete the encodings file (the model holds its own copy)"
        )


def without_uncalibrated(plan: Plan, ready: Mapping[str, bool], uncalibrated: Literal["error", "float"]) -> Plan:
    """Leave sites without an encoding float, or refuse.

    Raises:
        CalibrationError: lists the sites, with `uncalibrated="error"`.
    """
    if uncalibrated not in ("error", "float"):
        raise ConfigError(f'uncalibrated={uncalibrated!r} is unknown; choose "error" or "float"')
    missing = [site for site, is_ready in ready.items() if not is_ready]
    if missing and uncalibrated == "error":
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise CalibrationError(
            f"these sites have no encoding: {shown}; call qsdk.calibrate(sim, batches), or export with "
            'uncalibrated="float"'
        )
    kept = {
        site: replace(decision, spec=None, reason="not calibrated") if site in missing else decision
        for site, decision in plan.decisions.items()
    }
    return Plan(kept, plan.inside)
