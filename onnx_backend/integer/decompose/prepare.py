"""Prepare a model for the conversion: write composite operators as simpler ones, inline decided branches."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType

import numpy as np
import onnx.inliner
from onnx import ModelProto, NodeProto, TensorProto, defs, helper, shape_inference

from onnx_backend.integer.decompose.writer import REDUCTIONS, Writer, cast_like, einsum, reduction
from onnx_backend.integer.ir.context import label
from onnx_backend.opening.read_graph import read_graph
from onnx_backend.passes.simplify import simplify
from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import initializers, names_in, nodes_reaching, producers
from onnx_backend.proto.inputs import static_sizes, with_inferred_shapes
from onnx_backend.proto.nodes import attributes, replace_nodes, set_metadata
from onnx_backend.proto.opsets import opset_of
from onnx_backend.proto.weightless import declared_types, known_types
from qsdk.core.errors import IntegerError
from qsdk.core.graph.graph import Graph
from qsdk.core.patterns.attention import LARGEST_GUARD, LOG_SHARES, SHARES
from qsdk.core.patterns.match import PatternMatcher
from qsdk.core.patterns.norms import STANDARDIZED, UNCENTRED
from qsdk.core.patterns.supergroup import Supergroup

#: Operators that ONNX defines by others and that have no lowering; Swish has one, but the runtime no kernel for it.
_COMPOSED = ("Attention", "RotaryEmbedding", "Swish")
#: Operators of which one occurs in every form of a norm that stands op by op.
PARTS = ("Exp", "Pow", "Sqrt")
_LOOKED_AT = ("CastLike", "Einsum", "If", *REDUCTIONS, *PARTS)


def prepare(model: ModelProto, allow_float: Sequence[str] = ()) -> ModelProto:
    """Write out composed operators and sums, and replace every If of a constant condition by the branch it takes.

    Args:
        model: a Q/DQ model; it is not changed, and given back as it is where there is nothing to write out.
        allow_float: shell globs over names and op types of nodes that may stay float; those stay composed.
    """
    if not model.graph.output:
        raise IntegerError("the model has no outputs, so there is nothing to compute; export it again")
    composed = [node for node in model.graph.node if node.op_type in _COMPOSED and node.domain in ("", "ai.onnx")]
    kept = {node.op_type for node in composed if _matches(node, allow_float)}
    written = [node for node in composed if node.op_type not in kept]
    if not written and all(node.op_type not in _LOOKED_AT for node in model.graph.node):
        return model
    plain = onnx.inliner.inline_local_functions(model) if model.functions else model
    if written:
        plain = _written_out(plain, sorted({node.op_type for node in written}))
    result = ModelProto()
    result.CopyFrom(plain)
    if written or any(node.op_type == "If" for node in result.graph.node):
        result = simplify(result, declared_types(with_inferred_shapes(result).graph))
    _write_out_sums(result, allow_float)
    return result


def _write_out_sums(model: ModelProto, allow_float: Sequence[str]) -> None:
    """Write out every Einsum and every reduction that is a sum between functions, and norms as such, in place."""
    shaped, taken = with_inferred_shapes(model), names_in(model.graph)
    shapes, types = static_sizes(shaped), known_types(shaped)
    quotients = unit_rows(model, shapes)
    norms = standardized(model, shaped, taken, lambda node: _matches(node, allow_float))
    whole = [node if _matches(node, allow_float) else quotients.get(node.output[0], node) for node in model.graph.node]
    nodes: list[NodeProto] = []
    outputs = [value.name for value in model.graph.output]
    for node in nodes_reaching(whole, outputs):
        written = norms.get(node.output[0])
        if node.domain in ("", "ai.onnx") and not _matches(node, allow_float):
            if node.op_type == "CastLike":
                written = cast_like(node, taken, types)
            elif node.op_type == "Einsum":
                written = einsum(node, taken, shapes)
            elif node.op_type in REDUCTIONS:
                written = reduction(node, taken)
        nodes += [node] if written is None else written.nodes
        model.graph.initializer.extend([] if written is None else written.stored)
    replace_nodes(model.graph, nodes_reaching(nodes, outputs))


def _matches(node: NodeProto, patterns: Sequence[str]) -> bool:
    names = (label(node), node.op_type, *node.output)
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _written_out(model: ModelProto, op_types: Sequence[str]) -> ModelProto:
    """Return the model with these operators replaced by the standard's own definition."""
    result = ModelProto()
    result.CopyFrom(model)
    opset = opset_of(model)
    for node in result.graph.node:
        if node.op_type in op_types and node.domain in ("", "ai.onnx"):  # the inliner knows no defaults
            given = {attribute.name for attribute in node.attribute}
            known = defs.get_schema(node.op_type, opset).attributes.items()
            node.attribute.extend(a.default_value for k, a in known if k not in given and a.default_value.name)
    result = shape_inference.infer_shapes(result, data_prop=True)
    stored = result.graph.initializer  # nor the types of stored tensors
    result.graph.value_info.extend(helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in stored)
    try:
        names = [("", op_type) for op_type in op_types]
        result = onnx.inliner.inline_selected_functions(result, names, inline_schema_functions=True)
    except RuntimeError as error:
        raise IntegerError(
            f"{' and '.join(op_types)} cannot be written out in simpler operators (ONNX's inliner says: "
            f"{str(error).strip()}); export the model at opset 22 or below, which has none of them"
        ) from error
    del result.graph.value_info[:]
    return result


# --- Write norms and softmaxes that stand in a model op by op as the operators that they are --------------------------

# Op by op the difference from a mean is rounded before it is squared, and an epsilon may be smaller than what that
# makes of a row without any variance. And of exponentials of scores that are far apart, none seems sure to be above 0.
# In fixed point the norm of a row of zeros would be 0, however small the bound that keeps it from 0 in `x /
# max(norm(x), tiny)`.

_FIRST_OPSET = 17  # of LayerNormalization
#: ONNX Runtime has it in every opset, the standard has RMSNormalization from 23 on.
_ROOT_MEAN_SQUARE = "SimplifiedLayerNormalization"


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
