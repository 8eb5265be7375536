"""The dialects in which a model can be written: one per runtime, and `onnx`, the standard's own form."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, cast

from onnx import ModelProto

from onnx_backend.proto.model_io import set_properties
from onnx_backend.proto.nodes import metadata
from qsdk.core.errors import ConfigError, FileFormatError
from qsdk.core.numerics.dtypes import DType

Dialect = Literal["onnxruntime", "onnx", "openvino", "qnn", "tensorrt"]
Form = Literal["output_dtype", "zero_point", "both"]
Prefer = Literal["speed", "size"]
WRITTEN_KEY = "qsdk.written_for"  # property of a model: the form in which it was written, as JSON


@dataclass(frozen=True)
class Writing:
    """The form in which a dialect writes a model.

    Attributes:
        measured: the version of the runtime that the form was measured on; "" for none.
        explicit: every QuantizeLinear and DequantizeLinear has a zero point, none an `output_dtype`; for runtimes that
            do not know the attribute, one of which computes in floats, or takes unsigned 8 bits for signed ones.
        for_onnxruntime: the nodes that keep ONNX Runtime's CPU kernels right are added (barriers, casts).
        clipped: activation types whose values are clipped to the grid in front of the QuantizeLinear, because the
            runtime removes the pair, and with it the bounds.
        fixed_sizes: the runtime compiles for one size of every input.
        off_codes: operators that the runtime would compute wrong on codes have a node in front that keeps it from that.
        quantized_numbers: a number beside a quantized activation is written as one code and a scale.
    """

    measured: str = ""
    explicit: bool = False
    for_onnxruntime: bool = False
    clipped: frozenset[str] = frozenset()
    fixed_sizes: bool = False
    off_codes: bool = False
    quantized_numbers: bool = False


WRITING: Mapping[str, Writing] = MappingProxyType(
    {
        "onnxruntime": Writing("1.32", for_onnxruntime=True),
        "onnx": Writing(),
        "openvino": Writing("2026.4", clipped=frozenset({"uint16", "int16"}), off_codes=True),
        "qnn": Writing("2.7", explicit=True, fixed_sizes=True, quantized_numbers=True),
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


def note_form(model: ModelProto, dialect: str, prefer: str) -> None:
    """Note in a model, in place, the dialect that it is written in, its version, and whether for speed or size."""
    facts = {"dialect": dialect, "version": writing_of(dialect).measured, "prefer": prefer}
    set_properties(model, {WRITTEN_KEY: json.dumps({name: fact for name, fact in facts.items() if fact})})


def noted_form(model: ModelProto) -> tuple[Dialect, Prefer] | None:
    """Return the dialect that a model says it is written in, and what for; None where it says nothing.

    Raises:
        FileFormatError: it names a dialect that this version does not know.
    """
    text = metadata(model).get(WRITTEN_KEY)
    if text is None:
        return None
    try:
        facts: dict[str, Any] = json.loads(text)
        dialect, prefer = facts["dialect"], facts["prefer"]
    except (ValueError, RecursionError, TypeError, KeyError):
        dialect = prefer = text
    if dialect not in WRITING or prefer not in ("speed", "size"):
        raise FileFormatError(
            f"the property {WRITTEN_KEY} of the file is {text!r}, which this version of qsdk does not know; update "
            "qsdk, or export the file again"
        )
    return cast("Dialect", dialect), cast("Prefer", prefer)
