"""The session of a simulation for many runs: as fast as it can be, once that pays."""

import time
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto

from onnx_backend.proto.external_data import array
from onnx_backend.proto.model_io import load
from onnx_backend.proto.nodes import attributes, rename_inputs, replace_nodes
from onnx_backend.readers import Readers
from onnx_backend.runtime.providers import CPU_ONLY, Providers
from onnx_backend.runtime.session import (
    computes_in_narrow_floats,
    is_small_convolutional,
    session_in_blocks,
    simulation_session,
)
from qsdk.core.graph.op_facts import MOVEMENTS

_NARROW_INTEGERS = frozenset({"int2", "uint2", "int4", "uint4", "int8", "uint8", "int16", "uint16"})

Grid = tuple[str, bytes, bytes]


def drop_repeated_pairs(model: ModelProto) -> None:
    """Remove pairs whose input only moves values of pairs with the same scale and zero point, in place.

    Such values are exact multiples of the scale but for a last bit of float32, which quantizing them again rounds away:
    with up to 16 bits, the result is the same to the last bit. Sites that share an encoding (a Concat and its parts, a
    Reshape) are written with a pair each. Only pairs with one stored scale in float32 are compared.
    """
    known, renamed, nodes = Readers(model.graph), dict[str, str](), list[NodeProto]()
    grids: dict[str, Grid | None] = {}
    repeated: dict[str, str] = {}  # codes of a repeated pair -> the values that were quantized
    for node in model.graph.node:
        rename_inputs([node], renamed)
        if node.op_type == "QuantizeLinear":
            grid = _grid(node, known)
            grids[node.output[0]] = grid
            if grid is not None and grids.get(node.input[0]) == grid and _is_undone(node, known):
                repeated[node.output[0]] = node.input[0]
                continue
        elif node.op_type == "DequantizeLinear" and node.input[0] in repeated:
            renamed[node.output[0]] = repeated[node.input[0]]
            continue
        elif node.op_type == "DequantizeLinear":
            before = known.makers.get(node.input[0])
            same = before is not None and list(before.input[1:]) == list(node.input[1:])
            grids[node.output[0]] = grids.get(node.input[0]) if same else None
        elif moved := _moved(node):
            found = {grids.get(name) for name in moved}
            grids |= dict.fromkeys(node.output, found.pop() if len(found) == 1 else None)
        nodes.append(node)
    replace_nodes(model.graph, nodes)


def _grid(quantize: NodeProto, known: Readers) -> Grid | None:
    """Return dtype, scale and zero point of a pair, None where they are not stored numbers."""
    scalars = [known.stored.get(name) for name in quantize.input[1:] if name]
    dtype, scale = known.dtype(quantize), scalars[0]
    if scale is None or scale.data_type != TensorProto.FLOAT:
        return None  # 16 bits do not survive another rounding to float16
    if dtype not in _NARROW_INTEGERS or any(scalar is None or scalar.dims for scalar in scalars):
        return None
    values = [array(scalar).tobytes() for scalar in scalars if scalar is not None]
    return dtype, values[0], values[1].strip(b"\0") if len(values) > 1 else b""


def _is_undone(quantize: NodeProto, known: Readers) -> bool:
    """Return whether only DequantizeLinear with the same numbers read a node's codes, none for an output."""
    readers = known.readers.get(quantize.output[0], [])
    return quantize.output[0] not in known.outputs and all(
        reader.op_type == "DequantizeLinear"
        and list(reader.input[1:]) == list(quantize.input[1:])
        and reader.output[0] not in known.outputs
        for reader in readers
    )


def _moved(node: NodeProto) -> list[str]:
    """Return the tensors whose values are all that a node returns; none for other nodes."""
    if node.op_type == "Concat":
        return list(node.input)
    of_windows = node.op_type == "MaxPool" and not attributes(node).get("ceil_mode", 0) and len(node.output) == 1
    return list(node.input[:1]) if node.op_type in MOVEMENTS or of_windows else []


class RepeatedSession:
    """A session like `simulation_session`, with the same values, that is opened again once it has run for long enough.

    The second time it stays in the layout of the runtime's convolutions (`session_in_blocks`), which takes longer to
    open: too long for a few pictures. It is opened when the runs have taken as long as opening the first
    one did, so that both together never cost much more than the better of them alone. Threads may run it at once.
    """

    def __init__(self, model: ModelProto, providers: Providers = CPU_ONLY, threads: int = 0) -> None:
        """Open the first session."""
        start = time.perf_counter()
        model = load(model)
        if not computes_in_narrow_floats(model):
            drop_repeated_pairs(model)
        self._session = simulation_session(model, providers=providers, threads=threads)
        self._threads, self._changing = threads, Lock()
        self._opening, self._running = time.perf_counter() - start, 0.0
        self._model = model if providers == CPU_ONLY and is_small_convolutional(model) else None

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, npt.NDArray[Any]]) -> list[Any]:
        """Run the model; return the outputs of these names, or all."""
        if self._running > self._opening:
            with self._changing:
                model, self._model = self._model, None
            if model is not None:
                self._session = session_in_blocks(model, self._threads) or self._session
        start = time.perf_counter()
        found: list[Any] = self._session.run(names, dict(feeds))
        self._running += time.perf_counter() - start
        return found

    def __getattr__(self, name: str) -> Any:
        """Return what the session has: its inputs and outputs, its providers."""
        if name == "_session":  # a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self._session, name)
