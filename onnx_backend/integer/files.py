"""From an opened Q/DQ model to the files of an integer-only one: converted, measured, written."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from onnx import ModelProto

from onnx_backend import model as onnx_model
from onnx_backend.integer.convert import IntegerResult, convert
from onnx_backend.integer.firmware.files import firmware_file
from onnx_backend.integer.fixed_shapes import with_shapes
from onnx_backend.integer.preparing.prepare import prepared
from onnx_backend.integer.proof.forced import operations, teacher_forced, with_parity
from onnx_backend.integer.proof.measure import measure, measured_inputs
from qsdk.core.files import write_with_companions
from qsdk.core.report import Report

Path = str | os.PathLike[str]


def write_integer(
    model: ModelProto,
    out: Path,
    *,
    allow_float: Sequence[str] = (),
    shapes: Mapping[str, Sequence[int]] | None = None,
    data: Iterable[Any] | None = None,
    firmware: Path | None = None,
    **options: Any,
) -> Report:
    """Convert a Q/DQ model, measure the result and write it with its certificate; `options` are those of `convert`.

    Raises:
        IntegerError: lists every node that has no integer form, with its reason and remedy.
        ConfigError: an option or shapes that do not exist.
    """
    opened = prepared(with_shapes(model, shapes) if shapes else model, allow_float)
    result = convert(opened, allow_float=allow_float, **options)
    return _measured(opened, result, measured_inputs(opened, result.model, data), out, firmware)


def _measured(
    opened: ModelProto, result: IntegerResult, inputs: Mapping[str, Any], out: Path, firmware: Path | None
) -> Report:
    """Measure an integer-only model and write it with its companions."""
    edges, recorded = result.certificate["edges"], result.operations
    measured = measure(opened, result.model, inputs, edges=edges, reference=result.integers, operations=recorded)
    parity = teacher_forced(opened, result.model, result.sites, inputs) if edges == "float" else []
    measured |= operations(parity)
    certificate = {**result.certificate, "measured": measured, "parity": parity}
    companions: dict[Any, Any] = {f"{os.fspath(out)}.certificate.json": json.dumps(certificate, indent=1) + "\n"}
    if firmware is not None:
        companions[firmware] = firmware_file(result, firmware)
    write_with_companions(out, onnx_model.serialized(result.model), companions)
    return Report(result.report.title, with_parity(result.report.rows, parity), {**result.report.summary, **measured})
