"""The steps of a walk: which layers read one input, and what that input is called in each stream."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from onnx_backend.walk.readings import Reading, readings
from onnx_backend.walk.sections import Stream
from qsdk.core.graph.graph import Graph
from qsdk.core.layers.graph_layers import GraphLayer, graph_layers
from qsdk.core.layers.layer_walk import Layer
from qsdk.core.planning.plan import Plan


@dataclass(frozen=True)
class Call:
    """An op that multiplies an input with the layers of a step.

    Attributes:
        tag: of the op.
        reading: how.
    """

    tag: str
    reading: Reading

    def value(self, stream: Stream) -> str:
        """The tensor that is multiplied."""
        node = stream.nodes[stream.at[self.tag]]
        return str(node.output[0] if self.reading.states else node.input[self.reading.source])

    def first(self, stream: Stream) -> str:
        """The hidden state that a recurrent op begins with; `""` for zeros, and where it plays no part."""
        inputs = stream.nodes[stream.at[self.tag]].input if self.reading.states else ()
        return str(inputs[self.reading.source]) if len(inputs) > self.reading.source else ""


@dataclass(frozen=True)
class Place:
    """Layers that read one input.

    Attributes:
        layers: at least one.
        calls: the ops that read it; more than one where a weight is used again.
    """

    layers: Sequence[Layer]
    calls: Sequence[Call]

    def tensors(self, stream: Stream) -> list[str]:
        """What has to be there for the step."""
        found = [name for call in self.calls for name in (call.value(stream), call.first(stream))]
        return [name for name in dict.fromkeys(found) if name]


def places_of(
    graph: Graph, plan: Plan, frozen: Iterable[str], tags: Mapping[str, str]
) -> tuple[list[Place], dict[str, str]]:
    """The steps in the order of the graph, and why the other weights are in none.

    Args:
        graph: of the sim.
        plan: of the sim.
        frozen: sites whose encodings must stay.
        tags: tensor name -> tag of the node that makes it.
    """
    found, left = graph_layers(graph, plan, frozenset(frozen))
    read: list[tuple[Layer, tuple[tuple[int, ...], tuple[Call, ...]]]] = []
    for item in found:
        calls = _calls(graph, item, tags)
        if isinstance(calls, str):
            left[item.layer.site] = calls
        else:
            layer, made = calls
            read.append((layer, (item.inputs, made)))
    groups = groupby(read, key=lambda pair: (pair[1][0], tuple(call.reading for call in pair[1][1])))
    return [Place([layer for layer, _ in group], group[0][1][1]) for _, items in groups if (group := list(items))], left


def _calls(graph: Graph, found: GraphLayer, tags: Mapping[str, str]) -> tuple[Layer, tuple[Call, ...]] | str:
    calls, geometries = [], []
    for index, weight in zip(found.ops, found.weights, strict=True):
        op = graph.ops[index]
        read = readings(op, found, op.inputs.index(weight))
        if isinstance(read, str):
            return read
        calls.append(Call(tags[graph.tensors[op.outputs[0]].name], read[0]))
        geometries.append(read[1])
    if any(geometry != geometries[0] for geometry in geometries):
        return "several convolutions with different pads read it"
    return replace(found.layer, geometry=geometries[0]), tuple(calls)
