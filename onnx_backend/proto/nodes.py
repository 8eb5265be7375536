"""Read and change nodes: attributes, metadata, Constant values, marks, and the names of inputs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backend.proto.external_data import array
from onnx_backend.proto.subgraphs import reads, rename_reads
from qsdk.core.errors import ModelError

MARK_DOMAIN = "qsdk"
MARK_OP = "Quantizer"

#: operators that move the numbers of a shape and change none
_SAME_NUMBERS = frozenset({"Cast", "CastLike", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze"})


def is_mark(node: NodeProto) -> bool:
    """Return True if a node marks a site."""
    return node.domain == MARK_DOMAIN and node.op_type == MARK_OP


def node_label(node: NodeProto) -> str:
    """Return a node's name for messages, else its first output's, else its type."""
    return node.name or next((name for name in node.output if name), node.op_type)


def attributes(node: NodeProto) -> dict[str, Any]:
    """Return a node's attributes as Python values; strings are str, tensors NumPy arrays."""
    return {attribute.name: _plain(helper.get_attribute_value(attribute)) for attribute in node.attribute}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, TensorProto):
        return numpy_helper.to_array(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def constant_tensor(node: NodeProto) -> TensorProto:
    """Return the tensor that a Constant node holds, under its output's name.

    Raises:
        ModelError: the node holds strings or a sparse tensor.
    """
    name = node.output[0]
    for attribute in node.attribute:
        value = helper.get_attribute_value(attribute)
        if attribute.name == "value":
            tensor = TensorProto()
            tensor.CopyFrom(value)
            tensor.name = name
            return tensor
        if attribute.name in ("value_float", "value_floats"):
            return numpy_helper.from_array(np.asarray(value, np.float32), name)
        if attribute.name in ("value_int", "value_ints"):
            return numpy_helper.from_array(np.asarray(value, np.int64), name)
    raise ModelError(f"the Constant node {node_label(node)!r} holds no numeric tensor; store it as an initializer")


def is_constant(node: NodeProto) -> bool:
    """Return True if a node is a Constant that holds a dense numeric tensor."""
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx") or len(node.attribute) != 1:
        return False
    kind = node.attribute[0].name
    is_text = kind == "value" and node.attribute[0].t.data_type == TensorProto.STRING
    return kind in ("value", "value_float", "value_floats", "value_int", "value_ints") and not is_text


def says_zero(shape: str, stored: Mapping[str, TensorProto], makers: Mapping[str, NodeProto]) -> bool:
    """Return True if a shape has a stored 0, or comes from outside the model; sizes that are computed do not count."""
    if shape in stored:
        return not array(stored[shape]).all()
    node = makers.get(shape)
    if node is None:
        return True
    if is_constant(node):
        return not array(constant_tensor(node)).all()
    parts = node.input if node.op_type == "Concat" else node.input[:1] if node.op_type in _SAME_NUMBERS else ()
    return any(says_zero(name, stored, makers) for name in parts)


def lift_constants(model: ModelProto) -> None:
    """Turn Constant nodes with numeric values into initializers, in place."""
    kept = []
    for node in model.graph.node:
        if is_constant(node):
            model.graph.initializer.append(constant_tensor(node))
        else:
            kept.append(node)
    replace_nodes(model.graph, kept)


def replace_nodes(graph: GraphProto, nodes: Iterable[NodeProto]) -> None:
    """Replace the nodes of a graph."""
    fresh = list(nodes)
    del graph.node[:]
    graph.node.extend(fresh)


def rename_inputs(nodes: Iterable[NodeProto], renamed: Mapping[str, str]) -> None:
    """Rename the tensors that nodes and their bodies read, in place."""
    for node in nodes:
        rename_reads(node, renamed)


def drop_unused_initializers(graph: GraphProto) -> None:
    """Remove stored tensors that nothing reads, in place."""
    read = {name for node in graph.node for name in reads(node)} | {value.name for value in graph.output}
    unread = [index for index, tensor in enumerate(graph.initializer) if tensor.name not in read]
    for index in reversed(unread):  # deleting in place copies no other tensor
        del graph.initializer[index]


def metadata(proto: NodeProto | ModelProto) -> dict[str, str]:
    """Return the metadata of a node or a model."""
    return {entry.key: entry.value for entry in proto.metadata_props}


def set_metadata(node: NodeProto, **facts: str) -> None:
    """Write metadata under the prefix `qsdk.`."""
    for key, value in facts.items():
        entry = node.metadata_props.add()
        entry.key, entry.value = f"qsdk.{key}", value
