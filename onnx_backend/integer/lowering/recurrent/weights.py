"""W and R of a recurrent layer as integers."""

from dataclasses import dataclass, replace

import numpy as np

from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.context import LoweringContext
from onnx_backend.integer.ir.values import Array, Constant, Refused, Value
from onnx_backend.integer.lowering.layers.layers import require_positive, weight_storage

_QUANTIZE = "store W and R as integers behind a DequantizeLinear, per tensor or per gate row"


@dataclass(frozen=True)
class Matrix:
    """A weight of one direction, inputs by columns (all gates).

    Attributes:
        integers: int64, the zero point subtracted.
        scale: float64, shape () or (columns,).
        zero: what is added to the integers to store them as uint8.
        bits: of a stored integer.
        what: `W` or `R`.
    """

    integers: Array
    scale: Array
    zero: int
    bits: int
    what: str

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
    """Return W or R of one direction.

    Raises:
        Refused: it is float, not constant, or has scales along its inputs.
    """
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
