"""Operands: the role of each stored tensor in the op that reads it."""

from collections.abc import Mapping
from dataclasses import dataclass

from qsdk.core.graph.graph import Graph, Op
from qsdk.core.graph.op_facts import RESHAPES
from qsdk.core.numerics.spec import Role
from qsdk.core.patterns.experts import stack_of, takes_biases
from qsdk.core.patterns.linear import bias_of_add


@dataclass(frozen=True)
class StoredOperand:
    """A stored tensor that an op reads.

    Attributes:
        tensor: id of the tensor as the op sees it (behind any Transpose).
        root: id of the stored tensor.
        role: `weight` and `bias` of a linear op, `embedding` table, other `constant` data, or a `statistic` of a norm.
        channel_axis: output channels, on the stored tensor; None where per channel has no meaning.
        input_axis: input channels (the axis that blocks run along), on the stored tensor.
        of_experts: whether it is a stack of matrices or biases, of which each row of data takes one.
    """

    tensor: int
    root: int
    role: Role
    channel_axis: int | None = None
    input_axis: int | None = None
    of_experts: bool = False


_LINEAR = {"Conv": (0, 1), "ConvTranspose": (1, 0)}
_STATISTICS = {"BatchNormalization": (1, 2, 3, 4), "LayerNormalization": (2,), "GroupNormalization": (2,)} | {
    "InstanceNormalization": (2,),
    "LSTM": (3,),
    "GRU": (3,),
    "RNN": (3,),
}
_CONSTANTS = {"LayerNormalization": (1,), "RMSNormalization": (1,), "GroupNormalization": (1,), "PRelu": (1,)} | {
    "InstanceNormalization": (1,),
    "LSTM": (1, 2),
    "GRU": (1, 2),
    "RNN": (1, 2),
}
_TAKES_ROWS = frozenset({"Gather", "GatherND", "GatherElements"})
_RESHAPES = RESHAPES | {"Cast", "Expand"}
_ELEMENTWISE = frozenset(
    {"Add", "Sub", "Mul", "Div", "Max", "Min", "Concat", "Where", "MatMul", "Sum", "Mean", "Einsum"}
)


def operands_of(graph: Graph, op_id: int, roles: Mapping[int, Role] | None = None) -> list[StoredOperand]:
    """Return the stored floating-point tensors that an op reads as data, with their roles.

    Axes, bounds, pads and the like are not data and are left out. An op that only reshapes a tensor with a role in its
    supergroup (`roles`: root id -> role) reads it as data.
    """
    op = graph.ops[op_id]
    if op.type in _RESHAPES:
        tensor = op.inputs[0]
        root = graph.constant_root(tensor)
        known = None if root is None or roles is None else roles.get(root)
        return [] if tensor is None or root is None or known is None else [StoredOperand(tensor, root, known)]
    result = []
    for position, tensor in enumerate(op.inputs):
        root = None if tensor is None else _root(graph, op, position, tensor)
        if tensor is None or root is None or not graph.tensors[root].is_float:
            continue
        role, axes = _role(graph, op_id, position, tensor)
        if role is not None:
            rooted = [None if axis is None else graph.axis_at_root(tensor, axis) for axis in axes]
            of_experts = op.type in _TAKES_ROWS and role in ("weight", "bias")
            result.append(StoredOperand(tensor, root, role, rooted[0], rooted[1], of_experts))
    return result


def is_scalar(graph: Graph, op_id: int, operand: StoredOperand) -> bool:
    """Return whether an operand is a single number of an elementwise op, which stays float.

    Such a number is a parameter or a literal of the code. A weight, a bias, and the parameter of a norm or a PRelu are
    quantized even if they hold one number.
    """
    one = not any(n != 1 for n in graph.tensors[operand.root].shape or ())
    return one and operand.role == "constant" and graph.ops[op_id].type in _ELEMENTWISE


def _root(graph: Graph, op: Op, position: int, tensor: int) -> int | None:
    """Return the stored tensor behind an input; in front of a PRelu or a norm it may be reshaped."""
    if position not in _CONSTANTS.get(op.type, ()):
        return graph.constant_root(tensor)
    origin = graph.origin(tensor)
    return None if origin is None else origin[0]


def _role(graph: Graph, op_id: int, position: int, tensor: int) -> tuple[Role | None, tuple[int | None, int | None]]:
    op = graph.ops[op_id]
    nowhere = (None, None)
    if op.type in ("Conv", "ConvTranspose", "Gemm") and position in (1, 2):
        if position == 1:
            return "weight", _linear_axes(graph, op_id)
        # Gemm's third operand may be a whole matrix
        return ("bias", (0, None)) if len(graph.tensors[tensor].shape or (0,)) == 1 else ("constant", nowhere)
    if op.type == "MatMul":
        rank = len(graph.tensors[tensor].shape or ())
        if rank < 2:
            return "constant", nowhere
        return "weight", (rank - 1, rank - 2) if position == 1 else (rank - 2, rank - 1)
    if op.type in _TAKES_ROWS and position == 0:
        stack = stack_of(graph, op_id)
        if stack is not None:
            return "weight", (stack.channel_axis, stack.input_axis)
        return "bias" if takes_biases(graph, op_id) else "embedding", nowhere
    if op.type == "Add" and bias_of_add(graph, op_id) == tensor:
        return "bias", (0, None)
    if position in _STATISTICS.get(op.type, ()):
        return "statistic", nowhere
    if op.type in _ELEMENTWISE or position in _CONSTANTS.get(op.type, ()):
        return "constant", nowhere
    return None, nowhere


def _linear_axes(graph: Graph, op_id: int) -> tuple[int, int]:
    op = graph.ops[op_id]
    if op.type == "Gemm":
        return (0, 1) if op.attributes.get("transB", 0) else (1, 0)
    return _LINEAR[op.type]
