"""Write a requantization with int32 and uint32 operators only (`narrow`)."""

import numpy as np
from onnx import TensorProto

from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.operations import Requantization
from onnx_backend.integer.ir.requant32 import Requant32, Requant32Term
from onnx_backend.integer.ir.values import Array, Term


def requantize_narrow(b: Builder, op: Requantization, plan: Requant32) -> None:
    """Write a requantization with int32 and uint32 operators only."""
    total = ""
    for term, how in zip(op.value.terms, plan.terms, strict=True):
        part = _product(b, term, how)
        total = b.node("Add", [total, part]) if total else part
    half = np.left_shift(np.int64(1), plan.shift - 1)
    lift = np.ceil(np.ldexp(plan.reach, -plan.shift)).astype(np.int64)
    raised = b.node("Add", [total, b.constant(plan.addend + half + (lift << plan.shift), np.int32)])
    codes = b.node("Add", [_right(b, raised, plan.shift), b.constant(op.encoding.zero_point - lift, np.int32)])
    lo, hi = (b.constant(bound, np.int32) for bound in op.bounds)
    b.write("Cast", [b.node("Clip", [codes, lo, hi])], op.result, to=op.encoding.onnx_kind)


def _product(b: Builder, term: Term, how: Requant32Term) -> str:
    wide = b.cast(term.name, TensorProto.INT32)
    centred = b.node("Sub", [wide, b.constant(how.zero, np.int32)]) if np.any(how.zero) else wide
    if np.any(how.cut):
        ends = np.where(how.cut > 0, how.cut, (1 << 31) - 1)
        centred = b.node("Min", [centred, b.constant(ends, np.int32)])
        centred = b.node("Max", [centred, b.constant(-ends, np.int32)])
    if np.any(how.before):
        half = np.where(how.before > 0, np.left_shift(np.int64(1), np.maximum(how.before, 1) - 1), 0)
        lift = np.int64(1) << 30  # no less than the accumulator, and a multiple of every shift's unit
        raised = b.node("Add", [centred, b.constant(half + lift, np.int32)])
        centred = b.node("Sub", [_right(b, raised, how.before), b.constant(lift >> how.before, np.int32)])
    return b.node("Mul", [centred, b.constant(how.mantissa, np.int32)])


def _right(b: Builder, tensor: str, shift: Array) -> str:
    """Write a right shift of an int32 tensor that is not negative."""
    bits = b.cast(tensor, TensorProto.UINT32)
    return b.cast(b.node("BitShift", [bits, b.constant(shift, np.uint32)], direction="RIGHT"), TensorProto.INT32)
