"""The options of the last calibration, so that it can be repeated in the same way, and how long its texts were."""

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
        longest: tokens of the longest text, where positions turn what a model computes and lengths are open; else 0.
    """

    method: str = "min_max"
    weight_method: str | None = None
    percentile: float = PERCENTILE
    longest: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """Return the options by name."""
        return {name: value for name, value in asdict(self).items() if name != "longest"}

    @property
    def facts(self) -> dict[str, int]:
        """Return what reports say of the calibration; nothing where there is nothing to say."""
        return {"calibrated_length": self.longest} if self.longest else {}


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
        if type(result.longest) is not int:
            raise TypeError("longest")
    except (TypeError, ConfigError) as error:
        raise FileFormatError(f"{where} is damaged ({error!r}); write it again with qsdk.save(sim, path)") from error
    return result
