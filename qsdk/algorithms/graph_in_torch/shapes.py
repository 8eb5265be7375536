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

from qsdk.algorithms.graph_in_torch.values import DTYPES, Kernels, ints


def _shape(x: Tensor, *, start: int = 0, end: int | None = None) -> Tensor:
    return torch.tensor(x.shape[start:end], dtype=torch.int64)


def _size(x: Tensor) -> Tensor:
    return torch.tensor(x.numel())


def _reshape(x: Tensor, shape: Tensor, *, allowzero: int = 0) -> Tensor:
    wanted = ints(shape)
    return x.reshape([x.shape[i] if n == 0 and not allowzero else n for i, n in enumerate(wanted)])


def _flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    rows = math.prod(x.shape[:axis])
    return x.reshape(rows, x.numel() // rows if rows else math.prod(x.shape[axis:]))


def _transpose(x: Tensor, *, perm: Sequence[int] | None = None) -> Tensor:
    return x.permute(list(reversed(range(x.ndim))) if perm is None else list(perm))


def _squeeze(x: Tensor, axes: Tensor | None = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(tuple(ints(axes)))


def _unsqueeze(x: Tensor, axes: Tensor) -> Tensor:
    rank = x.ndim + axes.numel()
    for axis in sorted(axis % rank for axis in ints(axes)):
        x = x.unsqueeze(axis)
    return x


def _expand(x: Tensor, shape: Tensor) -> Tensor:
    wanted = [1] * (x.ndim - shape.numel()) + ints(shape)
    sizes = [1] * (len(wanted) - x.ndim) + list(x.shape)
    return x.expand([size if n == 1 else n for size, n in zip(sizes, wanted, strict=True)])


def _tile(x: Tensor, repeats: Tensor) -> Tensor:
    return x.repeat(ints(repeats))


def _concat(*given: Tensor, axis: int) -> Tensor:
    return torch.cat(given, axis)


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


def _eye_like(x: Tensor, *, dtype: int | None = None, k: int = 0) -> Tensor:
    ones = torch.ones(x.shape, dtype=x.dtype if dtype is None else DTYPES[dtype])
    return torch.triu(torch.tril(ones, k), k)


SHAPES: Kernels = MappingProxyType(
    {
        "Concat": _concat,
        "ConstantOfShape": _constant_of_shape,
        "DepthToSpace": _depth_to_space,
        "Expand": _expand,
        "EyeLike": _eye_like,
        "Flatten": _flatten,
        "Pad": _pad,
        "Range": _range,
        "Reshape": _reshape,
        "Shape": _shape,
        "Size": _size,
        "Slice": _slice,
        "SpaceToDepth": _space_to_depth,
        "Split": _split,
        "Squeeze": _squeeze,
        "Tile": _tile,
        "Transpose": _transpose,
        "Trilu": _triangle,
        "Unsqueeze": _unsqueeze,
    }
)
