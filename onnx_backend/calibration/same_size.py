"""Which tensors of a graph are sure to have as many values as another, whatever its inputs are."""

from collections.abc import Collection

from onnx import NodeProto

from onnx_backend.proto.nodes import is_mark
from qsdk.core.graph.op_facts import VIEWS

#: Ops whose result has the shape of their first input.
_OF_FIRST = frozenset(
    {
        "Identity",
        "Relu",
        "LeakyRelu",
        "Sigmoid",
        "HardSigmoid",
        "Tanh",
        "HardSwish",
        "Gelu",
        "Erf",
        "Clip",
        "Elu",
        "Softplus",
    }
    | {"Abs", "Neg", "Sqrt", "Exp", "Softmax", "LogSoftmax", "BatchNormalization", "LayerNormalization"}
)
#: Ops whose result has the shape of both inputs if these have the same one.
_OF_BOTH = frozenset({"Add", "Sub", "Mul", "Div", "Max", "Min"})


class SameSize:
    """The tensors of one size among the nodes so far; one of them, the first, stands for all."""

    def __init__(self, numbers: Collection[str]) -> None:
        """Begin without nodes.

        Args:
            numbers: stored tensors of one number and no axes, which change no shape.
        """
        self._shapes: dict[str, str] = {}  # tensor -> one of the same shape
        self._sizes: dict[str, str] = {}
        self._numbers = numbers

    def of(self, tensor: str) -> str:
        """Return the tensor that stands for those of the size of this one."""
        return self._sizes.get(tensor, tensor)

    def add(self, node: NodeProto) -> None:
        """Note what a node's first result is like; nodes come in the order in which they run."""
        operands = [name for name in node.input if name not in self._numbers]
        if not operands or not node.output:
            return
        source, result = operands[0], node.output[0]
        shapes = {self._shapes.get(name, name) for name in operands}
        same_shape = is_mark(node) or node.op_type in _OF_FIRST or (node.op_type in _OF_BOTH and len(shapes) == 1)
        if same_shape:
            self._shapes[result] = self._shapes.get(source, source)
        if same_shape or node.op_type in VIEWS:
            self._sizes[result] = self.of(source)
