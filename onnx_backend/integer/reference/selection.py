"""The selecting, comparing and rearranging ops of integer-only models in NumPy, from the ONNX standard."""

from collections.abc import Callable, Mapping
from functools import reduce
from types import MappingProxyType
from typing import Any

import numpy as np

from onnx_backend.integer.ir.values import Array

Attributes = Mapping[str, Any]


def _top_k(attrs: Attributes, x: Array, k: Array) -> tuple[Array, Array]:
    axis = attrs.get("axis", -1)
    keys = x.astype(np.int64) * (-1 if attrs.get("largest", 1) else 1)
    # a stable sort leaves the smaller index first among equals, as the standard asks
    order = np.argsort(keys, axis=axis, kind="stable").take(np.arange(int(k.reshape(-1)[0])), axis)
    return np.take_along_axis(x, order, axis), order.astype(np.int64)


def _scatter_nd(attrs: Attributes, x: Array, indices: Array, updates: Array) -> Array:
    found = x.copy()
    rows = indices.reshape(-1, indices.shape[-1])
    blocks = updates.reshape(len(rows), *x.shape[indices.shape[-1] :])
    choose = _CHOICES[attrs.get("reduction", b"none")]
    for row, block in zip(rows.tolist(), blocks, strict=True):
        found[tuple(row)] = choose(found[tuple(row)], block)
    return found


def _scatter_elements(attrs: Attributes, x: Array, indices: Array, updates: Array) -> Array:
    found, axis = x.copy(), attrs.get("axis", 0) % x.ndim
    choose = _CHOICES[attrs.get("reduction", b"none")]
    for place in np.ndindex(*indices.shape):
        target = (*place[:axis], int(indices[place]), *place[axis + 1 :])
        found[target] = choose(found[target], updates[place])
    return found


#: The new value of a scattered element, from the old value and the one that is written.
_CHOICES: Mapping[bytes, Callable[[Any, Any], Any]] = MappingProxyType(
    {b"none": lambda old, new: new, b"max": np.maximum, b"min": np.minimum, b"add": np.add}
)


def _depth_to_space(attrs: Attributes, x: Array) -> Array:
    size = attrs["blocksize"]
    n, c, h, w = x.shape
    if attrs.get("mode", b"DCR") == b"DCR":
        blocks = x.reshape(n, size, size, c // size**2, h, w).transpose(0, 3, 4, 1, 5, 2)
    else:
        blocks = x.reshape(n, c // size**2, size, size, h, w).transpose(0, 1, 4, 2, 5, 3)
    return blocks.reshape(n, c // size**2, h * size, w * size)


def _space_to_depth(attrs: Attributes, x: Array) -> Array:
    size = attrs["blocksize"]
    n, c, h, w = x.shape
    blocks = x.reshape(n, c, h // size, size, w // size, size).transpose(0, 3, 5, 1, 2, 4)
    return blocks.reshape(n, c * size**2, h // size, w // size)


SELECTION_OPS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "DepthToSpace": _depth_to_space,
        "GreaterOrEqual": lambda a, x, y: x >= y,
        "Max": lambda a, *parts: reduce(np.maximum, parts),
        "Min": lambda a, *parts: reduce(np.minimum, parts),
        "Not": lambda a, x: ~x,
        "Or": lambda a, x, y: x | y,
        "ScatterElements": _scatter_elements,
        "ScatterND": _scatter_nd,
        "SpaceToDepth": _space_to_depth,
        "TopK": _top_k,
        "Xor": lambda a, x, y: x ^ y,
    }
)
