"""Reports on standard output: as tables, or as one JSON document."""

import json
import math
from collections.abc import Mapping
from typing import Any

from qsdk.core.report import Report


def show(report: Report, *, as_json: bool) -> None:
    """Print the whole of a report; as JSON it is `{"title", "rows", "summary"}`, with infinities and NaN as strings."""
    print(json.dumps(_plain(report.to_dict()), indent=1) if as_json else report.full())


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such numbers
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | None) else str(value)
