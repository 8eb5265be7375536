"""The geometry that convolutions and pooling share: a window that moves over the axes after the second."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

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
        """Return the padding before and after each axis.

        Args:
            sizes: of the axes.
            pads: the attribute: all widths before, then all after; None for no padding.
            auto_pad: the attribute.
        """
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
