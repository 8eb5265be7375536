"""The sums in front of the gates: the input times W, for all steps at once, plus the hidden state times R in each step.

A hidden state is a multiple of `2**-fraction` and carried lifted, as `(state + OFFSET) * 2**drop` plus bits that are
dropped: three tensors of 8 bits, which one MatMulInteger multiplies with R exactly. The sums of a step are integers in
one unit, that of the product with R, which the products with W are brought to before the first step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from onnx_backend.integer.fixed_point.fixed_arithmetic import ROOM
from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.exact_bounds import ULP
from onnx_backend.integer.ir.values import Array
from onnx_backend.integer.lowering.layers.layers import accumulator_bounds, require_int32
from onnx_backend.integer.lowering.layers.split_int16 import Bytes
from onnx_backend.integer.lowering.recurrent.weights import Matrix

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
    """The product of lifted hidden states with R.

    Attributes:
        weight: R.
        fraction: a state is a multiple of `2**-fraction`.
        unit: of a sum of a step, in real units.
        guard: bits by which the product is finer than the sum.
        factors: int64, what brings the columns to one unit, None where they have one scale.
    """

    weight: Matrix
    fraction: int
    unit: float
    guard: int
    factors: Array | None

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
    """The products of the quantized input with W, plus a bias.

    Attributes:
        parts: the input's codes, as tensors of 8 bits.
        weight: W.
        bias: float64 [columns].
    """

    parts: Sequence[Bytes]
    weight: Matrix
    bias: Array

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
