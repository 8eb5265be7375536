"""From the recorded operations to ONNX nodes, as the chosen target writes them."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from onnx import NodeProto

from onnx_backend.integer import standard
from onnx_backend.integer.emit import Builder
from onnx_backend.integer.operations import Accumulation, Operation, Product, Requantization, Table, WindowSum

_STANDARD: Mapping[type, Callable[[Builder, Any], None]] = MappingProxyType(
    {
        Accumulation: standard.accumulate,
        Product: standard.multiply,
        Requantization: standard.requantize,
        Table: standard.look_up,
        WindowSum: standard.window_sum,
    }
)


def expand(b: Builder, outputs: set[str]) -> list[NodeProto]:
    """Give the nodes that make `outputs`, and fill the certificate with a row per requantization and table."""
    recorded, b.nodes = live(b.nodes, outputs), []
    for operation in recorded:
        if isinstance(operation, NodeProto):
            b.nodes.append(operation)
            continue
        b.label = operation.result
        _STANDARD[type(operation)](b, operation)
        if isinstance(operation, Requantization | Table):
            b.certificate.append(operation.row)
    return [node for node in b.nodes if isinstance(node, NodeProto)]


def live(operations: Sequence[Operation], outputs: set[str]) -> list[Operation]:
    """Drop operations whose outputs nobody reads."""
    needed, kept = set(outputs), []
    for operation in reversed(operations):
        if needed.intersection(operation.output):
            kept.append(operation)
            needed.update(operation.input)
    return kept[::-1]
