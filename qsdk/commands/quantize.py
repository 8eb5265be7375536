"""`qsdk quantize`: a float ONNX file, a module or a checkpoint folder in, a quantized file or a folder out."""

import inspect
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from onnx_backend.proto.inputs import ModelInput, inputs_of
from onnx_backend.proto.model_io import load
from onnx_backend.sim import OnnxSim
from qsdk.commands.batches import Batch, FileBatches, batches_of_options, one_sample, source_in_words
from qsdk.commands.data.tokens import random_tokens, token_batches
from qsdk.commands.data.user_functions import load_function, names_function
from qsdk.commands.options import config_of
from qsdk.commands.printing import require_output, show
from qsdk.commands.scores import scorer_of_options
from qsdk.core.config.target import load_target
from qsdk.core.errors import ConfigError
from qsdk.core.report import Report
from qsdk.verbs.analysis.precision import mixed_precision
from qsdk.verbs.calibrate import calibrate
from qsdk.verbs.checkpoints import apply_verbs, quantize_checkpoint, require_verbs
from qsdk.verbs.doors.choose import Sim
from qsdk.verbs.export import export
from qsdk.verbs.quantize import quantize


@dataclass(frozen=True)
class _Opened:
    """The sim of a float model, and its data.

    Attributes:
        sim: not calibrated.
        data: batches as the sim takes them.
        files: the same batches as arrays by input name.
        inputs: of the model.
        taken: makes batches as the sim takes them of arrays by input name.
        arrays: makes arrays of what the sim returns.
    """

    sim: Sim
    data: Iterable[Any]
    files: FileBatches | list[Batch]
    inputs: Sequence[ModelInput]
    taken: Callable[[FileBatches | list[Batch]], Iterable[Any]]
    arrays: Callable[[Any], list[Any]]


def run(options: Namespace) -> int:
    """Quantize, calibrate, improve and export; the report says what was done to each tensor.

    A folder is that of a checkpoint, and what is written is a folder too.
    """
    if Path(options.model).is_dir():
        return quantize_folder(options)
    _require_out(options)
    if not options.data and options.random is None:
        raise ConfigError("give --data with inputs of the model, or --random 1 to try out")
    verbs = require_verbs(options.verbs.split(","), given_as="--verbs")
    if options.mixed_precision and not (options.metric or options.labels):
        raise ConfigError("--mixed-precision needs a metric: --metric FILE.py:function, or --labels for top-1")
    if options.metric_data and not options.mixed_precision:
        raise ConfigError("--metric-data is what --mixed-precision scores on; add that, or leave it out")
    if Path(options.out).exists() and Path(options.model).exists() and Path(options.out).samefile(options.model):
        raise ConfigError(f"{options.out} is the float model, which would be gone; name another file to write")
    opened = _opened(options)
    metric_files = _metric_files(opened, options)  # a path that is wrong is reported before the work
    sim, method = opened.sim, options.method
    calibrate(sim, opened.data, method=method, weight_method=options.weight_method)
    apply_verbs(sim, opened.data, verbs)
    facts: dict[str, Any] = {"calibration": f"{method} on {source_in_words(options, opened.files)}"}
    facts |= {"verbs": ", ".join(verbs)} if verbs else {}
    if options.mixed_precision:
        facts |= _raise_precision(opened, metric_files, options)
    exported = _exported(sim, options)
    coverage = sim.coverage()
    facts["bytes"] = exported.summary["bytes"] if _writes_folder(options) else Path(options.out).stat().st_size
    if options.providers and isinstance(sim, OnnxSim):
        facts |= sim.placement().summary
    show(Report("Quantized", coverage.rows, {**coverage.summary, **facts, **exported.summary}), as_json=options.json)
    return 0 if facts.get("met", True) else 1


def _writes_folder(options: Namespace) -> bool:
    return options.format in ("compressed-tensors", "genai")


def _is_of_onnx(options: Namespace) -> bool:
    return bool(options.format == "onnx")


def _dialect_of(options: Namespace) -> str | None:
    """Return the dialect that the config is made for: a format's own, but for files that have several readers."""
    own = {"onnx": options.dialect, "pt2e": options.dialect, "tflite": options.dialect or "litert"}
    found: str | None = own.get(options.format, options.format)
    return found


def _require_out(options: Namespace) -> None:
    """Refuse an output that cannot be written, before the work."""
    if options.format not in ("onnx", "tflite") and not names_function(options.model):
        raise ConfigError(f"--format {options.format} is for a PyTorch module, FILE.py:function; an ONNX file has none")
    if options.longest and options.format != "pt2e":
        raise ConfigError(f"--longest is for --format pt2e; leave it out with --format {options.format}")
    if not _writes_folder(options):
        require_output(options.out)
    elif Path(options.out).is_file():
        raise ConfigError(f"cannot write: {options.out} is a file, and --format {options.format} writes a folder")


def _exported(sim: Sim, options: Namespace) -> Report:
    if options.format == "tflite":
        return export(sim, options.out, format="tflite", shapes=dict(options.shape) if options.shape else None)
    if not _is_of_onnx(options):
        longest = dict(options.longest) or None
        return export(sim, options.out, format=options.format, prefer=options.prefer, longest=longest)
    shapes = dict(options.shape) if _has_fixed_sizes(options.dialect) and options.shape else None
    form: dict[str, Any] = {"opset": options.opset, "prefer": options.prefer}
    return export(sim, options.out, dialect=options.dialect or "onnxruntime", shapes=shapes, **form)


def _has_fixed_sizes(dialect: str | None) -> bool:
    """Return whether files of a dialect (or format of `--format`) have one size of every input."""
    return dialect is not None and load_target(dialect).fixed_sizes


def _opened(options: Namespace) -> _Opened:
    """Open the float model, of either side, with its data."""
    dialect = _dialect_of(options)
    of_preset = {"block_size": options.block_size, "kv_cache": options.kv_cache}
    config = config_of(options.config, options.override, options.skip, **of_preset)
    if dialect:
        config = config.for_dialect(dialect)
    fixed = {name: _value(name, text) for name, text in options.input}
    more: dict[str, Any] = {"inputs": fixed, "providers": options.providers}
    if not names_function(options.model):
        inputs = [result for result in inputs_of(load(options.model)) if result.name not in fixed]
        files = _files(options, inputs)
        example = one_sample(files) if _has_fixed_sizes(dialect) else files  # the example fixes the sizes of that file
        sim: Sim = quantize(options.model, next(iter(example), None), config, **more)
        return _Opened(sim, files, files, inputs, lambda files: files, list)
    made = made_module(options.model)
    files = _files(options, made.inputs)
    taken = partial(TensorBatches, made=made)
    first: Any = next(iter(taken(files)), None)
    sim = quantize(made.module, first, config, **more)
    return _Opened(sim, taken(files), files, made.inputs, taken, arrays_of)


def _files(options: Namespace, inputs: Any) -> FileBatches | list[Batch]:
    if not options.data:
        print(
            "qsdk: calibrated on random inputs: the file runs and has its final size and speed, its accuracy means "
            "nothing; give --data for ranges of real data",
            file=sys.stderr,
        )
    return batches_of_options(options, inputs)


def _metric_files(opened: _Opened, options: Namespace) -> FileBatches | list[Batch]:
    """Return the data that the metric is for: all of `--metric-data`, or else the calibration data."""
    if not options.metric_data:
        return opened.files
    apart = {"data": options.metric_data, "max_samples": None}
    return batches_of_options(Namespace(**{**vars(options), **apart}), opened.inputs)


def _raise_precision(opened: _Opened, files: FileBatches | list[Batch], options: Namespace) -> dict[str, Any]:
    """Raise sites until the metric is within the budget; return the facts of it."""
    scorer = scorer_of_options(options, files)
    if scorer is None:
        return {}
    data = opened.taken(files)

    def metric(sim: Any) -> float:
        return scorer.main(lambda batch: opened.arrays(sim.run(batch)), data)

    report = mixed_precision(opened.sim, opened.data, metric, max_drop=options.max_drop)
    if not report.summary["met"]:
        print(f"qsdk: no precision keeps the drop within {options.max_drop}; see --verbs and --config", file=sys.stderr)
    chosen = [row for row in report.rows if row["chosen"]]
    facts = {name: report.summary[name] for name in ("reference", "met", "evaluations", "raised")}
    facts |= {"metric_data": ", ".join(options.metric_data)} if options.metric_data else {}
    return {**facts, **{name: row[name] for row in chosen for name in ("metric", "drop")}}


def _value(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise ConfigError(f"--input {name}={text}: give a number, true or false, or a list in brackets") from None


_SCORES = ("mixed_precision", "metric", "labels", "metric_data")
_PICTURES = ("image_size", "crop", "resize", "mean", "std", "layout", "preprocess")
_NOT_HERE = (*_SCORES, *_PICTURES, "input", "shape", "longest", "providers", "weight_method")


def quantize_folder(options: Namespace) -> int:
    """Quantize, calibrate, improve and export the model of a checkpoint folder."""
    given = [name for name in _NOT_HERE if getattr(options, name, None)]
    if given:
        raise ConfigError(
            f"--{given[0].replace('_', '-')} is not for a checkpoint folder; leave it out, or write a function that "
            "reads the model: FILE.py:function"
        )
    if options.format == "pt2e":
        raise ConfigError("--format pt2e is for a PyTorch module; write a function that reads it, FILE.py:function")
    more_of_preset = {"block_size": options.block_size, "kv_cache": options.kv_cache}
    config = config_of(options.config, options.override, options.skip, **more_of_preset)
    dialect = _dialect_of(options)
    if dialect:
        config = config.for_dialect(dialect)
    verbs = require_verbs(options.verbs.split(","), given_as="--verbs")
    data: Iterable[Any] | None = None
    if options.data:
        data = token_batches(options.model, options.data, length=options.length, most=options.max_samples)
    elif options.random is None:
        if config.activation.is_quantized or verbs:
            what = f"--verbs {','.join(verbs)}" if verbs else f"--config {options.config} quantizes activations, and"
            raise ConfigError(
                f"{what} needs data: give --data with text or token ids, or --random 1 to try out; weights alone "
                "(--config weight_only --block-size 32) need none"
            )
    else:
        print(
            "qsdk: calibrated on random tokens: the file runs and has its final size and speed, its accuracy means "
            "nothing; give --data with text for ranges of real data",
            file=sys.stderr,
        )
        data = random_tokens(options.model, options.random, length=options.length, seed=options.seed)
    report = quantize_checkpoint(
        options.model,
        options.out,
        config,
        data=data,
        verbs=verbs,
        method=options.method,
        opset=options.opset,
        prefer=options.prefer,
        dialect=options.dialect or "onnxruntime",
        format=options.format,
    )
    show(Report("Quantized", report.rows, report.summary), as_json=options.json)
    return 0


# --- A PyTorch module for the command line, made by a function of the user, and batches for it ------------------------


@dataclass(frozen=True)
class MadeModule:
    """A module, and what its inputs are.

    Attributes:
        module: as the user's function returned it.
        inputs: by the names of the arguments of its forward; without a shape where there is no example.
        keywords: whether the example is a mapping.
    """

    module: nn.Module
    inputs: Sequence[ModelInput]
    keywords: bool


@dataclass(frozen=True)
class TensorBatches:
    """Batches of arrays as a module takes them, made on demand."""

    batches: Iterable[Mapping[str, npt.NDArray[Any]]]
    made: MadeModule

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            tensors = {item.name: _tensor(batch[item.name], item.dtype) for item in self.made.inputs}
            yield tensors if self.made.keywords else tuple(tensors.values())


def made_module(text: str) -> MadeModule:
    """Call a function without arguments that returns a module, or `(module, example)`."""
    try:
        made = load_function(text, "the model")()
    except (ImportError, OSError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{text} raises {type(error).__name__}: {error}; it is called without arguments") from error
    module, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{text} returns {type(module).__name__}; return an nn.Module, or (module, example)")
    if isinstance(example, Mapping):
        return MadeModule(module.eval(), [_input(name, value) for name, value in example.items()], True)
    names = list(inspect.signature(module.forward).parameters) or ["input"]
    if example is None:
        return MadeModule(module.eval(), [ModelInput(names[0], np.dtype(np.float32), None)], False)
    values = example if isinstance(example, tuple | list) else (example,)
    names += [f"input{place}" for place in range(len(names), len(values))]
    return MadeModule(module.eval(), [_input(*pair) for pair in zip(names, values, strict=False)], False)


def arrays_of(outputs: Any) -> list[npt.NDArray[Any]]:
    """Return the tensors that a module returned, in order, as arrays."""
    return [leaf.detach().float().cpu().numpy() for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


def _input(name: str, value: Any) -> ModelInput:
    """Return an input with an open first axis: the batch."""
    tensor = torch.as_tensor(value)
    dtype = np.dtype(np.float32) if tensor.is_floating_point() else tensor.numpy().dtype
    return ModelInput(name, dtype, ("", *tensor.shape[1:]) if tensor.ndim else ())


def _tensor(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> Tensor:
    wanted = array.dtype if array.dtype.kind != dtype.kind else dtype
    return torch.from_numpy(np.array(array, wanted))  # a copy: an array in a mapped file cannot be written
