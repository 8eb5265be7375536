"""Load, serialize and save ONNX models."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import ModelProto, numpy_helper

from onnx_backend.proto.external_data import INLINE, array, is_reference, read_external_data, require_data
from onnx_backend.proto.nodes import copied, retain
from onnx_backend.proto.soundness import require_sound
from qsdk.core.errors import ConfigError, FileFormatError, ModelError

_TWO_GIB = 2**31 - 1


def load(
    source: str | os.PathLike[str] | bytes | ModelProto, *, inline: int = INLINE, whole: bool = False
) -> ModelProto:
    """Return a fresh model from a path, serialized bytes or a proto (copied).

    Weights in other files are read, except large ones: the model refers to these, and `array` reads them on demand, so
    that the files must not change while the model is in use.

    Args:
        source: a path may have external data beside it.
        inline: external weights of up to so many bytes are read at once.
        whole: check the hash of the whole data file of an exported model, not only of a sample.
    """
    if isinstance(source, ModelProto):
        require_sound(source, "the model")
        return copied(source)
    if isinstance(source, bytes):
        return _decoded(source, "the given bytes")
    path = path_of(source)
    if not path.is_file():
        problem = f"{path} is a folder" if path.is_dir() else f"there is no file {path}"
        raise FileFormatError(f"{problem}; check the path, or export the model first")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FileFormatError(f"cannot read {path}: {error.strerror}; check its permissions") from error
    model = _decoded(data, str(path))
    del data  # the proto holds its own copy
    require_data(model, path, whole=whole)
    read_external_data(model, path, inline=inline)
    return model


def source_name(source: str | os.PathLike[str] | bytes | ModelProto) -> str:
    """Return the name of a model in messages: its path, if it has one."""
    return "the model" if isinstance(source, bytes | ModelProto) else os.fspath(source)


def path_of(source: Any) -> Path:
    """Return the path that a user gave for a model."""
    if isinstance(source, str | os.PathLike):
        return Path(source)
    what = type(source).__name__
    remedy = "give the path of an ONNX file, or an onnx model"
    if hasattr(source, "plan") and hasattr(source, "coverage"):
        remedy = 'write it first, and give that path: qsdk.export(sim, "model.onnx")'
    raise ConfigError(f"expected an ONNX model, got a {what}; {remedy}")


def _decoded(data: bytes, where: str) -> ModelProto:
    remedy = "it is truncated or no ONNX model; export or download it again"
    if data[:2] == b"PK":  # a zip archive
        remedy = "it is a zip archive, as torch.save and qsdk.save write; load it in Python, and quantize the nn.Module"
    model = ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise FileFormatError(f"{where} cannot be read as ONNX: {remedy}") from error
    if not model.opset_import or not model.graph.output:
        raise FileFormatError(f"{where} has no opset or no graph outputs: {remedy}")
    require_sound(model, where)
    return model


def serialize(model: ModelProto) -> bytes:
    """Return a model's bytes; weights that lie in files are read into them."""
    model = with_weights(model)
    if model.ByteSize() > _TWO_GIB:
        raise ModelError("the model is larger than 2 GiB, which one ONNX file cannot hold; store external data")
    return bytes(model.SerializeToString())


def with_weights(model: ModelProto) -> ModelProto:
    """Return the model, or a copy that holds the weights it leaves in files."""
    if not any(is_reference(tensor) for tensor in model.graph.initializer):
        return model
    found = copied(model)
    for tensor in found.graph.initializer:
        if is_reference(tensor):
            tensor.CopyFrom(numpy_helper.from_array(array(tensor), tensor.name))
    return found


def set_properties(model: ModelProto, properties: Mapping[str, str]) -> None:
    """Write properties in place of those that an opened file brought along."""
    drop_properties(model, properties)
    for key, value in properties.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value


def drop_properties(model: ModelProto, names: Collection[str]) -> None:
    """Remove the properties of these names, in place."""
    retain(model.metadata_props, lambda entry: entry.key not in names)
