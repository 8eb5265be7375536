"""Number the nodes of a model in their names, which a runtime keeps in part when it fuses nodes."""

import re

from onnx import ModelProto

from onnx_backend.proto.model_io import load
from onnx_backend.proto.nodes import node_label

_PREFIX = "qsdknode"
_NUMBER = re.compile(rf"{_PREFIX}(\d+)")


def numbered(model: ModelProto) -> ModelProto:
    """Return a copy in which every node of the graph is named after its position."""
    found = load(model)
    for position, node in enumerate(found.graph.node):
        node.name = f"{_PREFIX}{position}"
    return found


def number_in(name: str) -> int | None:
    """Return the position of the node that the name of a kernel begins with, or None."""
    match = _NUMBER.match(name)
    return None if match is None else int(match[1])


def with_labels(text: str, model: ModelProto) -> str:
    """Return the text of an error about the numbered copy of a model with the nodes' own labels."""
    return _NUMBER.sub(lambda match: node_label(model.graph.node[int(match[1])]), text)
