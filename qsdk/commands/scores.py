"""The commands that score a model: `qsdk evaluate` and `qsdk sensitivity`, on labels or by a metric of the user."""

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

from onnx_backend.proto.inputs import inputs_of
from onnx_backend.proto.model_io import load
from onnx_backend.proto.nodes import metadata
from onnx_backend.qdq.narrow_regions import is_anything_quantized
from onnx_backend.runtime.compare_runs import unloadable_message
from onnx_backend.runtime.feeds import DeclaredInput, as_feeds, run_session
from onnx_backend.runtime.user_session import EndedProcessError, UserSession, user_session
from onnx_backend.runtimes.qnn import QnnRunner
from onnx_backend.runtimes.registry import open_in
from onnx_backend.runtimes.runner import Runner
from onnx_backend.runtimes.validate import validate
from onnx_backend.sim import OnnxSim
from qsdk.commands.batches import Batch, FileBatches, batches_of_options, source_in_words
from qsdk.commands.data.labels import FOLDERS, folder_classes, read_labels, require_all_classes
from qsdk.commands.data.user_functions import load_function
from qsdk.commands.options import config_of
from qsdk.commands.printing import show
from qsdk.core.arrays import Array
from qsdk.core.errors import ConfigError, DataError, FileFormatError, ModelError
from qsdk.core.graph.graph import Graph
from qsdk.core.report import Report
from qsdk.core.site import owner_of
from qsdk.verbs.analysis.sensitivity import sensitivity
from qsdk.verbs.calibrate import calibrate
from qsdk.verbs.quantize import quantize

_SHOWN = 20  # classes in a summary
#: the outputs of a model, whole, and the labels, or None -> a number, larger being better
ScoreFunction = Callable[[list[Array], Array | None], float]


@dataclass(frozen=True)
class Scorer:
    """The scores that the options ask for, on their data.

    Attributes:
        data: the batches, and the files that they come from.
        functions: name -> score; the first is the one that searches use.
        labels: where the labels are, or None.
        of_classes: whether the scores read one value per class from the first output.
    """

    data: FileBatches | list[Batch]
    functions: Mapping[str, ScoreFunction]
    labels: str | None
    of_classes: bool = False

    @property
    def classes(self) -> str:
        """Return which folder is which class, in words; "" where folders are no classes."""
        if self.labels != FOLDERS:
            return ""
        named = [f"{place} = {name}" for name, place in folder_classes(self._folders).items()]
        return ", ".join(named[:_SHOWN] + ([f"... {len(named)} in all"] if len(named) > _SHOWN else []))

    @property
    def _folders(self) -> frozenset[str]:
        return self.data.folders if isinstance(self.data, FileBatches) else frozenset()

    @property
    def _paths(self) -> Sequence[Path]:
        return self.data.paths if isinstance(self.data, FileBatches) else ()

    def scores(self, run: Callable[[Any], Sequence[Any]], data: Iterable[Any] | None = None) -> dict[str, float]:
        """Return the scores, and the number of `samples`, of a model."""
        outputs = outputs_over(run, self.data if data is None else data)
        samples = len(outputs[0])
        labels = None if self.labels is None else read_labels(self.labels, self._paths, self._folders, samples)
        if self.labels == FOLDERS and self.of_classes and outputs[0].ndim > 1:
            require_all_classes(self._folders, outputs[0].size // samples)
        found = {name: _number(name, score(outputs, labels)) for name, score in self.functions.items()}
        return {**found, "samples": samples}

    def main(self, run: Callable[[Any], Sequence[Any]], data: Iterable[Any] | None = None) -> float:
        """Return the first score."""
        return self.scores(run, data)[next(iter(self.functions))]


def scorer_of_options(options: Namespace, data: FileBatches | list[Batch]) -> Scorer | None:
    """Return the scores that `--metric` or `--labels` ask for; None without either."""
    if options.metric:
        name = options.metric.rpartition(":")[2]
        return Scorer(data, {name: load_function(options.metric, "--metric")}, options.labels)
    if options.labels:
        return Scorer(data, {"top1": _top(1), "top5": _top(5)}, options.labels, of_classes=True)
    return None


def outputs_over(run: Callable[[Any], Sequence[Any]], data: Iterable[Any]) -> list[Array]:
    """Return the outputs over all batches, each along its first axis."""
    parts = [[np.asarray(output) for output in run(batch)] for batch in data]
    if not parts:
        raise DataError("the data holds no batch; give --data with samples")
    try:
        return [np.concatenate(part) for part in zip(*parts, strict=True)]
    except ValueError as error:
        raise DataError(f"the outputs of the batches do not join along their first axis: {error}") from error


def _top(count: int) -> ScoreFunction:
    """Return the share of samples whose label is among the `count` largest values of the first output."""

    def score(outputs: list[Array], labels: Array | None) -> float:
        """Return the share; see `_top`."""
        values = outputs[0].reshape(len(outputs[0]), -1) if outputs[0].ndim > 1 else outputs[0]
        if labels is None or values.ndim != 2 or labels.ndim != 1:
            raise DataError(
                f"top-1 needs one row of class scores per sample and one label, got {list(outputs[0].shape)}; "
                "give --metric FILE.py:function"
            )
        if labels.min() < 0 or labels.max() >= values.shape[1]:
            raise DataError(
                f"the labels reach from {labels.min():g} to {labels.max():g}, the classes from 0 to "
                f"{values.shape[1] - 1}; give the indices that the model was trained with"
            )
        best = np.argsort(-values, axis=1, kind="stable")[:, :count]
        return float((best == labels[:, None]).any(axis=1).mean())

    return score


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the metric {name} returns {str(value)[:40]!r}, which is no number") from error


def run_evaluate(options: Namespace) -> int:
    """Print the scores of a file, and of another beside it."""
    batches = batches_of_options(options, inputs_of(load(options.model)))
    scorer = scorer_of_options(options, batches)
    if scorer is None:
        raise ConfigError("nothing to score by: give --labels FILE, or --metric FILE.py:function")
    rows: list[dict[str, Any]] = []
    for path in filter(None, (options.model, options.against)):
        if options.runtime in (None, "onnxruntime"):
            rows.append({"model": path, **scorer.scores(partial(_run_batch, _session(path)))})
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
    """Refuse an integer-only file that takes or gives codes, which are neither data nor scores."""
    kept = metadata(model)
    edges = [value.name for value in (*model.graph.input, *model.graph.output)]
    codes = [name for name in edges if any(f"qsdk.{kind}.{name}.scale" in kept for kind in ("input", "output"))]
    if codes:
        raise ModelError(
            f"{path} takes and gives codes ({', '.join(codes)}), since it was written with --edges integer; score the "
            "same integers behind float edges: qsdk to-integer QDQ.onnx scored.onnx --edges float"
        )


def _run_batch(session: UserSession, batch: Any) -> list[Array]:
    return run_session(session, as_feeds(batch, session.get_inputs(), "the batch"), "the batch")


def run_sensitivity(options: Namespace) -> int:
    """Rank the layers; a float model is quantized by the config and calibrated on the data first."""
    model = load(options.model)
    data = batches_of_options(options, inputs_of(model))
    if is_anything_quantized(model):
        if options.config or options.override or options.skip:
            raise ConfigError(f"{options.model} is quantized already; leave out --config, --override and --skip")
        sim = quantize(options.model)
    else:
        config = config_of(options.config or "w8a8", options.override, options.skip)
        sim = quantize(options.model, next(iter(data), None), config)
        calibrate(sim, data)
    scorer = scorer_of_options(options, data)

    def metric(current: Any) -> float:
        return 0.0 if scorer is None else scorer.main(current.run)

    found = sensitivity(sim, data, metric=None if scorer is None else metric, exact=options.exact, seed=options.seed)
    show(_with_modules(found, sim), as_json=options.json)
    return 0


def _with_modules(report: Report, sim: OnnxSim) -> Report:
    """Return a report with the path of its module beside each layer, where a file that torch exported has other names.

    The layer keeps the name that it has in every report; patterns of `--override` and `--skip` match both.
    """
    paths = _module_paths(sim.graph)
    rows = [{"layer": row["layer"], "module": paths.get(row["layer"], ""), **row} for row in report.rows]
    changed = any(row["module"] not in ("", row["layer"]) for row in rows)
    return Report(report.title, rows, report.summary) if changed else report


def _module_paths(graph: Graph) -> dict[str, str]:
    """Return owner of a site -> path of the module whose op makes the tensor, or reads it where it is stored."""
    found: dict[str, str] = {}
    for op in graph.ops:
        for tensor in (*op.outputs, *(index for index in op.inputs if index is not None)):
            site = graph.tensors[tensor].site
            own = tensor in op.outputs or not (tensor in graph.producer or tensor in graph.inputs)
            if op.module and site is not None and own:
                found.setdefault(owner_of(site), op.module)
    return found
