"""The operations of an integer program above single ONNX nodes, which each target writes in its own way.

A lowering records each computation (the accumulator of a layer, a requantization, a table); `expand` then writes the
nodes of the chosen target for it. Computations that need no choice are recorded as the ONNX nodes they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import NodeProto

from onnx_backend.integer.ir.requantization import RequantMultiplier
from onnx_backend.integer.ir.values import ActivationEncoding, Array, Function, Linear


class SingleResult:
    """An operation with one result."""

    result: str

    @property
    def output(self) -> Sequence[str]:
        """Return the names of its results."""
        return (self.result,)


class CodesReader(SingleResult):
    """An operation that reads one tensor of codes."""

    codes: str

    @property
    def input(self) -> Sequence[str]:
        """Return the names of its inputs."""
        return (self.codes,)


@dataclass(frozen=True)
class Accumulation(CodesReader):
    """The int32 sum of products of a layer with a constant weight.

    Attributes:
        op_type: `Conv` or `MatMul`.
        codes: the uint8 activation.
        encoding: of the activation.
        weight: int64, its zero point subtracted.
        zero: the number added to the weight to store it unsigned.
        bits: in which it is stored: 8, 4 or 2.
        scale: float64, of the weight: shape () or (channels,).
        attributes: of the Conv.
        weight_first: True if the weight is the left operand of the MatMul.
        stem: name of the weight in the Q/DQ model.
        result: name of the accumulator.
        label: the node of the Q/DQ model.
        rank: of the activation, None if it is not known.
    """

    op_type: str
    codes: str
    encoding: ActivationEncoding
    weight: Array
    zero: int
    bits: int
    scale: Array
    attributes: Mapping[str, Any]
    weight_first: bool
    stem: str
    result: str
    label: str
    rank: int | None = None


@dataclass(frozen=True)
class CodesOperand:
    """A uint8 tensor with `value = (codes - zero) * scale`."""

    codes: str
    encoding: ActivationEncoding


@dataclass(frozen=True)
class Product(SingleResult):
    """The int32 product of two activations, elementwise (`Mul`) or of matrices (`MatMul`)."""

    op_type: str
    left: CodesOperand
    right: CodesOperand
    result: str
    label: str

    @property
    def input(self) -> Sequence[str]:
        """Return the names of its inputs."""
        return (self.left.codes, self.right.codes)


@dataclass(frozen=True)
class WindowSum(CodesReader):
    """The int32 sum of `codes - zero point` over pooling windows (`attributes` of the pool) or over whole axes.

    Attributes:
        op_type: `AveragePool` or `ReduceSum`.
        codes: the uint8 activation.
        encoding: of the activation.
        attributes: kernel_shape, strides, dilations and pads of the windows; keepdims of whole axes.
        result: name of the sum.
        label: the node of the Q/DQ model.
        rank: of the activation.
        channels: of the activation, for windows.
        axes: reduced axes, for whole axes.
        count: number of summed elements along the axes.
    """

    op_type: str
    codes: str
    encoding: ActivationEncoding
    attributes: Mapping[str, Any]
    result: str
    label: str
    rank: int
    channels: int = 0
    axes: tuple[int, ...] = ()
    count: int = 0


@dataclass(frozen=True)
class Softmax:
    """The Softmax of codes along one axis, which some targets compute without its accumulators.

    Attributes:
        codes: the uint8 scores.
        encoding: of the scores.
        axis: along which the exponentials are summed.
        length: of the axis.
        rank: of the scores, None if it is not known.
    """

    codes: str
    encoding: ActivationEncoding
    axis: int
    length: int
    rank: int | None = None


@dataclass(frozen=True)
class Shares:
    """The shares of exponentials in the sums of their rows, which some targets compute without their accumulators.

    Attributes:
        index: int32, places in the table.
        table: the exponentials in units of 2**-30, of which every row has a largest of 1.
        axis: of a row.
        length: of a row.
        missing: a bool tensor without the axis, true for rows whose shares are 0; empty if there are none.
        error: bound of the error of a share, from its scores and from the table.
    """

    index: str
    table: Array
    axis: int
    length: int
    missing: str
    error: float


@dataclass(frozen=True)
class Requantization(SingleResult):
    """Accumulators to uint8 codes: multipliers, one rounding, zero point, saturation.

    Attributes:
        value: the accumulators; moves in `value.after` are not part of it.
        encoding: of the result.
        plan: the fixed-point constants.
        rounding: of exact ties; `half_up` wherever none can occur.
        bounds: smallest and largest code (a Relu or Clip folded in).
        result: name of the codes.
        label: the node of the Q/DQ model.
        row: its row of the certificate.
        softmax: the Softmax of codes, or the shares of rows, that the accumulators hold, if they hold one.
    """

    value: Linear
    encoding: ActivationEncoding
    plan: RequantMultiplier
    rounding: str
    bounds: tuple[int, int]
    result: str
    label: str
    row: dict[str, Any] = field(compare=False)
    softmax: Softmax | Shares | None = None

    @property
    def input(self) -> Sequence[str]:
        """Return the names of its inputs."""
        return tuple(term.name for term in self.value.terms)


@dataclass(frozen=True)
class Table(CodesReader):
    """Codes to codes by a table with one entry per code.

    Attributes:
        codes: the uint8 tensor that indexes it.
        table: int64, one code of the result per code.
        encoding: of the result.
        plain: the encoding of the codes where the table only takes them to another encoding, else None.
        function: the one ONNX op that it computes, else None.
        result: name of the codes.
        label: the node of the Q/DQ model.
        row: its row of the certificate.
    """

    codes: str
    table: Array
    encoding: ActivationEncoding
    plain: ActivationEncoding | None
    function: Function | None
    result: str
    label: str
    row: dict[str, Any] = field(compare=False)

    @property
    def clips(self) -> bool:
        """Return True if it only clips its codes."""
        clip = np.arange(self.table.size).clip(self.table.min(), self.table.max())
        return np.array_equal(self.table, clip) and self.encoding.wide == (self.table.size > 256)


@dataclass(frozen=True)
class Join(SingleResult):
    """A Concat of codes in one encoding."""

    parts: tuple[str, ...]
    encoding: ActivationEncoding
    axis: int
    result: str
    label: str

    @property
    def input(self) -> Sequence[str]:
        """Return the names of its inputs."""
        return self.parts


Recorded = Accumulation | Product | WindowSum | Requantization | Table | Join
Operation = NodeProto | Recorded
