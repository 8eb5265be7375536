"""The steps of a recurrent layer one after the other: unrolled where their number is fixed, else in a Scan."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from onnx import NodeProto, TensorProto, ValueInfoProto, helper

from onnx_backend.integer.fixed_point.fixed_arithmetic import constant64, int64_value
from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.context import LoweringContext
from onnx_backend.integer.ir.values import FixedPoint
from onnx_backend.integer.lowering.recurrent.layer import LONGEST, Cell, Direction, Step, dropped, in_unit
from onnx_backend.integer.lowering.recurrent.sums import OFFSET


@dataclass(frozen=True)
class Outputs:
    """The results of one direction.

    Attributes:
        states: hidden states of all steps, [steps, 1, batch, hidden].
        last: the last hidden state, [1, batch, hidden].
        cell_state: the last one, [1, batch, hidden], None for a GRU.
        errors: bound of the hidden state's error in real units after each step.
    """

    states: FixedPoint
    last: FixedPoint
    cell_state: FixedPoint | None
    errors: Sequence[float]


def run_steps(ctx: LoweringContext, cell: Cell, layer: Direction) -> Outputs:
    """Write all steps of one direction, with the bounds of their errors."""
    fixed = layer.steps is not None
    lifted, last = (_unrolled if fixed else _scanned)(ctx, cell, layer)
    b, errors = ctx.builder, list(islice(cell.errors(), layer.steps or LONGEST))
    worst = max(error for error, _ in errors)
    states = _hidden(b, b.node("Transpose", [lifted], perm=[0, 2, 1, 3]), cell, layer, worst)
    state = _hidden(b, _as_last(ctx, last[0], layer), cell, layer, errors[-1][0] if fixed else worst)
    most, cell_state = cell.largest_cell_state, None
    if most is not None:
        off = math.ldexp(errors[-1][1] if fixed else max(error for _, error in errors), cell.fine)
        whole = int64_value(_as_last(ctx, last[1], layer), 2.0**-cell.fine, -most, most, error=off)
        room = 30 - max(math.ceil(math.log2(math.ldexp(most, -cell.fine) + 1.0)), 2)
        cell_state = in_unit(ctx, whole, min(room, cell.fine - 1))
    return Outputs(states, state, cell_state, [error for error, _ in errors])


def _hidden(b: Builder, lifted: str, cell: Cell, layer: Direction, error: float) -> FixedPoint:
    """Write hidden states as int32 multiples of `2**-fraction`."""
    whole = b.cast(dropped(b, lifted, cell.drop), TensorProto.INT32)
    name = b.node("Sub", [whole, b.constant(OFFSET, np.int32)])
    most = math.ceil(math.ldexp(layer.largest, cell.fraction))
    unit = np.asarray(2.0**-cell.fraction)
    return FixedPoint(name, unit, -most, most, narrow=True, error=math.ldexp(error, cell.fraction))


def _as_last(ctx: LoweringContext, state: str, layer: Direction) -> str:
    """Write a state behind all steps as [1, batch, hidden]."""
    if layer.steps is None:
        return ctx.builder.node("Transpose", [state], perm=[1, 0, 2])
    return ctx.builder.node("Squeeze", [state, constant64(ctx, np.asarray([2]))])


def _unrolled(ctx: LoweringContext, cell: Cell, layer: Direction) -> tuple[str, list[str]]:
    """Write every step; return the lifted hidden states [steps, batch, 1, hidden] and the last states."""
    b, count = ctx.builder, layer.steps or 0
    rows = [b.split(name, [1] * count, 0) for name in cell.given]
    states, weights, found = cell.starts, cell.write_weights(b), {}
    for t in range(count)[::-1] if layer.backwards else range(count):
        last = cell.write_step(b, Step([row[t] for row in rows], states, weights, 4))
        states, found[t] = [*last], last[0]
    return b.node("Concat", [found[t] for t in range(count)], axis=0), last


def _scanned(ctx: LoweringContext, cell: Cell, layer: Direction) -> tuple[str, list[str]]:
    """Write a Scan over the steps; return the lifted hidden states [steps, batch, 1, hidden] and the last states."""
    b = ctx.builder
    starts = [
        _filled(ctx, cell, layer, zero) if name is None else name
        for name, zero in zip(cell.starts, cell.zeros, strict=True)
    ]
    kept = [b.fresh(f"{b.label}.state") for _ in starts]
    given = [b.fresh(f"{b.label}.given") for _ in cell.given]
    with b.inside() as (nodes, initializers):
        states = cell.write_step(b, Step(given, kept, cell.write_weights(b), 3))
        shown = b.node("Identity", [states[0]])
    plain = [node for node in nodes if isinstance(node, NodeProto)]
    assert len(plain) == len(nodes)  # nothing in a step is left to the target

    def info(name: str, columns: int) -> ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.INT64, [layer.batch, 1, columns])

    body = helper.make_graph(
        plain,
        f"{b.label}.step",
        [info(name, layer.hidden) for name in kept]
        + [info(name, width) for name, width in zip(given, cell.widths, strict=True)],
        [info(name, layer.hidden) for name in (*states, shown)],
        initializers,
    )
    last = [b.fresh(f"{b.label}.last") for _ in starts]
    lifted = b.fresh(f"{b.label}.states")
    directions = [int(layer.backwards)]
    node = helper.make_node(
        "Scan",
        [*starts, *cell.given],
        [*last, lifted],
        name=f"{lifted}_node",
        body=body,
        num_scan_inputs=len(given),
        scan_input_directions=directions * len(given),
        scan_output_directions=directions,
    )
    b.nodes.append(node)
    return lifted, last


def _filled(ctx: LoweringContext, cell: Cell, layer: Direction, integer: int) -> str:
    """Write a first state of one integer, [batch, 1, hidden]."""
    b = ctx.builder
    if layer.batch is not None:
        return constant64(ctx, np.full((layer.batch, 1, layer.hidden), integer, np.int64))
    batch = b.node("Shape", [cell.given[0]], start=1, end=2)
    shape = b.node("Concat", [batch, constant64(ctx, np.asarray([1, layer.hidden]))], axis=0)
    return b.node("Expand", [constant64(ctx, integer), shape])
