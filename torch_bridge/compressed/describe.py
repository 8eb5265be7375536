"""`config.json` of a folder in the format compressed-tensors, and the files of a checkpoint that are copied."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from qsdk.core.errors import ExportError
from torch_bridge.compressed.layers import CompressedLayer, Survey
from torch_bridge.torch_values.parameters import dtype_name, main_dtype
from torch_bridge.wrapping.wrapper import float_class

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
    """Refuse a model whose checkpoint has its tensors under other names, or put together otherwise.

    Raises:
        ExportError: names the first of them.
    """
    conversions = [one.reverse_transform() for one in reversed(getattr(model, "_weight_conversions", None) or [])]
    for name in names:
        if any(one.rename_source_key(name)[1] is not None for one in conversions):
            raise ExportError(
                f"{name} has another form in a checkpoint of {float_class(model).__name__} than in the module, which "
                "compressed-tensors cannot be written in; export this model as ONNX"
            )
