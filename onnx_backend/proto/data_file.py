"""The file of weights beside an exported model, named by its content, so that an old model keeps its own.

The model records the size and the hashes of its data file. Opening checks the size and a sample of its pages,
which finds a file that is cut short or another model's in milliseconds; `whole` reads everything, for single bits.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from onnx import ModelProto, TensorProto

from onnx_backend.proto.nodes import metadata
from qsdk.core.errors import FileFormatError

DATA_KEY = "qsdk.data"
_PAGE, _PAGES = 4096, 4096  # a sample; a file of up to 16 MiB is read whole


def facts_of(path: Path) -> dict[str, str | int]:
    """Return what a model records of its data file: `bytes`, `sha256`, and `sample_sha256` of a sample of its pages."""
    return {"bytes": path.stat().st_size, "sha256": _hash(path), "sample_sha256": _sample_hash(path)}


def name_of(model: Path, sha256: str) -> str:
    """Return the name of a model's data file: `model.onnx` -> `model.onnx.0123456789abcdef.data`."""
    return f"{model.name}.{sha256[:16]}.data"


def data_files(model: Path) -> set[Path]:
    """Return the data files beside a model that bear its name, those of earlier exports included."""
    name = re.compile(rf"{re.escape(model.name)}\.[0-9a-f]{{16}}\.data")
    found = (entry for entry in model.parent.iterdir() if name.fullmatch(entry.name))
    return {entry for entry in found if entry.is_file() and not entry.is_symlink()}


def require_data(model: ModelProto, path: Path, *, whole: bool = False) -> None:
    """Refuse a model that was parsed from `path` if its data file is not the one that was written with it.

    Args:
        model: its external tensors still name their files as the model does.
        path: of the model.
        whole: hash the whole data file.

    Raises:
        FileFormatError: the data file is missing, truncated or another one.
    """
    text = metadata(model).get(DATA_KEY)
    if text is None:
        return
    try:
        recorded = json.loads(text)
        file = path.parent / recorded["file"]
        wanted = [recorded["bytes"], recorded["sample_sha256"], recorded["sha256"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FileFormatError(f"{path} is damaged: its {DATA_KEY} cannot be read; export the model again") from error
    if recorded["file"] not in _locations(model.graph.initializer):
        return  # another tool has stored the weights elsewhere since
    remedy = "an export was interrupted or one file was replaced; copy both files again, or export again"
    if not file.is_file():
        raise FileFormatError(f"{file}, which holds the weights of {path}, is missing: {remedy}")
    found = [file.stat().st_size]
    if found[0] != wanted[0]:
        raise FileFormatError(f"{file} has {found[0]} bytes, not the {wanted[0]} of {path}: {remedy}")
    if _sample_hash(file) != wanted[1] or (whole and _hash(file) != wanted[2]):
        raise FileFormatError(f"{file} does not belong to {path}: {remedy}")


def _locations(tensors: Iterable[TensorProto]) -> Collection[str]:
    return {entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"}


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sample_hash(path: Path) -> str:
    """Return the hash of the first bytes of evenly spaced pages, the last one included."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        pages = -(-file.seek(0, 2) // _PAGE)
        count = min(pages, _PAGES)
        for index in range(count):
            file.seek(_PAGE * ((pages - 1) * index // max(count - 1, 1)))
            digest.update(file.read(_PAGE))
    return digest.hexdigest()
