"""A sim written as a folder in the format compressed-tensors: safetensors, config.json and the tokenizer's files."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from qsdk.core.atomic_files import Stage, staging
from qsdk.core.errors import ConfigError, ExportError
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.planning.plan import Plan
from qsdk.core.report import Report
from qsdk.core.site import site_name
from torch_bridge.compressed.describe import (
    METHOD,
    config_text,
    generation_text,
    processing_files,
    require_names_of_file,
    source_folder,
)
from torch_bridge.compressed.layers import CompressedLayer, Survey, survey
from torch_bridge.compressed.tensors import file_tensors
from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.relu6 import unbounded_paths
from torch_bridge.wrapping.pretrained import encoding_keys, require_nothing_folded

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

    One shard at a time is held besides the model.

    Args:
        sim: of an nn.Module.
        plan: in force.
        encodings: of its quantized sites.
        folder: made where it is missing. One that holds an earlier export is written over.
        max_shard_bytes: a file is closed before the tensor with which it would be larger.

    Returns:
        Rows `site`, `dtype`, `form`; summary `format`, `layers`, `ignored`, `bytes`, `paths`.

    Raises:
        ExportError: the format has no field for something that the sim quantizes, or the folder cannot be written or
            holds another checkpoint.
        ModelError: a BatchNorm is folded.
        ConfigError: safetensors is not installed.
    """
    library, target = _library(), Path(folder)
    _require_plain(sim.model)
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
    """Return the module that writes safetensors.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module("safetensors.torch")
    except ModuleNotFoundError as error:
        raise ConfigError("a folder of safetensors needs the package: pip install 'qsdk[safetensors]'") from error


def _require_plain(model: nn.Module) -> None:
    """Refuse a model that is no longer what its class and config say.

    Raises:
        ModelError: a BatchNorm or a computed weight is folded.
        ExportError: a ReLU6 has lost its bound.
    """
    require_nothing_folded(model)
    if unbounded := unbounded_paths(model):
        raise ExportError(f"{', '.join(unbounded)}: a ReLU6 without its bound, which no config says; quantize anew")


def _require_free(folder: Path, model: nn.Module) -> None:
    """Refuse a folder that holds another checkpoint, or the very one that the model was read from.

    Raises:
        ExportError: names the folder.
    """
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
    if inputs is None and layer.inputs is not None:
        read = ", reads int8 with the scale of each token"
    return f"{layer.format}, {layer.weights['strategy']}{size}{read}"


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _write_text(path: Path, *, text: str) -> None:
    path.write_text(text, encoding="utf-8")
