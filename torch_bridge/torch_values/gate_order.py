"""Recurrent layers: whether a module is one, and its weights with their gates in the order of the ONNX ops."""

import torch
from torch import Tensor, nn

# Position of each gate of the ONNX op in torch's weight: iofc of ifgo, zrh of rzn.
_GATES: dict[str, tuple[int, ...]] = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN_TANH": (0,), "RNN_RELU": (0,)}


def is_recurrent(module: nn.Module) -> bool:
    """Return whether a module is a recurrent layer of torch with torch's own forward."""
    return _class_of_forward(module) in (nn.LSTM, nn.GRU, nn.RNN)


def is_cell(module: nn.Module) -> bool:
    """Return whether a module is a recurrent cell of torch with torch's own forward."""
    return _class_of_forward(module) in (nn.LSTMCell, nn.GRUCell, nn.RNNCell)


def _class_of_forward(module: nn.Module) -> type | None:
    """Return the class that a module's forward comes from, the one that it had before it was wrapped."""
    own = (base for base in type(module).__mro__ if "forward" in vars(base) and "_qsdk_parameters" not in vars(base))
    return next(own, None)


def onnx_weight(module: nn.Module, port: str) -> Tensor | None:
    """Return the stored tensor at a site like `weight_ih_l0`, as the ONNX op reads it.

    Its shape is [directions, gates * H, columns].
    """
    name, _, layer = port.rpartition("_l")
    if not isinstance(module, nn.RNNBase) or name not in ("weight_ih", "weight_hh"):
        return None
    if not layer.isdigit() or int(layer) >= module.num_layers:
        return None
    return torch.stack(
        [to_onnx_order(getattr(module, port + suffix), module.mode) for suffix in direction_suffixes(module)]
    )


def direction_suffixes(module: nn.RNNBase) -> tuple[str, ...]:
    """Return the suffixes of torch's names for a layer's parameters, one per direction."""
    return ("", "_reverse") if module.bidirectional else ("",)


def to_onnx_order(tensor: Tensor, mode: str) -> Tensor:
    """Return a tensor with the rows of torch's gates in the order of the ONNX op."""
    order = _GATES[mode]
    size = tensor.shape[0] // len(order)
    return torch.cat([tensor[gate * size : (gate + 1) * size] for gate in order])


def to_torch_order(tensor: Tensor, mode: str) -> Tensor:
    """Return a tensor with the rows of the ONNX op's gates in the order of torch."""
    order = _GATES[mode]
    parts = tensor.chunk(len(order))
    return torch.cat([parts[order.index(gate)] for gate in range(len(order))])
