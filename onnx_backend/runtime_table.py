"""What the installed ONNX Runtime loads at its default level, and the form of QuantizeLinear that follows from it.

The table is measured (onnxruntime 1.31, CPU, opset 21); `tests/test_qdq.py` derives a part of it again.
"""

from types import MappingProxyType
from typing import Literal

from qsdk.core.dtypes import DType
from qsdk.core.errors import ConfigError

Dialect = Literal["onnxruntime", "onnx"]
Form = Literal["output_dtype", "zero_point", "both"]

_QLINEAR = ("Add", "Mul", "Concat", "Sigmoid", "LeakyRelu", "GlobalAveragePool", "AveragePool")
_OPS = ("Conv", "MatMul", "Gemm", "MaxPool", "Relu", *_QLINEAR)

#: (op, activation dtype, form) -> loads at the default level; a key that is absent was not measured.
LOADS = MappingProxyType(
    {
        **{
            (op, dtype, form): True
            for op in _OPS
            for dtype in ("uint8", "uint16", "int16")
            for form in ("output_dtype", "zero_point", "both")
        },
        **{(op, "int8", "zero_point"): True for op in _OPS},
        # the runtime's S8-to-U8 rewrite forgets the attribute
        **{(op, "int8", "output_dtype"): op not in _QLINEAR for op in _OPS},
        **{(op, "int8", "both"): False for op in ("Conv", "MatMul", "Gemm", *_QLINEAR)},
    }
)


def form_of(dtype: DType, symmetric: bool, dialect: Dialect) -> Form:
    """How a QuantizeLinear of an activation says its type: by attribute, by zero point, or by both.

    Args:
        dtype: of the activation; its container decides.
        symmetric: whether every zero point is 0.
        dialect: `onnx` writes the attribute everywhere; `onnxruntime` gives way where the runtime cannot load it.

    Raises:
        ConfigError: there is no such dialect.
    """
    if dialect not in ("onnxruntime", "onnx"):
        raise ConfigError(f"unknown dialect {dialect!r}; choose 'onnxruntime' or 'onnx'")
    if dialect == "onnxruntime" and dtype.container == "int8":
        return "zero_point"
    return "output_dtype" if symmetric else "both"
