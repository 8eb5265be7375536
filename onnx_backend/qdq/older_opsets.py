"""Write a Q/DQ model at an opset below 21, which has 8-bit types, scales per tensor and channel, and no `output_dtype`.

Composed operators that came later are replaced by the standard's own definition; onnx's converter does the others down
to opset 15. Below, `Shape` has no part, `CastLike` is the Cast that it is, and a Reshape copies a size where its shape
says 0: a size that is computed is 0 in an empty tensor alone, in which there is nothing to get wrong.
"""

from collections.abc import Mapping, Set

import onnx
import onnx.inliner
from onnx import ModelProto, NodeProto, TensorProto, defs, helper, shape_inference

from onnx_backend.proto.graph_queries import initializers, names_in, producers, says_zero, unique
from onnx_backend.proto.nodes import attributes, copied, node_label, replace_nodes
from onnx_backend.proto.opsets import OPSET, carry_metadata, opset_of
from onnx_backend.proto.weightless import checkable, inferred_skeleton, known_types, refill, skeleton
from onnx_backend.readers import words
from qsdk.core.errors import ExportError
from qsdk.core.numerics.encoding import Encoding

LOWEST = 13  # QuantizeLinear knows no scales per channel before
_CONVERTER = 15  # onnx's converter has no way further down
_IR = {13: 7, 14: 7, 15: 8, 16: 8, 17: 8, 18: 8, 19: 9, 20: 9}
_KEPT = "qsdk.kept"  # the domain in which nodes pass the converter unchanged
#: operators whose later forms only add types and attributes, for many of which onnx's converter knows no way down
_SAME = words(
    "QuantizeLinear DequantizeLinear Abs Add And Cast CastLike Concat Constant ConstantOfShape CumSum Div Equal Erf "
    "Exp Expand Flatten Gather GatherElements GatherND Gemm Greater GreaterOrEqual GRU HardSwish Identity LeakyRelu "
    "Less LessOrEqual Log LSTM MatMul Max Min Mod Mul Neg Not Or Pow PRelu Reciprocal Relu Reshape RNN "
    "ScatterElements ScatterND Shape Sigmoid Sign Size Slice Softmax Sqrt Squeeze Sub Sum Tanh Tile Transpose Trilu "
    "Unsqueeze Where BatchNormalization"
)
_OPSET_OF = {"int8": 13, "uint8": 13, "int32": 13} | dict.fromkeys(
    ("float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz"), 19
)


def require_sayable(encodings: Mapping[str, Encoding], opset: int) -> None:
    """Refuse encodings that an opset below 21 cannot say; the ExportError names the lowest opset that can."""
    needed = {
        site: OPSET if encoding.block_size is not None else _OPSET_OF.get(encoding.dtype.container, OPSET)
        for site, encoding in encodings.items()
    }
    lacking = [site for site, least in needed.items() if least > opset]
    if lacking:
        found = encodings[lacking[0]]
        what = f"{found.dtype}{' in blocks' if found.block_size is not None else ''}"
        more = f" and {len(lacking) - 4} more" if len(lacking) > 4 else ""
        raise ExportError(
            f"opset {opset} cannot say {', '.join(lacking[:4])}{more} ({what}); the lowest opset that can is "
            f"{max(needed[site] for site in lacking)}"
        )


def at_older_opset(model: ModelProto, opset: int) -> ModelProto:
    """Return a Q/DQ model at an opset from 13 to 20, its large stored tensors where they are; the model is changed.

    Its pairs are in a form that the opset knows. Where an operator has no form there, the ExportError names it and the
    lowest opset that the model can have.
    """
    try:
        return _converted(model, opset)
    except (RuntimeError, onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        reason = " ".join(str(error).split())
    for higher in range(opset + 1, OPSET):
        try:
            _converted(model, higher)
        except (RuntimeError, onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
            continue
        raise ExportError(f"the model cannot be written at opset {opset}: {reason}; the lowest opset is {higher}")
    raise ExportError(f"the model cannot be written at opset {opset}: {reason}; the lowest opset is {OPSET}")


def _converted(model: ModelProto, opset: int) -> ModelProto:
    """Return a copy at an opset; raise what onnx raises where that cannot be."""
    light = skeleton(model)
    light = _inlined(light, {node.op_type for node in light.graph.node if _came_after(node, opset)})
    if not _has("CastLike", opset):
        _write_casts(light)
    for node in light.graph.node:
        if node.op_type in _SAME:
            node.domain = _KEPT
    light.opset_import.append(helper.make_opsetid(_KEPT, 1))
    converted = onnx.version_converter.convert_version(light, max(opset, _CONVERTER))
    for node in converted.graph.node:
        if node.domain == _KEPT:
            node.domain = ""
    carry_metadata(light, converted)
    _require_forms(converted, opset)
    if opset < _CONVERTER:
        _write_shapes_whole(converted)
    del converted.opset_import[:]
    converted.opset_import.append(helper.make_opsetid("", opset))
    converted.ir_version = _IR[opset]
    onnx.checker.check_model(checkable(converted), full_check=True)
    result = copied(model)
    refill(converted, result)
    result.ir_version = converted.ir_version
    return result


def _inlined(light: ModelProto, op_types: Set[str]) -> ModelProto:
    """Return a skeleton with operators replaced by the standard's own definition."""
    current = opset_of(light)
    if not op_types:
        return light
    for node in light.graph.node:
        if node.op_type in op_types:  # the inliner knows no defaults
            given = {attribute.name for attribute in node.attribute}
            known = defs.get_schema(node.op_type, current).attributes.items()
            node.attribute.extend(a.default_value for k, a in known if k not in given and a.default_value.name)
    typed = shape_inference.infer_shapes(light, data_prop=True)
    stored = [helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in typed.graph.initializer]
    typed.graph.value_info.extend(stored)  # the inliner does not know the types of stored tensors either
    names = [("", op_type) for op_type in sorted(op_types)]
    plain = onnx.inliner.inline_selected_functions(typed, names, inline_schema_functions=True)
    del plain.graph.value_info[:]
    return plain


def _came_after(node: NodeProto, opset: int) -> bool:
    """Return True for an operator that an opset lacks, or has in another meaning, and that is defined by others."""
    if node.domain not in ("", "ai.onnx"):
        return False
    # before opset 21, GroupNormalization has one scale per group
    return node.op_type == "GroupNormalization" or not _has(node.op_type, opset)


def _has(op_type: str, opset: int) -> bool:
    try:
        defs.get_schema(op_type, opset)
    except onnx.defs.SchemaError:
        return False
    return True


def _require_forms(model: ModelProto, opset: int) -> None:
    """Refuse operators, inputs and attributes that an opset does not have, in place; drop those that change nothing."""
    stored, makers = initializers(model.graph), producers(model.graph.node)
    for node in model.graph.node:
        if not _has(node.op_type, opset):
            raise RuntimeError(f"the operator {node.op_type} of the node {node_label(node)!r} came later")
        schema = defs.get_schema(node.op_type, opset)
        if len(node.input) > schema.max_input:
            raise RuntimeError(f"{node.op_type} takes {schema.max_input} inputs there, {node_label(node)!r} has more")
        known = set(schema.attributes) | ({"start", "end"} if node.op_type == "Shape" else set())
        for attribute in [item for item in node.attribute if item.name not in known]:
            if helper.get_attribute_value(attribute) and not _means_nothing(node, attribute.name, stored, makers):
                problem = f"{node.op_type} has no attribute {attribute.name} there, and {node_label(node)!r} uses it"
                raise RuntimeError(problem)
            node.attribute.remove(attribute)


def _means_nothing(
    node: NodeProto, attribute: str, stored: Mapping[str, TensorProto], makers: Mapping[str, NodeProto]
) -> bool:
    """Return True for an attribute that has no effect here, or the value that older opsets take for granted."""
    if node.op_type == "Reshape" and attribute == "allowzero":
        return not says_zero(node.input[1], stored, makers)
    known = defs.get_schema(node.op_type, OPSET).attributes[attribute].default_value
    return known in node.attribute


def _write_casts(model: ModelProto) -> None:
    """Replace each CastLike by a Cast to the type of its second input where that is known, in place."""
    types = known_types(inferred_skeleton(model))
    for node in model.graph.node:
        kind = types.get(node.input[1]) if node.op_type == "CastLike" else None
        if kind is not None:
            node.op_type = "Cast"
            del node.input[1:]
            node.attribute.append(helper.make_attribute("to", kind))


def _write_shapes_whole(model: ModelProto) -> None:
    """Replace a Shape of some axes by one of all and a Slice, in place."""
    taken, nodes = names_in(model.graph), list[NodeProto]()
    for node in model.graph.node:
        facts = attributes(node)
        if node.op_type != "Shape" or not ({"start", "end"} & set(facts)):
            nodes.append(node)
            continue
        whole = unique(f"{node.output[0]}/whole", taken)
        ends = (facts.get("start", 0), facts.get("end", 2**31 - 1))
        names = [unique(f"{node.output[0]}/{end}", taken) for end in ("start", "end")]
        model.graph.initializer.extend(
            helper.make_tensor(name, TensorProto.INT64, [1], [end]) for name, end in zip(names, ends, strict=True)
        )
        nodes.append(helper.make_node("Shape", [node.input[0]], [whole], node.name))
        nodes.append(helper.make_node("Slice", [whole, *names], [node.output[0]], unique(f"{whole}/slice", taken)))
    replace_nodes(model.graph, nodes)
