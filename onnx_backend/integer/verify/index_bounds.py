"""The range of the indices that enter a model, from the tables that they index."""

from onnx import ModelProto, shape_inference

from onnx_backend.proto.graph_queries import input_names, producers
from onnx_backend.proto.nodes import attributes
from qsdk.core.graph.op_facts import VIEWS

_VIEWS = VIEWS | {"Cast", "Expand", "Slice"}
_LOOK_UPS = ("Gather", "GatherElements")


def index_bounds(model: ModelProto) -> dict[str, int]:
    """Return the number of rows of the smallest table that an input indexes, by input name; others are left out."""
    nodes = [node for node in model.graph.node if node.op_type in _LOOK_UPS]
    if not nodes:
        return {}
    graph = shape_inference.infer_shapes(model).graph
    shapes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    for info in (*graph.input, *graph.value_info):
        shapes[info.name] = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
    makers, inputs, found = producers(model.graph.node), set(input_names(model.graph)), dict[str, int]()
    for node in nodes:
        name, shape = node.input[1], shapes.get(node.input[0], [])
        while name in makers and makers[name].op_type in _VIEWS:
            name = makers[name].input[0]
        axis = int(attributes(node).get("axis", 0))
        if name in inputs and -len(shape) <= axis < len(shape) and shape[axis] > 0:
            found[name] = min(shape[axis], found.get(name, shape[axis]))
    return found
