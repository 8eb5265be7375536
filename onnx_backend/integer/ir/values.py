"""The values of the Q/DQ model's float tensors in the integer model: facts, computed without emitting nodes.

Inside the integer model every quantized activation is a tensor of *codes* 0..hi: signed dtypes are stored with their
zero point moved up by half the grid (int8 by 128), which is the same encoding bit for bit and keeps the runtime's
fast unsigned kernels. Codes of at most 8 bits are uint8; codes of 16 bits are int32, since most operators have no
kernels for 16 bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto

from qsdk.core.numerics import affine

Array = NDArray[Any]


@dataclass(frozen=True)
class FixedPoint:
    """Fixed point between quantizers: `value = integers * scale + constant`, with static bounds and errors."""

    name: str  # an int32 (`narrow`) or int64 tensor of the integer model
    scale: Array  # float64, broadcasts against the tensor; its sign is free
    lo: int  # smallest value the integers can have
    hi: int  # largest value the integers can have
    constant: Array = field(default_factory=lambda: np.zeros(()))  # float64 addend that broadcasts against the tensor
    narrow: bool = False  # True if the tensor is int32
    error: float = 0.0  # bound of the difference between the integers and the real value, in units of `scale`
    relative: float = 0.0  # bound of a further difference, as a share of the integer's magnitude
    masked: str = ""  # a bool tensor, true where the value is `floor` for any integers; empty if nowhere
    floor: float = 0.0  # the masked value: minus infinity, or a number so low that it swallows any number added to it
    infinite: float = 0.0  # where a division by 0 is possible, the least magnitude that means infinity; else 0
    missing: bool = False  # True if the value is NaN where a whole row is masked; the integers are 0 there
    # True if the bounds are those of an integer type, which no number should reach: where bits run out, larger
    # integers saturate
    typed: bool = False
    source: str = ""  # name of the node that computed it, for the certificate

    @property
    def reach(self) -> int:
        """Return the largest magnitude of the integers."""
        return max(abs(self.lo), abs(self.hi))

    @property
    def bits(self) -> int:
        """Return the number of bits of the largest magnitude of the integers."""
        return self.reach.bit_length()

    @property
    def spread(self) -> float:
        """Return the largest error of the integers, in their own unit."""
        return self.error + self.relative * self.reach

    @property
    def inexact(self) -> bool:
        """Return True if the integers have an error: below 2**-16 of one it comes from rounded scales alone."""
        return self.spread > 2.0**-16


@dataclass(frozen=True)
class CodedConstant:
    """The integers of a dequantized constant, zero point already subtracted: `value = integers * scale`."""

    integers: Array  # int64, in the shape of the constant
    scale: Array  # float64, shape (1,) or (channels,)
    axis: int | None  # the channel axis, None per tensor
    dtype: int  # the ONNX dtype it was stored in
    # difference of `integers * scale` from the values, summed over the weights of one output; the largest sum
    error: Fraction = Fraction(0)


@dataclass(frozen=True)
class BlockConstant:
    """The integers of a dequantized constant with a scale per block, zero points already subtracted."""

    integers: Array  # int64, in the shape of the constant
    scale: Array  # float64, of the constant's rank: one number per block along the axis, per index along the others
    axis: int  # along which the blocks lie
    size: int  # of a block; the last one may be shorter
    dtype: int  # the ONNX dtype it was stored in

    def transposed(self, order: list[int]) -> "BlockConstant":
        """Return the same constant with permuted axes."""
        turned = self.integers.transpose(order), self.scale.transpose(order)
        return BlockConstant(*turned, order.index(self.axis), self.size, self.dtype)

    def spread(self, of_blocks: Array) -> Array:
        """Repeat numbers of the scale's shape so that they broadcast against the integers."""
        return np.asarray(affine.align(of_blocks, self.integers.shape, self.axis, self.size))


class Refused(Exception):  # noqa: N818 - a signal between the lowerings and the driver, never seen by users
    """A node cannot be lowered; the reason and the remedy."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


#: Types of tensors that hold integers or booleans.
INTEGER_TYPES = frozenset(
    {
        *(TensorProto.INT64, TensorProto.INT32, TensorProto.INT16, TensorProto.INT8, TensorProto.BOOL),
        *(TensorProto.UINT64, TensorProto.UINT32, TensorProto.UINT16, TensorProto.UINT8),
    }
)

#: ONNX dtype of a quantized activation -> (number added to reach codes, largest code).
GRIDS: dict[int, tuple[int, int]] = {
    TensorProto.UINT8: (0, 255),
    TensorProto.INT8: (128, 255),
    TensorProto.UINT4: (0, 15),
    TensorProto.INT4: (8, 15),
    TensorProto.UINT16: (0, 65535),
    TensorProto.INT16: (32768, 65535),
}


@dataclass(frozen=True)
class ActivationEncoding:
    """The encoding of an activation's codes: `value = (code - zero_point) * scale`, code in 0..hi."""

    scale: float  # the float32 scale, exactly
    zero_point: int  # in codes, so already moved by `GRIDS`
    dtype: int  # the ONNX dtype the Q/DQ model stores

    @property
    def hi(self) -> int:
        """Return the largest code."""
        return GRIDS[self.dtype][1]

    @property
    def wide(self) -> bool:
        """Return True if the codes need more than 8 bits."""
        return self.hi > 255

    @property
    def kind(self) -> type[np.generic]:
        """Return the NumPy dtype of the codes."""
        return np.int32 if self.wide else np.uint8

    @property
    def onnx_kind(self) -> int:
        """Return the ONNX dtype of the codes."""
        return int(TensorProto.INT32 if self.wide else TensorProto.UINT8)

    def quantize(self, values: Array | float) -> Array:
        """Return the codes of float values as QuantizeLinear computes them, int64."""
        x = np.asarray(values, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            codes = affine.quantize(x, np.float32(self.scale), np.float32(self.zero_point), 0, self.hi)
        return np.asarray(codes, np.int64)

    def values(self) -> Array:
        """Return the float32 value of every code 0..hi."""
        codes = np.arange(self.hi + 1, dtype=np.float32)
        return np.asarray(affine.dequantize(codes, np.float32(self.scale), np.float32(self.zero_point)))


@dataclass(frozen=True)
class Movement:
    """A node that moves values without changing them, to be emitted once the codes exist."""

    node: NodeProto  # the node; its first input is the data
    inputs: tuple[str, ...] = ()  # names of its other inputs in the integer model
    output: int = 0  # the index of the output that is meant
    fill: float | None = None  # the float value it inserts (Pad), or None


@dataclass(frozen=True)
class Failed:
    """A tensor behind a node that cannot be converted; its consumers are not reported again."""


@dataclass(frozen=True)
class FloatInput:
    """A float graph input on its way to its QuantizeLinear."""

    name: str
    lo: float = -np.inf
    hi: float = np.inf
    after: tuple[Movement, ...] = ()


@dataclass(frozen=True)
class Integers:
    """An integer or boolean tensor that passes unchanged: shape arithmetic, token ids, stored weights."""

    name: str  # its name in the integer model; empty for a constant, which is written only where it is used
    array: Array | None = None  # its values if it is constant
    dtype: int = TensorProto.UNDEFINED  # the ONNX dtype, where known


@dataclass(frozen=True)
class Floating:
    """A float tensor of the integer model, made by a node that may stay float."""

    name: str


@dataclass(frozen=True)
class Root:
    """The codes that other codes are a table of: `codes = table[root codes]`."""

    name: str
    table: Array


@dataclass(frozen=True)
class Codes:
    """The output of a QuantizeLinear: a tensor of codes, and codes it is a table of, if these may be read instead."""

    name: str
    encoding: ActivationEncoding
    root: Root | None = None


@dataclass(frozen=True)
class Constant:
    """A constant float tensor, with its integers if it came from a DequantizeLinear: `coded`, or `blocks` of them."""

    values: Array
    coded: CodedConstant | None = None
    blocks: BlockConstant | None = None


@dataclass(frozen=True)
class Function:
    """An ONNX op applied to the values of codes in an encoding."""

    op_type: str
    encoding: ActivationEncoding
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class Lookup:
    """Any function of one tensor of codes: `value = values[code]`."""

    name: str  # the codes
    values: Array  # float32, one per code
    encoding: ActivationEncoding | None  # of the codes, if the values come straight from a DequantizeLinear, else None
    function: Function | None = None  # the one op that made the values from such a tensor, else None
    root: Root | None = None  # the codes that these codes are a table of, if they may be read instead

    def of(self, name: str) -> "Lookup | None":
        """Return the same values as a function of the codes `name`, None if they are no such function."""
        if self.name == name:
            return self
        if self.root is None or self.root.name != name:
            return None
        return Lookup(name, self.values[self.root.table], None)


@dataclass(frozen=True)
class Term:
    """A summand `(tensor - zero) * scale` with the tensor's static bounds."""

    name: str  # a uint8 or int32 tensor of the integer model
    scale: Array  # float64, broadcasts against the tensor
    zero: Array  # int64, broadcasts against the tensor; holds the zero point, or minus an int32 bias
    lo: Array  # int64, smallest value the tensor can have
    hi: Array  # int64, largest value the tensor can have
    codes: bool = False  # True if the tensor is a quantized activation


@dataclass(frozen=True)
class Linear:
    """A sum of terms and a constant, clipped to lo..hi: an accumulator that still has to be requantized."""

    terms: tuple[Term, ...]  # the summands
    constant: Array = field(default_factory=lambda: np.zeros(()))  # float64 addend that broadcasts against the terms
    lo: float = -np.inf  # lower clip of the real value
    hi: float = np.inf  # upper clip of the real value
    after: tuple[Movement, ...] = ()  # moves to apply to the codes after requantization
    source: str = ""  # name of the node that computed the accumulator, for the certificate
    # bound of the difference between the sum and the real value, absolute, in real units, exactly
    error: Fraction = Fraction(0)

    @property
    def open(self) -> bool:
        """Return True if more can be added or multiplied: nothing is clipped or moved yet."""
        return not self.after and self.lo == -np.inf and self.hi == np.inf


@dataclass(frozen=True)
class Joined:
    """A Concat whose inputs still have to be brought to one encoding, or leave the model each with its own."""

    parts: tuple["Value", ...]  # the inputs
    axis: int  # not negative where the rank is known
    sizes: tuple[int | None, ...] = ()  # of the parts along the axis, None for a dynamic one
    after: tuple[Movement, ...] = ()  # moves of the whole


@dataclass(frozen=True)
class Bent:
    """A sum that a slope scales where it is negative (LeakyRelu, PRelu), still to be requantized."""

    # the sum clipped below at 0, and slope times the sum clipped to the sign that it then has, for each sign of the
    # slopes; everywhere all but one of them are 0
    parts: tuple[Linear, ...]
    sides: tuple[Linear, Linear]  # the sum, and slope times the sum
    # `Max` where the larger side is the value (no slope exceeds 1), `Min` where the smaller one is (none is below 1),
    # "" for slopes of both kinds
    choice: str


@dataclass(frozen=True)
class Selected:
    """A node that sets every element to the value of one of its parts (Max, Where, ScatterND), still to be quantized.

    Quantizing is monotone and elementwise, so selecting among the quantized parts is the same.
    """

    node: NodeProto  # the node
    inputs: tuple[str | int, ...]  # of the node in the integer model: a name, or the index of a part
    parts: tuple["Value", ...]  # the values that are selected from
    after: tuple[Movement, ...] = ()  # moves of the whole


@dataclass(frozen=True)
class Pending:
    """A value whose movements wait for its codes, as it has none yet, or none for the values that a movement fills in.

    Quantizing is elementwise, so moving quantized values gives the same result.
    """

    value: "Value"  # the value that is moved
    after: tuple[Movement, ...] = ()  # moves of it


@dataclass(frozen=True)
class NotANumber:
    """The answer of IsNaN about a value, which only a Where that replaces the NaN may read."""

    value: "Value"


Value = (
    Failed
    | FloatInput
    | Floating
    | Integers
    | Codes
    | Constant
    | Lookup
    | Linear
    | Joined
    | Bent
    | Selected
    | Pending
    | FixedPoint
    | NotANumber
)


def dequantize_codes(name: str, encoding: ActivationEncoding, root: Root | None = None) -> Lookup:
    """Return the value behind a DequantizeLinear of the codes `name`."""
    return Lookup(name, encoding.values(), encoding, root=root)


def as_linear(value: Value, source: str = "") -> Linear | None:
    """Return `value` as a sum of terms, or None if nothing can be added to it any more."""
    if isinstance(value, Linear):
        return value if value.open else None
    if isinstance(value, Lookup) and value.encoding is not None:
        encoding = value.encoding
        zero, lo, hi = (np.asarray(v, np.int64) for v in (encoding.zero_point, 0, encoding.hi))
        scale = np.asarray(encoding.scale, np.float64)
        return Linear((Term(value.name, scale, zero, lo, hi, codes=True),), source=source)
    return None


def clip_value(value: Value, lo: float, hi: float) -> Value | None:
    """Return `clip(value, lo, hi)`, or None where that would need a float tensor."""
    if isinstance(value, Lookup):
        return Lookup(value.name, value.values.clip(np.float32(lo), np.float32(hi)), None)
    if isinstance(value, Constant):
        return Constant(value.values.clip(np.float32(lo), np.float32(hi)))
    if isinstance(value, Linear | FloatInput):
        new_lo, new_hi = (float(np.clip(bound, lo, hi)) for bound in (value.lo, value.hi))
        return replace(value, lo=new_lo, hi=new_hi, after=_clipped_fills(value.after, lo, hi))
    if isinstance(value, Joined | Selected):
        parts = [clip_value(part, lo, hi) for part in value.parts]
        done = tuple(part for part in parts if part is not None)
        after = _clipped_fills(value.after, lo, hi)
        return replace(value, parts=done, after=after) if len(done) == len(parts) else None
    if isinstance(value, Pending):
        inner = clip_value(value.value, lo, hi)
        return None if inner is None else Pending(inner, _clipped_fills(value.after, lo, hi))
    return None


def _clipped_fills(steps: tuple[Movement, ...], lo: float, hi: float) -> tuple[Movement, ...]:
    """Return moves of clipped values: the values that they fill in are clipped as well."""
    return tuple(step if step.fill is None else replace(step, fill=float(np.clip(step.fill, lo, hi))) for step in steps)


def append_movement(value: Value, step: Movement) -> Value | None:
    """Return `value` with a move to be applied after requantization, or None if it is not pending."""
    if isinstance(value, Linear | FloatInput | Joined | Selected | Pending):
        return replace(value, after=(*value.after, step))
    return Pending(value, (step,)) if isinstance(value, Bent) else None
