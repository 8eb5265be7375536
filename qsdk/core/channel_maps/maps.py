"""Channel maps: the channel of a group that each element of a tensor belongs to, as arrays of ids.

The map of a tensor is an int64 array of the same rank that broadcasts to its shape: the id of the channel at each
element, with size 1 along every axis on which the channel does not depend. In the map of a rotation, -1 is an element
that stays as it is.
"""

from collections.abc import Sequence
from math import prod

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Shape = Sequence[int | str | None]


def along(ids: npt.NDArray[np.int64], axis: int, rank: int) -> Ids:
    """Return the map of a tensor whose channels lie along one axis."""
    return ids.reshape([-1 if i == axis % rank else 1 for i in range(rank)])


def varies(ids: Ids, axis: int) -> bool:
    """Return whether the channel depends on an axis."""
    return bool(ids.shape[axis] != 1)


def channel_axis(ids: Ids) -> int | None:
    """Return the one axis along which the channel varies; None if there is none, or several."""
    axes = [axis for axis in range(ids.ndim) if varies(ids, axis)]
    return axes[0] if len(axes) == 1 else None


def channels_along(ids: Ids, axis: int) -> Ids | None:
    """Return the channels along an axis, [n]; None where they vary along others too, or not along this one."""
    return ids.reshape(-1) if channel_axis(ids) == axis % ids.ndim else None


def reshape(ids: Ids, before: Shape, after: Shape) -> Ids | None:
    """Return the map behind a Reshape, or None where the shapes do not determine it."""
    parts = _align(before, after)
    if parts is None:
        return None
    spread = list(ids.shape)
    target: list[int] = []
    for old, new in parts:
        if all(ids.shape[i] == 1 for i in old):
            target += [1] * len(new)
            continue
        sizes = [before[i] for i in old] + [after[j] for j in new]
        if not all(isinstance(size, int) for size in sizes) or _volume(sizes[: len(old)]) != _volume(sizes[len(old) :]):
            return None
        for i in old:
            spread[i] = int(before[i] or 0)
        target += [int(after[j] or 0) for j in new]
    return _compact(np.broadcast_to(ids, spread).reshape(target))


def broadcast_back(ids: Ids, shape: Shape) -> Ids | None:
    """Return the map of an operand of this shape whose elementwise result has the map `ids`; None if too small."""
    cut = ids.reshape(ids.shape[ids.ndim - len(shape) :]) if _leading_ones(ids, ids.ndim - len(shape)) else None
    if cut is None or any(size == 1 and varies(cut, axis) for axis, size in enumerate(shape)):
        return None
    return cut


def broadcast_on(ids: Ids, rank: int) -> Ids:
    """Return the map of an elementwise result of this rank, one operand of which has the map `ids`."""
    return ids.reshape((1,) * (rank - ids.ndim) + ids.shape)


def _leading_ones(ids: Ids, count: int) -> bool:
    return count >= 0 and all(size == 1 for size in ids.shape[:count])


def _compact(ids: Ids) -> Ids:
    """Return the same map with size 1 along every axis on which it does not depend."""
    for axis, size in enumerate(ids.shape):
        first = ids.take([0], axis)
        if size > 1 and bool((ids == first).all()):
            ids = first
    return ids


def _align(before: Shape, after: Shape) -> list[tuple[list[int], list[int]]] | None:
    """Return the smallest runs of axes, from the left and from the right, that hold the same elements."""
    left, old, new = _runs(before, after)
    right, old_end, new_end = _runs(before[old:][::-1], after[new:][::-1])
    last_old, last_new = len(before) - old_end, len(after) - new_end
    middle = [(list(range(old, last_old)), list(range(new, last_new)))] if old < last_old or new < last_new else []
    tail = [([len(before) - 1 - i for i in a][::-1], [len(after) - 1 - j for j in b][::-1]) for a, b in reversed(right)]
    return left + middle + tail


def _runs(before: Shape, after: Shape) -> tuple[list[tuple[list[int], list[int]]], int, int]:
    """Return the runs from the left where the sizes certainly agree, and where they end on either side."""
    result: list[tuple[list[int], list[int]]] = []
    i = j = first = second = 0
    while i < len(before) or j < len(after):
        done = (first, second)
        a, b = _volume(before[first:i]), _volume(after[second:j])
        if (i, j) != done and a is not None and a == b:
            result.append((list(range(first, i)), list(range(second, j))))
            first, second = i, j
            continue
        if None in (a, b):
            break
        if j < len(after) and (i == len(before) or (i > first and _smaller(b, a))):
            j += 1
        elif i < len(before):
            i += 1
            if j < len(after) and j == second:
                j += 1
        else:
            break
    if (i, j) != (first, second):
        a, b = _volume(before[first:i]), _volume(after[second:j])
        if a is not None and a == b:
            result.append((list(range(first, i)), list(range(second, j))))
            first, second = i, j
    return result, first, second


def _volume(sizes: Shape) -> tuple[int, tuple[str, ...]] | None:
    """Return the product of sizes: a number and the names in it; None where a size is unknown."""
    if any(size is None for size in sizes):
        return None
    names = tuple(sorted(size for size in sizes if isinstance(size, str)))
    return prod(size for size in sizes if isinstance(size, int)), names


def _smaller(b: tuple[int, tuple[str, ...]] | None, a: tuple[int, tuple[str, ...]] | None) -> bool:
    return a is not None and b is not None and (len(b[1]), b[0]) < (len(a[1]), a[0])
