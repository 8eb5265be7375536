"""How each operator of the standard target is written in exact ranges: bounds where it stays, other operators else."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from onnx_backend.integer.ir.context import FIXED_SIZES
from onnx_backend.integer.ir.values import Array, Refused
from onnx_backend.integer.portable.numbers import FLOAT32, INT32, PART, Number, constant, divided, divided_by_powers
from onnx_backend.integer.portable.rewrite import MOVES, WIDE, Handler, Rewriter
from onnx_backend.proto.nodes import attributes

# --- layers, products of matrices and reductions whose sums can leave the range that runtimes add exactly -------------


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


# --- all others -------------------------------------------------------------------------------------------------------


def _arithmetic(kind: str) -> Handler:
    def handler(state: Rewriter, node: NodeProto) -> None:
        left, right = (state.number(name) for name in node.input)
        if state.types[node.output[0]] not in WIDE:
            _native(state, node, _ends(kind, left, right))
            return
        a = state.arithmetic
        found = a.multiply(left, right) if kind == "Mul" else a.add(left, right, sign=1 if kind == "Add" else -1)
        state.found(node.output[0], found)

    return handler


def _native(state: Rewriter, node: NodeProto, ends: tuple[int, int]) -> None:
    """Copy arithmetic on int32, apart from a float32 kernel whose result it reads if its own leaves the exact range."""
    fused = [name for name in node.input if name in state.fusing]
    if max(-ends[0], ends[1]) <= FLOAT32:
        state.fusing.update(node.output if fused else ())
    else:
        for name in fused:
            state.renamed[name] = state.apart(name)
            state.fusing.discard(name)
    state.copy(node, ends)


def _ends(kind: str, left: Number, right: Number) -> tuple[int, int]:
    operation: Callable[[int, int], int] = {"Add": operator.add, "Sub": operator.sub, "Mul": operator.mul}[kind]
    ends = [operation(x, y) for x in (left.lo, left.hi) for y in (right.lo, right.hi)]
    return min(ends), max(ends)


def _extreme(state: Rewriter, node: NodeProto) -> None:
    values = [state.number(name) for name in node.input]
    choose, most = max if node.op_type == "Max" else min, max(max(-v.lo, v.hi) for v in values)
    if most > FLOAT32:
        found = state.int32(node.input[0])
        for name in node.input[1:]:
            found = _extreme_of(state, found, state.int32(name), largest=node.op_type == "Max")
        state.found(node.output[0], found)
        return
    _native(state, node, (choose(v.lo for v in values), choose(v.hi for v in values)))


def _extreme_of(state: Rewriter, left: Number, right: Number, *, largest: bool) -> Number:
    """Write the larger or the smaller of two numbers; of a constant, a runtime may make a Clip in float32."""
    a, choose = state.arithmetic, max if largest else min
    below = a.negative(a.add(left, right, sign=-1))
    found = a.chosen(below, *((right, left) if largest else (left, right)))
    return replace(found, lo=choose(left.lo, right.lo), hi=choose(left.hi, right.hi))


def _cast(state: Rewriter, node: NodeProto) -> None:
    source, to = node.input[0], attributes(node)["to"]
    value = state.number(source)
    if to in WIDE:
        state.found(node.output[0], state.int32(source))
    elif state.types.get(source) in WIDE and value.array is None:
        if to == TensorProto.BOOL:
            state.truth(node.output[0], state.b.node("Not", [state.arithmetic.is_zero(value)]))
        else:
            state.found(node.output[0], value)
    else:
        state.copy(node, (value.lo, value.hi))
        if source in state.constants:  # a weight that is stored in fewer bits
            state.constants[node.output[0]] = state.constants[source].astype(np.int64)


def _compare(test: Callable[[Any, Number, Number], str]) -> Handler:
    def handler(state: Rewriter, node: NodeProto) -> None:
        values = [state.number(name) for name in node.input]
        small = all(max(-value.lo, value.hi) <= FLOAT32 for value in values)
        wide = any(state.types.get(name) in WIDE for name in node.input)
        if small and not wide:
            state.copy_apart(node)
            return
        state.truth(node.output[0], test(state.arithmetic, *(state.int32(name) for name in node.input)))

    return handler


def _where(state: Rewriter, node: NodeProto) -> None:
    condition, *names = node.input
    values = [state.number(name) for name in names]
    ends = min(v.lo for v in values), max(v.hi for v in values)
    if state.types[node.output[0]] not in WIDE and max(-ends[0], ends[1]) <= FLOAT32:
        state.copy_apart(node, ends)
        return
    yes, no = (state.int32(name) for name in names)
    state.found(node.output[0], state.arithmetic.chosen(state.readable(condition), yes, no))


def _move(state: Rewriter, node: NodeProto) -> None:
    if node.input[0] in state.given and node.op_type != "Gather":
        state.copy(node)
        return
    value = state.number(node.input[0])
    attrs, rest = attributes(node), [state.readable(name) for name in node.input[1:]]
    if state.types[node.output[0]] not in WIDE:
        fill = [state.number(node.input[2])] if node.op_type == "Pad" and len(node.input) > 2 and node.input[2] else []
        zero = [constant(np.zeros((), np.int64))] if node.op_type == "Pad" and not fill else []
        if any(max(-number.lo, number.hi) > FLOAT32 for number in fill):
            raise Refused("it pads with a number of more than 24 bits", "pad behind its quantizer")
        values = [value, *fill, *zero]
        state.copy(node, (min(v.lo for v in values), max(v.hi for v in values)))
        return
    if node.op_type == "Split":
        _split(state, node, value, rest)
        return
    if node.op_type == "Pad":
        filled = state.number(node.input[2]) if len(rest) > 1 and rest[1] else constant(np.zeros((), np.int64))
        pads, axes = rest[0], rest[2:]
        padded = state.arithmetic.each_part(
            [value, filled], lambda parts: state.b.node("Pad", [parts[0], pads, parts[1], *axes], **attrs)
        )
        state.found(node.output[0], padded)
        return

    def moved(parts: list[str]) -> str:
        return state.b.node(node.op_type, [*parts, *rest], **attrs)

    if value.array is not None and node.op_type in ("Gather", "GatherElements"):
        found = state.arithmetic.looked_up(value.array, rest[0], lambda table, index: moved([table]))
        state.found(node.output[0], found)
        return
    state.found(node.output[0], state.arithmetic.each_part([value], moved))


def _split(state: Rewriter, node: NodeProto, value: Number, rest: list[str]) -> None:
    rows = []
    for part in state.arithmetic.names(value):
        rows.append([state.b.fresh(name) for name in node.output])
        made = helper.make_node("Split", [part, *rest], rows[-1], name=f"{rows[-1][0]}_node", **attributes(node))
        state.b.nodes.append(made)
    for name, *parts in zip(node.output, *rows, strict=True):
        state.found(name, Number(tuple(parts), value.lo, value.hi))


def _concat(state: Rewriter, node: NodeProto) -> None:
    values, attrs = [state.number(name) for name in node.input], attributes(node)
    if state.types[node.output[0]] not in WIDE:
        state.copy(node, (min(v.lo for v in values), max(v.hi for v in values)))
        return
    joined = state.arithmetic.each_part(values, lambda parts: state.b.node("Concat", parts, **attrs))
    state.found(node.output[0], joined)


def _clip(state: Rewriter, node: NodeProto) -> None:
    value, *ends = (state.number(name) for name in node.input)
    lo, hi = max(value.lo, ends[0].lo), min(value.hi, ends[1].hi)
    if state.types[node.output[0]] in WIDE:
        raise Refused("Clip of 64-bit integers has no form in 32 bits", 'use target="standard"')
    if max(-ends[0].lo, ends[1].hi) <= FLOAT32:
        state.copy_apart(node, (lo, hi))
        if state.types[node.output[0]] == TensorProto.INT32:
            state.fusing.update(node.output)  # what follows stands apart where it leaves the exact range
        return
    found = state.int32(node.input[0])
    for end, above in zip(ends, (False, True), strict=True):
        found = _extreme_of(state, found, end, largest=not above)
    state.found(node.output[0], replace(found, lo=lo, hi=hi))


def _shift(state: Rewriter, node: NodeProto) -> None:
    value, by = state.number(node.input[0]), state.number(node.input[1])
    a, left = state.arithmetic, attributes(node)["direction"] == "LEFT"
    wide = state.types[node.output[0]] in WIDE
    ends = (value.lo << by.lo, value.hi << by.hi) if left else (value.lo >> by.hi, value.hi >> by.lo)
    if not wide and (left or value.hi <= FLOAT32):
        state.copy(node, ends)
        return
    value, by = state.int32(node.input[0]), state.int32(node.input[1])
    if left:
        state.found(node.output[0], a.multiply(value, a.power(by)))
        return
    if by.array is not None and by.lo == by.hi:
        state.found(node.output[0], a.shifted_right(value, by.lo))
        return
    most = by.hi
    over = (
        a.power(a.add(constant(np.asarray(most)), by, sign=-1))
        if by.array is None
        else a.power(constant(most - by.array))
    )
    found = a.shifted_right(a.multiply(value, over), most)
    state.found(node.output[0], replace(found, lo=max(found.lo, ends[0]), hi=min(found.hi, ends[1])))


def _bits(state: Rewriter, node: NodeProto) -> None:
    left, right = (state.number(name) for name in node.input)
    if min(left.lo, right.lo) < 0:
        if state.types[node.output[0]] in WIDE:
            raise Refused("it takes the bits of a negative number", 'use target="standard"')
        state.copy(node)
    elif state.types[node.output[0]] not in WIDE:
        state.copy(node, (0, min(left.hi, right.hi)))
    else:
        state.found(node.output[0], state.arithmetic.masked(left, right))


def _absolute(state: Rewriter, node: NodeProto) -> None:
    value = state.number(node.input[0])
    if state.types[node.output[0]] not in WIDE:
        state.copy(node, (0, max(-value.lo, value.hi)))
        return
    a = state.arithmetic
    test, opposite = a.negative(value), a.add(constant(np.asarray(0)), value, sign=-1)
    found = a.chosen(test, opposite, value)
    state.found(node.output[0], replace(found, lo=0, hi=max(-value.lo, value.hi)))


def _divide(state: Rewriter, node: NodeProto) -> None:
    left, right = (state.int32(name) for name in node.input)
    powers = right.array is not None and right.lo > 0 and not np.any(right.array & (right.array - 1))
    divide = divided_by_powers if powers else divided
    state.found(node.output[0], divide(state.arithmetic, left, right))


def _scan(state: Rewriter, node: NodeProto) -> None:
    """Refuse a sequence of open length, whose bounds would have to hold for every step."""
    raise Refused("the length of its sequence is dynamic", FIXED_SIZES)


def _dequantize(state: Rewriter, node: NodeProto) -> None:
    """Subtract the zero point as an integer: runtimes multiply it with the scale first, which rounds."""
    codes, scale, *zero = node.input
    point = state.constants[zero[0]].astype(np.int64) if zero else np.zeros((), np.int64)
    axis = attributes(node).get("axis", 1)
    if point.ndim:
        rank = len(state.shapes[codes])
        point = point.reshape([-1 if i == axis % rank else 1 for i in range(rank)])
    centred = state.b.node("Sub", [state.arithmetic.flat(state.int32(codes)), state.arithmetic.int32(point)])
    attrs = {"axis": axis} if point.ndim else {}
    state.b.write("DequantizeLinear", [centred, scale], node.output[0], **attrs)


#: Operator of the standard target -> what writes it.
HANDLERS: Mapping[str, Handler] = MappingProxyType(
    {
        **{kind: _arithmetic(kind) for kind in ("Add", "Sub", "Mul")},
        **dict.fromkeys(MOVES, _move),
        "Abs": _absolute,
        "And": Rewriter.copy,
        "BitShift": _shift,
        "BitwiseAnd": _bits,
        "Cast": _cast,
        "Clip": _clip,
        "Concat": _concat,
        "ConvInteger": _layer,
        "DequantizeLinear": _dequantize,
        "Div": _divide,
        "Equal": _compare(lambda a, x, y: a.is_zero(a.add(x, y, sign=-1))),
        "Greater": _compare(lambda a, x, y: a.negative(a.add(y, x, sign=-1))),
        "Less": _compare(lambda a, x, y: a.negative(a.add(x, y, sign=-1))),
        "LessOrEqual": _compare(lambda a, x, y: a.b.node("Not", [a.negative(a.add(y, x, sign=-1))])),
        "MatMul": _matmul,
        "MatMulInteger": _layer,
        "Max": _extreme,
        "Min": _extreme,
        "Not": Rewriter.copy,
        "Or": Rewriter.copy,
        "ReduceMax": _largest,
        "ReduceSum": _sum,
        "Scan": _scan,
        "Where": _where,
    }
)
