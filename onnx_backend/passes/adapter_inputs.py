"""Matrices of low-rank adapters as inputs of a file, and in files of ONNX Runtime that feed them.

Each input has the matrix that was active as its default, so that the file runs without any; its rank is open.
`RunOptions.add_active_adapter` feeds those of another adapter, by name.
"""

import tempfile
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import GraphIndex, nodes_reaching
from onnx_backend.proto.lazy_tensors import is_stub
from onnx_backend.proto.nodes import (
    attributes,
    drop_unused_initializers,
    rename_inputs,
    replace_nodes,
    retain,
    set_attributes,
)
from qsdk.core.arrays import Array
from qsdk.core.errors import ExportError

Matrices = Mapping[str, Array]


def take_adapters(
    model: ModelProto, adapters: Mapping[str, Matrices], *, turned: bool = False
) -> dict[str, dict[str, Array]]:
    """Make the matrices of the first adapter inputs, in place, and return those of all as the file reads them.

    With `turned`, [rank, in] and [out, rank] become [in, rank] and [rank, out], with the scaling of the adapter in the
    latter; otherwise the nodes stay as they are. Nothing changes where there are no adapters.
    """
    if not adapters:
        return {}
    graph, index = model.graph, GraphIndex(model.graph)
    matrices = next(iter(adapters.values()))
    if lacking := [name for name in matrices if name not in index.stored]:
        raise ExportError(
            f"adapters='inputs': the file has no matrix {lacking[0]!r} as it stands in the model; leave adapters float "
            "in the config (a rule quantizes them)"
        )
    factors = {name: _turn(index, name) for name in matrices} if turned else {}
    types = {name: helper.tensor_dtype_to_np_dtype(index.stored[name].data_type) for name in matrices}

    def read(name: str, value: Array) -> Array:
        whole = (value * np.float32(factors[name])).T if turned else value
        return np.ascontiguousarray(whole).astype(types[name])

    for name, value in matrices.items():
        index.stored[name].CopyFrom(numpy_helper.from_array(read(name, value), name))
        layer, _, part = name.partition(".lora_")
        sizes: list[int | str] = [*index.stored[name].dims]
        sizes[part.startswith("A") is turned] = f"{layer}.rank"
        graph.input.append(helper.make_tensor_value_info(name, index.stored[name].data_type, sizes))
    if turned:
        replace_nodes(graph, nodes_reaching(graph.node, [value.name for value in graph.output]))
        drop_unused_initializers(graph)
    _forget_sizes(graph, matrices)
    return {adapter: {n: read(n, value) for n, value in own.items()} for adapter, own in adapters.items()}


def _forget_sizes(graph: GraphProto, names: Collection[str]) -> None:
    """Drop the declared sizes of what products with the matrices make, whose rank is open now."""
    changed = set(names)
    for node in graph.node:
        if changed.intersection(node.input) and node.op_type in ("Transpose", "MatMul", "Gemm"):
            changed.update(node.output if node.op_type == "Transpose" else ())
            retain(graph.value_info, partial(_is_outside, set(node.output)))


def _turn(index: GraphIndex, name: str) -> float:
    """Have products read a matrix as it will be, and return the number that it takes from the nodes behind them."""
    products = _products(index, name)
    scaled = [_scaling(index, product) for product in products] if ".lora_B." in name else []
    if not scaled or len({factor for factor, _ in scaled}) > 1:
        return 1.0
    for product, (_, node) in zip(products, scaled, strict=True):
        if node is not None:
            rename_inputs(index.readers[node.output[0]], {node.output[0]: product.output[0]})
    return scaled[0][0]


def _products(index: GraphIndex, name: str) -> list[NodeProto]:
    """Return the products with a matrix, which read it as it is now: no Transpose is in front of them any more."""
    found = list[NodeProto]()
    for reader in index.readers.get(name, ()):
        if reader.op_type == "Transpose":
            behind = index.readers.get(reader.output[0], [])
            rename_inputs(behind, {reader.output[0]: name})
            found += behind
        elif reader.op_type == "Gemm" and attributes(reader).get("transB"):
            set_attributes(reader, {"transB": 0})
            found.append(reader)
        else:
            raise ExportError(f"adapters='inputs': {name!r} is read by a {reader.op_type}; merge the adapter")
    return found


def _scaling(index: GraphIndex, product: NodeProto) -> tuple[float, NodeProto | None]:
    """Return the number that a product is multiplied by, and the node that does it, if one does."""
    result = product.output[0]
    node = index.readers[result][0] if index.is_read_once(result) else None
    if node is None or node.op_type != "Mul" or node.output[0] in index.outputs:
        return 1.0, None
    stored = [index.stored[name] for name in node.input if name in index.stored]
    if len(stored) != 1 or is_stub(stored[0]) or np.prod(stored[0].dims, dtype=np.int64) != 1:
        return 1.0, None
    return float(array(stored[0]).reshape(-1)[0]), node


def _is_outside(names: set[str], value: Any) -> bool:
    return value.name not in names


def adapter_files(adapters: Mapping[str, Matrices]) -> dict[str, bytes]:
    """Return the bytes of a file for each adapter."""
    return {name: _file_of(matrices) for name, matrices in adapters.items()}


def _file_of(matrices: Matrices) -> bytes:
    """Return matrices by input name in ONNX Runtime's format for adapters."""
    adapter = ort.AdapterFormat()
    adapter.set_parameters({name: ort.OrtValue.ortvalue_from_numpy(value) for name, value in matrices.items()})
    with tempfile.TemporaryDirectory(prefix="qsdk-") as folder:
        file = Path(folder, "adapter")
        adapter.export_adapter(str(file))
        return file.read_bytes()
