"""Sigmoid and Tanh of the columns of one tensor by a single look-up in straight lines, in as few nodes as there are.

`x + lift` is never negative. Its high bits are the place of a segment in the joined tables, its low bits the distance
from the segment's start, and `bases[place] + slopes[place] * distance` is the result before its last bits are dropped.
The lift of a column chooses its function, so that columns of both functions take the same nodes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from onnx import TensorProto

from onnx_backend.integer.fixed_point.elementwise import CURVES, segment_bits
from onnx_backend.integer.fixed_point.fixed_arithmetic import ROOM
from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.exact_bounds import ULP
from onnx_backend.integer.ir.values import Array

_FUNCTIONS: Mapping[str, Callable[[Array], Array]] = MappingProxyType(
    {"Sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)), "Tanh": np.tanh}
)


@dataclass(frozen=True)
class GateTable:
    """The joined tables of the gates of some columns.

    Attributes:
        lift: int64 [columns], what is to be added to a value's integers.
        wide: low bits of a lifted integer.
        limits: int32 [columns], least and largest place of each column, None where no integer is beyond them.
        before: places in front of the first one, which only integers beyond the tables have.
        bases: int64, results at the start of each segment.
        slopes: int64, their growth for each unit of distance.
        drop: bits that are dropped from a result.
        bound: largest lifted integer.
        errors: function -> bound of its error in real units, besides that of its argument.
    """

    lift: Array
    wide: int
    limits: tuple[Array, Array] | None
    before: int
    bases: Array
    slopes: Array
    drop: int
    bound: int
    errors: Mapping[str, float]

    def error(self, function: str, argument: float) -> float:
        """Bound the error of a function in real units, whose argument has this error."""
        whole = 1.0 if function == "Sigmoid" else 2.0
        return min(self.errors[function] + CURVES[function]({}).slope * argument, whole)


def gate_table(
    unit: float, reach: int, gates: Sequence[tuple[str, int]], fraction: int, *, addend: int = 0
) -> GateTable:
    """Return the joined tables of neighbouring gates.

    Args:
        unit: of the integers that are looked up, in real units.
        reach: their largest magnitude.
        gates: the function of each gate, `Sigmoid` or `Tanh`, and its columns.
        fraction: results are multiples of `2**-fraction`.
        addend: what is added to a result's integers.
    """
    curves = {name: CURVES[name]({}) for name, _ in gates}
    fars = {name: math.ceil(curve.reach / unit) for name, curve in curves.items()}
    wide = min(segment_bits(2 * min(fars[name], reach), unit, curve) for name, curve in curves.items())
    room = ROOM - 2 - max(addend.bit_length() - fraction - 1, 0)
    fine, step, drop = room - wide, math.ldexp(unit, wide), room - fraction
    starts, ends, bases, slopes, errors, offset = [], [], [], [], {}, 0
    for name, curve in curves.items():
        # beyond `far` a function is as good as constant; twice as long a table costs less than limits
        held = reach if reach <= 2 * fars[name] else fars[name]
        first, last = -held >> wide, held >> wide
        knots = np.rint(np.ldexp(_FUNCTIONS[name](np.arange(first, last + 2) * step), fine)).astype(np.int64)
        knots = np.concatenate([knots[:1], knots, knots[-1:]])  # what is beyond stays at the last result
        bases.append((knots[:-1] << wide) + (addend << drop))
        slopes.append(np.diff(knots))
        starts.append(offset - (first - 1))
        ends.append((offset, offset + len(knots) - 2))
        errors[name] = step * step / 8 * curve.bend + 4.0 * curve.tail + (1.0 + curve.reach) * 16 * ULP
        errors[name] += math.ldexp(2.0, -fine) + math.ldexp(1.0, -fraction)
        offset += len(knots) - 1
    before = max(0, (reach >> wide) + 1 - min(starts))
    limited = any(reach > 2 * far for far in fars.values())
    places, columns = [list(curves).index(name) for name, _ in gates], [count for _, count in gates]

    def by_column(numbers: Sequence[int], dtype: type) -> Array:
        return np.repeat(np.asarray(numbers, dtype)[places], columns)

    lowest, highest = (by_column([end[i] + before for end in ends], np.int32) for i in (0, 1))
    limits = (lowest, highest)
    return GateTable(
        by_column([(start + before) << wide for start in starts], np.int64),
        wide,
        limits if limited else None,
        before,
        np.concatenate(bases),
        np.concatenate(slopes),
        drop,
        ((max(starts) + before) << wide) + reach,
        MappingProxyType(errors),
    )


def look_up(b: Builder, table: GateTable, lifted: str, rank: int) -> str:
    """Write the gates of lifted integers, int64 [(1,) * (rank - 3), batch, 1, columns]."""

    def constant(array: Array | list[int] | int) -> str:
        return b.constant(np.asarray(array, np.int64))

    def flat(name: str) -> str:
        return b.node("Reshape", [name, constant([-1])])

    unit = constant(1 << table.wide)
    if table.limits is None:
        lifted = flat(lifted)
        place = b.node("Div", [lifted, unit])
    else:  # in int32: the runtime's Max and Min of int64 are wrong on x86
        place = b.cast(b.node("Div", [lifted, unit]), TensorProto.INT32)
        place = b.node("Max", [place, b.constant(table.limits[0])])
        place = flat(b.node("Min", [place, b.constant(table.limits[1])]))
        place = b.node("Sub", [place, b.constant(np.int32(table.before))]) if table.before else place
        lifted = flat(lifted)
    base, slope = (
        b.node("GatherElements", [b.constant(part, stem="table"), place], axis=0)
        for part in (table.bases, table.slopes)
    )
    distance = b.node("BitwiseAnd", [lifted, constant((1 << table.wide) - 1)])
    exact = b.node("Add", [base, b.node("Mul", [slope, distance])])
    found = b.node("Div", [exact, constant(1 << table.drop)])
    return b.node("Reshape", [found, constant([1] * (rank - 3) + [-1, 1, table.lift.size])])
