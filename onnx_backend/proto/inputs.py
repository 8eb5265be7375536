"""The inputs of an ONNX model, and the sizes that its open axes had in the example it was quantized with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, helper

from onnx_backend.proto.graph_queries import input_names, unique
from onnx_backend.proto.model_io import set_properties
from onnx_backend.proto.nodes import metadata
from qsdk.core.encodings.provenance import EXAMPLE, example_sizes, example_text
from qsdk.core.errors import ModelError


@dataclass(frozen=True)
class ModelInput:
    """An input that a caller feeds.

    Attributes:
        name: in the model.
        dtype: of its array.
        shape: a number, the name of an open dimension, or "" for an open one without a name; None if undeclared.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str, ...] | None


def inputs_of(model: ModelProto) -> list[ModelInput]:
    """Return the inputs that a caller feeds, in graph order.

    Raises:
        ModelError: an input is no tensor that NumPy can hold.
    """
    fed, found = set(input_names(model.graph)), []
    for value in model.graph.input:
        if value.name not in fed:
            continue
        tensor = value.type.tensor_type
        try:
            dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        except KeyError:
            raise ModelError(f"the input {value.name!r} is no numeric tensor; feed the model from Python") from None
        dims = tensor.shape.dim
        sizes = tuple(int(d.dim_value) if d.HasField("dim_value") else str(d.dim_param) for d in dims)
        found.append(ModelInput(value.name, dtype, sizes if tensor.HasField("shape") else None))
    return found


def open_inputs(model: ModelProto) -> dict[str, list[int | None]]:
    """Return the sizes of the inputs that have an open axis, with None for each open axis."""
    names, found = set(input_names(model.graph)), {}
    for info in model.graph.input:
        if info.name in names and info.type.tensor_type.HasField("shape"):
            dims = info.type.tensor_type.shape.dim  # some exporters write -1 for a dynamic one
            sizes = [int(d.dim_value) if d.HasField("dim_value") and d.dim_value > 0 else None for d in dims]
            if None in sizes:
                found[info.name] = sizes
    return found


def note_example(model: ModelProto, example: Mapping[str, npt.ArrayLike] | None) -> None:
    """Note the sizes of an example in a model with open axes, in place: `to_integer` may need them."""
    if example is not None and open_inputs(model):
        tell_axes_apart(model, example)
        set_properties(model, {EXAMPLE: example_text({name: np.shape(value) for name, value in example.items()})})


def tell_axes_apart(model: ModelProto, batch: Mapping[str, npt.ArrayLike]) -> None:
    """Rename, in place, the open axes of inputs that have one name and that a batch has in different sizes.

    ONNX Runtime lets tensors share memory if their sizes have the same name, and does not run a file that uses one name
    for different sizes. Other tensors have no name there afterwards.
    """
    axes = [
        (value.name, dim, size)
        for value in model.graph.input
        if value.name in batch
        for dim, size in zip(value.type.tensor_type.shape.dim, np.shape(batch[value.name]), strict=False)
        if dim.dim_param
    ]
    sizes: dict[str, set[int]] = {}
    for _, dim, size in axes:
        sizes.setdefault(dim.dim_param, set()).add(size)
    several = {name for name, found in sizes.items() if len(found) > 1}
    if not several:
        return
    for value in (*model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in several:
                dim.ClearField("dim_param")
    taken = set(sizes)
    for name, dim, _ in axes:
        if dim.dim_param in several:
            dim.dim_param = unique(f"{dim.dim_param}_{name}", taken)


def noted_example(model: ModelProto) -> dict[str, list[int]]:
    """Return the sizes of the example for inputs with an open axis; nothing if the file notes none that fit."""
    text = metadata(model).get(EXAMPLE, "")
    found, wanted = example_sizes(text), open_inputs(model)
    for name, known in wanted.items():
        given = found.get(name, [])
        if len(given) != len(known) or any(own not in (None, size) for own, size in zip(known, given, strict=True)):
            return {}  # a tool has changed the inputs since
    return {name: found[name] for name in wanted}
