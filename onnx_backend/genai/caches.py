"""A cache of int8: the pairs around keys and values go, and GroupQueryAttention keeps the codes with their scales."""

from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from onnx_backend.genai.editor import Editor
from onnx_backend.proto.nodes import copied, drop_unused_initializers, rename_inputs, replace_nodes, set_attributes

_ONE_SCALE = "PER_TENSOR"


@dataclass(frozen=True)
class FloatCaches:
    """A decoder whose pairs around keys and values are taken away.

    Attributes:
        model: a changed copy.
        scales: input with a past -> the scale of its codes.
    """

    model: ModelProto
    scales: dict[str, float]


def without_pairs(model: ModelProto) -> FloatCaches | str | None:
    """Return a decoder without the pairs of its cache, why the kernel has no form of them, or None without any.

    They are the only pairs of activations, of int8 without zero points, and those of one cache have one scale.
    """
    editor = Editor(model, {})
    pairs = {node.output[0]: node for node in model.graph.node if node.op_type == "QuantizeLinear"}
    if not pairs:
        return None
    inputs, scales = {value.name for value in model.graph.input}, dict[str, float]()
    for node in pairs.values():
        scale, zero = editor.scalar(node.input[1]), editor.index.stored.get(node.input[2] if node.input[2:] else "")
        if scale is None or zero is None or zero.data_type != TensorProto.INT8 or editor.scalar(zero.name):
            return "its cache is not int8 with one scale and no zero point; for_dialect('genai') chooses one without"
        if node.input[0] in inputs:
            scales[node.input[0]] = scale
    known = np.array([*scales.values()])
    foreign = next((node for node in pairs.values() if editor.scalar(node.input[1]) not in known), None)
    if foreign is not None:
        return f"{foreign.input[0]!r} is quantized, and is not in the cache"
    return FloatCaches(_bypassed(model, pairs), scales)


def _bypassed(model: ModelProto, pairs: dict[str, NodeProto]) -> ModelProto:
    """Return a copy of a model without these pairs, its outputs under their names."""
    result = copied(model)
    outputs, renamed, nodes = {value.name for value in result.graph.output}, dict[str, str](), list[NodeProto]()
    for node in result.graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = renamed.get(name, name)
        if node.op_type == "DequantizeLinear" and node.input[0] in pairs:
            source = renamed.get(pairs[node.input[0]].input[0], pairs[node.input[0]].input[0])
            renamed[node.output[0]] = source
        elif node.op_type != "QuantizeLinear":
            nodes.append(node)
    leaving = {renamed[name]: name for name in outputs if name in renamed}
    for node in nodes:
        for place, name in enumerate(node.output):
            node.output[place] = leaving.get(name, name)
    rename_inputs(nodes, leaving)
    replace_nodes(result.graph, nodes)
    drop_unused_initializers(result.graph)
    return result


def take_codes(model: ModelProto, scales: dict[str, float]) -> None:
    """Have the attentions of a fused decoder keep int8 codes, in place."""
    editor = Editor(model, {})
    edges = {value.name: value for value in (*model.graph.input, *model.graph.output)}
    for node in model.graph.node:
        if node.op_type != "GroupQueryAttention":
            continue
        names = [editor.keep(f"{name}.scale", np.array([scales[name]], np.float32)) for name in node.input[3:5]]
        node.input.extend([""] * (12 - len(node.input)) + names)  # behind the sinks
        for name in (*node.input[3:5], *node.output[1:3]):
            edges[name].type.tensor_type.elem_type = TensorProto.INT8
        set_attributes(node, {"k_quant_type": _ONE_SCALE, "v_quant_type": _ONE_SCALE, "kv_cache_bit_width": 8})
