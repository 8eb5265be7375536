"""Weights that an ONNX file keeps in other files: only in its own folder, and large ones are read on demand.

Inside this process an opened model refers to a large weight by the absolute path of its file, with a stamp of its
state. A file that is no longer the same is refused, so that a sim never mixes the weights of two models.
"""

import math
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper

from onnx_backend.proto.subgraphs import all_nodes, bodies
from onnx_backend.proto.weightless import is_large
from qsdk.core.errors import FileFormatError

INLINE = 2**20  # bytes of a weight that is read at once
#: of types that are packed
BITS: Mapping[int, int] = {
    **dict.fromkeys((TensorProto.INT4, TensorProto.UINT4, TensorProto.FLOAT4E2M1), 4),
    **dict.fromkeys((TensorProto.INT2, TensorProto.UINT2), 2),
}
#: the float types of tensors
FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})
_STAMP = "qsdk.stamp"
_PROCESS = secrets.token_hex(16)  # so that no file can forge a stamp of this process


def read_external_data(model: ModelProto, path: Path, *, inline: int = INLINE) -> None:
    """Resolve the external tensors of the model that was read from `path`, in place.

    Args:
        model: as parsed from `path`.
        path: of the model.
        inline: weights of up to so many bytes are read; a larger one stays in its file until `external_array`.

    Raises:
        FileFormatError: a file is missing, too short, or outside the model's folder; names the tensor.
    """
    for tensor in model.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL and is_large(tensor.dims):
            file, offset, length = _place(tensor, path)
            # a tensor of another length than its shape needs is read, so that the check of stored tensors names it
            if length > inline and length == bytes_of(tensor.data_type, tensor.dims):
                refer(tensor, file, offset, length)
    for tensor in _tensors(model):
        if tensor.data_location == TensorProto.EXTERNAL and not is_reference(tensor):
            file, offset, length = _place(tensor, path)
            with file.open("rb") as opened:
                opened.seek(offset)
                tensor.raw_data = opened.read(length)
            tensor.ClearField("data_location")
            del tensor.external_data[:]


def refer(tensor: TensorProto, file: Path, offset: int, length: int) -> None:
    """Make a tensor refer to a part of a file that this process has opened."""
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    facts = {"location": str(file), "offset": offset, "length": length, _STAMP: f"{_PROCESS} {_stamp(file)}"}
    for key, value in facts.items():
        tensor.external_data.add(key=key, value=str(value))


def is_reference(tensor: TensorProto) -> bool:
    """Return True if a tensor refers to a file that this process has opened."""
    return tensor.data_location == TensorProto.EXTERNAL and _facts(tensor).get(_STAMP, "").startswith(_PROCESS)


def reference(tensor: TensorProto) -> tuple[Path, int, int]:
    """Return the file, offset and length that a reference names.

    Raises:
        FileFormatError: it is no reference of this process, or its file is another one by now.
    """
    facts = _facts(tensor)
    if not is_reference(tensor):
        raise FileFormatError(
            f"the tensor {tensor.name!r} of the model lies in another file, whose folder is unknown here; pass the "
            "path of the model instead"
        )
    file = Path(facts["location"])
    if not file.exists() or facts[_STAMP] != f"{_PROCESS} {_stamp(file)}":
        raise FileFormatError(
            f"{file}, which holds the weight {tensor.name!r}, was replaced or removed after the model was opened; open "
            "the model again"
        )
    return file, int(facts["offset"]), int(facts["length"])


def array(tensor: TensorProto) -> npt.NDArray[Any]:
    """Return the value of a stored tensor, also one in a file; 2 and 4 bits and minifloats in ml_dtypes' types."""
    if tensor.data_location == TensorProto.EXTERNAL:
        return external_array(tensor)
    return np.asarray(numpy_helper.to_array(tensor))


def float_array(tensor: TensorProto) -> npt.NDArray[Any]:
    """Return the value of a stored tensor, that of a float one of any type in float32."""
    return array(tensor).astype(np.float32, copy=False) if tensor.data_type in FLOATS else array(tensor)


def external_array(tensor: TensorProto) -> npt.NDArray[Any]:
    """Return the value of a tensor that refers to a file; whole bytes are mapped from the file, not copied.

    Raises:
        FileFormatError: the file is another one by now.
    """
    file, offset, length = reference(tensor)
    shape = tuple(tensor.dims)
    if tensor.data_type in BITS:
        with file.open("rb") as opened:
            opened.seek(offset)
            packed = TensorProto(data_type=tensor.data_type, dims=shape, raw_data=opened.read(length))
        return np.asarray(numpy_helper.to_array(packed))
    mapped = np.memmap(file, np.uint8, "r", offset, (length,))
    return np.asarray(mapped.view(np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))).reshape(shape))


def bytes_of(data_type: int, dims: Sequence[int]) -> int:
    """Return the number of bytes of a tensor of this type and shape in a file; 0 for strings and unknown types."""
    try:
        bits = BITS.get(data_type) or 8 * int(np.dtype(helper.tensor_dtype_to_np_dtype(data_type)).itemsize)
    except KeyError:
        return 0
    return -(-math.prod(dims) * bits // 8)


def files_read(model: ModelProto) -> set[Path]:
    """Return the files that a model's references name."""
    return {Path(_facts(tensor)["location"]) for tensor in model.graph.initializer if is_reference(tensor)}


def require_no_external_data(model: ModelProto) -> None:
    """Refuse a model in memory whose weights were left in a file that this process has not opened.

    Raises:
        FileFormatError: names the tensor.
    """
    for tensor in _tensors(model):
        if tensor.data_location == TensorProto.EXTERNAL and not is_reference(tensor):
            reference(tensor)


def _facts(tensor: TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def _stamp(file: Path) -> str:
    facts = file.stat()
    return f"{facts.st_dev} {facts.st_ino} {facts.st_size} {facts.st_mtime_ns}"


def _tensors(model: ModelProto) -> Iterator[TensorProto]:
    yield from _tensors_of(model.graph)
    for function in model.functions:
        for node in all_nodes(function.node):
            for attribute in node.attribute:
                yield from (attribute.t, *attribute.tensors) if attribute.HasField("t") else attribute.tensors


def _tensors_of(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors) if attribute.HasField("t") else attribute.tensors
        for _, body in bodies(node):
            yield from _tensors_of(body)


def _place(tensor: TensorProto, path: Path) -> tuple[Path, int, int]:
    """Return the file, offset and length of an external tensor, checked."""
    facts = _facts(tensor)
    location = facts.get("location", "")
    named = f"{path} keeps the weight {tensor.name!r} in the file {location!r}"
    file = _beside(path, location, named)
    try:
        offset = int(facts.get("offset", 0))
        size = file.stat().st_size
        length = int(facts["length"]) if "length" in facts else bytes_of(tensor.data_type, tensor.dims)
        if not file.is_file():
            raise FileFormatError(f"{named}, which is no ordinary file; put the weights beside the model")
        os.close(os.open(file, os.O_RDONLY))
    except OSError as error:
        raise FileFormatError(f"{named}, which cannot be read ({error.strerror}); put that file beside it") from error
    except ValueError as error:
        raise FileFormatError(f"{named} at a place that is no number ({error}); export the model again") from error
    if offset < 0 or length < 0 or offset + length > size:
        raise FileFormatError(
            f"{named}, which has {size} bytes where {offset} + {length} are needed; copy it again, whole"
        )
    return file, offset, length


def _beside(path: Path, location: str, named: str) -> Path:
    """Return the file at this location in the model's folder; links are followed, but not out of it."""
    folder = path.parent.resolve()
    try:
        file = (folder / location).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a circle of links, a NUL in the name
        raise FileFormatError(f"{named}, which is no name of a file ({error}); export the model again") from error
    if not location or Path(location).is_absolute() or not file.is_relative_to(folder) or file == folder:
        raise FileFormatError(f"{named}, which is not in its folder; only files beside the model are read, move it")
    return file
