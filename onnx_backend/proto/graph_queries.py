"""Questions about a graph: inputs, stored tensors, producers and consumers of a tensor, unused names."""

from collections.abc import Collection, Iterable, Sequence

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto

from onnx_backend.proto.subgraphs import all_nodes, names_of, reads


def is_quantized(model: ModelProto) -> bool:
    """Return True if a node of the model, at any depth, quantizes, dequantizes or multiplies integers."""
    bodies = (model.graph.node, *(function.node for function in model.functions))
    names = {node.op_type for body in bodies for node in all_nodes(body)}
    return any("quant" in name.lower() or name.endswith("Integer") or name.startswith("QLinear") for name in names)


def initializers(graph: GraphProto) -> dict[str, TensorProto]:
    """Return name -> stored tensor."""
    return {tensor.name: tensor for tensor in graph.initializer}


def producers(nodes: Iterable[NodeProto]) -> dict[str, NodeProto]:
    """Return tensor name -> the node that computes it."""
    return {name: node for node in nodes for name in node.output if name}


def consumers(nodes: Iterable[NodeProto]) -> dict[str, list[NodeProto]]:
    """Return tensor name -> the nodes that read it (also in their bodies), each node once."""
    found: dict[str, list[NodeProto]] = {}
    for node in nodes:
        for name in reads(node):
            found.setdefault(name, []).append(node)
    return found


def input_names(graph: GraphProto) -> list[str]:
    """Return the inputs that a caller feeds: those that no initializer provides."""
    stored = {tensor.name for tensor in graph.initializer}
    return [value.name for value in graph.input if value.name not in stored]


def declared_sizes(proto: TypeProto) -> list[int | None]:
    """Return the sizes of a tensor's axes, None for a dynamic one, which some exporters write as -1."""
    dims = proto.tensor_type.shape.dim
    return [d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else None for d in dims]


def names_in(graph: GraphProto) -> set[str]:
    """Return every tensor and node name of a graph, bodies included."""
    return set(names_of(graph))


def unique(name: str, taken: set[str]) -> str:
    """Return `name`, numbered if it is taken, and add it to `taken`."""
    fresh, count = name, 0
    while fresh in taken:
        count += 1
        fresh = f"{name}_{count}"
    taken.add(fresh)
    return fresh


def nodes_reaching(nodes: Sequence[NodeProto], outputs: Collection[str]) -> list[NodeProto]:
    """Return the nodes whose results reach an output, in their order.

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
