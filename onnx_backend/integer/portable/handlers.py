"""How each operator of the standard target is written in exact ranges: bounds where it stays, other operators else."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from onnx_backend.integer.ir.context import FIXED_SIZES
from onnx_backend.integer.ir.values import Refused
from onnx_backend.integer.portable.exact_ranges import FLOAT32
from onnx_backend.integer.portable.numbers_in_parts import Number, constant
from onnx_backend.integer.portable.quotients import divided, divided_by_powers
from onnx_backend.integer.portable.rewrite import MOVES, WIDE, Handler, Rewriter
from onnx_backend.integer.portable.sums import SUMS
from onnx_backend.proto.nodes import attributes


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
        **SUMS,
        "Abs": _absolute,
        "And": Rewriter.copy,
        "BitShift": _shift,
        "BitwiseAnd": _bits,
        "Cast": _cast,
        "Clip": _clip,
        "Concat": _concat,
        "DequantizeLinear": _dequantize,
        "Div": _divide,
        "Equal": _compare(lambda a, x, y: a.is_zero(a.add(x, y, sign=-1))),
        "Greater": _compare(lambda a, x, y: a.negative(a.add(y, x, sign=-1))),
        "Less": _compare(lambda a, x, y: a.negative(a.add(x, y, sign=-1))),
        "LessOrEqual": _compare(lambda a, x, y: a.b.node("Not", [a.negative(a.add(y, x, sign=-1))])),
        "Max": _extreme,
        "Min": _extreme,
        "Not": Rewriter.copy,
        "Or": Rewriter.copy,
        "Scan": _scan,
        "Where": _where,
    }
)
