"""Means and variances per channel, combined from parts of the data of any sizes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qsdk.core.errors import DataError

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ChannelStatistics:
    """The statistics of the values of each channel.

    Attributes:
        count: of values per channel.
        mean: float64 [channels].
        squares: float64 [channels], the sum of the squared distances from the mean.
    """

    count: int
    mean: FloatArray
    squares: FloatArray

    def variance(self, owner: str) -> FloatArray:
        """Return the unbiased variance, as in PyTorch's BatchNorm.

        Raises:
            DataError: there are fewer than two values, or some are not finite; names the owner.
        """
        if self.count < 2:
            raise DataError(f"{owner} saw {self.count} values per channel, which have no variance; give more data")
        if not (np.isfinite(self.mean).all() and np.isfinite(self.squares).all()):
            raise DataError(f"the input of {owner} holds NaN or an infinity; give data that is finite")
        return np.asarray(self.squares / (self.count - 1))


#: merges the statistics of all ranks for an owner
Together = Callable[[str, ChannelStatistics], ChannelStatistics]


def merge(parts: Sequence[ChannelStatistics]) -> ChannelStatistics:
    """Return the statistics of all values of the parts (Chan et al. 1979)."""
    result = parts[0]
    for part in parts[1:]:
        count = result.count + part.count
        if part.count == 0 or result.count == 0:
            result = part if result.count == 0 else result
            continue
        difference = part.mean - result.mean
        mean = result.mean + difference * (part.count / count)
        shifted = np.square(difference) * (result.count * part.count / count)
        result = ChannelStatistics(count, mean, result.squares + part.squares + shifted)
    return result


def deviation(now: ChannelStatistics, mean: FloatArray, variance: FloatArray) -> float:
    """Return how far a BatchNorm's output is from mean 0 and deviation 1: root mean square over the channels.

    Args:
        now: of its input.
        mean: that it subtracts.
        variance: that it divides by, with its epsilon.
    """
    spread = np.sqrt(variance)
    off = np.square((now.mean - mean) / spread) + np.square(np.sqrt(now.squares / now.count) / spread - 1)
    return float(np.sqrt(off.mean()))
