"""Random inputs of a model: values on which every op runs, and that tell nothing about the ranges of real data."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, TensorProto, TypeProto, helper

from onnx_backend.proto.graph_queries import declared_sizes, initializers

Array = npt.NDArray[Any]
#: sizes tried for dimensions that the model leaves open, the batch excepted
_SIZES = (8, 1, 32, 64, 224, 576)
_MOST_ELEMENTS = 2**24  # of a random input


def random_array(rng: np.random.Generator, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Return normal floats, or integers 0 and 1, which nearly every index may be."""
    if dtype.kind in "iub":
        return rng.integers(0, 2, shape).astype(dtype)
    return rng.normal(size=shape).astype(dtype)


def random_feeds(model: ModelProto) -> Iterator[dict[str, Array]]:
    """Yield inputs of the declared types and shapes, with several sizes for open dimensions."""
    stored = initializers(model.graph)
    wanted = [value for value in model.graph.input if value.name not in stored]
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for size in _SIZES:
        shapes = [_shape_of(value.type, size) for value in wanted]
        if any(shape is None or 0 in shape for shape in shapes):
            return  # no tensors, or empty ones, on which some of the runtime's kernels abort
        key = tuple(shape for shape in shapes if shape is not None)
        if key in seen or any(np.prod(shape, dtype=np.float64) > _MOST_ELEMENTS for shape in key):
            continue
        seen.add(key)
        rng = np.random.default_rng(0)
        values = {v.name: _random(rng, v.type.tensor_type.elem_type, s) for v, s in zip(wanted, key, strict=True)}
        if any(value is None for value in values.values()):
            return
        yield {name: value for name, value in values.items() if value is not None}


def _shape_of(proto: TypeProto, size: int) -> tuple[int, ...] | None:
    """Return a declared shape with its open dimensions filled: the first with 1, the others with `size`."""
    if not proto.HasField("tensor_type"):
        return None
    filled = enumerate(declared_sizes(proto))
    return tuple((size if axis else 1) if declared is None else declared for axis, declared in filled)


def _random(rng: np.random.Generator, code: int, shape: tuple[int, ...]) -> Array | None:
    """Return an array of a declared type; None if there are no values of it."""
    if code in (TensorProto.STRING, TensorProto.UNDEFINED):
        return np.full(shape, "a", object) if code == TensorProto.STRING else None
    try:
        # sessions take float32 where a model takes bfloat16
        dtype = np.dtype(np.float32 if code == TensorProto.BFLOAT16 else helper.tensor_dtype_to_np_dtype(code))
    except KeyError:
        return None
    return random_array(rng, dtype, shape)
