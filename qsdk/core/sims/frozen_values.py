"""Frozen values: stored tensors that no verb changes, be it by rounding, scaling, correcting or training."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from qsdk.core.errors import ConfigError, FileFormatError
from qsdk.core.planning.plan import Plan

STORED = ("weight", "bias")  # kinds of sites whose tensor the model stores


class HoldsValues(Protocol):
    """The part of a sim, of either side, that concerns its stored tensors."""

    frozen_values: frozenset[str]

    def stored_floats(self, sites: Collection[str]) -> Mapping[str, npt.NDArray[Any]]:
        """Return the float values of the stored tensors at these sites, by site, where there are any."""
        ...


@contextmanager
def require_frozen_values(sim: HoldsValues) -> Iterator[None]:
    """Raise an error after a block that has changed a frozen value.

    Raises:
        ConfigError: names the first of them.
    """
    before = {site: value.copy() for site, value in sim.stored_floats(sim.frozen_values).items()}
    yield
    after = sim.stored_floats(before.keys()) if before else {}
    for site, value in before.items():
        if site not in after or not np.array_equal(value, after[site], equal_nan=True):
            raise ConfigError(
                f"the values of {site} are frozen, and this verb changes them; take that back with "
                f"sim.unfreeze({site!r}), or leave the layer out"
            )


def read_frozen_values(given: Any, plan: Plan, where: str) -> frozenset[str]:
    """Return the sites of frozen values from a file, which may have been written before they existed.

    Raises:
        FileFormatError: they are no sites of this plan.
    """
    sites = given if isinstance(given, list) else [given]
    unknown = [site for site in sites if not isinstance(site, str) or site not in plan.decisions]
    if unknown:
        raise FileFormatError(f"{where} freezes the values of {unknown[0]!r}, which is no site; write the file again")
    return frozenset(sites)
