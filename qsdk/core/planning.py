"""Planning: which spec each site gets and why. A pure function of the graph and the config, total over its tensors."""

from collections.abc import Iterable

from qsdk.core.config import QuantConfig
from qsdk.core.errors import ConfigError
from qsdk.core.graph import Graph
from qsdk.core.plan import Plan
from qsdk.core.plan_activations import plan_activations
from qsdk.core.plan_context import Context
from qsdk.core.plan_stored import plan_stored
from qsdk.core.site import matches, nearest_owners, owner_of


def make_plan(graph: Graph, config: QuantConfig, *, extra_owners: Iterable[str] = ()) -> Plan:
    """Decide every tensor of the graph.

    Args:
        graph: read by either door.
        config: defaults and rules.
        extra_owners: owners that rules may name although they have no site (a folded BatchNorm).

    Raises:
        ConfigError: a rule matches no owner.
    """
    _require_matches(graph, config, extra_owners)
    context = Context(graph, config)
    activations = plan_activations(context)
    by_tensor = {**activations, **plan_stored(context, activations)}
    decisions, inside = {}, []
    for tensor in sorted(by_tensor):
        site = graph.tensors[tensor].site
        if site is None:
            inside.append(by_tensor[tensor])
        else:
            decisions[site] = by_tensor[tensor]
    return Plan(decisions, tuple(inside))


def _require_matches(graph: Graph, config: QuantConfig, extra_owners: Iterable[str]) -> None:
    owners = [owner_of(site) for site in graph.sites]
    known = [*owners, *extra_owners]
    for rule in config.rules:
        if not any(matches(rule.pattern, owner) for owner in known):
            near = ", ".join(nearest_owners(rule.pattern, known))
            raise ConfigError(f"the rule {rule} matches no owner in the model; the nearest are: {near}")
