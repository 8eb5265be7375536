"""One direction of a recurrent layer: its weights, the sums in front of the gates, and what a cell makes of them.

The input times W is taken for all steps at once; in each step the hidden state times R is added. A hidden state is a
multiple of `2**-fraction` and carried lifted, as `(state + OFFSET) * 2**drop` plus bits that are dropped: three tensors
of 8 bits, which one MatMulInteger multiplies with R exactly. The sums of a step are integers in one unit, that of the
product with R, which the products with W are brought to before the first step.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import TensorProto

from onnx_backend.integer.fixed_point.fixed_arithmetic import (
    ROOM,
    narrow_to,
    round_half_up,
    rounding_shift,
    single_scale,
)
from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.context import LoweringContext
from onnx_backend.integer.ir.exact_bounds import ULP
from onnx_backend.integer.ir.values import Array, Constant, FixedPoint, Refused, Value
from onnx_backend.integer.lowering.layers.layers import (
    Bytes,
    accumulator_bounds,
    require_int32,
    require_positive,
    weight_storage,
)

_QUANTIZE = "store W and R as integers behind a DequantizeLinear, per tensor or per gate row"


@dataclass(frozen=True)
class Matrix:
    """A weight of one direction, inputs by columns (all gates)."""

    integers: Array  # int64, the zero point subtracted
    scale: Array  # float64, shape () or (columns,)
    zero: int  # what is added to the integers to store them as uint8
    bits: int  # of a stored integer
    what: str  # `W` or `R`

    @property
    def scales(self) -> Array:
        """Return the scale of each column."""
        return np.broadcast_to(self.scale, self.integers.shape[1:])

    @property
    def norm(self) -> Array:
        """Return by how much a change of 1 of all inputs can change each column at most."""
        return np.asarray(np.abs(self.integers).sum(0) * self.scales)

    def columns(self, first: int, last: int) -> "Matrix":
        """Return some columns."""
        scale = self.scale[first:last] if self.scale.ndim else self.scale
        return replace(self, integers=self.integers[:, first:last], scale=scale)

    def write(self, b: Builder) -> tuple[str, str]:
        """Write the uint8 tensor and its zero point."""
        return b.packed(self.integers + self.zero, self.bits, self.what), b.constant(self.zero, np.uint8)


def matrix(ctx: LoweringContext, value: Value | None, direction: int, what: str) -> Matrix:
    """Return W or R of one direction."""
    if not isinstance(value, Constant) or value.coded is None:
        raise Refused(f"{what} is float, block-wise or not constant", _QUANTIZE)
    coded = value.coded
    if coded.axis not in (None, 0, 1):
        raise Refused(f"{what} has one scale per index of axis {coded.axis}", _QUANTIZE)
    require_positive(coded.scale)
    integers = np.ascontiguousarray(coded.integers[direction].T)
    scale: Array = coded.scale.reshape(-1)
    if coded.axis != 1:
        scale = scale[direction if coded.axis == 0 else 0].reshape(())
    zero, bits = weight_storage(ctx, coded, integers)
    return Matrix(integers, scale.astype(np.float64), zero, bits, what)


_PLANES = 3  # tensors of 8 bits that hold a hidden state
#: What makes a hidden state a number of three bytes, none of them negative.
OFFSET = 1 << (8 * _PLANES - 1)
_STATE = 8 * _PLANES - 2  # a hidden state within -1..1 is a multiple of 2**-22
_FINEST = 2.0**-34  # a finer unit of sums would make tables larger, not gates more exact
_SUM = 46  # bits of a sum
_GUARD = 20  # bits of the factors that bring columns of different scales to one unit


def state_fraction(largest: float) -> int:
    """Return the fraction bits of a hidden state of at most this magnitude, so that it fits in 8-bit tensors."""
    return _STATE - max(math.ceil(math.log2(largest)), 0)


@dataclass(frozen=True)
class StateProduct:
    """The product of lifted hidden states with R."""

    weight: Matrix  # R
    fraction: int  # a state is a multiple of `2**-fraction`
    unit: float  # of a sum of a step, in real units
    guard: int  # bits by which the product is finer than the sum
    factors: Array | None  # int64, what brings the columns to one unit, None where they have one scale

    @property
    def centre(self) -> Array:
        """Return the product of a state of 0, which is to be subtracted: int64 [columns]."""
        sums = OFFSET * self.weight.integers.sum(0)
        return np.asarray(sums if self.factors is None else sums * self.factors)

    def write(self, b: Builder, lifted: str, drop: int, weight: tuple[str, str]) -> str:
        """Write the product, `guard` bits finer than `unit`, of states [..., 1, hidden]: int64 [..., 1, columns]."""
        shifts = np.arange(_PLANES)[::-1].reshape(-1, 1) * 8
        planes = b.node("Div", [lifted, b.constant(np.left_shift(np.int64(1), drop + shifts))])
        planes = b.cast(b.node("BitwiseAnd", [planes, b.constant(np.int64(255))]), TensorProto.UINT8)
        products = b.node("MatMulInteger", [planes, weight[0], b.constant(0, np.uint8), weight[1]])
        digits = b.constant(np.left_shift(np.int64(1), shifts.T))
        whole = b.node("MatMul", [digits, b.cast(products, TensorProto.INT64)])
        return whole if self.factors is None else b.node("Mul", [whole, b.constant(self.factors)])

    def error(self, state: float, largest: float) -> float:
        """Bound the error of a sum in real units, where the state's error and magnitude are bounded."""
        found = float(self.weight.norm.max(initial=0.0)) * (state + largest * ULP)
        if self.factors is None:
            return found
        exact = np.ldexp(self.weight.scales, -self.fraction)
        off = np.abs(self.factors * math.ldexp(self.unit, -self.guard) - exact)
        sums = np.abs(self.weight.integers).sum(0) * math.ldexp(largest, self.fraction)
        return found + float(np.max(off * sums, initial=0.0)) + self.unit


def state_product(weight: Matrix, fraction: int, reach: float) -> StateProduct:
    """Return the product with R, where no sum of a step is larger than `reach` in real units."""
    exact = np.ldexp(weight.scale, -fraction)
    unit = max(float(exact.max()), _FINEST, math.ldexp(reach, -_SUM))
    if exact.size == 1 and unit == exact:
        return StateProduct(weight, fraction, unit, 0, None)
    guard = min(_GUARD, ROOM - 3 - math.ceil(math.log2(max(reach / unit, 1.0))))
    factors = np.rint(exact / math.ldexp(unit, -guard)).astype(np.int64)
    return StateProduct(weight, fraction, unit, guard, factors)


@dataclass(frozen=True)
class Inputs:
    """The products of the quantized input with W, plus a bias."""

    parts: Sequence[Bytes]  # the input's codes, as tensors of 8 bits
    weight: Matrix  # W
    bias: Array  # float64 [columns]

    def columns(self, first: int, last: int) -> "Inputs":
        """Return some columns."""
        return Inputs(self.parts, self.weight.columns(first, last), self.bias[first:last])

    @property
    def reach(self) -> Array:
        """Return the largest magnitude of each column, in real units."""
        found = np.abs(self.bias)
        for _, encoding in self.parts:
            low, high = accumulator_bounds(self.weight.integers, encoding, (0,))
            require_int32(low, high)
            found = found + np.maximum(-low, high) * encoding.scale * self.weight.scales
        return np.asarray(found)

    def write(self, b: Builder, unit: float, addend: Array) -> tuple[str, float]:
        """Write the products in multiples of `unit`, plus an integer per column, for all steps.

        Returns:
            int64 [steps, batch, 1, columns], and the bound of its error in real units.
        """
        most = float(np.max(self.reach, initial=0.0) / unit) + float(np.max(np.abs(addend), initial=0))
        finer = max(ROOM - 2 - max(math.ceil(math.log2(most + 1.0)), 1), 0)
        fine, error, found = math.ldexp(unit, -finer), 0.0, ""
        name, zero = self.weight.write(b)
        for codes, encoding in self.parts:
            real = encoding.scale * self.weight.scales
            factors = np.rint(real / fine)
            low, high = accumulator_bounds(self.weight.integers, encoding, (0,))
            off = np.abs(real - factors * fine) + 4 * ULP * real
            error += float(np.max(off * np.maximum(-low, high), initial=0.0))
            product = b.node("MatMulInteger", [codes, name, b.constant(encoding.zero_point, np.uint8), zero])
            wide = b.cast(product, TensorProto.INT64)
            scaled = b.node("Mul", [wide, b.constant(factors.astype(np.int64))])
            found = b.node("Add", [found, scaled]) if found else scaled
        bias = np.rint(self.bias / fine).astype(np.int64) + np.left_shift(addend, finer)
        found = b.node("Add", [found, b.constant(bias)])
        whole = b.node("Div", [found, b.constant(np.int64(1 << finer))]) if finer else found
        error += unit + fine + float(np.max(np.abs(self.bias), initial=0.0)) * 4 * ULP
        return b.node("Unsqueeze", [whole, b.constant(np.asarray([2], np.int64))]), error


def write_sums(
    b: Builder, product: StateProduct, given: str, lifted: str | None, drop: int, weight: tuple[str, str]
) -> str:
    """Write the sums of one step in the product's unit: `given` plus the state's product (None: 0)."""
    behind = b.constant(product.centre) if lifted is None else product.write(b, lifted, drop, weight)
    whole = b.node("Add", [given, behind])
    return b.node("Div", [whole, b.constant(np.int64(1 << product.guard))]) if product.guard else whole


_RELATIVE = 32  # bits of a value that is brought to another unit, which leaves 29 to the factor
#: Steps within which a cell of a sequence of open length stays exact.
LONGEST = 1 << 12


@dataclass(frozen=True)
class Direction:
    """The constants and first states of one direction."""

    inputs: Inputs  # products of the input with W, plus the biases that are added to them
    recurrent: Matrix  # R
    hidden: int  # size of the state
    batch: int | None  # None where it is dynamic
    steps: int | None  # length of the sequence, None where it is dynamic
    backwards: bool  # whether the last step comes first
    state: FixedPoint | None  # the first hidden state [batch, hidden], None for zeros
    cell: FixedPoint | None  # the first cell state, None for zeros
    # of the recurrent product alone, where a gate scales it (GRU with linear_before_reset): float64 [hidden]
    inner: Array
    largest: float  # largest magnitude of a hidden state


@dataclass(frozen=True)
class Step:
    """What one step reads."""

    given: Sequence[str]  # its slice of each of the cell's `given`, int64 [..., batch, 1, columns]
    states: Sequence[str | None]  # those behind the step before, int64 [..., batch, 1, hidden]; None for zeros
    weights: Sequence[tuple[str, str]]  # what `Cell.write_weights` has written
    rank: int  # of these tensors


class Cell(ABC):
    """The steps of one direction in fixed point; the first of its states is the lifted hidden state.

    The products of the inputs and the first states are written when it is made.
    """

    given: Sequence[str]  # what each step reads of the input, int64 [steps, batch, 1, columns]
    widths: Sequence[int]  # columns of each of `given`
    starts: Sequence[str | None]  # the first states, int64 [batch, 1, hidden]; None for zeros
    zeros: Sequence[int]  # the integers of states of 0
    fraction: int  # a hidden state is a multiple of `2**-fraction`
    drop: int  # bits of a lifted hidden state below those
    fine: int  # fraction bits of an LSTM's cell state
    largest_cell_state: int | None = None  # largest integer of an LSTM's cell state; None for a GRU

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
        shift = min(max(ROOM - 1 - value.bits - exponent, 1), ROOM - 2)
    ratio = float(value.scale) * 2.0**fraction
    factor = round(math.ldexp(ratio, shift))
    top = max(abs(value.lo), abs(value.hi))
    name = ctx.int64(value)
    if factor != 1:
        name = ctx.node("Mul", [name, ctx.constant64(factor)])
    ends = sorted((value.lo * factor, value.hi * factor))
    lo, hi = (round_half_up(bound, shift) for bound in ends)
    narrow = max(abs(lo), abs(hi)) < (1 << 31) - 1
    name = rounding_shift(ctx, name, ends[0], shift, TensorProto.INT32 if narrow else TensorProto.INT64)
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
    name = ctx.node("Unsqueeze", [ctx.int64(found), ctx.constant64(np.asarray([1]))])
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
