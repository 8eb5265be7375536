"""Write one node of a Q/DQ model as simpler operators: CastLike, reductions, Einsum."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import NodeProto, TensorProto, helper, numpy_helper

from onnx_backend.proto.graph_queries import unique
from onnx_backend.proto.nodes import attributes


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


#: Op type -> the functions before and behind the sum.
REDUCTIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "ReduceL1": ("Abs", ""),
        "ReduceL2": ("Mul", "Sqrt"),
        "ReduceLogSum": ("", "Log"),
        "ReduceLogSumExp": ("Exp", "Log"),
        "ReduceSumSquare": ("Mul", ""),
    }
)


def reduction(node: NodeProto, taken: set[str]) -> Writer:
    """Write out one of `REDUCTIONS`, of a model of opset 13 or later."""
    writer = Writer(node, taken)
    before, behind = REDUCTIONS[node.op_type]
    attrs = attributes(node)
    axes = list(node.input[1:]) or ([writer.integers(attrs["axes"])] if "axes" in attrs else [])
    rest = {key: value for key, value in attrs.items() if key != "axes"}
    value = node.input[0]
    if before:
        value = writer.add(before, [value, value] if before == "Mul" else [value])
    value = writer.add("ReduceSum", [value, *axes], name=node.name, **rest)
    return writer.end(writer.add(behind, [value]) if behind else value)


Sizes = Mapping[str, tuple[int | None, ...]]


def einsum(node: NodeProto, taken: set[str], shapes: Sizes) -> Writer | None:
    """Write out an Einsum; None where it has no such form.

    Args:
        node: the Einsum.
        taken: names of the model; those of the new nodes and tensors are added.
        shapes: static dimensions of the model's tensors, None for a dynamic one.
    """
    parsed = _parsed(node, shapes)
    return None if parsed is None else _Einsum(node, taken).written(*parsed, shapes)


def _parsed(node: NodeProto, shapes: Sizes) -> tuple[list[list[str]], list[str]] | None:
    """Return the labels of every operand and of the result, None where they are unknown or one repeats in a tensor."""
    left, arrow, right = str(attributes(node)["equation"]).replace(" ", "").partition("->")
    ranks = [len(shapes[name]) if name in shapes else None for name in node.input]
    operands = [_labels(term, rank) for term, rank in zip(left.split(","), ranks, strict=True)]
    known = [labels for labels in operands if labels is not None]
    hidden = max((label for labels in known for label in labels if len(label) > 1), default="...0")
    every = [label for labels in known for label in labels]
    if arrow:
        result = _labels(right, len(right.replace("...", "")) + ("..." in right) * int(hidden[3:]))
    else:
        dots = [f"...{i}" for i in range(int(hidden[3:]), 0, -1)]
        result = [*dots, *sorted(label for label in set(every) if len(label) == 1 and every.count(label) == 1)]
    if len(known) < len(operands) or result is None or any(len(set(x)) < len(x) for x in (*known, result)):
        return None
    return known, result


def _labels(term: str, rank: int | None) -> list[str] | None:
    """Return one label per axis, those of the ellipsis counted from its right; None where the rank is unknown."""
    before, dots, after = term.partition("...")
    if rank is None or rank < len(before + after):
        return None
    return [*before, *(f"...{i}" for i in range(rank - len(before + after), 0, -1)), *after] if dots else list(term)


class _Einsum(Writer):
    """One Einsum and the ops that replace it."""

    def written(self, operands: list[list[str]], result: list[str], shapes: Sizes) -> Writer | None:
        """Write the whole; None where it has no such form."""
        if len(operands) == 1:
            summed = [i for i, label in enumerate(operands[0]) if label not in result]
            rest = [label for label in operands[0] if label in result]
            name = self._node.input[0]
            name = self._shaped("ReduceSum", name, summed, keepdims=0) if summed else name
            return self.end(self._ordered(name, rest, result))
        if len(operands) > 2:
            return None
        left, right = operands
        lone = set(left) ^ set(right)
        if lone - set(result):
            return None  # a sum over an axis of one factor alone
        summed_labels = [label for label in left if label in right and label not in result]
        if not summed_labels:
            return self._product(left, right, result)
        pairs = [(label, size) for name, labels in zip(self._node.input, operands, strict=True)
                 for label, size in zip(labels, shapes[name], strict=True)]  # fmt: skip
        return self._matmul(left, right, result, summed_labels, dict(pairs))

    def _product(self, left: list[str], right: list[str], result: list[str]) -> Writer:
        names = []
        for name, labels in zip(self._node.input, (left, right), strict=True):
            ordered = self._ordered(name, labels, [label for label in result if label in labels])
            missing = [i for i, label in enumerate(result) if label not in labels]
            names.append(self._shaped("Unsqueeze", ordered, missing) if missing else ordered)
        return self.end(self.add("Mul", names, name=self._node.name))

    def _matmul(
        self, left: list[str], right: list[str], result: list[str], summed: list[str], sizes: Mapping[str, int | None]
    ) -> Writer | None:
        both = [label for label in result if label in left and label in right]
        rows = [label for label in result if label not in right]
        columns = [label for label in result if label not in left]
        plain = not both and len(columns) == len(summed) == 1  # a matrix on the right takes any axes before the last
        first = self._ordered(self._node.input[0], left, [*both, *rows, *summed])
        second = self._ordered(self._node.input[1], right, [*both, *summed, *columns])
        if not plain:
            found = [
                self._merged(name, len(both), [[sizes[label] for label in group] for group in groups])
                for name, groups in ((first, (rows, summed)), (second, (summed, columns)))
            ]
            if None in found:
                return None
            first, second = (name or "" for name in found)
        name = self.add("MatMul", [first, second], name=self._node.name)
        if not plain and (len(rows) != 1 or len(columns) != 1):
            split = [_size(sizes[label]) for label in (*rows, *columns)]
            if split.count(-1) > 1:
                return None
            name = self._shaped("Reshape", name, [0] * len(both) + split)
        return self.end(self._ordered(name, [*both, *rows, *columns], result))

    def _merged(self, name: str, shared: int, groups: Sequence[Sequence[int | None]]) -> str | None:
        """Make one axis of every group behind the shared ones; None where two of them have no static size."""
        if all(len(group) == 1 for group in groups):
            return name
        whole = [-1 if None in group else math.prod(size or 0 for size in group) for group in groups]
        return None if whole.count(-1) > 1 else self._shaped("Reshape", name, [0] * shared + whole)

    def _ordered(self, name: str, labels: Sequence[str], wanted: Sequence[str]) -> str:
        order = [labels.index(label) for label in wanted]
        return name if order == sorted(order) else self.add("Transpose", [name], perm=order)

    def _shaped(self, op_type: str, name: str, numbers: Sequence[int], **attrs: Any) -> str:
        return self.add(op_type, [name, self.integers(numbers)], **attrs)


def _size(size: int | None) -> int:
    return -1 if size is None else size
