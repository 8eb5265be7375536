"""Which tensors of a graph are sure to be alike: of one shape, of one size, or of the same values in some order."""

from collections.abc import Collection

from onnx import NodeProto

from onnx_backend.proto.nodes import is_mark
from qsdk.core.graph.op_facts import VIEWS

#: Ops whose result has the shape of their first input.
_OF_FIRST = frozenset(
    {"Relu", "LeakyRelu", "Sigmoid", "HardSigmoid", "Tanh", "HardSwish", "Gelu", "Erf", "Clip", "Elu", "Softplus"}
    | {"Abs", "Neg", "Sqrt", "Exp", "Softmax", "LogSoftmax", "BatchNormalization", "LayerNormalization"}
)
#: Ops whose result has the shape of both inputs if these have the same one.
_OF_BOTH = frozenset({"Add", "Sub", "Mul", "Div", "Max", "Min"})


class Alike:
    """The tensors that are alike among the nodes so far; one of them, the first, stands for all.

    Attributes:
        shape: tensor -> one of the same shape.
        size: tensor -> one with as many values.
        values: tensor -> one that holds each of its values as often, in any order.
    """

    def __init__(self, numbers: Collection[str]) -> None:
        """Begin without nodes.

        Args:
            numbers: stored tensors of one number and no axes, which change no shape.
        """
        self.shape: dict[str, str] = {}
        self.size: dict[str, str] = {}
        self.values: dict[str, str] = {}
        self._numbers = numbers

    def add(self, node: NodeProto) -> None:
        """Note what a node's first result is like; nodes come in the order in which they run."""
        if not node.input or not node.output:
            return
        source, result = node.input[0], node.output[0]
        copied = is_mark(node) or node.op_type == "Identity"
        if copied or node.op_type in VIEWS:
            self.values[result] = self.values.get(source, source)
            self.size[result] = self.size.get(source, source)
        operands = [name for name in node.input if name not in self._numbers]
        shapes = {self.shape.get(name, name) for name in operands}
        if copied or node.op_type in _OF_FIRST:
            self.shape[result] = self.shape.get(source, source)
            self.size[result] = self.size.get(source, source)
        elif node.op_type in _OF_BOTH and len(shapes) == 1:
            self.shape[result] = shapes.pop()
            self.size[result] = self.size.get(operands[0], operands[0])
