"""Lower LSTM and GRU: gates and states in fixed point between the quantizers.

The quantized input is multiplied with W for all steps at once. Per step the hidden state is multiplied with R exactly,
Sigmoid and Tanh are tables with straight lines between their entries, and both states are rounded to fixed units that
are finer than any output's quantizer; the sum of all roundings is stated as the error of the outputs. A sequence of
fixed length is unrolled, one of open length is a Scan over the same steps.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, ValueInfoProto, helper

from onnx_backend.integer.fixed_point.fixed_arithmetic import int64_value
from onnx_backend.integer.fixed_point.to_fixed import to_fixed
from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.context import Args, LoweringContext, label
from onnx_backend.integer.ir.exact_bounds import float_chain_bound
from onnx_backend.integer.ir.values import Array, Constant, FixedPoint, Integers, Linear, Lookup, Refused, Term, Value
from onnx_backend.integer.lowering.layers.layers import bytes_of
from onnx_backend.integer.lowering.recurrent.cells import GruBefore, GruBehind, Lstm
from onnx_backend.integer.lowering.recurrent.layer import (
    LONGEST,
    OFFSET,
    Cell,
    Direction,
    Inputs,
    Step,
    dropped,
    in_unit,
    magnitude,
    matrix,
)
from onnx_backend.proto.nodes import attributes


@dataclass(frozen=True)
class Outputs:
    """The results of one direction."""

    states: FixedPoint  # hidden states of all steps, [steps, 1, batch, hidden]
    last: FixedPoint  # the last hidden state, [1, batch, hidden]
    cell_state: FixedPoint | None  # the last one, [1, batch, hidden], None for a GRU
    errors: Sequence[float]  # bound of the hidden state's error in real units after each step


def run_steps(ctx: LoweringContext, cell: Cell, layer: Direction) -> Outputs:
    """Write all steps of one direction, with the bounds of their errors."""
    fixed = layer.steps is not None
    lifted, last = (_unrolled if fixed else _scanned)(ctx, cell, layer)
    errors = list(islice(cell.errors(), layer.steps or LONGEST))
    worst = max(error for error, _ in errors)
    states = _hidden(ctx, ctx.node("Transpose", [lifted], perm=[0, 2, 1, 3]), cell, layer, worst)
    state = _hidden(ctx, _as_last(ctx, last[0], layer), cell, layer, errors[-1][0] if fixed else worst)
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
        return ctx.node("Transpose", [state], perm=[1, 0, 2])
    return ctx.node("Squeeze", [state, ctx.constant64(np.asarray([2]))])


def _unrolled(ctx: LoweringContext, cell: Cell, layer: Direction) -> tuple[str, list[str]]:
    """Write every step; return the lifted hidden states [steps, batch, 1, hidden] and the last states."""
    count = layer.steps or 0
    rows = [ctx.split(name, [1] * count, 0) for name in cell.given]
    states, weights, found = cell.starts, cell.write_weights(ctx), {}
    for t in range(count)[::-1] if layer.backwards else range(count):
        last = cell.write_step(ctx, Step([row[t] for row in rows], states, weights, 4))
        states, found[t] = [*last], last[0]
    return ctx.node("Concat", [found[t] for t in range(count)], axis=0), last


def _scanned(ctx: LoweringContext, cell: Cell, layer: Direction) -> tuple[str, list[str]]:
    """Write a Scan over the steps; return the lifted hidden states [steps, batch, 1, hidden] and the last states."""
    starts = [
        _filled(ctx, cell, layer, zero) if name is None else name
        for name, zero in zip(cell.starts, cell.zeros, strict=True)
    ]
    kept = [ctx.fresh(f"{ctx.label}.state") for _ in starts]
    given = [ctx.fresh(f"{ctx.label}.given") for _ in cell.given]
    with ctx.inside() as (nodes, initializers):
        states = cell.write_step(ctx, Step(given, kept, cell.write_weights(ctx), 3))
        shown = ctx.node("Identity", [states[0]])
    plain = [node for node in nodes if isinstance(node, NodeProto)]
    assert len(plain) == len(nodes)  # nothing in a step is left to the target

    def info(name: str, columns: int) -> ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.INT64, [layer.batch, 1, columns])

    body = helper.make_graph(
        plain,
        f"{ctx.label}.step",
        [info(name, layer.hidden) for name in kept]
        + [info(name, width) for name, width in zip(given, cell.widths, strict=True)],
        [info(name, layer.hidden) for name in (*states, shown)],
        initializers,
    )
    last = [ctx.fresh(f"{ctx.label}.last") for _ in starts]
    lifted = ctx.fresh(f"{ctx.label}.states")
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
    ctx.nodes.append(node)
    return lifted, last


def _filled(ctx: LoweringContext, cell: Cell, layer: Direction, integer: int) -> str:
    """Write a first state of one integer, [batch, 1, hidden]."""
    if layer.batch is not None:
        return ctx.constant64(np.full((layer.batch, 1, layer.hidden), integer, np.int64))
    batch = ctx.node("Shape", [cell.given[0]], start=1, end=2)
    shape = ctx.node("Concat", [batch, ctx.constant64(np.asarray([1, layer.hidden]))], axis=0)
    return ctx.node("Expand", [ctx.constant64(integer), shape])


_DEFAULTS = MappingProxyType({"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"]})
_GATES = MappingProxyType({"LSTM": 4, "GRU": 3})


def lstm(ctx: LoweringContext, node: NodeProto, args: Args) -> tuple[Value, ...]:
    """Lower LSTM with its default activations, in one or two directions."""
    if len(args) > 7 and args[7] is not None and np.any(_constant(args[7], "its peephole weights")):
        raise Refused("it has peepholes", "remove the peephole weights P")
    if attributes(node).get("input_forget", 0):
        raise Refused("input_forget=1 couples its gates", "export it with separate gates")
    return _lowered(ctx, node, args, Lstm)


def gru(ctx: LoweringContext, node: NodeProto, args: Args) -> tuple[Value, ...]:
    """Lower GRU with its default activations, in one or two directions, with the reset gate before or behind R."""
    before = not attributes(node).get("linear_before_reset", 0)
    return _lowered(ctx, node, args, GruBefore if before else GruBehind)


def _lowered(
    ctx: LoweringContext, node: NodeProto, args: Args, make: Callable[[LoweringContext, Direction], Cell]
) -> tuple[Value, ...]:
    layers = _layers(ctx, node, args)
    runs = [run_steps(ctx, make(ctx, layer), layer) for layer in layers]
    if layers[0].steps is None:
        _note_errors(ctx, node, runs)
    found = [_joined(ctx, [run.states for run in runs], 1), _joined(ctx, [run.last for run in runs], 0)]
    cells = [run.cell_state for run in runs if run.cell_state is not None]
    if cells:
        found.append(_joined(ctx, cells, 0))
    return tuple(_pending(node, value) for value in found)[: len(node.output)]


def _note_errors(ctx: LoweringContext, node: NodeProto, runs: Sequence[Outputs]) -> None:
    """Note in the certificate what holds of sequences up to a length, and what for longer ones."""
    worst = [max(errors) for errors in zip(*(run.errors for run in runs), strict=True)]
    lengths = [1 << i for i in range(len(worst).bit_length()) if 1 << i <= len(worst)]
    ctx.facts[label(node)]["state_error_by_length"] = {str(n): max(worst[:n]) for n in lengths}
    ctx.assumed.append(f"{label(node)}: its sequence has at most {LONGEST} steps; of longer ones no error is stated")


def _pending(node: NodeProto, value: FixedPoint) -> Linear:
    lo, hi, zero = (np.asarray(bound, np.int64) for bound in (value.lo, value.hi, 0))
    unit = float(value.scale)
    return Linear(
        (Term(value.name, np.asarray(unit), zero, lo, hi),),
        source=label(node),
        error=float_chain_bound(value.error) * Fraction(unit),
    )


def _joined(ctx: LoweringContext, values: Sequence[FixedPoint], axis: int) -> FixedPoint:
    first = values[0]
    if len(values) == 1:
        return first
    name = ctx.node("Concat", [value.name for value in values], axis=axis)
    lo, hi = min(value.lo for value in values), max(value.hi for value in values)
    return replace(first, name=name, lo=lo, hi=hi, error=max(value.error for value in values))


# --- the layer -------------------------------------------------------------------------------------------------------


def _layers(ctx: LoweringContext, node: NodeProto, args: Args) -> list[Direction]:
    attrs, count = attributes(node), _GATES[node.op_type]
    directions = _directions(node, attrs)
    steps, batch = (ctx.shapes.get(node.input[0]) or (None, None))[:2]
    if steps == 0:
        raise Refused("its sequence is empty", "export with a sequence of at least one step")
    _require_whole_sequences(args, steps)
    activation = bytes_of(ctx, args[0])
    states = [_initial(ctx, args, place, what) for place, what in ((5, "initial_h"), (6, "initial_c"))]
    if node.op_type == "GRU":
        states[1] = None
    largest = max(1.0, magnitude(states[0]))
    apart = node.op_type == "GRU" and bool(attrs.get("linear_before_reset", 0))
    found = []
    for direction, backwards in enumerate(directions):
        weight, recurrent = (matrix(ctx, args[i], direction, what) for i, what in ((1, "W"), (2, "R")))
        hidden = recurrent.integers.shape[0]
        bias = np.zeros((2, count * hidden))
        if len(args) > 3 and args[3] is not None:
            bias = _constant(args[3], "its bias").astype(np.float64)[direction].reshape(2, -1)
        inner = np.zeros(hidden)
        if apart:
            inner = bias[1, 2 * hidden :].copy()
            bias = np.stack([bias[0], np.where(np.arange(3 * hidden) < 2 * hidden, bias[1], 0.0)])
        first = [None if state is None else _pick(ctx, state, direction) for state in states]
        inputs = Inputs(activation, weight, bias.sum(0))
        found.append(Direction(inputs, recurrent, hidden, batch, steps, backwards, first[0], first[1], inner, largest))
    return found


def _directions(node: NodeProto, attrs: Mapping[str, Any]) -> list[bool]:
    directions = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}.get(
        attrs.get("direction", "forward")
    )
    if directions is None:
        raise Refused(f"direction={attrs['direction']!r} is unknown", "use forward, reverse or bidirectional")
    names = attrs.get("activations", [])
    if names and names != _DEFAULTS[node.op_type] * len(directions):
        raise Refused(f"its activations are {', '.join(names)}", "use the default activations")
    if attrs.get("clip", 0.0):
        raise Refused("it clips its gates", "export it without clip")
    if attrs.get("layout", 0):
        raise Refused("layout=1 puts the batch first", "export it with layout=0 and a Transpose")
    return directions


def _require_whole_sequences(args: Args, steps: int | None) -> None:
    lengths = args[4] if len(args) > 4 else None
    if lengths is None:
        return
    if not isinstance(lengths, Integers) or lengths.array is None or np.any(lengths.array != steps):
        raise Refused("its sequences have lengths of their own", "export it without sequence_lens, and mask its output")


def _constant(value: Value | None, what: str) -> Array:
    if not isinstance(value, Constant):
        raise Refused(f"{what} is not a constant", "store it as an initializer")
    return value.values


def _initial(ctx: LoweringContext, args: Args, place: int, what: str) -> FixedPoint | None:
    value = args[place] if len(args) > place else None
    if value is None or (isinstance(value, Constant | Lookup) and not np.any(value.values)):
        return None
    return in_unit(ctx, to_fixed(ctx, value, what), 20)


def _pick(ctx: LoweringContext, value: FixedPoint, index: int) -> FixedPoint:
    """Return one index of the first axis, which is dropped."""
    return replace(value, name=ctx.node("Gather", [value.name, ctx.constant64(index)], axis=0))
