"""The ONNX Runtime session in which a Q/DQ model is simulated exactly."""

import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from onnx_backend.proto.external_data import array, bytes_of
from onnx_backend.proto.graph_queries import initializers, producers
from onnx_backend.proto.lazy_tensors import LargeTensor, with_large
from onnx_backend.proto.model_io import load, with_weights
from onnx_backend.proto.nodes import attributes, copied, drop_unused_initializers, rename_inputs, replace_nodes
from onnx_backend.proto.subgraphs import reads
from onnx_backend.proto.weightless import types_of
from onnx_backend.proto.write_file import spool_large_tensors
from onnx_backend.qdq.layer_inputs import rounds_states
from onnx_backend.qdq.read import block_scales
from onnx_backend.readers import Readers
from onnx_backend.runtime.providers import CPU_ONLY, Providers
from onnx_backend.runtime.session_input import session_of
from onnx_backend.workarounds.blocked_layout import keep_blocks, optimized_model
from onnx_backend.workarounds.kernel_casts import ROUNDED, has_other_floats
from qsdk.core.errors import FileFormatError, QsdkError
from qsdk.core.graph.op_facts import MOVEMENTS
from qsdk.core.numerics import affine
from qsdk.core.read_files import first_line_of

#: Optimizers that rewrite Q/DQ or their neighbours; `WeightBiasQuantization` even quantizes weights meant to stay
#: float. Without these the highest level is as exact as no optimization at all, and it has the runtime's fast
#: convolutions, which the basic level lacks.
_DISABLED_OPTIMIZERS = (
    "QDQSelectorActionTransformer",
    "QDQS8ToU8Transformer",
    "QDQPropagationTransformer",
    "QDQFinalCleanupTransformer",
    "ReluQuantRewrite",
    "ClipQuantRewrite",
    "DoubleQDQPairsRemover",
    "WeightBiasQuantization",
    "DQMatMulNBitsFusion",
    "EnsureUniqueDQForNodeUnit",
)
_NARROW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_PAIR = ("QuantizeLinear", "DequantizeLinear")  # whose scales may be narrow
_MANY_NODES = 2_000  # nodes
_WRITTEN = 2**28  # bytes of a model that is written to a temporary file, as the runtime has optimized it
_LARGEST = 2**29  # bytes of float weights; those of larger models are dequantized at every run
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


def bounded_session(
    model: ModelProto,
    large: Mapping[str, LargeTensor],
    in_memory: int,
    *,
    providers: Providers,
    shares_memory: bool = False,
) -> ort.InferenceSession:
    """Open a session in the settings of the simulation, of a model with stubs for these large tensors.

    Up to `in_memory` bytes of them are put into the model; more go through a temporary file.
    """
    if sum(tensor.nbytes for tensor in large.values()) <= in_memory:
        return simulation_session(with_large(model, large), shares_memory=shares_memory, providers=providers)
    with tempfile.TemporaryDirectory(prefix="qsdk-") as folder:  # the runtime keeps its mapping of the file
        spooled = spool_large_tensors(model, large, Path(folder) / "weights")
        return simulation_session(spooled, shares_memory=shares_memory, providers=providers)


def simulation_session(
    model: bytes | ModelProto, *, shares_memory: bool = False, providers: Providers = CPU_ONLY, threads: int = 0
) -> ort.InferenceSession:
    """Open a session that runs QuantizeLinear and DequantizeLinear of activations as they are written.

    Stored tensors are dequantized once, here, by the same formula, instead of at every run. Where a part of the model
    computes in float16 or bfloat16, nothing is optimized: fused kernels round at other places there, and the values
    quantized behind them are off by whole steps. For many runs see `RepeatedSession`.

    `shares_memory` takes it from the pool that `SteppedRun.sharing_memory` opens; `threads` are those that a run uses
    on the CPU, 0 for the runtime's own choice.
    """
    model = load(model)
    optimize = not computes_in_narrow_floats(model)
    if rounds_states(model):
        threads = 1  # the kernel's ranges are those of the rows that one thread has
    options = _options(shares_memory=shares_memory, optimize=optimize, threads=threads)
    return _opened(_with_sizes_of_its_own(with_float_weights(model)), options, providers)


def opened_file(
    path: str | os.PathLike[str], entries: Mapping[str, str], *, threads: int | None, providers: Providers
) -> ort.InferenceSession:
    """Open a file as an application does: at the default level, with configuration entries."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or 0
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    try:
        return ort.InferenceSession(path, options, providers=providers.for_session())
    except Exception as error:  # the runtime's own exception types are private
        raise FileFormatError(
            f"{os.fspath(path)}: ONNX Runtime {ort.__version__} cannot load it: {first_line_of(error)}; "
            "qsdk.validate says why, where it knows"
        ) from error


def session_in_blocks(model: ModelProto, threads: int = 0) -> ort.InferenceSession | None:
    """Open a session that gives the same values in less time, see `blocked_layout`; None where it would be no other.

    It takes longer to open: the runtime optimizes the model, and then loads the result.
    `is_small_convolutional` holds for the model.
    """
    whole = with_weights(_with_sizes_of_its_own(with_float_weights(copied(model))))

    def write_optimized(path: str) -> None:
        options = _options(shares_memory=False, optimize=True, threads=threads)
        options.optimized_model_filepath = path
        _opened(whole, options, CPU_ONLY)

    optimized = optimized_model(write_optimized)
    shapes = {name: shape for name, (_, shape) in types_of(whole).items()}
    if not keep_blocks(optimized, shapes):
        return None
    return _opened(optimized, _options(shares_memory=False, optimize=False, threads=threads), CPU_ONLY)


def is_small_convolutional(model: ModelProto) -> bool:
    """Return True for a float32 model with convolutions that is small enough to be written out once more."""
    size = sum(bytes_of(tensor.data_type, tensor.dims) for tensor in model.graph.initializer)
    convolutions = any(node.op_type == "Conv" for node in model.graph.node)
    return convolutions and size <= _WRITTEN and not has_other_floats(model, ROUNDED)


def _opened(model: ModelProto, options: ort.SessionOptions, providers: Providers) -> ort.InferenceSession:
    # planning the reuse of memory takes the runtime time quadratic in the nodes
    options.enable_mem_reuse = len(model.graph.node) < _MANY_NODES
    only_cpu = providers == CPU_ONLY
    try:
        return session_of(model, options, disabled=_DISABLED_OPTIMIZERS, providers=providers, rounds_float16=only_cpu)
    except QsdkError:
        raise
    except Exception as error:  # the runtime's own exception types are private
        raise FileFormatError(f"the runtime cannot load the model: {error}; run qsdk.validate on it") from error


def _options(*, shares_memory: bool, optimize: bool, threads: int) -> ort.SessionOptions:
    options, levels = ort.SessionOptions(), ort.GraphOptimizationLevel
    options.intra_op_num_threads = threads
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimize else levels.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_double_qdq_remover", "1")
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
    if shares_memory:
        options.add_session_config_entry("session.use_env_allocators", "1")
    options.log_severity_level = 4
    return options


def computes_in_narrow_floats(model: ModelProto) -> bool:
    """Return True if a node computes in float16 or bfloat16; a pair of casts, which only rounds, does not count."""
    narrow = {tensor.name for tensor in model.graph.initializer if tensor.data_type in _NARROW}
    narrow |= {value.name for value in model.graph.input if value.type.tensor_type.elem_type in _NARROW}
    for node in model.graph.node:
        if node.op_type == "Cast":
            narrow |= set(node.output) if attributes(node).get("to") in _NARROW else set()
        elif node.op_type not in _PAIR and narrow.intersection(reads(node)):
            return True
    return False


def _with_sizes_of_its_own(model: ModelProto) -> ModelProto:
    """Rename every open dimension of an input so that no two inputs share a name, in place; return the model.

    The runtime lets tensors share memory if their sizes have the same name, and fails where a file uses one name for
    different sizes, as those of recurrent states do.
    """
    for value in (*model.graph.input, *model.graph.output):
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.HasField("dim_param"):
                dim.dim_param = f"{dim.dim_param}@{value.name}/{axis}"
    return model


def with_float_weights(model: ModelProto, *, most: int = _LARGEST) -> ModelProto:
    """Replace every DequantizeLinear of a stored tensor by its float32 values, in place.

    Nodes that the formula of the core does not cover (another float type, an unknown shape) stay, and so do those
    whose values would exceed `most` bytes in all.
    """
    graph, stored = model.graph, initializers(model.graph)
    makers = producers(graph.node)
    scales = {
        node.input[1]: block
        for node in graph.node
        if node.op_type == "DequantizeLinear" and (block := block_scales(node.input[1], stored, makers)) is not None
    }
    outputs = {value.name for value in graph.output}
    found: dict[str, npt.NDArray[np.float32]] = {}
    kept, size = [], 0
    for node in graph.node:
        values = None
        inner = node.op_type == "DequantizeLinear" and node.output[0] not in outputs and node.input[0] in stored
        if inner and size + 4 * math.prod(stored[node.input[0]].dims) <= most:
            values = _dequantized(node, stored, scales)
        if values is None:
            kept.append(node)
        else:
            found[node.output[0]] = values
            size += values.nbytes
    if found:
        replace_nodes(graph, kept)
        graph.initializer.extend(numpy_helper.from_array(values, name) for name, values in found.items())
        drop_unused_initializers(graph)
    return model


def _dequantized(
    node: NodeProto, stored: dict[str, TensorProto], scales: Mapping[str, npt.NDArray[np.float32]]
) -> npt.NDArray[np.float32] | None:
    """Return the value of a DequantizeLinear whose operands are all stored, else None."""
    if any(name and name not in stored and name not in scales for name in node.input):
        return None
    name = node.input[1]
    codes, scale = array(stored[node.input[0]]), scales[name] if name in scales else array(stored[name])
    facts = attributes(node)
    if scale.dtype.name == "float8_e8m0fnu":
        scale = scale.astype(np.float32)
    if scale.dtype != np.float32 or facts.get("output_dtype", TensorProto.FLOAT) not in (0, TensorProto.FLOAT):
        return None
    zero_point = array(stored[node.input[2]]) if len(node.input) > 2 and node.input[2] else np.zeros(scale.shape)
    axis = None if scale.size == 1 and scale.ndim <= 1 else facts.get("axis", 1)
    where = (codes.shape, axis, facts.get("block_size") or None)
    try:
        aligned = [affine.align(value.astype(np.float32), *where) for value in (scale, zero_point)]
    except ValueError:
        return None  # an invalid model: the runtime reports the error
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(affine.dequantize(codes.astype(np.float32), *aligned), np.float32)
