"""A copy of a model without its large weights: enough for shape inference and the version converter, and cheap."""

import math
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, TypeProto, helper

from qsdk.core.errors import ModelError

LARGE = 4096  # weights beyond this many elements are left out
Shape = tuple[int | str | None, ...]
Types = Mapping[str, tuple[str, Shape | None]]


def is_large(dims: Sequence[int]) -> bool:
    """Return True if a stored tensor of this shape counts as large."""
    return math.prod(dims) > LARGE


def skeleton(model: ModelProto, *, value_info: bool = True) -> ModelProto:
    """Return a copy of a model, each large weight replaced by a graph input of its name, type and shape."""
    light = ModelProto(ir_version=model.ir_version, producer_name=model.producer_name)
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    graph = light.graph
    graph.name = model.graph.name or "graph"
    graph.input.extend(model.graph.input)
    graph.output.extend(model.graph.output)
    graph.node.extend(model.graph.node)
    graph.sparse_initializer.extend(model.graph.sparse_initializer)
    if value_info:
        graph.value_info.extend(model.graph.value_info)
    given = {value.name for value in graph.input}
    for tensor in model.graph.initializer:
        if not is_large(tensor.dims):
            graph.initializer.append(tensor)
        elif tensor.name not in given:
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return light


def checkable(model: ModelProto) -> ModelProto:
    """Return a skeleton for onnx's checker, which insists on shapes: outputs of unknown shape get an empty one."""
    light = skeleton(model)
    for value in light.graph.output:
        if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape"):
            value.type.tensor_type.shape.SetInParent()
    return light


def refill(light: ModelProto, model: ModelProto) -> ModelProto:
    """Replace a model's nodes and small weights by those of its changed skeleton, in place; large weights stay."""
    kept = [index for index, tensor in enumerate(model.graph.initializer) if not is_large(tensor.dims)]
    for index in reversed(kept):
        del model.graph.initializer[index]
    model.graph.initializer.extend(light.graph.initializer)
    del model.graph.node[:]
    model.graph.node.extend(light.graph.node)
    del model.graph.value_info[:]
    del model.opset_import[:]
    model.opset_import.extend(light.opset_import)
    return model


def types_of(model: ModelProto, *, trust_declared: bool = True) -> dict[str, tuple[str, Shape | None]]:
    """Return tensor name -> dtype and shape, where they can be inferred; inside bodies too.

    `trust_declared` takes the shapes that the model declares for inner tensors and outputs; else only their dtypes
    count, where inference finds none.
    """
    found: dict[str, tuple[str, Shape | None]] = {}
    if not trust_declared:
        found = {value.name: (_type(value.type)[0], None) for value in model.graph.value_info}
    _collect(inferred_skeleton(model, trust_declared=trust_declared).graph, found)
    return found


def known_types(shaped: ModelProto) -> dict[str, int]:
    """Return the ONNX dtype of every tensor whose type a model with inferred shapes states."""
    graph = shaped.graph
    found = {info.name: info.type.tensor_type.elem_type for info in (*graph.input, *graph.output, *graph.value_info)}
    return {name: kind for name, kind in found.items() if kind} | {t.name: t.data_type for t in graph.initializer}


def inferred_skeleton(model: ModelProto, *, trust_declared: bool = True) -> ModelProto:
    """Return the skeleton of a model with the types and shapes that can be inferred; nodes and bodies stay in order."""
    light = skeleton(model, value_info=trust_declared)
    if not trust_declared:
        for value in light.graph.output:
            if value.type.HasField("tensor_type"):
                value.type.tensor_type.ClearField("shape")
    try:
        return onnx.shape_inference.infer_shapes(light, data_prop=True)
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError) as error:
        raise ModelError(f"the model's types contradict each other: {error}; run qsdk.validate on it") from error


def declared_types(graph: onnx.GraphProto) -> dict[str, tuple[str, Shape | None]]:
    """Return tensor name -> dtype and shape, as the graph itself declares them."""
    found: dict[str, tuple[str, Shape | None]] = {}
    _collect(graph, found)
    return found


def _collect(graph: onnx.GraphProto, found: dict[str, tuple[str, Shape | None]]) -> None:
    for value in (*graph.value_info, *graph.input, *graph.output):
        dtype, shape = _type(value.type)
        if dtype or value.name not in found:
            found[value.name] = dtype, shape


def _type(proto: TypeProto) -> tuple[str, Shape | None]:
    tensor = proto.tensor_type
    if not proto.HasField("tensor_type"):
        return proto.WhichOneof("value") or "", None  # a sequence, map or optional is no tensor
    if not tensor.elem_type:
        return "", None
    if not tensor.HasField("shape"):
        return dtype_name(tensor.elem_type), None
    return dtype_name(tensor.elem_type), tuple(_dimension(dim) for dim in tensor.shape.dim)


def _dimension(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    return str(dim.dim_param) or None


@cache
def dtype_name(code: int) -> str:
    """Return the NumPy-style name of a TensorProto type, `str` for strings and "" for a code unknown to ONNX."""
    if code == TensorProto.STRING:
        return "str"
    try:
        return str(np.dtype(helper.tensor_dtype_to_np_dtype(code)).name)
    except KeyError:
        return ""
