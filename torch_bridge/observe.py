"""Observing ranges while a model runs: one reduction per site and batch, one look at the device per batch."""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from qsdk.core.errors import DataError
from qsdk.core.ranges import Range

_MOMENTUM = 0.1


class Observers:
    """The running minimum and maximum of the sites that are wanted.

    `amin` and `amax` are faster than one `aminmax` on a CPU. A Relu needs only the second: its minimum is not below 0,
    and a range contains 0 anyway.
    """

    def __init__(self, wanted: Mapping[str, str], *, averaged: bool) -> None:
        """Take site -> op type; `averaged` for moving averages (momentum 0.1) in place of extremes."""
        self._nonnegative = {site: op_type == "Relu" for site, op_type in wanted.items()}
        self._averaged = averaged
        self._pending: list[Tensor] = []
        self._places: list[tuple[str, bool]] = []  # of the pending values: site, and whether it is a maximum
        self._ends: dict[str, tuple[float, float]] = {}

    def visit(self, site: str, x: Tensor) -> Tensor:
        """Reduce the tensor at a site, if its range is wanted; gives the tensor back."""
        nonnegative = self._nonnegative.get(site)
        if nonnegative is not None and x.numel():
            self._pending.append(x.amax())
            self._places.append((site, True))
            if not nonnegative:
                self._pending.append(x.amin())
                self._places.append((site, False))
        return x

    def end_batch(self, number: int) -> None:
        """Take in what a batch has shown.

        Raises:
            DataError: NaN or an infinity; names the site and the batch.
        """
        if not self._pending:
            return
        device = self._pending[0].device
        values = torch.stack([value.to(device, torch.float32) for value in self._pending]).tolist()
        seen: dict[str, tuple[float, float]] = {}
        for (site, is_high), value in zip(self._places, values, strict=True):
            if not math.isfinite(value):
                raise DataError(
                    f"NaN or inf at the site {site} in batch {number}; clean the data, or skip the owner if its float "
                    "values are meant to be infinite"
                )
            low, high = seen.get(site, (0.0, value) if self._nonnegative[site] else (value, value))
            seen[site] = (low, max(high, value)) if is_high else (min(low, value), high)
        self._pending, self._places = [], []
        for site, (low, high) in seen.items():
            self._ends[site] = self._merged(self._ends[site], low, high) if site in self._ends else (low, high)

    def _merged(self, before: tuple[float, float], low: float, high: float) -> tuple[float, float]:
        if self._averaged:
            return before[0] + _MOMENTUM * (low - before[0]), before[1] + _MOMENTUM * (high - before[1])
        return min(before[0], low), max(before[1], high)

    def ranges(self) -> dict[str, Range]:
        """Site -> range, for the sites that data has reached."""
        return {
            site: Range(np.array([low], np.float32), np.array([high], np.float32))
            for site, (low, high) in self._ends.items()
        }
