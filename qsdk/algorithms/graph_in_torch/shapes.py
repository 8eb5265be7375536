"""Ops that move elements, or make tensors from shapes."""

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from qsdk.algorithms.graph_in_torch.values import Kernels, ints

_SCATTER = MappingProxyType({"add": "sum", "mul": "prod", "max": "amax", "min": "amin"})


def _from_start(places: Tensor, size: int) -> Tensor:
    """Return places counted from the start of an axis, also those given from its end."""
    places = places.long()
    return torch.where(places < 0, places + size, places)


def _gather(x: Tensor, places: Tensor, *, axis: int = 0) -> Tensor:
    axis %= x.ndim
    chosen = x.index_select(axis, _from_start(places, x.shape[axis]).reshape(-1))
    return chosen.reshape([*x.shape[:axis], *places.shape, *x.shape[axis + 1 :]])


def _gather_nd(x: Tensor, places: Tensor, *, batch_dims: int = 0) -> Tensor:
    depth = places.shape[-1]
    count = math.prod(x.shape[:batch_dims])
    together = x.reshape(count, *x.shape[batch_dims:])
    rows = places.reshape(count, -1, depth)
    index = [_from_start(rows[..., i], x.shape[batch_dims + i]) for i in range(depth)]
    chosen = together[(torch.arange(count)[:, None], *index)]
    return chosen.reshape([*places.shape[:-1], *x.shape[batch_dims + depth :]])


def _scatter_elements(x: Tensor, places: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none") -> Tensor:
    index = _from_start(places, x.shape[axis])
    if reduction == "none":
        return x.scatter(axis, index, updates)
    return x.scatter_reduce(axis, index, updates, _SCATTER[reduction])


def _scatter_nd(x: Tensor, places: Tensor, updates: Tensor, *, reduction: str = "none") -> Tensor:
    depth = places.shape[-1]
    row = torch.zeros(places.shape[:-1], dtype=torch.int64)
    for i in range(depth):
        row = row * x.shape[i] + _from_start(places[..., i], x.shape[i])
    rows = x.reshape(math.prod(x.shape[:depth]), -1)
    index = row.reshape(-1, 1).expand(-1, rows.shape[1])
    return _scatter_elements(rows, index, updates.reshape(index.shape), reduction=reduction).reshape(x.shape)


def _one_hot(places: Tensor, depth: Tensor, values: Tensor, *, axis: int = -1) -> Tensor:
    size = int(depth)
    hot = _from_start(places, size).unsqueeze(axis)
    shape = [1] * hot.ndim
    shape[axis] = size
    return torch.where(hot == torch.arange(size).reshape(shape), values[1], values[0])


INDEXING: Kernels = MappingProxyType(
    {
        "Gather": _gather,
        "GatherElements": lambda x, places, *, axis=0: torch.gather(x, axis, _from_start(places, x.shape[axis])),
        "GatherND": _gather_nd,
        "NonZero": lambda x: torch.nonzero(x).T.reshape(x.ndim, -1),
        "OneHot": _one_hot,
        "ScatterElements": _scatter_elements,
        "ScatterND": _scatter_nd,
    }
)


def _reshape(x: Tensor, shape: Tensor, *, allowzero: int = 0) -> Tensor:
    wanted = ints(shape)
    return x.reshape([x.shape[i] if n == 0 and not allowzero else n for i, n in enumerate(wanted)])


def _flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    rows = math.prod(x.shape[:axis])
    return x.reshape(rows, x.numel() // rows if rows else math.prod(x.shape[axis:]))


def _transpose(x: Tensor, *, perm: Sequence[int] | None = None) -> Tensor:
    return x.permute(list(reversed(range(x.ndim))) if perm is None else list(perm))


def _unsqueeze(x: Tensor, axes: Tensor) -> Tensor:
    rank = x.ndim + axes.numel()
    for axis in sorted(axis % rank for axis in ints(axes)):
        x = x.unsqueeze(axis)
    return x


def _expand(x: Tensor, shape: Tensor) -> Tensor:
    wanted = [1] * (x.ndim - shape.numel()) + ints(shape)
    sizes = [1] * (len(wanted) - x.ndim) + list(x.shape)
    return x.expand([size if n == 1 else n for size, n in zip(sizes, wanted, strict=True)])


def _split(
    x: Tensor, sizes: Tensor | None = None, *, axis: int = 0, num_outputs: int | None = None
) -> tuple[Tensor, ...]:
    if sizes is not None:
        return torch.split(x, ints(sizes), axis)
    assert num_outputs is not None
    return torch.split(x, -(-x.shape[axis] // num_outputs), axis)


def _slice(x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None, steps: Tensor | None = None) -> Tensor:
    count = starts.numel()
    along = list(range(count)) if axes is None else ints(axes)
    by = [1] * count if steps is None else ints(steps)
    for start, end, axis, step in zip(ints(starts), ints(ends), along, by, strict=True):
        chosen = range(*slice(start, end, step).indices(x.shape[axis]))
        if step > 0:
            whole = [slice(None)] * x.ndim
            whole[axis] = slice(chosen.start, chosen.stop, step)
            x = x[tuple(whole)]
        else:  # torch has no slices that run backwards
            x = x.index_select(axis, torch.tensor(list(chosen), dtype=torch.int64))
    return x


def _pad(
    x: Tensor, pads: Tensor, value: Tensor | None = None, axes: Tensor | None = None, *, mode: str = "constant"
) -> Tensor:
    along = list(range(x.ndim)) if axes is None else [axis % x.ndim for axis in ints(axes)]
    widths, count = ints(pads), len(along)
    pairs = [(0, 0)] * x.ndim
    for place, axis in enumerate(along):
        pairs[axis] = (widths[place], widths[place + count])
    if mode == "constant":
        return F.pad(x, [n for pair in reversed(pairs) for n in pair], value=0 if value is None else value.item())
    for axis, (before, after) in enumerate(pairs):
        if before or after:
            x = x.index_select(axis, torch.from_numpy(_padded_places(x.shape[axis], before, after, mode)))
    return x


def _padded_places(size: int, before: int, after: int, mode: str) -> npt.NDArray[np.int64]:
    """Return the place of each element along a padded axis; what a negative width removes is removed first."""
    places = np.arange(size, dtype=np.int64)[max(-before, 0) : size - max(-after, 0)]
    options: dict[str, Any] = {"mode": mode}
    return np.pad(places, (max(before, 0), max(after, 0)), **options)


def _depth_to_space(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    count, channels, height, width = x.shape
    left = channels // blocksize**2
    if mode == "DCR":
        parts = x.reshape(count, blocksize, blocksize, left, height, width).permute(0, 3, 4, 1, 5, 2)
    else:
        parts = x.reshape(count, left, blocksize, blocksize, height, width).permute(0, 1, 4, 2, 5, 3)
    return parts.reshape(count, left, height * blocksize, width * blocksize)


def _space_to_depth(x: Tensor, *, blocksize: int) -> Tensor:
    count, channels, height, width = x.shape
    parts = x.reshape(count, channels, height // blocksize, blocksize, width // blocksize, blocksize)
    return parts.permute(0, 3, 5, 1, 2, 4).reshape(
        count, channels * blocksize**2, height // blocksize, width // blocksize
    )


def _range(start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    count = max(math.ceil((limit.item() - start.item()) / delta.item()), 0)
    return start + delta * torch.arange(count, dtype=start.dtype)


def _constant_of_shape(shape: Tensor, *, value: npt.NDArray[Any] | None = None) -> Tensor:
    filled = np.zeros(1, np.float32) if value is None else value
    if filled.dtype.name in ("float16", "bfloat16"):
        filled = filled.astype(np.float32)
    return torch.from_numpy(np.full(ints(shape), filled.reshape(()), filled.dtype))


def _triangle(x: Tensor, diagonal: Tensor | None = None, *, upper: int = 1) -> Tensor:
    k = 0 if diagonal is None else int(diagonal)
    return torch.triu(x, k) if upper else torch.tril(x, k)


SHAPES: Kernels = MappingProxyType(
    {
        "Concat": lambda *given, axis: torch.cat(given, axis),
        "ConstantOfShape": _constant_of_shape,
        "DepthToSpace": _depth_to_space,
        "Expand": _expand,
        "Flatten": _flatten,
        "Pad": _pad,
        "Range": _range,
        "Reshape": _reshape,
        "Shape": lambda x, *, start=0, end=None: torch.tensor(x.shape[start:end], dtype=torch.int64),
        "Size": lambda x: torch.tensor(x.numel()),
        "Slice": _slice,
        "SpaceToDepth": _space_to_depth,
        "Split": _split,
        "Squeeze": lambda x, axes=None: x.squeeze() if axes is None else x.squeeze(tuple(ints(axes))),
        "Tile": lambda x, repeats: x.repeat(ints(repeats)),
        "Transpose": _transpose,
        "Trilu": _triangle,
        "Unsqueeze": _unsqueeze,
    }
)
