"""Layers in a search for factors: the effect of quantization on their outputs, from a sample of their inputs."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qsdk.core.graph.graph import Graph
from qsdk.core.numerics import affine
from qsdk.core.numerics.spec import Spec
from qsdk.core.planning.operands import operands_of
from qsdk.core.ranges.ranges import Range, encoding_from_range, range_of
from qsdk.core.scaling.channel_observer import ChannelObserver
from qsdk.core.scaling.edits import input_axis
from qsdk.core.scaling.scalings import FloatArray

Array = npt.NDArray[np.floating]


@dataclass(frozen=True)
class ObservedLayer:
    """A layer and its input.

    Attributes:
        op: its id.
        root: id of its weight.
        tensor: id of its input.
        channel_axis: output channels of the stored weight.
        input_axis: input channels of the stored weight.
        weight_spec: of its weight; None where it stays float.
        input_spec: of its input, likewise.
        input_block: channels of each scale with which its input is rounded to int8 while the model runs, or None.
        plain: whether it multiplies rows by one matrix (a convolution with a kernel or groups does not).
    """

    op: int
    root: int
    tensor: int
    channel_axis: int
    input_axis: int
    weight_spec: Spec | None
    input_spec: Spec | None
    plain: bool
    input_block: int | None


def observed_layer(
    graph: Graph, op_id: int, specs: Mapping[str, Spec], blocks: Mapping[str, int]
) -> ObservedLayer | None:
    """Return a linear op as a layer; None where its weight is no matrix or kernel of its own.

    Args:
        graph: of the model.
        op_id: of a linear op.
        specs: site -> its spec, for every quantized site.
        blocks: weight site -> `input_block`, where it is not None.
    """
    op = graph.ops[op_id]
    tensor = op.inputs[0]
    operand = next((o for o in operands_of(graph, op_id) if o.role == "weight"), None)
    if operand is None or tensor is None or operand.channel_axis is None or operand.input_axis is None:
        return None
    shape = graph.tensors[operand.root].shape or ()
    kernel = len(shape) > 2 and any(size != 1 for size in shape[2:])
    plain = not kernel and op.attributes.get("group", 1) == 1 and (len(shape) == 2 or input_axis(graph, op_id) == 1)
    weight, fed = graph.tensors[operand.root].site or "", graph.tensors[tensor].site or ""
    axes = operand.channel_axis, operand.input_axis
    return ObservedLayer(
        op_id, operand.root, tensor, *axes, specs.get(weight), specs.get(fed), plain, blocks.get(weight)
    )


def output_error(
    layer: ObservedLayer, weight: FloatArray, observer: ChannelObserver, rows_by: Array, weight_by: Array
) -> float:
    """Return the relative error of a layer's output, its input divided by factors and its weight multiplied.

    Both are quantized as in the sim, with their new ranges. For a layer with a kernel or with groups, products of
    different inputs are assumed to be independent.

    Args:
        layer: the layer.
        weight: as it is stored.
        observer: statistics of its input.
        rows_by: divisors of the input, one value per position along its channel axis.
        weight_by: factors of the weight; they broadcast to its shape.
    """
    scaled = np.asarray(weight * weight_by, np.float32)
    quantized = scaled
    if layer.weight_spec is not None:
        quantized = _nearest(scaled, range_of(scaled, layer.weight_spec), layer.weight_spec)
    rows = np.asarray(observer.rows / rows_by, np.float32)
    fed = rows
    if layer.input_spec is not None and layer.input_spec.dtype.is_quantized:
        low, high = (np.asarray(end / rows_by, np.float32) for end in (observer.low, observer.high))
        fed = _nearest(rows, Range(low.min(keepdims=True), high.max(keepdims=True)), layer.input_spec)
    elif layer.input_block is not None:
        fed = _in_blocks(rows, layer.input_block)
    if layer.plain:
        exact, result = (_times(layer, x, w) for x, w in ((rows, scaled), (fed, quantized)))
        return float(np.square(result - exact).sum() / max(float(np.square(exact).sum()), 1e-30))
    return _independent(layer, scaled, quantized - scaled, rows, fed - rows)


def _independent(layer: ObservedLayer, weight: Array, weight_off: Array, rows: Array, rows_off: Array) -> float:
    """Return the same error from the squares of the operands alone."""
    power, noise = (np.square(x).mean(axis=0) for x in (rows, rows_off))
    axis, kernel = layer.input_axis, tuple(range(2, weight.ndim))
    if weight.shape[axis] != power.size:  # groups: axis 0 runs over them
        groups = power.size // weight.shape[axis]
        power, noise = (np.repeat(x.reshape(groups, -1), weight.shape[0] // groups, axis=0) for x in (power, noise))
    elif axis == 0:
        power, noise = power[:, None], noise[:, None]
    squares, off = (np.square(w).sum(axis=kernel) for w in (weight, weight_off))
    energy = float((squares * power).sum())
    return float((off * power + squares * noise).sum()) / max(energy, 1e-30)


def _times(layer: ObservedLayer, rows: Array, weight: Array) -> Array:
    """Return rows [n, in] times the weight as [in, out]."""
    matrix = np.moveaxis(weight, (layer.input_axis, layer.channel_axis), (0, 1)).reshape(rows.shape[1], -1)
    result: Array = rows @ matrix
    return result


def _in_blocks(rows: FloatArray, block: int) -> FloatArray:
    """Return rows as a layer multiplies them that rounds its input to int8."""
    whole = np.pad(rows, ((0, 0), (0, -rows.shape[1] % block)))
    blocks = whole.reshape(len(rows), -1, block)
    scale = affine.block_scale(np.abs(blocks).max(-1, keepdims=True))
    rounded: FloatArray = affine.fake_quantize(blocks, scale, np.float32(0), -128, 127)
    return rounded.reshape(whole.shape)[:, : rows.shape[1]]


def _nearest(x: FloatArray, observed: Range, spec: Spec) -> FloatArray:
    return encoding_from_range(observed, spec).fake_quantize(x)
