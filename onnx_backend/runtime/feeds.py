"""Feed an ONNX session with arrays, tuples (in graph order) or mappings (by name); errors show the remedy."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
from onnx import ModelProto, TensorProto, TypeProto, ValueInfoProto, helper

from onnx_backend.proto.graph_queries import declared_sizes, initializers
from onnx_backend.proto.weightless import dtype_name
from onnx_backend.runtime.user_session import EndedProcessError, UserSession
from qsdk.core.arrays import Array
from qsdk.core.errors import DataError, ModelError
from qsdk.progress import numbered_batches

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


_TYPES: Mapping[str, Any] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(bfloat16)": np.float32,  # the runtime's Python side knows no bfloat16: the session has a Cast inside
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}
_RUNTIME_WORDS = {"float32": "float", "float64": "double"}
_IMAGE = 4  # axes


class DeclaredInput:
    """A graph input as a session would describe it, for models that are not run as a whole.

    Attributes:
        name: in the model.
        type: in the runtime's words, `tensor(float)`.
    """

    def __init__(self, value: ValueInfoProto) -> None:
        """Read name and type of a declared input."""
        dtype = dtype_name(value.type.tensor_type.elem_type)
        self.name, self.type = value.name, f"tensor({_RUNTIME_WORDS.get(dtype, dtype)})"


def as_feeds(batch: Any, inputs: Sequence[Any], where: str) -> dict[str, Array]:
    """Return input name -> array for a batch; an array of another float dtype is cast to that of its input.

    Values that a float16 or bfloat16 input cannot hold are rounded, as a Cast in front of the model would. For a
    bfloat16 input the array is float32. A batch is an array (the only input), a tuple or list (in order) or a mapping
    by name; `where` names it in messages.
    """
    names = [value.name for value in inputs]
    if isinstance(batch, Mapping):
        named = dict(batch)
    else:
        given = list(batch) if isinstance(batch, tuple | list) else [batch]
        if len(given) > len(names):
            raise DataError(
                f"{where} has {len(given)} elements, the model takes {len(names)} ({', '.join(names)}); if the rest "
                "are labels, give mappings by input name, or tuples without them"
            )
        named = dict(zip(names, given, strict=False))
    unknown, missing = sorted(set(named) - set(names)), [name for name in names if name not in named]
    if unknown or missing:
        problem = f"does not take {', '.join(unknown)}" if unknown else f"also needs {', '.join(missing)}"
        raise DataError(f"{where}: the model {problem}; its inputs are {', '.join(names)}")
    feeds = {value.name: as_declared(named[value.name], value.type) for value in inputs}
    for value in inputs:
        _require_fit(feeds[value.name], value, where)
    return feeds


def as_declared(value: Any, wanted: str) -> Array:
    """Return a value as an array of the type of an input, in the runtime's words, if both are of one kind."""
    given = _array(value)
    dtype = np.dtype(_TYPES.get(wanted, given.dtype))
    with np.errstate(over="ignore"):  # too large for a narrower float: infinite, as a Cast makes it
        if wanted == "tensor(bfloat16)" and given.dtype.kind == "f":
            return given.astype(ml_dtypes.bfloat16).astype(np.float32)
        return given.astype(dtype) if given.dtype != dtype and given.dtype.kind == dtype.kind else given


def _array(value: Any) -> Array:
    """Return a value as an array, one of bfloat16 as float32."""
    if str(getattr(value, "dtype", "")) == "torch.bfloat16":  # NumPy cannot take it as it is
        value = value.float()
    given = np.asarray(value)
    return given.astype(np.float32) if given.dtype == ml_dtypes.bfloat16 else given


def _require_fit(given: Array, wanted: Any, where: str) -> None:
    """Refuse an array of a dtype, rank or size that an input does not take, before the runtime does."""
    dtype = np.dtype(_TYPES.get(wanted.type, given.dtype))
    sizes = list(getattr(wanted, "shape", None) or given.shape)  # no declared shape, or a scalar
    fits = len(sizes) == given.ndim and all(
        not isinstance(size, int) or size == actual for size, actual in zip(sizes, given.shape, strict=True)
    )
    if fits and given.dtype == dtype:
        return
    shown = (
        str(size).partition("@")[0] for size in sizes
    )  # simulation_session makes the names unique with a suffix after @
    takes = f"{dtype} [{', '.join(shown)}]"
    remedy = f"convert it with .astype({str(dtype)!r})" if fits else "give arrays of that shape"
    if not fits and given.ndim == len(sizes) == _IMAGE and sizes[1] == given.shape[3] != given.shape[1]:
        remedy = "its channels come last: x.transpose(0, 3, 1, 2) brings them to axis 1"
    elif len(sizes) == given.ndim + 1:
        remedy = "it may lack the batch axis: x[None] adds one"
    raise DataError(
        f"{where}: the input {wanted.name!r} takes {takes}, got {given.dtype} {list(given.shape)}; {remedy}"
    )


def run_session(session: ort.InferenceSession | UserSession, feeds: Mapping[str, Array], where: str) -> list[Array]:
    """Run a session; return its outputs in order."""
    try:
        return [np.asarray(value) for value in session.run(None, dict(feeds))]
    except EndedProcessError as error:
        raise ModelError(f"{error} on {where}; open the model at a lower level of graph optimization") from error
    except Exception as error:  # the runtime's own exception types are private
        shapes = ", ".join(f"{name}: {value.dtype} {value.shape}" for name, value in feeds.items())
        raise DataError(
            f"the model does not run on {where} ({shapes}): {error}; give what its inputs ask for"
        ) from error


def batches_of(
    data: Iterable[Any], title: str, progress: bool, *, skip_empty: bool = True
) -> Iterator[tuple[int, Any]]:
    """Number the batches, with a progress bar; `skip_empty` skips batches without rows."""
    skipped = _has_no_rows if skip_empty else None
    return numbered_batches(data, title, progress, one=(np.ndarray, Mapping), has_no_rows=skipped)


def _has_no_rows(batch: Any) -> bool:
    """Return True if all arrays of a batch have a first axis of length 0."""
    given = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else [batch]
    shapes: list[Any] = [getattr(value, "shape", ()) for value in given]
    return any(shapes) and all(shape[0] == 0 for shape in shapes if shape)
