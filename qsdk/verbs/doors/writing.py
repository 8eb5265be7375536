"""The two ways to write a sim: an ONNX file, and a folder in the format compressed-tensors."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from onnx import ModelProto

from onnx_backend.data_passes.written_file import Opened, check_written
from onnx_backend.export import write_model
from onnx_backend.opening.plan_of_qdq import merge_provenance
from onnx_backend.opening.stored_encodings import float_facts
from onnx_backend.passes.integer_cache import has_integer_cache
from onnx_backend.proto.write_file import StagedModel
from onnx_backend.runtimes.registry import runtime_named
from onnx_backend.sim import OnnxSim
from qsdk.core.encodings.provenance import provenance_of
from qsdk.core.errors import ConfigError, ExportError
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.planning.plan import Plan
from qsdk.core.planning.ties import cache_edges
from qsdk.core.report import Report
from qsdk.verbs.doors.choose import Door, Sim, door_of
from torch_bridge.compressed.write import MAX_SHARD_BYTES, write_folder


def write_onnx(
    sim: Sim, plan: Plan, encodings: Mapping[str, Encoding], path: str | os.PathLike[str], options: Mapping[str, Any]
) -> Report:
    """Write a sim as an ONNX file; `options` are those of `qsdk.export` that are for ONNX.

    Raises:
        ConfigError: an unknown form of the cache, or all that `write_model` raises.
    """
    door, cache = door_of(sim), options["cache"]
    if cache not in ("float", "integer", None):
        raise ConfigError(f"cache={cache!r} is unknown; choose 'float', 'integer', or None for that of an opened file")
    traced = door.traced()
    integers = cache == "integer" or (cache is None and has_integer_cache(traced.model))
    provenance = provenance_of(sim.config, sim.graph)
    opened: dict[str, Opened] = {}
    runtime = runtime_named(options["dialect"])
    checked = options["check"] and runtime.opens
    report = write_model(
        traced.model,
        plan,
        encodings,
        path,
        provenance=provenance if sim.config is not None else merge_provenance(provenance, traced.model),
        tensors={facts.site: facts.name for facts in float_facts(sim.graph, sim.plan)},
        weights=traced.weights,
        in_use=door.files_read(),
        integer_edges=_edges_of_cache(sim, traced.model) if integers else None,
        check=partial(_check, door, opened, runtime.simulates) if checked else None,
        **{name: value for name, value in options.items() if name not in ("cache", "check")},
    )
    lacking = {} if isinstance(sim, OnnxSim) else {name: sim.notes[name] for name in sim.notes if _is_output(name)}
    return _with_session(Report(report.title, report.rows, {**report.summary, **lacking}), opened)


def _with_session(report: Report, opened: Mapping[str, Opened]) -> Report:
    """Return the report on an export with what an ordinary session of each file shows, the first one's kernels."""
    said = [f"{one.said} ({name})" if len(opened) > 1 else one.said for name, one in opened.items() if one.said]
    kernels = next((one.kernels for one in opened.values() if one.kernels), {})
    rows = [{**row, "kernel": kernels.get(row["site"], "")} for row in report.rows] if kernels else report.rows
    slow = list(dict.fromkeys(text for one in opened.values() for text in one.slow))
    facts = {"default_session": "; ".join(said), "slow": slow}
    return Report(report.title, rows, {**report.summary, **{name: fact for name, fact in facts.items() if fact}})


def _is_output(note: str) -> bool:
    """Return whether a note is about an output of the module that the file lacks."""
    return note.startswith("output ")


def _check(door: Door, opened: dict[str, Opened], strict: bool, file: StagedModel) -> None:
    """Open a file that is about to be written as a user does, and note what that says.

    Raises:
        ExportError: it is wrong there.
    """

    def parity(model: ModelProto, batch: Any) -> Report:
        return door.check_parity(model, [batch], None, False, "onnxruntime")

    opened[file.path.name] = check_written(file, lambda: door.run_example(file.model), parity, strict=strict)


def _edges_of_cache(sim: Sim, marked: ModelProto) -> list[str]:
    """Return the names of the inputs and outputs that hold keys and values."""
    inputs, outputs = cache_edges(sim.graph)
    names = [sim.graph.tensors[tensor].name for tensor in sim.graph.inputs]
    return [*(names[at] for at in inputs), *(marked.graph.output[at].name for at in outputs)]


def write_compressed(
    sim: Sim,
    plan: Plan,
    encodings: Mapping[str, Encoding],
    path: str | os.PathLike[str],
    format: str,
    max_shard_bytes: int | None,
    not_for_it: Sequence[str],
) -> Report:
    """Write a sim of an nn.Module as a folder in the format compressed-tensors.

    Args:
        sim: of the user.
        plan: in force.
        encodings: of its quantized sites.
        path: of the folder.
        format: what the user asked for.
        max_shard_bytes: of a file; None for 5 GB.
        not_for_it: options that the user gave, and that are for ONNX alone.

    Raises:
        ConfigError: another format, or options of ONNX.
        ExportError: a sim of an ONNX model, or all that `write_folder` raises.
    """
    if format != "compressed-tensors":
        raise ConfigError(f"format={format!r}; choose 'onnx' or 'compressed-tensors'")
    if not_for_it:
        raise ConfigError(f"{', '.join(not_for_it)}: for ONNX alone; leave it out with format='compressed-tensors'")
    if isinstance(sim, OnnxSim):
        raise ExportError("compressed-tensors holds modules of PyTorch, not ONNX models; quantize the nn.Module")
    door_of(sim).traced()  # refuses a model that has changed since it was quantized
    return write_folder(sim, plan, encodings, path, max_shard_bytes=max_shard_bytes or MAX_SHARD_BYTES)
