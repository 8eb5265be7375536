"""The verbs from `quantize` to `to_integer`."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

from onnx import ModelProto
from torch import nn

from onnx_backend.data_passes.overflow import with_overflow
from onnx_backend.export import Shapes, without_uncalibrated
from onnx_backend.integer.files import write_integer
from onnx_backend.integer.firmware.files import require_firmware_path
from onnx_backend.opening.from_float import with_fixed_inputs
from onnx_backend.proto import graph_queries, model_io
from onnx_backend.qdq.fast_forms import with_pairs
from onnx_backend.qdq.narrow_regions import has_narrow_sites
from onnx_backend.runtime.providers import ProviderList, chosen_providers
from onnx_backend.sim import OnnxSim
from onnx_backend.sim_with_encodings import open_as_written, open_with_config
from qsdk.algorithms.ranks import all_gather
from qsdk.core.aimet_config.load_config import config_or_preset
from qsdk.core.config.config import QuantConfig, w8a8
from qsdk.core.config.for_dialect import Dialect, RuntimeName
from qsdk.core.errors import ConfigError
from qsdk.core.numerics.fixed_point import Rounding
from qsdk.core.ranges.estimators import PERCENTILE, CalibrationMethod
from qsdk.core.report import Report
from qsdk.core.run_options import DataOptions, ProgressOptions, require_keywords, run_of
from qsdk.core.sims.biases import with_notes, without_shifts
from qsdk.verbs.doors.choose import Sim, door_of
from qsdk.verbs.doors.module_sims import quantize_folder, quantize_module
from qsdk.verbs.doors.user_data import first_batches
from qsdk.verbs.doors.writing import write_compressed, write_onnx
from qsdk.verbs.qdq_files import OnnxSource, checked_qdq, opened_qdq
from torch_bridge.sim import QuantSim

_ONNX = (str, os.PathLike, ModelProto)


@overload
def quantize(
    model: nn.Module,
    example: Any,
    config: QuantConfig | str | None = None,
    *,
    dynamic_shapes: Any = None,
    in_place: bool = False,
    fold_batch_norm: bool = True,
) -> QuantSim: ...
@overload
def quantize(
    model: OnnxSource,
    example: Any = None,
    config: QuantConfig | str | None = None,
    *,
    in_place: bool = False,
    fold_batch_norm: bool = True,
    inputs: Mapping[str, Any] | None = None,
    providers: ProviderList | None = None,
) -> OnnxSim: ...
def quantize(
    model: nn.Module | OnnxSource,
    example: Any = None,
    config: QuantConfig | str | None = None,
    *,
    dynamic_shapes: Any = None,
    in_place: bool = False,
    fold_batch_norm: bool = True,
    inputs: Mapping[str, Any] | None = None,
    providers: ProviderList | None = None,
) -> Sim:
    """Return a sim of an nn.Module (PyTorch side), or of a float ONNX file or model (ONNX side).

    Args:
        model: an nn.Module (copied, and left bit-identical), an ONNX path or an onnx model, or the folder of a Hugging
            Face checkpoint, whose weights stay in their files.
        example: inputs to trace the model with: a tensor, a tuple of arguments or a mapping of keywords. None will do
            for a text model's folder and on the ONNX side, where an old opset is converted and compared on them.
        config: a `QuantConfig`, or the name of a preset such as "w4a8". None for `w8a8()`; a Q/DQ ONNX model is then
            opened with its own encodings. Any other applies to the tensors that are still float in it.
        dynamic_shapes: which axes of the inputs may have other lengths in the exported file than in the example, by
            argument name as in `{"ids": {0: "batch", 1: "sequence"}}`, or as a tuple in the order of the arguments
            (PyTorch side). None makes the batch axis dynamic if possible; `{}` makes no axis dynamic.
        in_place: wrap the module itself, for models too large to copy.
        fold_batch_norm: fold BatchNorms into layers, except those that a rule names. False for training from scratch.
        inputs: name -> value of the inputs of a float ONNX model that are always the same, such as a sample rate. They
            become constants, also in the exported file, and an If that they decide is replaced by its branch.
        providers: ONNX Runtime's own list, best first: names such as "CUDAExecutionProvider", or (name, options)
            tuples. Nodes that they do not take fall back to the CPU, and `sim.placement()` lists them. None for the
            CPU (ONNX side). A module runs on the device it is on.

    Raises:
        ModelError: the model cannot be quantized as it is.
        ConfigError: a rule matches nothing, `dynamic_shapes` does not fit the example, or `inputs` not the model; a
            provider is not installed (lists those that are), does not start, or is given for a module.
        ExportError: torch cannot trace the model, or not with the axes that `dynamic_shapes` names.

    Examples:
        >>> import torch, qsdk
        >>> sim = qsdk.quantize(torch.nn.Linear(4, 2), torch.randn(2, 4), qsdk.w8a8())
        >>> sim.plan.decisions["self:weight"].spec.dtype
        int8
    """
    config = config_or_preset(config)
    folder = isinstance(model, str | os.PathLike) and Path(model).is_dir()
    if not folder and isinstance(model, (*_ONNX, bytes)):
        if dynamic_shapes is not None:
            raise ConfigError("dynamic_shapes= is for an nn.Module; an ONNX model says itself which axes are dynamic")
        chosen = chosen_providers(providers)  # first: opening a model may take minutes
        sim = _open_onnx(model, example, config, fold_batch_norm=fold_batch_norm, inputs=inputs)
        sim.run_on(chosen)
        return sim
    _require_no_providers(providers)
    _require_no_inputs(inputs, "a module is traced with its example, which holds them")
    return _quantize_module(model, example, config or w8a8(), in_place, dynamic_shapes, fold_batch_norm)


def _quantize_module(
    model: Any, example: Any, config: QuantConfig, in_place: bool, dynamic_shapes: Any, fold_batch_norm: bool
) -> QuantSim:
    """Return the sim of a module, or of the model in a checkpoint folder."""
    options: dict[str, Any] = {"dynamic_shapes": dynamic_shapes, "fold_batch_norm": fold_batch_norm}
    if isinstance(model, str | os.PathLike):
        return quantize_folder(model, example, config, **options)
    return quantize_module(model, example, config, in_place=in_place, **options)


def _open_onnx(
    source: OnnxSource,
    example: Any,
    config: QuantConfig | None,
    *,
    fold_batch_norm: bool,
    inputs: Mapping[str, Any] | None,
) -> OnnxSim:
    """Return the sim of an ONNX model, which is loaded once."""
    model = with_pairs(model_io.load(source))
    if config is None and (graph_queries.is_quantized(model) or has_narrow_sites(model)):
        _require_no_inputs(inputs, "the file has encodings of its own already")
        return open_as_written(checked_qdq(model, source))
    if inputs:
        model = with_fixed_inputs(model, inputs)
    return open_with_config(model, source, config or w8a8(), example, fold_batch_norm=fold_batch_norm)


def _require_no_inputs(inputs: Mapping[str, Any] | None, why: str) -> None:
    if inputs:
        raise ConfigError(f"inputs= is for a float ONNX model: {why}; leave it out")


def _require_no_providers(providers: ProviderList | None) -> None:
    if providers is not None:
        raise ConfigError(
            "providers= are ONNX Runtime's, for an ONNX file; a module runs where it is: move it with model.to(device)"
        )


def calibrate(
    sim: Sim,
    data: Iterable[Any],
    *,
    method: CalibrationMethod = "min_max",
    weight_method: CalibrationMethod | None = None,
    percentile: float = PERCENTILE,
    max_batches: int | None = None,
    **options: Unpack[DataOptions],
) -> Report:
    """Find an encoding for every site in one pass over the data.

    Under `torchrun` every rank calls this with data of its own, and gets the encodings of all data together
    (`moving_average` depends on an order: there it is the mean of the ranks' averages).

    Shifts of biases by `correct_bias` or a layer solver are undone where a weight gets another encoding.

    Args:
        sim: of either side.
        data: an iterable of tensors, tuples (positional) or mappings (keywords); `inputs_only` drops labels.
        method: for activations. `min_max` (also `post_training_tf`) covers every value, and is the one to begin with;
            `moving_average` follows the batches; `percentile` (also `post_training_percentile`), `mse`, `tf_enhanced`
            (also `sqnr` and `post_training_tf_enhanced`) and `entropy` cut off outliers: try them where accuracy falls.
        weight_method: for weights, one of the same; None for `min_max`. Try `mse` at 4 bits.
        percentile: share of the values, in percent, that `percentile` keeps below the upper end and above the lower.
        max_batches: batches to stop after, for a DataLoader of a whole training set; None for all.
        options: `forward`, `progress`; see `qsdk.options`.

    Raises:
        ConfigError: an unknown method, a percentile outside 50..100, or `max_batches` below 1.
        DataError: no data, data the model does not take, or NaN or inf (names site and batch).
        CalibrationError: a site that no batch reached. In every case the sim is unchanged.

    Examples:
        >>> import torch, qsdk
        >>> model, x = torch.nn.Linear(8, 4), torch.randn(32, 8)
        >>> sim = qsdk.quantize(model, x, "w4a8")
        >>> qsdk.calibrate(sim, [x], method="mse", progress=False).summary["sites"]
        3
    """
    run = run_of(calibrate, options)
    door = door_of(sim)
    batches = first_batches(data, max_batches)
    methods: dict[str, Any] = {"method": method, "weight_method": weight_method, "percentile": percentile}
    with without_shifts(sim):
        return door.calibrate(batches, run.forward, progress=run.progress, gather=all_gather, **methods)


class FileOptions(TypedDict, total=False):
    """What `export` takes that is about the files it writes."""

    external_data: bool | None
    shapes: Shapes | Mapping[str, Shapes] | None
    cache: Literal["float", "integer"] | None
    max_shard_bytes: int | None


def export(
    sim: Sim,
    path: str | os.PathLike[str],
    *,
    format: Literal["onnx", "compressed-tensors"] = "onnx",
    opset: int = 21,
    dialect: Dialect = "onnxruntime",
    uncalibrated: Literal["error", "float"] = "error",
    prefer: Literal["speed", "size"] = "speed",
    check: bool = True,
    **options: Unpack[FileOptions],
) -> Report:
    """Write the sim as ONNX with QuantizeLinear/DequantizeLinear, and `model.encodings.json` beside it.

    With `format="compressed-tensors"`, write a folder for vLLM and transformers; what it cannot say is an error.

    Args:
        sim: of either side.
        path: of the model; an existing file is replaced only when the new one is complete.
        format: `onnx`, or `compressed-tensors` (PyTorch side; `config.for_dialect("compressed-tensors")` before it).
        opset: 13 to 25. Higher ones are for dtypes that need them, such as 2-bit integers (25); below 21 there are
            8-bit types alone, with scales per tensor or channel.
        dialect: the runtime that is to read the file: `onnxruntime` for what the installed one loads at its default
            level, `openvino`, `qnn` (Qualcomm's NPUs), `tensorrt`; or `onnx`, the standard form without regard to one.
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
            compressed-tensors; None for 5 GB.

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
    choices: dict[str, Any] = {"opset": opset, "dialect": dialect, "external_data": options.get("external_data")}
    choices |= {"shapes": options.get("shapes"), "cache": options.get("cache"), "prefer": prefer}
    if format != "onnx":
        usual = {"opset": 21, "dialect": "onnxruntime", "prefer": "speed"}
        not_for_it = [name for name, given in choices.items() if given != usual.get(name)]
        return write_compressed(sim, plan, encodings, path, format, options.get("max_shard_bytes"), not_for_it)
    if options.get("max_shard_bytes") is not None:
        raise ConfigError("max_shard_bytes= is for format='compressed-tensors'; an ONNX file has external_data=")
    report = with_notes(write_onnx(sim, plan, encodings, path, {**choices, "check": check}), sim.bias_remarks())
    return Report(report.title, report.rows, {**report.summary, **sim.methods.facts})


def check_parity(
    sim: Sim,
    model: OnnxSource,
    data: Iterable[Any],
    *,
    runtime: RuntimeName | None = None,
    **options: Unpack[DataOptions],
) -> Report:
    """Compare an exported model with its sim, site by site, each site fed with the sim's own input.

    Args:
        sim: of either side.
        model: an exported file, or the model in it.
        data: batches.
        runtime: run the file as an application would, with the fusions of that runtime: `onnxruntime` at its default
            level, `openvino`, or `qnn` (Qualcomm's HTP, emulated on x86-64). The summary names the first site that is
            more than one step off (`first_off`). None runs Q/DQ as written, as the simulation does; where the default
            session may differ from that on this processor, `default_session` in the summary says so.
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
    door, opened = door_of(sim), opened_qdq(model)
    report = door.check_parity(opened, data, run.forward, run.progress, runtime)
    if runtime not in (None, "onnxruntime"):
        return report
    return with_overflow(report, opened, in_session=runtime is not None)


class ProgramOptions(ProgressOptions, total=False):
    """What `to_integer` takes beside the choices of the arithmetic."""

    firmware: str | os.PathLike[str] | None


def to_integer(
    model: OnnxSource,
    out: str | os.PathLike[str],
    *,
    target: Literal["standard", "onnxruntime", "portable"] = "standard",
    edges: Literal["float", "integer"] = "float",
    rounding: Rounding = "half_even",
    allow_float: Sequence[str] = (),
    shapes: Mapping[str, Sequence[int]] | None = None,
    data: Iterable[Any] | None = None,
    **options: Unpack[ProgramOptions],
) -> Report:
    """Convert a Q/DQ model to an integer-only one. Writes `out` and `<out>.certificate.json`.

    The result is run once. Where it computes on integers alone, ONNX Runtime and the NumPy reference must agree bit for
    bit. In the report, `max_lsb` of a row is the largest difference of that operation from the Q/DQ model on the same
    inputs (`operations_max_lsb`: of all, with float edges). `max_lsb` of the summary is that of the outputs, with the
    rounding noise of the whole network.

    Args:
        model: any Q/DQ model: a path, bytes or an onnx model.
        out: where to write.
        target: `standard` operators on integers; `onnxruntime` for speed in that runtime, by its quantized kernels,
            which requantize with constant float scales; `portable` for the same integers on every runtime, in int32.
        edges: `float` keeps float32 inputs and outputs; `integer` is for callers that quantize themselves.
        rounding: of requantization: `half_even` (as QuantizeLinear), or as a chip does it.
        allow_float: shell globs over node names and op types that may stay float; they are listed in the report.
        shapes: input name -> all of its sizes, for dynamic axes that an operation needs fixed (a mean, an LSTM).
        data: batches, the first for measuring and needed sizes; None for random ones, sized as quantize's example.
        options: `firmware`, a file that holds the network without ONNX: `.npz` (arrays and operations) or `.h` (C,
            batch of 1). `progress`: see `qsdk.options`.

    Raises:
        IntegerError: lists every node that has no integer form, with its reason and remedy.
        ConfigError: an unknown option, suffix of `firmware` or shape.
        FileFormatError: the model is unreadable or invalid.

    Examples:
        >>> import tempfile, torch, qsdk
        >>> folder, x = tempfile.mkdtemp(), torch.randn(64, 8)
        >>> _ = qsdk.calibrate(sim := qsdk.quantize(torch.nn.Linear(8, 4), x), [x], progress=False)
        >>> _ = qsdk.export(sim, folder + "/model.onnx")
        >>> qsdk.to_integer(folder + "/model.onnx", folder + "/integer.onnx").summary["float_tensors"]
        0
    """
    run = run_of(to_integer, options)
    firmware = options.get("firmware")
    require_firmware_path(firmware, out)
    forms: dict[str, Any] = {"target": target, "edges": edges, "rounding": rounding, "allow_float": allow_float}
    source = model_io.with_weights(opened_qdq(model))
    return write_integer(source, out, **forms, shapes=shapes, data=data, firmware=firmware, progress=run.progress)
