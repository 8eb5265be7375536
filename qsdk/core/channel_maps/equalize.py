"""Cross-layer equalization (Nagel et al. 2019, section 4.1): equal ranges of weights on both sides of a tensor."""

from collections.abc import Mapping

import numpy as np

from qsdk.core.channel_maps.flood import Ids
from qsdk.core.channel_maps.scale_groups import End, ScaleGroup
from qsdk.core.channel_maps.scalings import Factors, FloatArray, Scalings, balance, widest
from qsdk.core.channel_maps.search import ChannelObserver
from qsdk.core.graph.graph import Graph
from qsdk.core.graph.op_facts import VIEWS
from qsdk.core.layers.expected_means import FoldedNorm
from qsdk.core.patterns.linear import bias_of_add
from qsdk.core.planning.operands import operands_of

_CONVERGED = 1e-3  # of the logarithm of a factor
#: ops between a layer and its readers that pass on the shift of a channel unchanged, if no value is below it
_SHIFT = VIEWS | {"Relu", "Dropout", "MaxPool"}


def equalization_obstacle(group: ScaleGroup) -> str:
    """Return why a group cannot be equalized, or "": weights with ranges are needed on both sides."""
    if not group.producers or not all(end.linear for end in group.ends):
        return "not every op at its ends multiplies a weight"
    return ""


def equalize(scalings: Scalings, iterations: int) -> int:
    """Equalize the ranges of weights over chains of layers until nothing changes; return the number of iterations.

    Each group takes `sqrt(r1 / r2)`. Where a depthwise layer lies between two groups, alternating between them
    converges to the cube roots that the paper has for three layers.
    """
    for count in range(iterations):
        largest = 0.0
        for number in range(len(scalings.groups)):
            step = scalings.multiply(number, balance(*ranges(scalings, number)))
            largest = max(largest, float(np.abs(np.log(step)).max(initial=0.0)))
        if largest < _CONVERGED:
            return count + 1
    return iterations


def ranges(scalings: Scalings, number: int) -> tuple[Factors, Factors]:
    """Return the largest weight of each channel, on the side that is divided and on the side that is multiplied."""
    group = scalings.groups[number]
    result = {-1: np.zeros(group.channels), 1: np.zeros(group.channels)}
    for edit in group.edits:
        if edit.role == "weight":
            magnitudes = scalings.largest(edit.root) * scalings.multiplier(edit.root)
            result[edit.power] = np.maximum(result[edit.power], widest(magnitudes, edit.ids, group.channels))
    return result[-1], result[1]


# --- high biases (section 4.1.3) ----------------------------------------------------------------------------------


def bias_of(graph: Graph, op_id: int) -> int | None:
    """Return the stored bias of a linear op, its own or that of the Add behind it; None where there is none."""
    result = next((o.root for o in operands_of(graph, op_id) if o.role == "bias"), None)
    reader = graph.sole_consumer(graph.ops[op_id].outputs[0])
    if result is not None or reader is None:
        return result
    added = bias_of_add(graph, reader)
    return None if added is None else graph.constant_root(added)


def absorption_obstacle(graph: Graph, group: ScaleGroup) -> str:
    """Return why the biases of a group's producer cannot move to its readers exactly, or "" where they can."""
    makers = {end.op for end in group.producers}
    biases = [bias_of(graph, end.op) for end in group.ends]
    if len(makers) != 1 or None in biases:
        return "not one producer with a bias, read by layers with a bias"
    if any(len(graph.consumers[bias]) > 1 for bias in biases if bias is not None):
        return "several layers share a bias"
    between = {graph.producer[tensor] for tensor in group.members} - makers
    adds = {op for op in between if bias_of_add(graph, op) is not None}
    if any(graph.ops[op].type not in _SHIFT for op in between - adds):
        return "something else than a ReLU lies between"
    for end in group.consumers:
        op = graph.ops[end.op]
        pads_itself = op.attributes.get("auto_pad", "NOTSET") not in ("NOTSET", b"NOTSET", "VALID", b"VALID")
        if op.type == "ConvTranspose" or any(op.attributes.get("pads", ())) or pads_itself:
            return f"{op.type} pads with zeros, which do not shift"
    return ""


def shifted_biases(
    graph: Graph, group: ScaleGroup, scalings: Scalings, by: Factors, moved: Mapping[int, FloatArray]
) -> dict[int, FloatArray]:
    """Return the new biases of the scaled model if the activations of a group are lowered by `by` in each channel.

    `moved` are biases that have moved already.
    """
    result = dict(moved)
    for end in group.ends:
        bias = bias_of(graph, end.op)
        assert bias is not None
        weight = next(edit for edit in end.edits if edit.role == "weight")
        if end.reads is None:
            ids = _ids_of_bias(group, end, bias)
            result[bias] = np.asarray(result.get(bias, scalings.value(bias)) - by[ids], np.float32)
        else:
            products = scalings.value(weight.root).astype(np.float64) * by[weight.ids]
            channel = next(o.channel_axis for o in operands_of(graph, end.op) if o.role == "weight")
            assert channel is not None
            others = tuple(axis for axis in range(products.ndim) if axis != channel)
            result[bias] = np.asarray(result.get(bias, scalings.value(bias)) + products.sum(axis=others), np.float32)
    return result


def activation_minimum(
    group: ScaleGroup, graph: Graph, observers: Mapping[int, ChannelObserver], norms: Mapping[str, FoldedNorm]
) -> Factors:
    """Return the lower bound of a group's activations per channel, 0 at least.

    It is the smallest observed value. Without observations it is the mean less three standard deviations of the
    BatchNorm that was folded into the producer, as in the paper: about one value in 700 is lower.
    """
    result = np.full(group.channels, np.inf)
    for end in group.consumers:
        assert end.reads is not None
        if end.reads in observers:
            np.minimum.at(result, group.members[end.reads].ids.reshape(-1), observers[end.reads].low)
    if not np.isfinite(result).all():
        end = group.producers[0]
        norm = norms.get(end.owner(graph))
        result = np.zeros(group.channels)
        if norm is not None and not norm.before:
            bias = bias_of(graph, end.op)
            assert bias is not None
            result[_ids_of_bias(group, end, bias).reshape(-1)] = norm.mean - 3 * norm.std
    lowest_above: Factors = np.maximum(result, 0.0)
    return lowest_above


def _ids_of_bias(group: ScaleGroup, end: End, bias: int) -> Ids:
    edits = [*end.edits, *group.between]
    return next(edit.ids for edit in edits if edit.root == bias)
