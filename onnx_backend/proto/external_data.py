"""Weights that an ONNX file keeps in other files: only in its own folder, and large ones are read on demand.

Inside this process an opened model refers to a large weight by the absolute path of its file, with a stamp of its
state. A file that is no longer the same is refused, so that a sim never mixes the weights of two models.

An exported model has its weights in a file that is named by its content, so that an old model keeps its own. It records
the size and the hashes of that file: opening checks the size and a sample of the pages, which finds a file that is cut
short or another model's in milliseconds; `whole` reads everything, for single bits.
"""

import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnx_backend.proto.nodes import metadata
from onnx_backend.proto.subgraphs import all_nodes
from onnx_backend.proto.weightless import is_large
from qsdk.core.arrays import Array
from qsdk.core.errors import FileFormatError

DATA_KEY = "qsdk.data"
INLINE = 2**20  # bytes of a weight that is read at once
#: of types that are packed
BITS: Mapping[int, int] = {
    **dict.fromkeys((TensorProto.INT4, TensorProto.UINT4, TensorProto.FLOAT4E2M1), 4),
    **dict.fromkeys((TensorProto.INT2, TensorProto.UINT2), 2),
}
#: the float types of tensors
FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})
_PAGE, _PAGES = 4096, 4096  # a sample; a file of up to 16 MiB is read whole
_STAMP = "qsdk.stamp"
_PROCESS = secrets.token_hex(16)  # so that no file can forge a stamp of this process


def read_external_data(model: ModelProto, path: Path, *, inline: int = INLINE) -> None:
    """Resolve the external tensors of the model that was read from `path`, in place; a bad place is refused.

    Weights of up to `inline` bytes are read; a larger one stays in its file until `external_array`.
    """
    for tensor in model.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL and is_large(tensor.dims):
            file, offset, length = _place(tensor, path)
            # a tensor of another length than its shape needs is read, so that the check of stored tensors names it
            if length > inline and length == bytes_of(tensor.data_type, tensor.dims):
                refer(tensor, file, offset, length)
    for tensor in _elsewhere(model):
        file, offset, length = _place(tensor, path)
        with file.open("rb") as opened:
            opened.seek(offset)
            tensor.raw_data = opened.read(length)
        tensor.ClearField("data_location")
        del tensor.external_data[:]


def refer(tensor: TensorProto, file: Path, offset: int, length: int) -> None:
    """Make a tensor refer to a part of a file that this process has opened."""
    point_to(tensor, str(file), offset, length)
    tensor.external_data.add(key=_STAMP, value=f"{_PROCESS} {_stamp(file)}")


def point_to(tensor: TensorProto, location: str, offset: int, length: int) -> None:
    """Note in a tensor that its values lie in a file, and where there."""
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in {"location": location, "offset": offset, "length": length}.items():
        tensor.external_data.add(key=key, value=str(value))


def is_reference(tensor: TensorProto) -> bool:
    """Return True if a tensor refers to a file that this process has opened."""
    return tensor.data_location == TensorProto.EXTERNAL and _facts(tensor).get(_STAMP, "").startswith(_PROCESS)


def reference(tensor: TensorProto) -> tuple[Path, int, int]:
    """Return the file, offset and length that a reference names; one that does not hold any more is refused."""
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


def array(tensor: TensorProto) -> Array:
    """Return the value of a stored tensor, also one in a file; 2 and 4 bits and minifloats in ml_dtypes' types."""
    if tensor.data_location == TensorProto.EXTERNAL:
        return external_array(tensor)
    return np.asarray(numpy_helper.to_array(tensor))


def float_array(tensor: TensorProto) -> Array:
    """Return the value of a stored tensor, that of a float one of any type in float32."""
    return array(tensor).astype(np.float32, copy=False) if tensor.data_type in FLOATS else array(tensor)


def external_array(tensor: TensorProto) -> Array:
    """Return the value of a tensor that refers to a file; whole bytes are mapped from the file, not copied."""
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
    """Refuse a model in memory whose weights were left in a file that this process has not opened."""
    for tensor in _elsewhere(model):
        reference(tensor)


def _facts(tensor: TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def _stamp(file: Path) -> str:
    facts = file.stat()
    return f"{facts.st_dev} {facts.st_ino} {facts.st_size} {facts.st_mtime_ns}"


def _elsewhere(model: ModelProto) -> Iterator[TensorProto]:
    """Yield the tensors of a model, at any depth, whose values lie in files that this process has not opened."""
    nodes = chain(all_nodes(model.graph.node), *(all_nodes(function.node) for function in model.functions))
    attributes = [attribute for node in nodes for attribute in node.attribute]
    graphs = [attribute.g for attribute in attributes] + [graph for one in attributes for graph in one.graphs]
    for tensor in chain(
        *(graph.initializer for graph in (model.graph, *graphs)), *((one.t, *one.tensors) for one in attributes)
    ):
        if tensor.data_location == TensorProto.EXTERNAL and not is_reference(tensor):
            yield tensor


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


def data_facts(path: Path) -> dict[str, str | int]:
    """Return what a model records of its data file: `bytes`, `sha256`, and `sample_sha256` of a sample of its pages."""
    return {"bytes": path.stat().st_size, "sha256": _hash(path), "sample_sha256": _sample_hash(path)}


def data_name(model: Path, sha256: str) -> str:
    """Return the name of a model's data file: `model.onnx` -> `model.onnx.0123456789abcdef.data`."""
    return f"{model.name}.{sha256[:16]}.data"


def data_files(model: Path) -> set[Path]:
    """Return the data files beside a model that bear its name, those of earlier exports included."""
    name = re.compile(rf"{re.escape(model.name)}\.[0-9a-f]{{16}}\.data")
    found = (entry for entry in model.parent.iterdir() if name.fullmatch(entry.name))
    return {entry for entry in found if entry.is_file() and not entry.is_symlink()}


def require_data(model: ModelProto, path: Path, *, whole: bool = False) -> None:
    """Refuse a model, as parsed from `path`, whose data file is not the one that was written with it."""
    text = metadata(model).get(DATA_KEY)
    if text is None:
        return
    try:
        recorded = json.loads(text)
        file = path.parent / recorded["file"]
        recorded_size, sample_hash, whole_hash = recorded["bytes"], recorded["sample_sha256"], recorded["sha256"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FileFormatError(f"{path} is damaged: its {DATA_KEY} cannot be read; export the model again") from error
    if all(_facts(tensor).get("location") != recorded["file"] for tensor in model.graph.initializer):
        return  # another tool has stored the weights elsewhere since
    remedy = "an export was interrupted or one file was replaced; copy both files again, or export again"
    if not file.is_file():
        raise FileFormatError(f"{file}, which holds the weights of {path}, is missing: {remedy}")
    size = file.stat().st_size
    if size != recorded_size:
        raise FileFormatError(f"{file} has {size} bytes, not the {recorded_size} of {path}: {remedy}")
    if _sample_hash(file) != sample_hash or (whole and _hash(file) != whole_hash):
        raise FileFormatError(f"{file} does not belong to {path}: {remedy}")


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
