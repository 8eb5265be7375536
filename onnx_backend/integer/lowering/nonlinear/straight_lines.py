"""Lowerings of functions made of straight lines, on values that no quantizer stands behind: Relu, Clip, PRelu, ..."""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from onnx import NodeProto

from onnx_backend.integer.fixed_point.fixed_arithmetic import (
    multiply,
    narrowed,
    reach,
    scaled,
    shifted,
    single_scale,
    unmasked,
)
from onnx_backend.integer.fixed_point.sums import add
from onnx_backend.integer.fixed_point.to_fixed import clip, widened
from onnx_backend.integer.ir.context import Args, Context, Lowering, attributes
from onnx_backend.integer.ir.values import Constant, Refused, Value, Wide


def wide_relu(ctx: Context, node: NodeProto, args: Args) -> Value:
    """Clip a value below at 0."""
    return clip(ctx, widened(ctx, args[0]), 0.0, math.inf)


def wide_clip(ctx: Context, node: NodeProto, args: Args) -> Value:
    """Clip a value to constant bounds."""
    bounds = [-math.inf, math.inf]
    for index, bound in enumerate(args[1:]):
        if bound is not None:
            if not isinstance(bound, Constant) or bound.values.size != 1:
                raise Refused("one of its bounds is not a constant scalar", "store the bounds as initializers")
            bounds[index] = float(bound.values.reshape(-1)[0])
    return clip(ctx, widened(ctx, args[0]), bounds[0], bounds[1])


def wide_abs(ctx: Context, node: NodeProto, args: Args) -> Value:
    """Take the magnitude of a value."""
    value = single_scale(ctx, unmasked(widened(ctx, args[0])))
    lo = 0 if value.lo <= 0 <= value.hi else min(abs(value.lo), abs(value.hi))
    name = ctx.builder.node("Abs", [value.name])
    return replace(value, name=name, lo=lo, hi=reach(value), scale=np.abs(value.scale))


def wide_leaky_relu(ctx: Context, node: NodeProto, args: Args) -> Value:
    """Multiply what is negative by a slope."""
    value = widened(ctx, args[0])
    below = scaled(clip(ctx, value, -math.inf, 0.0), float(attributes(node).get("alpha", 0.01)))
    return add(ctx, clip(ctx, value, 0.0, math.inf), below)


def wide_prelu(ctx: Context, node: NodeProto, args: Args) -> Value:
    """Multiply what is negative by a slope of its own, stored or computed."""
    value, slope = widened(ctx, args[0]), args[1]
    below = clip(ctx, value, -math.inf, 0.0)
    if isinstance(slope, Constant):
        below = scaled(below, slope.values.astype(np.float64))
    else:
        below = multiply(ctx, below, widened(ctx, slope, "its slope"))
    return add(ctx, clip(ctx, value, 0.0, math.inf), below)


def wide_hard_sigmoid(ctx: Context, node: NodeProto, args: Args) -> Value:
    """Clip a straight line to 0..1."""
    attrs = attributes(node)
    return _ramp(ctx, widened(ctx, args[0]), float(attrs.get("alpha", 0.2)), float(attrs.get("beta", 0.5)))


def wide_hard_swish(ctx: Context, node: NodeProto, args: Args) -> Value:
    """Multiply a value by its HardSigmoid."""
    value = narrowed(ctx, single_scale(ctx, widened(ctx, args[0])), 31)
    return multiply(ctx, value, narrowed(ctx, _ramp(ctx, value, 1.0 / 6.0, 0.5), 31))


def _ramp(ctx: Context, value: Wide, alpha: float, beta: float) -> Wide:
    return clip(ctx, shifted(scaled(value, alpha), beta), 0.0, 1.0)


#: By op type.
STRAIGHT: Mapping[str, Lowering] = MappingProxyType(
    {
        "Abs": wide_abs,
        "Clip": wide_clip,
        "HardSigmoid": wide_hard_sigmoid,
        "HardSwish": wide_hard_swish,
        "LeakyRelu": wide_leaky_relu,
        "PRelu": wide_prelu,
        "Relu": wide_relu,
    }
)
