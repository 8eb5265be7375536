"""The bytes of a quantized model by role: codes, scales, zero points and floats."""

import math
import os
from pathlib import Path
from typing import Any

from onnx import ModelProto, TensorProto

from onnx_backend.proto.external_data import bytes_of, files_read
from onnx_backend.proto.subgraphs import all_nodes
from qsdk.core.report import Report


def sizes(model: ModelProto, total: int) -> Report:
    """Add up the stored tensors by their role.

    Args:
        model: as stored.
        total: the bytes of its file, with those of its data files.

    Returns:
        Rows `what` (codes, scales, zero points or float leftovers and their like), `dtype`, `tensors`, `bytes`; summary
        `bytes` (the total), `as_float32_bytes` (of the file with its codes as float32, without scales and zero points),
        `ratio` (of the two) and `stored_bytes` (of the tensors alone).
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
    stored = sum(int(row["bytes"]) for row in rows)
    whole = total - stored + as_float
    summary = {"bytes": total, "as_float32_bytes": whole, "ratio": total / whole, "stored_bytes": stored}
    return Report("Sizes", rows, summary)


def file_bytes(source: str | os.PathLike[str] | ModelProto, model: ModelProto) -> int:
    """Return the bytes of a model's file and data files, or for a model in memory, of the file that it makes."""
    held = files_read(model)
    outside = sum(file.stat().st_size for file in held)
    if isinstance(source, ModelProto):
        return int(model.ByteSize()) + outside
    inside = Path(source).stat().st_size
    return inside + outside if held else max(inside, int(model.ByteSize()))  # small data files have been read into it


def _roles(model: ModelProto) -> dict[str, str]:
    """Return tensor name -> its role at the Q/DQ nodes that read it."""
    roles: dict[str, str] = {}
    for node in all_nodes(model.graph.node):
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            first = "codes" if node.op_type == "DequantizeLinear" else "other tensors"
            roles.update(zip(node.input, (first, "scales", "zero points"), strict=False))
    return roles
