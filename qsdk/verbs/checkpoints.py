"""From a checkpoint folder to an exported model in one call, and the verbs that improve a sim by their names."""

import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from qsdk.core.aimet_config.load_config import config_or_preset
from qsdk.core.atomic_files import write_bytes
from qsdk.core.config.config import QuantConfig, w8a8
from qsdk.core.errors import ConfigError
from qsdk.core.planning.plan import Plan
from qsdk.core.ranges.estimators import CalibrationMethod
from qsdk.core.report import Report
from qsdk.core.run_options import RunOptions, keywords_of
from qsdk.core.run_options import options as run_options
from qsdk.verbs.bias import correct_bias, reestimate_batch_norm
from qsdk.verbs.blocks import tune_blocks
from qsdk.verbs.calibrate import calibrate
from qsdk.verbs.doors.choose import Sim
from qsdk.verbs.doors.module_sims import quantize_folder
from qsdk.verbs.export import export
from qsdk.verbs.layers import adaround, gptq, seq_mse
from qsdk.verbs.ranges import tune_ranges
from qsdk.verbs.rotate import rotate
from qsdk.verbs.scaling import awq, equalize, smooth_quant
from torch_bridge.compressed.write import processing_files

VERBS: dict[str, Callable[..., Report]] = {
    "rotate": rotate,
    "equalize": equalize,
    "smooth_quant": smooth_quant,
    "awq": awq,
    "reestimate_batch_norm": reestimate_batch_norm,
    "correct_bias": correct_bias,
    "seq_mse": seq_mse,
    "adaround": adaround,
    "gptq": gptq,
    "tune_blocks": tune_blocks,
    "tune_ranges": tune_ranges,
}


def require_verbs(names: Iterable[str], *, given_as: str = "verbs") -> list[str]:
    """Return the names of verbs, with underscores; `given_as` is where the user wrote them."""
    chosen = [name.strip().replace("-", "_") for name in names if name.strip()]
    unknown = [name for name in chosen if name not in VERBS]
    if unknown:
        raise ConfigError(f"{given_as}: {unknown[0]!r} is none of {', '.join(VERBS)}")
    return chosen


def apply_verbs(
    sim: Sim,
    data: Iterable[Any],
    names: Sequence[str],
    *,
    run: Path | None = None,
) -> list[Report]:
    """Apply verbs to a calibrated sim in order, with checkpoints in the folder `run`, and return their reports."""
    result = []
    for number, name in enumerate(names):
        checkpointed = run is not None and "checkpoint" in keywords_of(VERBS[name])
        options = {"checkpoint": run / f"{number}-{name}"} if run is not None and checkpointed else {}
        result.append(VERBS[name](sim, data, **options))
    return result


MODEL = "model.onnx"
RUN = ".qsdk-run"
_MEMORY = 1 << 30  # bytes that kept activations may take
_SHARED = RunOptions.__optional_keys__
_OWN = ("config.json", "generation_config.json")


def quantize_checkpoint(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    config: QuantConfig | str = "w4a16",
    *,
    data: Iterable[Any] | None = None,
    verbs: Sequence[str] = (),
    method: CalibrationMethod = "min_max",
    example: Any = None,
    **options: Any,
) -> Report:
    """Quantize the model in a Hugging Face checkpoint folder and export it, without ever holding all of its weights.

    Weights stay in the checkpoint's files and are read when they are needed. A run that is killed goes on when it is
    started again with the same arguments: solved layers are kept in `out/.qsdk-run` until the model is written.

    Args:
        folder: of the checkpoint: `config.json`, safetensors files and, if there is one, the tokenizer.
        out: folder to write: `model.onnx`, its data file and its encodings, and the tokenizer's files.
        config: a `QuantConfig`, or the name of a preset.
        data: batches to calibrate on, such as `{"input_ids": tensor}`; None if weights alone are quantized.
        verbs: what to do after calibration, in this order, by name: "awq", "gptq", ...
        method: range estimator of activations.
        example: inputs to trace the model with; None for tokens, in any number of rows of any length.
        options: `max_memory` (1 GiB here) and `progress`, see `qsdk.options`; the others are for `qsdk.export`, such as
            `opset=` and `dialect=`. With `format="compressed-tensors"`, `out` is the folder for vLLM and transformers
            instead, with `format="genai"` that for onnxruntime-genai, and with `format="gguf"` the file for llama.cpp
            (`.gguf`), or a folder for it (`config.for_dialect` of the same name before it).

    Returns:
        What `qsdk.export` returns, with `verbs`, `resumed` (from an earlier run) and `seconds` in the summary.

    Raises:
        FileFormatError: the folder has no readable config.
        ConfigError: an unknown verb, no data for activations, no transformers, or an earlier run of other arguments.
        ModelError: the checkpoint is incomplete.
        ExportError: `out` is a file or cannot be written.

    Examples:
        >>> import tempfile, transformers, qsdk
        >>> folder, size = tempfile.mkdtemp(), {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1}
        >>> config = transformers.LlamaConfig(**size, intermediate_size=16, num_attention_heads=2)
        >>> transformers.LlamaForCausalLM(config).save_pretrained(folder)
        >>> qsdk.quantize_checkpoint(folder, folder + "/out", qsdk.weight_only("int4")).summary["resumed"]
        False
    """
    started = time.perf_counter()
    shared: Any = {"max_memory": _MEMORY, **{name: options[name] for name in _SHARED & options.keys()}}
    for_export = {name: value for name, value in options.items() if name not in _SHARED}
    _require_options_of_export(for_export)
    names, chosen = require_verbs(verbs), config_or_preset(config) or w8a8()
    one_file = for_export.get("format") == "gguf" and Path(out).suffix == ".gguf"
    target = Path(out).parent if one_file else Path(out)
    run = target / RUN
    resumed = _begun(run, Path(folder))
    sim = quantize_folder(folder, example, chosen, scratch=run)
    batches = _required(data, sim.plan)
    with run_options(**shared):
        calibrate(sim, batches, method=method)
        apply_verbs(sim, batches, names, run=run)
    if for_export.get("format", "onnx") == "onnx":
        report = export(sim, target / MODEL, **{"external_data": True, **for_export})
        _copy_beside(Path(folder), sim.model, target)
    else:  # a file or a folder, with all that belongs to it
        whole = for_export["format"] == "gguf"
        report = export(sim, Path(out) if one_file else target / "model.gguf" if whole else target, **for_export)
    shutil.rmtree(run, ignore_errors=True)
    facts = {"verbs": ", ".join(names) or "none", "resumed": resumed, "seconds": time.perf_counter() - started}
    return Report(report.title, report.rows, {**report.summary, **facts})


def _require_options_of_export(given: Mapping[str, Any]) -> None:
    known = keywords_of(export)[2:]
    unknown = [name for name in given if name not in known]
    if unknown:  # before hours of work, not after
        takes = ", ".join([*sorted(_SHARED), *known])
        raise TypeError(f"quantize_checkpoint() has no option {unknown[0]!r}; beside its own it takes {takes}")


def _begun(run: Path, folder: Path) -> bool:
    """Make the folder of a run, and return whether an earlier one has left it."""
    out = run.parent
    if out.resolve() == folder.resolve():
        raise ConfigError(f"{out} is the checkpoint itself; name another folder to write")
    resumed = run.is_dir() and any(run.iterdir())
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write into {out}: {error.strerror}; name a folder that can be written") from error
    return resumed


def _required(data: Iterable[Any] | None, plan: Plan) -> Iterable[Any]:
    if data is None and plan.calibrated_sites():
        raise ConfigError(
            "the config quantizes activations, whose ranges come from data: pass data=, or quantize weights alone with "
            'qsdk.weight_only("int4", block_size=32)'
        )
    return [] if data is None else data


def _copy_beside(folder: Path, model: nn.Module, target: Path) -> None:
    """Copy what an application needs beside the model: how text becomes tokens and back, and how to generate."""
    own = [folder / name for name in _OWN if (folder / name).is_file()]
    for source in (*own, *processing_files(model)):
        write_bytes(target / source.name, source.read_bytes())
