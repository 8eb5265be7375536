"""The verb on time: which layer takes how many milliseconds in a runtime, in integers or in float."""

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack, get_args

from onnx import ModelProto

from onnx_backend.profiling.kernels import Precision, Profile
from onnx_backend.profiling.profile import cures_of, random_feeds_for, rows_of
from onnx_backend.proto import graph_queries, model_io
from onnx_backend.runtime.feeds import DeclaredInput, as_feeds, batches_of
from onnx_backend.runtimes import registry
from qsdk.core.config.for_dialect import AnyDialect, TimedRuntime
from qsdk.core.report import Report
from qsdk.core.run_options import ProgressOptions, run_of
from qsdk.progress import bar
from qsdk.verbs.doors.choose import Sim
from qsdk.verbs.export import export
from qsdk.verbs.qdq_files import OnnxSource

_NOISY = 0.3  # of the median, between runs of the same model on the same values


def profile(
    model: OnnxSource | Sim,
    data: Iterable[Any] | None = None,
    *,
    runtime: TimedRuntime = "onnxruntime",
    threads: int | None = None,
    repeats: int = 20,
    shapes: Mapping[str, Sequence[int]] | None = None,
    against: OnnxSource | None = None,
    **options: Unpack[ProgressOptions],
) -> Report:
    """Time a model in a runtime as an application runs it: by layer, after the runtime's own fusions.

    One row per kernel that the runtime runs, the slowest first. A kernel may stand for several nodes of the file, and a
    node for none; what a runtime inserts itself (a Transpose to another layout) counts for the layer that reads it.

    Args:
        model: float, with Q/DQ or integer-only: a path or an onnx model. A calibrated sim is exported first.
        data: batches, of which the first is run; None for random values.
        runtime: `onnxruntime` or `openvino`, on the CPU.
        threads: that the runtime may use; None for its own choice.
        repeats: runs that are timed, after a few that are not. Times of kernels are medians in ONNX Runtime, means in
            OpenVINO, which counts no single runs.
        shapes: input name -> all of its sizes, for open axes without data. Else an open batch is 1, and other axes are
            as in the example of `quantize`.
        against: a model to compare with, such as the float one; it gets the same inputs, in order.
        options: `progress`; see `qsdk.options`.

    Returns:
        Rows `layer`, `op_type` (as executed), `ms`, `share` (of all kernels), `precision` (`integer`, `float`,
        `conversion` between the two or of the layout, `index` for arithmetic on sizes), `nodes` of the file. Summary:
        `ms` (median of whole runs, without the profiler), `spread` (of the middle eight tenths, over `ms`; `noisy` is
        a remark beyond 0.3), the shares by precision, `runtime`, `threads`, `against_ms` and `speedup`; `cures`, where
        ONNX Runtime computes in floats for nothing: `ms` of those kernels, `finding`, `cure` (lines for the config).

    Raises:
        ConfigError: the runtime is unknown, not installed or only emulated; an open axis without a size.
        DataError: data that the model does not take.
        ModelError: the runtime cannot load the model.
        CalibrationError: the sim is not calibrated.

    Examples:
        >>> import torch, qsdk
        >>> sim = qsdk.quantize(torch.nn.Linear(4, 2), torch.randn(8, 4))
        >>> _ = qsdk.calibrate(sim, [torch.randn(8, 4)], progress=False)
        >>> report = qsdk.analysis.profile(sim, threads=1, progress=False)
        >>> sorted({row["layer"] for row in report.rows})
        ['input', 'self']
    """
    run = run_of(profile, options)
    file = model_to_run(model, runtime)
    feeds = _first_feeds(file, data) if data is not None else random_feeds_for(file, shapes or {})
    times = []
    for timed in bar(
        [file, *([] if against is None else [model_io.load(against)])], "profile", disable=not run.progress
    ):
        fed = feeds if timed is file else _as_feeds(tuple(feeds.values()), timed, "the input of the profiled model")
        times.append(registry.profile(timed, fed, runtime=runtime, threads=threads, repeats=repeats))
    rows = sorted(rows_of(file, times[0]), key=lambda row: -row["ms"])
    summary = {"ms": times[0].ms, "spread": times[0].spread, **_noise_of(times), **_shares(rows)}
    summary |= {"runtime": times[0].title, "threads": threads or "default", "repeats": repeats}
    if cures := cures_of(file, times[0]):
        summary["cures"] = cures
    if against is not None:
        summary |= {"against_ms": times[1].ms, "speedup": times[1].ms / times[0].ms}
    return Report("Where the time goes", rows, summary)


def _noise_of(times: Sequence[Profile]) -> dict[str, str]:
    """Return a remark where runs of one of the models differ so much that its times say little."""
    worst = max(times, key=lambda one: one.spread)
    if worst.spread <= _NOISY:
        return {}
    low, high = worst.ends
    return {
        "noisy": f"the times are noisy: eight of ten runs took {low:.3g} to {high:.3g} ms, since other programs run or "
        "the processor changes its speed; measure again while nothing else runs, with more repeats"
    }


def ms_by_layer(report: Report) -> dict[str, float]:
    """Return layer -> the milliseconds of its kernels, from a report of `profile`."""
    found: dict[str, float] = {}
    for row in report.rows:
        found[row["layer"]] = found.get(row["layer"], 0.0) + row["ms"]
    return found


def _shares(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the share of the kernels of each precision."""
    kinds = get_args(Precision)
    return {f"{kind}_share": sum(row["share"] for row in rows if row["precision"] == kind) for kind in kinds}


def model_to_run(source: OnnxSource | Sim, runtime: str) -> ModelProto:
    """Return the model that an application runs: the file, or what is exported of a calibrated sim for a runtime."""
    if isinstance(source, str | os.PathLike | ModelProto):
        return model_io.load(source)
    return exported(source, registry.timed_runtime(runtime).name, check=False)[0]


def exported(
    sim: Sim, dialect: AnyDialect, prefer: Literal["speed", "size"] = "speed", *, check: bool = True
) -> tuple[ModelProto, Report]:
    """Return what is exported of a calibrated sim, and the report on it."""
    with tempfile.TemporaryDirectory(prefix="qsdk-") as folder:
        path = Path(folder) / "model.onnx"
        report = export(sim, path, dialect=dialect, prefer=prefer, check=check)
        return model_io.with_weights(model_io.load(path)), report


def _first_feeds(model: ModelProto, data: Iterable[Any]) -> dict[str, Any]:
    """Return the first batch; the others are not read."""
    _, batch = next(batches_of(data, "profile", progress=False))
    return _as_feeds(batch, model, "the first batch")


def _as_feeds(batch: Any, model: ModelProto, where: str) -> dict[str, Any]:
    fed = set(graph_queries.input_names(model.graph))
    return as_feeds(batch, [DeclaredInput(value) for value in model.graph.input if value.name in fed], where)
