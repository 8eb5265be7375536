"""Write the nodes and constants that replace one node of a Q/DQ model by simpler operators."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import NodeProto, TensorProto, helper, numpy_helper

from onnx_backend.proto.graph_queries import unique


class Writer:
    """The nodes and constants that replace a node.

    Attributes:
        nodes: in order; the last one computes the node's own output.
        stored: constants that they read.
    """

    def __init__(self, node: NodeProto, taken: set[str]) -> None:
        self.nodes: list[NodeProto] = []
        self.stored: list[TensorProto] = []
        self._node = node
        self._taken = taken

    def add(self, op_type: str, inputs: Sequence[str], *, name: str = "", **attrs: Any) -> str:
        """Write a node, named after the node that it helps to replace unless it has a name, and return its output."""
        output = self._fresh(op_type.lower())
        self.nodes.append(helper.make_node(op_type, inputs, [output], name=name or output, **attrs))
        return output

    def integers(self, numbers: Sequence[int]) -> str:
        """Store integers and return their name."""
        return self._store(np.asarray(numbers, np.int64), "integers")

    def ones(self, sizes: Sequence[int]) -> str:
        """Store a float tensor of ones and return its name."""
        return self._store(np.ones(sizes, np.float32), "ones")

    def _store(self, array: npt.NDArray[Any], stem: str) -> str:
        self.stored.append(numpy_helper.from_array(array, self._fresh(stem)))
        return self.stored[-1].name

    def end(self, name: str) -> "Writer":
        """Name the tensor, from the last node or an input, as the output of the replaced node."""
        if not self.nodes or self.nodes[-1].output[0] != name:
            self.add("Identity", [name])
        self.nodes[-1].output[0] = self._node.output[0]
        return self

    def _fresh(self, stem: str) -> str:
        return unique(f"{self._node.output[0]}.{stem}", self._taken)
