"""The statistics of a folded BatchNorm around its layer, kept because the folded weights no longer show them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qsdk.core.errors import FileFormatError

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class FoldedNorm:
    """The mean and deviation, per channel, of a layer's output or input, as the folded BatchNorm normalised them.

    Attributes:
        mean: float32 [channels]: its beta, or, if it came before the layer, the running mean of its input.
        std: float32 [channels]: the magnitude of its gamma, or the root of the running variance of its input.
        before: whether these are the layer's inputs and not its outputs.
    """

    mean: FloatArray
    std: FloatArray
    before: bool = False


def norms_to_json(norms: Mapping[str, FoldedNorm]) -> dict[str, Any]:
    """Return the norms as lists and numbers, for a file."""
    return {
        layer: {"mean": norm.mean.tolist(), "std": norm.std.tolist(), "before": norm.before}
        for layer, norm in norms.items()
    }


def read_norms(given: Any, where: str) -> dict[str, FoldedNorm]:
    """Return the norms that `norms_to_json` wrote into the file `where`.

    Raises:
        FileFormatError: it is damaged.
    """
    try:
        return {
            layer: FoldedNorm(np.array(norm["mean"], np.float32), np.array(norm["std"], np.float32), norm["before"])
            for layer, norm in dict(given).items()
        }
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(f"{where} is damaged ({error!r}); write it again with qsdk.save(sim, path)") from error
