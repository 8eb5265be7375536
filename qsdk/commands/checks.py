"""The commands that compare and time files: `qsdk parity`, `qsdk compare` and `qsdk profile`."""

import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onnx_backend.data_passes.session_parity import check_session
from onnx_backend.proto.inputs import inputs_of
from onnx_backend.proto.model_io import load
from onnx_backend.qdq.narrow_regions import NOTHING_QUANTIZED, is_anything_quantized
from onnx_backend.sim import OnnxSim
from qsdk.commands.batches import batches_of_options
from qsdk.commands.printing import show
from qsdk.core.errors import ConfigError, ModelError
from qsdk.verbs.analysis.compare import compare
from qsdk.verbs.analysis.profile import profile
from qsdk.verbs.export import check_parity
from qsdk.verbs.qdq_files import checked_qdq, opened_qdq


def run_parity(options: Namespace) -> int:
    """Compare a Q/DQ file in a session with its simulation, or with another file's; return 1 where they differ."""
    model = load(options.model)
    checked_qdq(load(model), options.model)  # raises an error for an invalid file, or the encodings file of another
    _require_comparable(options)
    if not is_anything_quantized(model):
        raise ModelError(f"{options.model}: {NOTHING_QUANTIZED}")
    inputs = inputs_of(model)
    data = batches_of_options(options, inputs)
    if options.runtime:
        opened = opened_qdq(options.model)
        report = check_parity(OnnxSim.from_qdq(load(opened)), opened, data, runtime=options.runtime)
    elif options.against:
        report = check_parity(OnnxSim.from_qdq(opened_qdq(options.against)), model, data)
    else:
        report = check_session(
            model,
            data,
            level=options.level,
            entries=dict(options.entry),
            progress=sys.stderr.isatty() and not options.json,
            least_sqnr_db=options.min_sqnr,
            least_float_sqnr_db=options.min_float_sqnr,
            float_model=load(options.float) if options.float else None,
        )
    show(report, as_json=options.json)
    return 0 if report.summary["passed"] else 1


def _require_comparable(options: Namespace) -> None:
    """Raise an error for a limit without anything to compare with."""
    if options.min_float_sqnr is not None and not options.float:
        raise ConfigError("--min-float-sqnr gates the distance from the float model; name it with --float FILE")
    given = [f"--{name}" for name in ("float", "min-sqnr") if getattr(options, name.replace("-", "_")) is not None]
    if options.runtime and (options.against or given):
        raise ConfigError(
            f"--runtime compares with the file's own simulation; leave out {given[0] if given else '--against'}"
        )
    if options.against and given:
        raise ConfigError(f"--against compares two simulations, without a session; leave out {', '.join(given)}")


def run_compare(options: Namespace) -> int:
    """Compare both sides; return 1 where a tensor is off."""
    report = compare(
        options.a,
        options.b,
        _batches(options),
        names=dict(options.name),
        tolerance=options.tolerance,
    )
    show(report, as_json=options.json)
    return 0 if report.summary["first_off"] is None else 1


def _batches(options: Namespace) -> Iterator[Any] | None:
    """Return the batches by the names of the first file's inputs, or in their order where those of the other differ."""
    files = [path for path in (options.a, options.b) if not Path(path).is_dir()]
    if not files or not (options.data or options.random):
        return None
    inputs = [inputs_of(load(path)) for path in files]
    names = [[item.name for item in items] for items in inputs]
    batches = batches_of_options(options, inputs[0])
    same = all(sorted(known) == sorted(names[0]) for known in names)
    return (batch if same else tuple(batch[name] for name in names[0]) for batch in batches)


def run_profile(options: Namespace) -> int:
    """Time a model, on the first batch of the data or on random values."""
    model = load(options.model)
    data = batches_of_options(options, inputs_of(model)) if options.data or options.random else None
    report = profile(
        model,
        data,
        runtime=options.runtime,
        threads=options.threads,
        repeats=options.repeats,
        shapes=dict(options.shape),
        against=options.against,
    )
    show(report, as_json=options.json)
    return 0
