"""Windows that move over the axes after the second, as of convolutions and pooling, and resizing along axes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from qsdk.algorithms.graph_in_torch.values import Kernels, ints
from qsdk.core.arrays import Array

Widths = list[tuple[int, int]]


@dataclass(frozen=True)
class Window:
    """A window by axis: its size, its stride and the distance of its elements."""

    kernel: list[int]
    strides: list[int]
    dilations: list[int]

    @classmethod
    def of(cls, kernel: Sequence[int], strides: Sequence[int] | None, dilations: Sequence[int] | None) -> "Window":
        """Return the window of attributes, of which strides and dilations may be absent."""
        ones = [1] * len(kernel)
        return cls(list(kernel), list(strides or ones), list(dilations or ones))

    @property
    def extents(self) -> list[int]:
        """Return how many elements the window spans along each axis."""
        return [(size - 1) * apart + 1 for size, apart in zip(self.kernel, self.dilations, strict=True)]

    def pads(self, sizes: Sequence[int], pads: Sequence[int] | None, auto_pad: str) -> Widths:
        """Return the padding before and after each axis; the attribute `pads` has all widths before, then all after."""
        if not auto_pad.startswith("SAME"):
            count = len(self.kernel)
            given = list(pads or [0] * 2 * count) if auto_pad == "NOTSET" else [0] * 2 * count
            return list(zip(given[:count], given[count:], strict=True))
        found = []
        for size, extent, stride in zip(sizes, self.extents, self.strides, strict=True):
            total = max((-(-size // stride) - 1) * stride + extent - size, 0)
            less, more = total // 2, total - total // 2
            found.append((less, more) if auto_pad == "SAME_UPPER" else (more, less))
        return found

    def last_places(self, sizes: Sequence[int], pads: Widths) -> Widths:
        """Return the padding with that which the last window needs, where sizes are rounded up (ceil_mode).

        A window that would begin in the padding at the end is none.
        """
        found = []
        for size, (before, after), extent, stride in zip(sizes, pads, self.extents, self.strides, strict=True):
            last = -(-(size + before + after - extent) // stride)
            if last * stride >= size + before:
                last -= 1
            found.append((before, max(last * stride + extent - size - before, after)))
        return found


def padded(x: Tensor, widths: Widths, value: float = 0.0) -> Tensor:
    """Return a tensor with its last axes padded; negative widths cut."""
    flat = [width for pair in reversed(widths) for width in pair]
    return F.pad(x, flat, value=value) if any(flat) else x


_MAX = MappingProxyType({1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d})
_CONV = MappingProxyType({1: F.conv1d, 2: F.conv2d, 3: F.conv3d})


def _max_pool(
    x: Tensor,
    *,
    kernel_shape: Sequence[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    storage_order: int = 0,
    strides: Sequence[int] | None = None,
) -> Tensor:
    window = Window.of(kernel_shape, strides, dilations)
    widths = window.pads(x.shape[2:], pads, auto_pad)
    if ceil_mode:
        widths = window.last_places(x.shape[2:], widths)
    pool = _MAX[len(kernel_shape)]
    return pool(padded(x, widths, float("-inf")), window.kernel, window.strides, 0, window.dilations)


def _average_pool(
    x: Tensor,
    *,
    kernel_shape: Sequence[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """Return the sum of each window divided by the number of its places that count."""
    window = Window.of(kernel_shape, strides, dilations)
    widths = window.pads(x.shape[2:], pads, auto_pad)
    counted = padded(torch.ones_like(x[:1, :1]), widths, float(count_include_pad))
    x = padded(x, widths)
    if ceil_mode:
        sizes = x.shape[2:]
        grown = window.last_places(sizes, [(0, 0)] * len(sizes))
        counted, x = padded(counted, grown), padded(x, grown)
    return _sums(x, window) / _sums(counted, window)


def _sums(x: Tensor, window: Window) -> Tensor:
    """Return the sum of each window, by channel."""
    images = x.reshape(-1, 1, *x.shape[2:])
    found = _CONV[x.ndim - 2](images, x.new_ones(1, 1, *window.kernel), None, window.strides, 0, window.dilations)
    return found.reshape(*x.shape[:2], *found.shape[2:])


POOLING: Kernels = MappingProxyType(
    {
        "AveragePool": _average_pool,
        "GlobalAveragePool": lambda x: x.mean(list(range(2, x.ndim)), keepdim=True),
        "GlobalMaxPool": lambda x: x.amax(list(range(2, x.ndim)), keepdim=True),
        "MaxPool": _max_pool,
    }
)


def _resize(
    x: Tensor,
    roi: Tensor | None = None,
    scales: Tensor | None = None,
    sizes: Tensor | None = None,
    *,
    axes: Sequence[int] | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
    **others: Any,
) -> Tensor:
    along = list(range(x.ndim)) if axes is None else [axis % x.ndim for axis in axes]
    inner = [x.shape[axis] for axis in along]
    if sizes is not None and sizes.numel():
        outer = ints(sizes)
        factors = [np.float32(out / size) for size, out in zip(inner, outer, strict=True)]
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
            weights = torch.from_numpy(_linear_weights(places, size)).to(x.dtype)
            x = (x.movedim(axis, -1) @ weights).movedim(-1, axis)
    return x


def refuses_resize(attributes: Mapping[str, Any]) -> bool:
    """Return whether a Resize is none of nearest or linear, with sizes or scales as they are."""
    return (
        attributes.get("mode") == "cubic"
        or attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize"
        or attributes.get("keep_aspect_ratio_policy", "stretch") != "stretch"
        or bool(attributes.get("antialias") or attributes.get("exclude_outside"))
    )


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


def _linear_weights(places: Array, size: int) -> Array:
    """Return the weights [in, out] of the input elements; one outside of the axis counts as the nearest one inside."""
    weights, columns, first = np.zeros((size, len(places))), np.arange(len(places)), np.floor(places).astype(np.int64)
    for element in (first, first + 1):
        np.add.at(weights, (np.clip(element, 0, size - 1), columns), 1 - np.abs(places - element))
    return weights


_NEAREST: Mapping[str, Callable[[Array], Array]] = MappingProxyType(
    {
        "floor": np.floor,
        "ceil": np.ceil,
        "round_prefer_floor": lambda places: np.ceil(places - np.float32(0.5)),
        "round_prefer_ceil": lambda places: np.floor(places + np.float32(0.5)),
    }
)

RESIZE: Kernels = MappingProxyType({"Resize": _resize})
