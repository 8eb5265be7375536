"""How a sim was calibrated, so that it can be calibrated again in the same way."""

from dataclasses import dataclass

from qsdk.core.estimators import PERCENTILE


@dataclass(frozen=True)
class Methods:
    """The options of `qsdk.calibrate`.

    Attributes:
        method: for activations.
        weight_method: for weights; None for `min_max`.
        percentile: of the method of that name.
    """

    method: str = "min_max"
    weight_method: str | None = None
    percentile: float = PERCENTILE
