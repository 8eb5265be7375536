"""What an ONNX model is fed."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, helper

from onnx_backend.proto.model import input_names
from qsdk.core.errors import ModelError


@dataclass(frozen=True)
class Input:
    """An input that a caller feeds.

    Attributes:
        name: in the model.
        dtype: of its array.
        shape: a number, the name of an open dimension, or "" for an open one without a name; None if undeclared.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str, ...] | None


def inputs_of(model: ModelProto) -> list[Input]:
    """The inputs of a model in graph order.

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
        found.append(Input(value.name, dtype, sizes if tensor.HasField("shape") else None))
    return found
