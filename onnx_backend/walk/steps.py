"""The steps of a walk: the layers that share an input, and the name of that input in each stream."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from onnx_backend.walk.readings import Reading, readings
from onnx_backend.walk.sections import Stream
from qsdk.core.graph.graph import Graph
from qsdk.core.layers.graph_layers import GraphLayer, graph_layers
from qsdk.core.layers.layer_problem import Layer
from qsdk.core.planning.plan import Plan


@dataclass(frozen=True)
class LayerCall:
    """An op that multiplies an input with the weights of a step's layers.

    Attributes:
        tag: of the op.
        reading: how it reads its input.
    """

    tag: str
    reading: Reading

    def value(self, stream: Stream) -> str:
        """Return the tensor that is multiplied."""
        node = stream.nodes[stream.at[self.tag]]
        return str(node.output[0] if self.reading.states else node.input[self.reading.source])

    def first(self, stream: Stream) -> str:
        """Return the first hidden state of a recurrent op; `""` for zeros, and for other ops."""
        inputs = stream.nodes[stream.at[self.tag]].input if self.reading.states else ()
        return str(inputs[self.reading.source]) if len(inputs) > self.reading.source else ""


@dataclass(frozen=True)
class LayerGroup:
    """The layers that read one input.

    Attributes:
        layers: at least one.
        calls: the ops that read it; more than one where a weight is used again.
    """

    layers: Sequence[Layer]
    calls: Sequence[LayerCall]

    def tensors(self, stream: Stream) -> list[str]:
        """Return the tensors that the step needs."""
        found = [name for call in self.calls for name in (call.value(stream), call.first(stream))]
        return [name for name in dict.fromkeys(found) if name]


def layer_groups(
    graph: Graph, plan: Plan, frozen: Iterable[str], tags: Mapping[str, str]
) -> tuple[list[LayerGroup], dict[str, str]]:
    """Return the steps in the order of the graph, and why the other weights are in none.

    Args:
        graph: of the sim.
        plan: of the sim.
        frozen: sites whose encodings must stay.
        tags: tensor name -> tag of the node that makes it.
    """
    found, left = graph_layers(graph, plan, frozenset(frozen))
    read: list[tuple[Layer, tuple[tuple[int, ...], tuple[LayerCall, ...]]]] = []
    for item in found:
        calls = _calls(graph, item, tags)
        if isinstance(calls, str):
            left[item.layer.site] = calls
        else:
            layer, found_calls = calls
            read.append((layer, (item.inputs, found_calls)))
    blocks = {layer.site: plan.decisions[layer.site].input_block for layer, _ in read}
    groups = groupby(read, key=lambda p: (p[1][0], tuple(call.reading for call in p[1][1]), blocks[p[0].site]))
    return [
        LayerGroup([layer for layer, _ in group], group[0][1][1]) for _, items in groups if (group := list(items))
    ], left


def _calls(graph: Graph, found: GraphLayer, tags: Mapping[str, str]) -> tuple[Layer, tuple[LayerCall, ...]] | str:
    calls, geometries = [], []
    for index, weight in zip(found.ops, found.weights, strict=True):
        op = graph.ops[index]
        read = readings(op, found, op.inputs.index(weight))
        if isinstance(read, str):
            return read
        calls.append(LayerCall(tags[graph.tensors[op.outputs[0]].name], read[0]))
        geometries.append(read[1])
    if any(geometry != geometries[0] for geometry in geometries):
        return "several convolutions with different pads read it"
    return replace(found.layer, geometry=geometries[0]), tuple(calls)
