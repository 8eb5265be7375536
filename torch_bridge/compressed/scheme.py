"""What the format compressed-tensors can say of a quantized tensor: its `QuantizationArgs`, as plain values."""

from typing import Any

import numpy as np

from qsdk.core.numerics.dtypes import DType
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.spec import PerBlock, PerTensor, Spec, axis_of, whole_blocks

#: significant parts of a `QuantizationArgs`
Arguments = dict[str, Any]

_FLOAT8 = "float8e4m3fn"


class NoFieldError(Exception):
    """The format has no field for something; the text says for what."""


def weight_arguments(spec: Spec, encoding: Encoding, shape: tuple[int, ...]) -> Arguments:
    """Return what the format says of a weight [output channels, input channels].

    Raises:
        NoFieldError: it has no field for the dtype, the axis of the scales or the length of blocks.
    """
    dtype, granularity = spec.dtype, spec.granularity
    if dtype.name != _FLOAT8 and not (dtype.is_integer and dtype.bits in (4, 8)):
        raise NoFieldError(f"a weight of {dtype} has no field; int4, int8 and float8e4m3fn have")
    axis = axis_of(granularity)
    if isinstance(granularity, PerBlock):
        if dtype.name == _FLOAT8:
            raise NoFieldError("blocks of float8 have no field; leave block_size out")
        if axis != 1 or shape[1] % granularity.size:
            sizes = whole_blocks([shape[1]], granularity.size)
            raise NoFieldError(f"blocks of {granularity.size} do not divide its {shape[1]} input channels; {sizes}")
        return {**_number(dtype, encoding), "strategy": "group", "group_size": granularity.size}
    if axis not in (0, None):
        raise NoFieldError(f"scales along axis {axis} have no field; those of output channels (axis 0) have")
    return {**_number(dtype, encoding), "strategy": "tensor" if axis is None else "channel"}


def input_arguments(spec: Spec, encoding: Encoding | None) -> Arguments:
    """Return what the format says of the activation that a layer reads; one with a range per token has no encoding.

    Raises:
        NoFieldError: it has no field for the dtype or the granularity.
    """
    dtype = spec.dtype
    if encoding is None:
        return {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    if dtype.name not in (_FLOAT8, "int8", "uint8"):
        raise NoFieldError(f"an activation of {dtype} has no field; int8 and float8e4m3fn have")
    if not isinstance(spec.granularity, PerTensor):
        raise NoFieldError(f"an activation with scales {spec.granularity} has no field; one scale per tensor has")
    return {**_number(dtype, encoding), "strategy": "tensor"}


def format_of(weights: Arguments, inputs: Arguments | None) -> str:
    """Return the name of the layout of a layer's tensors, as compressed-tensors itself derives it."""
    if weights["type"] == "float":
        return "float-quantized"
    return "pack-quantized" if inputs is None else "int-quantized"


def signed_zero_points(encoding: Encoding) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the zero points on the signed grid, which is the only one that the format has."""
    return encoding.zero_point - shift_of(encoding.dtype)


def shift_of(dtype: DType) -> int:
    """Return what is subtracted from a code of a dtype for that of the signed one: 8 for uint4, 0 for int4."""
    return 1 << (dtype.bits - 1) if dtype.is_integer and not dtype.signed else 0


def _number(dtype: DType, encoding: Encoding) -> Arguments:
    symmetric = not signed_zero_points(encoding).any()
    kind = "int" if dtype.is_integer else "float"
    return {"num_bits": dtype.bits, "type": kind, "symmetric": symmetric, "dynamic": False}
