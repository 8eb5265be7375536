"""Read and change nodes: attributes, metadata, Constant values, marks, and the names of inputs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backend.proto.subgraphs import reads, rename_reads
from qsdk.core.errors import ModelError

MARK_DOMAIN = "qsdk"
MARK_OP = "Quantizer"


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
    """Return the tensor that a Constant node holds, under its output's name."""
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


def lift_constants(model: ModelProto) -> None:
    """Turn Constant nodes with numeric values into initializers, in place."""
    kept = []
    for node in model.graph.node:
        if is_constant(node):
            model.graph.initializer.append(constant_tensor(node))
        else:
            kept.append(node)
    replace_nodes(model.graph, kept)


def copied(model: ModelProto) -> ModelProto:
    """Return a copy of a model."""
    found = ModelProto()
    found.CopyFrom(model)
    return found


def retain(entries: Any, is_wanted: Callable[[Any], bool]) -> None:
    """Keep the wanted entries of a repeated field, in place."""
    kept = [entry for entry in entries if is_wanted(entry)]
    del entries[:]
    entries.extend(kept)


def set_attributes(node: NodeProto, values: Mapping[str, Any]) -> None:
    """Set attributes of a node, in place of those of the same names."""
    retain(node.attribute, lambda attribute: attribute.name not in values)
    node.attribute.extend(helper.make_attribute(name, value) for name, value in values.items())


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
