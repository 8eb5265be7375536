"""The errors of ONNX Runtime's default level in Q/DQ models (measured), and the QuantizeLinear form that avoids them.

Measured on onnxruntime 1.31 and 1.32 (CPU, x86); `tests/onnx_backend/runtimes/test_runtime_table.py` derives the table
again on the installed runtime and fails where it has changed, in either direction. Errors of only one of the two
wrong is in it too: a model may be run by another version than the one it was exported with.
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from onnx_backend.readers import Form, words

_FOUR_BITS, _TWO_BITS = ("uint4", "int4"), ("uint2", "int2")
_FLOAT8 = ("float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz")
#: types for which the runtime's default level was not written: it takes them for 8 bits, here and there
NARROW = frozenset({*_FOUR_BITS, *_TWO_BITS, *_FLOAT8})
EVERYTHING = "*"
#: how far a Softmax of 8 bits may be off before it is rounded, in steps of the result
SOFTMAX_CLOSE = 1.0 / 16.0


def _layers(ops: str, weights: tuple[str, ...]) -> frozenset[str]:
    return frozenset(f"{op}/{weight}" for op in ops.split() for weight in weights)


#: the runtime's own 8-bit kernels
_KERNELS = words("Add AveragePool Concat GlobalAveragePool LeakyRelu Mul Sigmoid Softmax")
#: its WeightBiasQuantization turns a float weight between quantized activations into int8
_FLOAT_CONV = _layers("Conv ConvTranspose", ("float32", "float16"))
_FLOAT_GEMM = _layers("Gemm", ("float32", "float16"))
#: QLinearConv knows no blocks; in 1.31 neither it nor QLinearMatMul knows blocks or float8
_FOREIGN = _layers("Conv MatMul", ("int8 blocks", "uint8 blocks", "float8e4m3fn"))
#: ops that an int8 DequantizeLinear is moved past, with an attribute that the rewrite to uint8 then drops
_PUSHED = words("MaxPool> Reshape> Slice> Squeeze> Transpose> Unsqueeze>")
#: 8-bit weights beside activations that are not
_EIGHT_BIT_CONV = _layers(
    "Conv", ("int8", "uint8", "int8 blocks", "uint8 blocks", "float8e4m3fn", "float32", "float16")
)
_EIGHT_BIT_MATMUL = _layers("MatMul", ("int8", "uint8", "int8 blocks", "uint8 blocks", "float8e4m3fn")) | {"MatMul"}
#: ops that are dropped, or run on codes, in front of a QuantizeLinear with a zero point
_CLIPPED = words("Clip MaxPool MaxPool> ReduceMax")
_DROPPED = words("Flatten> Gather> Identity> Pad> Relu Reshape> Slice> Squeeze> Unsqueeze>")
_ON_CODES = words("DepthToSpace Flatten Flatten> Gather Gather> Reshape Reshape> Resize Slice Slice> Tile") | words(
    "Squeeze Squeeze> Unsqueeze Unsqueeze>"
)
_NARROWEST = _KERNELS | _EIGHT_BIT_CONV | _EIGHT_BIT_MATMUL


def _each(
    dtypes: tuple[str, ...], forms: tuple[Form, ...], readers: frozenset[str]
) -> dict[tuple[str, Form], frozenset[str]]:
    return {(dtype, form): readers for dtype in dtypes for form in forms}


#: (dtype of an activation, form of its QuantizeLinear) -> its readers, between two such pairs, with which a model does
#: not load, does not run, or gives values more than 1 LSB off. A reader is an op; `op/weight` for a layer, by what its
#: weight is stored in; `op>` where anything but a QuantizeLinear follows. All others that were probed are right.
WRONG: Mapping[tuple[str, Form], frozenset[str]] = MappingProxyType(
    {
        **_each(("uint8",), ("output_dtype", "zero_point", "both"), _FLOAT_CONV | _FOREIGN),
        ("int8", "output_dtype"): _FLOAT_CONV | _KERNELS,
        ("int8", "zero_point"): _FLOAT_CONV | _FOREIGN | _PUSHED,
        ("int8", "both"): frozenset({EVERYTHING}),
        **_each(("uint16", "int16"), ("output_dtype", "zero_point", "both"), _FLOAT_CONV | _FLOAT_GEMM),
        **_each(_FOUR_BITS, ("output_dtype",), _EIGHT_BIT_CONV),
        **_each(_FOUR_BITS, ("zero_point", "both"), _EIGHT_BIT_CONV | _CLIPPED | _DROPPED),
        **_each(_TWO_BITS, ("output_dtype",), _NARROWEST),
        **_each(_TWO_BITS, ("zero_point", "both"), _NARROWEST | _FLOAT_GEMM | _CLIPPED | _ON_CODES),
        **_each(_FLOAT8, ("output_dtype",), _NARROWEST | _FLOAT_CONV | _FLOAT_GEMM),
    }
)


#: the same for pairs whose scales and floats are float16, beyond WRONG: its QLinearConcat takes float32 scales only
WRONG_FLOAT16: Mapping[tuple[str, Form], frozenset[str]] = MappingProxyType(
    _each(("uint8",), ("output_dtype", "zero_point", "both"), words("Concat"))
    | _each(("int8",), ("zero_point",), words("Concat"))
)


def is_wrong(reader: str, dtype: str, form: Form, *, float16: bool = False) -> bool:
    """Return True if the runtime must be kept from fusing a reader with the DequantizeLinear of an activation.

    Types other than 8 and 16 bits always get a barrier: combinations that were not probed are more likely wrong.
    """
    found = WRONG.get((dtype, form), frozenset())
    if float16:
        found |= WRONG_FLOAT16.get((dtype, form), frozenset())
    return dtype in NARROW or EVERYTHING in found or reader in found


def softmax_steps(scale: float) -> float:
    """Return by what the runtime's Softmax of 8 bits multiplies: the whole part of `1 / scale`, in float32."""
    return float(np.floor(np.float32(1.0) / np.float32(scale)))


def softmax_error(steps: float, scale: float, largest: float) -> float:
    """Return how far, in steps of a scale, a Softmax that multiplies by `steps` is off at most.

    `largest` is the largest code above the zero point.
    """
    return float(min(1.0 / scale, largest) * abs(steps * scale - 1.0))
