"""The verb `quantize`: a sim of a module, a checkpoint folder, or an ONNX file or model."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, overload

from onnx import ModelProto
from torch import nn

from onnx_backend.opening.from_float import with_fixed_inputs
from onnx_backend.proto import graph_queries, model_io
from onnx_backend.qdq.fast_forms import with_pairs
from onnx_backend.qdq.narrow_regions import has_narrow_sites
from onnx_backend.runtime.providers import ProviderList, chosen_providers
from onnx_backend.sim import OnnxSim
from onnx_backend.sim_with_encodings import open_as_written, open_with_config
from qsdk.core.aimet_config.load_config import config_or_preset
from qsdk.core.config.config import QuantConfig, w8a8
from qsdk.core.errors import ConfigError
from qsdk.verbs.doors.module_sims import quantize_folder, quantize_module
from qsdk.verbs.qdq_files import OnnxSource, checked_qdq
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
) -> QuantSim | OnnxSim:
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
