"""Lower ConvTranspose to one ConvInteger over all phases and a shuffle of its accumulators.

No integer ConvTranspose exists in ONNX. Along an axis with stride s the output positions of one phase (position modulo
s) are an ordinary convolution of the input with every s-th tap, so the phases of an output channel become s channels
of one convolution (Shi et al. 2016, "Is the deconvolution layer the same as a convolutional layer?", arXiv 1609.07009).
Zeros inserted between the codes would give the same integers, but multiply s times as many positions per axis, most
of them zero. The accumulators are exact either way.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from onnx import NodeProto

from onnx_backend.integer.ir.builder import Shuffle
from onnx_backend.integer.ir.context import Args, LoweringContext
from onnx_backend.integer.ir.operations import Accumulation
from onnx_backend.integer.ir.values import Array, Refused, Value
from onnx_backend.integer.lowering.layers.layers import (
    accumulate,
    accumulator_bounds,
    bytes_of,
    coded_weight,
    plus_constant,
    reach,
    require_positive,
    sum_accumulators,
    weight_parts,
    weight_storage,
)
from onnx_backend.proto.nodes import attributes

_NO_END = np.iinfo(np.int64).max
Size = int | str  # a static size, or the name of a one-element int64 tensor


@dataclass(frozen=True)
class _Axis:
    """The geometry of one spatial axis."""

    kernel: int  # taps
    stride: int  # of the output
    dilation: int  # between taps
    begin: int  # output positions cut off in front
    end: int  # output positions cut off behind, less the output padding

    @property
    def reach(self) -> int:
        """Largest distance, in input positions, from an output position to a tap's input."""
        return (self.kernel - 1) * self.dilation // self.stride

    @property
    def first(self) -> int:
        """Return the group of `stride` output positions with which the convolution starts."""
        return min(self.begin // self.stride, self.reach)

    @property
    def after(self) -> int:
        """Input positions of padding behind: groups of outputs that start behind the last input."""
        return max(-(-((self.kernel - 1) * self.dilation + 1 - self.end) // self.stride) - 1, 0)

    @property
    def cut(self) -> tuple[int, int]:
        """Positions to cut from the shuffled accumulators, in front and behind."""
        # with H inputs the convolution ends with group H + after, the output with stride * (H - 1) + span - end
        span = (self.kernel - 1) * self.dilation + 1
        behind = self.stride * (1 + self.after) - span + self.end
        return self.begin - self.first * self.stride, behind

    def tap(self, index: int) -> tuple[int, int]:
        """Return the phase that a tap of the kernel belongs to and its place in the phase's kernel."""
        return index * self.dilation % self.stride, self.reach - index * self.dilation // self.stride


def conv_transpose(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower ConvTranspose of 1 to 3 spatial axes; a bias is added to the accumulators."""
    activation = bytes_of(ctx, args[0])
    coded = coded_weight(args[1], 1, activation)
    require_positive(coded.scale)
    attrs = attributes(node)
    group = int(attrs.get("group", 1))
    axes = _axes(ctx, node, coded.integers.shape[2:])
    integers = _phases(coded.integers, axes, group)
    phases = math.prod(axis.stride for axis in axes)
    # one scale per output channel of a group; the groups share them
    scale = np.tile(coded.scale, group) if coded.axis is not None else coded.scale.reshape(())
    channels, parts = (-1, *(1 for _ in axes)), []
    pads = [axis.reach - axis.first for axis in axes] + [axis.after for axis in axes]
    for (codes, encoding), part in itertools.product(activation, weight_parts(replace(coded, scale=scale), integers)):
        result = ctx.fresh(f"{node.output[0]}.phases")
        phased = np.repeat(part.scale, phases) if part.scale.ndim else part.scale
        layer = (part.integers, *weight_storage(ctx, part, part.integers), phased, {"group": group, "pads": pads})
        ctx.nodes.append(
            Accumulation("Conv", codes, encoding, *layer, False, node.input[1], result, ctx.label, 2 + len(axes))
        )
        move = partial(_shuffled, ctx, node, axes=axes, channels=integers.shape[0] // phases)
        accumulator = move(result)
        if accumulator != result:
            ctx.shuffles[accumulator] = Shuffle(result, phases, move)
        low, high = accumulator_bounds(part.integers, encoding, tuple(range(1, integers.ndim)))
        low, high = low.reshape(-1, phases).min(1).reshape(channels), high.reshape(-1, phases).max(1).reshape(channels)
        shaped = encoding.scale * (part.scale.reshape(channels) if part.scale.ndim else part.scale)
        parts.append(accumulate(accumulator, shaped, low, high, node))
    value = sum_accumulators(parts, coded.error * reach(activation), coded.scale)
    if len(args) > 2 and args[2] is not None:
        value = plus_constant(value, args[2], channels)
    return value


def _axes(ctx: LoweringContext, node: NodeProto, kernel: Sequence[int]) -> list[_Axis]:
    attrs, rank = attributes(node), len(kernel)
    strides, dilations = (list(attrs.get(key, [1] * rank)) for key in ("strides", "dilations"))
    extra, pads = list(attrs.get("output_padding", [0] * rank)), list(attrs.get("pads", [0] * 2 * rank))
    auto, wanted = attrs.get("auto_pad", "NOTSET"), list(attrs.get("output_shape", []))
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    totals: list[int] | None = None
    if wanted:
        sizes = ctx.sizes(node.input[0], list(range(2, 2 + rank)))
        rows = zip(strides, sizes, extra, spans, wanted[-rank:], strict=True)
        totals = [s * (n - 1) + e + span - out for s, n, e, span, out in rows]
    elif auto.startswith("SAME"):
        totals = [span + e - s for span, e, s in zip(spans, extra, strides, strict=True)]
    elif auto == "VALID":
        pads = [0] * 2 * rank
    if totals is not None:
        if min(totals) < 0:
            raise Refused(
                "its output is larger than its windows reach", "pad the output explicitly with output_padding or Pad"
            )
        small, large = [t // 2 for t in totals], [t - t // 2 for t in totals]
        pads = [*small, *large] if auto == "SAME_UPPER" else [*large, *small]
    rows_ = zip(kernel, strides, dilations, pads[:rank], pads[rank:], extra, strict=True)
    return [_Axis(k, s, d, begin, end - e) for k, s, d, begin, end, e in rows_]


def _phases(integers: Array, axes: Sequence[_Axis], group: int) -> Array:
    """Return the weight of the convolution: (C_in, M / group, taps) -> (M * phases, C_in / group, reach + 1)."""
    inputs, outputs, *_ = integers.shape
    strides, reaches = [axis.stride for axis in axes], [axis.reach for axis in axes]
    phases = np.zeros((group, outputs, *strides, inputs // group, *(r + 1 for r in reaches)), np.int64)
    grouped = integers.reshape(group, inputs // group, *integers.shape[1:]).swapaxes(1, 2)
    for taps in itertools.product(*(range(axis.kernel) for axis in axes)):
        places = [axis.tap(tap) for axis, tap in zip(axes, taps, strict=True)]
        phase, place = (tuple(part) for part in zip(*places, strict=True))
        from_: tuple[Any, ...] = (slice(None), slice(None), slice(None), *taps)
        to: tuple[Any, ...] = (slice(None), slice(None), *phase, slice(None), *place)
        phases[to] = grouped[from_]
    return phases.reshape(group * outputs * math.prod(strides), inputs // group, *(r + 1 for r in reaches))


def _shuffled(ctx: LoweringContext, node: NodeProto, tensor: str, axes: Sequence[_Axis], channels: int) -> str:
    """Move the phases from the channels into the spatial axes and cut the borders.

    One axis at a time, the last one first: each is a transposition of two axes, which is several times faster in ONNX
    Runtime than one of six.
    """
    strides = [axis.stride for axis in axes]
    sizes = _sizes(ctx, node, tensor, axes)
    shape = ctx.shapes.get(node.input[0])
    batch = -1 if shape is None or shape[0] is None else shape[0]
    out = tensor
    if math.prod(strides) > 1:
        for i in reversed(range(len(axes))):
            if strides[i] == 1:
                continue
            inner = [_times(ctx, size, stride) for size, stride in zip(sizes[i + 1 :], strides[i + 1 :], strict=True)]
            view = [-1, strides[i], _product(ctx, sizes[: i + 1]), _product(ctx, inner)]
            out = ctx.node("Reshape", [out, _shape(ctx, view)])
            out = ctx.node("Transpose", [out], perm=[0, 2, 1, 3])
        full = [_times(ctx, size, stride) for size, stride in zip(sizes, strides, strict=True)]
        out = ctx.node("Reshape", [out, _shape(ctx, [batch, channels, *full])])
    cuts = [axis.cut for axis in axes]
    if any(begin or end for begin, end in cuts):
        starts = ctx.constant([begin for begin, _ in cuts], np.int64)
        ends = ctx.constant([-end if end else _NO_END for _, end in cuts], np.int64)
        out = ctx.node("Slice", [out, starts, ends, ctx.constant(np.arange(2, 2 + len(cuts)), np.int64)])
    return out


def _sizes(ctx: LoweringContext, node: NodeProto, tensor: str, axes: Sequence[_Axis]) -> list[Size]:
    """Return the spatial sizes of the convolution's output: static where the input's are."""
    shape = ctx.shapes.get(node.input[0])
    found: list[Size] = []
    for i, axis in enumerate(axes):
        size = None if shape is None else shape[2 + i]
        if size is not None:
            found.append(size - axis.first + axis.after)
        else:
            found.append(ctx.node("Shape", [tensor], start=2 + i, end=3 + i))
    return found


def _times(ctx: LoweringContext, size: Size, factor: Size) -> Size:
    if isinstance(size, int) and isinstance(factor, int):
        return size * factor
    return ctx.node("Mul", [_shape(ctx, [size]), _shape(ctx, [factor])])


def _product(ctx: LoweringContext, sizes: Sequence[Size]) -> Size:
    found: Size = 1
    for size in sizes:
        found = size if found == 1 else _times(ctx, found, size)
    return found


def _shape(ctx: LoweringContext, sizes: Sequence[Size]) -> str:
    if all(isinstance(size, int) for size in sizes):
        return ctx.constant(list(sizes), np.int64)
    parts = [ctx.constant([size], np.int64) if isinstance(size, int) else size for size in sizes]
    return parts[0] if len(parts) == 1 else ctx.node("Concat", parts, axis=0)
