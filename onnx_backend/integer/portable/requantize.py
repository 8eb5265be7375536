"""Write layers and requantizations in operators and ranges that every runtime computes exactly."""

import numpy as np
from onnx import TensorProto

from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.operations import Requantization
from onnx_backend.integer.ir.values import Array
from onnx_backend.integer.portable.exact_ranges import FLOAT32
from onnx_backend.integer.portable.split_products import SplitProducts, SplitTerm, split_products
from onnx_backend.integer.portable.wide_products import wide_product, write_products


def requantize(b: Builder, op: Requantization) -> bool:
    """Write a requantization in 32 bits, with the codes of the 64-bit form; False if it has too many parts."""
    split = split_products(op)
    if split is None:
        form = wide_product(op)
        if form is None:
            return False
        _cut_to_grid(b, op, write_products(b, op, form))
        return True
    reaches = [int(max(np.max(np.abs(end)) for end in (term.lo, term.hi))) for term in op.value.terms]
    pairs = zip(split.terms, reaches, strict=True)
    distances = [_distance(b, term, reach, alone=len(split.addends) == 1) for term, reach in pairs]
    carry, rests = "", []
    for part in range(len(split.addends) - 1):
        total = _sum(b, split, distances, part, carry)
        if split.ties:
            rests.append(b.node("BitwiseAnd", [total, _int32(b, (1 << split.bits) - 1)]))
            total = b.node("Sub", [total, rests[-1]])
        elif split.masked > 1:
            total = b.node("BitwiseAnd", [total, _int32(b, -1 << split.bits)])
        carry = b.node("Div", [total, _int32(b, 1 << split.bits)])
    total = _sum(b, split, distances, -1, carry)
    unit = np.left_shift(np.int64(1), split.shift)
    if split.ties:
        rests.append(b.node("BitwiseAnd", [total, _int32(b, unit - 1)]))
        total = b.node("Sub", [total, rests[-1]])
    elif split.masked:
        total = b.node("BitwiseAnd", [total, _int32(b, -unit)])
    _codes(b, op, split, b.node("Div", [total, _int32(b, unit)]), rests)
    return True


def _codes(b: Builder, op: Requantization, split: SplitProducts, quotient: str, rests: list[str]) -> None:
    """Write the codes of quotients: made even at ties, moved to their zero point, and cut to the grid."""
    if rests:
        rest = rests[0]
        for other in rests[1:]:
            rest = b.node("BitwiseOr", [rest, other])
        whole = b.node("Sub", [_int32(b, 1), b.node("Min", [rest, _int32(b, 1)])])
        quotient = b.node("Sub", [quotient, b.node("BitwiseAnd", [whole, quotient])])
    if split.after:
        quotient = b.node("Add", [quotient, _int32(b, split.after)])
    if split.clips:  # its kernel is of float32: no runtime may take the products into it
        _cut_to_grid(b, op, b.node("BitwiseAnd", [quotient, _int32(b, -1)]))
    else:
        _result(b, op, quotient)


def _cut_to_grid(b: Builder, op: Requantization, quotient: str) -> None:
    _result(b, op, b.node("Clip", [quotient, *(_int32(b, bound) for bound in op.bounds)]))


def _result(b: Builder, op: Requantization, quotient: str) -> None:
    to = TensorProto.INT32 if op.result in b.indices else op.encoding.onnx_kind
    if to == TensorProto.INT32:
        b.write("Identity", [quotient], op.result)
    else:
        b.write("Cast", [quotient], op.result, to=to)


def _distance(b: Builder, term: SplitTerm, reach: int, *, alone: bool) -> str:
    """Write the distance of a term.

    A runtime may take a product with a constant into a float32 kernel that computed the accumulator, unless two
    operators read the distance: where one alone does, an operator that no kernel takes in stands in between.
    """
    name = b.cast(term.name, TensorProto.INT32) if term.codes else term.name
    for op_type, end, cut in zip(("Max", "Min"), (term.lo, term.hi), term.cuts, strict=True):
        bound = _int32(b, end)
        if cut and reach > FLOAT32:  # with a constant, a runtime may clip in float32 with what is in front of it
            bound = b.node("Add", [b.node("BitwiseAnd", [name, _int32(b, 0)]), bound])
        name = b.node(op_type, [name, bound]) if cut else name
    if not term.rising:
        name = b.node("Sub", [_int32(b, term.hi), name])
    elif np.any(term.lo):
        name = b.node("Sub", [name, _int32(b, term.lo)])
    span = int(np.max(term.hi - term.lo))
    if term.codes or not (alone or span >= FLOAT32):
        return name
    return b.node("BitwiseAnd", [name, _int32(b, (1 << span.bit_length()) - 1)])


def _sum(b: Builder, split: SplitProducts, distances: list[str], part: int, carry: str) -> str:
    """Write the sum of the products with one part of the mantissas, its addend and the carry of the part below."""
    total = carry
    for distance, term in zip(distances, split.terms, strict=True):
        if np.any(term.parts[part]):
            product = b.node("Mul", [distance, _int32(b, term.parts[part])])
            total = b.node("Add", [total, product]) if total else product
    total = total or b.node("Mul", [distances[0], _int32(b, 0)])
    addend = split.addends[part]
    return b.node("Add", [total, _int32(b, addend)]) if np.any(addend) else total


def _int32(b: Builder, values: Array | int) -> str:
    return b.constant(values, np.int32)
