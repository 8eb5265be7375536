"""`qsdk evaluate`: how good a file is, float, with Q/DQ or integer-only, in ONNX Runtime or another runtime."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy.typing as npt
from onnx import ModelProto

from onnx_backend.proto.inputs import inputs_of
from onnx_backend.proto.model_io import load
from onnx_backend.proto.nodes import metadata
from onnx_backend.runtime.compare_runs import unloadable_message
from onnx_backend.runtime.feeds import DeclaredInput, as_feeds, run_session
from onnx_backend.runtime.user_session import EndedProcessError, UserSession, user_session
from onnx_backend.runtimes.qnn import QnnRunner
from onnx_backend.runtimes.registry import open_in
from onnx_backend.runtimes.runner import Runner
from onnx_backend.runtimes.validate import validate
from qsdk.commands.batches import batches_of_options, source_in_words
from qsdk.commands.printing import show
from qsdk.commands.scores.metric import Scorer, scorer_of_options
from qsdk.core.errors import ConfigError, FileFormatError, ModelError
from qsdk.core.report import Report


def run(options: Namespace) -> int:
    """Print the scores of a file, and of another beside it.

    Raises:
        ConfigError: neither labels nor a metric are given.
        ModelError: a file takes or gives codes, or the runtime cannot compile or run it.
    """
    batches = batches_of_options(options, inputs_of(load(options.model)))
    scorer = scorer_of_options(options, batches)
    if scorer is None:
        raise ConfigError("nothing to score by: give --labels FILE, or --metric FILE.py:function")
    rows: list[dict[str, Any]] = []
    for path in filter(None, (options.model, options.against)):
        if options.runtime in (None, "onnxruntime"):
            rows.append({"model": path, **scorer.scores(partial(_run, _session(path)))})
        else:
            rows.append({"model": path, **_scores_in(options.runtime, path, scorer)})
    name = next(iter(scorer.functions))
    summary = {"metric": name, name: rows[0][name], "data": source_in_words(options, batches)}
    summary |= {"classes": scorer.classes} if scorer.classes else {}
    summary |= {"runtime": options.runtime} if options.runtime else {}
    if options.against:
        summary |= {"against": rows[1][name], "drop": rows[1][name] - rows[0][name]}
    show(Report("Scores", rows, summary), as_json=options.json)
    return 0


def _session(path: str) -> UserSession:
    """Open a session with the runtime's own settings, as an application would."""
    model = load(path)
    _require_float_edges(model, path)
    try:
        return user_session(model)
    except (EndedProcessError, RuntimeError) as error:
        raise FileFormatError(unloadable_message(path, error)) from error


def _scores_in(runtime: str, path: str, scorer: Scorer) -> dict[str, Any]:
    """Return the scores of a file in a runtime other than ONNX Runtime's CPU, and what it misreads or leaves out."""
    model = load(path, whole=True)
    _require_float_edges(model, path)
    runner = open_in(runtime, model)
    row: dict[str, Any] = scorer.scores(_in_runtime(runner, model))
    errors = validate(model, dialect=runtime).summary["errors"]
    if errors:
        row["misread"] = f"{errors} errors of qsdk validate {path} --dialect {runtime}"
    if isinstance(runner, QnnRunner) and runner.fell_back():
        row["on_cpu"] = ", ".join(sorted({op_type for _, op_type in runner.fell_back()}))
    return row


def _in_runtime(runner: Runner, model: ModelProto) -> Callable[[Any], Sequence[Any]]:
    stored = {tensor.name for tensor in model.graph.initializer}
    inputs = [DeclaredInput(value) for value in model.graph.input if value.name not in stored]
    return lambda batch: runner.run(as_feeds(batch, inputs, "the batch"))


def _require_float_edges(model: ModelProto, path: str) -> None:
    """Refuse an integer-only file that takes or gives codes, which are neither data nor scores.

    Raises:
        ModelError: names the edges.
    """
    kept = metadata(model)
    edges = [value.name for value in (*model.graph.input, *model.graph.output)]
    codes = [name for name in edges if any(f"qsdk.{kind}.{name}.scale" in kept for kind in ("input", "output"))]
    if codes:
        raise ModelError(
            f"{path} takes and gives codes ({', '.join(codes)}), since it was written with --edges integer; score the "
            "same integers behind float edges: qsdk to-integer QDQ.onnx scored.onnx --edges float"
        )


def _run(session: UserSession, batch: Any) -> list[npt.NDArray[Any]]:
    return run_session(session, as_feeds(batch, session.get_inputs(), "the batch"), "the batch")
