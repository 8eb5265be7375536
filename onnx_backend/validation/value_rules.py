"""Rules on stored values: scales, zero points, and codes outside of their declared grid."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import NodeProto, TensorProto, helper

from onnx_backend.proto.external_data import array, bytes_of
from onnx_backend.proto.nodes import metadata
from onnx_backend.validation.finding import Finding, error, warning
from onnx_backend.validation.scope import Scope, type_name
from onnx_backend.validation.type_rules import FLOAT8
from qsdk.core.errors import ConfigError
from qsdk.core.numerics.dtypes import WHOLE_BYTES, DType, dtype_named
from qsdk.core.numerics.encoding import storage_type

_T = TensorProto
_FLOATS = (_T.FLOAT, _T.FLOAT16, _T.BFLOAT16, _T.FLOAT8E8M0, _T.DOUBLE)


def scales(node: NodeProto, scope: Scope) -> Iterator[Finding]:
    """Yield a finding unless scales are positive and finite, and zero points of float8 and int32 codes are 0."""
    name, stored = scope.name(node), scope.stored.get(scope.input(node, 1))
    if stored is not None and stored.data_type in _FLOATS and 0 not in stored.dims:
        low, high = _ends(array(stored))
        if not (low > 0 and np.isfinite(high)):
            bad = high if low > 0 else low
            problem = f"the scale {node.input[1]!r} holds {bad}; scales are positive and finite"
            yield error(name, "scale", problem, "calibrate again")
    zero_point = scope.stored.get(scope.input(node, 2))
    if zero_point is None or zero_point.data_type not in (_T.INT32, *FLOAT8, _T.FLOAT4E2M1):
        return
    if array(zero_point).astype(np.float32).any():
        kind = type_name(zero_point.data_type)
        problem = f"the zero point of codes of {kind} is not 0"
        if kind == "INT32":
            yield warning(name, "zero_point", f"{problem}; not every runtime subtracts it", "drop the zero point")
        else:
            yield error(name, "zero_point", f"{problem}, which the runtime refuses", "drop the zero point")


def float_values(node: NodeProto, scope: Scope) -> Iterator[Finding]:
    """Yield an error if a stored float tensor that the graph quantizes holds NaN, which has no code."""
    stored = scope.stored.get(node.input[0])
    is_float = stored is not None and stored.data_type in _FLOATS and 0 not in stored.dims
    if stored is not None and is_float and np.isnan(_ends(array(stored))[0]):
        problem = f"it quantizes {node.input[0]!r}, which holds NaN"
        yield error(scope.name(node), "grid", problem, "repair the weights and export again")


def grid(node: NodeProto, scope: Scope) -> Iterator[Finding]:
    """Yield an error if codes or zero points are outside the grid that the metadata declares (`qsdk.dtype`)."""
    declared = metadata(node).get("qsdk.dtype")
    if declared is None:
        return
    name, code = scope.name(node), scope.type(node.input[0])
    dtype = _known(declared)
    if dtype is None or not dtype.is_quantized:
        yield error(name, "grid", f"its metadata declares {declared!r}, which is no quantized dtype", "update qsdk")
        return
    if type_name(code) == WHOLE_BYTES.get(dtype.container, "").upper():
        dtype = replace(dtype, container=WHOLE_BYTES[dtype.container])
    container = int(helper.np_dtype_to_tensor_dtype(storage_type(dtype)))
    if code and code != container:
        problem = (
            f"its metadata declares {dtype.name}, which is stored as {type_name(container)}, not {type_name(code)}"
        )
        yield error(name, "grid", problem, "export the model again")
    elif dtype.narrows_container:
        for position, what in ((0, "codes"), (2, "zero points")):
            stored = scope.stored.get(scope.input(node, position))
            if stored is not None and 0 not in stored.dims:
                yield from _on_grid(array(stored), dtype, what, name)


def _known(name: str) -> DType | None:
    try:
        return dtype_named(name)
    except ConfigError:
        return None


def _on_grid(values: npt.NDArray[Any], dtype: DType, what: str, name: str) -> Iterator[Finding]:
    low, high = _ends(values)
    if low < dtype.lo or high > dtype.hi:
        problem = f"its {what} reach from {low:g} to {high:g}, off the grid {dtype.lo:g}..{dtype.hi:g} of {dtype.name}"
        yield error(name, "grid", problem, "export the model again, or correct qsdk.dtype in the node's metadata")


def _ends(values: npt.NDArray[Any]) -> tuple[float, float]:
    """Return the smallest and largest value; both are NaN if one is. Only types unknown to NumPy are copied."""
    if values.dtype.kind not in "fiu":
        values = values.astype(np.int8 if "int" in values.dtype.name else np.float32)
    return float(values.min()), float(values.max())


def stored_tensors(scope: Scope) -> Iterator[Finding]:
    """Yield an error for a stored tensor with too few bytes for its shape, or values beyond its type."""
    for name, tensor in scope.own.items():
        if tensor.data_location == _T.EXTERNAL or not bytes_of(tensor.data_type, tensor.dims):
            continue
        problem = _size_problem(tensor) or _overflow_problem(tensor)
        if problem:
            yield error(scope.path + name, "stored", problem, "the file is damaged; export it again")


#: the range of each type, for the int32 fields in which a file may store it
_HELD: Mapping[int, tuple[int, int]] = {
    _T.INT8: (-128, 127),
    _T.UINT8: (0, 255),
    _T.INT16: (-(2**15), 2**15 - 1),
    _T.UINT16: (0, 2**16 - 1),
}


def _size_problem(tensor: TensorProto) -> str:
    needed = bytes_of(tensor.data_type, tensor.dims)
    if tensor.HasField("raw_data"):
        size = len(tensor.raw_data)  # one tensor at a time is copied for this
        return "" if size == needed else f"the stored tensor has {size} bytes where {tuple(tensor.dims)} needs {needed}"
    try:
        array(tensor)
    except ValueError as wrong:
        return f"the stored tensor does not hold what its shape {tuple(tensor.dims)} needs ({wrong})"
    return ""


def _overflow_problem(tensor: TensorProto) -> str:
    if tensor.data_type not in _HELD or not tensor.int32_data:
        return ""
    (low, high), ends = _HELD[tensor.data_type], (min(tensor.int32_data), max(tensor.int32_data))
    if low <= ends[0] and ends[1] <= high:
        return ""
    return f"the stored tensor reaches from {ends[0]} to {ends[1]}, which {type_name(tensor.data_type)} cannot hold"
