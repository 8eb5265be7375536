"""Split codes of 16 bits into two tensors of 8 bits, since ConvInteger and MatMulInteger accept no more.

With `code = 256 * high + low` and `zero point = 256 * high_zero + low_zero`, the value of a code is the sum of the
values of its halves: `(high - high_zero) * 256 * scale + (low - low_zero) * scale`. Every layer is linear, so it is
computed on both halves, and the two accumulators meet in one requantization.
"""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
from onnx import TensorProto

from onnx_backend.integer.ir.context import LoweringContext, require_codes
from onnx_backend.integer.ir.exact_bounds import are_float32, one_rounding
from onnx_backend.integer.ir.values import ActivationEncoding, Array, Linear, Value

Bytes = tuple[str, ActivationEncoding]


def bytes_of(ctx: LoweringContext, value: Value | None, what: str = "its input") -> list[Bytes]:
    """Return a quantized operand as uint8 codes with their encoding, one tensor for 8 bits and two for 16.

    Raises:
        Refused: the operand does not come straight from a DequantizeLinear.
    """
    codes, encoding = require_codes(value, what)
    if not encoding.wide:
        return [(codes, encoding)]
    if codes not in ctx.halves:
        b = ctx.builder
        shifted = b.node("BitShift", [b.cast(codes, TensorProto.UINT32), b.constant(8, np.uint32)], direction="RIGHT")
        high = b.cast(shifted, TensorProto.UINT8, name=f"{codes}.high")
        rest = b.node("BitwiseAnd", [codes, b.constant(255, np.int32)])
        ctx.halves[codes] = (high, b.cast(rest, TensorProto.UINT8, name=f"{codes}.low"))
    high, low = ctx.halves[codes]
    above = ActivationEncoding(encoding.scale * 256.0, encoding.zero_point >> 8, TensorProto.UINT8)
    return [(high, above), (low, ActivationEncoding(encoding.scale, encoding.zero_point & 255, TensorProto.UINT8))]


def sum_accumulators(parts: Sequence[Linear], error: Fraction = Fraction(0), scale: Array | float = 1.0) -> Linear:
    """Return the sum of a layer's accumulators, which is `error` from the real values, in real units.

    Args:
        parts: the accumulators, whose scales are products of float32 scales and of `scale`.
        error: of the sum.
        scale: of the weight.
    """
    terms = tuple(term for part in parts for term in part.terms)
    if not are_float32(scale):
        error += one_rounding(terms)
    return replace(parts[0], terms=terms, error=error)


def reach(activation: Sequence[Bytes]) -> Fraction:
    """Return the largest magnitude of an activation, in real units."""
    return sum((Fraction(e.scale) * max(e.zero_point, e.hi - e.zero_point) for _, e in activation), Fraction(0))
