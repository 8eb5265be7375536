"""The steps of a walk: the layers that share an input, and the name of that input in each stream."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_backend.walk.sections import Stream
from qsdk.core.graph.graph import Graph, Op
from qsdk.core.graph.op_facts import RECURRENT
from qsdk.core.layers.graph_layers import GraphLayer, graph_layers
from qsdk.core.layers.layer_problem import Layer, PatchGeometry
from qsdk.core.planning.plan import Plan

Array = npt.NDArray[Any]
_STATES = 5  # where a recurrent op takes its first hidden state
_LENGTHS = 4


@dataclass(frozen=True)
class Reading:
    """The way in which one op reads a layer's input.

    Attributes:
        source: position of the tensor among the op's inputs; the hidden states of a recurrent op are its output 0.
        states: True if these hidden states are multiplied.
        swapped: True if the last two axes are swapped first.
        directions: of a recurrent op; each multiplies the whole input.
        reverse: which directions run backwards.
        lead: the pads of a convolution by `auto_pad`: kernel extents, strides, and whether the odd one comes first.
    """

    source: int
    states: bool = False
    swapped: bool = False
    directions: int = 0
    reverse: tuple[bool, ...] = ()
    lead: tuple[tuple[int, ...], tuple[int, ...], bool] | None = None

    def rows(self, value: Array, first: Array | None = None) -> Array:
        """Return the values that the layer multiplies.

        Args:
            value: the op's input, or its output where `states`.
            first: the hidden state that a recurrent op begins with, [directions, N, hidden]; zeros where None.

        Returns:
            float32, [..., K] for a linear layer, [..., directions * K] for a recurrent one, [N, C, *spatial] for a
            convolution.
        """
        if self.states:
            return self._hidden(value, first)
        if self.directions > 1:
            return np.concatenate([value] * self.directions, -1)
        if self.swapped and value.ndim > 1:
            return value.swapaxes(-1, -2)
        return value if self.lead is None else _padded(value, *self.lead)

    def _hidden(self, outputs: Array, first: Array | None) -> Array:
        """Return the states before each step, from the states after each: [length, directions, N, hidden]."""
        begin = np.zeros_like(outputs[:1]) if first is None else first[None]
        parts = []
        for direction, backwards in enumerate(self.reverse):
            start, after = begin[:, direction], outputs[:, direction]
            parts.append(np.concatenate([after[1:], start] if backwards else [start, after[:-1]]))
        return np.concatenate(parts, -1)


def readings(op: Op, found: GraphLayer, position: int) -> tuple[Reading, PatchGeometry | None] | str:
    """Return how an op reads the input of a layer, and the geometry of its patches; or why no solver can use it.

    `position` is that of the weight among the op's inputs.
    """
    geometry = found.layer.geometry
    if op.type == "Gather":
        return Reading(1), None
    if op.type in RECURRENT:
        read = _recurrent(op, position)
        return read if isinstance(read, str) else (read, None)
    if geometry is None:
        swapped = position == 0 if op.type == "MatMul" else bool(op.attributes.get("transA", 0))
        return Reading(1 - position if op.type == "MatMul" else 0, swapped=swapped), None
    auto = op.attributes.get("auto_pad", "NOTSET")
    if geometry.transposed and (op.attributes.get("output_shape") or auto not in ("NOTSET", "VALID")):
        return "ConvTranspose whose padding follows from the shape of its output"
    if auto == "NOTSET":
        return Reading(0), geometry
    bare = replace(geometry, padding=((0, 0),) * len(geometry.kernel))
    if auto == "VALID":
        return Reading(0), bare
    extents = tuple(d * (k - 1) + 1 for d, k in zip(geometry.dilation, geometry.kernel, strict=True))
    before = auto == "SAME_LOWER"
    if all(stride == 1 for stride in geometry.stride):
        pads = tuple(_split(extent - 1, before) for extent in extents)
        return Reading(0), replace(geometry, padding=pads)
    return Reading(0, lead=(extents, geometry.stride, before)), bare


def _recurrent(op: Op, position: int) -> Reading | str:
    direction = str(op.attributes.get("direction", "forward"))
    reverse = {"forward": (False,), "reverse": (True,)}.get(direction, (False, True))
    if op.attributes.get("layout", 0):
        return f"{op.type} with the batch first"
    if position == 1:
        return Reading(0, directions=len(reverse))
    if len(op.inputs) > _LENGTHS and op.inputs[_LENGTHS] is not None:
        return f"{op.type} with sequences of several lengths"
    if op.type == "GRU" and not op.attributes.get("linear_before_reset", 0):
        return "GRU that resets the hidden state before it is multiplied"
    return Reading(_STATES, states=True, directions=len(reverse), reverse=reverse)


def _padded(value: Array, extents: Sequence[int], strides: Sequence[int], before: bool) -> Array:
    pads = []
    for size, extent, stride in zip(value.shape[2:], extents, strides, strict=True):
        total = max((math.ceil(size / stride) - 1) * stride + extent - size, 0)
        pads.append(_split(total, before))
    return np.pad(value, [(0, 0), (0, 0), *pads])


def _split(total: int, before: bool) -> tuple[int, int]:
    less = total // 2
    return (total - less, less) if before else (less, total - less)


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

    `frozen` are the sites whose encodings must stay; `tags` name the node that makes a tensor.
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
