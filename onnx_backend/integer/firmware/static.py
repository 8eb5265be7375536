"""A firmware program for a batch of 1: sizes known, shape arithmetic computed, every tensor placed in one arena.

Ops that only move elements (Reshape, Transpose, Slice, Pad, ...) are run once on the positions of the elements, which
shows their kind: a copy, a strided read, or a read by a table of positions.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx import ModelProto, helper

from onnx_backend.integer.firmware.program import FirmwareProgram, narrowest
from onnx_backend.integer.ir.values import Array
from onnx_backend.integer.lowering.walk import origin
from onnx_backend.integer.reference.run import OPS, run_reference
from onnx_backend.proto.graph_queries import declared_sizes
from qsdk.core.errors import IntegerError
from qsdk.core.graph.op_facts import MOVEMENTS

_ALIGNMENT = 8


@dataclass(frozen=True)
class StaticTensor:
    """A tensor with its place.

    Attributes:
        name: in the program.
        dtype: NumPy's name.
        shape: all sizes.
        values: of a constant, else None.
        offset: in bytes from the start of the arena; 0 for a constant.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: Array | None = None
    offset: int = 0

    @property
    def bytes(self) -> int:
        """Return its size in the arena."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class StaticOp:
    """An operation of a C program.

    Attributes:
        kind: of those that `layers` has a form for.
        node: the node of the Q/DQ model.
        inputs: names of tensors, constants too, and behind them those of `then`.
        output: name of a tensor.
        fields: what the kind needs to know besides.
        room: name of a tensor that only this operation uses, or nothing.
        then: the requantization of each of its sums, whose first input they are.
    """

    kind: str
    node: str
    inputs: tuple[str, ...]
    output: str
    fields: dict[str, Any] = field(default_factory=dict)
    room: str = ""
    then: "StaticOp | None" = None


@dataclass(frozen=True)
class StaticProgram:
    """A program whose sizes are all known.

    Attributes:
        inputs: plain dicts of the program's inputs that an operation reads.
        outputs: plain dicts of the program's outputs.
        tensors: by name, those that operations or edges name.
        ops: in the order of execution.
        arena: bytes that hold every tensor while it is needed.
    """

    inputs: list[dict[str, Any]]
    outputs: list[dict[str, Any]]
    tensors: dict[str, StaticTensor]
    ops: list[StaticOp]
    arena: int


def spatial(shape: Sequence[int]) -> list[int]:
    """Return the last three axes of a tensor (batch, channels, up to 3 axes); missing ones in front are of size 1."""
    return [1] * (5 - len(shape)) + list(shape[2:])


def needed(ops: Sequence[StaticOp], outputs: Sequence[str]) -> list[StaticOp]:
    """Drop operations that nobody reads."""
    wanted, kept = set(outputs), []
    for op in reversed(ops):
        if op.output in wanted:
            kept.append(op)
            wanted.update(op.inputs)
    return kept[::-1]


def place_in_arena(
    tensors: Mapping[str, StaticTensor], ops: Sequence[StaticOp], inputs: Sequence[str], outputs: Sequence[str]
) -> tuple[dict[str, StaticTensor], int]:
    """Assign a place to every tensor that is no constant, its own while it is needed; return the total bytes too."""
    born, dies = dict.fromkeys(inputs, -1), dict.fromkeys(inputs, -1)
    for index, op in enumerate(ops):
        born.update({op.output: index, op.room: index})
        dies.update(dict.fromkeys((*op.inputs, op.output, op.room), index))
    dies.update(dict.fromkeys(outputs, len(ops)))
    placed: dict[str, StaticTensor] = {name: t for name, t in tensors.items() if t.values is not None}
    moving = [tensor for tensor in tensors.values() if tensor.values is None]
    arena = 0
    for tensor in sorted(moving, key=lambda t: -t.bytes):  # the largest first; a stable order, so equal runs agree
        others = [
            other
            for other in placed.values()
            if other.values is None and born[other.name] <= dies[tensor.name] and born[tensor.name] <= dies[other.name]
        ]
        offset = 0
        for other in sorted(others, key=lambda t: t.offset):
            if offset + tensor.bytes <= other.offset:
                break
            offset = max(offset, -(-(other.offset + other.bytes) // _ALIGNMENT) * _ALIGNMENT)
        placed[tensor.name] = StaticTensor(tensor.name, tensor.dtype, tensor.shape, None, offset)
        arena = max(arena, offset + tensor.bytes)
    return {name: placed[name] for name in tensors}, arena


_REMEDY = "write the program as .npz, which has them all"
_SOFTMAX = "leave it out of the model and take the largest of its inputs, which is the largest of its results; or "
_TYPES = frozenset({"uint8", "int8", "uint16", "int16", "uint32", "int32", "int64"})
_MOVES = (MOVEMENTS - {"GatherElements"}) | {"Pad", "Resize"}
_BINARY: Mapping[str, str] = MappingProxyType(
    {
        "Add": "ADD",
        "BitShift": "SHIFT_RIGHT",
        "BitwiseAnd": "AND",
        "Max": "MAXIMUM",
        "Min": "MINIMUM",
        "Mul": "MULTIPLY",
        "Sub": "SUBTRACT",
    }
)
_SPATIAL = 3
_SUMS = frozenset({"CONV", "CHANNEL_CONV", "MATMUL", "WINDOW_SUM"})


def static_program(program: FirmwareProgram) -> StaticProgram:
    """Return a program for a batch of 1; an open size or an operation without a form in C is an IntegerError."""
    lowering = _StaticLowering(program, run_reference(program.model, _zeros(program.model), every_tensor=True))
    for op in program.ops:
        lowering.add(op)
    ops = lowering.joined(needed(lowering.ops, [entry["tensor"] for entry in program.outputs]))
    read = {name for op in ops for name in op.inputs}
    outputs = program.outputs
    inputs = [entry for entry in program.inputs if entry["tensor"] in read or entry["dtype"] in _TYPES]
    edges = [entry["tensor"] for entry in (*inputs, *outputs)]
    names = dict.fromkeys([*edges, *(name for op in ops for name in (*op.inputs, op.output, op.room) if name)])
    tensors = {name: lowering.tensor(name) for name in names}
    for name in edges:
        if tensors[name].values is not None:
            raise IntegerError(f"{name!r} leaves the model and is a constant, which C has no form for; {_REMEDY}")
    placed, arena = place_in_arena(tensors, ops, [e["tensor"] for e in inputs], [e["tensor"] for e in outputs])
    return StaticProgram(inputs, outputs, placed, ops, arena)


def _zeros(model: ModelProto) -> dict[str, Array]:
    """Return an array of zeros, of batch 1, for each input; raise IntegerError where another axis is dynamic."""
    found = {}
    stored = {tensor.name for tensor in model.graph.initializer}
    for info in model.graph.input:
        if info.name in stored:
            continue
        if not info.type.tensor_type.HasField("shape"):
            raise IntegerError(f"input {info.name!r} has no shape; export with one, or {_REMEDY}")
        dims = declared_sizes(info.type)
        sizes = [1 if i == 0 and size is None else size for i, size in enumerate(dims)]
        known = [size for size in sizes if size is not None]
        if len(known) != len(sizes):
            raise IntegerError(
                f"input {info.name!r} has the dynamic shape {dims}; fix its sizes with shapes=, or {_REMEDY}"
            )
        found[info.name] = np.zeros(known, helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type))
    return found


class _StaticLowering:
    """The translation of a program's ops into those of C; `seen` holds every tensor of one run."""

    def __init__(self, program: FirmwareProgram, seen: Mapping[str, Array]) -> None:
        self._seen = seen
        self.constants = dict(program.arrays)
        self._origins = program.origins
        self._dtypes = {name: op["dtypes"][i] for op in program.ops for i, name in enumerate(op["outputs"])}
        self._outputs = [entry["tensor"] for entry in program.outputs]
        self._rooms: dict[str, StaticTensor] = {}
        self.ops: list[StaticOp] = []

    def add(self, op: dict[str, Any]) -> None:
        """Add an op, unless it depends on sizes alone."""
        inputs = [name for name in op["inputs"] if name]
        if op["op"] == "Shape" or (inputs and all(name in self.constants for name in inputs)):
            self.constants.update((name, self._seen[name]) for name in op["outputs"] if name)
            return
        lower = _FORMS.get(op["op"])
        if lower is None:
            raise self.inexpressible(op, f"the operator {op['op']} has no form in C")
        lower(self, op)

    def emit(
        self, kind: str, op: dict[str, Any], inputs: Sequence[str], output: str = "", room: str = "", **fields: Any
    ) -> None:
        """Append an operation."""
        self.ops.append(StaticOp(kind, op["node"], tuple(inputs), output or op["outputs"][0], fields, room))

    def joined(self, ops: Sequence[StaticOp]) -> list[StaticOp]:
        """Let sums that only a requantization reads be requantized where they are made, by constants of the channel."""
        readers = Counter([name for op in ops for name in op.inputs] + self._outputs)
        made = {op.output: op for op in ops if op.kind in _SUMS and readers[op.output] == 1}
        found: dict[str, StaticOp] = {}
        for op in ops:
            first = made.get(op.inputs[0]) if op.kind.startswith("REQUANTIZE") and op.fields["terms"] == 1 else None
            if first and self._by_channel(first, op):
                del found[first.output]
                found[op.output] = replace(first, inputs=first.inputs + op.inputs[1:], output=op.output, then=op)
            else:
                found[op.output] = op
        return list(found.values())

    def _by_channel(self, sums: StaticOp, op: StaticOp) -> bool:
        shape = self.shape(op.output)
        axis = len(shape) - (1 if sums.fields.get("transposed") else 2) if sums.kind == "MATMUL" else 1
        line = [size if i == axis else 1 for i, size in enumerate(shape)]
        given = [self.shape(name) for name in op.inputs[1:]]
        fits = all(np.prod(each) == 1 or [1] * (len(line) - len(each)) + list(each) == line for each in given)
        return fits and shape == self.shape(sums.output)

    def room(self, op: dict[str, Any], source: str, elements: int) -> str:
        """Return the name of a tensor for elements of `source` less its zero point, which one operation uses."""
        dtype = "int16" if self.tensor(source).dtype in ("uint8", "int8") else "int32"
        name = f"{op['outputs'][0]}.room"
        self._rooms[name] = StaticTensor(name, dtype, (elements,))
        return name

    def add_constant(self, stem: str, values: Array) -> str:
        """Add a constant; return its name."""
        name = stem
        while name in self.constants or name in self._seen:
            name += "_"
        self.constants[name] = values
        return name

    def value(self, op: dict[str, Any], index: int) -> Array | None:
        """Return a constant input, None if it is absent; raise IntegerError for one that is computed."""
        name = op["inputs"][index] if index < len(op["inputs"]) else ""
        if name and name not in self.constants:
            raise self.inexpressible(op, f"its input {name!r} is computed from data")
        return self.constants[name] if name else None

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.constants[name].shape if name in self.constants else self._seen[name].shape

    def tensor(self, name: str) -> StaticTensor:
        """Return a tensor, without its place; raise IntegerError for a dtype that has no form in C."""
        if name in self._rooms:
            return self._rooms[name]
        values = self.constants.get(name)
        found = self._seen[name] if values is None else values
        dtype = self._dtypes.get(name) or found.dtype.name
        if dtype not in _TYPES:
            raise IntegerError(f"tensor {name!r} is of {dtype}, which has no form in C; {_REMEDY}")
        return StaticTensor(name, dtype, found.shape, values)

    def inexpressible(self, op: dict[str, Any], reason: str) -> IntegerError:
        """Return the refusal of an operation, by the node of the Q/DQ model that it belongs to."""
        kind, node = origin(op["node"], self._origins) or (op["op"], op["node"])
        leave = _SOFTMAX if kind in ("Softmax", "LogSoftmax") else ""
        return IntegerError(f"the header cannot express {kind} {node!r}: {reason}; {leave}{_REMEDY}")


def _conv(low: _StaticLowering, op: dict[str, Any]) -> None:
    codes, weight, attrs = op["inputs"][0], low.constants[op["parameters"]["weight"]], op["attributes"]
    window, flat = _window(low, op, weight.shape[2:]), weight.reshape(*weight.shape[:2], -1)
    window["zero_point"] = [attrs["zero_point"], 0]
    if weight.shape[1] == 1:
        # of 16 bits, as compilers have products of such with such
        name = low.add_constant(f"{op['parameters']['weight']}.taps", narrowest(flat, (np.int16, np.int32)))
        low.emit("CHANNEL_CONV", op, [codes, name], room=_plane(low, op, window), **window)
        return
    # all channels of a tap lie together
    rows = _padded(flat.swapaxes(1, 2).reshape(len(flat), -1))
    name = low.add_constant(f"{op['parameters']['weight']}.taps", rows)
    block = _block(int(np.prod(low.shape(op["outputs"][0])[2:])), rows.shape[1])
    room = low.room(op, codes, block * rows.shape[1])
    low.emit("CONV", op, [codes, name], room=room, group=attrs["group"], block=block, depth=weight.shape[1], **window)


def _padded(rows: Array) -> Array:
    """Return rows with zeros behind, up to a multiple of 8, where these are few."""
    short = -rows.shape[-1] % 8 if rows.shape[-1] >= 24 else 0
    return np.ascontiguousarray(np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, short)]))


def _block(pixels: int, depth: int) -> int:
    """Return of how many pixels the sums are taken at once: a multiple of 4, of 16 where that takes little room."""
    return min(pixels // 4 * 4, 16 if depth <= 64 else 4) or pixels


def _plane(low: _StaticLowering, op: dict[str, Any], window: dict[str, Any]) -> str:
    """Return the room for a channel with its pads, and note its sizes."""
    steps = zip(
        spatial(low.shape(op["outputs"][0])), window["kernel"], window["stride"], window["dilation"], strict=True
    )
    window["padded"] = [(count - 1) * stride + (k - 1) * dilation + 1 for count, k, stride, dilation in steps]
    return low.room(op, op["inputs"][0], int(np.prod(window["padded"])))


def _window(low: _StaticLowering, op: dict[str, Any], kernel: Sequence[int]) -> dict[str, Any]:
    """Return kernel, strides, dilations and pads at the beginning, of 3 spatial axes."""
    rank, attrs = len(kernel), op["attributes"]
    if rank > _SPATIAL:
        raise low.inexpressible(op, f"it has {rank} spatial axes")
    strides, dilations = (list(attrs.get(key, [1] * rank)) for key in ("strides", "dilations"))
    pads = list(attrs.get("pads", [0] * 2 * rank))[:rank]
    how = attrs.get("auto_pad", "NOTSET")
    if how != "NOTSET":
        ends = low.shape(op["inputs"][0])[2:], low.shape(op["outputs"][0])[2:]
        axes = zip(*ends, strides, kernel, dilations, strict=True)
        totals = [max((count - 1) * s + (k - 1) * d + 1 - size, 0) for size, count, s, k, d in axes]
        pads = [total - total // 2 if how == "SAME_LOWER" else total // 2 for total in totals]
    front, ones = [0] * (_SPATIAL - rank), [1] * (_SPATIAL - rank)
    return {
        "kernel": [*ones, *kernel],
        "stride": [*ones, *strides],
        "dilation": [*ones, *dilations],
        "pad": [*front, *pads],
    }


def _matmul(low: _StaticLowering, op: dict[str, Any]) -> None:
    attrs, parameters = op["attributes"], op["parameters"]
    if op["op"] == "MatMulCodes":
        inputs, zero_points = list(op["inputs"]), attrs["zero_points"]
    elif op["op"] == "MatMulInteger":
        given = [low.value(op, 2), low.value(op, 3)]
        if any(zeros is not None and zeros.size > 1 for zeros in given):
            raise low.inexpressible(op, "it has several zero points")
        inputs, zero_points = op["inputs"][:2], [0 if zeros is None else int(zeros.item()) for zeros in given]
    else:
        inputs, zero_points = [op["inputs"][0], parameters["weight"]], [attrs["zero_point"], 0]
        if attrs["weight_first"]:
            inputs, zero_points = inputs[::-1], zero_points[::-1]
    if min(len(low.shape(name)) for name in inputs) < 2:
        raise low.inexpressible(op, "one of its operands is a vector")
    pixels, transposed = inputs[1], inputs[1] in low.constants
    if transposed:
        stored = _padded(low.constants[inputs[1]].swapaxes(-1, -2))
        pixels, inputs = inputs[0], [inputs[0], low.add_constant(f"{inputs[1]}.rows", stored)]
    depth, made = low.shape(inputs[1 if transposed else 0])[-1], low.shape(op["outputs"][0])
    whole = transposed and int(np.prod(low.shape(inputs[1])[:-2])) == 1  # all of the batch is rows
    block = _block(int(np.prod(made[:-1])) if whole else made[-2 if transposed else -1], depth)
    room = low.room(op, pixels, block * depth)
    low.emit("MATMUL", op, inputs, room=room, zero_point=zero_points, transposed=transposed, block=block)


def _multiply(low: _StaticLowering, op: dict[str, Any]) -> None:
    low.emit("MULTIPLY", op, op["inputs"], zero_point=op["attributes"]["zero_points"])


def _binary(low: _StaticLowering, op: dict[str, Any]) -> None:
    if op["op"] == "BitShift" and op["attributes"]["direction"] != "RIGHT":
        raise low.inexpressible(op, "it shifts to the left")
    low.emit(_BINARY[op["op"]], op, op["inputs"])


def _pool(low: _StaticLowering, op: dict[str, Any]) -> None:
    window = _window(low, op, op["attributes"]["kernel_shape"])
    kind = "WINDOW_SUM" if op["op"] == "WindowSum" else "MAX_POOL"
    zero_point = [op["attributes"].get("zero_point", 0), 0]
    room = _plane(low, op, window)
    low.emit(kind, op, op["inputs"][:1], room=room, zero_point=zero_point, **window)


def _along_axes(low: _StaticLowering, op: dict[str, Any]) -> None:
    attrs, rank = op["attributes"], len(low.shape(op["inputs"][0]))
    if op["op"] == "AxisSum":
        kind, axes = "AXIS_SUM", attrs["axes"]
    else:
        given = low.value(op, 1)
        kind, axes = "AXIS_MAX", [] if given is None else given.tolist()
        if not axes and not attrs.get("noop_with_empty_axes", 0):
            axes = list(range(rank))
    reduced = [int(i in {axis % rank for axis in axes}) for i in range(rank)]
    low.emit(kind, op, op["inputs"][:1], reduced=reduced, zero_point=[attrs.get("zero_point", 0), 0])


def _requantize(low: _StaticLowering, op: dict[str, Any]) -> None:
    attrs, parameters, terms = op["attributes"], op["parameters"], len(op["inputs"])
    last = "bias" if "bias" in parameters else "addend"
    roles = [*(f"mantissa_{i}" for i in range(terms)), "shift", last]
    low.emit(
        "REQUANTIZE",
        op,
        [*op["inputs"], *(parameters[role] for role in roles)],
        terms=terms,
        bias_first=int(last == "bias"),
        rounding=attrs["rounding"],
        code_zero_point=attrs["zero_point"],
        lo=attrs["lo"],
        hi=attrs["hi"],
    )


def _table(low: _StaticLowering, op: dict[str, Any]) -> None:
    low.emit("TABLE", op, [op["inputs"][0], op["parameters"]["table"]])


def _concat(low: _StaticLowering, op: dict[str, Any]) -> None:
    axis = op["attributes"]["axis"] % len(low.shape(op["outputs"][0]))
    low.emit("CONCAT", op, op["inputs"], axis=axis)


def _clip(low: _StaticLowering, op: dict[str, Any]) -> None:
    limits = np.iinfo(low.tensor(op["outputs"][0]).dtype)
    ends = [low.value(op, 1), low.value(op, 2)]
    lo, hi = (int(limit if end is None else end) for end, limit in zip(ends, (limits.min, limits.max), strict=True))
    low.emit("CLIP", op, op["inputs"][:1], lo=lo, hi=hi)


def _clamp(low: _StaticLowering, op: dict[str, Any]) -> None:
    low.emit("CLIP", op, op["inputs"], lo=op["attributes"]["lo"], hi=op["attributes"]["hi"])


def _cast(low: _StaticLowering, op: dict[str, Any]) -> None:
    low.emit("CAST", op, op["inputs"])


def _move(low: _StaticLowering, op: dict[str, Any]) -> None:
    """Lower an op that moves elements, by moving their positions."""
    source, rest = op["inputs"][0], [low.value(op, i) for i in range(1, len(op["inputs"]))]
    if source in low.constants:
        raise low.inexpressible(op, "it reads a constant at places computed from data")
    fill = 0
    if op["op"] == "Pad" and op["attributes"].get("mode", "constant") == "constant":
        fill = 0 if len(rest) < 2 or rest[1] is None else int(rest[1])
        rest = [rest[0], np.asarray(-1), *rest[2:]]
    attrs = {key: value.encode() if isinstance(value, str) else value for key, value in op["attributes"].items()}
    positions = np.arange(int(np.prod(low.shape(source)))).reshape(low.shape(source))
    found = OPS[op["op"]](attrs, positions, *rest)
    for name, part in zip(op["outputs"], found if isinstance(found, tuple) else (found,), strict=False):
        _read(low, op, source, name, np.asarray(part), positions.size, fill)


def _read(
    low: _StaticLowering, op: dict[str, Any], source: str, name: str, positions: Array, total: int, fill: int
) -> None:
    """Emit the read of `positions` of a flat tensor, -1 being the fill."""
    if np.array_equal(positions.reshape(-1), np.arange(total)):
        low.emit("COPY", op, [source], name)
        return
    strides = [
        int(positions.take(1, i).flat[0] - positions.flat[0]) if size > 1 else 0
        for i, size in enumerate(positions.shape)
    ]
    start = int(positions.flat[0]) if positions.size else 0
    steps = [np.arange(size) * stride for size, stride in zip(positions.shape, strides, strict=True)]
    regular = sum(np.ix_(*steps), np.asarray(start)) if steps else np.asarray(start)
    if positions.size and positions.min() >= 0 and np.array_equal(positions, regular):
        low.emit("STRIDED", op, [source], name, start=start, step=strides)
        return
    table = low.add_constant(f"{name}.positions", narrowest(positions, (np.int32,)))
    low.emit("GATHER", op, [source, table], name, fill=fill)


_FORMS: Mapping[str, Callable[[_StaticLowering, dict[str, Any]], None]] = MappingProxyType(
    {
        "AccumulateConv": _conv,
        "AccumulateMatMul": _matmul,
        "AxisSum": _along_axes,
        "Cast": _cast,
        "Clip": _clip,
        "ClampCodes": _clamp,
        "Concat": _concat,
        "MatMulCodes": _matmul,
        "MatMulInteger": _matmul,
        "MaxPool": _pool,
        "MultiplyCodes": _multiply,
        "ReduceMax": _along_axes,
        "Requantize": _requantize,
        "Table": _table,
        "WindowSum": _pool,
        **dict.fromkeys(_BINARY, _binary),
        **dict.fromkeys(_MOVES, _move),
    }
)
