"""The whole table of lowerings: the short forms of `ops` first, fixed point where an operand has no short form."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from onnx import NodeProto

from onnx_backend.integer.fixed_point.curves import CURVES, turned
from onnx_backend.integer.fixed_point.to_fixed import cast_to_float
from onnx_backend.integer.ir.context import Args, Lowering, LoweringContext
from onnx_backend.integer.ir.values import Constant, Value
from onnx_backend.integer.lowering import ops
from onnx_backend.integer.lowering.movement.moves import cast, filled
from onnx_backend.integer.lowering.nonlinear.fixed_ops import WIDE, cum_sum, curve, either, scatter_sum
from onnx_backend.integer.lowering.nonlinear.norms import NORMS
from onnx_backend.integer.lowering.nonlinear.selection import scatter as choose_scattered
from onnx_backend.integer.lowering.nonlinear.softmax import is_nan, log_softmax, softmax, where
from onnx_backend.integer.lowering.nonlinear.tables import TABLES
from onnx_backend.integer.lowering.recurrent.recurrent import gru, lstm
from onnx_backend.proto.nodes import attributes
from qsdk.core.graph.op_facts import PERIODIC


def copy_node(ctx: LoweringContext, node: NodeProto, args: Args) -> Value | tuple[Value, ...]:
    """Copy a node that computes on integers already, or treat its float results as numbers.

    Raises:
        Refused: an input or an output is not an integer or boolean tensor.
    """
    numbers = cast_to_float(ctx, node, args) if node.op_type != "ConstantOfShape" else filled(ctx, node, args)
    return ops.copied(ctx, node, args) if numbers is None else numbers


def concat(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower Concat, of constants to a constant."""
    constants = [arg for arg in args if isinstance(arg, Constant)]
    if len(constants) == len(args):
        return Constant(np.concatenate([arg.values for arg in constants], int(attributes(node)["axis"])))
    return ops.concat(ctx, node, args)


def scatter(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower ScatterND and ScatterElements, which choose among codes or add up."""
    adds = attributes(node).get("reduction", "none") == "add"
    return scatter_sum(ctx, node, args) if adds else choose_scattered(ctx, node, args)


#: Every op that can be lowered.
LOWERINGS: Mapping[str, Lowering] = MappingProxyType(
    {
        **ops.LOWERINGS,
        **{name: either(ops.LOWERINGS[name], wide) for name, wide in WIDE.items()},
        **{name: either(ops.LOWERINGS[name], curve(name, TABLES[name])) for name in CURVES},
        **{name: either(ops.LOWERINGS[name], turned) for name in PERIODIC},
        **NORMS,
        "Cast": cast,
        "Concat": concat,
        "CumSum": cum_sum,
        "GRU": gru,
        "IsNaN": is_nan,
        "LSTM": lstm,
        "LogSoftmax": log_softmax,
        "ScatterElements": scatter,
        "ScatterND": scatter,
        "Softmax": softmax,
        "Where": where,
    }
)
