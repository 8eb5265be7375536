"""The range of the indices that enter a model, from the tables that they index."""

from onnx import ModelProto, numpy_helper, shape_inference

from onnx_backend.proto.graph_queries import initializers, input_names, producers
from onnx_backend.proto.nodes import attributes
from qsdk.core.graph.op_facts import VIEWS

_LOOK_UPS = ("Gather", "GatherElements", "GatherND")
_MOVES = VIEWS | {"Cast", "Concat", "Expand", "Slice", *_LOOK_UPS}


def index_bounds(model: ModelProto) -> dict[str, int]:
    """Return the number of rows of the smallest table that an input indexes, by input name; others are left out.

    Constants that are added to the indices, as where several tables lie in one, count.
    """
    nodes = [node for node in model.graph.node if node.op_type in _LOOK_UPS]
    if not nodes:
        return {}
    graph = shape_inference.infer_shapes(model).graph
    stored = initializers(graph)
    shapes = {name: list(tensor.dims) for name, tensor in stored.items()}
    for info in (*graph.input, *graph.value_info):
        shapes[info.name] = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
    makers, inputs, found = producers(model.graph.node), set(input_names(model.graph)), dict[str, int]()
    for node in nodes:
        name, shape, added = node.input[1], shapes.get(node.input[0], []), 0
        while name in makers and (maker := makers[name]).op_type in (*_MOVES, "Add"):
            name = maker.input[0]
            if maker.op_type == "Add":
                constants = [numpy_helper.to_array(stored[term]) for term in maker.input if term in stored]
                if not constants:
                    break
                name = next((term for term in maker.input if term not in stored), name)
                added += int(constants[0].max(initial=0))
        axis = int(attributes(node).get("axis", 0))
        rows = 0
        if node.op_type == "GatherND":
            rows = min(shape, default=0)
        elif -len(shape) <= axis < len(shape):
            rows = shape[axis]
        if name in inputs and rows > added:
            found[name] = min(rows - added, found.get(name, rows - added))
    return found
