"""The regions of a sim that may be scaled, the tensors to observe for them, and their rows in reports."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from qsdk.core.graph.graph import Graph
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.spec import Spec
from qsdk.core.planning.plan import Plan
from qsdk.core.scaling.channel_observer import ChannelObserver
from qsdk.core.scaling.channels import varies
from qsdk.core.scaling.edits import input_axis, is_linear
from qsdk.core.scaling.regions import Region
from qsdk.core.scaling.scalings import Factors


def specs_of(plan: Plan) -> dict[str, Spec]:
    """Return the spec of every quantized site."""
    return {site: d.spec for site, d in plan.decisions.items() if d.quantized and d.spec is not None}


def block_unscalable(
    regions: Sequence[Region], graph: Graph, plan: Plan, own: Mapping[str, Encoding], stored: Container[str]
) -> list[Region]:
    """Return the regions, blocked where an encoding is frozen, nothing is quantized, or a tensor cannot be changed.

    Args:
        regions: of the graph.
        graph: of the sim.
        plan: of the sim.
        own: its encodings.
        stored: the names of the tensors that can be changed.
    """

    def why(region: Region) -> str:
        return obstacle([edit.root for edit in region.edits], region.members, graph, plan, own, stored)

    return [region if region.blocked else replace(region, blocked=why(region)) for region in regions]


def obstacle(
    roots: Sequence[int],
    members: Iterable[int],
    graph: Graph,
    plan: Plan,
    own: Mapping[str, Encoding],
    stored: Container[str],
) -> str:
    """Return why stored tensors cannot be changed along with the computed tensors between them, or ""; see above."""
    fixed = next((graph.tensors[root].name for root in roots if graph.tensors[root].name not in stored), None)
    if fixed is not None:
        return f"{fixed} is no parameter of its own that could be changed"
    sites = [graph.tensors[tensor].site for tensor in (*roots, *members)]
    decisions = [plan.decisions[site] for site in sites if site is not None and site in plan.decisions]
    for decision in decisions:
        if decision.encoding_site in own and own[decision.encoding_site].frozen:
            return f"the encoding of {decision.site} is frozen"
    if not any(decision.quantized or decision.dynamic for decision in decisions if decision.kind != "bias"):
        return "nothing in it is quantized"
    return ""


def without_layers(region: Region) -> str:
    """Return why no layer reads a region, or "" where one does."""
    return "" if any(end.linear for end in region.consumers) else "no weight is multiplied with it"


def observers_for(regions: Sequence[Region], graph: Graph) -> dict[int, ChannelObserver]:
    """Return observers by tensor id, for the inputs of all layers and the other tensors at which a region ends."""
    result: dict[int, ChannelObserver] = {}
    for index, op in enumerate(graph.ops):
        tensor = op.inputs[0] if op.inputs else None
        if tensor is not None and is_linear(graph, index) and graph.tensors[tensor].site is not None:
            axis = input_axis(graph, index)
            result.setdefault(tensor, ChannelObserver((axis,), axis))
    for region in regions:
        if region.blocked:
            continue
        for tensor, place in region.members.items():
            ends = any(end.reads == tensor for end in region.consumers)
            if (ends or _in_product(graph, tensor, region)) and graph.tensors[tensor].site is not None:
                axes = tuple(axis for axis in range(place.ids.ndim) if varies(place.ids, axis))
                result.setdefault(tensor, ChannelObserver(axes))
    return result


def _in_product(graph: Graph, tensor: int, region: Region) -> bool:
    """Return whether a MatMul multiplies a tensor by one that is scaled inversely."""
    power = region.members[tensor].power
    products = [graph.ops[op] for op in graph.consumers[tensor] if graph.ops[op].type == "MatMul"]
    return any(
        other in region.members and region.members[other].power != power
        for op in products
        for other in op.inputs
        if other is not None
    )


def row(region: Region, graph: Graph, factors: Factors, **facts: Any) -> dict[str, Any]:
    """Return the report row of a scaled region."""
    return {
        "group": region.label(graph),
        **facts,
        "smallest_factor": float(np.min(factors)),
        "largest_factor": float(np.max(factors)),
        "reason": "",
    }


def blocked_row(region: Region, graph: Graph, names: Sequence[str]) -> dict[str, Any]:
    """Return the report row of a region that is not scaled; `names` are the columns that it leaves empty."""
    seed = graph.tensors[region.seed]
    group = region.label(graph) if region.channels else seed.site or seed.name
    return {"group": group, **dict.fromkeys(names), "reason": region.blocked}
