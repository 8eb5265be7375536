"""Open a traced module: simplify it, keep its large weights where they are, and read its graph."""

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
from onnx import ModelProto, TensorProto, numpy_helper

from onnx_backend.opening.read_graph import read_graph
from onnx_backend.passes.simplify import simplify
from onnx_backend.passes.static_sizes import store_shapes
from onnx_backend.proto.lazy_tensors import as_stub
from onnx_backend.proto.model_io import load
from onnx_backend.proto.weightless import is_large
from onnx_backend.workarounds.kernel_casts import note_single_roundings
from qsdk.core.graph.graph import Graph
from qsdk.core.lazy_arrays import LazyArrays

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class TracedModel:
    """A traced module.

    Attributes:
        model: simplified, with marks; it has only stubs of the stored tensors in `weights`.
        weights: by name; each is a view of the module's own or is computed when it is looked up.
        graph: the neutral graph for planning.
    """

    model: ModelProto
    weights: Mapping[str, Array]
    graph: Graph


def open_traced(data: bytes, weights: Mapping[str, Array]) -> TracedModel:
    """Simplify and read a traced module.

    Args:
        data: the ONNX bytes, with marks.
        weights: name -> value of the stored tensors that the bytes lack; small ones are put into the model.

    Raises:
        ModelError: see `read_graph`.
    """
    model = load(data)
    for tensor in model.graph.initializer:
        if tensor.name in weights:
            _put(tensor, weights[tensor.name])
    large = [tensor.name for tensor in model.graph.initializer if tensor.name in weights and is_large(tensor.dims)]
    by_name = LazyArrays(large, weights.__getitem__)
    values: ChainMap[str, Array] = ChainMap({}, by_name)  # type: ignore[arg-type]  # writes go to the first map
    simplified = simplify(model, weights=values)
    store_shapes(simplified)
    note_single_roundings(simplified)
    return TracedModel(simplified, values, read_graph(simplified, weights=values))


def _put(tensor: TensorProto, value: Array) -> None:
    if is_large(value.shape):
        tensor.CopyFrom(as_stub(tensor.name, tensor.data_type, value.shape))
    else:
        tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
