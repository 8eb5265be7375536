"""Turn recorded operations into the ONNX nodes of the chosen target.

Every operation has a standard form. Where kernels are allowed, an operation that only a requantization reads, or two
(a Concat, for tables), waits for it, so that both can become one kernel.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from onnx_backend.integer.codegen import runtime, standard
from onnx_backend.integer.codegen.rows import norm_codes, share_codes
from onnx_backend.integer.codegen.runtime import KernelChoice
from onnx_backend.integer.codegen.short_requantize import requantize_short
from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.context import max_pool
from onnx_backend.integer.ir.operations import (
    Accumulation,
    Join,
    Norm,
    Operation,
    Product,
    Recorded,
    Requantization,
    Shares,
    Softmax,
    Table,
    WindowSum,
)
from onnx_backend.integer.ir.values import ActivationEncoding
from onnx_backend.integer.portable import requantize
from onnx_backend.proto.nodes import attributes

_SHARED = 2  # requantizations of one sum that a kernel each is worth (a LeakyRelu has two)
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
            if not _as_faster_nodes(b, operation, kernels, portable is not None):
                b.nodes.append(operation)
        elif kernels is not None and _waits(operation, readers):
            waiting[operation.result] = operation
        else:
            inputs = {name: waiting[name] for name in operation.input if name in waiting}
            if not _write(b, operation, inputs, kernels, portable):
                waiting = {name: part for name, part in waiting.items() if name not in inputs}  # they are written now
    # a kernel that replaces several operations leaves some without a reader
    nodes = [node for node in live(b.nodes, outputs) if isinstance(node, NodeProto)]
    return nodes if portable is not None else without_splits(b, nodes, outputs)


def _as_faster_nodes(b: Builder, node: NodeProto, kernels: KernelChoice | None, portable: bool) -> bool:
    """Write a node as others that give the same integers in less time; return False for most."""
    if not portable and node.output[0] in b.row_sums:
        standard.sum_rows(b, node, b.row_sums[node.output[0]])
        return True
    return runtime.repeat(b, node) if kernels is not None else max_pool(b, node)


def live(operations: Sequence[Operation], outputs: set[str]) -> list[Operation]:
    """Drop operations whose outputs nobody reads."""
    needed, kept = set(outputs), []
    for operation in reversed(operations):
        if needed.intersection(operation.output):
            kept.append(operation)
            needed.update(operation.input)
    return kept[::-1]


def _readers(operations: Sequence[Operation], outputs: set[str]) -> dict[str, list[Operation]]:
    """Return the operations that read a tensor, none for one that leaves the model."""
    found: dict[str, list[Operation]] = {}
    for operation in operations:
        for name in operation.input:
            found.setdefault(name, []).append(operation)
    return {name: readers for name, readers in found.items() if name not in outputs}


def _indices(operations: Sequence[Operation], outputs: set[str]) -> set[str]:
    """Return the codes that a requantization computes for tables alone, which index with int32."""
    others = set(outputs)
    for operation in operations:
        if not isinstance(operation, Table) or operation.clips:
            others.update(operation.input)
    requantizations = (op for op in operations if isinstance(op, Requantization))
    return {op.result for op in requantizations if op.result not in others}


def _waits(operation: Recorded, readers: Mapping[str, list[Operation]]) -> bool:
    read_by = readers.get(operation.result, [])
    if isinstance(operation, Accumulation | Product | WindowSum):
        # two kernels are faster than one sum of products that is requantized twice in plain operators
        alone = all(isinstance(reader, Requantization) and len(reader.input) == 1 for reader in read_by)
        return alone and 0 < len(read_by) <= _SHARED
    joined = len(read_by) == 1 and isinstance(read_by[0], Join)
    return isinstance(operation, Table) and operation.plain is not None and joined


def _write(
    b: Builder,
    operation: Recorded,
    inputs: Mapping[str, Recorded],
    kernels: KernelChoice | None,
    portable: set[str] | None = None,
) -> bool:
    """Write an operation, and those that wait for it; return True if a kernel computes them all."""
    b.label = operation.result
    fused = kernels is not None and _fused(b, operation, inputs, kernels)
    if not fused:
        for part in inputs.values():
            _write(b, part, {}, kernels)
        b.label = operation.result
        short = kernels is not None and isinstance(operation, Requantization) and requantize_short(b, operation)
        if not short and (portable is None or not _in_32_bits(b, operation, portable)):
            _STANDARD[type(operation)](b, operation)
        inputs = {}
    for part in (*inputs.values(), operation):
        if isinstance(part, Requantization | Table):
            b.certificate.append(part.row)
    return fused


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
            return runtime.product(b, operation, maker)
        if isinstance(maker, WindowSum):
            return runtime.pool(b, operation, maker)
        if operation.rows is not None:
            return _rows(b, operation, operation.rows)
        return runtime.addition(b, operation)
    if isinstance(operation, Join):
        tables = {name: part for name, part in inputs.items() if isinstance(part, Table)}
        return runtime.join(b, operation, tables)
    return isinstance(operation, Table) and runtime.function(b, operation)


def _rows(b: Builder, operation: Requantization, rows: Softmax | Shares | Norm) -> bool:
    if isinstance(rows, Norm):
        return norm_codes(b, operation, rows)
    return runtime.softmax(b, operation, rows) if isinstance(rows, Softmax) else share_codes(b, operation, rows)


def _encodings(operation: Recorded) -> list[ActivationEncoding]:
    if isinstance(operation, Product):
        return [operation.left.encoding, operation.right.encoding]
    sources = [operation.plain] if isinstance(operation, Table) else []
    return [operation.encoding, *(source for source in sources if source is not None)]


# --- a Concat of all parts of a tensor, in order, is that tensor ------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """One result of a Split: the tensor, the axis, its place, and the sizes of all parts."""

    source: str
    axis: int
    place: int
    sizes: tuple[int, ...]


def without_splits(b: Builder, nodes: Sequence[NodeProto], outputs: set[str]) -> list[NodeProto]:
    """Return nodes in which a Concat reads the source of parts that it would join in order.

    A Split of which one result is left becomes a Slice.
    """
    stored = {tensor.name: tensor for tensor in b.initializers}
    parts = {part: place for node in nodes for part, place in _parts(node, stored).items()}
    joined = [_without_split(node, parts) if node.op_type == "Concat" and not node.domain else node for node in nodes]
    read = {name for node in joined for name in node.input} | outputs
    found = []
    for node in joined:
        left = [name for name in node.output if name in read]
        if len(left) == 1 and left[0] in parts and len(node.output) > 1:
            found.append(_slice(b, node, left[0], parts[left[0]]))
        else:
            found += [node] if left else []
    return found


def _parts(node: NodeProto, stored: Mapping[str, TensorProto]) -> dict[str, _Part]:
    if node.op_type != "Split" or len(node.input) != 2 or node.input[1] not in stored:
        return {}
    sizes = tuple(numpy_helper.to_array(stored[node.input[1]]).tolist())
    axis = int(attributes(node).get("axis", 0))
    return {name: _Part(node.input[0], axis, i, sizes) for i, name in enumerate(node.output)}


def _without_split(node: NodeProto, parts: Mapping[str, _Part]) -> NodeProto:
    axis, names, kept = int(attributes(node)["axis"]), list(node.input), list[str]()
    while names:
        first = parts.get(names[0])
        whole = [_Part(first.source, axis, i, first.sizes) for i in range(len(first.sizes))] if first else []
        if whole and [parts.get(name) for name in names[: len(whole)]] == whole:
            kept.append(whole[0].source)
            names = names[len(whole) :]
        else:
            kept.append(names.pop(0))
    if len(kept) == len(node.input):
        return node
    return helper.make_node("Concat", kept, list(node.output), name=node.name, axis=axis)


def _slice(b: Builder, node: NodeProto, name: str, part: _Part) -> NodeProto:
    start = sum(part.sizes[: part.place])
    bounds = [b.constant([value], np.int64) for value in (start, start + part.sizes[part.place], part.axis)]
    return helper.make_node("Slice", [part.source, *bounds], [name], name=node.name)
