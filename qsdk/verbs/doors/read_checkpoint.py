"""Reading the float model of a Hugging Face checkpoint folder."""

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qsdk.core.errors import ConfigError, FileFormatError, ModelError
from qsdk.core.read_files import read_text

CONFIG = "config.json"
_LENGTH = 16  # tokens of an example


def read_model(folder: Path, instead: str, options: Mapping[str, Any]) -> nn.Module:
    """Read the float model of a checkpoint, in the class that its config names.

    With `dtype="auto"` among the options, safetensors files are mapped: no weight is read before it is needed.

    Args:
        folder: with `config.json` and the weights.
        instead: what the user can do where it cannot be read, for messages.
        options: for `from_pretrained` of the class.

    Raises:
        FileFormatError: the folder has no readable config.
        ConfigError: transformers is not installed, or lacks the class.
        ModelError: the files are damaged, lack weights of the model, or hold them in other shapes.
    """
    path = folder / CONFIG
    text = read_text(path, "give the folder of a checkpoint, with its config.json; for an ONNX file, check the path")
    try:
        (name,) = json.loads(text)["architectures"]
    except (ValueError, LookupError, TypeError) as error:
        raise FileFormatError(f"{path} does not name the class of the model; {instead}") from error
    try:
        library = import_module("transformers")
    except ModuleNotFoundError as error:
        raise ConfigError(f"reading {folder} needs transformers; pip install transformers, or {instead}") from error
    if not hasattr(library, name):
        raise ConfigError(f"transformers has no class {name}, which {path} names; {instead}")
    try:
        read, found = getattr(library, name).from_pretrained(
            folder, output_loading_info=True, local_files_only=True, **options
        )
    except Exception as error:  # safetensors, json and transformers raise types of their own
        damaged = _damaged_files(folder)
        where = f"{', '.join(damaged)} of {folder} {'is' if len(damaged) == 1 else 'are'} damaged; download it again"
        raise ModelError(
            f"{where}, or {instead}" if damaged else f"the weights of {folder} cannot be read: {error}; {instead}"
        ) from error
    for what in ("missing_keys", "mismatched_keys"):
        wrong = sorted(str(key) for key in found.get(what) or ())
        if wrong:  # transformers would fill them with random values
            shown = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
            raise ModelError(
                f"{folder} is no complete checkpoint of {name}: {what.replace('_keys', '')} weights {shown}; download "
                f"it again, or {instead}"
            )
    model: nn.Module = read
    return model


def _damaged_files(folder: Path) -> list[str]:
    """Return the names of the files of weights, and of their index, that cannot be opened."""
    found, safetensors = [], import_module("safetensors")  # which transformers depends on
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]):
        try:
            if path.suffix == ".json":
                json.loads(path.read_text("utf-8"))
            else:
                with safetensors.safe_open(path, "pt"):
                    pass
        except Exception:  # safetensors has its own type, which is none of Python's
            found.append(path.name)
    return found


def default_example(model: Any, folder: Path, *, step: bool) -> tuple[dict[str, torch.Tensor], Any]:
    """Return an example of tokens for a text model, and its dynamic axes: batch and sequence.

    Args:
        model: of the transformers library.
        folder: that it was read from, for messages.
        step: the example will become a decoder's step with a cache, whose axes are dynamic anyway.

    Raises:
        ModelError: the model takes other inputs than tokens.
    """
    vocabulary = getattr(model.config, "vocab_size", None)
    if getattr(model, "main_input_name", "") != "input_ids" or vocabulary is None or model.config.is_encoder_decoder:
        raise ModelError(
            f"what the {type(model).__name__} of {folder} takes cannot be told by itself; give quantize an example, "
            "such as the tensors of one batch by name"
        )
    ids = torch.arange(2, 2 + _LENGTH).reshape(1, -1) % vocabulary
    given = {"input_ids": ids}
    if not model.can_generate():  # an encoder reads padded rows
        given["attention_mask"] = torch.ones_like(ids)
    return given, None if step else {name: {0: "batch", 1: "sequence"} for name in given}
