"""Products of zeros with quantized weights, such as a recurrent cell makes of its first state."""

import numpy as np
from onnx import ModelProto, NodeProto, helper

from onnx_backend.proto.external_data import array
from onnx_backend.proto.nodes import attributes, replace_nodes
from onnx_backend.readers import Readers
from qsdk.core.graph.op_facts import RESHAPES

_KEEPS_ZEROS = RESHAPES | {"Cast", "Expand", "Identity", "Slice", "Transpose"}
_LAST_COLUMN = {"starts": [0], "ends": [1], "axes": [-1]}


def drop_zero_products(model: ModelProto) -> None:
    """Replace products of zeros with a weight that other layers read too by their bias, in place.

    The zeros have no encoding, so that the layer stays float, and a runtime dequantizes its weight in every run. The
    values are the same: a dequantized weight is finite. A weight that nothing else reads keeps its layer, and the file
    the weight's site.
    """
    known, nodes = Readers(model.graph), list[NodeProto]()
    for node in model.graph.node:
        outputs = _outputs(node, known)
        if outputs and len(known.readers[node.input[1]]) > 1 and _is_zero(node.input[0], known):
            nodes += _without_product(known, node, outputs)
        else:
            nodes.append(node)
    replace_nodes(model.graph, nodes)


def _outputs(node: NodeProto, known: Readers) -> int:
    """Return the number of output channels of a layer with a quantized matrix for a weight, else 0."""
    if node.op_type not in ("Gemm", "MatMul") or node.domain not in ("", "ai.onnx"):
        return 0
    facts = attributes(node)
    plain = not facts.get("transA", 0) and facts.get("beta", 1.0) == 1
    weight = known.makers.get(node.input[1])
    codes = known.stored.get(weight.input[0]) if weight is not None and weight.op_type == "DequantizeLinear" else None
    if codes is None or len(codes.dims) != 2 or not plain:
        return 0
    found = codes.dims[0 if facts.get("transB", 0) else 1]
    bias = node.input[2] if len(node.input) == 3 else ""
    source = known.makers.get(bias)
    given = known.stored.get(source.input[0] if source is not None and source.op_type == "DequantizeLinear" else bias)
    return found if not bias or (given is not None and list(given.dims) == [found]) else 0


def _is_zero(tensor: str, known: Readers) -> bool:
    """Return True for a tensor that is filled with zeros."""
    node = known.makers.get(tensor)
    if node is None:
        stored = known.stored.get(tensor)
        return stored is not None and not stored.dims and not array(stored).any()
    if node.op_type == "ConstantOfShape":
        return not np.any(attributes(node).get("value", 0))
    return node.op_type in _KEEPS_ZEROS and _is_zero(node.input[0], known)


def _without_product(known: Readers, node: NodeProto, outputs: int) -> list[NodeProto]:
    """Return the nodes that widen one column of the zeros to all outputs of a layer and add its bias."""
    result, bias = node.output[0], node.input[2] if len(node.input) == 3 else ""
    column = known.fresh(f"{result}/column")
    where = [known.store(f"{result}/{name}", np.array(value, np.int64)) for name, value in _LAST_COLUMN.items()]
    nodes = [helper.make_node("Slice", [node.input[0], *where], [column], column)]
    other = bias or known.store(f"{result}/shape", np.array([outputs], np.int64))
    last = helper.make_node("Add" if bias else "Expand", [column, other], [result], node.name)
    last.metadata_props.extend(node.metadata_props)
    return [*nodes, last]
