"""The options of the last calibration, so that it can be repeated in the same way."""

from dataclasses import asdict, dataclass
from typing import Any

from qsdk.core.errors import ConfigError, FileFormatError
from qsdk.core.ranges.estimators import PERCENTILE, estimator


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


def methods_to_json(methods: Methods) -> dict[str, Any]:
    """Return the methods as plain values for JSON."""
    return asdict(methods)


def read_methods(given: Any, where: str) -> Methods:
    """Return the methods that `methods_to_json` wrote; the file `where` may be older than this entry.

    Raises:
        FileFormatError: they are damaged.
    """
    try:
        result = Methods(**({} if given is None else given))
        for name in (result.method, result.weight_method or result.method):
            estimator(name, result.percentile)
    except (TypeError, ConfigError) as error:
        raise FileFormatError(f"{where} is damaged ({error!r}); write it again with qsdk.save(sim, path)") from error
    return result
