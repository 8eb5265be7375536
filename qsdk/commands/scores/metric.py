"""Scores of a model's outputs: top-1, top-5, or a function of the user."""

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qsdk.commands.batches import Batch, FileBatches
from qsdk.commands.data.labels import FOLDERS, folder_classes, read_labels, require_all_classes
from qsdk.commands.data.user_functions import load_function
from qsdk.core.errors import ConfigError, DataError

Array = npt.NDArray[Any]
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
        """Return the scores, and the number of `samples`, of a model.

        Args:
            run: returns the outputs for a batch.
            data: the same batches in the form that `run` takes; None for arrays by input name.

        Raises:
            ConfigError: a score is no number.
            DataError: the labels do not fit the data, or the outputs are no scores of classes.
        """
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
    """Return the outputs over all batches, each along its first axis.

    Raises:
        DataError: there is no batch, or an output has no such axis, or other sizes in each batch.
    """
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
