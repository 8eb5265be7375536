"""Lower functions made of straight lines (Relu, Clip, PRelu, ...) on values without a quantizer behind them."""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from onnx import NodeProto

from onnx_backend.integer.fixed_point.fixed_arithmetic import (
    add,
    add_constant,
    multiply,
    narrow_to,
    require_unmasked,
    scale_by,
    single_scale,
)
from onnx_backend.integer.fixed_point.to_fixed import clip, to_fixed
from onnx_backend.integer.ir.context import Args, Lowering, LoweringContext
from onnx_backend.integer.ir.values import Constant, FixedPoint, Refused, Value
from onnx_backend.proto.nodes import attributes


def wide_relu(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Clip a value below at 0."""
    return clip(ctx, to_fixed(ctx, args[0]), 0.0, math.inf)


def wide_clip(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Clip a value to constant bounds."""
    bounds = [-math.inf, math.inf]
    for index, bound in enumerate(args[1:]):
        if bound is not None:
            if not isinstance(bound, Constant) or bound.values.size != 1:
                raise Refused("one of its bounds is not a constant scalar", "store the bounds as initializers")
            bounds[index] = float(bound.values.reshape(-1)[0])
    return clip(ctx, to_fixed(ctx, args[0]), bounds[0], bounds[1])


def wide_abs(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Compute the magnitude of a value."""
    value = single_scale(ctx, require_unmasked(to_fixed(ctx, args[0])))
    lo = 0 if value.lo <= 0 <= value.hi else min(abs(value.lo), abs(value.hi))
    name = ctx.node("Abs", [value.name])
    return replace(value, name=name, lo=lo, hi=value.reach, scale=np.abs(value.scale))


def wide_leaky_relu(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Multiply negative values by a slope."""
    value = to_fixed(ctx, args[0])
    below = scale_by(clip(ctx, value, -math.inf, 0.0), float(attributes(node).get("alpha", 0.01)))
    return add(ctx, clip(ctx, value, 0.0, math.inf), below)


def wide_prelu(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Multiply negative values by slopes of their own, stored or computed."""
    value, slope = to_fixed(ctx, args[0]), args[1]
    below = clip(ctx, value, -math.inf, 0.0)
    if isinstance(slope, Constant):
        below = scale_by(below, slope.values.astype(np.float64))
    else:
        below = multiply(ctx, below, to_fixed(ctx, slope, "its slope"))
    return add(ctx, clip(ctx, value, 0.0, math.inf), below)


def wide_hard_sigmoid(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Clip a straight line to 0..1."""
    attrs = attributes(node)
    return _ramp(ctx, to_fixed(ctx, args[0]), float(attrs.get("alpha", 0.2)), float(attrs.get("beta", 0.5)))


def wide_hard_swish(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Multiply a value by its HardSigmoid."""
    value = narrow_to(ctx, single_scale(ctx, to_fixed(ctx, args[0])), 31)
    return multiply(ctx, value, narrow_to(ctx, _ramp(ctx, value, 1.0 / 6.0, 0.5), 31))


def _ramp(ctx: LoweringContext, value: FixedPoint, alpha: float, beta: float) -> FixedPoint:
    return clip(ctx, add_constant(scale_by(value, alpha), beta), 0.0, 1.0)


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
