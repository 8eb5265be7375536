"""Which of the data is used for what costs several passes over it: all where that is little work, else a fifth."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from math import prod
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from qsdk.core.planning.plan import Plan

_PARTS = 5
_FEWEST, _MOST = 4, 32  # rows of a batch: fewer would say too little, more hardly anything new
_IDS = 256  # say as much as four rows: each has outputs of its own
_LITTLE = 4_000_000_000  # multiplications of a pass over all data: a second or so
_PASSES = 64  # backward, over all batches together, where that is little work too
_AFFORDABLE = 10_000_000_000, 200  # multiplications and batches, of layers measured one at a time


@dataclass(frozen=True)
class Sampled:
    """The rows of a batch that are used.

    Attributes:
        number: of the batch.
        batch: the whole.
        used: of it; the batch itself where all are.
        samples: rows of the batch and of those that it stands for.
        passes: backward, that may be spent on it.
    """

    number: int
    batch: Any
    used: Any
    samples: int
    passes: int = 1


def sampled(batches: Iterable[tuple[int, Any]], plan: Plan) -> Iterator[Sampled]:
    """Yield all rows of the data where a pass over them is little work, else a fifth: every fifth batch, or its rows.

    Args:
        batches: with their numbers.
        plan: of the model.
    """
    remaining, held, work = iter(batches), list[tuple[int, Any]](), 0
    for number, batch in remaining:
        held.append((number, batch))
        work += multiplications(plan, batch)
        if work > _LITTLE:
            break
    else:
        passes = -(-_PASSES // max(len(held), 1))
        passes = passes if passes * work <= _LITTLE else 1
        yield from (Sampled(number, batch, batch, row_count(batch), passes) for number, batch in held)
        return
    everything = chain(held, remaining)
    while group := list(islice(everything, _PARTS)):
        number, batch = group[0]
        yield Sampled(number, batch, rows_of(batch, len(group)), sum(row_count(one) for _, one in group))


def can_afford_each(batches: Iterable[Any], plan: Plan, layers: int) -> bool:
    """Return whether measuring layers one at a time, on all data, is a matter of seconds.

    Args:
        batches: the data, which are read until they are too many.
        plan: of the model.
        layers: how many are to be measured.
    """
    work = 0
    for count, batch in enumerate(batches, start=1):
        work += layers * multiplications(plan, batch)
        if work > _AFFORDABLE[0] or layers * count > _AFFORDABLE[1]:
            return False
    return True


def multiplications(plan: Plan, batch: Any) -> int:
    """Return a bound of the multiplications of a pass over a batch: as if every weight was read at every position.

    A row of features has one position; a row of ids, or of more than one dimension, has as many as values.
    """
    shapes = [d.shape for d in plan.decisions.values() if d.kind == "weight" and d.shape]
    weights = sum(prod(size for size in shape if isinstance(size, int)) for shape in shapes)
    positions = [len(x) if x.ndim <= 2 and _is_float(x) else prod(x.shape) for x in _arrays(batch)]
    return weights * max(positions, default=1)


def row_count(batch: Any) -> int:
    """Return the number of rows of a batch: of its first array, or 1 where it has none with rows."""
    return next((len(x) for x in _arrays(batch)), 1)


def rows_of(batch: Any, fifths: int) -> Any:
    """Return that many fifths of the rows of a batch, evenly spaced: four at least, of long ids two, and 32 at most.

    A batch whose arrays do not all have the same number of rows is returned as it is.
    """
    arrays = _arrays(batch)
    length = len(arrays[0]) if arrays else 0
    kept = min(max(-(-length * fifths // _PARTS), _fewest(arrays)), _MOST)
    if kept >= length or any(len(x) != length for x in arrays):
        return batch
    rows = [row * length // kept for row in range(kept)]
    return tree_map(lambda x: x[rows] if _has_rows(x) else x, batch)


def _fewest(arrays: list[Any]) -> int:
    """Return the fewest rows that say enough."""
    ids = max((prod(x.shape[1:]) for x in arrays if not _is_float(x)), default=1)
    return min(max(-(-_IDS // max(ids, 1)), 2), _FEWEST)


def _arrays(batch: Any) -> list[Any]:
    return [x for x in tree_leaves(batch) if _has_rows(x)]


def _has_rows(x: Any) -> bool:
    return isinstance(x, Tensor | np.ndarray) and x.ndim > 0


def _is_float(x: Any) -> bool:
    return x.is_floating_point() if isinstance(x, Tensor) else bool(np.issubdtype(x.dtype, np.floating))
