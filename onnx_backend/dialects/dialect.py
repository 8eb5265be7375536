"""The dialects in which a model can be written: one per runtime, and `onnx`, the standard's own form."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from qsdk.core.errors import ConfigError
from qsdk.core.numerics.dtypes import DType

Dialect = Literal["onnxruntime", "onnx", "openvino", "qnn", "tensorrt"]
Form = Literal["output_dtype", "zero_point", "both"]


@dataclass(frozen=True)
class Writing:
    """The form in which a dialect writes a model.

    Attributes:
        explicit: every QuantizeLinear and DequantizeLinear has a zero point, none an `output_dtype`; for runtimes that
            do not know the attribute, one of which computes in floats, or takes unsigned 8 bits for signed ones.
        for_onnxruntime: the nodes that keep ONNX Runtime's CPU kernels right are added (barriers, casts).
        clipped: activation types whose values are clipped to the grid in front of the QuantizeLinear, because the
            runtime removes the pair, and with it the bounds.
        fixed_sizes: the runtime compiles for one size of every input.
        off_codes: operators that the runtime would compute wrong on codes have a node in front that keeps it from that.
        quantized_numbers: a number beside a quantized activation is written as one code and a scale.
    """

    explicit: bool = False
    for_onnxruntime: bool = False
    clipped: frozenset[str] = frozenset()
    fixed_sizes: bool = False
    off_codes: bool = False
    quantized_numbers: bool = False


WRITING: Mapping[str, Writing] = MappingProxyType(
    {
        "onnxruntime": Writing(for_onnxruntime=True),
        "onnx": Writing(),
        "openvino": Writing(clipped=frozenset({"uint16", "int16"}), off_codes=True),
        "qnn": Writing(explicit=True, fixed_sizes=True, quantized_numbers=True),
        "tensorrt": Writing(explicit=True),
    }
)


def writing_of(dialect: str) -> Writing:
    """Return the form in which a dialect writes.

    Raises:
        ConfigError: there is no such dialect.
    """
    if dialect not in WRITING:
        raise ConfigError(f"unknown dialect {dialect!r}; choose one of {', '.join(WRITING)}")
    return WRITING[dialect]


def form_of(dtype: DType, symmetric: bool, dialect: Dialect) -> Form:
    """Return how a QuantizeLinear of an activation states its type: by attribute, by zero point, or by both.

    Args:
        dtype: of the activation; its container decides.
        symmetric: True if every zero point is 0.
        dialect: `onnx` writes the attribute everywhere; others give way to what their runtime reads.

    Raises:
        ConfigError: there is no such dialect.
    """
    writing = writing_of(dialect)
    if writing.explicit or (writing.for_onnxruntime and dtype.container == "int8"):
        return "zero_point"
    return "output_dtype" if symmetric else "both"
