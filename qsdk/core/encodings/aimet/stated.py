"""The facts that an AIMET encodings file states of one tensor, and how a model completes them to an encoding."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from qsdk.core.encodings.tensor_facts import TensorFacts
from qsdk.core.errors import CalibrationError, FileFormatError
from qsdk.core.numerics.dtypes import DTYPES, DType
from qsdk.core.numerics.encoding import Encoding, FloatArray

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Stated:
    """An entry of a file that may lack its axis: 0.6.1 and 1.0.0 have none.

    Attributes:
        dtype: the stored type; the older versions call a type signed where it is symmetric.
        scale: float32; one per tensor, (C,) per channel, per block x's rank (other axes may have length 1), or where
            `axis` is None in the order channel, block.
        zero_point: int32, in scale's order and shape.
        granularity: of the scales.
        axis: channel or block axis, None where the file has none.
        block_size: elements per scale, where there are blocks.
    """

    dtype: DType
    scale: FloatArray
    zero_point: npt.NDArray[np.int32]
    granularity: Literal["tensor", "channel", "block"]
    axis: int | None = None
    block_size: int | None = None


def complete(stated: Stated, tensor: TensorFacts | None) -> Encoding:
    """Return the encoding of a tensor from its entry, with the sign that the plan wants.

    Args:
        stated: the entry.
        tensor: the tensor; None where no model is known.

    Raises:
        FileFormatError: the axis is unknown, or the number of scales does not fit the tensor.
    """
    axis = stated.axis
    scale: Array = stated.scale
    zero_point: Array = stated.zero_point
    shape = None if tensor is None else tensor.whole_shape
    if stated.granularity == "tensor":
        scale, zero_point, axis = scale.reshape(1), zero_point.reshape(1), None
    elif stated.granularity == "channel":
        axis = _channel_axis(stated, tensor, shape)
    elif axis is None:
        scale, zero_point, axis = _blocks(stated, tensor, shape)
    elif shape is not None:
        scale, zero_point = (_broadcast(values, shape, axis) for values in (scale, zero_point))
    elif scale.ndim > 2:
        raise FileFormatError("scales per block of a tensor with more than two axes need its shape; pass model=")
    try:
        result = Encoding(stated.dtype, scale, zero_point, axis, stated.block_size)
    except CalibrationError as error:
        raise FileFormatError(str(error)) from error
    return result if tensor is None or tensor.wanted is None else with_sign_of(result, tensor.wanted)


def with_sign_of(encoding: Encoding, wanted: DType) -> Encoding:
    """Return the same values in the codes of a dtype of equal width and the other sign, if that is all that differs."""
    have = encoding.dtype
    full = all(d.is_integer and (d.lo, d.hi) == (DTYPES[d.name].lo, DTYPES[d.name].hi) for d in (have, wanted))
    if not full or have.bits != wanted.bits or have.signed == wanted.signed:
        return encoding
    return replace(encoding, dtype=wanted, zero_point=encoding.zero_point + np.int32(wanted.lo - have.lo))


def to_stated(encoding: Encoding, tensor: TensorFacts) -> Stated:
    """Return the facts about an encoding that a file can state.

    Block scales of a tensor with more than two axes lose the others, which AIMET's scales do not have.

    Raises:
        FileFormatError: the scales differ along such an axis, or the blocks do not fill theirs.
    """
    granularity: Literal["tensor", "channel", "block"] = "tensor"
    scale: Array = encoding.scale
    zero_point: Array = encoding.zero_point
    if encoding.block_size is not None and encoding.axis is not None:
        granularity = "block"
        axis, shape = encoding.axis % scale.ndim, tensor.whole_shape
        if shape is not None and shape[axis] % encoding.block_size:
            raise FileFormatError(
                f"blocks of {encoding.block_size} do not divide the {shape[axis]} elements of axis {axis}, which AIMET "
                "wants; choose a block size that does"
            )
        channel = _axis_of_channels(encoding, tensor)
        for other in range(scale.ndim):
            if other not in (axis, channel):
                scale, zero_point = (_alike(values, other) for values in (scale, zero_point))
    elif encoding.axis is not None:
        granularity = "channel"
    return Stated(encoding.dtype, scale, zero_point, granularity, encoding.axis, encoding.block_size)


def in_order(values: Array, axis: int) -> Array:
    """Return values flattened in the order channel, block, for blocks whose other axes have length 1."""
    return np.moveaxis(values, axis, -1).reshape(-1)


def channel_axis_of(stated: Stated) -> int:
    """Return the axis of channels of scales per block, whose other axes have length 1."""
    assert stated.axis is not None
    rank = stated.scale.ndim
    block = stated.axis % rank
    long = [axis for axis in range(rank) if axis != block and stated.scale.shape[axis] > 1]
    return long[0] if long else (1 if block == 0 else block - 1)


def _channel_axis(stated: Stated, tensor: TensorFacts | None, shape: tuple[int, ...] | None) -> int:
    count = stated.scale.size
    if stated.axis is not None:
        if shape is not None and not (-len(shape) <= stated.axis < len(shape) and shape[stated.axis] == count):
            raise FileFormatError(f"{count} scales along axis {stated.axis} do not fit the shape {list(shape)}")
        return stated.axis
    if tensor is None or shape is None:
        raise FileFormatError("this version has no channel axis, so the model must say; pass model= (--model)")
    if tensor.channel_axis is not None:
        if shape[tensor.channel_axis] == count:
            return tensor.channel_axis
        raise FileFormatError(
            f"{count} scales do not fit the {shape[tensor.channel_axis]} channels (axis {tensor.channel_axis}) of "
            f"{list(shape)}"
        )
    fitting = [axis for axis, length in enumerate(shape) if length == count]
    if len(fitting) != 1:
        raise FileFormatError(
            f"{count} scales fit {len(fitting)} axes of {list(shape)}; use a version with axes, 2.0.0"
        )
    return fitting[0]


def _blocks(stated: Stated, tensor: TensorFacts | None, shape: tuple[int, ...] | None) -> tuple[Array, Array, int]:
    """Return the scales in QuantizeLinear's own shape, from the order channel, block."""
    assert stated.block_size is not None
    if tensor is None or shape is None:
        raise FileFormatError("this version has no block axis, so the model must say; pass model= (--model)")
    channel, block = tensor.channel_axis, tensor.block_axis
    if channel is None or block is None:
        raise FileFormatError("it has no channels that blocks could divide; use a version with axes, 2.0.0")
    counts = (shape[channel], shape[block] // stated.block_size)
    if math.prod(counts) != stated.scale.size or shape[block] % stated.block_size:
        raise FileFormatError(
            f"{stated.scale.size} scales for blocks of {stated.block_size} do not fit {list(shape)}, with channels on "
            f"axis {channel} and blocks along axis {block}"
        )
    one = [1] * len(shape)
    one[channel], one[block] = counts

    def shaped(values: Array) -> Array:
        ordered = values.reshape(counts) if channel < block else values.reshape(counts).T
        return _broadcast(ordered.reshape(one), shape, block)

    return shaped(stated.scale), shaped(stated.zero_point), block


def _broadcast(values: Array, shape: tuple[int, ...], axis: int) -> Array:
    """Return values repeated along all axes but that of the blocks, to the shape of the tensor."""
    if values.ndim != len(shape) or not -len(shape) <= axis < len(shape):
        raise FileFormatError(f"scales of shape {list(values.shape)} along axis {axis} do not fit {list(shape)}")
    wanted = list(shape)
    wanted[axis] = values.shape[axis]
    try:
        return np.broadcast_to(values, wanted)
    except ValueError as error:
        raise FileFormatError(f"scales of shape {list(values.shape)} do not fit the shape {list(shape)}") from error


def _axis_of_channels(encoding: Encoding, tensor: TensorFacts) -> int | None:
    """Return the only axis besides that of the blocks along which scales may differ."""
    assert encoding.axis is not None
    rank, block = encoding.scale.ndim, encoding.axis % encoding.scale.ndim
    if tensor.channel_axis is not None:
        return tensor.channel_axis % rank
    others = [axis for axis in range(rank) if axis != block]
    long = [axis for axis in others if not np.array_equal(encoding.scale, _repeated(encoding.scale, axis))]
    return others[0] if len(others) == 1 else long[0] if len(long) == 1 else None


def _repeated(values: Array, axis: int) -> Array:
    return np.broadcast_to(values.take([0], axis), values.shape)


def _alike(values: Array, axis: int) -> Array:
    if not np.array_equal(values, _repeated(values, axis)):
        raise FileFormatError(f"its block scales differ along axis {axis}, and AIMET's are per channel and block")
    return values.take([0], axis)
