"""Recurrent layers as in ONNX: one op per layer, whose two weights are stored tensors with sites; cells as their ops.

torch stores the weights of each direction separately and orders their gates differently. The site of a weight is the
tensor that the ONNX op reads, `[directions, gates * H, columns]`, so that a module and the file exported from it have
one plan. Layers run one by one, because what goes from one to the next is a site too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qsdk.core.errors import ModelError
from qsdk.core.site import site_name
from torch_bridge.sites.runtime import Runtime
from torch_bridge.torch_values.parameters import direction_suffixes, onnx_weight, to_onnx_order, to_torch_order


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


_OPS = {"LSTM": "LSTM", "GRU": "GRU", "RNN_TANH": "RNN", "RNN_RELU": "RNN"}
_KERNELS: dict[str, Callable[..., Any]] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}


def run_recurrent(module: nn.RNNBase, runtime: Runtime, input: Any, hx: Any = None) -> tuple[Tensor, Any]:
    """Run the forward of a recurrent layer, with its weights and the results of its layers passing through sites."""
    assert runtime.frame is not None
    where = f"{runtime.frame.path or 'the model'} ({type(module).__mro__[2].__name__})"
    if not isinstance(input, Tensor):
        raise ModelError(f"{where} got a PackedSequence, which has no form in ONNX; give it the padded tensor")
    if module.proj_size:
        raise ModelError(f"{where} has proj_size, which the ONNX op does not know; put a Linear behind it instead")
    batched = input.dim() == 3
    x = input if batched else input.unsqueeze(0 if module.batch_first else 1)
    x = x.transpose(0, 1) if module.batch_first else x
    states = _initial_states(module, x, hx, batched=batched)
    finals: list[list[Tensor]] = [[] for _ in states]
    for layer in range(module.num_layers):
        if layer and module.dropout and module.training:
            x = F.dropout(x, module.dropout)
        run = _traced_layer if runtime.phase == "mark" else _eager_layer
        count = len(direction_suffixes(module))
        own = [state[layer * count : (layer + 1) * count] for state in states]
        x, last = run(module, runtime, layer, x, own)
        for final, state, kind in zip(finals, last, ("hidden", "cell"), strict=False):
            several = module.num_layers > 1
            final.append(_emit(runtime, f"{kind}_l{layer}", state) if several else state)
    joined = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in finals]
    x = x.transpose(0, 1) if module.batch_first else x
    if not batched:
        x, joined = x.squeeze(0 if module.batch_first else 1), [state.squeeze(1) for state in joined]
    return x, (tuple(joined) if module.mode == "LSTM" else joined[0])


def _initial_states(module: nn.RNNBase, x: Tensor, hx: Any, *, batched: bool) -> list[Tensor]:
    """Return the states before the first step, [layers * directions, N, H] each: two for an LSTM."""
    if hx is None:
        shape = (len(direction_suffixes(module)) * module.num_layers, x.shape[1], module.hidden_size)
        return [torch.zeros(shape, dtype=x.dtype, device=x.device) for _ in range(1 + (module.mode == "LSTM"))]
    states = list(hx) if isinstance(hx, tuple | list) else [hx]
    return states if batched else [state.unsqueeze(1) for state in states]


def _emit(runtime: Runtime, port: str, x: Tensor) -> Tensor:
    assert runtime.frame is not None
    return runtime.emit(site_name(runtime.frame.name, port), x)


def _read_weights(module: nn.RNNBase, runtime: Runtime, layer: int) -> list[Tensor]:
    """Return W and R of a layer, read through their sites."""
    assert runtime.frame is not None
    known = runtime.frame.weights if runtime.phase == "mark" else {}  # a second call's stack would be another tensor
    result = []
    for name in (f"weight_ih_l{layer}", f"weight_hh_l{layer}"):
        site = site_name(runtime.frame.path, name)
        if site not in known:
            weight = onnx_weight(module, name)
            assert weight is not None
            known[site] = runtime.emit(site, weight)
        result.append(known[site])
    return result


def _eager_layer(
    module: nn.RNNBase, runtime: Runtime, layer: int, x: Tensor, states: list[Tensor]
) -> tuple[Tensor, Sequence[Tensor]]:
    """Run one layer by torch's kernel: [T, N, I] to [T, N, directions * H] and the last states."""
    if runtime.recurrent_hook is not None:
        runtime.recurrent_hook(module, layer, x, states)
    result, *last = _run_kernel(module, runtime, layer, x, states)
    length, batch, width = result.shape
    by_direction = result.view(length, batch, width // module.hidden_size, module.hidden_size).transpose(1, 2)
    by_direction = _emit(runtime, f"output_l{layer}", by_direction)
    return by_direction.transpose(1, 2).reshape(length, batch, width), last


def _run_kernel(
    module: nn.RNNBase, runtime: Runtime, layer: int, x: Tensor, states: list[Tensor]
) -> tuple[Tensor, ...]:
    weights = _read_weights(module, runtime, layer)
    flat: list[Tensor] = []
    for direction, suffix in enumerate(direction_suffixes(module)):
        flat += [to_torch_order(weight[direction], module.mode) for weight in weights]
        if module.bias:
            flat += [getattr(module, f"bias_{name}_l{layer}{suffix}") for name in ("ih", "hh")]
    dtype = x.dtype
    if runtime.phase != "float" and flat[0].dtype == dtype and dtype in (torch.float16, torch.bfloat16):
        # as the exported op computes: torch's kernel would round every state, and each term of it
        x, states, flat = x.float(), [state.float() for state in states], [weight.float() for weight in flat]
    site = site_name(runtime.frame.path, f"weight_hh_l{layer}") if runtime.frame is not None else ""
    if runtime.input_block(site) is not None:
        return _run_steps(module, runtime, site, x, states, flat)
    given: Any = tuple(states) if module.mode == "LSTM" else states[0]
    options = (module.bias, 1, 0.0, module.training, module.bidirectional, False)
    result: tuple[Tensor, ...] = _KERNELS[module.mode](x, given, flat, *options)
    return tuple(part.to(dtype) for part in result)


def _run_steps(
    module: nn.RNNBase, runtime: Runtime, site: str, x: Tensor, states: list[Tensor], flat: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Run an LSTM step by step, with its input and its state rounded, as ONNX Runtime's DynamicQuantizeLSTM does."""
    frame, runtime.frame = runtime.frame, None  # the steps are no ops of the model
    try:
        rounded, size = runtime.round_input(site, x), len(flat) // len(direction_suffixes(module))
        results, last = [], []
        for direction, suffix in enumerate(direction_suffixes(module)):
            given_weight, hidden_weight, *biases = flat[direction * size : (direction + 1) * size]
            given = F.linear(rounded, given_weight, *biases[:1])
            hidden, cell = (state[direction] for state in states)
            made: list[Tensor] = []
            for step in reversed(given.unbind()) if suffix else given.unbind():
                turned = F.linear(runtime.round_input(site, hidden), hidden_weight, *biases[1:])
                hidden, cell = _lstm(turned, step, cell)
                made.append(hidden)
            results.append(torch.stack(made[::-1] if suffix else made))
            last.append((hidden, cell))
    finally:
        runtime.frame = frame
    return torch.cat(results, -1), *(torch.stack(parts) for parts in zip(*last, strict=True))


def hidden_weight_inputs(module: nn.RNNBase, runtime: Runtime, layer: int, x: Tensor, states: list[Tensor]) -> Tensor:
    """Return the tensor that the recurrent weights of a layer are multiplied with: its state before each step.

    `x` is [T, N, I] and `states`, those before the first step, are [directions, N, H] each; the result is [T, N,
    directions * H].
    """
    after = _run_kernel(module, runtime, layer, x, states)[0]
    after = after.view(*after.shape[:2], after.shape[2] // module.hidden_size, module.hidden_size)
    first = states[0]
    before = [torch.cat([first[:1], after[:-1, :, 0]])]
    if module.bidirectional:
        before.append(torch.cat([after[1:, :, 1], first[1:]]))
    return torch.cat(before, dim=-1)


def _traced_layer(
    module: nn.RNNBase, runtime: Runtime, layer: int, x: Tensor, states: list[Tensor]
) -> tuple[Tensor, Sequence[Tensor]]:
    """Write one layer as an ONNX op into the graph that is being exported."""
    weights = _read_weights(module, runtime, layer)
    biases = (
        [_stack_biases(module, f"l{layer}{suffix}") for suffix in direction_suffixes(module)] if module.bias else []
    )
    count, size = len(direction_suffixes(module)), module.hidden_size
    attributes: dict[str, Any] = {"hidden_size": size, "direction": "bidirectional" if count == 2 else "forward"}
    if module.mode == "GRU":
        attributes["linear_before_reset"] = 1
    if module.mode.startswith("RNN"):
        attributes["activations"] = [module.mode[4:].capitalize()] * count
    length, batch = x.shape[0], x.shape[1]
    shapes = [(length, count, batch, size), *[(count, batch, size)] * len(states)]
    outputs = torch.onnx.ops.symbolic_multi_out(
        _OPS[module.mode],
        (x, *weights, torch.stack(biases) if biases else None, None, *states),
        attributes,
        dtypes=[x.dtype] * len(shapes),
        shapes=shapes,
        version=14,
    )
    result = _emit(runtime, f"output_l{layer}", outputs[0])
    return result.permute(0, 2, 1, 3).reshape(length, batch, count * size), outputs[1:]


def _stack_biases(module: nn.RNNBase, suffix: str) -> Tensor:
    return torch.cat([to_onnx_order(getattr(module, f"bias_{name}_{suffix}"), module.mode) for name in ("ih", "hh")])
