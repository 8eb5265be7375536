"""The weights of recurrent layers in the order of the ONNX ops."""

import torch
from torch import Tensor, nn

# Where each gate of the ONNX op stands in torch's weight: iofc of ifgo, zrh of rzn.
_GATES: dict[str, tuple[int, ...]] = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN_TANH": (0,), "RNN_RELU": (0,)}


def is_recurrent(module: nn.Module) -> bool:
    """Whether a module is a recurrent layer of torch with torch's own forward."""
    own = (base for base in type(module).__mro__ if "forward" in vars(base) and "_qsdk_parameters" not in vars(base))
    return next(own, None) in (nn.LSTM, nn.GRU, nn.RNN)


def arranged_weight(module: nn.Module, port: str) -> Tensor | None:
    """The stored tensor at the site `weight_ih_l0`, as the ONNX op reads it: [directions, gates * H, columns]."""
    name, _, layer = port.rpartition("_l")
    if not isinstance(module, nn.RNNBase) or name not in ("weight_ih", "weight_hh"):
        return None
    if not layer.isdigit() or int(layer) >= module.num_layers:
        return None
    return torch.stack([reordered(getattr(module, port + suffix), module.mode) for suffix in suffixes(module)])


def suffixes(module: nn.RNNBase) -> tuple[str, ...]:
    """What torch puts behind the names of a layer's parameters, per direction."""
    return ("", "_reverse") if module.bidirectional else ("",)


def reordered(tensor: Tensor, mode: str) -> Tensor:
    """Put the rows of torch's gates in the order of the ONNX op."""
    order = _GATES[mode]
    size = tensor.shape[0] // len(order)
    return torch.cat([tensor[gate * size : (gate + 1) * size] for gate in order])


def restored(tensor: Tensor, mode: str) -> Tensor:
    """The other way round."""
    order = _GATES[mode]
    parts = tensor.chunk(len(order))
    return torch.cat([parts[order.index(gate)] for gate in range(len(order))])
