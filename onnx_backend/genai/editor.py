"""A lowered model while its nodes are rewritten into fused forms: stored values, packed weights, replaced tensors."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import GraphIndex, nodes_reaching
from onnx_backend.proto.lazy_tensors import LargeTensor, as_stub, is_stub
from onnx_backend.proto.nodes import attributes, drop_unused_initializers, replace_nodes
from onnx_backend.proto.subgraphs import reads
from onnx_backend.proto.weightless import is_large
from qsdk.core.arrays import Array

MICROSOFT = "com.microsoft"
_SOME = 4096  # elements of a stored tensor that is looked into


class Editor:
    """A lowered model whose nodes are replaced, one pass after the other.

    Attributes:
        model: is changed in place.
        large: the stored tensors that it has only stubs of, by name.
        forms: site -> the form that its tensor got.
        joined: input of an adapter that is made of several -> what makes it of the matrices by name.
    """

    def __init__(self, model: ModelProto, large: Mapping[str, LargeTensor]) -> None:
        self.model, self.large, self.forms = model, dict(large), dict[str, str]()
        self.joined = dict[str, Callable[[Mapping[str, Array]], Array]]()
        self._new: dict[str, list[NodeProto]] = {}
        self._gone = set[str]()
        self._kept = dict[Any, str]()

    @cached_property
    def index(self) -> GraphIndex:
        """Return who makes and reads which tensor, as of the last pass."""
        return GraphIndex(self.model.graph)

    def maker(self, tensor: str, *types: str) -> NodeProto | None:
        """Return the node that makes a tensor, if it is of one of these types."""
        node = self.index.makers.get(tensor)
        return node if node is not None and node.op_type in types else None

    def reader(self, tensor: str, *types: str) -> NodeProto | None:
        """Return the only node that reads a tensor, if it is of one of these types."""
        if not self.index.is_read_once(tensor):
            return None
        node = self.index.readers[tensor][0]
        return node if node.op_type in types else None

    def value(self, tensor: str) -> Array | None:
        """Return a small stored tensor, or None."""
        stored = self.index.stored.get(tensor)
        if stored is None or is_stub(stored) or np.prod(stored.dims, dtype=np.int64) > _SOME:
            return None
        return array(stored)

    def scalar(self, tensor: str) -> float | None:
        """Return a stored number, or None."""
        value = self.value(tensor)
        return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None

    def stored(self, tensor: str) -> Callable[[], Array]:
        """Return what gives the value of a stored tensor of any size."""
        held = self.index.stored[tensor]
        return self.large[tensor].value if is_stub(held) else partial(array, held)

    def keep(self, name: str, value: Array) -> str:
        """Store a tensor under a name that is free, and return that."""
        name = self.index.fresh(name)
        tensor = numpy_helper.from_array(np.ascontiguousarray(value), name)
        self.model.graph.initializer.append(tensor)
        self.index.stored[name] = tensor
        return name

    def keep_once(self, name: str, value: Array) -> str:
        """Store a tensor, or return the name of one that was stored so with the same values."""
        key = (value.shape, value.tobytes())
        if key not in self._kept:
            self._kept[key] = self.keep(name, value)
        return self._kept[key]

    def keep_lazily(
        self, name: str, dims: Sequence[int], source: Callable[[], Array], kind: int = TensorProto.UINT8
    ) -> str:
        """Store a tensor, of bytes by default, which `source` makes when it is written, under a name that is free."""
        if not is_large(dims):
            return self.keep(name, source())
        name = self.index.fresh(name)
        self.large[name] = LargeTensor(kind, tuple(dims), source, _rows)
        self.model.graph.initializer.append(as_stub(name, kind, dims))
        self.index.stored[name] = self.model.graph.initializer[-1]
        return name

    def node(
        self, type: str, inputs: Sequence[str], outputs: Sequence[str], *, domain: str = "", **options: Any
    ) -> NodeProto:
        """Return a node that is named after its first output."""
        return helper.make_node(type, inputs, outputs, f"{outputs[0]}/{type}", domain=domain, **options)

    def shaped(self, source: str, shape: Sequence[int], name: str) -> NodeProto:
        """Return a Reshape to a stored shape, in which 0 keeps a size."""
        result = self.index.fresh(name)
        return self.node("Reshape", [source, self.keep(f"{name}/shape", np.array(shape, np.int64))], [result])

    def replace(self, tensor: str, nodes: Iterable[NodeProto], also: Iterable[str] = ()) -> None:
        """Have other nodes make a tensor, and the tensors of `also`, at the end of the pass."""
        self._new[tensor] = [*nodes]
        self._gone.update(also)

    def is_replaced(self, tensor: str) -> bool:
        """Return True if this pass replaces what makes a tensor."""
        return tensor in self._new or tensor in self._gone

    def apply(self) -> None:
        """End a pass: put the new nodes in the places of the old, and drop what nothing reads any more."""
        graph, nodes = self.model.graph, list[NodeProto]()
        for node in graph.node:
            first = next((name for name in node.output if name in self._new), None)
            if first is not None:
                nodes += self._new[first]
            elif not any(name in self._gone for name in node.output):
                nodes.append(node)
        nodes = _sorted(nodes, {*(tensor.name for tensor in graph.initializer), *(one.name for one in graph.input)})
        replace_nodes(graph, nodes_reaching(nodes, [value.name for value in graph.output]))
        drop_unused_initializers(graph)
        names = {tensor.name for tensor in graph.initializer}
        self._kept = {key: name for key, name in self._kept.items() if name in names}
        self.large = {name: self.large[name] for name in (t.name for t in graph.initializer) if name in self.large}
        self._new, self._gone = {}, set()
        self.__dict__.pop("index", None)

    def options(self, node: NodeProto) -> dict[str, Any]:
        """Return the attributes of a node."""
        return attributes(node)


def _rows(values: Array, first: int, last: int) -> Array:
    return values[first:last]


def _sorted(nodes: Sequence[NodeProto], known: set[str]) -> list[NodeProto]:
    """Return nodes in an order in which each comes behind what makes its inputs, the given one where it can be."""
    found, waiting, made = list[NodeProto](), [*nodes], {*known, ""}
    while waiting:
        later = list[NodeProto]()
        for node in waiting:
            if made.issuperset(reads(node)):
                found.append(node)
                made.update(node.output)
            else:
                later.append(node)
        if len(later) == len(waiting):
            raise ValueError(f"the tensors that {later[0].name!r} reads are not made")
        waiting = later
    return found
