"""Layers, products of matrices and reductions whose sums can leave the range that runtimes add exactly."""

from collections.abc import Mapping
from functools import reduce
from types import MappingProxyType

import numpy as np
from onnx import NodeProto

from onnx_backend.integer.ir.values import Array, Refused
from onnx_backend.integer.portable.exact_ranges import FLOAT32, INT32
from onnx_backend.integer.portable.numbers_in_parts import PART, Number, constant
from onnx_backend.integer.portable.rewrite import WIDE, Handler, Rewriter
from onnx_backend.proto.nodes import attributes

#: Weights and codes are cut into multiples of this and the rest.
_HALF = 16
_SPLIT = "split the layer into layers of fewer input channels"


def _layer(state: Rewriter, node: NodeProto) -> None:
    """Copy a layer whose sums stay exact; else write its weight, or its left codes, as 16 times a part and the rest."""
    weights = [_stored(state, name) for name in node.input[:2]]
    points = [state.constants[name].astype(np.int64) if name else np.zeros((), np.int64) for name in _points(node)]
    reaches = [_reach(state, name, point) for name, point in zip(node.input[:2], points, strict=True)]
    side = next((i for i in (1, 0) if weights[i] is not None), None)
    if side is None:
        total = state.count(node, [-1]) * reaches[0] * reaches[1]
        _two_products(state, node, points, total, reaches) if total > FLOAT32 else state.copy(node, (-total, total))
        return
    weight = weights[side]
    assert weight is not None
    centred = weight.astype(np.int64) - points[side]
    total = _largest_sum(node, centred, side) * reaches[1 - side]
    if total <= FLOAT32:
        state.copy(node, (-total, total))
        return
    rest = (centred + _HALF // 2) % _HALF - _HALF // 2
    halves = ((centred - rest) // _HALF, rest)
    if max(_largest_sum(node, half, side) for half in halves) * reaches[1 - side] > FLOAT32 or total >= INT32:
        raise Refused(f"its sums can reach {total}", _SPLIT)
    found = []
    for half in halves:
        inputs = [state.readable(name) for name in node.input[:2]] + list(_points(node))
        inputs[side] = state.b.constant(half + 128, np.uint8)
        inputs[2 + side] = state.b.constant(128, np.uint8)
        found.append(state.b.node(node.op_type, inputs, **attributes(node)))
    _joined(state, node, found, total)


def _two_products(state: Rewriter, node: NodeProto, points: list[Array], total: int, reaches: list[int]) -> None:
    """Write the product of two matrices of codes as that of the left ones' high bits and of their low bits."""
    if total * 2 // _HALF > FLOAT32 or total >= INT32 or points[0].size != 1:
        raise Refused(f"its sums can reach {total}", "multiply shorter rows")
    b, codes = state.b, state.readable(node.input[0])
    point = int(points[0].item())
    low = b.node("BitwiseAnd", [codes, b.constant(_HALF - 1, np.uint8)])
    high = b.node("BitShift", [codes, b.constant(4, np.uint8)], direction="RIGHT")
    found = [
        b.node(node.op_type, [half, state.readable(node.input[1]), b.constant(zero, np.uint8), _points(node)[1]])
        for half, zero in ((high, point // _HALF), (low, point % _HALF))
    ]
    _joined(state, node, found, total)


def _joined(state: Rewriter, node: NodeProto, halves: list[str], total: int) -> None:
    whole = [state.b.node("BitwiseAnd", [half, state.arithmetic.int32(-1)]) for half in halves]  # see `apart`
    raised = state.b.node("Mul", [whole[0], state.arithmetic.int32(_HALF)])
    state.found(node.output[0], Number((state.b.node("Add", [raised, whole[1]]),), -total, total))


def _points(node: NodeProto) -> list[str]:
    return [*node.input[2:4], "", ""][:2]


def _stored(state: Rewriter, name: str) -> Array | None:
    """Return a stored weight, None for a tensor that is computed."""
    return state.constants.get(name)


def _reach(state: Rewriter, name: str, point: Array) -> int:
    value = state.number(name)
    return max(abs(value.lo - int(point.max())), abs(value.hi - int(point.min())))


def _largest_sum(node: NodeProto, weight: Array, side: int) -> int:
    """Return the largest sum of magnitudes of the weights that one result is a sum over."""
    sizes = np.abs(weight)
    if node.op_type == "ConvInteger":
        return int(sizes.reshape(sizes.shape[0], -1).sum(1).max(initial=0))
    return int(sizes.sum(-1 if side == 0 else max(-2, -sizes.ndim)).max(initial=0))


def _sum(state: Rewriter, node: NodeProto) -> None:
    axes = None if len(node.input) < 2 else [int(axis) for axis in state.constants[node.input[1]].reshape(-1)]
    value, count = state.int32(node.input[0]), state.count(node, axes)
    lo, hi = value.lo * count, value.hi * count
    if value.lo >= 0 and node.output[0] in state.bounds:  # no sum of some of them is larger than that of all
        hi = min(hi, state.bounds[node.output[0]][1])
    if max(-lo, hi) <= FLOAT32 and state.types[node.output[0]] not in WIDE:
        state.copy(node, (min(lo, 0), max(hi, 0)))
        return
    attrs, rest = attributes(node), list(node.input[1:])
    found = state.arithmetic.summed(value, count, lambda name: state.reduced("ReduceSum", [name, *rest], attrs))
    state.found(node.output[0], found)


def _largest(state: Rewriter, node: NodeProto) -> None:
    """Write the largest element: of numbers beyond the exact range by their high parts, then by their low parts."""
    value = state.number(node.input[0])
    if max(-value.lo, value.hi) <= FLOAT32:
        state.copy(node, (value.lo, value.hi))
        return
    attrs, axes, a, b = {**attributes(node), "keepdims": 1}, list(node.input[1:]), state.arithmetic, state.b
    if not attributes(node).get("keepdims", 1) or state.types[node.output[0]] in WIDE:
        raise Refused("it compares numbers of more than 24 bits", "keep the axes that it reduces")
    high = a.flat(a.shifted_right(value, PART))
    low = b.node("BitwiseAnd", [a.flat(value), a.int32((1 << PART) - 1)])
    top = state.reduced("ReduceMax", [high, *axes], attrs)
    among = b.node("Where", [b.node("Equal", [high, top]), low, a.int32(-1)])
    rest = state.reduced("ReduceMax", [among, *axes], attrs)
    whole = b.node("Add", [b.node("Mul", [top, a.int32(1 << PART)]), rest])
    state.found(node.output[0], Number((whole,), value.lo, value.hi))


def _matmul(state: Rewriter, node: NodeProto) -> None:
    left, right = (state.int32(name) for name in node.input)
    count = state.count(node, [-1])
    a = state.arithmetic
    if max(-left.lo, left.hi) * max(-right.lo, right.hi) * count <= FLOAT32:
        names = [a.flat(left), a.flat(right)]
        most = max(-left.lo, left.hi) * max(-right.lo, right.hi) * count
        state.found(node.output[0], Number((state.b.node("MatMul", names),), -most, most))
        return
    if left.array is not None and left.array.ndim == 2 and left.array.shape[0] == 1:
        state.found(node.output[0], _weighted_rows(state, left.array[0], right))
        return
    raise Refused("it multiplies matrices of more than 8 bits", "quantize its inputs to 8 bits")


def _weighted_rows(state: Rewriter, factors: Array, right: Number) -> Number:
    """Write the sum of the rows of a matrix, each times a constant."""
    a = state.arithmetic
    rows = [state.b.split(part, [1] * factors.size, -2) for part in a.names(right)]
    parts = [Number(row, right.lo, right.hi) for row in zip(*rows, strict=True)]
    products = [a.multiply(part, constant(factor)) for part, factor in zip(parts, factors, strict=True)]
    return reduce(a.add, products)


#: Operators that sum or compare along axes.
SUMS: Mapping[str, Handler] = MappingProxyType(
    {
        "ConvInteger": _layer,
        "MatMul": _matmul,
        "MatMulInteger": _layer,
        "ReduceMax": _largest,
        "ReduceSum": _sum,
    }
)
