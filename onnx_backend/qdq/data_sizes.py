"""Tensors whose size depends on the values of others, so that they may be empty, such as a list of detections."""

from onnx import GraphProto, NodeProto

from onnx_backend.proto.subgraphs import reads

_SELECT = frozenset({"NonZero", "NonMaxSuppression", "Unique", "Compress"})
#: op -> the input that decides the size of its result, unless that input is stored
_COUNTED = {"TopK": 1, "Loop": 0}
#: ops whose result has the size of the first input, wherever the others come from
_OF_FIRST_SIZE = frozenset({"ScatterElements", "ScatterND", "Scatter", "TensorScatter"})


def of_data_dependent_size(graph: GraphProto) -> set[str]:
    """Return the names of tensors that come from an op that selects by value, or whose size follows from one."""
    stored = {tensor.name for tensor in graph.initializer}
    stored |= {name for node in graph.node if node.op_type == "Constant" for name in node.output}
    found: set[str] = set()
    for node in graph.node:
        names = node.input[:1] if node.op_type in _OF_FIRST_SIZE else reads(node)
        if _selects(node, stored) or any(name in found for name in names):
            found.update(name for name in node.output if name)
    return found


def _selects(node: NodeProto, stored: set[str]) -> bool:
    if node.op_type in _SELECT:
        return True
    place = _COUNTED.get(node.op_type)
    if place is None or len(node.input) <= place or not node.input[place]:
        return False
    return node.input[place] not in stored
