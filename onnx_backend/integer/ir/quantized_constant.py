"""Constants of the Q/DQ model with stored integers: per tensor, per channel, per block."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsdk.core.numerics import affine

Array = NDArray[Any]


@dataclass(frozen=True)
class CodedConstant:
    """The integers of a dequantized constant, zero point already subtracted: `value = integers * scale`.

    Attributes:
        integers: int64, in the shape of the constant.
        scale: float64, shape (1,) or (channels,).
        axis: the channel axis, None per tensor.
        dtype: the ONNX dtype it was stored in.
        error: difference of `integers * scale` from the values, summed over the weights of one output; the largest sum.
    """

    integers: Array
    scale: Array
    axis: int | None
    dtype: int
    error: Fraction = Fraction(0)


@dataclass(frozen=True)
class BlockConstant:
    """The integers of a dequantized constant with a scale per block, zero points already subtracted.

    Attributes:
        integers: int64, in the shape of the constant.
        scale: float64, of the constant's rank: one number per block along the axis, per index along the others.
        axis: along which the blocks lie.
        size: of a block; the last one may be shorter.
        dtype: the ONNX dtype it was stored in.
    """

    integers: Array
    scale: Array
    axis: int
    size: int
    dtype: int

    def transposed(self, order: list[int]) -> "BlockConstant":
        """Return the same constant with permuted axes."""
        turned = self.integers.transpose(order), self.scale.transpose(order)
        return BlockConstant(*turned, order.index(self.axis), self.size, self.dtype)

    def spread(self, of_blocks: Array) -> Array:
        """Repeat numbers of the scale's shape so that they broadcast against the integers."""
        return np.asarray(affine.align(of_blocks, self.integers.shape, self.axis, self.size))
