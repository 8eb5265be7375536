"""Write operations with standard ONNX operators on integers.

The recipes use only operators whose integer kernels are right on every operand: ONNX Runtime's int64 Sign, Clip, Max
and Min are wrong for operands in [2**31, 2**32) on x86, so the shift is done on uint64 and the clip on int32.
"""

import math
from collections.abc import Sequence

import numpy as np
from onnx import NodeProto, TensorProto

from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.operations import Accumulation, Join, Product, Requantization, Table, WindowSum
from onnx_backend.integer.ir.requantization import RequantMultiplier
from onnx_backend.integer.ir.values import ActivationEncoding, Array
from qsdk.core.numerics.fixed_point import HIGH_MUL, MAX_SHIFT

_INT32 = (1 << 31) - 1
#: A table of fewer codes is looked up in one row.
_WORTH_SHARING = 1 << 12


def accumulate(b: Builder, op: Accumulation) -> None:
    """Write a layer's sum of products; weights of 4 and 2 bits stay packed and are widened by a Cast."""
    weight, zero = b.packed(op.weight + op.zero, op.bits, op.stem), b.constant(op.zero, np.uint8)
    codes, point = op.codes, b.constant(op.encoding.zero_point, np.uint8)
    inputs = [weight, codes, zero, point] if op.weight_first else [codes, weight, point, zero]
    b.write(f"{op.op_type}Integer", inputs, op.result, **op.attributes)


def multiply(b: Builder, op: Product) -> None:
    """Write the product of two activations."""
    if op.op_type == "MatMul":
        points = [b.constant(side.encoding.zero_point, np.uint8) for side in (op.left, op.right)]
        b.write("MatMulInteger", [op.left.codes, op.right.codes, *points], op.result)
        return
    centred = [centre(b, side.codes, side.encoding) for side in (op.left, op.right)]
    b.write("Mul", centred, op.result)


def centre(b: Builder, codes: str, encoding: ActivationEncoding) -> str:
    """Write `codes - zero point` as int32 and return its name."""
    wide = b.cast(codes, TensorProto.INT32)
    return b.node("Sub", [wide, b.constant(encoding.zero_point, np.int32)])


def window_sum(b: Builder, op: WindowSum) -> None:
    """Write sums over windows as a depthwise ConvInteger with ones, over whole axes as a ReduceSum."""
    if op.op_type == "AveragePool":
        ones = b.constant(np.ones((op.channels, 1, *op.attributes["kernel_shape"])), np.uint8)
        inputs = [op.codes, ones, b.constant(op.encoding.zero_point, np.uint8), b.constant(0, np.uint8)]
        b.write("ConvInteger", inputs, op.result, group=op.channels, **op.attributes)
        return
    wide = b.cast(op.codes, TensorProto.INT32)
    total = b.node("ReduceSum", [wide, b.constant(list(op.axes), np.int64)], **op.attributes)
    # the sum keeps `count` zero points: centring it keeps the accumulator's meaning plain
    b.write("Sub", [total, b.constant(op.count * op.encoding.zero_point, np.int32)], op.result)


def sum_rows(b: Builder, node: NodeProto, length: int) -> None:
    """Write int32 sums along the last axis as a product with ones, which is faster than the runtime's ReduceSum."""
    b.label = node.output[0]
    column = b.node("MatMul", [node.input[0], b.constant(np.ones((length, 1)), np.int32)])
    b.write("Squeeze", [column, b.constant([-1], np.int64)], node.output[0])


def requantize(b: Builder, op: Requantization) -> None:
    """Write products in int64, one rounding, zero point and saturation."""
    if op.rounding == "gemmlowp":
        rounded, lift, narrow = _twice_rounded(b, op, op.plan), np.zeros((), np.int64), False
    else:
        rounded, lift, narrow = _shifted(b, op, op.plan)
    _saturate(b, op, rounded, op.encoding.zero_point - lift, narrow)


def look_up(b: Builder, op: Table) -> None:
    """Write a table as a Clip where it is one, else as a gather."""
    lo, hi = int(op.table.min()), int(op.table.max())
    kind, from_wide = op.encoding.kind, op.table.size > 256
    if op.clips:
        op.row["form"] = "clip"
        b.write("Clip", [op.codes, b.constant(lo, kind), b.constant(hi, kind)], op.result)
        return
    # GatherElements on the flattened tensor is several times faster than Gather in ONNX Runtime; threads share its rows
    index = op.codes if from_wide or op.codes in b.indices else b.cast(op.codes, TensorProto.INT32)
    rows = _rows(b, op)
    flat = b.node("Reshape", [index, b.constant([rows, -1], np.int64)])
    table = b.constant(np.tile(op.table, (rows, 1)), np.uint16 if op.encoding.wide else np.uint8, "table")
    found = b.node("GatherElements", [table, flat], axis=1)
    if op.encoding.wide:
        found = b.cast(found, TensorProto.INT32)
    b.write("Reshape", [found, b.shape_of(op.codes, op.result)], op.result, allowzero=1)


def _rows(b: Builder, op: Table) -> int:
    """Return the number of equal rows that a table's codes are split into, so that threads can share the work."""
    sizes = b.code_shapes.get(op.result, ())
    known = math.prod(size for size in sizes if size is not None)
    if op.table.size > 256 or known < _WORTH_SHARING or 0 in sizes:
        return 1
    return next(rows for rows in (8, 4, 2, 1) if known % rows == 0)


def join(b: Builder, op: Join) -> None:
    """Write a Concat."""
    b.write("Concat", op.parts, op.result, axis=op.axis)


def _shifted(b: Builder, op: Requantization, fixed: RequantMultiplier) -> tuple[str, Array, bool]:
    """Write the rounding shift; return the tensor, its excess, and True if it is int32 (else int64)."""
    n = fixed.shift
    u, lift = _halved(b, op, fixed, n)
    quotient = b.node("BitShift", [u, b.constant(n, np.uint64)], direction="RIGHT")
    reach = np.maximum(np.abs(fixed.high >> n), np.abs(fixed.low >> n)) + 1
    narrow = bool(np.max(lift + reach) < (1 << 31) - 1024)
    dtype = TensorProto.INT32 if narrow else TensorProto.INT64
    if op.rounding == "half_up":
        return b.cast(quotient, dtype), lift, narrow
    mask = b.constant((np.uint64(1) << n.astype(np.uint64)) - np.uint64(1), np.uint64)
    tie = b.node("Equal", [b.node("BitwiseAnd", [u, mask]), b.constant(0, np.uint64)])
    if op.rounding == "half_even":
        odd = b.node("BitwiseAnd", [b.cast(tie, TensorProto.UINT64), quotient])
        return b.cast(b.node("Sub", [quotient, odd]), dtype), lift, narrow
    signed = b.cast(quotient, dtype)  # half away: half-up, minus one where a tie is negative
    kind = np.int32 if narrow else np.int64
    down = b.node("And", [tie, b.node("LessOrEqual", [signed, b.constant(lift, kind)])])
    return b.node("Sub", [signed, b.cast(down, dtype)]), lift, narrow


def _halved(b: Builder, op: Requantization, fixed: RequantMultiplier, n: Array) -> tuple[str, Array]:
    """Write `total + addend + half a unit of 2**n + lift * 2**n` as uint64; return it and the lift, an even number."""
    half = np.left_shift(np.int64(1), n - 1)
    lift = np.maximum(0, -(fixed.low >> n))
    lift = lift + (lift & 1)  # even, so that the parity of the quotient is its own
    peak = np.maximum(fixed.high, 0).astype(np.float64) + np.ldexp(lift.astype(np.float64), n) + half
    if np.max(peak) < 2.0**62.9:
        total = _above_smallest(b, op, fixed)
        if total is not None:
            return b.node("Add", [total, b.constant(fixed.low + (lift << n) + half, np.uint64)]), lift
    total = _sum(b, [_product(b, term.name, m) for term, m in zip(op.value.terms, fixed.mantissas, strict=True)])
    if np.max(peak) < 2.0**62.9 and np.max(np.abs(fixed.addend.astype(np.float64))) < 2.0**61:
        biased = b.node("Add", [total, b.constant(fixed.addend + (lift << n) + half, np.int64)])
        return b.cast(biased, TensorProto.UINT64), lift
    # the sum may leave int64: make it non-negative first and finish in uint64
    lift = np.maximum(2, np.left_shift(np.int64(1), MAX_SHIFT - n))
    biased = b.node("Add", [total, b.constant(fixed.addend + (1 << 62), np.int64)])
    rest = (lift.astype(np.uint64) << n.astype(np.uint64)) + half.astype(np.uint64) - np.uint64(1 << 62)
    return b.node("Add", [b.cast(biased, TensorProto.UINT64), b.constant(rest, np.uint64)]), lift


def _above_smallest(b: Builder, op: Requantization, fixed: RequantMultiplier) -> str | None:
    """Write the sum of products less its smallest value as uint64; None if a term has no distance to its end in int32.

    A term becomes its distance from the end at which its product is smallest, still in 32 bits: 64 bits cost twice as
    much a pass.
    """
    signs = [bool(np.all(mantissa >= 0)) for mantissa in fixed.mantissas]
    for term, mantissa, rising in zip(op.value.terms, fixed.mantissas, signs, strict=True):
        ends = np.abs(np.stack([*np.broadcast_arrays(term.lo, term.hi, term.hi - term.lo)]))
        if np.max(ends) > _INT32 or not (rising or np.all(mantissa <= 0)):
            return None
    products = []
    for term, mantissa, rising in zip(op.value.terms, fixed.mantissas, signs, strict=True):
        name = term.name
        if np.any(term.lo if rising else term.hi) or not rising:
            wide = b.cast(name, TensorProto.INT32) if term.codes else name
            end = b.constant(term.lo if rising else term.hi, np.int32)
            name = b.node("Sub", [wide, end] if rising else [end, wide])
        products.append(_product(b, name, np.abs(mantissa), unsigned=True))
    return _sum(b, products)


def _product(b: Builder, name: str, mantissa: Array, *, unsigned: bool = False) -> str:
    wide = b.cast(name, TensorProto.UINT64 if unsigned else TensorProto.INT64)
    return b.node("Mul", [wide, b.constant(mantissa, np.uint64 if unsigned else np.int64)])


def _sum(b: Builder, products: Sequence[str]) -> str:
    total = products[0]
    for product in products[1:]:
        total = b.node("Add", [total, product])
    return total


def _twice_rounded(b: Builder, op: Requantization, fixed: RequantMultiplier) -> str:
    """Write gemmlowp's two roundings: by up to 31 bits with ties up, by the rest with ties away from zero (int64)."""
    first = np.minimum(fixed.shift, HIGH_MUL)
    u, lift = _halved(b, op, fixed, first)
    high = b.cast(b.node("BitShift", [u, b.constant(first, np.uint64)], direction="RIGHT"), TensorProto.INT64)
    high = b.node("Sub", [high, b.constant(lift, np.int64)])
    rest = fixed.shift - first
    if not np.any(rest):
        return high
    # half away: half a unit up, and for negatives one less than that; channels without a rest keep their value
    negative = b.cast(b.node("Less", [high, b.constant(0, np.int64)]), TensorProto.INT64)
    less = b.node("Mul", [negative, b.constant(np.minimum(rest, 1), np.int64)])
    half = np.where(rest > 0, np.left_shift(np.int64(1), np.maximum(rest, 1) - 1), 0)
    raised = b.node("Add", [high, b.constant(half + (np.int64(1) << 60), np.int64)])
    biased = b.cast(b.node("Sub", [raised, less]), TensorProto.UINT64)
    shifted = b.cast(b.node("BitShift", [biased, b.constant(rest, np.uint64)], direction="RIGHT"), TensorProto.INT64)
    return b.node("Sub", [shifted, b.constant((np.int64(1) << 60) >> rest, np.int64)])


def _saturate(b: Builder, op: Requantization, rounded: str, addend: Array, narrow: bool) -> None:
    """Write the zero point and the saturation: the codes, as int32 where only tables read them."""
    kind = np.int32 if narrow else np.int64
    shifted = b.node("Add", [rounded, b.constant(addend, kind)]) if np.any(addend) else rounded
    lo, hi = (b.constant(bound, kind) for bound in op.bounds)
    to = TensorProto.INT32 if op.result in b.indices else op.encoding.onnx_kind
    if narrow and to == TensorProto.INT32:
        b.write("Clip", [shifted, lo, hi], op.result)
        return
    if narrow:
        inside = b.node("Clip", [shifted, lo, hi])
    else:  # int64 Clip is wrong in ONNX Runtime beyond 2**31
        above = b.node("Where", [b.node("Less", [shifted, lo]), lo, shifted])
        inside = b.node("Where", [b.node("Greater", [above, hi]), hi, above])
    b.write("Cast", [inside], op.result, to=to)
