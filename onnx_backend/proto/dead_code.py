"""Which nodes lead to the outputs of a model."""

from collections.abc import Collection, Sequence

from onnx import NodeProto

from onnx_backend.proto.subgraphs import reads


def read_at_last(nodes: Sequence[NodeProto], outputs: Collection[str]) -> list[NodeProto]:
    """The nodes whose results reach an output, in their order.

    Args:
        nodes: sorted.
        outputs: names of tensors.
    """
    kept, wanted = [], set(outputs)
    for node in reversed(nodes):
        if wanted.intersection(node.output):
            wanted.update(reads(node))
            kept.append(node)
    return kept[::-1]
