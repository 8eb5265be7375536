"""The steps of an LSTM and of a GRU in fixed point; Sigmoid and Tanh of their gates are one look-up in straight lines.

In a look-up `x + lift` is never negative. Its high bits are the place of a segment in the joined tables, its low bits
the distance from the segment's start, and `bases[place] + slopes[place] * distance` is the result before its last bits
are dropped. The lift of a column chooses its function, so that columns of both functions take the same nodes.

An LSTM's cell never leaves the number of steps (each adds at most 1), so its bound is known for the whole sequence.
A GRU's state is blended from the last one and a candidate, and is never larger than both; it is kept with `lift` added,
so that it is never negative, and the table of the candidate adds the same.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from onnx import TensorProto

from onnx_backend.integer.fixed_point.curves import CURVES, segment_bits
from onnx_backend.integer.fixed_point.fixed_arithmetic import ROOM
from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.context import LoweringContext
from onnx_backend.integer.ir.exact_bounds import ULP
from onnx_backend.integer.ir.values import Array
from onnx_backend.integer.lowering.recurrent.layer import (
    LONGEST,
    OFFSET,
    Cell,
    Direction,
    Inputs,
    StateProduct,
    Step,
    bounded,
    dropped,
    first_state,
    magnitude,
    plus,
    state_fraction,
    state_product,
    write_sums,
)

_FUNCTIONS: Mapping[str, Callable[[Array], Array]] = MappingProxyType(
    {"Sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)), "Tanh": np.tanh}
)


@dataclass(frozen=True)
class GateTable:
    """The joined tables of the gates of some columns."""

    lift: Array  # int64 [columns], what is to be added to a value's integers
    wide: int  # low bits of a lifted integer
    # int32 [columns], least and largest place of each column, None where no integer is beyond them
    limits: tuple[Array, Array] | None
    before: int  # places in front of the first one, which only integers beyond the tables have
    bases: Array  # int64, results at the start of each segment
    slopes: Array  # int64, their growth for each unit of distance
    drop: int  # bits that are dropped from a result
    bound: int  # largest lifted integer
    errors: Mapping[str, float]  # function -> bound of its error in real units, besides that of its argument

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


def look_up_gates(b: Builder, table: GateTable, lifted: str, rank: int) -> str:
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


_DROP = 38  # most bits below those of a hidden state: with its three bytes, 62
_FINE = 28  # fraction bits of gates and cells, where the cells leave room for them


class Lstm(Cell):
    """An LSTM with its default activations."""

    largest_cell_state: int

    def __init__(self, ctx: LoweringContext, layer: Direction) -> None:
        self.layer, size = layer, layer.hidden
        self.fraction = state_fraction(layer.largest)
        reach, norm = layer.inputs.reach, layer.recurrent.norm * layer.largest
        self.product = state_product(layer.recurrent, self.fraction, float(np.max(reach + 4 * norm)))
        unit = self.product.unit
        self.begin = magnitude(layer.cell)
        self.bound = self.begin + (layer.steps or LONGEST)
        self.fine = min(_FINE, (ROOM - 1 - math.ceil(math.log2(self.bound + 1.0))) // 2)
        last = min(30, ROOM - 2 - self.fine, _DROP + self.fraction - self.fine)
        whole = math.ceil(float(np.max(reach + norm)) / unit) + 8
        self.largest_cell_state = math.ceil(math.ldexp(self.bound, self.fine))
        self.gates = gate_table(unit, whole, (("Sigmoid", 3 * size), ("Tanh", size)), self.fine)
        self.curve = gate_table(2.0**-self.fine, self.largest_cell_state, (("Tanh", size),), last)
        self.drop = self.fine + last - self.fraction
        addend = np.left_shift(self.gates.lift, self.product.guard) - self.product.centre
        name, self.off = layer.inputs.write(ctx, math.ldexp(unit, -self.product.guard), addend)
        self.given, self.widths = (name,), (4 * size,)
        self.zeros = (OFFSET << self.drop, 0)
        self.starts, self.start_errors = self._starts(ctx)

    def _starts(self, ctx: LoweringContext) -> tuple[list[str | None], tuple[float, float]]:
        """Write the first states; return them with their errors."""
        state, off = first_state(ctx, self.layer.state, self.fraction)
        cell, cell_off = first_state(ctx, self.layer.cell, self.fine)
        if state is not None:
            state = plus(ctx, ctx.node("Mul", [state, ctx.constant(np.int64(1 << self.drop))]), OFFSET << self.drop)
        return [state, cell], (off, cell_off)

    def write_weights(self, b: Builder) -> list[tuple[str, str]]:
        """Write R."""
        return [self.layer.recurrent.write(b)]

    def write_step(self, b: Builder, step: Step) -> list[str]:
        """Write one step."""
        (state, cell), size, fine, most = step.states, self.layer.hidden, self.fine, self.largest_cell_state
        sums = write_sums(b, self.product, step.given[0], state, self.drop, step.weights[0])
        bounded(b, sums, 0, self.gates.bound)
        gates = look_up_gates(b, self.gates, sums, step.rank)
        bounded(b, gates, -1 << fine, 1 << fine)
        enter, leave, keep, candidate = b.split(gates, [size] * 4, -1)
        fresh = b.node("Mul", [enter, candidate])
        if cell is not None:
            fresh = b.node("Add", [b.node("Mul", [keep, cell]), fresh])
        cell = dropped(b, fresh, fine)
        if self.layer.steps is None:  # in longer sequences cells that grow at every step saturate
            for test, end in (("Less", -most), ("Greater", most)):
                beyond = b.constant(np.int64(end))
                cell = b.node("Where", [b.node(test, [cell, beyond]), beyond, cell])
        bounded(b, cell, -most, most)
        lifted = bounded(b, plus(b, cell, int(self.curve.lift[0])), 0, self.curve.bound)
        curve = look_up_gates(b, self.curve, lifted, step.rank)
        state = plus(b, b.node("Mul", [leave, curve]), (OFFSET << self.drop) + (1 << (self.drop - 1)))
        one = 1 << (self.drop + self.fraction)
        bounded(b, state, (OFFSET << self.drop) - 2 * one, (OFFSET << self.drop) + 2 * one)
        return [state, cell]

    def errors(self) -> Iterator[tuple[float, float]]:
        """Bound the errors of hidden and cell state after each step."""
        state, cell = self.start_errors
        steps = 0
        while True:
            steps += 1
            sums = self.off + self.product.error(state, self.layer.largest)
            gate, candidate = (self.gates.error(name, sums) for name in ("Sigmoid", "Tanh"))
            size = min(self.begin + steps - 1, self.bound)  # of the cell before
            cell += gate * size + gate + candidate + gate * candidate + 2.0**-self.fine
            cell = min(cell, 2.0 * (size + 1.0))
            curve = self.curve.error("Tanh", cell)
            state = min(gate + curve + gate * curve + 2.0**-self.fraction, 2.0)
            yield state, cell


_GATES = 28  # fraction bits of gates
_FINER = 8  # bits by which a state that is blended is finer than one that is multiplied with R


class _Gru(Cell):
    """What both orders share: the lifted state, the gates and the blend."""

    def __init__(self, ctx: LoweringContext, layer: Direction) -> None:
        self.layer, self.both, self.drop = layer, 2 * layer.hidden, _FINER
        self.fraction = state_fraction(layer.largest)
        self.fine = self.fraction + _FINER
        self.lift = (OFFSET << self.drop) + (1 << (self.drop - 1))
        self.zeros = (self.lift,)
        state, self.start_error = first_state(ctx, layer.state, self.fine)
        self.starts = [None if state is None else plus(ctx, state, self.lift)]

    def _gate_table(self, unit: float, reach: float) -> GateTable:
        return gate_table(unit, math.ceil(reach / unit) + 8, (("Sigmoid", self.both),), _GATES)

    def _candidate_table(self, unit: float, reach: float) -> GateTable:
        gates = (("Tanh", self.layer.hidden),)
        return gate_table(unit, math.ceil(reach / unit) + 8, gates, self.fine, addend=self.lift)

    def _gates(self, b: Builder, sums: str, table: GateTable, rank: int) -> list[str]:
        """Write the update gate and the reset gate."""
        gates = look_up_gates(b, table, bounded(b, sums, 0, table.bound), rank)
        return b.split(bounded(b, gates, 0, 1 << _GATES), [self.layer.hidden] * 2, -1)

    def _blended(self, b: Builder, update: str, sums: str, table: GateTable, state: str | None, rank: int) -> list[str]:
        """Write `fresh + update * (state - fresh)`, where `fresh` is the candidate of these sums."""
        one = 1 << self.fine
        fresh = look_up_gates(b, table, bounded(b, sums, 0, table.bound), rank)
        bounded(b, fresh, self.lift - one, self.lift + one)
        gap = b.node("Sub", [b.constant(np.int64(self.lift)) if state is None else state, fresh])
        moved = dropped(b, b.node("Mul", [update, gap]), _GATES)
        most = math.ceil(math.ldexp(self.layer.largest, self.fine))
        return [bounded(b, b.node("Add", [fresh, moved]), self.lift - most, self.lift + most)]

    def _blend_error(self, update: float, fresh: float, state: float) -> float:
        """Bound the error of a blend: at most the larger of both, plus the effect of the update's error."""
        largest = self.layer.largest
        rounded = 2.0**-self.fine + 2.0**-self.fraction
        return min(max(fresh, state) + update * 2.0 * largest + rounded, 2.0 * largest)


class GruBehind(_Gru):
    """A GRU whose reset gate scales the product with R and its bias (linear_before_reset, as in PyTorch)."""

    def __init__(self, ctx: LoweringContext, layer: Direction) -> None:
        super().__init__(ctx, layer)
        size, both, weight = layer.hidden, self.both, layer.inputs.weight
        norm = layer.recurrent.norm * layer.largest
        # the candidate's product with W is not scaled: in the sum with that of R its columns hold a bias alone
        only_gates = replace(weight, integers=weight.integers * (np.arange(3 * size) < both))
        ahead = Inputs(layer.inputs.parts, only_gates, np.concatenate([layer.inputs.bias[:both], layer.inner]))
        last = layer.inputs.columns(both, 3 * size)
        reach = ahead.reach + norm
        self.product = state_product(layer.recurrent, self.fraction, float(np.max(reach + 3 * norm)))
        unit, guard = self.product.unit, self.product.guard
        self.inner = float(np.max(reach[both:]))
        self.gates = self._gate_table(unit, float(np.max(reach[:both])))
        self.curve = self._candidate_table(unit, float(np.max(reach[both:] + last.reach)))
        self.cut = min(max(self.curve.bound.bit_length() + 1 + _GATES - ROOM, 0), _GATES)
        addend = np.concatenate([self.gates.lift << guard, np.zeros(size, np.int64)])
        summed, self.off = ahead.write(ctx, math.ldexp(unit, -guard), addend - self.product.centre)
        lift = self.curve.lift << (_GATES - self.cut)
        apart, self.fresh_off = last.write(ctx, math.ldexp(unit, self.cut - _GATES), lift)
        self.given, self.widths = (summed, apart), (3 * size, size)

    def write_weights(self, b: Builder) -> list[tuple[str, str]]:
        """Write R."""
        return [self.layer.recurrent.write(b)]

    def write_step(self, b: Builder, step: Step) -> list[str]:
        """Write one step."""
        sums = write_sums(b, self.product, step.given[0], step.states[0], self.drop, step.weights[0])
        ahead, inner = b.split(sums, [self.both, self.layer.hidden], -1)
        update, reset = self._gates(b, ahead, self.gates, step.rank)
        inner = dropped(b, inner, self.cut) if self.cut else inner
        whole = b.node("Add", [b.node("Mul", [reset, inner]), step.given[1]])
        whole = dropped(b, whole, _GATES - self.cut) if self.cut < _GATES else whole
        return self._blended(b, update, whole, self.curve, step.states[0], step.rank)

    def errors(self) -> Iterator[tuple[float, float]]:
        """Bound the error of the state after each step."""
        state, unit = self.start_error, self.product.unit
        while True:
            sums = self.off + self.product.error(state, self.layer.largest)
            gate, inner = self.gates.error("Sigmoid", sums), sums + math.ldexp(unit, self.cut)
            scaled = gate * self.inner + inner + gate * inner
            fresh = self.curve.error("Tanh", scaled + self.fresh_off + unit)
            state = self._blend_error(gate, fresh, state)
            yield state, 0.0


class GruBefore(_Gru):
    """A GRU whose reset gate scales the state before it is multiplied with R (the default of ONNX)."""

    def __init__(self, ctx: LoweringContext, layer: Direction) -> None:
        super().__init__(ctx, layer)
        size, both = layer.hidden, self.both
        self.products: list[StateProduct] = []
        self.tables: list[GateTable] = []
        self.offs: list[float] = []
        given = []
        for first, last, tabulate in ((0, both, self._gate_table), (both, 3 * size, self._candidate_table)):
            inputs, recurrent = layer.inputs.columns(first, last), layer.recurrent.columns(first, last)
            reach, norm = inputs.reach, recurrent.norm * layer.largest
            product = state_product(recurrent, self.fraction, float(np.max(reach + 4 * norm)))
            table = tabulate(product.unit, float(np.max(reach + norm)))
            addend = (table.lift << product.guard) - product.centre
            name, off = inputs.write(ctx, math.ldexp(product.unit, -product.guard), addend)
            self.products.append(product)
            self.tables.append(table)
            self.offs.append(off)
            given.append(name)
        self.given, self.widths = tuple(given), (both, size)
        self.scaled_drop = _GATES + self.fine - self.fraction

    def write_weights(self, b: Builder) -> list[tuple[str, str]]:
        """Write the columns of R of the gates, and those of the candidate."""
        return [product.weight.write(b) for product in self.products]

    def write_step(self, b: Builder, step: Step) -> list[str]:
        """Write one step."""
        (state,) = step.states
        sums = write_sums(b, self.products[0], step.given[0], state, self.drop, step.weights[0])
        update, reset = self._gates(b, sums, self.tables[0], step.rank)
        scaled, drop = None, self.scaled_drop
        if state is not None:
            product = b.node("Mul", [reset, plus(b, state, -self.lift)])
            lifted = plus(b, product, (OFFSET << drop) + (1 << (drop - 1)))
            scaled = bounded(b, lifted, 0, 2 * OFFSET << drop)
        whole = write_sums(b, self.products[1], step.given[1], scaled, drop, step.weights[1])
        return self._blended(b, update, whole, self.tables[1], state, step.rank)

    def errors(self) -> Iterator[tuple[float, float]]:
        """Bound the error of the state after each step."""
        state, largest = self.start_error, self.layer.largest
        while True:
            gate = self.tables[0].error("Sigmoid", self.offs[0] + self.products[0].error(state, largest))
            scaled = gate * largest + state + gate * state + 2.0**-self.fraction
            fresh = self.tables[1].error("Tanh", self.offs[1] + self.products[1].error(scaled, largest))
            state = self._blend_error(gate, fresh, state)
            yield state, 0.0
