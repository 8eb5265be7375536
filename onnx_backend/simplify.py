"""Simplifying a traced model: constants that are computed from constants, and ops that change nothing.

Small values only (bounds, axes, shapes): a weight is never touched, so that every mark keeps its initializer.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from onnx_backend.model import (
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
        folded = _fold(node, small, result)
        if folded is None:
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
    drop_unused_initializers(graph)
    return result


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
