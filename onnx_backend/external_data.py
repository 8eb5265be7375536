"""Weights that an ONNX file keeps in other files beside it: read once, and never from outside its folder."""

from collections.abc import Iterator
from pathlib import Path

from onnx import GraphProto, ModelProto, TensorProto

from onnx_backend.subgraphs import all_nodes, bodies
from qsdk.core.errors import FileFormatError


def read_external_data(model: ModelProto, path: Path) -> None:
    """Put external tensors into the model that was read from `path`, in place; one tensor at a time is held twice.

    Raises:
        FileFormatError: a file is missing, too short, or outside the model's folder; names the tensor.
    """
    for tensor in _tensors(model):
        if tensor.data_location == TensorProto.EXTERNAL:
            tensor.raw_data = _content(tensor, path)
            tensor.data_location = TensorProto.DEFAULT
            del tensor.external_data[:]


def require_no_external_data(model: ModelProto) -> None:
    """Refuse a model in memory whose weights were left in a file.

    Raises:
        FileFormatError: names the tensor.
    """
    for tensor in _tensors(model):
        if tensor.data_location == TensorProto.EXTERNAL:
            raise FileFormatError(
                f"the tensor {tensor.name!r} of the model lies in another file, whose folder is unknown here; pass the "
                "path of the model instead"
            )


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


def _content(tensor: TensorProto, path: Path) -> bytes:
    facts = {entry.key: entry.value for entry in tensor.external_data}
    location = facts.get("location", "")
    folder = path.parent.resolve()
    file = (folder / location).resolve()
    named = f"{path} keeps the weight {tensor.name!r} in the file {location!r}"
    if not location or Path(location).is_absolute() or not file.is_relative_to(folder):
        raise FileFormatError(f"{named}, which is not in its folder; only files beside the model are read, move it")
    try:
        offset = int(facts.get("offset", 0))
        length = int(facts["length"]) if "length" in facts else None
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            length = size - offset if length is None else length
            if offset < 0 or length < 0 or offset + length > size:
                raise FileFormatError(
                    f"{named}, which has {size} bytes where {offset} + {length} are needed; copy it again, whole"
                )
            opened.seek(offset)
            return bytes(opened.read(length))
    except FileFormatError:
        raise
    except OSError as error:
        raise FileFormatError(f"{named}, which cannot be read ({error.strerror}); put that file beside it") from error
    except ValueError as error:
        raise FileFormatError(f"{named} at a place that is no number ({error}); export the model again") from error
