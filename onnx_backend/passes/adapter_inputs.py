"""Matrices of low-rank adapters as inputs of a file, and in files of ONNX Runtime that feed them.

Each input has the matrix that was active as its default, so that the file runs without any; its rank is open.
`RunOptions.add_active_adapter` feeds those of another adapter, by name.
"""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnxruntime as ort
from onnx import ModelProto, helper

from onnx_backend.proto.nodes import retain
from qsdk.core.atomic_files import write_atomically
from qsdk.core.errors import ExportError


def take_adapters(model: ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Make stored matrices [rank, in] and [out, rank] inputs with an open rank, in place; `shapes` are by name."""
    graph = model.graph
    stored = {tensor.name: tensor for tensor in graph.initializer}
    if lacking := [name for name in shapes if name not in stored]:
        raise ExportError(
            f"adapters='inputs': the file has no matrix {lacking[0]!r} as it stands in the model; leave adapters float "
            "in the config (a rule quantizes them)"
        )
    changed = set(shapes)
    for name in shapes:
        layer, _, part = name.partition(".lora_")
        sizes: list[int | str] = [*stored[name].dims]
        sizes[0 if part.startswith("A") else 1] = f"{layer}.rank"
        graph.input.append(helper.make_tensor_value_info(name, stored[name].data_type, sizes))
    for node in graph.node:
        if changed.intersection(node.input) and node.op_type in ("Transpose", "MatMul", "Gemm"):
            changed.update(node.output if node.op_type == "Transpose" else ())
            changed_here = set(node.output)
            retain(graph.value_info, partial(_is_outside, changed_here))


def _is_outside(names: set[str], value: Any) -> bool:
    return value.name not in names


def write_adapter(path: str | os.PathLike[str], matrices: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write matrices by input name in ONNX Runtime's format for adapters, whole or not at all."""
    adapter = ort.AdapterFormat()
    adapter.set_parameters({name: ort.OrtValue.ortvalue_from_numpy(value) for name, value in matrices.items()})
    write_atomically(path, partial(_export, adapter))


def _export(adapter: ort.AdapterFormat, path: Path) -> None:
    adapter.export_adapter(str(path))
