"""Write CastLike as the Cast that it is, where the type of its second input is known."""

from collections.abc import Mapping
from typing import Any

from onnx import NodeProto

from onnx_backend.integer.decompose.writer import Writer


def cast_like(node: NodeProto, taken: set[str], types: Mapping[str, int]) -> Writer | None:
    """Write a CastLike as a Cast, with its rule for values beyond a narrow float type; None of unknown types.

    Args:
        node: the CastLike.
        taken: names of the model; those of the new nodes are added.
        types: ONNX dtypes of its tensors.
    """
    kind = types.get(node.input[1])
    if kind is None:
        return None
    rules: dict[str, Any] = {
        attribute.name: attribute.i for attribute in node.attribute if attribute.name == "saturate"
    }
    writer = Writer(node, taken)
    return writer.end(writer.add("Cast", [node.input[0]], name=node.name, to=kind, **rules))
