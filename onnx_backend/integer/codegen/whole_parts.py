"""Join tensors that were split just before without splitting them: a Concat of all parts in order is their source."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from onnx_backend.integer.ir.builder import Builder
from onnx_backend.proto.nodes import attributes


@dataclass(frozen=True)
class _Part:
    """One result of a Split: the tensor, the axis, its place, and the sizes of all parts."""

    source: str
    axis: int
    place: int
    sizes: tuple[int, ...]


def without_splits(b: Builder, nodes: Sequence[NodeProto], outputs: set[str]) -> list[NodeProto]:
    """Return nodes in which a Concat reads the source of parts that it would join in order.

    A Split of which one result is left becomes a Slice.
    """
    stored = {tensor.name: tensor for tensor in b.initializers}
    parts = {part: place for node in nodes for part, place in _parts(node, stored).items()}
    joined = [_joined(node, parts) if node.op_type == "Concat" and not node.domain else node for node in nodes]
    read = {name for node in joined for name in node.input} | outputs
    found = []
    for node in joined:
        left = [name for name in node.output if name in read]
        if len(left) == 1 and left[0] in parts and len(node.output) > 1:
            found.append(_slice(b, node, left[0], parts[left[0]]))
        else:
            found += [node] if left else []
    return found


def _parts(node: NodeProto, stored: Mapping[str, TensorProto]) -> dict[str, _Part]:
    if node.op_type != "Split" or len(node.input) != 2 or node.input[1] not in stored:
        return {}
    sizes = tuple(numpy_helper.to_array(stored[node.input[1]]).tolist())
    axis = int(attributes(node).get("axis", 0))
    return {name: _Part(node.input[0], axis, i, sizes) for i, name in enumerate(node.output)}


def _joined(node: NodeProto, parts: Mapping[str, _Part]) -> NodeProto:
    axis, names, kept = int(attributes(node)["axis"]), list(node.input), list[str]()
    while names:
        first = parts.get(names[0])
        whole = [_Part(first.source, axis, i, first.sizes) for i in range(len(first.sizes))] if first else []
        if whole and [parts.get(name) for name in names[: len(whole)]] == whole:
            kept.append(whole[0].source)
            names = names[len(whole) :]
        else:
            kept.append(names.pop(0))
    if len(kept) == len(node.input):
        return node
    return helper.make_node("Concat", kept, list(node.output), name=node.name, axis=axis)


def _slice(b: Builder, node: NodeProto, name: str, part: _Part) -> NodeProto:
    start = sum(part.sizes[: part.place])
    bounds = [b.constant([value], np.int64) for value in (start, start + part.sizes[part.place], part.axis)]
    return helper.make_node("Slice", [part.source, *bounds], [name], name=node.name)
