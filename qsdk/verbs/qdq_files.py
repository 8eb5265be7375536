"""Q/DQ files: opened and checked against the rules, validated, their encodings listed."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict
from glob import escape
from pathlib import Path

import onnxruntime as ort
from onnx import ModelProto

from onnx_backend.opening.encodings_of_file import stored_encodings
from onnx_backend.opening.normalize_qdq import normalize_qdq
from onnx_backend.passes.canonicalize import densify
from onnx_backend.profiling.speed import slow_parts
from onnx_backend.proto import model_io
from onnx_backend.proto.companion import HASH_KEY, encodings_path, require_companion
from onnx_backend.proto.external_data import require_no_external_data
from onnx_backend.proto.nodes import metadata
from onnx_backend.qdq import read
from onnx_backend.runtime.providers import ProviderList, chosen_providers
from onnx_backend.runtime.session import opened_file
from onnx_backend.runtimes.registry import runtime_named
from onnx_backend.runtimes.validate import validate as validate_model
from onnx_backend.validation.rules import require_valid
from onnx_backend.workarounds.onnxruntime_barriers import needed_options
from qsdk.core.config.for_dialect import AnyDialect
from qsdk.core.errors import FileFormatError
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.report import Report

OnnxSource = str | os.PathLike[str] | ModelProto


def validate(model: OnnxSource, *, dialect: AnyDialect | None = None) -> Report:
    """Check a Q/DQ model against the rules that ONNX's own checkers miss: one row per finding, with the remedy.

    For ONNX Runtime, notes name what a session computes in floats for nothing (rule `speed`, files up to 1 GiB).

    Args:
        model: a path or a model.
        dialect: also list what this runtime refuses, misreads or computes otherwise, by its name or the `.toml` file
            that describes it; None for ONNX Runtime.

    Raises:
        ConfigError: there is no such dialect.
        FileFormatError: the file cannot be read as ONNX.

    Examples:
        >>> import tempfile, torch, qsdk
        >>> folder, x = tempfile.mkdtemp(), torch.randn(64, 8)
        >>> _ = qsdk.calibrate(sim := qsdk.quantize(torch.nn.Linear(8, 4), x), [x], progress=False)
        >>> _ = qsdk.export(sim, folder + "/model.onnx")
        >>> qsdk.validate(folder + "/model.onnx").summary
        {'errors': 0, 'warnings': 0}
    """
    return validated(model_io.load(model, whole=True), dialect)


def validated(model: ModelProto, dialect: AnyDialect | None) -> Report:
    """Validate an opened model by all rules, `speed` included, for which an ordinary session is opened."""
    report = validate_model(model, dialect=dialect)
    if report.summary["errors"] or not runtime_named(dialect or "onnxruntime").simulates:
        return report
    return Report(report.title, [*report.rows, *(asdict(one.finding()) for one in slow_parts(model))], report.summary)


def session(
    path: str | os.PathLike[str], *, threads: int | None = None, providers: ProviderList | None = None
) -> ort.InferenceSession:
    """Open a file in ONNX Runtime with the settings that it says it needs.

    Files of `qsdk.export` are right in an ordinary session, but for those whose weights alone are quantized with
    `compute="float32"`: the runtime would round their activations to 8 bits, and the file notes the option against it.

    Args:
        path: of an ONNX file.
        threads: that an op may use; None for one per core.
        providers: ONNX Runtime's own list, best first; None for the CPU.

    Raises:
        ConfigError: a provider that is not there.
        FileFormatError: the file cannot be read, or ONNX Runtime cannot load it.

    Examples:
        >>> import tempfile, torch, qsdk
        >>> folder, x = tempfile.mkdtemp(), torch.randn(64, 8)
        >>> _ = qsdk.calibrate(sim := qsdk.quantize(torch.nn.Linear(8, 4), x), [x], progress=False)
        >>> _ = qsdk.export(sim, folder + "/model.onnx")
        >>> (y,) = qsdk.session(folder + "/model.onnx", threads=1).run(None, {"input": x.numpy()})
        >>> y.shape
        (64, 4)
    """
    entries = needed_options(model_io.load(path))
    return opened_file(path, entries, threads=threads, providers=chosen_providers(providers))


def inspect(model: OnnxSource) -> Report:
    """Return the encodings of a Q/DQ model, read from its own nodes."""
    rows = [
        {
            "site": site,
            "dtype": encoding.dtype.name,
            "scales": encoding.scale.size,
            "smallest scale": float(encoding.scale.min()),
            "largest scale": float(encoding.scale.max()),
            "zero point": int(encoding.zero_point[0]) if encoding.zero_point.size == 1 else "",
        }
        for site, encoding in read.read(opened_qdq(model)).items()
    ]
    return Report("Encodings", rows, {"sites": len(rows)})


def scales_beside(path: str | os.PathLike[str], text: str) -> Mapping[str, Encoding]:
    """Return the encodings of the model that an encodings file was written with, from the model's nodes.

    Raises:
        FileFormatError: that model is not beside the file, or the file has changed since.
    """
    file, digest = Path(path), hashlib.sha256(text.encode()).hexdigest()
    stem = file.name.removesuffix(encodings_path(".onnx").name.removeprefix(".onnx"))
    parts = sorted(file.parent.glob(f"{escape(stem.removesuffix('.shared'))}.*.onnx"))
    for model in (file.with_name(f"{stem}.onnx"), *parts):
        if model.is_file() and metadata(model_io.load(model)).get(HASH_KEY) == digest:
            return stored_encodings(opened_qdq(model)).encodings
    raise FileFormatError(
        f"{path} takes scales of blocks from the model that it was written with, and {stem}.onnx beside it is missing "
        "or another one: put both into one folder, as they were written, or give the model in place of this file; "
        "qsdk.save_encodings(model, path) writes all scales into a file of their own"
    )


def opened_qdq(source: OnnxSource) -> ModelProto:
    """Return a Q/DQ model that was checked against its companion and the rules of `validate`."""
    return normalize_qdq(checked_qdq(model_io.load(source), source))


def checked_qdq(model: ModelProto, source: OnnxSource) -> ModelProto:
    """Return a loaded Q/DQ model, which is changed, after the checks of `opened_qdq`."""
    require_no_external_data(model)
    if not isinstance(source, ModelProto):
        require_companion(model, source)
    densify(model.graph)
    require_valid(model, model_io.source_name(source))
    return model
