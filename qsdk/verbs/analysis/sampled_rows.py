"""About a third of the data, for what costs several float passes over the rows that it uses."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_THIRDS = 3
_FEWEST, _MOST = 2, 32  # rows of a batch: fewer would say too little, more hardly anything new


def every_third(batches: Iterable[Any]) -> Iterator[tuple[Any, int]]:
    """Yield every third batch, and how many batches it stands for: itself and the one or two behind it, if any."""
    remaining = iter(batches)
    while group := list(islice(remaining, _THIRDS)):
        yield group[0], len(group)


def rows_of(batch: Any, thirds: int) -> Any:
    """Return that many thirds of the rows of a batch, evenly spaced: two at least, and 32 at most.

    A batch whose arrays do not all have the same number of rows is returned as it is.
    """
    arrays = [x for x in tree_leaves(batch) if _has_rows(x)]
    length = len(arrays[0]) if arrays else 0
    kept = min(max(-(-length * thirds // _THIRDS), _FEWEST), _MOST)
    if kept >= length or any(len(x) != length for x in arrays):
        return batch
    rows = [row * length // kept for row in range(kept)]
    return tree_map(lambda x: x[rows] if _has_rows(x) else x, batch)


def _has_rows(x: Any) -> bool:
    return isinstance(x, Tensor | np.ndarray) and x.ndim > 0
