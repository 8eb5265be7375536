"""Write norms and softmaxes that stand in a model op by op as the operators that they are.

Op by op the difference from a mean is rounded before it is squared, and an epsilon may be smaller than what that makes
of a row without any variance. And of exponentials of scores that are far apart, none seems sure to be above 0. In fixed
point the norm of a row of zeros would be 0, however small the bound that keeps it from 0 in `x / max(norm(x), tiny)`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from onnx_backend.integer.decompose.writer import Writer
from onnx_backend.opening.read_graph import read_graph
from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import initializers, producers
from onnx_backend.proto.nodes import attributes, set_metadata
from onnx_backend.proto.opsets import opset_of
from onnx_backend.proto.weightless import declared_types
from qsdk.core.graph.graph import Graph
from qsdk.core.patterns.attention import LARGEST_GUARD, LOG_SHARES, SHARES
from qsdk.core.patterns.match import PatternMatcher
from qsdk.core.patterns.norms import STANDARDIZED, UNCENTRED
from qsdk.core.patterns.supergroup import Supergroup

_FIRST_OPSET = 17  # of LayerNormalization
#: ONNX Runtime has it in every opset, the standard has RMSNormalization from 23 on.
_ROOT_MEAN_SQUARE = "SimplifiedLayerNormalization"
#: Operators of which one occurs in every form that is looked for.
PARTS = ("Exp", "Pow", "Sqrt")


def standardized(
    model: ModelProto, shaped: ModelProto, taken: set[str], stays: Callable[[NodeProto], bool]
) -> dict[str, Writer]:
    """Find quotients by the root of a variance or of a mean of squares, and by a sum of exponentials.

    They run along axes of known sizes.

    Args:
        model: a Q/DQ model without functions.
        shaped: the same with the shapes of its tensors.
        taken: names of its tensors; those that are written are added.
        stays: returns True if a node has to stay as it is.

    Returns:
        name of the quotient -> its replacement.
    """
    if opset_of(model) < _FIRST_OPSET or all(node.op_type not in PARTS for node in model.graph.node):
        return {}
    graph = read_graph(model, declared_types(shaped.graph))
    matcher, makers = PatternMatcher(graph), {name: node for node in model.graph.node for name in node.output}
    found = {}
    for op_id, op in enumerate(graph.ops):
        for pattern, write in _FORMS:
            group = matcher.at(pattern, op_id) if op.type in pattern.anchors else None
            if isinstance(group, Supergroup):
                inside = [makers[graph.tensors[graph.ops[member].outputs[0]].name] for member in group.ops]
                node = makers[graph.tensors[op.outputs[0]].name]
                written = None if any(stays(member) for member in inside) else write(graph, group, node, taken)
                if written is not None:
                    found[node.output[0]] = written
                    break  # a variance is a mean of squares as well, of what is centred
    return found


def _norm(graph: Graph, group: Supergroup, node: NodeProto, taken: set[str]) -> Writer | None:
    """Write the norm, between Transposes where the axes are not the last ones; None if sizes are open."""
    source, axes = graph.tensors[group.tensors["x"]], group.facts["axes"]
    shape = () if source.shape is None else source.shape
    sizes = [shape[axis] for axis in axes if shape]
    known = [size for size in sizes if isinstance(size, int)]
    if source.dtype != "float32" or not known or len(known) != len(axes):
        return None
    rank, name, writer = len(shape), source.name, Writer(node, taken)
    order = [axis for axis in range(rank) if axis - rank not in axes] + [axis + rank for axis in axes]
    moves = order != list(range(rank))
    if moves:
        name = writer.add("Transpose", [name], perm=order)
    facts = {"axis": -len(axes), "epsilon": _smallest_number(graph, group, 0.1)}
    kind = _ROOT_MEAN_SQUARE if group.name == UNCENTRED.name else "LayerNormalization"
    name = writer.add(kind, [name, writer.ones(known)], name=node.name, **facts)
    if moves:
        name = writer.add("Transpose", [name], perm=np.argsort(order).tolist())
    return writer.end(name)


def _softmax(graph: Graph, group: Supergroup, node: NodeProto, taken: set[str]) -> Writer | None:
    """Write the Softmax or LogSoftmax, which notes what a guard changes; None if it runs over several axes."""
    source, axes = graph.tensors[group.tensors["x"]], group.facts["axes"]
    if source.dtype != "float32" or source.shape is None or len(axes) != 1:
        return None
    writer = Writer(node, taken)
    name = writer.add(group.name, [source.name], name=node.name, axis=axes[0])
    set_metadata(writer.nodes[-1], guard=repr(_smallest_number(graph, group, LARGEST_GUARD)))
    return writer.end(name)


def _smallest_number(graph: Graph, group: Supergroup, most: float) -> float:
    """Return the small number of the group, an epsilon; the others are its powers, or bounds that do nothing."""
    numbers = [graph.scalar(tensor) for tensor in group.roles]
    return max((number for number in numbers if number is not None and 0.0 <= number <= most), default=0.0)


_FORMS = ((STANDARDIZED, _norm), (UNCENTRED, _norm), (SHARES, _softmax), (LOG_SHARES, _softmax))


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
