"""One direction of a recurrent layer, and what every kind of cell makes of it."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from onnx_backend.integer.fixed_point.fixed_arithmetic import (
    ROOM,
    bits,
    constant64,
    int64,
    narrow_to,
    round_half_up,
    rounding_shift,
    single_scale,
)
from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.context import LoweringContext
from onnx_backend.integer.ir.values import Array, FixedPoint
from onnx_backend.integer.lowering.recurrent.sums import Inputs
from onnx_backend.integer.lowering.recurrent.weights import Matrix

_RELATIVE = 32  # bits of a value that is brought to another unit, which leaves 29 to the factor
#: Steps within which a cell of a sequence of open length stays exact.
LONGEST = 1 << 12


@dataclass(frozen=True)
class Direction:
    """The constants and first states of one direction.

    Attributes:
        inputs: products of the input with W, plus the biases that are added to them.
        recurrent: R.
        hidden: size of the state.
        batch: None where it is dynamic.
        steps: length of the sequence, None where it is dynamic.
        backwards: whether the last step comes first.
        state: the first hidden state [batch, hidden], None for zeros.
        cell: the first cell state, None for zeros.
        inner: of the recurrent product alone, where a gate scales it (GRU with linear_before_reset): float64 [hidden].
        largest: largest magnitude of a hidden state.
    """

    inputs: Inputs
    recurrent: Matrix
    hidden: int
    batch: int | None
    steps: int | None
    backwards: bool
    state: FixedPoint | None
    cell: FixedPoint | None
    inner: Array
    largest: float


@dataclass(frozen=True)
class Step:
    """What one step reads.

    Attributes:
        given: its slice of each of the cell's `given`, int64 [..., batch, 1, columns].
        states: those behind the step before, int64 [..., batch, 1, hidden]; None for zeros.
        weights: what `Cell.write_weights` has written.
        rank: of these tensors.
    """

    given: Sequence[str]
    states: Sequence[str | None]
    weights: Sequence[tuple[str, str]]
    rank: int


class Cell(ABC):
    """The steps of one direction in fixed point; the first of its states is the lifted hidden state.

    The products of the inputs and the first states are written when it is made.

    Attributes:
        given: what each step reads of the input, int64 [steps, batch, 1, columns].
        widths: columns of each of `given`.
        starts: the first states, int64 [batch, 1, hidden]; None for zeros.
        zeros: the integers of states of 0.
        fraction: a hidden state is a multiple of `2**-fraction`.
        drop: bits of a lifted hidden state below those.
        fine: fraction bits of an LSTM's cell state.
        largest_cell_state: largest integer of an LSTM's cell state; None for a GRU.
    """

    given: Sequence[str]
    widths: Sequence[int]
    starts: Sequence[str | None]
    zeros: Sequence[int]
    fraction: int
    drop: int
    fine: int
    largest_cell_state: int | None = None

    @abstractmethod
    def write_weights(self, b: Builder) -> list[tuple[str, str]]:
        """Write what every step reads of R: uint8 tensors and their zero points."""

    @abstractmethod
    def write_step(self, b: Builder, step: Step) -> list[str]:
        """Write one step and return the states behind it."""

    @abstractmethod
    def errors(self) -> Iterator[tuple[float, float]]:
        """Bound the errors of hidden and cell state, in real units, after one step, two steps, and so on."""


def in_unit(ctx: LoweringContext, value: FixedPoint, fraction: int) -> FixedPoint:
    """Round a value to multiples of `2**-fraction`, in int32 where they fit."""
    value = single_scale(ctx, value)
    mantissa, exponent = math.frexp(float(value.scale) * 2.0**fraction)
    if abs(mantissa) == 0.5 and 1 <= 1 - exponent <= ROOM - 2:
        shift = 1 - exponent  # a power of two: nothing but the shift rounds
    else:
        value = narrow_to(ctx, value, _RELATIVE)
        exponent = math.frexp(float(value.scale) * 2.0**fraction)[1]
        # the factor uses all remaining bits, so that its own rounding is far below one unit
        shift = min(max(ROOM - 1 - bits(value) - exponent, 1), ROOM - 2)
    ratio = float(value.scale) * 2.0**fraction
    factor = round(math.ldexp(ratio, shift))
    top = max(abs(value.lo), abs(value.hi))
    name = int64(ctx, value)
    if factor != 1:
        name = ctx.builder.node("Mul", [name, constant64(ctx, factor)])
    ends = sorted((value.lo * factor, value.hi * factor))
    lo, hi = (round_half_up(bound, shift) for bound in ends)
    narrow = max(abs(lo), abs(hi)) < (1 << 31) - 1
    name, _ = rounding_shift(ctx, name, ends[0], shift, TensorProto.INT32 if narrow else TensorProto.INT64)
    error = (value.error + value.relative * top) * abs(ratio) + abs(factor / 2.0**shift - ratio) * top + 0.5
    return FixedPoint(name, np.asarray(2.0**-fraction), lo, hi, narrow=narrow, error=error)


def magnitude(value: FixedPoint | None) -> float:
    """Return the largest magnitude of a value in real units, 0 of none."""
    return 0.0 if value is None else max(abs(value.lo), abs(value.hi)) * float(value.scale)


def first_state(ctx: LoweringContext, value: FixedPoint | None, fraction: int) -> tuple[str | None, float]:
    """Write a first state in multiples of `2**-fraction`, int64 [batch, 1, hidden]; return it with its error."""
    if value is None:
        return None, 0.0
    found = in_unit(ctx, value, fraction)
    name = ctx.builder.node("Unsqueeze", [int64(ctx, found), constant64(ctx, np.asarray([1]))])
    return name, math.ldexp(found.error, -fraction)


def dropped(b: Builder, name: str, count: int) -> str:
    """Write an int64 tensor without its last bits: what is cut off has the sign of the number."""
    return b.node("Div", [name, b.constant(np.int64(1 << count))])


def plus(b: Builder, name: str, addend: Array | int) -> str:
    """Write an int64 tensor plus a constant."""
    return b.node("Add", [name, b.constant(np.asarray(addend, np.int64))])


def bounded(b: Builder, name: str, low: int, high: int) -> str:
    """Note the proven bounds of an int64 tensor and return it."""
    b.proven.setdefault(name, (low, high))
    return name
