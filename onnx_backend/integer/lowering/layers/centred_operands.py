"""Operands of a product of two activations: integers centred on 0, also across a Concat of signed parts."""

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from onnx_backend.integer.ir.context import LoweringContext, move, require_codes
from onnx_backend.integer.ir.values import ActivationEncoding, Joined, Linear, Lookup, Term, Value

_MOVED = ActivationEncoding(1.0, 0, TensorProto.UINT8)  # moves without a fill ignore it


@dataclass(frozen=True)
class Factor:
    """An int32 tensor with `value = tensor * scale`, and its static bounds."""

    name: str
    scale: float
    low: int
    high: int


def factor(ctx: LoweringContext, value: Value | None, what: str) -> Factor:
    """Emit the centred integers of a quantized tensor, of its negative, or of a Concat of these.

    Raises:
        Refused: it is none of them.
    """
    if isinstance(value, Joined) and all(step.fill is None for step in value.after):
        parts = [factor(ctx, part, what) for part in value.parts]
        if len({part.scale for part in parts}) == 1:
            name = ctx.builder.node("Concat", [part.name for part in parts], axis=value.axis)
            for step in value.after:
                name = move(ctx, step, name, _MOVED, name)
            return Factor(name, parts[0].scale, min(p.low for p in parts), max(p.high for p in parts))
    line = _line(value) if isinstance(value, Lookup) else None
    if not isinstance(value, Lookup) or line is None:
        codes, encoding = require_codes(value, what)
        line = (encoding.scale, encoding.zero_point, encoding.hi)
    else:
        codes = value.name
    scale, zero, hi = line
    b = ctx.builder
    operands = [b.cast(codes, TensorProto.INT32), b.constant(zero, np.int32)]
    ends = (-zero, hi - zero) if scale > 0 else (zero - hi, zero)
    return Factor(b.node("Sub", operands if scale > 0 else operands[::-1]), abs(scale), *ends)


def as_sum(ctx: LoweringContext, value: Value | None) -> Value | None:
    """Return a Concat of signed parts as a sum of one term, so that constants apply to it; other values as they are."""
    if not isinstance(value, Joined):
        return value
    found = factor(ctx, value, "its input")
    zero, low, high = (np.asarray(v, np.int64) for v in (0, found.low, found.high))
    return Linear((Term(found.name, np.asarray(found.scale, np.float64), zero, low, high),))


def _line(value: Lookup) -> tuple[float, int, int] | None:
    """`(scale, zero point, hi)` of a table that is a straight line through its zero point, rising or falling."""
    if value.encoding is not None:
        return value.encoding.scale, value.encoding.zero_point, value.encoding.hi
    values = value.values.astype(np.float64)
    zeros = np.flatnonzero(values == 0)
    if values.size < 2 or zeros.size != 1:
        return None
    zero = int(zeros[0])
    scale = float(values[zero + 1] if zero + 1 < values.size else -values[zero - 1])
    straight = np.array_equal(value.values, np.float32(scale) * (np.arange(values.size, dtype=np.float32) - zero))
    return (scale, zero, values.size - 1) if straight else None
