"""Inputs and outputs in bfloat16 as float32 ones: the runtime's Python side knows no arrays of bfloat16."""

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from onnx_backend.proto.graph_queries import input_names, names_in, unique
from onnx_backend.proto.nodes import rename_inputs, replace_nodes
from onnx_backend.proto.weightless import types_of


def cast_bfloat16_edges(model: ModelProto) -> None:
    """Declare every bfloat16 input and output as float32 and cast it inside, in place; their names stay.

    Values of bfloat16 pass these Casts unchanged; other values are rounded, as a Cast in front of the model would.
    """
    graph, taken = model.graph, names_in(model.graph)
    _declare_outputs(model)
    outputs = _outputs(graph, taken)
    inputs = _inputs(graph, taken)
    replace_nodes(graph, [*inputs, *graph.node, *outputs])
    edges = {value.name for value in (*graph.input, *graph.output)}
    kept = [value for value in graph.value_info if value.name not in edges]
    del graph.value_info[:]
    graph.value_info.extend(kept)


def _declare_outputs(model: ModelProto) -> None:
    """Declare the type of outputs that have none, as parts of a model may."""
    bare = [value for value in model.graph.output if not value.type.WhichOneof("value")]
    if bare:
        types = types_of(model)
        for value in bare:
            if types.get(value.name, ("", None))[0] == "bfloat16":
                value.type.tensor_type.elem_type = TensorProto.BFLOAT16


def _inputs(graph: GraphProto, taken: set[str]) -> list[NodeProto]:
    """Declare the inputs as float32, and return the Casts from them."""
    fed, casts, renamed = set(input_names(graph)), [], {}
    for value in graph.input:
        if value.name in fed and _declare_float32(value):
            renamed[value.name] = unique(f"{value.name}/bfloat16", taken)
            casts.append(helper.make_node("Cast", [value.name], [renamed[value.name]], to=TensorProto.BFLOAT16))
    rename_inputs(graph.node, renamed)
    return casts


def _outputs(graph: GraphProto, taken: set[str]) -> list[NodeProto]:
    """Declare the outputs as float32, and return the Casts to them."""
    inputs, casts, renamed = {value.name for value in graph.input}, [], {}
    for value in graph.output:
        if _declare_float32(value) and value.name not in inputs and value.name not in renamed:
            renamed[value.name] = unique(f"{value.name}/bfloat16", taken)
            casts.append(helper.make_node("Cast", [renamed[value.name]], [value.name], to=TensorProto.FLOAT))
    rename_inputs(graph.node, renamed)
    for node in graph.node:
        node.output[:] = [renamed.get(name, name) for name in node.output]
    for tensor in graph.initializer:
        tensor.name = renamed.get(tensor.name, tensor.name)
    return casts


def _declare_float32(value: ValueInfoProto) -> bool:
    """Declare a bfloat16 tensor as float32; return True if it was one."""
    found = bool(value.type.tensor_type.elem_type == TensorProto.BFLOAT16)
    if found:
        value.type.tensor_type.elem_type = TensorProto.FLOAT
    return found
