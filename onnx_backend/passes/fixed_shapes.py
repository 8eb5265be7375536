"""Fix the dynamic axes of a model's inputs, as unrolled and normalising operations need it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, shape_inference

from onnx_backend.proto.graph_queries import declared_sizes, input_names
from qsdk.core.errors import ConfigError

#: Operators that ONNX defines by others, and whose shapes it then does not infer.
_LIKE_THEIR_INPUT = ("GroupNormalization", "MeanVarianceNormalization", "RMSNormalization")


def with_shapes(model: ModelProto, shapes: Mapping[str, Sequence[int | None]]) -> ModelProto:
    """Return a copy whose inputs have these sizes; axes that share the name of a dynamic one change with it.

    Args:
        model: any.
        shapes: input name -> all of its sizes, None for one that stays open.

    Raises:
        ConfigError: an unknown input, another rank, a size below 1, or one that contradicts a fixed one.
    """
    fixed = ModelProto()
    fixed.CopyFrom(model)
    infos = {info.name: info for info in fixed.graph.input if info.name in set(input_names(model.graph))}
    unknown = sorted(set(shapes) - set(infos))
    if unknown:
        raise ConfigError(f"shapes= names {', '.join(unknown)}; the model's inputs are {', '.join(infos)}")
    named: dict[str, set[int]] = {}
    for name, sizes in shapes.items():
        dims = infos[name].type.tensor_type.shape.dim
        if len(sizes) != len(dims) or any(size is not None and size < 1 for size in sizes):
            raise ConfigError(f"shapes[{name!r}] = {list(sizes)}: the input has {len(dims)} axes, of sizes above 0")
        for dim, size in zip(dims, sizes, strict=True):
            if size is None:
                continue
            if dim.HasField("dim_value") and dim.dim_value > 0 and dim.dim_value != size:  # some exporters write -1
                raise ConfigError(f"shapes[{name!r}] = {list(sizes)} contradicts the model's size {dim.dim_value}")
            if dim.dim_param:
                named.setdefault(dim.dim_param, set()).add(int(size))
            dim.dim_value = int(size)
    for info in (*fixed.graph.value_info, *fixed.graph.output):
        for dim in info.type.tensor_type.shape.dim if info.type.tensor_type.HasField("shape") else ():
            if dim.dim_param:
                known = named.get(dim.dim_param, set())
                dim.ClearField("dim_param")  # one without a size is inferred again, as is one of several
                if len(known) == 1:
                    dim.dim_value = next(iter(known))
    return fixed


def with_sizes_of(model: ModelProto, values: Mapping[str, npt.NDArray[Any]]) -> ModelProto:
    """Return a copy whose inputs have the sizes of these values, whatever was declared, and inferred shapes.

    Args:
        model: its inputs may lack a shape altogether.
        values: by input name; inputs without one stay as they are.
    """
    fixed = ModelProto()
    fixed.CopyFrom(model)
    for info in fixed.graph.input:
        if info.name in values:
            shape = info.type.tensor_type.shape
            del shape.dim[:]
            shape.SetInParent()  # a scalar has a shape without axes
            for size in np.shape(values[info.name]):
                shape.dim.add().dim_value = size
    for info in fixed.graph.output:
        info.type.tensor_type.ClearField("shape")
    del fixed.graph.value_info[:]
    return with_inferred_shapes(fixed)


def with_inferred_shapes(model: ModelProto) -> ModelProto:
    """Return a model with the shapes that ONNX can infer; it may contain other operators."""
    return shape_inference.infer_shapes(_inferable(model), data_prop=True)


def static_sizes(model: ModelProto) -> dict[str, tuple[int | None, ...]]:
    """Return the dimensions of every tensor whose shape is known, None for a dynamic one."""
    found: dict[str, tuple[int | None, ...]] = {}
    for info in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if info.type.tensor_type.HasField("shape"):
            found[info.name] = tuple(declared_sizes(info.type))
    found.update((tensor.name, tuple(tensor.dims)) for tensor in model.graph.initializer)
    return found


def _inferable(model: ModelProto) -> ModelProto:
    """Return a model of the same shapes, each operator without inference replaced by its first input."""
    if all(node.op_type not in _LIKE_THEIR_INPUT for node in model.graph.node):
        return model
    result = ModelProto()
    result.CopyFrom(model)
    for node in result.graph.node:
        if node.op_type in _LIKE_THEIR_INPUT and node.domain in ("", "ai.onnx"):
            node.op_type = "Identity"
            del node.input[1:], node.attribute[:]
    return result
