"""Convert an opened Q/DQ model, measure the result, and write its files."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import onnxruntime as ort
from onnx import ModelProto

from onnx_backend.integer.convert import IntegerResult, convert
from onnx_backend.integer.decompose.prepare import prepare
from onnx_backend.integer.firmware.files import firmware_file, require_straight
from onnx_backend.integer.verify.measure import (
    add_op_parity,
    compare_runtimes,
    measure,
    measured_inputs,
    operations,
    run_teacher_forced,
)
from onnx_backend.passes.in_float32 import in_float32
from onnx_backend.passes.integer_cache import has_integer_cache
from onnx_backend.passes.static_sizes import propagate_static_sizes
from onnx_backend.proto import model_io
from onnx_backend.proto.inputs import noted_example, open_inputs, with_shapes
from onnx_backend.runtime.feeds import as_feeds
from onnx_backend.runtime.session import simulation_session
from qsdk.core.atomic_files import write_with_companions
from qsdk.core.errors import ConfigError, IntegerError, QsdkError
from qsdk.core.report import Report
from qsdk.progress import Progress, progress_of

Path = str | os.PathLike[str]
_PARTS = 4  # of the work


def write_integer(
    model: ModelProto,
    out: Path,
    *,
    allow_float: Sequence[str] = (),
    shapes: Mapping[str, Sequence[int]] | None = None,
    data: Iterable[Any] | None = None,
    firmware: Path | None = None,
    progress: bool = True,
    **options: Any,
) -> Report:
    """Convert a Q/DQ model, measure the result and write it with its certificate; `options` are those of `convert`.

    Float tensors of other types count as float32, also at the edges and in the measurement.
    """
    if has_integer_cache(model) and options.get("edges") != "integer":
        raise ConfigError(
            "the file takes and gives its cache as integers, and edges='float' would make it float again; pass "
            "edges='integer' for integers at all edges, or convert a file exported with cache='float'"
        )
    batches, model = None if data is None else _first(data), in_float32(model)
    with progress_of("to_integer", _PARTS, show=progress, unit="part") as bar:
        bar.now("convert")
        opened, result, fixed = _converted(model, batches, allow_float, shapes, options, straight=firmware is not None)
        inputs = measured_inputs(opened, result.model, batches)
        portable = options.get("target") == "portable"
        standard = convert(opened, **{**options, "target": "standard"}).model if portable else None
        bar.done()
        return _measured(opened, result, standard, inputs, out, firmware, fixed, bar)


def _first(data: Iterable[Any]) -> list[Any]:
    return list(islice(data, 1))


def _converted(
    model: ModelProto,
    batches: Sequence[Any] | None,
    allow_float: Sequence[str],
    shapes: Mapping[str, Sequence[int]] | None,
    options: Mapping[str, Any],
    *,
    straight: bool,
) -> tuple[ModelProto, IntegerResult, dict[str, Any]]:
    """Convert at fixed sizes (of the data, else of the example) where open ones prevent it; return these sizes too.

    A refusal is that of the fixed sizes, or states if fixed ones would help. `straight` refuses steps whose number is
    open, as fixed sizes do.
    """

    def attempt(sizes: Mapping[str, Sequence[int | None]]) -> tuple[ModelProto, IntegerResult]:
        opened = prepare(propagate_static_sizes(with_shapes(model, sizes) if sizes else model), allow_float)
        result = convert(opened, allow_float=allow_float, **options)
        if straight:
            require_straight(result)
        return opened, result

    try:
        return *attempt(shapes or {}), _facts(shapes, "shapes=") if shapes else {}
    except IntegerError as error:
        if shapes or not open_inputs(model):
            raise
        refused = error
    given, origin = (sizes_of(model, batches[0]), "data=") if batches else (sizes_of_example(model), "the example")
    for sizes in given:
        try:
            return *attempt(sizes), _facts(sizes, origin)
        except IntegerError as error:
            refused = error  # what is in the way at these sizes, without the complaints about open ones
    raise IntegerError(f"{refused}{'' if given else _hint(model, attempt, refused)}") from refused


def _facts(sizes: Mapping[str, Sequence[int | None]], origin: str) -> dict[str, Any]:
    """Return the sizes to which open ones were fixed, for report and certificate: the result accepts no others."""
    return {"fixed_shapes": {name: list(given) for name, given in sizes.items()}, "sizes_from": origin}


def _hint(model: ModelProto, attempt: Callable[[Mapping[str, Sequence[int]]], Any], refused: IntegerError) -> str:
    """Return how to fix the sizes of the inputs, if some refusal disappears at fixed ones."""
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
    opened: ModelProto,
    result: IntegerResult,
    standard: ModelProto | None,
    inputs: Mapping[str, Any],
    out: Path,
    firmware: Path | None,
    fixed: Mapping[str, Any],
    bar: Progress,
) -> Report:
    """Measure an integer-only model and write it with its companions."""
    edges, recorded = result.certificate["edges"], result.operations
    bar.now("run both models")
    exact, bounds = result.integers, result.bounds
    measured = measure(opened, result.model, inputs, edges=edges, reference=exact, operations=recorded, bounds=bounds)
    bar.done()
    bar.now("compare each operation")
    parity = run_teacher_forced(opened, result.model, result.sites, inputs) if edges == "float" else []
    measured |= operations(parity)
    bar.done()
    bar.now("write")
    certificate = {**result.certificate, **fixed, "measured": measured, "parity": parity}
    certificate["runtimes"] = _runtimes(result, standard, inputs)
    companions: dict[Any, Any] = {f"{os.fspath(out)}.certificate.json": json.dumps(certificate, indent=1) + "\n"}
    if firmware is not None:
        companions[firmware] = firmware_file(result, firmware)
    write_with_companions(out, model_io.serialize(result.model), companions)
    bar.done()
    summary = {**result.report.summary, **measured, **fixed}
    if standard is not None:
        summary["same_integers_on"] = _in_words(certificate["runtimes"])
    return Report(result.report.title, add_op_parity(result.report.rows, parity), summary)


def _runtimes(result: IntegerResult, standard: ModelProto | None, inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the runtimes that gave the integers of the reference on the inputs of the measurement."""
    if standard is not None:
        return compare_runtimes(result.model, standard, inputs)
    return [{"runtime": "onnxruntime", "version": ort.__version__, "equal": True}] if result.integers else []


def _in_words(runtimes: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{row['runtime']} {row['version']}" for row in runtimes if row["equal"])


# --- sizes of open axes, where the conversion needs them --------------------------------------------------------------


_FIRST, _TRIAL = 2, (16, 32)  # sizes of a first axis and of others with which a refusal is tried again


def sizes_of(model: ModelProto, batch: Any) -> list[dict[str, list[int | None]]]:
    """Return the sizes of a batch for inputs with open axes: with the first axes left open, and all fixed."""
    feeds = as_feeds(batch, simulation_session(model).get_inputs(), "batch 0 of data=")
    return _in_turn(open_inputs(model), {name: value.shape for name, value in feeds.items()})


def sizes_of_example(model: ModelProto) -> list[dict[str, list[int | None]]]:
    """Return the sizes of the example that a model was quantized with, as `sizes_of`; none if the file has none."""
    found = noted_example(model)
    return _in_turn(open_inputs(model), found) if found else []


def _in_turn(
    wanted: Mapping[str, Sequence[int | None]], found: Mapping[str, Sequence[int]]
) -> list[dict[str, list[int | None]]]:
    given: dict[str, list[int | None]] = {name: [int(n) for n in found[name]] for name in wanted if name in found}
    first = {name: [wanted[name][0], *sizes[1:]] for name, sizes in given.items()}
    return [first, given] if first != given else [given]


def trial_sizes(model: ModelProto) -> Iterator[dict[str, list[int]]]:
    """Yield sizes that a model may accept: open axes of the same name are equal."""
    for size in _TRIAL:
        yield {
            name: [known or (_FIRST if axis == 0 else size) for axis, known in enumerate(sizes)]
            for name, sizes in open_inputs(model).items()
        }


def in_words(sizes: Mapping[str, Sequence[int | None]]) -> tuple[str, str]:
    """Return sizes in the form of `shapes=` and of `--shape`, `?` for an open one."""
    texts = {name: ["?" if size is None else str(size) for size in given] for name, given in sizes.items()}
    call = ", ".join(f'"{name}": ({", ".join(given)})' for name, given in texts.items())
    return f"shapes={{{call}}}", " ".join(f"--shape {name}={','.join(given)}" for name, given in texts.items())
