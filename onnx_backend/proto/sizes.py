"""The bytes of a quantized model by role: codes, scales, zero points and floats."""

import math
from typing import Any

from onnx import ModelProto, TensorProto

from onnx_backend.proto.external_data import bytes_of
from onnx_backend.proto.subgraphs import all_nodes
from qsdk.core.report import Report


def sizes(model: ModelProto) -> Report:
    """Add up the stored tensors by their role.

    Returns:
        Rows `what` (codes, scales, zero points or float leftovers and their like), `dtype`, `tensors`, `bytes`; summary
        `stored_bytes`, `as_float32_bytes` (the same weights as float32, without scales and zero points), `ratio`.
    """
    role = _roles(model)
    found: dict[tuple[str, str], list[int]] = {}
    as_float = 0
    for tensor in model.graph.initializer:
        kind, size = role.get(tensor.name, "other tensors"), bytes_of(tensor.data_type, tensor.dims)
        entry = found.setdefault((kind, TensorProto.DataType.Name(tensor.data_type).lower()), [0, 0])
        entry[0] += 1
        entry[1] += size
        if kind in ("codes", "other tensors"):
            as_float += 4 * math.prod(tensor.dims) if kind == "codes" else size
    rows: list[dict[str, Any]] = [
        {"what": kind, "dtype": dtype, "tensors": count, "bytes": size}
        for (kind, dtype), (count, size) in found.items()
    ]
    rows.sort(key=lambda row: -int(row["bytes"]))
    total = sum(int(row["bytes"]) for row in rows)
    summary = {"stored_bytes": total, "as_float32_bytes": as_float, "ratio": total / as_float if as_float else 1.0}
    return Report("Sizes", rows, summary)


def _roles(model: ModelProto) -> dict[str, str]:
    """Return tensor name -> its role at the Q/DQ nodes that read it."""
    roles: dict[str, str] = {}
    for node in all_nodes(model.graph.node):
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            first = "codes" if node.op_type == "DequantizeLinear" else "other tensors"
            roles.update(zip(node.input, (first, "scales", "zero points"), strict=False))
    return roles
