"""Execute an integer-only model in NumPy on exact integers, independently of ONNX Runtime.

Every op of the integer models of `integer.convert` is computed here from the ONNX standard. Accumulators are computed
exactly and an int32 overflow raises instead of wrapping.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from onnx_backend.integer.ir.values import Array
from onnx_backend.integer.reference.ops import OPS
from onnx_backend.integer.reference.scan import Body, scan
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
    """Execute a Scan whose body reads nothing from outside."""
    graph = attributes["body"]
    kept = {tensor.name: _constant(tensor) for tensor in graph.initializer}

    def run(given: Sequence[Array]) -> list[Array]:
        tensors = kept | dict(zip((info.name for info in graph.input), given, strict=True))
        _run_nodes(graph.node, tensors)
        return [tensors[info.name] for info in graph.output]

    return tuple(scan(attributes, {"body": Body(graph.output, run)}, *inputs))


def _constant(tensor: Any) -> Array:
    array = numpy_helper.to_array(tensor)
    # NumPy cannot compute on packed types; their values fit in 8 bits
    return array.astype(np.uint8) if array.dtype.name in ("uint4", "uint2") else array
