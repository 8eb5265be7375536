"""The encodings file beside a model: its name, and the properties of the model that say which file belongs to it."""

import hashlib
import os
from pathlib import Path

from onnx import ModelProto

from onnx_backend.proto.nodes import metadata
from qsdk.core.errors import FileFormatError

ENCODINGS_KEY, HASH_KEY, FILE_KEY = "qsdk.encodings", "qsdk.encodings.sha256", "qsdk.encodings.file"
SUFFIX = ".encodings.json"


def encodings_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of the encodings of a model file: `model.onnx` -> `model.encodings.json`."""
    return Path(path).with_suffix(SUFFIX)


def require_companion(model: ModelProto, path: str | os.PathLike[str]) -> None:
    """Refuse a model whose encodings file beside it is another one's; a missing file is no error."""
    recorded = metadata(model).get(HASH_KEY)
    companion = Path(path).with_name(metadata(model).get(FILE_KEY) or encodings_path(path).name)
    if recorded is None or not companion.exists():
        return
    if not companion.is_file():  # a pipe would be waited for
        raise FileFormatError(f"{companion} is no ordinary file, so it does not belong to {path}; delete it")
    with companion.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != recorded:
        raise FileFormatError(
            f"{companion} does not belong to {path}: an export was interrupted or one file was replaced; export again, "
            "or delete the encodings file (the model holds its own copy)"
        )
