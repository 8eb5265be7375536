"""ReLU6: a Clip from 0 to 6 cuts every channel at the same value, so factors do not pass it as they pass a ReLU."""

from collections.abc import Container, Mapping
from dataclasses import replace

from qsdk.core.graph.graph import Graph
from qsdk.core.scaling.regions import Region


def clips_at_six(graph: Graph) -> dict[str, int]:
    """Return, by the site of its result, the id of the op of each Clip from 0 to 6."""
    result = {}
    for index, op in enumerate(graph.ops):
        site = graph.tensors[op.outputs[0]].site if op.outputs else None
        bounds = [graph.scalar(bound) for bound in op.inputs[1:]]
        if op.type == "Clip" and bounds == [0.0, 6.0] and site is not None:
            result[site] = index
    return result


def as_relu(graph: Graph, sites: Container[str]) -> Graph:
    """Return the graph with a Relu in place of each Clip whose result has one of these sites."""
    clips = {op for site, op in clips_at_six(graph).items() if site in sites}
    ops = [replace(op, type="Relu", inputs=op.inputs[:1]) if i in clips else op for i, op in enumerate(graph.ops)]
    return replace(graph, ops=ops)


def clips_inside(regions: list[Region], clips: Mapping[str, int], graph: Graph) -> set[str]:
    """Return the sites of the Clips inside regions that can be scaled."""
    within = {tensor for region in regions if not region.blocked for tensor in region.members}
    return {site for site, op in clips.items() if graph.ops[op].outputs[0] in within}
