"""Open a traced module: simplify it, keep its large weights where they are, and read its graph."""

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass

from onnx import ModelProto, numpy_helper

from onnx_backend.opening.read_graph import read_graph
from onnx_backend.passes.simplify import simplify
from onnx_backend.passes.static_sizes import store_shapes
from onnx_backend.proto.lazy_tensors import as_stub
from onnx_backend.proto.model_io import load
from onnx_backend.proto.weightless import is_large
from onnx_backend.workarounds.kernel_casts import note_single_roundings
from qsdk.core.arrays import Array
from qsdk.core.graph.graph import Graph
from qsdk.core.lazy_arrays import LazyArrays


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

    `weights` are the stored tensors that the bytes lack; small ones are put into the model.
    """
    model = load(data)
    large: list[str] = []
    for tensor in model.graph.initializer:
        if tensor.name in weights:
            value = weights[tensor.name]
            if is_large(value.shape):
                large.append(tensor.name)
                tensor.CopyFrom(as_stub(tensor.name, tensor.data_type, value.shape))
            else:
                tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    by_name = LazyArrays(large, weights.__getitem__)
    values: ChainMap[str, Array] = ChainMap({}, by_name)  # type: ignore[arg-type]  # writes go to the first map
    simplified = simplify(model, weights=values)
    store_shapes(simplified)
    note_single_roundings(simplified)
    return TracedModel(simplified, values, read_graph(simplified, weights=values))
