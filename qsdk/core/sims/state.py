"""The state of a sim that verbs change: config, plan and encodings, the same at both doors. Plain frozen data.

Every verb here takes a state and gives a new one, so that a verb that fails leaves the sim as it was.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from qsdk.core.config.config import QuantConfig
from qsdk.core.errors import CalibrationError, ConfigError
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.spec import axis_of
from qsdk.core.planning.plan import Decision, Plan
from qsdk.core.sims.frozen_values import STORED, HoldsValues, values_stay
from qsdk.core.sims.methods import Methods
from qsdk.core.site import matches, owner_of, port_of, said_nearest, without_calls

#: what `freeze` takes besides patterns
KINDS = MappingProxyType({"weights": ("weight",), "activations": ("activation", "input", "output")})
#: gives the values of the stored tensors at these sites, as far as they are stored
Stored = Callable[[Collection[str]], Mapping[str, npt.NDArray[Any]]]


@dataclass(frozen=True)
class SimState:
    """What a sim knows besides its weights, and the weights where they were asked for.

    Attributes:
        config: what was asked for; None for a sim opened from a Q/DQ file.
        plan: what was decided for every site.
        own: site -> encoding, of the sites that have one of their own and whose encoding was found.
        stored: the stored tensors, in a form that only the door knows that took them; None where they are not held.
        methods: how it was calibrated the last time; None where that is not held.
    """

    config: QuantConfig | None
    plan: Plan
    own: Mapping[str, Encoding]
    stored: Any = field(default=None, compare=False, repr=False)
    methods: Methods | None = field(default=None, compare=False)

    def encoding(self, site: str) -> Encoding | None:
        """The encoding of a site, be it its own, shared or derived; None where there is none (yet)."""
        decision = self.plan.decisions.get(site)
        return None if decision is None or not decision.quantized else encoding_of(decision, self.own)


class HasState(HoldsValues, Protocol):
    """A sim of either door, as far as its state goes."""

    def snapshot(self, *, weights: bool = False) -> SimState:
        """The state as it is: config, plan and encodings; the stored tensors too where they are asked for."""
        ...

    def restore(self, state: SimState) -> None:
        """Be again what the state says."""
        ...


@contextmanager
def put_back_on_error(sim: HasState, *, weights: bool = False) -> Iterator[SimState]:
    """Give the sim's state, with its weights if the block may change them, and put it back if the block raises."""
    before = sim.snapshot(weights=weights)
    try:
        with values_stay(sim) if weights else nullcontext():
            yield before
    except BaseException:
        sim.restore(before)
        raise


def owns_encoding(decision: Decision) -> bool:
    """Whether a site has an encoding of its own (not tied, derived or float)."""
    return decision.quantized and decision.tied_to is None and decision.bias_of is None


def encoding_of(decision: Decision, own: Mapping[str, Encoding]) -> Encoding | None:
    """The encoding of a quantized site: its own, its tie's, or for a bias input scale times weight scale."""
    if decision.bias_of is None:
        return own.get(decision.encoding_site)
    source, weight = (own.get(site) for site in decision.bias_of)
    if source is None or weight is None:
        return None
    assert decision.spec is not None
    scale, frozen = source.scale * weight.scale, source.frozen and weight.frozen
    zero_point = np.zeros(scale.shape, np.int32)
    return Encoding(decision.spec.dtype, scale, zero_point, axis_of(decision.spec.granularity), None, frozen)


# --- freezing -----------------------------------------------------------------------------------------------------


def with_frozen(state: SimState, match: str, frozen: bool) -> tuple[SimState, int]:
    """Freeze or unfreeze the encodings of all sites that match; gives the new state and their number.

    Args:
        state: of the sim.
        match: a pattern of owners (`layer1.*`) or of sites (`*conv?:weight`), a site, `weights` or `activations`. Sites
            that share an encoding freeze it for all.
        frozen: what to make them.

    Raises:
        ConfigError: nothing matches, or only sites without an encoding of their own.
        CalibrationError: a site that matches has no encoding yet.
    """
    homes = matched_homes(state.plan, match, "freeze" if frozen else "unfreeze")
    missing = [site for site in homes if site not in state.own]
    if missing and frozen:
        raise CalibrationError(
            f"freeze({match!r}): these sites have no encoding yet: {', '.join(missing)}; call qsdk.calibrate first"
        )
    changed = {site: replace(state.own[site], frozen=frozen) for site in homes if site in state.own}
    return replace(state, own={**state.own, **changed}), len(homes)


def matched_homes(plan: Plan, match: str, verb: str) -> list[str]:
    """The sites that own the encodings of all sites that match, each once, in graph order.

    Raises:
        ConfigError: nothing matches, or only float sites and derived biases.
    """
    found = matched_sites(plan, match)
    homes = dict.fromkeys(d.encoding_site for d in found if d.quantized and d.bias_of is None)
    if homes:
        return list(homes)
    said = f"{verb}({match!r})"
    if not found:
        owners = [owner_of(site) for site in plan.decisions]
        near = said_nearest(match.partition(":")[0], owners)
        raise ConfigError(f"{said} matches no owner in the model; {near}")
    site = found[0]
    if site.bias_of is not None:
        raise ConfigError(
            f"{said}: the scale of {site.site} is that of {' times that of '.join(site.bias_of)}; name these"
        )
    raise ConfigError(f"{said} matches only sites that stay float, such as {site.site} ({site.reason})")


def matched_sites(plan: Plan, match: str) -> list[Decision]:
    """The decisions of all sites that a pattern, a site's name or a kind (`weights`, `activations`) matches."""
    decisions = list(plan.decisions.values())
    if match in KINDS:
        return [decision for decision in decisions if decision.kind in KINDS[match]]
    if match in plan.decisions:
        return [plan.decisions[match]]
    return [decision for decision in decisions if matches_site(match, decision.site)]


def matched_values(plan: Plan, match: str) -> frozenset[str]:
    """The sites of the stored tensors that match, float ones too."""
    return frozenset(decision.site for decision in matched_sites(plan, match) if decision.kind in STORED)


def matches_site(pattern: str, site: str) -> bool:
    """Whether a pattern matches a site's owner or, with a colon in it, the whole site, as in rules.

    Example:
        >>> matches_site("*conv?:weight", "layer1.conv1:weight"), matches_site("conv?", "layer1.conv1:bias")
        (True, True)
    """
    owner, port = owner_of(site), port_of(site)
    if ":" not in pattern:
        return matches(pattern, owner)
    return any(name == pattern or fnmatchcase(name, pattern) for name in (site, f"{without_calls(owner)}:{port}"))
