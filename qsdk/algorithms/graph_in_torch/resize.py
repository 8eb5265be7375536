"""Resize: along each axis a product with a matrix of interpolation weights, or a choice of elements."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qsdk.algorithms.graph_in_torch.values import Kernels, ints

Array = npt.NDArray[Any]


def _resize(
    x: Tensor,
    roi: Tensor | None = None,
    scales: Tensor | None = None,
    sizes: Tensor | None = None,
    *,
    antialias: int = 0,
    axes: Sequence[int] | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> Tensor:
    along = list(range(x.ndim)) if axes is None else [axis % x.ndim for axis in axes]
    inner = [x.shape[axis] for axis in along]
    if sizes is not None and sizes.numel():
        factors, outer = _from_sizes(inner, ints(sizes), keep_aspect_ratio_policy)
    else:
        assert scales is not None
        factors = [np.float32(factor) for factor in scales.tolist()]
        outer = [int(np.floor(size * factor)) for size, factor in zip(inner, factors, strict=True)]
    for axis, size, out, factor in zip(along, inner, outer, factors, strict=True):
        if factor == 1 and out == size:
            continue
        places = _places(coordinate_transformation_mode, size, out, factor)
        if mode == "nearest":
            chosen = np.clip(_NEAREST[nearest_mode](places), 0, size - 1).astype(np.int64)
            x = x.index_select(axis, torch.from_numpy(chosen))
        else:
            stretch = min(float(factor), 1.0) if antialias else 1.0
            weights = _weights(places, size, stretch, mode, cubic_coeff_a, outside=not exclude_outside)
            x = (x.movedim(axis, -1) @ torch.from_numpy(weights.T).to(x.dtype)).movedim(-1, axis)
    return x


def _from_sizes(inner: list[int], sizes: list[int], policy: str) -> tuple[list[np.float32], list[int]]:
    """Return scale and size of each axis for the sizes asked for."""
    factors = [np.float32(out / size) for size, out in zip(inner, sizes, strict=True)]
    if policy == "stretch":
        return factors, sizes
    one = min(factors) if policy == "not_larger" else max(factors)
    return [one] * len(inner), [int(np.floor(size * one + np.float32(0.5))) for size in inner]


def _places(mode: str, size: int, out: int, factor: np.float32) -> Array:
    """Return the place in the input that each output element is read at, in float32 as the runtime computes it."""
    at = np.arange(out, dtype=np.float32)
    half = np.float32(0.5)
    if mode == "asymmetric":
        return at / factor
    if mode == "align_corners":
        return at * np.float32(size - 1) / np.float32(out - 1) if out > 1 else at * 0
    if mode == "pytorch_half_pixel" and out == 1:
        return at * 0
    if mode == "half_pixel_symmetric":
        share = np.float32(out) / (factor * np.float32(size))
        return np.float32(size / 2) * (1 - share) + (at + half) / factor - half
    if mode in ("half_pixel", "pytorch_half_pixel"):
        return (at + half) / factor - half
    raise ValueError(f"its coordinate_transformation_mode is {mode}")


def _weights(places: Array, size: int, stretch: float, mode: str, a: float, *, outside: bool) -> Array:
    """Return the weights of the input elements in each output element, [out, in].

    Args:
        places: of the output elements in the input.
        size: of the axis.
        stretch: below 1, the filter is 1 / stretch times as wide.
        mode: linear or cubic.
        a: the coefficient of the cubic filter.
        outside: elements outside count as the nearest one inside; else they have no weight.
    """
    reach = int(np.ceil((1 if mode == "linear" else 2) / stretch))
    first = np.floor(places).astype(np.int64) - reach
    found = np.zeros((len(places), size))
    rows = np.arange(len(places))
    for step in range(2 * reach + 2):
        taken = first + step
        weight = _FILTERS[mode](np.abs(places - taken) * stretch, a)
        weight = weight if outside else np.where((taken < 0) | (taken >= size), 0, weight)
        np.add.at(found, (rows, np.clip(taken, 0, size - 1)), weight)
    return np.asarray(found / found.sum(1, keepdims=True))


def _linear(distance: Array, a: float) -> Array:
    return np.asarray(np.maximum(1 - distance, 0))


def _cubic(distance: Array, a: float) -> Array:
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = a * (((distance - 5) * distance + 8) * distance - 4)
    return np.asarray(np.where(distance <= 1, near, np.where(distance < 2, far, 0)))


_FILTERS = MappingProxyType({"linear": _linear, "cubic": _cubic})
_NEAREST: Mapping[str, Callable[[Array], Array]] = MappingProxyType(
    {
        "floor": np.floor,
        "ceil": np.ceil,
        "round_prefer_floor": lambda places: np.ceil(places - np.float32(0.5)),
        "round_prefer_ceil": lambda places: np.floor(places + np.float32(0.5)),
    }
)

RESIZE: Kernels = MappingProxyType({"Resize": _resize})
