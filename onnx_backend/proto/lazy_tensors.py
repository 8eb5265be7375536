"""Large stored tensors outside their model: each is computed piece by piece while it is written, never held whole."""

import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import EllipsisType
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper

from onnx_backend.proto.external_data import BITS, array, bytes_of, is_reference
from onnx_backend.proto.weightless import is_large
from qsdk.core.arrays import Array, Floats
from qsdk.core.numerics.encoding import Encoding, storage_type

PIECE = 2**20  # elements that are made at once
_GRAPH = ModelProto.DESCRIPTOR.fields_by_name["graph"].number
_INITIALIZER = GraphProto.DESCRIPTOR.fields_by_name["initializer"].number


@dataclass(frozen=True)
class LoweredModel:
    """A model with Q/DQ whose large stored tensors are yet to be made.

    Attributes:
        model: with stubs in their places.
        large: by name.
        rows: one per site: `site`, `dtype`, `form`, `zero_point_bytes_saved`.
    """

    model: ModelProto
    large: Mapping[str, "LargeTensor"]
    rows: list[dict[str, Any]]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the large tensors."""
        return sum(self.large[tensor.name].nbytes for tensor in self.model.graph.initializer if is_stub(tensor))


@dataclass(frozen=True)
class LargeTensor:
    """A stored tensor that is made of another one, a part at a time.

    Attributes:
        data_type: of TensorProto.
        dims: its shape.
        source: returns the tensor that it is computed from; called once for each pass over it.
        part: `(source, first, last)` returns these rows, along the first axis, in the tensor's own NumPy type.
        step: parts begin at multiples of it.
    """

    data_type: int
    dims: tuple[int, ...]
    source: Callable[[], Array]
    part: Callable[[Array, int, int], Array]
    step: int = 1

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensor in a file, 2 and 4 bits packed."""
        return bytes_of(self.data_type, self.dims)

    def parts(self) -> Iterator[Array]:
        """Yield the rows of the tensor in order, a few at a time."""
        source, per_row = self.source(), max(math.prod(self.dims[1:]), 1)
        step = self.step if self.data_type not in BITS or per_row % 4 == 0 else math.lcm(self.step, 4)
        count = max(PIECE // per_row // step, 1) * step
        for first in range(0, self.dims[0], count):
            yield self.part(source, first, min(first + count, self.dims[0]))
            release(source)

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of the tensor in order, as ONNX stores them."""
        for part in self.parts():
            yield numpy_helper.from_array(np.ascontiguousarray(part)).raw_data

    def value(self) -> Array:
        """Return the whole tensor."""
        if not is_large(self.dims):  # it may have no axis, or nothing along it
            return self.part(self.source(), 0, self.dims[0] if self.dims else 1)
        parts = self.parts()
        first = next(parts)
        result, end = np.empty(self.dims, first.dtype), len(first)
        result[:end] = first
        for part in parts:  # one after the other: a list of all would be the tensor once more
            result[end : end + len(part)] = part
            end += len(part)
        return result

    def stub(self, name: str) -> TensorProto:
        """Return a placeholder for the tensor (name, type and shape) for the model until it is written."""
        return as_stub(name, self.data_type, self.dims)


def release(values: Array) -> None:
    """Release the memory into which a file was mapped for an array; it is read anew if it is needed again."""
    owner: Any = values
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        owner.madvise(mmap.MADV_DONTNEED)


def as_stored(tensor: TensorProto) -> LargeTensor:
    """Return a tensor as it is, read from its model or its file on demand."""
    return LargeTensor(tensor.data_type, tuple(tensor.dims), lambda: array(tensor), _rows)


def as_stored_in(model: ModelProto) -> dict[str, LargeTensor]:
    """Return the large stored tensors of a model as they are, by name."""
    wanted = (t for t in model.graph.initializer if is_large(t.dims) and not is_stub(t))
    return {tensor.name: as_stored(tensor) for tensor in wanted}


def from_source(source: Callable[[], Array], dims: Sequence[int]) -> LargeTensor:
    """Return a float32 tensor of this shape whose values `source` returns on demand."""
    return LargeTensor(TensorProto.FLOAT, tuple(dims), source, _rows)


def as_array(values: Array) -> LargeTensor:
    """Return an array as it is, which the model then does not copy."""
    return LargeTensor(int(helper.np_dtype_to_tensor_dtype(values.dtype)), values.shape, lambda: values, _rows)


def as_given(model: ModelProto, weights: Mapping[str, Array]) -> dict[str, LargeTensor]:
    """Return the stubs of a model as large tensors whose values `weights` holds, each looked up on demand."""
    return {
        tensor.name: LargeTensor(tensor.data_type, tuple(tensor.dims), partial(weights.__getitem__, tensor.name), _rows)
        for tensor in model.graph.initializer
        if is_stub(tensor) and tensor.name in weights
    }


def narrow(values: LargeTensor, data_type: int) -> LargeTensor:
    """Return the same values in another float type; values too large become infinite."""
    dtype = helper.tensor_dtype_to_np_dtype(data_type)

    def part(source: Array, first: int, last: int) -> Array:
        with np.errstate(over="ignore"):
            return values.part(source, first, last).astype(dtype)

    return replace(values, data_type=data_type, part=part)


def quantize_tensor(encoding: Encoding, values: LargeTensor, permutation: Sequence[int] | None) -> LargeTensor:
    """Return the codes of stored float values, transposed by `permutation`."""
    code = int(helper.np_dtype_to_tensor_dtype(storage_type(encoding.dtype)))
    return _on_grid(encoding, values, permutation, code, Encoding.quantize)


def on_grid(encoding: Encoding, values: LargeTensor, permutation: Sequence[int] | None) -> LargeTensor:
    """Return the float32 values that the codes of `quantize_tensor` represent."""
    return _on_grid(encoding, values, permutation, TensorProto.FLOAT, Encoding.fake_quantize)


def _on_grid(
    encoding: Encoding,
    values: LargeTensor,
    permutation: Sequence[int] | None,
    data_type: int,
    make: Callable[[Encoding, Array], Array],
) -> LargeTensor:
    dims = values.dims
    require_fit(encoding, dims)
    order = tuple(range(len(dims)) if permutation is None else permutation)
    lead = order[0] if order else 0

    def part(source: Array, first: int, last: int) -> Array:
        rows = _rows(source, first, last, lead)
        return make(_of_rows(encoding, lead, len(dims), first, last), rows).transpose(order)

    along = encoding.axis is not None and encoding.axis % len(order) == lead
    step = (encoding.block_size or 1) if along else 1
    return LargeTensor(data_type, tuple(dims[axis] for axis in order), values.source, part, step)


def require_fit(encoding: Encoding, dims: Sequence[int]) -> None:
    """Refuse an encoding whose scales do not fit the shape of a tensor."""
    if encoding.axis is None:
        return
    if not -len(dims) <= encoding.axis < len(dims):
        raise ValueError(f"axis {encoding.axis} is outside a tensor of shape {tuple(dims)}")
    axis = encoding.axis % len(dims)
    wanted: tuple[int, ...] = (dims[axis],)
    if encoding.block_size is not None:
        wanted = (*dims[:axis], -(-dims[axis] // encoding.block_size), *dims[axis + 1 :])
    if encoding.scale.shape != wanted:
        raise ValueError(f"a scale of shape {encoding.scale.shape} where {wanted} is needed")


def fake_quantize(encoding: Encoding, values: Array) -> Floats:
    """Return the values moved to the nearest points of their grid."""
    result = np.empty(values.shape, np.float32)
    for rows, part in rows_of(encoding, values.shape):
        result[rows] = part.fake_quantize(values[rows])
    return result


def rows_of(encoding: Encoding, dims: Sequence[int]) -> Iterator[tuple[slice | EllipsisType, Encoding]]:
    """Yield the rows of a tensor along its first axis, a few at a time, each with their encoding."""
    if not is_large(dims):
        yield ..., encoding
        return
    step = encoding.block_size or 1
    count = max(PIECE // math.prod(dims[1:]) // step, 1) * step
    for first in range(0, dims[0], count):
        last = min(first + count, dims[0])
        yield slice(first, last), _of_rows(encoding, 0, len(dims), first, last)


def _of_rows(encoding: Encoding, lead: int, rank: int, first: int, last: int) -> Encoding:
    """Return the encoding of the rows `first` to `last` along the axis `lead`; blocks along it begin at `first`."""
    if encoding.axis is None or (encoding.block_size is None and encoding.axis % rank != lead):
        return encoding
    where: tuple[slice, ...] = (slice(first, last),)
    if encoding.block_size is not None:
        step = encoding.block_size if encoding.axis % rank == lead else 1
        where = (slice(None),) * lead + (slice(first // step, -(-last // step)),)
    return replace(encoding, scale=encoding.scale[where], zero_point=encoding.zero_point[where])


def without_large(model: ModelProto) -> ModelProto:
    """Copy a model with a stub in the place of each large stored tensor that is not in a file."""
    light = ModelProto()
    copy_fields(model, light, lambda number: number != _GRAPH)
    copy_fields(model.graph, light.graph, lambda number: number != _INITIALIZER)
    for tensor in model.graph.initializer:
        leaves = is_large(tensor.dims) and not is_reference(tensor)
        light.graph.initializer.append(as_stub(tensor.name, tensor.data_type, tensor.dims) if leaves else tensor)
    return light


def with_large(model: ModelProto, large: Mapping[str, LargeTensor]) -> ModelProto:
    """Replace the stubs of a model by its large tensors, in place."""
    for tensor in model.graph.initializer:
        if is_stub(tensor):
            tensor.ClearField("data_location")
            tensor.raw_data = b"".join(large[tensor.name].pieces())
    return model


def copy_fields(
    source: ModelProto | GraphProto, target: ModelProto | GraphProto, wanted: Callable[[int], bool]
) -> None:
    """Copy the fields of a message whose numbers are wanted."""
    for field, value in source.ListFields():
        if not wanted(field.number):
            continue
        if field.is_repeated:
            getattr(target, field.name).extend(value)
        elif field.message_type is not None:
            getattr(target, field.name).CopyFrom(value)
        else:
            setattr(target, field.name, value)


def is_stub(tensor: TensorProto) -> bool:
    """Return True if a tensor is only a placeholder for a large one."""
    return tensor.data_location == TensorProto.EXTERNAL and not tensor.external_data


def _rows(values: Array, first: int, last: int, axis: int = 0) -> Array:
    return values[(slice(None),) * axis + (slice(first, last),)] if values.ndim else values


def as_stub(name: str, data_type: int, dims: Sequence[int]) -> TensorProto:
    """Return a placeholder for a large tensor: it records that the values are elsewhere, but not where."""
    return TensorProto(name=name, data_type=data_type, dims=dims, data_location=TensorProto.EXTERNAL)
