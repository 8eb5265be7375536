"""Write a tensor divided by its own norm, `x / max(norm(x), tiny)`, as the LpNormalization that it is.

In fixed point the norm of a row of zeros would be 0, however small the bound that keeps it away from 0.
"""

from collections.abc import Mapping
from types import MappingProxyType

from onnx import ModelProto, NodeProto, TensorProto, helper

from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import initializers, producers
from onnx_backend.proto.nodes import attributes

#: Op type of a norm -> its power.
_POWERS: Mapping[str, int] = MappingProxyType({"ReduceL1": 1, "ReduceL2": 2})


def unit_rows(model: ModelProto, shapes: Mapping[str, tuple[int | None, ...]]) -> dict[str, NodeProto]:
    """Find the quotients of quantized tensors and their own norms, bounded below by less than one step.

    Args:
        model: a Q/DQ model.
        shapes: dimensions of its tensors as far as they are known.

    Returns:
        name of a quotient -> its replacement by LpNormalization; a row of zeros stays one.
    """
    stored, makers = initializers(model.graph), producers(model.graph.node)
    found = {}
    for node in model.graph.node:
        if node.op_type == "Div" and shapes.get(node.input[0], ()) == shapes.get(node.output[0]):
            norm = _bounded_norm(node, stored, makers)
            axis = None if norm is None else _axis(norm, stored)
            if norm is not None and axis is not None:
                quotient = helper.make_node("LpNormalization", node.input[:1], node.output, node.name, axis=axis)
                quotient.attribute.append(helper.make_attribute("p", _POWERS[norm.op_type]))
                found[node.output[0]] = quotient
    return found


def _bounded_norm(
    quotient: NodeProto, stored: Mapping[str, TensorProto], makers: Mapping[str, NodeProto]
) -> NodeProto | None:
    """Return the norm of the dividend that it is divided by, None if the divisor is something else."""
    dividend, divisor = makers.get(quotient.input[0]), makers.get(quotient.input[1])
    if divisor is not None and divisor.op_type == "Expand":
        divisor = makers.get(divisor.input[0])
    if dividend is None or dividend.op_type != "DequantizeLinear" or divisor is None:
        return None
    inputs = list(divisor.input)
    if divisor.op_type == "Max" and len(inputs) == 2 and inputs[0] in stored:
        inputs.reverse()
    upper = divisor.op_type == "Clip" and len(inputs) > 2 and inputs[2]
    if divisor.op_type not in ("Clip", "Max") or len(inputs) < 2 or inputs[1] not in stored or upper:
        return None
    norm, least, step = makers.get(inputs[0]), array(stored[inputs[1]]), stored.get(dividend.input[1])
    if norm is None or norm.op_type not in _POWERS or norm.input[0] != quotient.input[0]:
        return None
    if step is None or least.size != 1 or not 0 < least.item() < array(step).min():
        return None
    return norm


def _axis(norm: NodeProto, stored: Mapping[str, TensorProto]) -> int | None:
    """Return the one axis of a norm that keeps its dimensions, else None."""
    attrs = attributes(norm)
    axes = attrs.get("axes", [])
    if len(norm.input) > 1 and norm.input[1] in stored:
        axes = array(stored[norm.input[1]]).reshape(-1)
    return int(axes[0]) if len(axes) == 1 and attrs.get("keepdims", 1) else None
