"""Lower pooling and reductions to sums in int32; the division is folded into the requantization."""

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
from onnx import NodeProto, TensorProto

from onnx_backend.integer.ir.context import Args, LoweringContext, label, reduced_axes, require_codes
from onnx_backend.integer.ir.exact_bounds import one_rounding
from onnx_backend.integer.ir.operations import WindowSum
from onnx_backend.integer.ir.values import ActivationEncoding, Array, Linear, Refused, Term, Value
from onnx_backend.integer.lowering.layers.layers import accumulate, bytes_of, sum_accumulators
from onnx_backend.proto.nodes import attributes

_BITS = 30  # of the mean: its codes have 8 or 16, the rest is fraction


def mean_of_any_size(
    ctx: LoweringContext,
    node: NodeProto,
    activation: tuple[str, ActivationEncoding],
    axes: Sequence[int],
    keepdims: int,
) -> Linear:
    """Write the mean of codes with a fraction of 22 bits (14 for codes of 16 bits), by one integer division.

    The sum is int64 and cannot overflow below 2**32 elements. The division rounds to the nearest, so the mean is off
    by at most half a unit of the fraction; the mean of no elements is that of zero codes.
    """
    codes, encoding = activation
    fraction = _BITS - encoding.hi.bit_length()
    shape, count = ctx.node("Shape", [codes]), ""
    for axis in axes:
        size = ctx.node("Gather", [shape, ctx.constant(axis, np.int64)], axis=0)
        count = ctx.node("Mul", [count, size]) if count else size
    one = ctx.constant(1, np.int64)
    count = ctx.node("Where", [ctx.node("Equal", [count, ctx.constant(0, np.int64)]), one, count])
    total = ctx.node(
        "ReduceSum", [ctx.cast(codes, TensorProto.INT64), ctx.constant(list(axes), np.int64)], keepdims=keepdims
    )
    raised = ctx.node("Mul", [total, ctx.constant(1 << fraction, np.int64)])
    half = ctx.node("Div", [count, ctx.constant(2, np.int64)])
    mean = ctx.node("Div", [ctx.node("Add", [raised, half]), count])
    name = ctx.cast(mean, TensorProto.INT32, name=f"{node.output[0]}.accumulator")
    zero, low, high = (np.asarray(v << fraction, np.int64) for v in (encoding.zero_point, 0, encoding.hi))
    unit = encoding.scale / (1 << fraction)
    terms = (Term(name, np.asarray(unit, np.float64), zero, low, high),)
    return Linear(terms, source=label(node), error=Fraction(unit) / 2)


def reduction(ctx: LoweringContext, node: NodeProto, args: Args, *, mean: bool = False) -> Value:
    """Lower ReduceSum over static sizes, or ReduceMean and GlobalAveragePool."""
    whole = node.op_type == "GlobalAveragePool"
    axes = list(range(2, ctx.rank(node.input[0]))) if whole else reduced_axes(ctx, node, args)
    if axes is None:
        return encoded_value(args)
    return _reduced(ctx, node, args, axes, keepdims=int(attributes(node).get("keepdims", 1)), mean=mean)


def encoded_value(args: Args) -> Value:
    """Return the first argument if it is a quantized activation."""
    require_codes(args[0])
    value = args[0]
    assert value is not None  # encoded() refuses None
    return value


def _reduced(
    ctx: LoweringContext, node: NodeProto, args: Args, axes: Sequence[int], *, keepdims: int, mean: bool
) -> Value:
    codes, encoding = require_codes(args[0])
    shape = ctx.shapes.get(node.input[0])
    sizes = [None if shape is None else shape[axis] for axis in axes]
    if mean and (None in sizes or math.prod(size or 1 for size in sizes) * encoding.hi >= 1 << 31):
        return mean_of_any_size(ctx, node, (codes, encoding), axes, keepdims)
    count = math.prod(ctx.sizes(node.input[0], axes))
    if count == 0:
        raise Refused("it reduces over an axis of size 0", "remove the node")
    result = ctx.fresh(f"{node.output[0]}.accumulator")
    along = tuple(axes)
    whole = WindowSum(
        "ReduceSum",
        codes,
        encoding,
        {"keepdims": keepdims},
        result,
        ctx.label,
        ctx.rank(node.input[0]),
        axes=along,
        count=count,
    )
    ctx.nodes.append(whole)
    low, high = count * -encoding.zero_point, count * (encoding.hi - encoding.zero_point)
    scale = np.asarray(encoding.scale / (count if mean else 1), np.float64)
    if count * encoding.hi >= 1 << 31:
        raise Refused(f"the sum of {count} codes can leave int32", "split the reduction")
    found = accumulate(result, scale, np.asarray(low, np.int64), np.asarray(high, np.int64), node)
    return replace(found, error=one_rounding(found.terms) if mean else Fraction(0))


def average_pool(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower AveragePool to a depthwise ConvInteger with ones; the divisor may vary at the borders."""
    activation = bytes_of(ctx, args[0])
    attrs = attributes(node)
    kernel = list(attrs["kernel_shape"])
    spatial = len(kernel)
    strides, dilations = (list(attrs.get(key, [1] * spatial)) for key in ("strides", "dilations"))
    auto = attrs.get("auto_pad", "NOTSET")
    if auto == "VALID":
        attrs["pads"] = [0] * 2 * spatial
    elif auto != "NOTSET":
        attrs["pads"] = _same_pads(ctx, node, kernel, strides, dilations, upper=auto == "SAME_UPPER")
    pads = list(attrs.get("pads", [0] * 2 * spatial))
    if attrs.get("ceil_mode", 0):  # where a window may be larger than the whole image, however much
        sizes = ctx.sizes(node.input[0], list(range(2, 2 + spatial)))
        whole = [n + begin + end for n, begin, end in zip(sizes, pads[:spatial], pads[spatial:], strict=True)]
        kernel = [min(k, n) if d == 1 else k for k, n, d in zip(kernel, whole, dilations, strict=True)]
    window = tuple(zip(kernel, strides, dilations, pads[:spatial], pads[spatial:], strict=True))
    overhang = _overhang(ctx, node, window) if attrs.get("ceil_mode", 0) else [0] * spatial
    divisor = _divisor(ctx, node, window, overhang, padded=bool(attrs.get("count_include_pad", 0)))
    pads[spatial:] = [end + more for end, more in zip(pads[spatial:], overhang, strict=True)]
    geometry = {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "pads": pads}
    channels, size = ctx.sizes(node.input[0], [1])[0], math.prod(kernel)
    parts = []
    for codes, encoding in activation:
        result = ctx.fresh(f"{node.output[0]}.accumulator")
        pooled = WindowSum("AveragePool", codes, encoding, geometry, result, ctx.label, 2 + spatial, channels)
        ctx.nodes.append(pooled)
        ends = size * -encoding.zero_point, size * (encoding.hi - encoding.zero_point)
        low, high = (np.asarray(end, np.int64) for end in ends)
        parts.append(accumulate(result, encoding.scale / divisor, low, high, node))
    found = sum_accumulators(parts)
    return replace(found, error=one_rounding(found.terms))


Window = tuple[tuple[int, int, int, int, int], ...]


def _same_pads(
    ctx: LoweringContext, node: NodeProto, kernel: list[int], strides: list[int], dilations: list[int], *, upper: bool
) -> list[int]:
    sizes = ctx.sizes(node.input[0], list(range(2, 2 + len(kernel))))
    totals = [
        max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
        for size, k, s, d in zip(sizes, kernel, strides, dilations, strict=True)
    ]
    small, large = [total // 2 for total in totals], [total - total // 2 for total in totals]
    return [*small, *large] if upper else [*large, *small]


def _overhang(ctx: LoweringContext, node: NodeProto, window: Window) -> list[int]:
    """Return how far the last window of ceil_mode reaches beyond the padding; one that starts there is dropped."""
    sizes = ctx.sizes(node.input[0], list(range(2, 2 + len(window))))
    found = []
    for size, (k, s, d, begin, end) in zip(sizes, window, strict=True):
        room = size + begin + end - (k - 1) * d - 1
        last = -(-room // s) * s
        found.append(max(last - room, 0) if last < size + begin else 0)
    return found


def _divisor(ctx: LoweringContext, node: NodeProto, window: Window, overhang: Sequence[int], *, padded: bool) -> Array:
    """Return the divisor of each window's sum: scalar, or one number per output position."""
    size = math.prod(k for k, *_ in window)
    if not any(overhang) and (padded or not any(begin or end for *_, begin, end in window)):
        return np.asarray(float(size))
    sizes = ctx.sizes(node.input[0], list(range(2, 2 + len(window))))
    counts = np.ones(())
    for length, (k, s, d, begin, end), more in zip(sizes, window, overhang, strict=True):
        starts = np.arange((length + begin + end + more - (k - 1) * d - 1) // s + 1) * s - begin
        taps = starts[:, None] + np.arange(k) * d
        # padding counts where the node asks for it, positions beyond it never do
        low, high = (-begin, length + end) if padded else (0, length)
        counts = counts[..., None] * ((taps >= low) & (taps < high)).sum(1)
    return counts
