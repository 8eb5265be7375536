"""Fix the value of inputs: they become stored tensors, and whatever follows from them is computed at once."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from onnx import ModelProto, ValueInfoProto, helper, numpy_helper

from onnx_backend.proto.graph_queries import input_names
from onnx_backend.proto.weightless import dtype_name
from qsdk.core.errors import ConfigError


def with_fixed_inputs(model: ModelProto, values: Mapping[str, Any]) -> ModelProto:
    """Store values in place of inputs, in the given model; return it.

    An If whose condition follows from such a value is later replaced by the branch that is taken.

    Args:
        model: float.
        values: by the name of an input; a number, a list or an array that its declared dtype and shape take.

    Raises:
        ConfigError: there is no such input, no other one would be left, or a value that does not fit; names the input.
    """
    declared = {value.name: value for value in model.graph.input if value.name in set(input_names(model.graph))}
    for name, value in values.items():
        if name not in declared:
            raise ConfigError(f"inputs= fixes {name!r}, which is no input; the model's are {', '.join(declared)}")
        model.graph.initializer.append(numpy_helper.from_array(_stored(declared[name], value), name))
    if values and len(values) == len(declared):
        raise ConfigError("inputs= fixes every input of the model, so it would compute one constant; leave one open")
    left = [value for value in model.graph.input if value.name not in values]
    del model.graph.input[:]
    model.graph.input.extend(left)
    return model


def _stored(declared: ValueInfoProto, given: Any) -> np.ndarray[Any, Any]:
    """Return a value in the dtype and shape of its input; one number may stand for an array of one element."""
    tensor, name = declared.type.tensor_type, declared.name
    try:
        value = np.asarray(given)
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        found = value.astype(dtype)
        exact = value.dtype.kind in "biuf" and (dtype.kind == "f" or bool(np.all(found == value)))
    except (KeyError, TypeError, ValueError, OverflowError):
        exact = False
    if not exact:
        kind = dtype_name(tensor.elem_type) or "no tensor of numbers"
        raise ConfigError(f"inputs= fixes {name!r} to {given!r}, and that input is {kind}; give a value it can hold")
    if not tensor.HasField("shape"):
        return found
    sizes = [dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim]
    if found.ndim == 0 and all(size in (1, None) for size in sizes):
        found = found.reshape([1] * len(sizes))
    fits = found.ndim == len(sizes) and all(s in (n, None) for s, n in zip(sizes, found.shape, strict=True))
    if not fits:
        shown = ", ".join("?" if size is None else str(size) for size in sizes)
        raise ConfigError(f"inputs= fixes {name!r} to an array of shape {list(found.shape)}, it takes [{shown}]")
    return found
