"""The verbs `export`, to an ONNX file or a folder for another runtime, and `check_parity`."""

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypedDict, Unpack

from onnx import ModelProto

from onnx_backend.data_passes.overflow import with_overflow
from onnx_backend.data_passes.written_file import Opened, check_written
from onnx_backend.export import Shapes, without_uncalibrated, write_model
from onnx_backend.opening.encodings_of_file import float_facts, merge_provenance
from onnx_backend.passes.integer_cache import has_integer_cache
from onnx_backend.proto.model_io import load
from onnx_backend.proto.opsets import OPSET
from onnx_backend.proto.write_file import StagedModel
from onnx_backend.runtimes.registry import runtime_named
from onnx_backend.sim import OnnxSim
from onnx_backend.single_ops.write import write_single_ops
from qsdk.core.config.for_dialect import AnyDialect, ParityRuntime
from qsdk.core.encodings.provenance import provenance_of
from qsdk.core.errors import ConfigError, ExportError
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.planning.plan import Plan
from qsdk.core.planning.ties import cache_edges
from qsdk.core.report import Report
from qsdk.core.run_options import DataOptions, Run, require_keywords, run_of
from qsdk.core.sims.biases import with_notes
from qsdk.verbs.doors.choose import Door, Sim, door_of
from qsdk.verbs.formats import (
    EXECUTORCH,
    LITERT,
    check_in_litert,
    check_program,
    check_tflite,
    is_program,
    is_tflite,
    write_folder_for_genai,
    write_program_of,
    write_tflite_of,
)
from qsdk.verbs.qdq_files import OnnxSource, opened_qdq
from torch_bridge.compressed.write import MAX_SHARD_BYTES, write_folder
from torch_bridge.gguf.write import write_gguf
from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.adapters import Matrices, active_adapter, adapter_names, matrices_of

_USUAL = {"opset": 21, "dialect": "onnxruntime", "prefer": "speed"}
_OF_ONNX = ("opset", "dialect", "external_data", "shapes", "cache", "adapters", "prefer")
Format = Literal["onnx", "compressed-tensors", "genai", "gguf", "pt2e", "tflite"]


class FileOptions(TypedDict, total=False):
    """What `export` takes that is about the files it writes."""

    external_data: bool | None
    shapes: Shapes | Mapping[str, Shapes] | None
    cache: Literal["float", "integer"] | None
    max_shard_bytes: int | None
    tokenizer: Any
    adapters: Literal["inputs"] | None
    longest: Mapping[str, int] | None


def export(
    sim: Sim,
    path: str | os.PathLike[str],
    *,
    format: Format = "onnx",
    opset: int = 21,
    dialect: AnyDialect = "onnxruntime",
    uncalibrated: Literal["error", "float"] = "error",
    prefer: Literal["speed", "size"] = "speed",
    check: bool = True,
    **options: Unpack[FileOptions],
) -> Report:
    """Write the sim as ONNX with QuantizeLinear/DequantizeLinear, and `model.encodings.json` beside it.

    With `format="compressed-tensors"`, write a folder for vLLM and transformers; what it cannot say is an error. With
    `format="genai"`, write a folder for onnxruntime-genai: the model in the fused forms of that runtime, its config and
    the tokenizer's files. `gguf` is a file for llama.cpp, `pt2e` a program of `torch.export` for ExecuTorch, `tflite` a
    file for LiteRT (TensorFlow Lite) and the chips that read it.

    Args:
        sim: of either side.
        path: of the model; an existing file is replaced only when the new one is complete.
        format: `onnx`; `compressed-tensors` (PyTorch side; `config.for_dialect("compressed-tensors")` before it);
            `pt2e` (PyTorch side; rows with the `max_lsb` of each site of the loaded program); for causal models of
            transformers `genai` (`kv_cache=` in the config) and `gguf` (`for_dialect("gguf")`); `tflite` (either side,
            integers from edge to edge; open axes are a batch of 1 and the example's sizes, or `shapes=`).
        opset: 13 to 25, and as the target reads (the default becomes its newest). Higher ones are for dtypes that need
            them, such as 2-bit integers (25); below 21 there are 8-bit types alone, with scales per tensor or channel.
        dialect: the runtime that is to read the file: `onnxruntime` for what the installed one loads at its default
            level, another target by its name, or a `.toml` file that describes one; `onnx` is the standard's own form
            (from opset 23 on, one operator for a norm, a rotary embedding or an attention without a quantizer inside).
        uncalibrated: `float` leaves sites without an encoding float.
        check: open the file in an ordinary session of ONNX Runtime, in a process of its own, and compare its outputs on
            the example with the sim's, before an existing file is replaced (dialects `onnxruntime`, and `onnx`, which
            cannot fail by it). What that session does differently, or why it was not asked, is `default_session` in
            the summary; the rows have the `kernel` that runs each site, and `slow` names what is computed in floats for
            nothing, with the cure.
        prefer: `speed` stores 4-bit weights beside quantized activations in 8 bits for ONNX Runtime, whose integer
            kernels read no others (the same numbers; `bytes_if_packed` in the summary is the size without it); `size`
            packs them.
        options: of the files. `shapes`: input name -> all of its sizes, or open axis -> its size; None leaves axes open
            (those of dialect `qnn` are the example's). `{"prefill": {...}, "decode": {...}}` writes two files that
            share their weights. `cache`: `integer` takes and gives quantized keys and values as codes; None: floats, or
            as an opened file had it. `external_data`: whether large weights go to a file of their own,
            `<path>.<hash>.data`; None for only where one file cannot hold them (2 GiB). `max_shard_bytes` of a file of
            compressed-tensors; None for 5 GB. `tokenizer`, whose files a folder for genai gets; None: its model's.
            `adapters`: `inputs` makes the LoRA matrices of a peft model inputs, the active adapter's by default, and
            writes `<path>.<name>.onnx_adapter` for each (ONNX Runtime's `RunOptions.add_active_adapter` feeds them);
            in a folder for genai `<name>.onnx_adapter`. `longest`: open axis of a program -> its greatest length, for
            which ExecuTorch plans memory.

    Raises:
        CalibrationError: sites without an encoding, with `uncalibrated="error"`.
        ConfigError: an opset, a dialect or options that cannot be written.
        ExportError: the folder cannot be written, torch cannot trace the model, the format has no field for a site, or
            the file does not load in an ordinary session, ends its process or computes something else in it.

    Examples:
        >>> import tempfile, torch, qsdk
        >>> folder, x = tempfile.mkdtemp(), torch.randn(32, 8)
        >>> sim = qsdk.quantize(torch.nn.Linear(8, 4), x, "w8a8")
        >>> _ = qsdk.calibrate(sim, [x], progress=False)
        >>> qsdk.export(sim, folder + "/model.onnx").summary["bytes"] > 0
        True
    """
    require_keywords(export, options)
    door = door_of(sim)
    plan = without_uncalibrated(sim.plan, sim.ready(), uncalibrated)
    ready = [site for site, is_ready in sim.ready().items() if is_ready and plan.decisions[site].quantized]
    encodings = door.encodings(ready)
    asked = _Asked(
        format, sim, plan, encodings, path, check, {**options, "opset": opset, "dialect": dialect, "prefer": prefer}
    )
    return _writer_of(format, asked).write(asked)


def check_parity(
    sim: Sim,
    model: OnnxSource,
    data: Iterable[Any],
    *,
    runtime: ParityRuntime | None = None,
    **options: Unpack[DataOptions],
) -> Report:
    """Compare an exported model with its sim, site by site, each site fed with the sim's own input.

    Args:
        sim: of either side.
        model: an exported file, or the model in it; of a `.tflite` file LiteRT's reference kernels and XNNPACK run, and
            the codes of the former are compared with those that qsdk predicts, which the summary counts; of a `.pt2`
            file PyTorch runs.
        data: batches.
        runtime: run the file as an application would, with the fusions of that runtime: `onnxruntime` at its default
            level, `openvino`, `qnn` (Qualcomm's HTP, emulated on x86-64) or `iree`; `litert` runs what
            `format="tflite"` makes of it, `executorch` a `.pt2` file in XNNPACK's kernels. The summary names the first
            site that is more than one step off (`first_off`). None runs Q/DQ as written, as the simulation does; where
            the default session may differ from that on this processor, `default_session` in the summary says so.
        options: `forward`, `progress`; see `qsdk.options`.

    Raises:
        ConfigError: the runtime is unknown or not installed.
        ModelError: the runtime cannot compile the model.
        FileFormatError: the model is unreadable, invalid, or its encodings file belongs to another one.
        DataError: data that the model does not take.

    Examples:
        >>> import tempfile, torch, qsdk
        >>> folder, x = tempfile.mkdtemp(), torch.randn(32, 8)
        >>> sim = qsdk.quantize(torch.nn.Linear(8, 4), x, "w8a8")
        >>> _ = qsdk.calibrate(sim, [x], progress=False)
        >>> _ = qsdk.export(sim, folder + "/model.onnx")
        >>> qsdk.check_parity(sim, folder + "/model.onnx", [x], progress=False).summary["weights_max_lsb"]
        0.0
    """
    run = run_of(check_parity, options)
    if is_program(model):
        return check_program(sim, model, data, runtime, run)
    if is_tflite(model):
        return check_tflite(door_of(sim, run), model, data, runtime)
    door, opened = door_of(sim, run), opened_qdq(model)
    if runtime == LITERT:
        return check_in_litert(door, opened, data)
    if runtime == EXECUTORCH:
        raise ConfigError(f"runtime={runtime!r} runs .pt2 files; export(sim, 'model.pt2', format='pt2e') writes one")
    report = door.check_parity(opened, data, runtime)
    if runtime not in (None, "onnxruntime"):
        return report
    return with_overflow(report, opened, in_session=runtime is not None)


def write_onnx(
    sim: Sim, plan: Plan, encodings: Mapping[str, Encoding], path: str | os.PathLike[str], options: Mapping[str, Any]
) -> Report:
    """Write a sim as an ONNX file; `options` are those of `qsdk.export` that are for ONNX."""
    door, cache = door_of(sim, Run(progress=False)), options["cache"]
    if cache not in ("float", "integer", None):
        raise ConfigError(f"cache={cache!r} is unknown; choose 'float', 'integer', or None for that of an opened file")
    adapters = _adapters_of(sim, options.get("adapters"))
    traced = door.traced()
    integers = cache == "integer" or (cache is None and has_integer_cache(traced.model))
    provenance = provenance_of(sim.config, sim.graph)
    opened: dict[str, Opened] = {}
    runtime = runtime_named(options["dialect"])
    checked, newest = options["check"] and runtime.opens, runtime.target.opsets[1]
    said = {}
    if options["opset"] == OPSET > newest:
        said = {"opset": f"{newest}: the newest that {runtime.target.title or runtime.name} reads"}
        options = {**options, "opset": newest}
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
        **{name: value for name, value in options.items() if name not in ("cache", "check", "adapters")},
        rewrite=write_single_ops if runtime.single_ops else None,
        adapters=adapters,
    )
    lacking = {} if isinstance(sim, OnnxSim) else {name: sim.notes[name] for name in sim.notes if _is_output(name)}
    return _with_session(Report(report.title, report.rows, {**report.summary, **lacking, **said}), opened)


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
    """Open a file that is about to be written as a user does, and note what that says."""

    def parity(model: ModelProto, batch: Any) -> Report:
        return door.check_parity(model, [batch], "onnxruntime")

    opened[file.path.name] = check_written(file, lambda: door.run_example(file.model), parity, strict=strict)


def _adapters_of(sim: Sim, wanted: str | None) -> dict[str, Matrices]:
    """Return the matrices of each adapter under the names that they have in the file, those of the active one first."""
    if wanted is None:
        return {}
    if wanted != "inputs":
        raise ConfigError(f"adapters={wanted!r}; choose 'inputs', or leave it out")
    if isinstance(sim, OnnxSim) or not (names := adapter_names(sim.model)):
        raise ConfigError("adapters='inputs': the model has no adapters of peft (LoRA); leave it out")
    active = active_adapter(sim.model)
    return {name: matrices_of(sim.model, name, active) for name in sorted(names, key=lambda name: name != active)}


def _edges_of_cache(sim: Sim, marked: ModelProto) -> list[str]:
    """Return the names of the inputs and outputs that hold keys and values."""
    inputs, outputs = cache_edges(sim.graph)
    names = [sim.graph.tensors[tensor].name for tensor in sim.graph.inputs]
    return [*(names[at] for at in inputs), *(marked.graph.output[at].name for at in outputs)]


@dataclass(frozen=True)
class _Asked:
    """What a format is to be written of, and how; `options` are all that `export` takes about files."""

    format: str
    sim: Sim
    plan: Plan
    encodings: Mapping[str, Encoding]
    path: str | os.PathLike[str]
    check: bool
    options: Mapping[str, Any]

    @property
    def module(self) -> QuantSim:
        """Return the sim, which must be of a module that is as it was quantized."""
        if isinstance(self.sim, OnnxSim):
            raise ExportError(f"{self.format} holds modules of PyTorch, not ONNX models; quantize the nn.Module")
        door_of(self.sim).traced()  # refuses a model that has changed since it was quantized
        return self.sim


@dataclass(frozen=True)
class _Format:
    """A format: its writer, and the options that it takes besides the usual ones."""

    write: Callable[[_Asked], Report]
    takes: tuple[str, ...] = ()


def _writer_of(name: str, asked: _Asked) -> _Format:
    """Return a format by its name; refuse options of another one."""
    if name not in _FORMATS:
        raise ConfigError(
            f"format={name!r}; choose 'onnx', {' or '.join(repr(one) for one in _FORMATS if one != 'onnx')}"
        )
    takes, given = _FORMATS[name].takes, asked.options
    other = [one for one in _OF_ONNX if one not in takes and given.get(one) != _USUAL.get(one)]
    if other:
        raise ConfigError(f"{', '.join(other)}: for ONNX alone; leave it out with format={name!r}")
    for own in ("max_shard_bytes", "tokenizer", "longest"):
        if own not in takes and given.get(own) is not None:
            of = next(one for one in _FORMATS if own in _FORMATS[one].takes)
            raise ConfigError(f"{own}= is for format={of!r}; leave it out with format={name!r}")
    return _FORMATS[name]


def _as_onnx(asked: _Asked) -> Report:
    choices = {name: asked.options.get(name) for name in _OF_ONNX}
    written = write_onnx(asked.sim, asked.plan, asked.encodings, asked.path, {**choices, "check": asked.check})
    return _with_methods(with_notes(written, asked.sim.bias_remarks()), asked.sim)


def _as_tflite(asked: _Asked) -> Report:
    standard = {
        "opset": 21,
        "dialect": "onnx",
        "prefer": "size",
        "cache": "float",
        "shapes": asked.options.get("shapes"),
    }
    with tempfile.TemporaryDirectory(prefix="qsdk-") as folder:
        file = Path(folder) / "model.onnx"
        write_onnx(asked.sim, asked.plan, asked.encodings, file, {**standard, "external_data": None, "check": False})
        model = load(file, whole=True)
        report = write_tflite_of(asked.sim, model, asked.path, check=asked.check)
    return _with_methods(report, asked.sim)


def _as_genai(asked: _Asked) -> Report:
    tokenizer = asked.options.get("tokenizer")
    report = write_folder_for_genai(
        asked.sim,
        asked.plan,
        asked.encodings,
        asked.path,
        tokenizer=tokenizer,
        adapters=_adapters_of(asked.sim, asked.options.get("adapters")),
        check=asked.check,
    )
    return _with_methods(report, asked.sim)


def _as_folder(asked: _Asked) -> Report:
    size = asked.options.get("max_shard_bytes") or MAX_SHARD_BYTES
    return write_folder(asked.module, asked.plan, asked.encodings, asked.path, max_shard_bytes=size)


def _as_gguf(asked: _Asked) -> Report:
    return write_gguf(asked.module, asked.plan, asked.encodings, asked.path)


def _as_program(asked: _Asked) -> Report:
    longest = asked.options.get("longest") or {}
    return write_program_of(asked.module, asked.plan, asked.encodings, asked.path, longest, check=asked.check)


def _with_methods(report: Report, sim: Sim) -> Report:
    return Report(report.title, report.rows, {**report.summary, **sim.methods.facts})


_FORMATS: Mapping[str, _Format] = MappingProxyType(
    {
        "onnx": _Format(_as_onnx, _OF_ONNX),
        "compressed-tensors": _Format(_as_folder, ("max_shard_bytes",)),
        "genai": _Format(_as_genai, ("tokenizer", "adapters")),
        "gguf": _Format(_as_gguf),
        "pt2e": _Format(_as_program, ("longest",)),
        "tflite": _Format(_as_tflite, ("shapes",)),
    }
)
