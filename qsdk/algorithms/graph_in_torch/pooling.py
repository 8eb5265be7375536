"""Pooling, and sampling at computed places."""

from collections.abc import Sequence
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from qsdk.algorithms.graph_in_torch.values import Kernels
from qsdk.algorithms.graph_in_torch.windows import Window, padded

_MAX = MappingProxyType({1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d})
_CONV = MappingProxyType({1: F.conv1d, 2: F.conv2d, 3: F.conv3d})
_SAMPLED = MappingProxyType({"linear": "bilinear", "nearest": "nearest", "cubic": "bicubic"})


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


def _global_average(x: Tensor) -> Tensor:
    return x.mean(list(range(2, x.ndim)), keepdim=True)


def _global_max(x: Tensor) -> Tensor:
    return x.amax(list(range(2, x.ndim)), keepdim=True)


def _grid_sample(
    x: Tensor, grid: Tensor, *, align_corners: int = 0, mode: str = "linear", padding_mode: str = "zeros"
) -> Tensor:
    return F.grid_sample(x, grid, _SAMPLED[mode], padding_mode, bool(align_corners))


POOLING: Kernels = MappingProxyType(
    {
        "AveragePool": _average_pool,
        "GlobalAveragePool": _global_average,
        "GlobalMaxPool": _global_max,
        "GridSample": _grid_sample,
        "MaxPool": _max_pool,
    }
)
