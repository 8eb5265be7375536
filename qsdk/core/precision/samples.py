"""Samples: a bounded number of float values of every site, and their extremes, from one pass over the data."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
_LARGEST = 32_768  # values kept per site
_CHANNELS = 8_192  # longer axes are no channels


@dataclass
class SiteSample:
    """The sample of one site.

    Attributes:
        low: the smallest value.
        high: the largest value.
        values: at most 32,768 of the values, taken evenly.
        channels: axis -> largest magnitude per index, for the axes that may be channels (the second and the last).
        elements: number of values of the largest batch.
    """

    low: float = np.inf
    high: float = -np.inf
    values: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))
    channels: dict[int, FloatArray] = field(default_factory=dict)
    elements: int = 0

    def add(self, x: npt.NDArray[np.floating]) -> None:
        """Add the values of one batch; those that are not finite are left out."""
        flat = x.reshape(-1)
        if flat.size == 0:
            return
        finite = flat[np.isfinite(flat)]
        if finite.size == 0:
            return
        self.low, self.high = min(self.low, float(finite.min())), max(self.high, float(finite.max()))
        self.elements = max(self.elements, flat.size)
        self.values = _thinned(np.concatenate([self.values, _thinned(finite)]))
        if finite.size == flat.size:
            self._add_channels(np.abs(x))

    def _add_channels(self, magnitudes: npt.NDArray[np.floating]) -> None:
        for axis in {1, magnitudes.ndim - 1} if magnitudes.ndim > 1 else ():
            if 1 < magnitudes.shape[axis] <= _CHANNELS:
                others = tuple(i for i in range(magnitudes.ndim) if i != axis)
                largest = magnitudes.max(axis=others).astype(np.float32)
                before = self.channels.get(axis)
                fits = before is not None and before.shape == largest.shape
                self.channels[axis] = np.maximum(before, largest) if before is not None and fits else largest


def _thinned(values: npt.NDArray[np.floating]) -> FloatArray:
    """Return at most `_LARGEST` values, evenly spaced. An odd step visits more than one channel."""
    step = -(-values.size // _LARGEST)
    return values[:: step + (step > 1 and step % 2 == 0)].astype(np.float32)
