"""The state of a sim that verbs change: config, plan and encodings, the same for both sides. Plain frozen data.

The functions here take a state and return a new one, so that a verb that fails leaves the sim unchanged.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from qsdk.core.config.config import QuantConfig
from qsdk.core.errors import CalibrationError, ConfigError, FileFormatError
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.spec import axis_of
from qsdk.core.planning.plan import Decision, Plan
from qsdk.core.ranges.estimators import PERCENTILE, estimator
from qsdk.core.site import matches, nearest_in_words, owner_of, port_of, without_calls


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
    """Return the methods that `methods_to_json` wrote; the file `where` may be older than this entry."""
    try:
        result = Methods(**({} if given is None else given))
        for name in (result.method, result.weight_method or result.method):
            estimator(name, result.percentile)
        if type(result.longest) is not int:
            raise TypeError("longest")
    except (TypeError, ConfigError) as error:
        raise FileFormatError(f"{where} is damaged ({error!r}); write it again with qsdk.save(sim, path)") from error
    return result


STORED = ("weight", "bias")  # kinds of sites whose tensor the model stores


class HoldsValues(Protocol):
    """The part of a sim, of either side, that concerns its stored tensors."""

    frozen_values: frozenset[str]

    def stored_floats(self, sites: Collection[str]) -> Mapping[str, npt.NDArray[Any]]:
        """Return the float values of the stored tensors at these sites, by site, where there are any."""
        ...


@contextmanager
def require_frozen_values(sim: HoldsValues) -> Iterator[None]:
    """Raise an error after a block that has changed a frozen value."""
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
    """Return the sites of frozen values from a file, which may have been written before they existed."""
    sites = given if isinstance(given, list) else [given]
    unknown = [site for site in sites if not isinstance(site, str) or site not in plan.decisions]
    if unknown:
        raise FileFormatError(f"{where} freezes the values of {unknown[0]!r}, which is no site; write the file again")
    return frozenset(sites)


#: the words that `freeze` accepts besides patterns
KINDS = MappingProxyType({"weights": ("weight",), "activations": ("activation", "input", "output")})
#: returns the values of the stored tensors at these sites, where there are any
StoredReader = Callable[[Collection[str]], Mapping[str, npt.NDArray[Any]]]


@dataclass(frozen=True)
class SimState:
    """The config, plan and encodings of a sim, and its stored tensors if they were requested.

    Attributes:
        config: as given by the user; None for a sim opened from a Q/DQ file.
        plan: the decision for every site.
        own: site -> encoding, of the sites that own one which is known.
        stored: the stored tensors, in a form private to the side that took them; None where they were not requested.
        methods: of the last calibration; None where they were not requested.
    """

    config: QuantConfig | None
    plan: Plan
    own: Mapping[str, Encoding]
    stored: Any = field(default=None, compare=False, repr=False)
    methods: Methods | None = field(default=None, compare=False)

    def encoding(self, site: str) -> Encoding | None:
        """Return the encoding of a site, be it its own, shared or derived; None where there is none (yet)."""
        decision = self.plan.decisions.get(site)
        return None if decision is None or not decision.quantized else encoding_of(decision, self.own)


class HasState(HoldsValues, Protocol):
    """The part of a sim, of either side, that concerns its state."""

    def snapshot(self, *, weights: bool = False) -> SimState:
        """Return the present config, plan and encodings, and with `weights` the stored tensors."""
        ...

    def restore(self, state: SimState) -> None:
        """Go back to a state."""
        ...

    def alone(self) -> AbstractContextManager[None]:
        """Keep the sim to this thread for a while."""
        ...


@contextmanager
def put_back_on_error(sim: HasState, *, weights: bool = False) -> Iterator[SimState]:
    """Yield the sim's state, and restore it if the block raises. With `weights`, stored tensors too."""
    with sim.alone():
        before = sim.snapshot(weights=weights)
        try:
            with require_frozen_values(sim) if weights else nullcontext():
                yield before
        except BaseException:
            sim.restore(before)
            raise


def owns_encoding(decision: Decision) -> bool:
    """Return whether a site has an encoding of its own (not tied, derived or float)."""
    return decision.quantized and decision.tied_to is None and decision.bias_of is None


def encoding_of(decision: Decision, own: Mapping[str, Encoding]) -> Encoding | None:
    """Return the encoding of a quantized site: its own, its tie's, or for a bias input scale times weight scale."""
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
    """Return the state with the encodings of all matching sites frozen or not, and their number; see `sim.freeze`."""
    sites = matched_owners(state.plan, match, "freeze" if frozen else "unfreeze")
    missing = [site for site in sites if site not in state.own]
    if missing and frozen:
        raise CalibrationError(
            f"freeze({match!r}): these sites have no encoding yet: {', '.join(missing)}; call qsdk.calibrate first"
        )
    changed = {site: replace(state.own[site], frozen=frozen) for site in sites if site in state.own}
    return replace(state, own={**state.own, **changed}), len(sites)


def matched_owners(plan: Plan, match: str, verb: str) -> list[str]:
    """Return the sites that own the encodings of all sites that match, each once, in graph order."""
    result = matched_sites(plan, match)
    sites = dict.fromkeys(d.encoding_site for d in result if d.quantized and d.bias_of is None)
    if sites:
        return list(sites)
    call = f"{verb}({match!r})"
    if not result:
        owners = [owner_of(site) for site in plan.decisions]
        near = nearest_in_words(match.partition(":")[0], owners)
        raise ConfigError(f"{call} matches no owner in the model; {near}")
    site = result[0]
    if site.bias_of is not None:
        raise ConfigError(
            f"{call}: the scale of {site.site} is that of {' times that of '.join(site.bias_of)}; name these"
        )
    raise ConfigError(f"{call} matches only sites that stay float, such as {site.site} ({site.reason})")


def matched_sites(plan: Plan, match: str) -> list[Decision]:
    """Return the decisions of all sites that a pattern, a site's name or a kind (`weights`, `activations`) matches."""
    decisions = list(plan.decisions.values())
    if match in KINDS:
        return [decision for decision in decisions if decision.kind in KINDS[match]]
    if match in plan.decisions:
        return [plan.decisions[match]]
    return [decision for decision in decisions if matches_site(match, decision.site)]


def matched_values(plan: Plan, match: str) -> frozenset[str]:
    """Return the sites of the stored tensors that match, float ones too."""
    return frozenset(decision.site for decision in matched_sites(plan, match) if decision.kind in STORED)


def matches_site(pattern: str, site: str) -> bool:
    """Return whether a pattern matches a site's owner or, with a colon in it, the whole site, as in rules.

    Examples:
        >>> matches_site("*conv?:weight", "layer1.conv1:weight"), matches_site("conv?", "layer1.conv1:bias")
        (True, True)
    """
    owner, port = owner_of(site), port_of(site)
    if ":" not in pattern:
        return matches(pattern, owner)
    return any(name == pattern or fnmatchcase(name, pattern) for name in (site, f"{without_calls(owner)}:{port}"))
