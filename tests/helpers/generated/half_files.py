"""ONNX models in another float type: converted from float32, whole or but for some ops."""

from collections.abc import Collection

import ml_dtypes
import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

CODES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "float64": TensorProto.DOUBLE,
}
ARRAYS = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float64": np.float64}
HALVES = ("float16", "bfloat16", "float64")
#: inputs of standard ops that are float32 whatever the op computes in
_ALWAYS_FLOAT32 = {"Resize": (2,)}


def in_type(model: ModelProto, dtype: str, *, keep: Collection[str] = ()) -> ModelProto:
    """A float32 model in another float type: inputs, outputs, weights, Casts and constants.

    Ops of the types in `keep` stay float32, between Casts: the mixed files that exporters write.
    """
    changed = ModelProto()
    changed.CopyFrom(model)
    exempt = {
        node.input[at]
        for node in changed.graph.node
        for at in _ALWAYS_FLOAT32.get(node.op_type, ())
        if len(node.input) > at
    }
    _retype(changed.graph, dtype, exempt)
    nodes: list[NodeProto] = []
    stored = {tensor.name for tensor in changed.graph.initializer}
    for node in changed.graph.node:
        if node.op_type not in keep:
            nodes.append(node)
            continue
        for at, name in enumerate(node.input):
            if name in stored:
                _store_float32(changed.graph, name)
            elif name:
                nodes.append(helper.make_node("Cast", [name], [f"{node.name}/in{at}"], to=TensorProto.FLOAT))
                node.input[at] = f"{node.name}/in{at}"
        result, node.output[0] = node.output[0], f"{node.output[0]}/float32"
        nodes += [node, helper.make_node("Cast", [node.output[0]], [result], to=CODES[dtype])]
    del changed.graph.node[:]
    changed.graph.node.extend(nodes)
    return changed


def _retype(graph: GraphProto, dtype: str, exempt: Collection[str]) -> None:
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and tensor.name not in exempt:
            _store(tensor, numpy_helper.to_array(tensor).astype(ARRAYS[dtype]))
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT and value.name not in exempt:
            value.type.tensor_type.elem_type = CODES[dtype]
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                attribute.i = CODES[dtype]
            elif attribute.HasField("t") and attribute.t.data_type == TensorProto.FLOAT:
                _store(attribute.t, numpy_helper.to_array(attribute.t).astype(ARRAYS[dtype]))
            elif attribute.HasField("g"):
                _retype(attribute.g, dtype, exempt)


def _store_float32(graph: GraphProto, name: str) -> None:
    (tensor,) = (tensor for tensor in graph.initializer if tensor.name == name)
    _store(tensor, numpy_helper.to_array(tensor).astype(np.float32))


def _store(tensor: TensorProto, values: np.ndarray) -> None:
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
