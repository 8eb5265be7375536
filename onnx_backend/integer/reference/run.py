"""Execute an integer-only model in NumPy on exact integers, independently of ONNX Runtime.

Every op of the integer models of `integer.convert` is computed here from the ONNX standard. Accumulators are computed
exactly and an int32 overflow raises instead of wrapping.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, ValueInfoProto, helper, numpy_helper

from onnx_backend.integer.ir.values import Array
from onnx_backend.integer.reference.ops import OPS
from qsdk.core.errors import DataError, IntegerError


def run_reference(model: ModelProto, inputs: Mapping[str, Array], *, every_tensor: bool = False) -> dict[str, Array]:
    """Execute an integer-only model and return its outputs by name (with `every_tensor`, all tensors).

    Args:
        model: as written by `integer.convert`, with float or integer edges.
        inputs: one array per graph input, in its dtype.
        every_tensor: also return the inner tensors, initializers and inputs.

    Raises:
        DataError: an input is missing or has another dtype than the graph declares.
        IntegerError: an accumulator leaves int32, or an op is not one of the integer models'.
    """
    tensors: dict[str, Array] = {t.name: _constant(t) for t in model.graph.initializer}
    for info in model.graph.input:
        if info.name in tensors:
            continue
        if info.name not in inputs:
            raise DataError(f"input {info.name!r} is missing; give one array per graph input")
        wanted = helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        tensors[info.name] = np.asarray(inputs[info.name])
        if tensors[info.name].dtype != wanted:
            raise DataError(f"input {info.name!r} is {tensors[info.name].dtype}, the model takes {wanted}")
    _run_nodes(model.graph.node, tensors)
    return tensors if every_tensor else {info.name: tensors[info.name] for info in model.graph.output}


def _run_nodes(nodes: Iterable[NodeProto], tensors: dict[str, Array]) -> None:
    """Execute nodes in order and add their results to `tensors`."""
    for node in nodes:
        operation: Any = _scan if node.op_type == "Scan" else OPS.get(node.op_type)
        if operation is None or node.domain not in ("", "ai.onnx"):
            raise IntegerError(f"{node.op_type} {node.name!r} is not an op of integer-only models")
        attributes: dict[str, Any] = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        arguments = [tensors[name] if name else None for name in node.input]
        try:
            found = operation(attributes, *arguments)
        except OverflowError as error:
            raise IntegerError(f"{node.op_type} {node.name!r}: {error}") from error
        results = found if isinstance(found, tuple) else (found,)
        tensors.update(zip(node.output, results, strict=False))


def _scan(attributes: Mapping[str, Any], *inputs: Array) -> tuple[Array, ...]:
    """Execute a Scan along first axes, whose body reads nothing from outside."""
    if attributes.get("scan_input_axes") or attributes.get("scan_output_axes"):
        raise OverflowError("a Scan along other axes than the first is not an op of integer-only models")
    graph, count = attributes["body"], attributes["num_scan_inputs"]
    kept = {tensor.name: _constant(tensor) for tensor in graph.initializer}
    states, names = list(inputs[:-count]), [info.name for info in graph.input]
    declared = graph.output[len(states) :]
    columns: list[list[Array]] = [[] for _ in declared]
    turned_in = attributes.get("scan_input_directions") or [0] * count
    turned_out = attributes.get("scan_output_directions") or [0] * len(columns)
    read = [x[::-1] if turned else x for x, turned in zip(inputs[-count:], turned_in, strict=True)]
    for parts in zip(*read, strict=True):
        given = [*states, *(np.asarray(part) for part in parts)]
        tensors = kept | dict(zip(names, given, strict=True))
        _run_nodes(graph.node, tensors)
        results = [tensors[info.name] for info in graph.output]
        for column, result in zip(columns, results[len(states) :], strict=True):
            column.append(result)
        states = results[: len(states)]
    stacks = [np.stack(column) if column else _empty(info) for column, info in zip(columns, declared, strict=True)]
    return (*states, *(x[::-1] if turned else x for x, turned in zip(stacks, turned_out, strict=True)))


def _empty(info: ValueInfoProto) -> Array:
    """Return the stack of results of a body that never ran; an undeclared size is 0."""
    kind = info.type.tensor_type
    sizes = [int(dim.dim_value) for dim in kind.shape.dim]
    return np.zeros((0, *sizes), helper.tensor_dtype_to_np_dtype(kind.elem_type))


def _constant(tensor: Any) -> Array:
    array = numpy_helper.to_array(tensor)
    # NumPy cannot compute on packed types; their values fit in 8 bits
    return array.astype(np.uint8) if array.dtype.name in ("uint4", "uint2") else array
