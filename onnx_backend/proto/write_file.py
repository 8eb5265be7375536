"""Write an ONNX file without ever holding it: large tensors are streamed, into the file or into one beside it."""

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from onnx import GraphProto, ModelProto, TensorProto

from onnx_backend.proto.external_data import DATA_KEY, data_facts, data_files, data_name, is_reference, point_to, refer
from onnx_backend.proto.lazy_tensors import LargeTensor, as_stored, as_stub, copy_fields, is_stub, without_large
from onnx_backend.proto.model_io import drop_properties
from onnx_backend.proto.weightless import is_large
from qsdk.core.atomic_files import Stage, staging_with
from qsdk.core.errors import ExportError

_ALIGNMENT = 4096  # so that a runtime can map a tensor into memory
SINGLE = 2**31 - 2**20  # bytes that one protobuf message may have, with some room


@dataclass(frozen=True)
class StagedModel:
    """A model that was written under a temporary name, with its data file in place.

    Attributes:
        staged: where it is.
        path: the name that it is to have.
        model: that is in it, with stubs for its large tensors.
        size: bytes, with its data file.
    """

    staged: Path
    path: Path
    model: ModelProto
    size: int


#: raises an error about a model that is not to be written
Check = Callable[[StagedModel], None]


def write_files(
    models: Mapping[Path, ModelProto],
    large: Mapping[str, LargeTensor],
    *,
    base: Path,
    external_data: bool | None = None,
    companions: Mapping[Path, str | bytes | IO[bytes]] | None = None,
    in_use: Collection[Path] = (),
    check: Check | None = None,
) -> list[Path]:
    """Write a model, or several of one folder that share their weights, so that either all old files stand or all new.

    Models are renamed into place last, and name the data with its hash. Of several, between two renames and after a
    crash there, the first is the new one and the next still the old one, with its own data. Data files of earlier
    models are removed after that.

    Args:
        models: by path, with stubs for large tensors; their metadata is changed.
        large: by name; equal names in two models are one tensor.
        base: what data files are named after: the path of the model, or of several a name at which nothing is written.
        external_data: True to keep large tensors of one model in a file beside it, as those of several are; None for
            only where one file cannot hold them.
        companions: texts, or files open for reading, by path.
        in_use: files that are still read, which are not removed.
        check: is called for each model before anything old is replaced; what it raises leaves that as it is.

    Returns:
        The paths that were written: the models, the companions, the data file.
    """
    alone, outside, beside = base in models, dict[str, LargeTensor](), True
    for model in models.values():
        drop_properties(model, (DATA_KEY,))  # that of the file it was opened from
        own = outside_of(model, large)
        ours = {t.name for t in model.graph.initializer if alone or is_stub(t) or is_reference(t)}
        outside |= {name: tensor for name, tensor in own.items() if name in ours}
        if alone:
            size = sum(map(_length, _layout(model, outside)))
            beside = size > SINGLE if external_data is None else external_data
            if not beside and size > SINGLE:
                raise ExportError(
                    f"the model has {size} bytes, and one ONNX file holds 2 GiB; export it without external_data=False"
                )
    places = {Path(os.path.realpath(path)): model for path, model in models.items()}
    with staging_with(base, companions or {}) as (stage, renames):
        kept, beside_them = set(in_use), 0
        if beside and outside:
            temporary, data = _staged_data(stage, models.values(), outside)
            kept.add(data)
            beside_them = temporary.stat().st_size
            outside = {}
            if data not in in_use:  # else it holds the same bytes, and its readers are not disturbed
                renames.insert(0, (temporary, data))
        staged = {path: stage.write(partial(_write_message, model=places[path], outside=outside)) for path in places}
        if check is not None:
            with _in_place(stage, renames, kept - set(in_use)):
                for path, model in places.items():
                    check(StagedModel(staged[path], path, model, staged[path].stat().st_size + beside_them))
        renames += [(temporary, path) for path, temporary in staged.items()]
        stage.commit(renames, drop=lambda: data_files(stage.target) - kept)
    return [*models, *(companions or {}), *sorted(kept - set(in_use))]


@contextmanager
def _in_place(stage: Stage, renames: list[tuple[Path, Path]], data: Collection[Path]) -> Iterator[None]:
    """Give a new data file its name, by which models refer to it, for the block; if that raises, remove it.

    No other model refers to it, unless it was there before: its name is that of its content.
    """
    new = [(temporary, path) for temporary, path in renames if path in data and not path.exists()]
    stage.commit(new)
    for rename in new:
        renames.remove(rename)
    try:
        yield
    except BaseException:
        for _, path in new:
            path.unlink(missing_ok=True)
        raise


def places_of(tensors: Mapping[str, LargeTensor]) -> dict[str, tuple[int, int]]:
    """Return name -> offset and length in a data file that holds these tensors in order."""
    found, end = {}, 0
    for name, tensor in tensors.items():
        start = end + -end % _ALIGNMENT
        found[name] = start, tensor.nbytes
        end = start + tensor.nbytes
    return found


def write_data(file: IO[bytes], tensors: Mapping[str, LargeTensor]) -> None:
    """Write tensors at the places of `places_of`, each from its pieces."""
    end = 0
    for name, (start, length) in places_of(tensors).items():
        file.write(bytes(start - end))
        end = start + sum(file.write(piece) for piece in tensors[name].pieces())
        if end != start + length:
            raise ExportError(f"the stored tensor {name!r} has {end - start} bytes, not {length}: a defect of qsdk")


def spool_large_tensors(model: ModelProto, large: Mapping[str, LargeTensor], path: Path) -> ModelProto:
    """Write a model's large tensors to `path`, unless they lie in files already; return a copy that refers to them."""
    light, outside = split_large_tensors(model, large)
    try:
        with path.open("wb") as file:
            write_data(file, outside)
    except OSError as error:
        raise ExportError(f"cannot write {path}: {error}; point TMPDIR to a folder with room") from error
    refer_to(light, path, places_of(outside))
    return light


def split_large_tensors(
    model: ModelProto, large: Mapping[str, LargeTensor]
) -> tuple[ModelProto, dict[str, LargeTensor]]:
    """Return a copy of a model with stubs for its large tensors, and these by name, except those in files already."""
    light, outside = without_large(model), outside_of(model, large)
    return light, {tensor.name: outside[tensor.name] for tensor in light.graph.initializer if is_stub(tensor)}


def with_stubs(model: ModelProto, outside: Collection[str]) -> ModelProto:
    """Return a copy of a model with stubs for the stored tensors of these names."""
    light = without_large(model)
    for tensor in light.graph.initializer:
        if tensor.name in outside:
            tensor.CopyFrom(as_stub(tensor.name, tensor.data_type, tensor.dims))
    return light


def refer_to(model: ModelProto, path: Path, places: Mapping[str, tuple[int, int]]) -> None:
    """Make stubs refer to a file that holds them at these places, in place."""
    for tensor in model.graph.initializer:
        if is_stub(tensor):
            refer(tensor, path, *places[tensor.name])


def outside_of(model: ModelProto, large: Mapping[str, LargeTensor]) -> dict[str, LargeTensor]:
    """Return the large tensors of a model by name: its stubs, references to files, and what it holds itself."""
    return {tensor.name: found for tensor in model.graph.initializer if (found := _outside(tensor, large))}


def _outside(tensor: TensorProto, large: Mapping[str, LargeTensor]) -> LargeTensor | None:
    if is_stub(tensor):
        return large[tensor.name]
    return as_stored(tensor) if is_reference(tensor) or is_large(tensor.dims) else None


def _staged_data(stage: Stage, models: Iterable[ModelProto], outside: Mapping[str, LargeTensor]) -> tuple[Path, Path]:
    temporary, at = stage.write(partial(_write_data, outside=outside)), places_of(outside)
    facts = data_facts(temporary)
    name = data_name(stage.target, str(facts["sha256"]))
    for model in models:
        for tensor in model.graph.initializer:
            if tensor.name in at:
                tensor.CopyFrom(outside[tensor.name].stub(tensor.name))
                point_to(tensor, name, *at[tensor.name])
        model.metadata_props.add(key=DATA_KEY, value=json.dumps({"file": name, **facts}))
    return temporary, stage.target.with_name(name)


def _write_data(path: Path, outside: Mapping[str, LargeTensor]) -> None:
    with path.open("wb") as file:
        write_data(file, outside)


def _write_message(path: Path, model: ModelProto, outside: Mapping[str, LargeTensor]) -> None:
    with path.open("wb") as file:
        write_message(file, model, outside)


def write_message(file: IO[bytes], model: ModelProto, outside: Mapping[str, LargeTensor]) -> None:
    """Write the bytes of `model.SerializeToString()` as if the model held its large tensors."""
    for part in _layout(model, outside):
        if isinstance(part, bytes):
            file.write(part)
        elif sum(file.write(piece) for piece in part.pieces()) != part.nbytes:
            raise ExportError(f"a stored tensor of shape {part.dims} has the wrong size, a defect of qsdk")


def _layout(model: ModelProto, outside: Mapping[str, LargeTensor]) -> list[bytes | LargeTensor]:
    """Return a model's bytes in order, large tensors included: https://protobuf.dev/programming-guides/encoding."""
    stored: list[bytes | LargeTensor] = []
    for tensor in model.graph.initializer:
        body: list[bytes | LargeTensor] = [tensor.SerializeToString()]
        large = outside.get(tensor.name)
        if large is not None:
            head = TensorProto(name=tensor.name, data_type=large.data_type, dims=large.dims)
            body = [head.SerializeToString() + _key(head, "raw_data") + _varint(large.nbytes), large]
        stored += [_key(model.graph, "initializer") + _varint(sum(map(_length, body))), *body]
    graph = [*_around(model.graph, "initializer", stored)]
    return _around(model, "graph", [_key(model, "graph") + _varint(sum(map(_length, graph))), *graph])


def _around(
    message: ModelProto | GraphProto, field: str, parts: list[bytes | LargeTensor]
) -> list[bytes | LargeTensor]:
    """Return a message's other fields, in the order of their numbers, around the parts of `field`."""
    number = message.DESCRIPTOR.fields_by_name[field].number
    before, after = type(message)(), type(message)()
    copy_fields(message, before, lambda other: other < number)
    copy_fields(message, after, lambda other: other > number)
    return [before.SerializeToString(), *parts, after.SerializeToString()]


def _length(part: bytes | LargeTensor) -> int:
    return len(part) if isinstance(part, bytes) else part.nbytes


def _key(message: ModelProto | GraphProto | TensorProto, field: str) -> bytes:
    """Return the tag of a field whose length follows."""
    return _varint(message.DESCRIPTOR.fields_by_name[field].number << 3 | 2)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])
