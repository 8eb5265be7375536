"""Turn recorded operations into the ONNX nodes of the chosen target.

Every operation has a standard form. Where kernels are allowed, an operation whose only reader is a
requantization (a Concat, for tables) waits for it, so that both can become one kernel.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from onnx import NodeProto

from onnx_backend.integer.codegen import runtime, standard
from onnx_backend.integer.codegen.runtime import KernelChoice
from onnx_backend.integer.ir import max_of_slices
from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.operations import (
    Accumulation,
    Join,
    Operation,
    Product,
    Recorded,
    Requantization,
    Table,
    WindowSum,
)
from onnx_backend.integer.ir.requantization import RequantMultiplier
from onnx_backend.integer.ir.values import ActivationEncoding
from onnx_backend.integer.portable import requantize

_STANDARD: Mapping[type, Callable[[Builder, Any], None]] = MappingProxyType(
    {
        Accumulation: standard.accumulate,
        Join: standard.join,
        Product: standard.multiply,
        Requantization: standard.requantize,
        Table: standard.look_up,
        WindowSum: standard.window_sum,
    }
)


def expand(
    b: Builder, outputs: set[str], kernels: KernelChoice | None = None, *, portable: set[str] | None = None
) -> list[NodeProto]:
    """Return the nodes that compute `outputs`, and fill the certificate with a row per requantization and table.

    With `portable` requantizations are written in 32 bits where that gives the same codes; the results of their nodes
    are added to it.
    """
    recorded, b.nodes = live(b.nodes, outputs), []
    readers = _readers(recorded, outputs)
    b.indices = set() if kernels else _indices(recorded, outputs)
    waiting: dict[str, Recorded] = {}
    for operation in recorded:
        if isinstance(operation, NodeProto):
            if (kernels is not None and kernels.contrib) or not max_of_slices.max_pool(b, operation):
                b.nodes.append(operation)
        elif kernels is not None and _waits(operation, readers):
            waiting[operation.result] = operation
        else:
            inputs = {name: waiting.pop(name) for name in operation.input if name in waiting}
            _write(b, operation, inputs, kernels, portable)
    # a kernel that replaces several operations leaves some without a reader
    return [node for node in live(b.nodes, outputs) if isinstance(node, NodeProto)]


def live(operations: Sequence[Operation], outputs: set[str]) -> list[Operation]:
    """Drop operations whose outputs nobody reads."""
    needed, kept = set(outputs), []
    for operation in reversed(operations):
        if needed.intersection(operation.output):
            kept.append(operation)
            needed.update(operation.input)
    return kept[::-1]


def _readers(operations: Sequence[Operation], outputs: set[str]) -> dict[str, Operation | None]:
    """Return the one operation that reads a tensor, None where there are several or it leaves the model."""
    counts = Counter(name for operation in operations for name in operation.input)
    counts.update(outputs)
    sole: dict[str, Operation | None] = dict.fromkeys(outputs)
    for operation in operations:
        for name in operation.input:
            sole[name] = operation if counts[name] == 1 else None
    return sole


def _indices(operations: Sequence[Operation], outputs: set[str]) -> set[str]:
    """Return the codes that a requantization computes for tables alone, which index with int32."""
    others = set(outputs)
    for operation in operations:
        if not isinstance(operation, Table) or operation.clips:
            others.update(operation.input)
    requantizations = (
        op for op in operations if isinstance(op, Requantization) and isinstance(op.plan, RequantMultiplier)
    )
    return {op.result for op in requantizations if op.result not in others}


def _waits(operation: Recorded, readers: Mapping[str, Operation | None]) -> bool:
    reader = readers.get(operation.result)
    if isinstance(operation, Accumulation | Product | WindowSum):
        return isinstance(reader, Requantization) and len(reader.input) == 1
    return isinstance(operation, Table) and operation.plain is not None and isinstance(reader, Join)


def _write(
    b: Builder,
    operation: Recorded,
    inputs: Mapping[str, Recorded],
    kernels: KernelChoice | None,
    portable: set[str] | None = None,
) -> None:
    b.label = operation.result
    if kernels is None or not _fused(b, operation, inputs, kernels):
        for part in inputs.values():
            _write(b, part, {}, kernels)
        b.label = operation.result
        if portable is None or not _in_32_bits(b, operation, portable):
            _STANDARD[type(operation)](b, operation)
        inputs = {}
    for part in (*inputs.values(), operation):
        if isinstance(part, Requantization | Table):
            b.certificate.append(part.row)


def _in_32_bits(b: Builder, operation: Recorded, results: set[str]) -> bool:
    """Write a requantization in 32 bits and note the results of its nodes; False if it has no such form."""
    before = len(b.nodes)
    if not isinstance(operation, Requantization) or not requantize.requantize(b, operation):
        return False
    results.update(name for node in b.nodes[before:] for name in node.output)
    return True


def _fused(b: Builder, operation: Recorded, inputs: Mapping[str, Recorded], kernels: KernelChoice) -> bool:
    """Write an operation and those that wait for it as one kernel; False where there is none."""
    if any(encoding.wide for part in (operation, *inputs.values()) for encoding in _encodings(part)):
        return False  # no kernel reads or writes 16 bits
    if isinstance(operation, Requantization):
        maker = next(iter(inputs.values()), None)
        if isinstance(maker, Accumulation):
            return runtime.layer(b, operation, maker, kernels)
        if isinstance(maker, Product):
            return runtime.product(b, operation, maker, kernels)
        if isinstance(maker, WindowSum):
            return kernels.contrib and runtime.pool(b, operation, maker)
        if operation.softmax is not None:
            return kernels.contrib and runtime.softmax(b, operation, operation.softmax)
        return kernels.contrib and runtime.addition(b, operation)
    if isinstance(operation, Join):
        tables = {name: part for name, part in inputs.items() if isinstance(part, Table)}
        return kernels.contrib and runtime.join(b, operation, tables)
    return isinstance(operation, Table) and kernels.contrib and runtime.function(b, operation)


def _encodings(operation: Recorded) -> list[ActivationEncoding]:
    if isinstance(operation, Product):
        return [operation.left.encoding, operation.right.encoding]
    sources = [operation.plain] if isinstance(operation, Table) else []
    return [operation.encoding, *(source for source in sources if source is not None)]
