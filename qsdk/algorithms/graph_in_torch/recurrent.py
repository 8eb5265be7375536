"""Recurrent layers, step by step."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from qsdk.algorithms.graph_in_torch.values import Kernels

State = tuple[Tensor, ...]
#: computes the next state from the products of the input with its weights, the state, recurrent weights and their bias
Cell = Callable[[Tensor, State, Tensor, Tensor], State]
_ACTIVATIONS = MappingProxyType({"Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "Relu": torch.relu})


def refuses_layer(attributes: Mapping[str, Any]) -> bool:
    """Return whether the attributes of a layer ask for what no kernel computes."""
    known = set(attributes.get("activations", ())) <= set(_ACTIVATIONS)
    return not known or bool(attributes.get("layout") or attributes.get("input_forget"))


def _run(
    x: Tensor, weights: Sequence[Tensor | None], lengths: Tensor | None, first: State, direction: str, cells: list[Cell]
) -> tuple[Tensor, ...]:
    """Return the outputs of every step, [steps, directions, batch, hidden], and the last states by direction.

    Args:
        x: [steps, batch, size].
        weights: of the input, of the state, and the biases of both in one (or None), by direction.
        lengths: of the sequences, all that of x; or None.
        first: the states before the first step, by direction.
        direction: the attribute.
        cells: by direction.
    """
    if lengths is not None and bool((lengths != x.shape[0]).any()):
        raise ValueError("its sequences have different lengths")
    wx, wh, bias = weights
    assert wx is not None
    assert wh is not None
    rows = wx.shape[1]
    outputs, states = [], []
    for place, cell in enumerate(cells):
        backward = direction == "reverse" or place == 1
        both = x.new_zeros(2 * rows) if bias is None else bias[place]
        given = x @ wx[place].T + both[:rows]
        state = tuple(part[place] for part in first)
        steps = []
        for step in given.flip(0) if backward else given:
            state = cell(step, state, wh[place], both[rows:])
            steps.append(state[0])
        outputs.append(torch.stack(steps[::-1] if backward else steps))
        states.append(state)
    return torch.stack(outputs, 1), *(torch.stack(parts) for parts in zip(*states, strict=True))


def _zeros(x: Tensor, wh: Tensor, given: Tensor | None) -> Tensor:
    return x.new_zeros(wh.shape[0], x.shape[1], wh.shape[2]) if given is None else given


def _lstm(
    x: Tensor,
    wx: Tensor,
    wh: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    hidden: Tensor | None = None,
    memory: Tensor | None = None,
    peepholes: Tensor | None = None,
    *,
    hidden_size: int = 0,
    direction: str = "forward",
    layout: int = 0,
    activations: Sequence[str] = ("Sigmoid", "Tanh", "Tanh") * 2,
    input_forget: int = 0,
) -> tuple[Tensor, ...]:
    def cell_of(place: int) -> Cell:
        """Return the step of one direction: new output and memory from an input and the old ones."""
        gate, candidate, out = (_ACTIVATIONS[name] for name in activations[3 * place : 3 * place + 3])
        size = wh.shape[2]
        looks = x.new_zeros(3 * size) if peepholes is None else peepholes[place]

        def cell(given: Tensor, state: State, weights: Tensor, shift: Tensor) -> State:
            before, memory = state
            i, o, f, c = (given + before @ weights.T + shift).chunk(4, -1)
            i = gate(i + looks[:size] * memory)
            f = gate(f + looks[2 * size :] * memory)
            memory = f * memory + i * candidate(c)
            return gate(o + looks[size : 2 * size] * memory) * out(memory), memory

        return cell

    first = (_zeros(x, wh, hidden), _zeros(x, wh, memory))
    return _run(x, (wx, wh, bias), lengths, first, direction, [cell_of(place) for place in range(wx.shape[0])])


def _gru(
    x: Tensor,
    wx: Tensor,
    wh: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    hidden: Tensor | None = None,
    *,
    hidden_size: int = 0,
    direction: str = "forward",
    layout: int = 0,
    activations: Sequence[str] = ("Sigmoid", "Tanh") * 2,
    linear_before_reset: int = 0,
) -> tuple[Tensor, ...]:
    def cell_of(place: int) -> Cell:
        """Return the step of one direction: the new state from an input and the old one."""
        gate, candidate = (_ACTIVATIONS[name] for name in activations[2 * place : 2 * place + 2])
        split = 2 * wh.shape[2]

        def cell(given: Tensor, state: State, weights: Tensor, shift: Tensor) -> State:
            (before,) = state
            z, r = gate(given[:, :split] + before @ weights[:split].T + shift[:split]).chunk(2, -1)
            if linear_before_reset:
                recalled = r * (before @ weights[split:].T + shift[split:])
            else:
                recalled = (r * before) @ weights[split:].T + shift[split:]
            return ((1 - z) * candidate(given[:, split:] + recalled) + z * before,)

        return cell

    cells = [cell_of(place) for place in range(wx.shape[0])]
    return _run(x, (wx, wh, bias), lengths, (_zeros(x, wh, hidden),), direction, cells)


def _rnn(
    x: Tensor,
    wx: Tensor,
    wh: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    hidden: Tensor | None = None,
    *,
    hidden_size: int = 0,
    direction: str = "forward",
    layout: int = 0,
    activations: Sequence[str] = ("Tanh", "Tanh"),
) -> tuple[Tensor, ...]:
    def cell_of(name: str) -> Cell:
        activation = _ACTIVATIONS[name]
        return lambda given, state, weights, shift: (activation(given + state[0] @ weights.T + shift),)

    cells = [cell_of(activations[place]) for place in range(wx.shape[0])]
    return _run(x, (wx, wh, bias), lengths, (_zeros(x, wh, hidden),), direction, cells)


RECURRENT: Kernels = MappingProxyType({"GRU": _gru, "LSTM": _lstm, "RNN": _rnn})
