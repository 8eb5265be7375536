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
    """The int32 sum of products of a layer with a constant weight."""

    op_type: str  # `Conv` or `MatMul`
    codes: str  # the uint8 activation
    encoding: ActivationEncoding  # of the activation
    weight: Array  # int64, its zero point subtracted
    zero: int  # the number added to the weight to store it unsigned
    bits: int  # in which it is stored: 8, 4 or 2
    scale: Array  # float64, of the weight: shape () or (channels,)
    attributes: Mapping[str, Any]  # of the Conv
    weight_first: bool  # True if the weight is the left operand of the MatMul
    stem: str  # name of the weight in the Q/DQ model
    result: str  # name of the accumulator
    label: str  # the node of the Q/DQ model
    rank: int | None = None  # of the activation, None if it is not known


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
    """The int32 sum of `codes - zero point` over pooling windows (`attributes` of the pool) or over whole axes."""

    op_type: str  # `AveragePool` or `ReduceSum`
    codes: str  # the uint8 activation
    encoding: ActivationEncoding  # of the activation
    attributes: Mapping[str, Any]  # kernel_shape, strides, dilations and pads of the windows; keepdims of whole axes
    result: str  # name of the sum
    label: str  # the node of the Q/DQ model
    rank: int  # of the activation
    channels: int = 0  # of the activation, for windows
    axes: tuple[int, ...] = ()  # reduced axes, for whole axes
    count: int = 0  # number of summed elements along the axes


@dataclass(frozen=True)
class Softmax:
    """The Softmax of codes along one axis, which some targets compute without its accumulators."""

    codes: str  # the uint8 scores
    encoding: ActivationEncoding  # of the scores
    axis: int  # along which the exponentials are summed
    length: int  # of the axis
    rank: int | None = None  # of the scores, None if it is not known


@dataclass(frozen=True)
class Shares:
    """The shares of exponentials in the sums of their rows, which some targets compute without their accumulators."""

    index: str  # int32, places in the table; without a table the exponentials in its unit
    table: Array | None  # the exponentials in units of 2**-30, of which every row has a largest of 1
    axis: int  # of a row
    length: int  # of a row
    missing: str  # a bool tensor without the axis, true for rows whose shares are 0; empty if there are none
    error: float  # bound of the error of a share, from its scores and from the table


@dataclass(frozen=True)
class Norm:
    """The normalized rows of codes along the last axis, which some targets compute without their accumulators."""

    codes: str  # the uint8 tensor
    hi: int  # the largest code
    count: int  # of the codes of a row
    # what is added to `count * (sum of squares of codes) - (sum of codes)**2`; with a zero to the sum of squares alone
    epsilon: float
    # of the accumulators: (count * code - sum) over the root of that, with a zero (code - zero)
    scale: float
    result: str  # name of the accumulators
    zero: int | None = None  # from which codes are measured; None: from the mean of their row


@dataclass(frozen=True)
class Requantization(SingleResult):
    """Accumulators to uint8 codes: multipliers, one rounding, zero point, saturation."""

    value: Linear  # the accumulators; moves in `value.after` are not part of it
    encoding: ActivationEncoding  # of the result
    plan: RequantMultiplier  # the fixed-point constants
    rounding: str  # of exact ties; `half_up` wherever none can occur
    bounds: tuple[int, int]  # smallest and largest code (a Relu or Clip folded in)
    result: str  # name of the codes
    label: str  # the node of the Q/DQ model
    row: dict[str, Any] = field(compare=False)  # its row of the certificate
    # the Softmax or the norm of codes, or the shares of rows, that the accumulators hold, if they hold one
    rows: Softmax | Shares | Norm | None = None

    @property
    def input(self) -> Sequence[str]:
        """Return the names of its inputs."""
        return tuple(term.name for term in self.value.terms)


@dataclass(frozen=True)
class Table(CodesReader):
    """Codes to codes by a table with one entry per code."""

    codes: str  # the uint8 tensor that indexes it
    table: Array  # int64, one code of the result per code
    encoding: ActivationEncoding  # of the result
    # the encoding of the codes where the table only takes them to another encoding, else None
    plain: ActivationEncoding | None
    function: Function | None  # the one ONNX op that it computes, else None
    result: str  # name of the codes
    label: str  # the node of the Q/DQ model
    row: dict[str, Any] = field(compare=False)  # its row of the certificate

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
