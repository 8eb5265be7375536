"""A sim written as a folder in the format compressed-tensors: safetensors, config.json and the tokenizer's files."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor, nn

from qsdk.core.atomic_files import Stage, staging
from qsdk.core.errors import ConfigError, ExportError
from qsdk.core.numerics import affine
from qsdk.core.numerics.block_scales import float8_scales
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.planning.plan import Plan
from qsdk.core.report import Report
from qsdk.core.site import site_name
from torch_bridge.compressed.survey import CompressedLayer, Survey, shift_of, signed_zero_points, survey
from torch_bridge.quantizers.quantizer import Quantizer
from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.layers import unbounded_paths
from torch_bridge.torch_values.parameters import dtype_name, main_dtype
from torch_bridge.wrapping.wrapped_state import encoding_keys, require_nothing_folded
from torch_bridge.wrapping.wrapper import float_class


def codes_of(weight: Tensor, encoding: Encoding) -> Tensor:
    """Return the codes of a weight: int8 on the signed grid of its dtype, or float8_e4m3fn."""
    x, dtype = weight.detach().float(), encoding.dtype
    scale, zero_point = (
        affine.align(torch.from_numpy(part).to(x.device), tuple(x.shape), encoding.axis, encoding.block_size)
        for part in (encoding.scale, encoding.zero_point)
    )
    if not dtype.is_integer:
        cast: Tensor = (x / scale).clip(dtype.lo, dtype.hi).to(torch.float8_e4m3fn)
        return cast
    codes: Tensor = affine.quantize(x, scale, zero_point.float(), dtype.lo, dtype.hi) - shift_of(dtype)
    return codes.to(torch.int8)


def scales_of(encoding: Encoding, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return scales and zero points in the shapes of the format: [1], [channels, 1] or [channels, groups].

    Zero points are int8.
    """
    shape = (-1, 1) if encoding.axis is not None and encoding.block_size is None else encoding.scale.shape
    zero_points = torch.from_numpy(signed_zero_points(encoding)).to(torch.int8)
    scale = torch.from_numpy(encoding.scale).to(dtype, copy=True)  # a file holds no memory twice
    return scale.reshape(shape), zero_points.reshape(shape)


def as_read(codes: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """Return the weight that a reader of the format computes, in the dtype of its scales."""
    groups = 1 if scale.ndim < 2 else scale.shape[1]
    parts = codes.to(scale.dtype).reshape(codes.shape[0], groups, -1)
    shape = (*scale.shape, 1) if scale.ndim == 2 else scale.shape
    result: Tensor = (parts - zero_point.to(scale.dtype).reshape(shape)) * scale.reshape(shape)
    return result.reshape(codes.shape)


def packed(codes: Tensor, bits: int) -> Tensor:
    """Return int8 codes [rows, columns] of 4 or 8 bits as int32 words [rows, words], the first code lowest.

    Codes are stored with half of the grid's size added, and the last word of a row is padded with zeros.
    """
    per_word = 32 // bits
    stored = codes.to(torch.int32) + (1 << (bits - 1))
    missing = -codes.shape[-1] % per_word
    lanes = torch.nn.functional.pad(stored, (0, missing)).reshape(stored.shape[0], -1, per_word)
    words = torch.zeros_like(lanes[..., 0])
    for lane in range(per_word):
        words |= lanes[..., lane] << (bits * lane)
    return words.contiguous()


def file_tensors(
    model: nn.Module, layers: Mapping[str, CompressedLayer], quantizers: Mapping[str, Quantizer]
) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of a model by their names in its state_dict, codes and scales in place of quantized weights."""
    own, weights = encoding_keys(model), {f"{path}.weight".lstrip("."): path for path in layers}
    state, shared, written = model.state_dict(), _tied_names(model), set[Any]()
    for name, value in state.items():
        if name in own or not isinstance(value, Tensor):
            continue
        if hasattr(value, "to_local"):
            raise ExportError(f"{name} is sharded over ranks; gather the model's parameters first")
        place = (value.data_ptr(), value.shape, value.stride())
        if name in shared and place in written:
            continue  # the reader ties it, as the model's config says
        written.add(place)
        if name in weights:
            yield _compressed(value, layers[weights[name]], quantizers)
        else:
            owner, _, port = name.rpartition(".")
            quantizer = quantizers.get(site_name(owner, port))
            used = value.detach() if quantizer is None else quantizer(value.detach())
            yield {name: used.to("cpu", copy=True).contiguous()}


@torch.no_grad()
def _compressed(weight: Tensor, layer: CompressedLayer, quantizers: Mapping[str, Quantizer]) -> dict[str, Tensor]:
    """Return the tensors of a layer, which give the weight of the sim to the last bit."""
    site, prefix = site_name(layer.path, "weight"), f"{layer.path}." if layer.path else ""
    if "scale_dtype" in layer.weights:
        return {prefix + name: tensor.contiguous() for name, tensor in _in_blocks(weight, layer, quantizers).items()}
    codes = codes_of(weight, layer.encoding).cpu()
    scale, zero_point = scales_of(layer.encoding, weight.dtype)
    if not torch.equal(as_read(codes, scale, zero_point), quantizers[site](weight.detach()).cpu()):
        raise ExportError(
            f"a reader of compressed-tensors would not compute the weight that the sim has at {site}: it multiplies in "
            f"{str(weight.dtype).removeprefix('torch.')}; quantize the model in the dtype that it is exported in, "
            "float32, bfloat16 or float16"
        )
    result = {"weight_scale": scale}
    bits, dense = layer.weights["num_bits"], layer.format != "pack-quantized"
    if dense:
        result["weight"] = codes
    else:
        result |= {"weight_packed": packed(codes, bits), "weight_shape": torch.tensor(weight.shape)}
    if not layer.weights["symmetric"]:
        groups = not dense and layer.weights["strategy"] != "tensor"
        result["weight_zero_point"] = packed(zero_point.T, bits).T if groups else zero_point
    if layer.inputs is not None and layer.input_encoding is not None:
        result["input_scale"], zero = scales_of(layer.input_encoding, weight.dtype)
        if not layer.inputs["symmetric"]:
            result["input_zero_point"] = zero
    return {prefix + name: tensor.contiguous() for name, tensor in result.items()}


def _in_blocks(weight: Tensor, layer: CompressedLayer, quantizers: Mapping[str, Quantizer]) -> dict[str, Tensor]:
    """Return the tensors of a layer in a format of blocks: float4 two in a byte, or float8, and scales in one byte."""
    site, encoding = site_name(layer.path, "weight"), layer.encoding
    codes = encoding.quantize(weight.detach().float().cpu().numpy())
    expected = quantizers[site](weight.detach()).cpu()
    if not torch.equal(torch.from_numpy(encoding.dequantize(codes)).to(weight.dtype), expected):
        raise ExportError(f"the blocks of {site} do not give the weight that the sim has; calibrate it again")
    parts = float8_scales(encoding) if layer.format.startswith("nvfp4") else None
    scale = encoding.scale.astype(ml_dtypes.float8_e8m0fnu) if parts is None else parts.codes
    result = {"weight_scale": torch.from_numpy(scale.view(np.uint8).copy())}
    if parts is not None:
        result["weight_scale"] = result["weight_scale"].view(torch.float8_e4m3fn)
        result["weight_global_scale"] = torch.tensor([float(parts.divisor)])
    bits = torch.from_numpy(codes.view(np.uint8).copy())
    if encoding.dtype.bits == 4:
        result["weight_packed"] = bits[:, ::2] | bits[:, 1::2] << 4
    else:
        result["weight"] = bits.view(torch.float8_e4m3fn)
    if layer.input_encoding is not None:
        peak = layer.input_encoding.high
        result["input_global_scale"] = torch.from_numpy(np.float32(affine.float8_divisor(peak)))
    return result


def _tied_names(model: nn.Module) -> set[str]:
    """Return the names that a model of transformers ties to others when it is read."""
    tied = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
    return {str(name) for name in tied}


METHOD = "compressed-tensors"

#: files of a checkpoint that say how text, pictures or sound become inputs
_PROCESSING = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja"),
    *("chat_template.json", "preprocessor_config.json", "processor_config.json"),
)


def quantization_config(found: Survey, model: nn.Module) -> dict[str, Any]:
    """Return the `quantization_config` of a survey.

    Layers with the same scheme are a group. Where all groups but those of embeddings are one, its target is the class
    `Linear`, which a reader finds under whatever names it has fused layers; else the targets are paths.
    """
    groups: dict[str, list[CompressedLayer]] = {}
    for layer in found.layers:
        table = isinstance(model.get_submodule(layer.path), nn.Embedding)
        groups.setdefault(json.dumps([table, layer.format, layer.weights, layer.inputs]), []).append(layer)
    linear = [key for key in groups if not json.loads(key)[0]]
    formats = {layer.format for layer in found.layers}
    result: dict[str, Any] = {}
    for index, (key, layers) in enumerate(groups.items()):
        by_class = len(linear) == 1 and key == linear[0]
        result[f"group_{index}"] = {
            "targets": ["Linear"] if by_class else [layer.path for layer in layers],
            "weights": layers[0].weights,
            "input_activations": layers[0].inputs,
            "output_activations": None,
            **({"format": layers[0].format} if len(formats) > 1 else {}),
        }
    return {
        "quant_method": METHOD,
        "format": next(iter(formats)) if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": result,
        "ignore": list(found.ignored),
        "kv_cache_scheme": None,
    }


def config_text(model: nn.Module, found: Survey) -> str:
    """Return the text of config.json: a model's own config of transformers, if it has one, and the quantization."""
    config: Any = getattr(model, "config", None)
    data: dict[str, Any] = {}
    if hasattr(config, "to_json_string"):
        data = json.loads(config.to_json_string())
    dtype = main_dtype(model)
    data |= {"architectures": [float_class(model).__name__], "dtype": dtype_name(dtype) if dtype is not None else None}
    return json.dumps({**data, "quantization_config": quantization_config(found, model)}, indent=2) + "\n"


def generation_text(model: nn.Module) -> str | None:
    """Return the text of generation_config.json, or None for a model that has none."""
    config: Any = getattr(model, "generation_config", None)
    return str(config.to_json_string()) if hasattr(config, "to_json_string") else None


def processing_files(model: nn.Module) -> Sequence[Path]:
    """Return the tokenizer's files in the folder that a model of transformers was read from."""
    folder = source_folder(model)
    return [] if folder is None else [folder / name for name in _PROCESSING if (folder / name).is_file()]


def source_folder(model: nn.Module) -> Path | None:
    """Return the folder that a model of transformers was read from, or None."""
    name = getattr(model, "name_or_path", None)
    return Path(name) if isinstance(name, str) and name and Path(name).is_dir() else None


def require_names_of_file(model: nn.Module, names: Sequence[str]) -> None:
    """Refuse a model whose checkpoint has its tensors under other names, or put together otherwise."""
    conversions = [one.reverse_transform() for one in reversed(getattr(model, "_weight_conversions", None) or [])]
    for name in names:
        if any(one.rename_source_key(name)[1] is not None for one in conversions):
            raise ExportError(
                f"{name} has another form in a checkpoint of {float_class(model).__name__} than in the module, which "
                "compressed-tensors cannot be written in; export this model as ONNX"
            )


MAX_SHARD_BYTES = 5_000_000_000
CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"


def write_folder(
    sim: QuantSim,
    plan: Plan,
    encodings: Mapping[str, Encoding],
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int,
) -> Report:
    """Write a sim as a folder; `config.json` is renamed into place last, so that there is never half a model.

    One shard at a time is held besides the model. A shard is closed before the tensor with which it would have more
    than `max_shard_bytes`; an earlier export in the folder is written over.
    """
    library, target = _library(), Path(folder)
    require_plain(sim.model)
    found = survey(sim, plan, encodings)
    own = encoding_keys(sim.model)
    require_names_of_file(sim.model, [name for name in sim.model.state_dict() if name not in own])
    _require_free(target, sim.model)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"cannot make the folder {target}: {error.strerror}; choose a writable one") from error
    layers = {layer.path: layer for layer in found.layers}
    quantizers = {site: one for site, one in sim.quantizers.items() if plan.decisions[site].quantized}
    with staging(target / CONFIG) as stage:
        parts = file_tensors(sim.model, layers, quantizers)
        shards = list(_shards(stage, library, parts, max_shard_bytes))
        renames = [*_named(stage, shards), *_companions(stage, sim.model)]
        config = stage.write(partial(_write_text, text=config_text(sim.model, found)))
        _remove_earlier(target)  # from here on there is no model in the folder until its config.json is
        stage.commit([*renames, (config, stage.target)])
    return _report(sim, found, [*(final for _, final in renames), stage.target], encodings)


def _library() -> Any:
    """Return the module that writes safetensors."""
    try:
        return import_module("safetensors.torch")
    except ModuleNotFoundError as error:
        raise ConfigError("a folder of safetensors needs the package: pip install 'qsdk[safetensors]'") from error


def require_plain(model: nn.Module) -> None:
    """Refuse a model that is no longer what its class and config say."""
    require_nothing_folded(model)
    if unbounded := unbounded_paths(model):
        raise ExportError(f"{', '.join(unbounded)}: a ReLU6 without its bound, which no config says; quantize anew")


def _require_free(folder: Path, model: nn.Module) -> None:
    """Refuse a folder that holds another checkpoint, or the very one that the model was read from."""
    source = source_folder(model)
    if source is not None and folder.exists() and source.samefile(folder):
        raise ExportError(f"{folder} holds the checkpoint that the model was read from; choose another folder")
    held = sorted(path.name for path in folder.glob("*.safetensors")) if folder.is_dir() else []
    config = folder / CONFIG
    if (held or config.exists()) and _method_of(config) != METHOD:
        raise ExportError(f"{folder} holds another checkpoint ({(held or [CONFIG])[0]}); empty it, or choose another")


def _method_of(config: Path) -> str | None:
    try:
        data = json.loads(config.read_text(encoding="utf-8"))
        method = data["quantization_config"]["quant_method"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return str(method)


def _shards(
    stage: Stage, library: Any, parts: Iterable[dict[str, Tensor]], most: int
) -> Iterator[tuple[Path, list[str], int]]:
    """Write files of up to `most` bytes; yield the temporary path, the names and the bytes of the tensors of each."""
    held: dict[str, Tensor] = {}
    for part in parts:
        if held and _bytes(held) + _bytes(part) > most:
            yield _saved(stage, library, held), list(held), _bytes(held)
            held = {}
        held |= part
    yield _saved(stage, library, held), list(held), _bytes(held)


def _saved(stage: Stage, library: Any, tensors: Mapping[str, Tensor]) -> Path:
    def save(path: Path) -> None:
        try:
            library.save_file(dict(tensors), path, metadata={"format": "pt"})
        except import_module("safetensors").SafetensorError as error:  # a full disk, among others
            raise ExportError(f"cannot write {stage.target.parent}: {error}; choose a folder with room") from error

    return stage.write(save)


def _named(stage: Stage, shards: list[tuple[Path, list[str], int]]) -> list[tuple[Path, Path]]:
    """Return temporary and final path of each shard, and of the index where there are several."""
    folder = stage.target.parent
    if len(shards) == 1:
        return [(shards[0][0], folder / SINGLE)]
    finals = [f"model-{index + 1:05}-of-{len(shards):05}.safetensors" for index in range(len(shards))]
    held = {name: final for final, (_, names, _) in zip(finals, shards, strict=True) for name in names}
    index = {"metadata": {"total_size": sum(size for _, _, size in shards)}, "weight_map": held}
    written = stage.write(partial(_write_text, text=json.dumps(index, indent=2) + "\n"))
    renames = [(path, folder / final) for final, (path, _, _) in zip(finals, shards, strict=True)]
    return [*renames, (written, folder / INDEX)]


def _companions(stage: Stage, model: nn.Module) -> list[tuple[Path, Path]]:
    folder, generation = stage.target.parent, generation_text(model)
    files = processing_files(model)
    renames = [(stage.write(partial(shutil.copyfile, path)), folder / path.name) for path in files]
    if generation is not None:
        renames.append((stage.write(partial(_write_text, text=generation)), folder / "generation_config.json"))
    return renames


def _remove_earlier(folder: Path) -> None:
    """Remove an earlier export, its config.json first, so that no reader finds it with weights of this one."""
    for path in (folder / CONFIG, folder / INDEX, *folder.glob("*.safetensors")):
        path.unlink(missing_ok=True)


def _report(sim: QuantSim, found: Survey, paths: list[Path], encodings: Mapping[str, Encoding]) -> Report:
    rows = []
    for layer in found.layers:
        rows.append({"site": site_name(layer.path, "weight"), "dtype": layer.encoding.dtype.name, "form": _form(layer)})
    sites = {row["site"] for row in rows}
    as_float = [site for site in encodings if site not in sites and sim.plan.decisions[site].kind == "bias"]
    rows += [
        {"site": site, "dtype": encodings[site].dtype.name, "form": "float, as the sim adds it"} for site in as_float
    ]
    shifted = [layer.path for layer in found.layers if layer.inputs is not None and not layer.inputs["symmetric"]]
    note = "the reader adds the zero point before it rounds: ties may fall one step off"
    summary = {
        "format": ", ".join(sorted({layer.format for layer in found.layers})),
        "layers": len(found.layers),
        "ignored": list(found.ignored),
        **({"zero_points_of_inputs": note} if shifted else {}),
        "bytes": sum(path.stat().st_size for path in paths),
        "paths": [str(path) for path in paths],
    }
    return Report("Export", rows, summary)


def _form(layer: CompressedLayer) -> str:
    size = f" of {layer.weights['group_size']}" if "group_size" in layer.weights else ""
    inputs = layer.input_encoding
    read = f", reads {inputs.dtype.name} of scale {inputs.scale[0]:.4g}" if inputs is not None else ""
    if layer.inputs is not None and "group_size" in layer.inputs:
        read = f", reads blocks of {layer.inputs['group_size']} with scales found at run time"
    elif inputs is None and layer.inputs is not None:
        read = ", reads int8 with the scale of each token"
    return f"{layer.format}, {layer.weights['strategy']}{size}{read}"


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _write_text(path: Path, *, text: str) -> None:
    path.write_text(text, encoding="utf-8")
