"""Metrics of users: functions of a sim whose value is a number, larger being better."""

from typing import Any

import numpy as np

from qsdk.core.callbacks import log
from qsdk.core.errors import ConfigError


def require_metric(metric: Any) -> None:
    """Raise an error for a metric that is no function.

    Raises:
        ConfigError: shows one.
    """
    if not callable(metric):
        raise ConfigError(
            f"metric={metric!r} is no function; give one of the sim whose value is a number, larger being better: "
            "lambda sim: accuracy(sim)"
        )


def metric_value(metric: Any) -> float:
    """Return what a metric has returned, as a number, which is logged.

    Raises:
        ConfigError: it is none, or NaN.
    """
    try:
        value = float(metric)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the metric is {str(metric)[:40]!r}, which is no number; return one, such as float(correct / total)"
        ) from error
    if np.isnan(value):
        raise ConfigError("the metric is NaN; give a function of the sim whose value is a number, larger being better")
    log("metric", value)
    return value
