"""Channel observers: statistics of the channels of tensors in one float pass, and a sample of the inputs of layers."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
ROWS = 512  # of a layer's input that are kept


@dataclass
class ChannelObserver:
    """The statistics of one tensor.

    Attributes:
        axes: those that its channels lie along; statistics have one value for each index of them, flattened.
        row_axis: the axis that a layer multiplies, whose rows are sampled; None for no sample.
        low: smallest value.
        high: largest value.
        rows: float32 [at most 512, size along the axis], evenly spaced.
        total: sum of the magnitudes, and of the squares, float64 [2, n].
        count: number of elements of each channel.
    """

    axes: tuple[int, ...]
    row_axis: int | None = None
    low: FloatArray = field(init=False)
    high: FloatArray = field(init=False)
    rows: FloatArray = field(init=False)
    total: npt.NDArray[np.float64] = field(init=False)
    count: float = field(init=False)

    def __post_init__(self) -> None:
        self.low, self.high = np.full(1, np.inf, np.float32), np.full(1, -np.inf, np.float32)
        self.rows = np.empty((0, 0), np.float32)
        self.total = np.zeros((2, 1))
        self.count = 0.0

    def add(self, x: FloatArray) -> None:
        """Add the values of one batch."""
        if x.size == 0:
            return
        kept = {axis % x.ndim for axis in self.axes}
        others = tuple(axis for axis in range(x.ndim) if axis not in kept)
        self.low = np.minimum(self.low, x.min(axis=others).reshape(-1))
        self.high = np.maximum(self.high, x.max(axis=others).reshape(-1))
        sums = (np.abs(x).sum(axis=others, dtype=np.float64), np.square(x).sum(axis=others, dtype=np.float64))
        self.total = self.total + np.stack([result.reshape(-1) for result in sums])
        self.count += x.size / self.low.size
        if self.row_axis is not None:
            rows = _thinned(np.moveaxis(x, self.row_axis, -1).reshape(-1, x.shape[self.row_axis]))
            self.rows = _thinned(np.concatenate([self.rows.reshape(-1, rows.shape[1]), rows]))

    @property
    def amax(self) -> FloatArray:
        """Return the largest magnitude of each channel."""
        return np.maximum(np.abs(self.low), np.abs(self.high))

    @property
    def mean_magnitude(self) -> npt.NDArray[np.float64]:
        """Return the mean magnitude of each channel."""
        result: npt.NDArray[np.float64] = self.total[0] / max(self.count, 1.0)
        return result

    @property
    def mean_square(self) -> npt.NDArray[np.float64]:
        """Return the mean square of each channel."""
        result: npt.NDArray[np.float64] = self.total[1] / max(self.count, 1.0)
        return result


def _thinned(rows: FloatArray) -> FloatArray:
    """Return at most `ROWS` rows, evenly spaced. An odd step visits every position of rows of text of even length."""
    step = -(-len(rows) // ROWS)
    return np.ascontiguousarray(rows[:: step + (step > 1 and step % 2 == 0)], np.float32)
