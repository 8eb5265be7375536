"""From an opened Q/DQ model to the files of an integer-only one: converted, measured, written."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from onnx import ModelProto

from onnx_backend import model as onnx_model
from onnx_backend.integer.convert import IntegerResult, convert
from onnx_backend.integer.firmware.files import firmware_file
from onnx_backend.integer.fixed_shapes import with_shapes
from onnx_backend.integer.preparing.decided_sizes import with_decided_sizes
from onnx_backend.integer.preparing.prepare import prepared
from onnx_backend.integer.preparing.sizes_of_data import in_words, open_inputs, sizes_of, trial_sizes
from onnx_backend.integer.proof.forced import operations, teacher_forced, with_parity
from onnx_backend.integer.proof.measure import measure, measured_inputs
from qsdk.core.errors import IntegerError, QsdkError
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
    batches = None if data is None else _first(data)
    opened, result, fixed = _converted(model, batches, allow_float, shapes, options)
    report = _measured(opened, result, measured_inputs(opened, result.model, batches), out, firmware)
    return Report(report.title, report.rows, {**report.summary, "fixed_shapes": fixed}) if fixed else report


def _first(data: Iterable[Any]) -> list[Any]:
    return list(islice(data, 1))


def _converted(
    model: ModelProto,
    batches: Sequence[Any] | None,
    allow_float: Sequence[str],
    shapes: Mapping[str, Sequence[int]] | None,
    options: Mapping[str, Any],
) -> tuple[ModelProto, IntegerResult, dict[str, list[int | None]]]:
    """Convert, at the sizes of the data where open ones are in the way; a refusal says whether sizes would help."""

    def attempt(sizes: Mapping[str, Sequence[int | None]]) -> tuple[ModelProto, IntegerResult]:
        opened = prepared(with_decided_sizes(with_shapes(model, sizes) if sizes else model), allow_float)
        return opened, convert(opened, allow_float=allow_float, **options)

    try:
        return *attempt(shapes or {}), {}
    except IntegerError as error:
        if shapes or not open_inputs(model):
            raise
        refused = error
    for sizes in sizes_of(model, batches[0]) if batches else ():
        with suppress(IntegerError):
            return *attempt(sizes), {name: list(given) for name, given in sizes.items()}
    raise IntegerError(refused.args[0] + (_hint(model, attempt, refused) if not batches else "")) from refused


def _hint(model: ModelProto, attempt: Callable[[Mapping[str, Sequence[int]]], Any], refused: IntegerError) -> str:
    """Say how to fix the sizes of the inputs, if some refusal goes away at fixed ones."""
    for sizes in trial_sizes(model):
        try:
            attempt(sizes)
        except IntegerError as error:
            if set(str(refused).splitlines()[1:]) <= set(str(error).splitlines()):
                continue  # each of them stays
        except QsdkError:
            continue  # no sizes that the model takes
        call, command = in_words(open_inputs(model))
        return (
            f"\nat fixed sizes there is less in the way: to_integer(..., {call}) with a number for each ?, or "
            f"data=[batch], whose sizes it takes; at the command line {command}"
        )
    return ""


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
