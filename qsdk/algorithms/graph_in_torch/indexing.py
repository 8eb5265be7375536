"""Ops that read or write elements at places that a tensor names."""

import math
from types import MappingProxyType

import torch
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


def _gather_elements(x: Tensor, places: Tensor, *, axis: int = 0) -> Tensor:
    return torch.gather(x, axis, _from_start(places, x.shape[axis]))


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


def _non_zero(x: Tensor) -> Tensor:
    return torch.nonzero(x).T.reshape(x.ndim, -1)


def _compress(x: Tensor, condition: Tensor, *, axis: int | None = None) -> Tensor:
    kept = torch.tensor([i for i, keep in enumerate(ints(condition)) if keep], dtype=torch.int64)
    return x.reshape(-1).index_select(0, kept) if axis is None else x.index_select(axis, kept)


INDEXING: Kernels = MappingProxyType(
    {
        "Compress": _compress,
        "Gather": _gather,
        "GatherElements": _gather_elements,
        "GatherND": _gather_nd,
        "NonZero": _non_zero,
        "OneHot": _one_hot,
        "ScatterElements": _scatter_elements,
        "ScatterND": _scatter_nd,
    }
)
