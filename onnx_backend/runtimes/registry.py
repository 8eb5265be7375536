"""The one list of runtimes, which everything else asks by name."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

from onnx import ModelProto

from onnx_backend.profiling.kernels import Array, Profile, numbered, with_labels
from onnx_backend.proto.model_io import set_properties
from onnx_backend.proto.nodes import metadata
from onnx_backend.runtimes.described import described
from onnx_backend.runtimes.iree import IREE
from onnx_backend.runtimes.onnxruntime import ONNXRUNTIME
from onnx_backend.runtimes.openvino import OPENVINO
from onnx_backend.runtimes.qnn import QNN
from onnx_backend.runtimes.runner import Runner
from onnx_backend.runtimes.runtime import Prefer, Runtime
from onnx_backend.runtimes.tensorrt import TENSORRT
from qsdk.core.config.for_dialect import AnyDialect
from qsdk.core.config.target import Target, load_target
from qsdk.core.errors import ConfigError, DataError, FileFormatError, ModelError

#: the standard's own form, for any runtime that reads it
STANDARD = Runtime(
    load_target("onnx"), opens=True, pair_types=("float16", "bfloat16"), narrow_scales=True, single_ops=True
)
RUNTIMES: Mapping[str, Runtime] = MappingProxyType(
    {runtime.name: runtime for runtime in (ONNXRUNTIME, STANDARD, OPENVINO, QNN, IREE, TENSORRT)}
)
_EXPLICIT = "zero points"  # the form of files for described targets: as `Target.zero_points`, else as the standard
WRITTEN_KEY = "qsdk.written_for"  # property of a model: the form in which it was written, as JSON


def runtime_named(dialect: AnyDialect | Runtime) -> Runtime:
    """Return the runtime of a dialect, or that which a `.toml` file describes; a ConfigError if there is none."""
    if isinstance(dialect, Runtime):
        return dialect
    return RUNTIMES.get(str(dialect)) or described(load_target(dialect))


def note_form(model: ModelProto, runtime: Runtime, prefer: str) -> None:
    """Note in a model, in place, the dialect that it is written in, its version, and whether for speed or size."""
    facts = {"dialect": runtime.name, "version": runtime.version, "prefer": prefer}
    if runtime.name not in RUNTIMES:
        facts["form"] = _EXPLICIT if runtime.explicit else STANDARD.name
    set_properties(model, {WRITTEN_KEY: json.dumps({name: fact for name, fact in facts.items() if fact})})


def noted_form(model: ModelProto) -> tuple[Runtime, Prefer] | None:
    """Return the runtime that a model says it is written for, and whether for speed or size; None if it says nothing.

    A dialect that this version does not know is a FileFormatError.
    """
    text = metadata(model).get(WRITTEN_KEY)
    if text is None:
        return None
    try:
        facts: dict[str, Any] = json.loads(text)
        dialect, prefer, form = facts["dialect"], facts["prefer"], facts.get("form")
    except (ValueError, RecursionError, TypeError, KeyError):
        dialect = prefer = form = text
    if form in (_EXPLICIT, STANDARD.name):
        return described(Target(str(dialect), zero_points=form == _EXPLICIT)), cast("Prefer", prefer)
    if dialect not in RUNTIMES or prefer not in ("speed", "size"):
        raise FileFormatError(
            f"the property {WRITTEN_KEY} of the file is {text!r}, which this version of qsdk does not know; update "
            "qsdk, or export the file again"
        )
    return RUNTIMES[dialect], cast("Prefer", prefer)


def open_in(name: str, model: ModelProto, *, whole: bool = True) -> Runner:
    """Open a model, or a part of one, in a runtime.

    A part, whose inputs may lack a rank, is compiled for the sizes of the values that it is run on. A ConfigError if
    there is no such runtime, or it is not installed; a ModelError if it cannot compile the model.
    """
    runtime = RUNTIMES.get(name)
    if runtime is None or runtime.open is None:
        known = ", ".join(one.name for one in RUNTIMES.values() if one.open is not None)
        raise ConfigError(f"runtime={name!r} is unknown; choose one of {known}")
    return runtime.open(model) if whole or runtime.open_part is None else runtime.open_part(model)


def timed_runtime(name: str) -> Runtime:
    """Return a runtime whose times can be taken; a ConfigError if it is unknown, or only emulated."""
    runtime = RUNTIMES.get(name)
    if runtime is None or runtime.time is None:
        known = ", ".join(one.name for one in RUNTIMES.values() if one.time is not None)
        if runtime is not None and runtime.open is not None:
            raise ConfigError(
                f"the processor of runtime={name!r} is emulated here, and the time of an emulation says nothing about "
                f"the device; profile on the device itself with its own tools, or another runtime: {known}"
            )
        raise ConfigError(f"runtime={name!r} is unknown; choose one of {known}")
    return runtime


def profile(
    model: ModelProto, feeds: Mapping[str, Array], *, runtime: str, threads: int | None, repeats: int
) -> Profile:
    """Time a model in a runtime, kernel by kernel; each time is the median of the repeats."""
    time = timed_runtime(runtime).time
    assert time is not None
    if repeats < 1 or (threads is not None and threads < 1):
        raise ConfigError(f"threads={threads} and repeats={repeats} must be 1 or more")
    try:
        return time(numbered(model), feeds, threads, repeats)
    except (ModelError, DataError) as error:
        raise type(error)(with_labels(str(error), model)) from error
