"""Write norms and logarithms of sums along axes as elementwise functions before and after a ReduceSum."""

from collections.abc import Mapping
from types import MappingProxyType

from onnx import NodeProto

from onnx_backend.integer.decompose.writer import Writer
from onnx_backend.proto.nodes import attributes

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
