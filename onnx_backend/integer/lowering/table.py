"""One table of what each operator becomes: its short form on codes, and its form in fixed point."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from onnx import NodeProto

from onnx_backend.integer.fixed_point.curves import CURVES, turned
from onnx_backend.integer.fixed_point.fixed_arithmetic import negate
from onnx_backend.integer.fixed_point.newton import square_root
from onnx_backend.integer.fixed_point.to_fixed import clip as clip_fixed
from onnx_backend.integer.ir.context import Args, Lowering, LoweringContext, label
from onnx_backend.integer.ir.values import (
    Bent,
    Constant,
    FixedPoint,
    Integers,
    Joined,
    Linear,
    Lookup,
    Pending,
    Refused,
    Selected,
    Value,
)
from onnx_backend.integer.lowering import short_forms as short
from onnx_backend.integer.lowering.layers.conv_transpose import conv_transpose
from onnx_backend.integer.lowering.layers.layers import conv, gemm, matmul
from onnx_backend.integer.lowering.layers.pool import average_pool, reduction
from onnx_backend.integer.lowering.movement.moves import MOVES, cast, pad
from onnx_backend.integer.lowering.movement.resize import resize
from onnx_backend.integer.lowering.nonlinear import norms
from onnx_backend.integer.lowering.nonlinear import wide_forms as wide
from onnx_backend.integer.lowering.nonlinear.selection import SELECTIONS
from onnx_backend.integer.lowering.nonlinear.softmax import is_nan, log_softmax, softmax, where
from onnx_backend.integer.lowering.nonlinear.tables import TABLES, table
from onnx_backend.integer.lowering.quantizers import dequantize, quantize
from onnx_backend.integer.lowering.recurrent.recurrent import gru, lstm
from qsdk.core.graph.op_facts import PERIODIC

_PENDING = (FixedPoint, Linear, Joined, Bent, Selected, Pending)


@dataclass(frozen=True)
class Forms:
    """The forms of an operator.

    `short` computes on codes: a table, a scale, an int32 accumulator. `wide` computes in fixed point, between
    quantizers. A lowering takes the values of a node's inputs (None for an absent one) and raises `Refused` where the
    operator cannot be computed so.
    """

    short: Lowering | None = None
    wide: Lowering | None = None

    def lower(self, ctx: LoweringContext, node: NodeProto, args: Args) -> Value | tuple[Value, ...]:
        """Return the values of a node's outputs: by the short form on codes, else in fixed point."""
        if self.short and not (self.wide and any(isinstance(arg, FixedPoint) for arg in args)):
            try:
                return self.short(ctx, node, args)
            except Refused:
                if self.wide is None or not _is_between_quantizers(args):
                    raise
        assert self.wide is not None  # a row has one form at least
        found = self.wide(ctx, node, args)
        return replace(found, source=label(node)) if isinstance(found, FixedPoint) else found


def _is_between_quantizers(args: Args) -> bool:
    """Return True if an operand was computed from codes and not quantized since, or if there are several operands."""
    given = [arg for arg in args if arg is not None]
    pending = [arg for arg in given if isinstance(arg, _PENDING) or (isinstance(arg, Lookup) and arg.encoding is None)]
    activations = [arg for arg in given if not isinstance(arg, Constant | Integers)]
    return bool(pending) or len(activations) > 1


#: Functions of one tensor -> how they are computed where it is not codes; those of `CURVES` by straight lines.
_WIDE_FUNCTIONS: Mapping[str, Lowering] = MappingProxyType(
    {
        **{name: wide.curve(name, TABLES[name]) for name in CURVES},
        **dict.fromkeys(PERIODIC, turned),
        "Abs": wide.of_one(wide.magnitude),
        "Exp": wide.wide_exp,
        "HardSigmoid": wide.wide_hard_sigmoid,
        "HardSwish": wide.wide_hard_swish,
        "Log": wide.wide_log,
        "Neg": wide.of_one(lambda ctx, value: negate(value)),
        "Reciprocal": wide.wide_reciprocal,
        "Selu": wide.wide_selu,
        "Sqrt": wide.of_one(square_root),
    }
)

#: Every op that can be lowered.
LOWERINGS: Mapping[str, Forms] = MappingProxyType(
    {
        **{name: Forms(lowering) for name, lowering in {**MOVES, **SELECTIONS}.items()},
        **{name: Forms(table(function), _WIDE_FUNCTIONS.get(name)) for name, function in TABLES.items()},
        "Add": Forms(short.add, wide.wide_add),
        "AveragePool": Forms(average_pool),
        "BatchNormalization": Forms(short.batch_normalization),
        "Cast": Forms(cast),
        "Clip": Forms(short.clip, wide.wide_clip),
        "Concat": Forms(short.concat),
        "Constant": Forms(short.constant),
        "Conv": Forms(conv),
        "ConvTranspose": Forms(conv_transpose),
        "CumSum": Forms(wide=wide.cum_sum),
        "DequantizeLinear": Forms(dequantize),
        "Div": Forms(short.div, wide.wide_div),
        "GRU": Forms(gru),
        "Gemm": Forms(gemm, wide.wide_gemm),
        "GlobalAveragePool": Forms(partial(reduction, mean=True), partial(wide.wide_reduction, mean=True)),
        "GroupNormalization": Forms(wide=norms.group_normalization),
        "InstanceNormalization": Forms(wide=norms.instance_normalization),
        "IsNaN": Forms(is_nan),
        "LSTM": Forms(lstm),
        "LayerNormalization": Forms(wide=norms.last_axes_normalization),
        "LeakyRelu": Forms(short.leaky_relu, wide.wide_leaky_relu),
        "LogSoftmax": Forms(wide=log_softmax),
        "LpNormalization": Forms(wide=norms.lp_normalization),
        "MatMul": Forms(matmul, wide.wide_matmul),
        "Mean": Forms(short.mean),
        "MeanVarianceNormalization": Forms(wide=norms.mean_variance_normalization),
        "Mul": Forms(short.mul, wide.wide_mul),
        "PRelu": Forms(short.prelu, wide.wide_prelu),
        "Pad": Forms(pad),
        "Pow": Forms(short.power, wide.wide_pow),
        "QuantizeLinear": Forms(quantize),
        "RMSNormalization": Forms(wide=partial(norms.last_axes_normalization, centred=False)),
        "SimplifiedLayerNormalization": Forms(wide=partial(norms.last_axes_normalization, centred=False)),
        "ReduceMean": Forms(partial(reduction, mean=True), partial(wide.wide_reduction, mean=True)),
        "ReduceSum": Forms(reduction, wide.wide_reduction),
        "Relu": Forms(
            lambda ctx, node, args: short.clipped(args, 0.0, math.inf),
            wide.of_one(lambda ctx, value: clip_fixed(ctx, value, 0.0, math.inf)),
        ),
        "Resize": Forms(resize),
        "ScatterElements": Forms(wide.scatter),
        "ScatterND": Forms(wide.scatter),
        "Softmax": Forms(wide=softmax),
        "Sub": Forms(partial(short.add, sign=-1), partial(wide.wide_add, sign=-1)),
        "Sum": Forms(short.total),
        "Where": Forms(where),
    }
)
