"""The steps of a GRU in fixed point, with the reset gate before or behind R.

A state is blended from the last one and a candidate, and is never larger than both. States are kept with `lift` added,
so that none is negative; the table of the candidate adds the same.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from onnx_backend.integer.fixed_point.fixed_arithmetic import ROOM
from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.context import LoweringContext
from onnx_backend.integer.lowering.recurrent.gate_tables import GateTable, gate_table, look_up
from onnx_backend.integer.lowering.recurrent.layer import Cell, Direction, Step, bounded, dropped, first_state, plus
from onnx_backend.integer.lowering.recurrent.sums import (
    OFFSET,
    Inputs,
    StateProduct,
    state_fraction,
    state_product,
    write_sums,
)

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
        self.starts = [None if state is None else plus(ctx.builder, state, self.lift)]

    def _gate_table(self, unit: float, reach: float) -> GateTable:
        return gate_table(unit, math.ceil(reach / unit) + 8, (("Sigmoid", self.both),), _GATES)

    def _candidate_table(self, unit: float, reach: float) -> GateTable:
        gates = (("Tanh", self.layer.hidden),)
        return gate_table(unit, math.ceil(reach / unit) + 8, gates, self.fine, addend=self.lift)

    def _gates(self, b: Builder, sums: str, table: GateTable, rank: int) -> list[str]:
        """Write the update gate and the reset gate."""
        gates = look_up(b, table, bounded(b, sums, 0, table.bound), rank)
        return b.split(bounded(b, gates, 0, 1 << _GATES), [self.layer.hidden] * 2, -1)

    def _blended(self, b: Builder, update: str, sums: str, table: GateTable, state: str | None, rank: int) -> list[str]:
        """Write `fresh + update * (state - fresh)`, where `fresh` is the candidate of these sums."""
        one = 1 << self.fine
        fresh = look_up(b, table, bounded(b, sums, 0, table.bound), rank)
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
        summed, self.off = ahead.write(ctx.builder, math.ldexp(unit, -guard), addend - self.product.centre)
        lift = self.curve.lift << (_GATES - self.cut)
        apart, self.fresh_off = last.write(ctx.builder, math.ldexp(unit, self.cut - _GATES), lift)
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
            name, off = inputs.write(ctx.builder, math.ldexp(product.unit, -product.guard), addend)
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
