"""The steps of an LSTM in fixed point.

The cell never leaves the number of steps (each adds at most 1), so that its bound is known for the whole sequence.
"""

import math
from collections.abc import Iterator

import numpy as np

from onnx_backend.integer.fixed_point.fixed_arithmetic import ROOM
from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.context import LoweringContext
from onnx_backend.integer.lowering.recurrent.gate_tables import gate_table, look_up
from onnx_backend.integer.lowering.recurrent.layer import (
    LONGEST,
    Cell,
    Direction,
    Step,
    bounded,
    dropped,
    first_state,
    magnitude,
    plus,
)
from onnx_backend.integer.lowering.recurrent.sums import OFFSET, state_fraction, state_product, write_sums

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
        name, self.off = layer.inputs.write(ctx.builder, math.ldexp(unit, -self.product.guard), addend)
        self.given, self.widths = (name,), (4 * size,)
        self.zeros = (OFFSET << self.drop, 0)
        self.starts, self.start_errors = self._starts(ctx)

    def _starts(self, ctx: LoweringContext) -> tuple[list[str | None], tuple[float, float]]:
        """Write the first states; return them with their errors."""
        b = ctx.builder
        state, off = first_state(ctx, self.layer.state, self.fraction)
        cell, cell_off = first_state(ctx, self.layer.cell, self.fine)
        if state is not None:
            state = plus(b, b.node("Mul", [state, b.constant(np.int64(1 << self.drop))]), OFFSET << self.drop)
        return [state, cell], (off, cell_off)

    def write_weights(self, b: Builder) -> list[tuple[str, str]]:
        """Write R."""
        return [self.layer.recurrent.write(b)]

    def write_step(self, b: Builder, step: Step) -> list[str]:
        """Write one step."""
        (state, cell), size, fine, most = step.states, self.layer.hidden, self.fine, self.largest_cell_state
        sums = write_sums(b, self.product, step.given[0], state, self.drop, step.weights[0])
        bounded(b, sums, 0, self.gates.bound)
        gates = look_up(b, self.gates, sums, step.rank)
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
        curve = look_up(b, self.curve, lifted, step.rank)
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
