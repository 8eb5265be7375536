"""The verb `calibrate`, and data as training code has it, made into what verbs take."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Unpack

from qsdk.algorithms.ranks import all_gather
from qsdk.core.errors import ConfigError, DataError
from qsdk.core.ranges.estimators import PERCENTILE, CalibrationMethod
from qsdk.core.report import Report
from qsdk.core.run_options import DataOptions, run_of
from qsdk.core.sims.biases import without_shifts
from qsdk.core.sims.stateful import require_sim
from qsdk.verbs.doors.choose import Sim, door_of

LABELS = frozenset({"labels", "label", "target", "targets"})


@dataclass(frozen=True)
class InputsOnly:
    """Batches without labels, taken from the user's at every iteration again."""

    batches: Iterable[Any]
    names: frozenset[str] | None
    count: int | None

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]  # of a DataLoader; without one, len() fails as it should

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            yield self._inputs(batch)

    def _inputs(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            kept = self.names if self.names is not None else frozenset(batch) - LABELS
            return {name: value for name, value in batch.items() if name in kept}
        if isinstance(batch, tuple | list):
            count = self.count if self.count is not None else max(len(batch) - 1, 1)
            return tuple(batch[:count])
        return batch


def inputs_only(data: Iterable[Any], sim: Any = None) -> InputsOnly:
    """Return the batches of a DataLoader without their labels, as every verb takes them.

    Of a mapping, `labels`, `label`, `target` and `targets` are dropped; of a tuple, the last element. With a sim, what
    its model does not take is.

    Args:
        data: batches; iterated anew each time.
        sim: of either side, which tells the inputs.

    Raises:
        DataError: one batch in place of an iterable of them.
        ConfigError: `sim` is no sim.

    Examples:
        >>> import qsdk
        >>> list(qsdk.inputs_only([("picture", 3), ("another", 5)]))
        [('picture',), ('another',)]
        >>> list(qsdk.inputs_only([{"ids": [1, 2], "labels": [0]}]))
        [{'ids': [1, 2]}]
    """
    if isinstance(data, Mapping) or hasattr(data, "shape"):
        raise DataError("data must be an iterable of batches, got one batch; wrap it in a list: [batch]")
    if sim is None:
        return InputsOnly(data, None, None)
    require_sim(sim)
    example = getattr(sim, "example", None)  # of a module: the arguments as its forward takes them
    if example is not None:
        return InputsOnly(data, frozenset(example.kwargs) or None, len(example.args) or None)
    names = [sim.graph.tensors[place].name for place in sim.graph.inputs]
    return InputsOnly(data, frozenset(names), len(names))


@dataclass(frozen=True)
class FirstBatches:
    """The first batches of data that may have no end."""

    batches: Iterable[Any]
    count: int

    def __len__(self) -> int:
        return min(self.count, len(self.batches))  # type: ignore[arg-type]  # of a DataLoader; without one, len() fails as it should

    def __length_hint__(self) -> int:
        return self.count  # of data that do not know how many they are: for the time left, no more than that

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.batches), self.count)


def first_batches(data: Any, count: int | None) -> Any:
    """Return the first batches of data; what is no iterable of batches stays as it is, for the verb to refuse."""
    if count is None:
        return data
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"max_batches={count!r} leaves no data; give a whole number from 1, or None for all")
    whole = isinstance(data, Mapping | str | bytes) or hasattr(data, "shape") or not hasattr(data, "__iter__")
    return data if whole else FirstBatches(data, count)


def calibrate(
    sim: Sim,
    data: Iterable[Any],
    *,
    method: CalibrationMethod = "min_max",
    weight_method: CalibrationMethod | None = None,
    percentile: float = PERCENTILE,
    max_batches: int | None = None,
    **options: Unpack[DataOptions],
) -> Report:
    """Find an encoding for every site in one pass over the data.

    Under `torchrun` every rank calls this with data of its own, and gets the encodings of all data together
    (`moving_average` depends on an order: there it is the mean of the ranks' averages).

    Shifts of biases by `correct_bias` or a layer solver are undone where a weight gets another encoding.

    Args:
        sim: of either side.
        data: an iterable of tensors, tuples (positional) or mappings (keywords); `inputs_only` drops labels.
        method: for activations. `min_max` (also `post_training_tf`) covers every value, and is the one to begin with;
            `moving_average` follows the batches; `percentile` (also `post_training_percentile`), `mse`, `tf_enhanced`
            (also `sqnr` and `post_training_tf_enhanced`) and `entropy` cut off outliers: try them where accuracy falls.
        weight_method: for weights, one of the same; None for `min_max`. Try `mse` at 4 bits. `four_over_six` is for
            float4 in blocks: the largest value of each becomes a 6, or a 4 where that makes the error smaller.
        percentile: share of the values, in percent, that `percentile` keeps below the upper end and above the lower.
        max_batches: batches to stop after, for a DataLoader of a whole training set; None for all.
        options: `forward`, `progress`; see `qsdk.options`.

    Raises:
        ConfigError: an unknown method, a percentile outside 50..100, or `max_batches` below 1.
        DataError: no data, data the model does not take, or NaN or inf (names site and batch).
        CalibrationError: a site that no batch reached. In every case the sim is unchanged.

    Examples:
        >>> import torch, qsdk
        >>> model, x = torch.nn.Linear(8, 4), torch.randn(32, 8)
        >>> sim = qsdk.quantize(model, x, "w4a8")
        >>> qsdk.calibrate(sim, [x], method="mse", progress=False).summary["sites"]
        3
    """
    run = run_of(calibrate, options)
    door = door_of(sim, run)
    batches = first_batches(data, max_batches)
    methods: dict[str, Any] = {"method": method, "weight_method": weight_method, "percentile": percentile}
    with without_shifts(sim):
        return door.calibrate(batches, gather=all_gather, **methods)
