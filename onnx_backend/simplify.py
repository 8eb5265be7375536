"""Simplifying a traced model: constants that are computed from constants, and ops that change nothing.

Small values only (bounds, axes, shapes): a weight is never touched, so that every mark keeps its initializer.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from onnx_backend.model import (
    attributes,
    consumers,
    drop_unused_initializers,
    initializers,
    is_mark,
    lift_constants,
    rename_inputs,
    replace_nodes,
)

_LARGEST = 1024  # elements of a constant that may be folded
_NOT_FOLDED = frozenset({"QuantizeLinear", "DequantizeLinear", "RandomNormal", "RandomUniform", "Bernoulli", "If"})


def simplify(model: ModelProto) -> ModelProto:
    """Give a copy in which small constant expressions are initializers and Identity and idle casts are gone."""
    result = ModelProto()
    result.CopyFrom(model)
    lift_constants(result)
    graph = result.graph
    stored = initializers(graph)
    small = {name: numpy_helper.to_array(tensor) for name, tensor in stored.items() if _is_small(tensor.dims)}
    kept: list[NodeProto] = []
    outputs = {info.name for info in graph.output}
    bypassed: dict[str, str] = {}
    for node in graph.node:
        rename_inputs([node], bypassed)
        if node.op_type == "CastLike":
            _to_cast(node, result, stored)
        folded = _static_shape(node, result) or _fold(node, small, result)
        if folded is None:
            _drop_bias_of_zeros(node, small)
            if _changes_nothing(node, result, stored) and node.output[0] not in outputs:
                bypassed[node.output[0]] = node.input[0]
            else:
                kept.append(node)
            continue
        for name, value in folded.items():
            small[name] = value
            tensor = numpy_helper.from_array(value, name)
            stored[name] = tensor
            graph.initializer.append(tensor)
    replace_nodes(graph, kept)
    join_splits(graph)
    drop_unused_initializers(graph)
    return result


def join_splits(graph: GraphProto) -> None:
    """Turn SplitToSequence with constant sizes, read only by SequenceAt at constant places, into Split, in place."""
    stored = initializers(graph)
    readers = consumers(graph.node)
    kept: list[NodeProto] = []
    parts: set[str] = set()
    for node in graph.node:
        if node.op_type == "SequenceAt" and node.output[0] in parts:
            continue
        split = _as_split(node, readers.get(node.output[0], []), stored, graph) if node.output else None
        if split is not None:
            parts.update(name for name in split.output if name)
        kept.append(node if split is None else split)
    replace_nodes(graph, kept)


def _as_split(
    node: NodeProto, readers: Sequence[NodeProto], stored: dict[str, Any], graph: GraphProto
) -> NodeProto | None:
    if node.op_type != "SplitToSequence" or len(node.input) < 2 or node.input[1] not in stored:
        return None
    places = [stored.get(r.input[1]) if r.op_type == "SequenceAt" else None for r in readers]
    facts = attributes(node)
    shape = next((info.type.tensor_type.shape for info in graph.value_info if info.name == node.input[0]), None)
    axis = int(facts.get("axis", 0))
    if any(place is None for place in places) or facts.get("keepdims", 1) != 1 or shape is None or not shape.dim:
        return None
    length = shape.dim[axis].dim_value
    sizes = numpy_helper.to_array(stored[node.input[1]])
    if sizes.ndim == 0:
        step = int(sizes)
        if not length:
            return None
        sizes = np.array([min(step, length - start) for start in range(0, length, step)])
    wanted = [int(numpy_helper.to_array(place)) % len(sizes) for place in places if place is not None]
    if len(set(wanted)) != len(wanted):
        return None
    names = {index: reader.output[0] for index, reader in zip(wanted, readers, strict=True)}
    tensor = numpy_helper.from_array(sizes.astype(np.int64), f"{node.output[0]}_sizes")
    graph.initializer.append(tensor)
    # every part needs a name, also one that nothing reads
    outputs = [names.get(index, f"{node.output[0]}_{index}") for index in range(len(sizes))]
    return helper.make_node("Split", [node.input[0], tensor.name], outputs, name=node.name, axis=axis)


def _static_shape(node: NodeProto, model: ModelProto) -> dict[str, npt.NDArray[Any]] | None:
    """The value of a Shape node whose input has no dynamic dimension in the range it asks for."""
    if node.op_type != "Shape":
        return None
    known = {info.name: info for info in (*model.graph.value_info, *model.graph.input)}.get(node.input[0])
    if known is None or not known.type.tensor_type.HasField("shape"):
        return None
    facts = attributes(node)
    dims = list(known.type.tensor_type.shape.dim)[facts.get("start", 0) : facts.get("end")]
    if not all(dim.HasField("dim_value") for dim in dims):
        return None
    return {node.output[0]: np.array([dim.dim_value for dim in dims], np.int64)}


def _drop_bias_of_zeros(node: NodeProto, small: dict[str, npt.NDArray[Any]]) -> None:
    """A convolution without a bias is traced with one of zeros."""
    is_conv = node.op_type in ("Conv", "ConvTranspose") and len(node.input) == 3
    if is_conv and node.input[2] in small and not small[node.input[2]].any():
        del node.input[2]


def _is_small(shape: Any) -> bool:
    return int(np.prod(list(shape), dtype=np.int64)) <= _LARGEST


def _to_cast(node: NodeProto, model: ModelProto, stored: dict[str, Any]) -> None:
    """Turn CastLike into Cast where the type of its pattern is known."""
    code = _element_type(node.input[1], model, stored)
    if code is None:
        return
    node.op_type = "Cast"
    del node.input[1:]
    del node.attribute[:]
    node.attribute.append(helper.make_attribute("to", code))


def _changes_nothing(node: NodeProto, model: ModelProto, stored: dict[str, Any]) -> bool:
    """Whether a node is Identity, or a Cast to the type its input has (`copy_` is traced as one)."""
    if node.op_type == "Identity":
        return node.input[0] not in stored  # a stored tensor keeps its own name for each reader
    if node.op_type != "Cast":
        return False
    before = _element_type(node.input[0], model, stored)
    return before is not None and before == node.attribute[0].i


def _element_type(name: str, model: ModelProto, stored: dict[str, Any]) -> int | None:
    if name in stored:
        return int(stored[name].data_type)
    graph = model.graph
    for info in (*graph.value_info, *graph.input, *graph.output):
        if info.name == name and info.type.tensor_type.elem_type:
            return int(info.type.tensor_type.elem_type)
    return None


def _fold(node: NodeProto, small: dict[str, npt.NDArray[Any]], model: ModelProto) -> dict[str, npt.NDArray[Any]] | None:
    """The values of a node all of whose inputs are small constants, or None."""
    if is_mark(node) or node.op_type in _NOT_FOLDED or node.domain not in ("", "ai.onnx"):
        return None
    names = [name for name in node.input if name]
    if not names or any(name not in small for name in names) or any(a.HasField("g") for a in node.attribute):
        return None
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    values = ReferenceEvaluator(node, opsets=opsets).run(None, {name: small[name] for name in names})
    found = {name: np.asarray(value) for name, value in zip([n for n in node.output if n], values, strict=True)}
    return found if all(_is_small(value.shape) for value in found.values()) else None
