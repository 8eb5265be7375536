"""Write float numbers beside quantized activations as quantized ones, exactly, for runtimes that want both quantized.

Qualcomm's HTP takes an op for a quantized one only if all of its operands have a pair; a Div by 2.0 in a network of
pairs can keep it from being compiled (the decoding of boxes in YOLOv8: QNN_COMMON_ERROR_MEM_ALLOC, 1002).
"""

from collections.abc import Mapping

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import consumers, initializers, names_in, producers, unique
from onnx_backend.proto.nodes import drop_unused_initializers, replace_nodes
from onnx_backend.qdq.read import LITERAL_KEY

_BINARY = frozenset({"Add", "Sub", "Mul", "Div"})


def quantize_scalars(model: ModelProto) -> None:
    """Store each number beside a quantized activation as one code and a scale whose product it is, in place.

    Args:
        model: with Q/DQ; its simulation computes the same.
    """
    graph = model.graph
    stored, makers, readers = initializers(graph), producers(graph.node), consumers(graph.node)
    taken, nodes = names_in(graph), list[NodeProto]()
    for node in graph.node:
        at = _scalar_operand(node, stored, makers)
        if at is not None and all(reader.op_type == "QuantizeLinear" for reader in readers.get(node.output[0], [])):
            nodes.append(_dequantized(graph, stored[node.input[at]], taken))
            node.input[at] = nodes[-1].output[0]
        nodes.append(node)
    replace_nodes(graph, nodes)
    drop_unused_initializers(graph)


def _scalar_operand(node: NodeProto, stored: Mapping[str, TensorProto], makers: Mapping[str, NodeProto]) -> int | None:
    """Return which operand of an op is one stored float32 number beside a quantized activation."""
    if node.op_type not in _BINARY or node.domain not in ("", "ai.onnx"):
        return None
    for at, other in ((0, 1), (1, 0)):
        tensor, maker = stored.get(node.input[at]), makers.get(node.input[other])
        if tensor is None or tensor.data_type != TensorProto.FLOAT or int(np.prod(tensor.dims)) != 1:
            continue
        if maker is not None and maker.op_type == "DequantizeLinear" and np.isfinite(array(tensor)).all():
            return at
    return None


def _dequantized(graph: GraphProto, tensor: TensorProto, taken: set[str]) -> NodeProto:
    """Return a DequantizeLinear of one code that gives a stored number; store its operands."""
    value = array(tensor)
    zero_point = np.uint8(1 if value.item() < 0 else 0)
    code = np.full(value.shape, 0 if value.item() <= 0 else 1, np.uint8)
    scale = np.float32(abs(value.item()) or 1)  # 1 * scale, or (0 - 1) * scale: no rounding
    names = [unique(f"{tensor.name}/{part}", taken) for part in ("code", "scale", "zero_point")]
    for name, part in zip(names, (code, scale, zero_point), strict=True):
        graph.initializer.append(numpy_helper.from_array(np.asarray(part), name))
    result = unique(f"{tensor.name}/number", taken)
    node = helper.make_node("DequantizeLinear", names, [result], result)
    node.metadata_props.add(key=LITERAL_KEY, value="number")
    return node
