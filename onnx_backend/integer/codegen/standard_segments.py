"""Write a table of 16-bit codes as straight lines, with int32 and uint32 operators only (`segments`)."""

import numpy as np
from onnx import TensorProto

from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.operations import Table
from onnx_backend.integer.ir.piecewise_linear import CELL, FRACTION, Segments
from onnx_backend.integer.ir.values import Array


def interpolate(b: Builder, op: Table, lines: Segments) -> None:
    """Write the result of straight lines for every code."""
    flat = b.cast(b.node("Reshape", [op.codes, b.constant([-1], np.int64)]), TensorProto.UINT32)
    cell = b.cast(b.node("BitShift", [flat, b.constant(CELL, np.uint32)], direction="RIGHT"), TensorProto.INT32)
    rest = b.node("BitwiseAnd", [flat, b.constant((1 << CELL) - 1, np.uint32)])
    bits = _gathered(b, lines.bits, cell, np.uint32)
    place = b.node("BitShift", [rest, bits], direction="RIGHT")
    segment = b.node("Add", [_gathered(b, lines.first, cell), b.cast(place, TensorProto.INT32)])
    within = b.node("Sub", [rest, b.node("BitShift", [place, bits], direction="LEFT")])
    rise = b.node("Mul", [_gathered(b, lines.slope, segment), b.cast(within, TensorProto.INT32)])
    line = b.node("Add", [_gathered(b, lines.base, segment), rise])
    ends = [b.constant(end, np.int32) for end in (0, lines.top << FRACTION)]
    inside = b.cast(b.node("Clip", [line, *ends]), TensorProto.UINT32)
    codes = b.node("BitShift", [inside, b.constant(FRACTION, np.uint32)], direction="RIGHT")
    found = b.cast(codes, op.encoding.onnx_kind)
    b.write("Reshape", [found, b.node("Shape", [op.codes])], op.result, allowzero=1)


def _gathered(b: Builder, values: Array, index: str, dtype: type = np.int32) -> str:
    return b.node("GatherElements", [b.constant(values, dtype, "table"), index], axis=0)
