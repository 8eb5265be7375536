"""Lower a mean over axes of sizes known only at run time: the count is an integer tensor too."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from onnx import NodeProto, TensorProto

from onnx_backend.integer.ir.context import LoweringContext, label
from onnx_backend.integer.ir.values import ActivationEncoding, Linear, Term

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
    b, fraction = ctx.builder, _BITS - encoding.hi.bit_length()
    shape, count = b.node("Shape", [codes]), ""
    for axis in axes:
        size = b.node("Gather", [shape, b.constant(axis, np.int64)], axis=0)
        count = b.node("Mul", [count, size]) if count else size
    one = b.constant(1, np.int64)
    count = b.node("Where", [b.node("Equal", [count, b.constant(0, np.int64)]), one, count])
    total = b.node("ReduceSum", [b.cast(codes, TensorProto.INT64), b.constant(list(axes), np.int64)], keepdims=keepdims)
    raised = b.node("Mul", [total, b.constant(1 << fraction, np.int64)])
    half = b.node("Div", [count, b.constant(2, np.int64)])
    mean = b.node("Div", [b.node("Add", [raised, half]), count])
    name = b.cast(mean, TensorProto.INT32, name=f"{node.output[0]}.accumulator")
    zero, low, high = (np.asarray(v << fraction, np.int64) for v in (encoding.zero_point, 0, encoding.hi))
    unit = encoding.scale / (1 << fraction)
    terms = (Term(name, np.asarray(unit, np.float64), zero, low, high),)
    return Linear(terms, source=label(node), error=Fraction(unit) / 2)
