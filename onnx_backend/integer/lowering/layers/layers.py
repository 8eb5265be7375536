"""Lower Conv, Gemm and MatMul to ConvInteger and MatMulInteger with int32 accumulators.

Weights are stored unsigned: ONNX Runtime's integer kernels have no per-channel weight zero point and are several
times slower with int8 weights. Weights of 4 bits stay packed and are widened by a Cast.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, numpy_helper

from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.context import Args, LoweringContext, label, move, require_codes
from onnx_backend.integer.ir.exact_bounds import (
    ROUNDING,
    are_float32,
    distinct_rows,
    float_chain_bound,
    is_power_of_two,
    largest,
    one_rounding,
    one_sum,
)
from onnx_backend.integer.ir.operations import Accumulation, CodesOperand, Product
from onnx_backend.integer.ir.values import (
    ActivationEncoding,
    Array,
    BlockConstant,
    CodedConstant,
    Constant,
    Joined,
    Linear,
    Lookup,
    Refused,
    Term,
    Value,
)
from onnx_backend.proto.nodes import attributes

Bytes = tuple[str, ActivationEncoding]


def bytes_of(ctx: LoweringContext, value: Value | None, what: str = "its input") -> list[Bytes]:
    """Return a quantized operand as uint8 codes with their encoding, one tensor for 8 bits and two for 16."""
    codes, encoding = require_codes(value, what)
    if not encoding.wide:
        return [(codes, encoding)]
    if codes not in ctx.halves:
        shifted = ctx.shifted_right(ctx.cast(codes, TensorProto.UINT32), 8, np.uint32)
        high = ctx.cast(shifted, TensorProto.UINT8, name=f"{codes}.high")
        rest = ctx.node("BitwiseAnd", [codes, ctx.constant(255, np.int32)])
        ctx.halves[codes] = (high, ctx.cast(rest, TensorProto.UINT8, name=f"{codes}.low"))
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


_MOVED = ActivationEncoding(1.0, 0, TensorProto.UINT8)  # moves without a fill ignore it


@dataclass(frozen=True)
class Factor:
    """An int32 tensor with `value = tensor * scale`, and its static bounds."""

    name: str
    scale: float
    low: int
    high: int


def factor(ctx: LoweringContext, value: Value | None, what: str) -> Factor:
    """Emit the centred integers of a quantized tensor, of its negative, or of a Concat of these."""
    if isinstance(value, Joined) and all(step.fill is None for step in value.after):
        parts = [factor(ctx, part, what) for part in value.parts]
        if len({part.scale for part in parts}) == 1:
            name = ctx.node("Concat", [part.name for part in parts], axis=value.axis)
            for step in value.after:
                name = move(ctx, step, name, _MOVED, name)
            return Factor(name, parts[0].scale, min(p.low for p in parts), max(p.high for p in parts))
    if isinstance(value, Lookup) and (line := _line(value)) is not None:
        codes, (scale, zero, hi) = value.name, line
    else:
        codes, encoding = require_codes(value, what)
        scale, zero, hi = encoding.scale, encoding.zero_point, encoding.hi
    operands = [ctx.cast(codes, TensorProto.INT32), ctx.constant(zero, np.int32)]
    ends = (-zero, hi - zero) if scale > 0 else (zero - hi, zero)
    return Factor(ctx.node("Sub", operands if scale > 0 else operands[::-1]), abs(scale), *ends)


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


_LEVELS = 256  # of a block's scale over the channel's that stay exact
_FLOAT32 = 2.0**-22  # a few roundings of float32, relative
_SIGNED = 1.0 + 2.0**-7  # room for the highest byte where the lower ones are signed


def to_channel_scales(blocks: BlockConstant, axis: int, bits: int) -> CodedConstant:
    """Return a weight with positive scales as integers with one scale per index of `axis`.

    Scales that are whole multiples of one scale, as two-level ones are, are multiplied in exactly, and powers of two
    as far as `bits` reach. Else every weight is rounded to `bits` bits, relative to the largest one of its channel;
    `error` of the result is the bound.
    """
    if axis == blocks.axis:  # a block of channels shares its scales
        blocks = replace(blocks, scale=blocks.spread(blocks.scale), size=1)
    shape = blocks.integers.shape
    others = tuple(i for i in range(len(shape)) if i != axis)
    channels = [1 if i in others else -1 for i in range(len(shape))]
    rows = np.moveaxis(blocks.scale, axis, 0).reshape(shape[axis], -1)
    largest, levels = rows.max(1).reshape(channels), _levels(rows)
    if levels is not None:
        unit = largest / levels.reshape(channels)
        integers = blocks.integers * blocks.spread(np.rint(blocks.scale / unit).astype(np.int64))
    else:
        steps = blocks.integers * blocks.spread(blocks.scale / largest)
        _, exponent = np.frexp(np.abs(steps).max(others, keepdims=True) * _SIGNED)
        shift = bits - 1 - exponent
        unit = np.ldexp(largest, -shift)
        integers = np.rint(np.ldexp(steps, shift)).astype(np.int64)
    found = integers * unit
    off = np.abs(blocks.integers * blocks.spread(blocks.scale) - found).sum(others).max()
    error = float_chain_bound(float(off))
    if not are_float32(unit) or np.abs(integers).max(initial=0) >= 1 << 29:  # else these products are exact in float64
        error += float_chain_bound(float(np.abs(found).sum(others).max())) * ROUNDING
    return CodedConstant(integers, unit.reshape(-1), axis, blocks.dtype, error)


def _levels(rows: Array) -> Array | None:
    """Return for every row the least number of equal steps on which all its scales lie, None if a row has none."""
    if len(rows) > 1 and _levels(rows[:1]) is None:  # nearly always one row shows it
        return None
    relative, levels = rows / rows.max(1, keepdims=True), np.zeros(len(rows), np.int64)
    for count in range(1, _LEVELS + 1):
        left = np.flatnonzero(levels == 0)
        if not left.size:
            break
        exact = relative[left] * count
        whole = np.rint(exact)
        levels[left[(np.abs(exact - whole) <= _FLOAT32 * whole).all(1)]] = count
    return levels if levels.all() else None


_INT32 = (1 << 31) - 1
_STORED_BITS: Mapping[int, int] = MappingProxyType(
    {TensorProto.INT4: 4, TensorProto.UINT4: 4, TensorProto.INT2: 2, TensorProto.UINT2: 2}
)
#: Bits of a weight into which scales per block are multiplied, for activations of one byte and of two.
_FOLDED_BITS: Mapping[int, int] = MappingProxyType({1: 24, 2: 32})
_TWO_BITS_OPSET = 25  # the first with 2-bit types
_QUANTIZE_WEIGHT = (
    "store it as an integer initializer behind a DequantizeLinear, per tensor, per output channel or per block"
)


def coded_weight(value: Value | None, axis: int, activation: Sequence[Bytes]) -> CodedConstant:
    """Return the integers of a weight whose channels, if any, lie along `axis`; block scales are multiplied in."""
    if not isinstance(value, Constant):
        raise Refused("its weight is not a constant", _QUANTIZE_WEIGHT)
    if value.blocks is not None:
        require_positive(value.blocks.scale)
        return to_channel_scales(value.blocks, axis, _FOLDED_BITS[len(activation)])
    if value.coded is None:
        raise Refused("its weight is float", _QUANTIZE_WEIGHT)
    if value.coded.axis is not None and value.coded.axis != axis:
        raise Refused(f"its weight has one scale per index of axis {value.coded.axis}", _QUANTIZE_WEIGHT)
    return value.coded


def weight_storage(ctx: LoweringContext, coded: CodedConstant, integers: Array) -> tuple[int, int]:
    """Return the number added to a weight to store it unsigned, and the bits it is stored in."""
    low, high = int(integers.min(initial=0)), int(integers.max(initial=0))
    bits = _STORED_BITS.get(coded.dtype, 8)
    if bits == 2 and ctx.opset < _TWO_BITS_OPSET:
        bits = 4
    bits = bits if high - low < 1 << bits else 8
    top = (1 << bits) - 1
    if high - low > top:
        raise Refused(
            f"its weight, zero points subtracted, reaches from {low} to {high}",
            "quantize it to 8 bits with a zero point of 0",
        )
    zero = min(max((top + 1) // 2, -low), top - high)
    ctx.facts[ctx.label].update(weight_bits=bits, weight_zero_point=zero)
    return zero, bits


def weight_parts(coded: CodedConstant, integers: Array) -> list[CodedConstant]:
    """Return a weight as summands of 8 bits: itself, or its bytes.

    Zero points per channel, scales per block and 16 bits need more than the 8 bits that kernels take; `256 * high +
    low` is exact. Lower bytes are signed, which halves their sums, except where the highest would then need 9 bits.
    """
    parts = min((_bytes_from(integers, least) for least in (-128, 0)), key=len)
    return [replace(coded, integers=part, scale=coded.scale * 256.0**i) for i, part in enumerate(parts)][::-1]


def _bytes_from(integers: Array, least: int) -> list[Array]:
    """Split integers into bytes, the lowest first; all but the last one are `least` and above."""
    parts = []
    while int(integers.max(initial=0)) - int(integers.min(initial=0)) > 255:
        parts.append(((integers - least) & 255) + least)
        integers = (integers - least) >> 8
    return [*parts, integers]


def accumulator_bounds(integers: Array, encoding: ActivationEncoding, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """Return the smallest and largest sum of products over `axes` for any input on the grid, without bias."""
    below, above = -encoding.zero_point, encoding.hi - encoding.zero_point
    low = np.minimum(integers * below, integers * above).sum(axes)
    high = np.maximum(integers * below, integers * above).sum(axes)
    return np.asarray(low, np.int64), np.asarray(high, np.int64)


def require_int32(low: Array, high: Array, what: str = "its accumulator") -> None:
    """Refuse an accumulator that can leave int32."""
    bound = max(int(np.max(high, initial=0)), -int(np.min(low, initial=0)))
    if bound > _INT32:
        raise Refused(f"{what} can reach {bound}, beyond int32", "use fewer weight bits or split the layer")


def conv(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower Conv: ConvInteger pads with the input's zero point, which is real zero."""
    activation = bytes_of(ctx, args[0])
    coded = coded_weight(args[1], 0, activation)
    require_positive(coded.scale)
    rank = coded.integers.ndim
    channels = (-1, *(1 for _ in range(rank - 2)))
    parts = []
    for (padded, encoding), part in itertools.product(activation, weight_parts(coded, coded.integers)):
        low, high = accumulator_bounds(part.integers, encoding, tuple(range(1, rank)))
        codes, attrs = _with_zeros_of(ctx, padded, encoding, attributes(node))
        result = _recorded(ctx, node, part, part.integers, 1, (codes, encoding), attrs)
        scale = encoding.scale * (np.broadcast_to(part.scale, low.shape) if part.axis is not None else part.scale)
        ends = low.reshape(channels), high.reshape(channels)
        parts.append(accumulate(result, scale.reshape(channels), *ends, node))
    value = sum_accumulators(parts, coded.error * reach(activation), coded.scale)
    if len(args) > 2 and args[2] is not None:
        value = plus_constant(value, args[2], channels)
    return value


def _with_zeros_of(
    b: Builder, codes: str, encoding: ActivationEncoding, attrs: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Return the codes in front of a Pad of zeros, and the attributes of a convolution that puts them itself."""
    makers = (n for n in reversed(b.nodes) if isinstance(n, NodeProto) and n.op_type == "Pad" and codes in n.output)
    pad = next(makers, None)
    if pad is None or len(pad.input) != 3 or attributes(pad).get("mode", "constant") != "constant":
        return codes, attrs
    stored = {t.name: numpy_helper.to_array(t).reshape(-1).tolist() for t in b.initializers if t.name in pad.input[1:]}
    sizes, fill = (stored.get(name, []) for name in pad.input[1:])
    rank = len(sizes) // 2
    beside = [*sizes[:2], *sizes[rank : rank + 2]]
    if attrs.get("auto_pad", "NOTSET") != "NOTSET" or not sizes or fill != [encoding.zero_point] or any(beside):
        return codes, attrs
    zeros = [*sizes[2:rank], *sizes[rank + 2 :]]
    pads = [a + own for a, own in zip(zeros, attrs.get("pads", [0] * len(zeros)), strict=True)]
    return (codes, attrs) if min(zeros) < 0 else (pad.input[0], {**attrs, "pads": pads})


def _recorded(
    ctx: LoweringContext,
    node: NodeProto,
    coded: CodedConstant,
    integers: Array,
    index: int,
    activation: tuple[str, ActivationEncoding],
    attrs: dict[str, object] | None = None,
) -> str:
    """Record the sum of products of a layer whose weight is input `index` of its node; return it."""
    zero, bits = weight_storage(ctx, coded, integers)
    result = ctx.fresh(f"{node.output[0]}.accumulator")
    op_type = "MatMul" if attrs is None else "Conv"
    stem, first = node.input[index], attrs is None and index == 0
    shape = ctx.shapes.get(node.input[1 - index])
    rank = None if shape is None else len(shape)
    layer = (*activation, integers, zero, bits, coded.scale, attrs or {}, first, stem, result, ctx.label, rank)
    ctx.nodes.append(Accumulation(op_type, *layer))
    return result


def require_positive(scale: Array) -> None:
    """Refuse scales that are not positive."""
    if not np.all(np.isfinite(scale) & (scale > 0)):
        raise Refused(f"a scale is {np.min(scale)}", "recalibrate: scales are positive and finite")


def accumulate(name: str, scale: Array, low: Array, high: Array, node: NodeProto) -> Linear:
    """Return an int32 accumulator without bias as a value."""
    require_int32(low, high)
    return Linear((Term(name, scale, np.zeros((), np.int64), low, high),), source=label(node))


def plus_constant(value: Linear, bias: Value, shape: Sequence[int] | None = None) -> Linear:
    """Add a constant: as int32 where it is stored in the accumulator's own scale, else in the fixed point."""
    if not isinstance(bias, Constant):
        raise Refused("its bias is not a constant", "store the bias as an initializer")
    values = stored_values(bias)
    values = values if shape is None else values.reshape(tuple(shape))
    term, coded = value.terms[0], bias.coded
    if len(value.terms) == 1 and coded is not None and coded.dtype == TensorProto.INT32:
        integers = coded.integers if shape is None else coded.integers.reshape(tuple(shape))
        scale = aligned_scale(coded) if shape is None else _reshaped(coded.scale, shape)
        if _same_scale(scale, term.scale):
            zero = term.zero - integers
            require_int32(term.lo - zero, term.hi - zero, "its accumulator with the bias")
            error = value.error + _scale_error(integers, scale, term.scale)
            return replace(value, terms=(replace(term, zero=zero),), error=error)
    error = value.error + one_sum(value.constant, values)
    if coded is not None:  # a product in float64
        error += one_rounding((), values)
    return replace(value, constant=value.constant + values, error=error)


def _scale_error(integers: Array, stored: Array, scale: Array) -> Fraction:
    """Return the largest difference between integers at a stored scale and at the accumulator's, exactly."""
    rows = distinct_rows(integers, np.asarray(stored, np.float64), np.asarray(scale, np.float64))
    return max((abs(q * (Fraction(s) - Fraction(real))) for q, s, real in rows), default=Fraction(0))


def stored_values(constant: Constant) -> Array:
    """Return a constant in float64: the value of its stored integers before float32 rounds it."""
    if constant.coded is not None and not constant.coded.error:
        return np.asarray(constant.coded.integers * aligned_scale(constant.coded))
    return constant.values.astype(np.float64)


def scaled(value: Linear, factor: Array, roundings: int = 1) -> Linear:
    """Multiply a sum by a constant, of which `roundings` of float64 and the product itself are counted as error."""
    terms = tuple(replace(term, scale=term.scale * factor) for term in value.terms)
    constant, error = value.constant * factor, value.error * largest(factor)
    if roundings > 1 or not is_power_of_two(factor):
        error += roundings * one_rounding(terms, constant)
    return replace(value, terms=terms, constant=constant, error=error)


def _reshaped(scale: Array, shape: Sequence[int]) -> Array:
    return scale.reshape(tuple(shape)) if scale.size > 1 else scale.reshape(())


def aligned_scale(coded: CodedConstant) -> Array:
    """Return a constant's scale in a shape that broadcasts against its integers."""
    if coded.axis is None:
        return coded.scale.reshape(())
    shape = [1] * coded.integers.ndim
    shape[coded.axis] = -1
    return coded.scale.reshape(shape)


def _same_scale(bias: Array, accumulator: Array) -> bool:
    # the stored bias scale is a float32 product of two float32 scales: one rounding apart at most
    try:
        pair = np.broadcast_arrays(bias, accumulator)
    except ValueError:
        return False
    return bool(np.all(np.abs(pair[0] - pair[1]) <= 2.0**-22 * pair[1]))


def gemm(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower Gemm with a constant second operand."""
    attrs = attributes(node)
    transposed = bool(attrs.get("transB", 0))
    activation = bytes_of(ctx, args[0])
    if attrs.get("transA", 0):
        activation = [(ctx.node("Transpose", [codes], perm=[1, 0]), e) for codes, e in activation]
    coded = coded_weight(args[1], 0 if transposed else 1, activation)
    integers = coded.integers.T if transposed else coded.integers
    value = _matmul(ctx, node, activation, coded, integers)
    alpha, beta = (float(attrs.get(key, 1.0)) for key in ("alpha", "beta"))
    if alpha != 1.0:
        value = scaled(value, np.asarray(alpha))
    if len(args) > 2 and args[2] is not None:
        bias = args[2]
        if beta != 1.0 and isinstance(bias, Constant):
            bias = Constant(stored_values(bias) * beta)
        value = plus_constant(value, bias)
    return value


def matmul(ctx: LoweringContext, node: NodeProto, args: Args) -> Linear:
    """Lower MatMul of an activation with a constant (either side) or with another activation."""
    left, right = args
    for place, weight in enumerate(args):
        if isinstance(weight, Constant) and weight.values.ndim == 1:
            return _matmul_vector(ctx, node, args, place, weight)
    if isinstance(left, Lookup) and isinstance(right, Lookup):
        return _matmul_activations(ctx, node, left, right)
    if isinstance(left, Constant):
        return _matmul_constant_left(ctx, node, left, right)
    activation = bytes_of(ctx, left)
    axis = right.values.ndim - 1 if isinstance(right, Constant) else 0
    coded = coded_weight(right, axis, activation)
    return _matmul(ctx, node, activation, coded, coded.integers)


def _matmul_vector(ctx: LoweringContext, node: NodeProto, args: Args, place: int, weight: Constant) -> Linear:
    """Lower MatMul with a vector as one with a matrix of one row or column, which the accumulator then loses."""
    matrix, coded = np.expand_dims(weight.values, place), weight.coded
    if coded is not None:
        axis = None if coded.axis is None else 1 - place  # the one that is summed over
        coded = replace(coded, integers=coded.integers.reshape(matrix.shape), axis=axis)
    value = matmul(ctx, node, [Constant(matrix, coded) if index == place else arg for index, arg in enumerate(args)])
    lost = ctx.constant([-1 if place else -2], np.int64)
    return replace(value, terms=tuple(_without_axis(ctx, term, lost) for term in value.terms))


def _without_axis(ctx: LoweringContext, term: Term, axis: str) -> Term:
    scale, zero, lo, hi = (part.reshape(()) for part in (term.scale, term.zero, term.lo, term.hi))
    return Term(ctx.node("Squeeze", [term.name, axis]), scale, zero, lo, hi, term.codes)


def _matmul(
    ctx: LoweringContext, node: NodeProto, activation: Sequence[Bytes], coded: CodedConstant, integers: Array
) -> Linear:
    require_positive(coded.scale)
    parts = []
    for (codes, encoding), part in itertools.product(activation, weight_parts(coded, integers)):
        low, high = accumulator_bounds(part.integers, encoding, (integers.ndim - 2,))
        leading = tuple(range(low.ndim - 1))
        low, high = low.min(axis=leading), high.max(axis=leading)
        accumulator = _recorded(ctx, node, part, part.integers, 1, (codes, encoding))
        scale = encoding.scale * (part.scale if part.axis is not None else part.scale.reshape(()))
        parts.append(accumulate(accumulator, scale, low, high, node))
    return sum_accumulators(parts, coded.error * reach(activation), coded.scale)


def _matmul_activations(ctx: LoweringContext, node: NodeProto, left: Lookup, right: Lookup) -> Linear:
    first, second = bytes_of(ctx, left, "its first input"), bytes_of(ctx, right, "its second input")
    return products(ctx, node, "MatMul", first, second, ctx.sizes(node.input[0], [-1])[0])


def products(
    ctx: LoweringContext, node: NodeProto, op_type: str, left: Sequence[Bytes], right: Sequence[Bytes], depth: int = 1
) -> Linear:
    """Record the product of two activations, each of one or two bytes, summed over `depth`; return it."""
    parts = []
    for one, other in itertools.product(left, right):
        result = ctx.fresh(f"{node.output[0]}.accumulator")
        ctx.nodes.append(Product(op_type, CodesOperand(*one), CodesOperand(*other), result, ctx.label))
        low, high = product_bounds(one[1], other[1])
        scale = np.asarray(one[1].scale * other[1].scale, np.float64)
        parts.append(accumulate(result, scale, low * depth, high * depth, node))
    return sum_accumulators(parts)


def product_bounds(first: ActivationEncoding, second: ActivationEncoding) -> tuple[Array, Array]:
    """Return the smallest and largest product of two activations in units of their scales' product."""
    ends = [(a - first.zero_point) * (b - second.zero_point) for a in (0, first.hi) for b in (0, second.hi)]
    return np.asarray(min(ends), np.int64), np.asarray(max(ends), np.int64)


def _matmul_constant_left(ctx: LoweringContext, node: NodeProto, left: Constant, right: Value | None) -> Linear:
    activation = bytes_of(ctx, right, "its second input")
    coded = coded_weight(left, left.values.ndim - 2, activation)
    require_positive(coded.scale)
    rows = (-1, 1) if coded.axis is not None else ()
    parts = []
    for (codes, encoding), part in itertools.product(activation, weight_parts(coded, coded.integers)):
        low, high = accumulator_bounds(part.integers, encoding, (coded.integers.ndim - 1,))
        accumulator = _recorded(ctx, node, part, part.integers, 0, (codes, encoding))
        scale = np.asarray(encoding.scale * part.scale.reshape(rows), np.float64)
        parts.append(accumulate(accumulator, scale, np.asarray(low.min()), np.asarray(high.max()), node))
    return sum_accumulators(parts, coded.error * reach(activation), coded.scale)
