"""Tensors and operations of known sizes for a firmware header, and one arena for all but constants."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnx_backend.integer.ir.values import Array

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
