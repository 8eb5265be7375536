"""Prepare a model for the conversion: write composite operators as simpler ones, inline decided branches."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

import onnx.inliner
from onnx import ModelProto, NodeProto, defs, helper, shape_inference

from onnx_backend.integer.decompose.norms import PARTS, standardized, unit_rows
from onnx_backend.integer.decompose.writer import REDUCTIONS, cast_like, einsum, reduction
from onnx_backend.integer.ir.context import label
from onnx_backend.passes.simplify import simplify
from onnx_backend.proto.graph_queries import names_in, nodes_reaching
from onnx_backend.proto.inputs import static_sizes, with_inferred_shapes
from onnx_backend.proto.nodes import replace_nodes
from onnx_backend.proto.opsets import opset_of
from onnx_backend.proto.weightless import declared_types, known_types
from qsdk.core.errors import IntegerError

#: Operators that ONNX defines by others and that have no lowering; Swish has one, but the runtime no kernel for it.
_COMPOSED = ("Attention", "RotaryEmbedding", "Swish")
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
