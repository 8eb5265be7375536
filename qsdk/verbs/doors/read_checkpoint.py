"""Reading the float model of a Hugging Face checkpoint folder."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from qsdk.core.errors import ConfigError, FileFormatError, ModelError
from qsdk.core.read_files import parse_json, read_text, require_readable

CONFIG = "config.json"
_LENGTH = 16  # tokens of an example
#: the attentions of transformers itself; any other name is that of a repository with code
_ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
_COUNTS = re.compile(r"n_|num_|.*_layers$")
_MANY = 1 << 20
_PARAMETERS = 1024  # that a model may have beside those in its files
_IN_A_PICKLE = 2048  # weights that a file of them may hold, which is not opened for that


def read_model(folder: Path, instead: str, options: Mapping[str, Any]) -> nn.Module:
    """Read the float model of a checkpoint, in the class that its config names; messages say what to do `instead`.

    With `dtype="auto"` among the options, safetensors files are mapped: no weight is read before it is needed.
    """
    name = _class_named_by(read_config(folder, instead), folder / CONFIG, instead)
    try:
        library = import_module("transformers")
    except ModuleNotFoundError as error:
        raise ConfigError(f"reading {folder} needs transformers; pip install transformers, or {instead}") from error
    kind: Any = getattr(library, name, None)
    is_model = isinstance(kind, type) and issubclass(kind, library.PreTrainedModel)
    if not is_model:
        raise ConfigError(f"transformers has no class {name} of models, which {folder / CONFIG} names; {instead}")
    weights = _count_weights(folder, instead)
    try:
        with _no_more_parameters(weights, folder / CONFIG):
            read, found = kind.from_pretrained(folder, output_loading_info=True, local_files_only=True, **options)
    except FileFormatError:
        raise
    except Exception as error:  # transformers raises types of its own
        raise ModelError(f"the weights of {folder} cannot be read: {error}; {instead}") from error
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


def read_config(folder: Path, instead: str) -> dict[str, Any]:
    """Return the `config.json` of a checkpoint folder, which strangers may have written."""
    path = folder / CONFIG
    text = read_text(path, "give the folder of a checkpoint, with its config.json; for an ONNX file, check the path")
    config = parse_json(text, os.fspath(path), instead)
    if not isinstance(config, dict):
        raise FileFormatError(f"{path} holds no settings of a model; {instead}")
    parts = [config]
    while parts:
        part = parts.pop()
        parts += [value for value in part.values() if isinstance(value, dict)]
        for name, value in part.items():
            if name.endswith("attn_implementation"):
                require_known_attention(value, os.fspath(path), f"correct it, or {instead}")
            if _COUNTS.match(name) and type(value) is int and value > _MANY:
                raise FileFormatError(f"{path}: {name} is {value:,}, which no model has; correct it, or {instead}")
    return config


def require_known_attention(value: Any, where: str, remedy: str) -> None:
    """Refuse the name of an attention that is none of transformers' own: it would be fetched, and is code."""
    names = value.values() if isinstance(value, dict) else [value]
    for name in names:
        if name is not None and name not in _ATTENTION:
            raise FileFormatError(
                f"{where} asks for the attention {name!r}, which may be foreign code; known are "
                f"{', '.join(_ATTENTION)}; {remedy}"
            )


def _class_named_by(config: Mapping[str, Any], path: Path, instead: str) -> str:
    match config.get("architectures"):
        case [str(name)] if name.isidentifier():
            return name
        case _:
            raise FileFormatError(f"{path} does not name the class of the model; {instead}")


def _count_weights(folder: Path, instead: str) -> int:
    """Return how many tensors the files of a checkpoint hold, at least where they cannot tell."""
    for path in folder.iterdir():
        if path.exists() and not path.is_file() and not path.is_dir():
            raise FileFormatError(f"{path} is no ordinary file, but a pipe or a device; delete it, or {instead}")
    shards = [path for index in sorted(folder.glob("*.index.json")) for path in _shards(index, instead)]
    whole = [folder / name for name in ("model.safetensors", "pytorch_model.bin") if (folder / name).is_file()]
    safe_open, count = import_module("safetensors").safe_open, 0  # which transformers depends on
    for path in dict.fromkeys((*shards, *whole)):
        if path.suffix != ".safetensors":
            count += _IN_A_PICKLE
        elif path.is_file():
            try:
                with safe_open(path, "pt") as file:
                    count += len(file.keys())
            except Exception as error:  # of its own type, which is none of Python's
                raise _damaged(path, instead) from error
    return count


def _shards(index: Path, instead: str) -> list[Path]:
    """Return the files that an index names, all of them in its folder."""
    try:
        names = sorted(set(parse_json(read_text(index, instead), os.fspath(index))["weight_map"].values()))
        found = [Path(name) for name in names]
    except (AttributeError, LookupError, TypeError, FileFormatError) as error:
        raise _damaged(index, instead) from error
    for path in found:
        if path.is_absolute() or ".." in path.parts or "\0" in str(path):
            raise FileFormatError(f"{index} names {str(path)!r}, a file outside of its folder; {instead}")
        if (index.parent / path).exists():
            require_readable(index.parent / path, instead)
    return [index.parent / path for path in found]


def _damaged(path: Path, instead: str) -> ModelError:
    return ModelError(f"{path.name} of {path.parent} is damaged; download it again, or {instead}")


@contextmanager
def _no_more_parameters(weights: int, path: Path) -> Iterator[None]:
    """Refuse to build a model of far more parameters than there are weights: a wrong count may stand for years."""
    made, most, thread = 0, _PARAMETERS + 4 * weights, get_ident()

    def counted(_module: nn.Module, _name: str, _value: nn.Parameter) -> None:
        nonlocal made
        made += get_ident() == thread
        if made > most:
            raise FileFormatError(
                f"{path} describes a model of more than {most:,} parameters, its files hold {weights:,}; correct its "
                "numbers of layers, or download it again"
            )

    handle = register_module_parameter_registration_hook(counted)
    try:
        yield
    finally:
        handle.remove()


def default_example(model: Any, folder: Path, *, step: bool) -> tuple[dict[str, torch.Tensor], Any]:
    """Return an example of tokens for a text model, and its dynamic axes: batch and sequence."""
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
