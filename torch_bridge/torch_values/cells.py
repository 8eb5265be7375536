"""Recurrent cells as the ops they consist of, in the order in which `torch.onnx.export` writes them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def run_cell(module: Any, input: Tensor, hx: Any = None) -> Any:
    """Run one step of a cell: [N, I] or [I] and its state to the next state."""
    states = _states(module, input, hx)
    batched = input.dim() == 2
    x = input if batched else input.unsqueeze(0)
    states = states if batched else [state.unsqueeze(0) for state in states]
    hidden = F.linear(states[0], module.weight_hh, module.bias_hh)
    given = F.linear(x, module.weight_ih, module.bias_ih)
    if isinstance(module, nn.LSTMCell):
        new_states = _lstm(hidden, given, states[1])
    elif isinstance(module, nn.GRUCell):
        new_states = [_gru(hidden, given, states[0])]
    else:
        summed = hidden + given
        new_states = [torch.tanh(summed) if module.nonlinearity == "tanh" else F.relu(summed)]
    new_states = new_states if batched else [state.squeeze(0) for state in new_states]
    return tuple(new_states) if isinstance(module, nn.LSTMCell) else new_states[0]


def _states(module: Any, x: Tensor, hx: Any) -> list[Tensor]:
    if hx is not None:
        return list(hx) if isinstance(hx, tuple | list) else [hx]
    shape = (*x.shape[:-1], module.hidden_size)
    return [torch.zeros(shape, dtype=x.dtype, device=x.device) for _ in range(1 + isinstance(module, nn.LSTMCell))]


def _lstm(hidden: Tensor, given: Tensor, cell: Tensor) -> list[Tensor]:
    enter, forget, update, leave = (hidden + given).chunk(4, 1)
    enter, forget, leave = torch.sigmoid(enter), torch.sigmoid(forget), torch.sigmoid(leave)
    cell = forget * cell + enter * torch.tanh(update)
    return [leave * torch.tanh(cell), cell]


def _gru(hidden: Tensor, given: Tensor, state: Tensor) -> Tensor:
    reset_x, update_x, new_x = given.chunk(3, 1)
    reset_h, update_h, new_h = hidden.chunk(3, 1)
    reset, update = torch.sigmoid(reset_h + reset_x), torch.sigmoid(update_h + update_x)
    new = torch.tanh(new_x + new_h * reset)
    return (state - new) * update + new
