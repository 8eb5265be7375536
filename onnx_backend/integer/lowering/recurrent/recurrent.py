"""Lower LSTM and GRU: unrolled over a static sequence, gates and states in fixed point between the quantizers.

The quantized input is multiplied with W for all steps at once. Per step the hidden state is multiplied with R exactly,
Sigmoid and Tanh are tables with straight lines between their entries, and both states are rounded to fixed units that
are finer than any output's quantizer; the sum of all roundings is stated as the error of the outputs.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx import NodeProto

from onnx_backend.integer.fixed_point.fixed_arithmetic import (
    add_constant,
    multiply,
    negate,
)
from onnx_backend.integer.fixed_point.sums import add
from onnx_backend.integer.fixed_point.to_fixed import to_fixed
from onnx_backend.integer.ir.context import FIXED_SIZES, Args, LoweringContext, label
from onnx_backend.integer.ir.exact_bounds import float_chain_bound
from onnx_backend.integer.ir.values import Array, Constant, FixedPoint, Integers, Linear, Lookup, Refused, Term, Value
from onnx_backend.integer.lowering.layers.split_int16 import bytes_of
from onnx_backend.integer.lowering.recurrent.parts import (
    Matrix,
    columns,
    difference,
    gate,
    in_unit,
    loosen_bounds,
    matrix,
    of_codes,
    of_state,
    pick,
    product_in_unit,
    split,
    state_fraction,
    within,
)
from onnx_backend.proto.nodes import attributes

_DEFAULTS = MappingProxyType({"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"]})
_GATES = MappingProxyType({"LSTM": 4, "GRU": 3})


@dataclass(frozen=True)
class _Direction:
    """The constants that the steps of one direction need.

    Attributes:
        inputs: products of the input with W plus biases, for all steps: (steps, batch, gates * hidden).
        recurrent: R.
        hidden: size of the state.
        steps: indices of the sequence in the order of computation.
        state: the first hidden state, None for zeros.
        cell: the first cell state, None for zeros.
        bias: of the recurrent product alone, where a gate scales it (GRU with linear_before_reset).
        largest: largest magnitude of a hidden state.
    """

    inputs: FixedPoint
    recurrent: Matrix
    hidden: int
    steps: Sequence[int]
    state: FixedPoint | None
    cell: FixedPoint | None
    bias: Array
    largest: float


def lstm(ctx: LoweringContext, node: NodeProto, args: Args) -> tuple[Value, ...]:
    """Lower LSTM with its default activations, in one or two directions.

    Raises:
        Refused: peepholes, float weights, sequence lengths, or a sequence of dynamic length.
    """
    if len(args) > 7 and args[7] is not None and np.any(_constant(args[7], "its peephole weights")):
        raise Refused("it has peepholes", "remove the peephole weights P")
    if attributes(node).get("input_forget", 0):
        raise Refused("input_forget=1 couples its gates", "export it with separate gates")
    return _unrolled(ctx, node, args, _lstm_steps)


def gru(ctx: LoweringContext, node: NodeProto, args: Args) -> tuple[Value, ...]:
    """Lower GRU with its default activations, in one or two directions, with the reset gate before or behind R.

    Raises:
        Refused: float weights, sequence lengths, or a sequence of dynamic length.
    """
    before = not attributes(node).get("linear_before_reset", 0)
    return _unrolled(ctx, node, args, _gru_steps_before if before else _gru_steps_behind)


Steps = Callable[[LoweringContext, _Direction], tuple[dict[int, FixedPoint], FixedPoint | None]]


def _unrolled(ctx: LoweringContext, node: NodeProto, args: Args, steps: Steps) -> tuple[Value, ...]:
    layers = _layers(ctx, node, args)
    outputs, ends, cells = [], [], []
    for layer in layers:
        states, cell = steps(ctx, layer)
        outputs.append(_stacked(ctx, [states[t] for t in sorted(states)], 0, (0, 1)))
        ends.append(states[layer.steps[-1]])
        if cell is not None:
            cells.append(cell)
    found = [_joined(ctx, outputs, 1), _stacked(ctx, ends, 0, (0,))]
    if cells:
        found.append(_stacked(ctx, cells, 0, (0,)))
    return tuple(_pending(node, value) for value in found)[: len(node.output)]


def _pending(node: NodeProto, value: FixedPoint) -> Linear:
    lo, hi, zero = (np.asarray(bound, np.int64) for bound in (value.lo, value.hi, 0))
    unit = float(value.scale)
    return Linear(
        (Term(value.name, np.asarray(unit), zero, lo, hi),),
        source=label(node),
        error=float_chain_bound(value.error) * Fraction(unit),
    )


def _stacked(ctx: LoweringContext, values: Sequence[FixedPoint], axis: int, new: Sequence[int]) -> FixedPoint:
    b = ctx.builder
    axes = b.constant(list(new), np.int64)
    wider = [replace(value, name=b.node("Unsqueeze", [value.name, axes])) for value in values]
    return _joined(ctx, wider, axis)


def _joined(ctx: LoweringContext, values: Sequence[FixedPoint], axis: int) -> FixedPoint:
    first = values[0]
    if len(values) == 1:
        return first
    name = ctx.builder.node("Concat", [value.name for value in values], axis=axis)
    lo, hi = min(value.lo for value in values), max(value.hi for value in values)
    return replace(first, name=name, lo=lo, hi=hi, error=max(value.error for value in values))


# --- the layer -------------------------------------------------------------------------------------------------------


def _layers(ctx: LoweringContext, node: NodeProto, args: Args) -> list[_Direction]:
    attrs, count = attributes(node), _GATES[node.op_type]
    directions = _directions(node, attrs)
    steps = (ctx.shapes.get(node.input[0]) or (None,))[0]
    if steps is None:
        raise Refused(
            "the length of its sequence is dynamic, and it is unrolled",
            f"{FIXED_SIZES}; in PyTorch, batch_first=True leaves the batch dynamic",
        )
    if steps == 0:
        raise Refused("its sequence is empty", "export with a sequence of at least one step")
    _require_whole_sequences(args, steps)
    activation = bytes_of(ctx, args[0])
    states = [_initial(ctx, args, place, what) for place, what in ((5, "initial_h"), (6, "initial_c"))]
    if node.op_type == "GRU":
        states[1] = None
    largest = 1.0 if states[0] is None else max(1.0, _magnitude(states[0]))
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
        first = [None if state is None else pick(ctx, state, direction) for state in states]
        order = range(steps)[::-1] if backwards else range(steps)
        products = of_codes(ctx, activation, weight, bias.sum(0))
        found.append(_Direction(products, recurrent, hidden, order, first[0], first[1], inner, largest))
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


def _require_whole_sequences(args: Args, steps: int) -> None:
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


def _magnitude(value: FixedPoint) -> float:
    return max(abs(value.lo), abs(value.hi)) * float(value.scale)


# --- the steps -------------------------------------------------------------------------------------------------------


def _first_state(ctx: LoweringContext, layer: _Direction, fraction: int) -> FixedPoint | None:
    return None if layer.state is None else in_unit(ctx, layer.state, fraction)


def _sum(ctx: LoweringContext, inputs: FixedPoint, state: FixedPoint | None, weight: Matrix) -> FixedPoint:
    return inputs if state is None else add(ctx, inputs, of_state(ctx, state, weight))


def _lstm_steps(ctx: LoweringContext, layer: _Direction) -> tuple[dict[int, FixedPoint], FixedPoint | None]:
    size, fraction = layer.hidden, state_fraction(layer.largest)
    start = 0.0 if layer.cell is None else _magnitude(layer.cell)
    # a cell grows by at most 1 per step, so its bound is known for the whole sequence
    bound = start + len(layer.steps)
    cells = 30 - max(math.ceil(math.log2(bound + 1.0)), 2)
    cell = None if layer.cell is None else in_unit(ctx, layer.cell, cells)
    state, found = _first_state(ctx, layer, fraction), {}
    for count, t in enumerate(layer.steps, 1):
        sums = _sum(ctx, pick(ctx, layer.inputs, t), state, layer.recurrent)
        rest, candidate = split(ctx, sums, [3 * size, size])
        enter, leave, keep = split(ctx, gate(ctx, rest, "Sigmoid"), [size] * 3)
        fresh = multiply(ctx, enter, gate(ctx, candidate, "Tanh", cells))
        if cell is not None:
            fresh = add(ctx, multiply(ctx, keep, cell), fresh)
        cell = within(ctx, in_unit(ctx, fresh, cells), -(start + count), start + count)
        state = product_in_unit(ctx, leave, gate(ctx, loosen_bounds(cell, bound), "Tanh"), fraction)
        state = found[t] = loosen_bounds(within(ctx, state, -1.0, 1.0), 1.0)
    return found, cell


def _gru_steps_before(ctx: LoweringContext, layer: _Direction) -> tuple[dict[int, FixedPoint], FixedPoint | None]:
    size, fraction = layer.hidden, state_fraction(layer.largest)
    update_reset = columns(layer.recurrent, ctx, 0, 2 * size)
    candidate = columns(layer.recurrent, ctx, 2 * size, 3 * size)
    state, found = _first_state(ctx, layer, fraction), {}
    for t in layer.steps:
        inputs, last = split(ctx, pick(ctx, layer.inputs, t), [2 * size, size])
        sums = _sum(ctx, inputs, state, update_reset)
        update, reset = split(ctx, gate(ctx, sums, "Sigmoid"), [size] * 2)
        kept = None if state is None else product_in_unit(ctx, reset, state, fraction)
        fresh = gate(ctx, _sum(ctx, last, kept, candidate), "Tanh", fraction)
        state = found[t] = _blended(ctx, update, fresh, state, layer.largest, fraction)
    return found, None


def _gru_steps_behind(ctx: LoweringContext, layer: _Direction) -> tuple[dict[int, FixedPoint], FixedPoint | None]:
    size, fraction = layer.hidden, state_fraction(layer.largest)
    state, found = _first_state(ctx, layer, fraction), {}
    for t in layer.steps:
        inputs, last = split(ctx, pick(ctx, layer.inputs, t), [2 * size, size])
        inner: FixedPoint | None = None
        if state is not None:
            product = of_state(ctx, state, layer.recurrent)
            unit = 30 - max(math.ceil(math.log2(_reach(product, layer.bias) + 1.0)), 0)
            zeros = np.zeros(2 * size)
            whole = in_unit(ctx, add_constant(product, np.concatenate([zeros, layer.bias])), unit)
            ahead, inner = split(ctx, whole, [2 * size, size])
            inputs = add(ctx, inputs, ahead)
        update, reset = split(ctx, gate(ctx, inputs, "Sigmoid"), [size] * 2)
        if inner is not None:
            last = add(ctx, last, multiply(ctx, reset, inner))
        elif np.any(layer.bias):  # without a state the recurrent product is its bias alone
            last = add(ctx, last, replace(reset, scale=reset.scale * layer.bias))
        fresh = gate(ctx, last, "Tanh", fraction)
        state = found[t] = _blended(ctx, update, fresh, state, layer.largest, fraction)
    return found, None


def _reach(product: FixedPoint, bias: Array) -> float:
    top = max(abs(product.lo), abs(product.hi)) * float(np.max(product.scale))
    return top + float(np.max(np.abs(bias), initial=0.0))


def _blended(
    ctx: LoweringContext, update: FixedPoint, fresh: FixedPoint, state: FixedPoint | None, largest: float, fraction: int
) -> FixedPoint:
    """Write `(1 - update) * fresh + update * state`, which never leaves the larger of both magnitudes."""
    gap = negate(fresh) if state is None else difference(ctx, state, fresh)
    moved = product_in_unit(ctx, update, gap, fraction)
    blended = add(ctx, fresh, moved)
    # the error of a convex combination is at most the larger of both, plus the effect of the error of `update`
    worst = fresh.error if state is None else max(fresh.error, state.error)
    reach = max(abs(gap.lo), abs(gap.hi))
    error = worst + update.error * float(update.scale) * reach + 1.0
    found = within(ctx, replace(blended, error=min(blended.error, error)), -largest, largest)
    return loosen_bounds(found, largest)
