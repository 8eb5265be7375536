"""Batches of tokens for the model in a checkpoint folder: from text, from arrays of token ids, or random ones."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qsdk.core.errors import ConfigError, DataError, FileFormatError
from qsdk.core.read_files import first_line_of, read_array, read_text
from qsdk.verbs.doors.read_checkpoint import read_config

_TEXTS = (".txt", ".md", ".text")
Batch = dict[str, Tensor]


def token_batches(folder: str, paths: Sequence[str], *, length: int, most: int | None) -> list[Batch]:
    """Return batches of one row of token ids each, int64 [1, length].

    Args:
        folder: of the checkpoint, with its tokenizer.
        paths: texts (.txt, .md), which are cut into windows, integer arrays [rows, length] (.npy), or folders of such
            files, which are read in the order of their names.
        length: tokens of a window of text.
        most: windows or rows to stop after; None for all.

    Raises:
        ConfigError: another kind of file, or transformers is not installed.
        DataError: there is not one window, or an array holds no token ids of the model.
        FileFormatError: a file cannot be read.
    """
    rows: list[Tensor] = []
    for path in (file for given in map(Path, paths) for file in (_held(given) if given.is_dir() else [given])):
        if path.suffix in _TEXTS:
            rows += _windows(_tokenizer(folder), path, length)
        elif path.suffix == ".npy":
            rows += list(_ids(path, _vocabulary(folder))[:, None])
        else:
            raise ConfigError(f"--data {path}: give text (.txt, .md) or token ids (.npy) for a checkpoint folder")
    if not rows:
        raise DataError(f"the data hold no {length} tokens; give more text, or a smaller --length")
    return [{"input_ids": row} for row in rows[:most]]


def random_tokens(folder: str, batches: int | None, *, length: int, seed: int) -> list[Batch]:
    """Return batches of random tokens, of one row each."""
    generator = torch.Generator().manual_seed(seed)
    size = (1, length)
    rows = (torch.randint(0, _vocabulary(folder), size, generator=generator) for _ in range(batches or 1))
    return [{"input_ids": row} for row in rows]


def _held(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.iterdir() if path.suffix in (*_TEXTS, ".npy") and path.is_file())
    if not found:
        raise FileFormatError(f"the folder {folder} holds no text (.txt, .md) and no token ids (.npy)")
    return found


def _windows(tokenizer: Any, path: Path, length: int) -> list[Tensor]:
    ids = tokenizer(read_text(path, "give a text file"), return_tensors="pt")["input_ids"]
    return [ids[:, at : at + length] for at in range(0, ids.shape[1] - length + 1, length)]


def _ids(path: Path, vocabulary: int) -> Tensor:
    ids = read_array(path, "save token ids with numpy.save")
    if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer):
        raise DataError(f"{path} holds {ids.dtype} of shape {ids.shape}; token ids are integers [rows, length]")
    if ids.size and not 0 <= ids.min() <= ids.max() < vocabulary:
        raise DataError(f"{path} holds ids {ids.min()} to {ids.max()}; those of the model are 0 to {vocabulary - 1}")
    return torch.from_numpy(ids.astype(np.int64))


def _tokenizer(folder: str) -> Any:
    try:
        library = import_module("transformers")
    except ModuleNotFoundError as error:
        raise ConfigError("text needs transformers: pip install transformers, or give token ids (.npy)") from error
    try:
        return library.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # tokenizers raises types of its own
        raise ConfigError(
            f"{folder} holds no tokenizer that can be read ({first_line_of(error)}); put it there, or give token "
            "ids (.npy)"
        ) from error


def _vocabulary(folder: str) -> int:
    path = Path(folder, "config.json")
    config = read_config(Path(folder), "give the folder of a checkpoint")
    size = config.get("vocab_size")
    if type(size) is not int or size < 1:
        raise FileFormatError(
            f"{path} does not say how many tokens there are: vocab_size is {size!r}; correct it, or download it again"
        )
    return size
