"""Questions about a graph: inputs, stored tensors, producers and consumers of a tensor, unused names."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto

from onnx_backend.proto.external_data import array
from onnx_backend.proto.nodes import constant_tensor, is_constant
from onnx_backend.proto.subgraphs import all_nodes, names_of, reads

#: operators that move the numbers of a shape and change none
_SAME_NUMBERS = frozenset({"Cast", "CastLike", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze"})


class GraphIndex:
    """A graph with its stored tensors, the nodes that make and read each tensor, and the names of its outputs.

    They are as they were when the index was made; who changes the graph changes them along or makes a new index.
    """

    def __init__(self, graph: GraphProto) -> None:
        self.graph, self.stored = graph, initializers(graph)
        self.makers, self.readers = producers(graph.node), consumers(graph.node)
        self.outputs = {value.name for value in graph.output}

    @cached_property
    def taken(self) -> set[str]:
        """Return every tensor and node name of the graph, bodies included, and those that `fresh` gave."""
        return names_in(self.graph)

    def fresh(self, name: str) -> str:
        """Return `name`, numbered if it is taken."""
        return unique(name, self.taken)

    def is_read_once(self, tensor: str) -> bool:
        """Return True if one node alone reads a tensor, which is no output."""
        return tensor not in self.outputs and len(self.readers.get(tensor, ())) == 1


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

    The nodes are sorted.
    """
    kept, wanted = [], set(outputs)
    for node in reversed(nodes):
        if wanted.intersection(node.output):
            wanted.update(reads(node))
            kept.append(node)
    return kept[::-1]


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
