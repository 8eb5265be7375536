"""A program of LiteRT: tensors with their grids and ops in order, read from and written as a `.tflite` file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_backend.runtimes.runner import installed_package
from qsdk.core.arrays import Array
from qsdk.core.errors import FileFormatError

EXTRA = "litert"
_SCHEMA_VERSION, _IDENTIFIER = 3, b"TFL3"
_FACTS = "qsdk"  # the entry of the file's metadata that holds `Program.facts`
#: op -> the schema's table of its options; ops that are not listed have none
_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "ADD": "AddOptions",
        "AVERAGE_POOL_2D": "Pool2DOptions",
        "BATCH_MATMUL": "BatchMatMulOptions",
        "CONCATENATION": "ConcatenationOptions",
        "CONV_2D": "Conv2DOptions",
        "DEPTHWISE_CONV_2D": "DepthwiseConv2DOptions",
        "FULLY_CONNECTED": "FullyConnectedOptions",
        "GATHER": "GatherOptions",
        "GELU": "GeluOptions",
        "LEAKY_RELU": "LeakyReluOptions",
        "MAX_POOL_2D": "Pool2DOptions",
        "MEAN": "ReducerOptions",
        "MUL": "MulOptions",
        "REDUCE_MAX": "ReducerOptions",
        "RESHAPE": "ReshapeOptions",
        "RESIZE_BILINEAR": "ResizeBilinearOptions",
        "RESIZE_NEAREST_NEIGHBOR": "ResizeNearestNeighborOptions",
        "SOFTMAX": "SoftmaxOptions",
        "STRIDED_SLICE": "StridedSliceOptions",
        "SUB": "SubOptions",
        "TRANSPOSE_CONV": "TransposeConvOptions",
    }
)
#: the version of an op whose kernel takes int8, where the first one does not
_VERSIONS: Mapping[str, int] = MappingProxyType(
    {"CONV_2D": 3, "DEPTHWISE_CONV_2D": 3, "FULLY_CONNECTED": 4, "TRANSPOSE_CONV": 3, "RESIZE_NEAREST_NEIGHBOR": 3}
    | {"RESIZE_BILINEAR": 3, "SUB": 3, "RSQRT": 3}
    | dict.fromkeys(("EXP", "HARD_SWISH", "PRELU", "RELU_N1_TO_1", "RESHAPE"), 1)
)
_INT8_VERSION = 2


@dataclass(frozen=True)
class Grid:
    """What the codes of a tensor mean: their dtype, scales, zero points and, for scales by channel, the axis."""

    dtype: str
    scale: npt.NDArray[np.float32]
    zero_point: npt.NDArray[np.int64]
    axis: int = 0

    @classmethod
    def of(cls, dtype: str, scale: float, zero_point: int) -> "Grid":
        """Return the grid of a whole tensor."""
        return cls(dtype, np.array([scale], np.float32), np.array([zero_point], np.int64))

    @property
    def step(self) -> float:
        """Return the scale of a whole tensor, as the float32 that the file holds."""
        return float(self.scale[0])

    @property
    def zero(self) -> int:
        """Return the zero point of a whole tensor."""
        return int(self.zero_point[0])

    @property
    def bounds(self) -> tuple[int, int]:
        """Return the smallest and the largest code."""
        bits = int(self.dtype.removeprefix("int"))
        return -(1 << (bits - 1)), (1 << (bits - 1)) - 1

    def same(self, other: "Grid") -> bool:
        """Return whether codes mean the same on both grids."""
        return self.dtype == other.dtype and self.step == other.step and self.zero == other.zero

    def code(self, value: float) -> int:
        """Return the code of a value, nearest and inside the bounds."""
        low, high = self.bounds
        return int(np.clip(np.rint(np.float32(value) / self.scale[0]) + self.zero, low, high))


@dataclass(frozen=True)
class Tensor:
    """A tensor of a program; `value` has the integers or floats of a stored one, int4 as int8."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    grid: Grid | None = None
    value: Array | None = None


@dataclass(frozen=True)
class Op:
    """An op by its name in the schema, with the numbers of its tensors (-1: absent) and its options' own names."""

    type: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Program:
    """Tensors and ops in order; `facts` are kept in the file's metadata."""

    tensors: list[Tensor] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, tensor: Tensor) -> int:
        """Add a tensor and return its number."""
        self.tensors.append(tensor)
        return len(self.tensors) - 1


def schema() -> Any:
    """Return the generated classes of the format, from the package of the runtime."""
    return installed_package("ai_edge_litert.schema_py_generated", EXTRA)


def to_bytes(program: Program) -> bytes:
    """Return the bytes of a `.tflite` file."""
    s, flatbuffers = schema(), installed_package("flatbuffers", EXTRA)
    model, graph = s.ModelT(), s.SubGraphT()
    model.version, model.description, model.subgraphs = _SCHEMA_VERSION, "qsdk", [graph]
    model.buffers = [s.BufferT()]
    kinds = sorted({(op.type, _version(op, program)) for op in program.ops})
    model.operatorCodes = [_code(s, name, version) for name, version in kinds]
    graph.name, graph.inputs, graph.outputs = "main", list(program.inputs), list(program.outputs)
    graph.tensors = [_tensor(s, model.buffers, tensor) for tensor in program.tensors]
    graph.operators = [_operator(s, op, kinds.index((op.type, _version(op, program)))) for op in program.ops]
    held, entry = s.BufferT(), s.MetadataT()
    held.data = np.frombuffer(json.dumps(program.facts).encode(), np.uint8)
    entry.name, entry.buffer = _FACTS, len(model.buffers)
    model.buffers.append(held)
    model.metadata = [entry]
    builder = flatbuffers.Builder(1 << 16)
    builder.Finish(model.Pack(builder), file_identifier=_IDENTIFIER)
    return bytes(builder.Output())


def _version(op: Op, program: Program) -> int:
    first = program.tensors[op.inputs[0]].dtype
    return _VERSIONS.get(op.type, _INT8_VERSION) if first.startswith("int") else 1


def _code(s: Any, name: str, version: int) -> Any:
    code = s.OperatorCodeT()
    code.builtinCode = getattr(s.BuiltinOperator, name)
    code.deprecatedBuiltinCode, code.version = min(code.builtinCode, 127), version
    return code


def _tensor(s: Any, buffers: list[Any], tensor: Tensor) -> Any:
    found = s.TensorT()
    found.name, found.shape, found.type = tensor.name, list(tensor.shape), getattr(s.TensorType, tensor.dtype.upper())
    found.buffer, found.hasRank = 0, True
    if tensor.value is not None:
        held = s.BufferT()
        data = _packed(tensor.value) if tensor.dtype == "int4" else np.ascontiguousarray(tensor.value).reshape(-1)
        held.data = data.view(np.uint8)
        found.buffer = len(buffers)
        buffers.append(held)
    if tensor.grid is not None:
        found.quantization = s.QuantizationParametersT()
        found.quantization.scale, found.quantization.zeroPoint = tensor.grid.scale, tensor.grid.zero_point
        found.quantization.quantizedDimension = tensor.grid.axis
    return found


def _operator(s: Any, op: Op, code: int) -> Any:
    found = s.OperatorT()
    found.opcodeIndex, found.inputs, found.outputs = code, list(op.inputs), list(op.outputs)
    if op.type in _OPTIONS:
        found.builtinOptionsType = getattr(s.BuiltinOptions, _OPTIONS[op.type])
        found.builtinOptions = getattr(s, f"{_OPTIONS[op.type]}T")()
        for name, value in op.options.items():
            setattr(found.builtinOptions, name, value)
    return found


def _packed(codes: Array) -> npt.NDArray[np.uint8]:
    """Return codes of 4 bits, two in a byte, the first one in its low half."""
    nibbles = codes.reshape(-1).astype(np.uint8) & 0xF
    nibbles = np.append(nibbles, np.zeros(nibbles.size % 2, np.uint8))
    return np.asarray(nibbles[0::2] | (nibbles[1::2] << 4), np.uint8)


def _unpacked(data: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.int8]:
    nibbles = np.stack([data & 0xF, data >> 4], -1).reshape(-1)[:count].astype(np.int8)
    return np.asarray((nibbles ^ 8) - 8, np.int8)


def from_bytes(data: bytes, where: str) -> Program:
    """Read a `.tflite` file; a FileFormatError if it is none, or has more than one graph."""
    s = schema()
    if data[4:8] != _IDENTIFIER:
        raise FileFormatError(f"{where} is no .tflite file; give one that qsdk.export has written")
    try:
        model = s.ModelT.InitFromPackedBuf(bytearray(data), 0)
        (graph,) = model.subgraphs
        names = {value: name for name, value in vars(s.BuiltinOperator).items() if not name.startswith("_")}
        types = {value: name.lower() for name, value in vars(s.TensorType).items() if not name.startswith("_")}
        codes = [names[max(code.builtinCode, code.deprecatedBuiltinCode)] for code in model.operatorCodes]
        tensors = [_read_tensor(tensor, types[tensor.type], model.buffers) for tensor in graph.tensors]
        ops = [_read_op(op, codes[op.opcodeIndex]) for op in graph.operators]
        facts = {}
        for entry in model.metadata or []:
            if _text(entry.name) == _FACTS:
                facts = json.loads(bytes(model.buffers[entry.buffer].data))
    except (ValueError, TypeError, AttributeError, IndexError, KeyError, OverflowError) as error:
        raise FileFormatError(f"{where} cannot be read: {type(error).__name__} {error}; export it again") from error
    return Program(tensors, ops, _numbers(graph.inputs), _numbers(graph.outputs), facts)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "")


def _numbers(values: Sequence[int] | None) -> list[int]:
    return [] if values is None else [int(value) for value in values]


def _read_tensor(tensor: Any, dtype: str, buffers: Sequence[Any]) -> Tensor:
    shape, found = tuple(_numbers(tensor.shape)), tensor.quantization
    grid, value, data = None, None, buffers[tensor.buffer].data
    if found is not None and found.scale is not None and len(found.scale):
        scale, zero_point = np.array(found.scale, np.float32), np.zeros(len(found.scale), np.int64)
        if found.zeroPoint is not None:
            zero_point[:] = found.zeroPoint
        grid = Grid(dtype, scale, zero_point, int(found.quantizedDimension))
    if data is not None and len(data):
        raw = np.array(data, np.uint8)
        flat = _unpacked(raw, int(np.prod(shape))) if dtype == "int4" else raw.view(np.dtype(dtype))
        value = flat.reshape(shape)
    return Tensor(_text(tensor.name), shape, dtype, grid, value)


def _read_op(op: Any, name: str) -> Op:
    options = {} if op.builtinOptions is None else dict(vars(op.builtinOptions))
    return Op(name, tuple(_numbers(op.inputs)), tuple(_numbers(op.outputs)), options)
