"""Stored tensors at sites: parameters and buffers, the parts that single ops read, and gates in ONNX's order."""

import mmap
from collections import Counter

import numpy as np
import torch
from torch import Tensor, nn

from qsdk.core.arrays import Array, Floats
from qsdk.core.errors import ModelError

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


PREFIX = "qsdk_"  # prefix of the buffers that hold encodings, and of all other tensors that qsdk adds
STATE = "_qsdk_state"  # key of a wrapped module's state in its __dict__
STEPS = "qsdk_steps"  # a buffer of the root while the model is trained, so that checkpoints carry it
_MAPPED_FROM = 1 << 20  # bytes
# Thirds of a packed projection: the first, and the one after the last.
_THIRDS = {"q": (0, 1), "k": (1, 2), "v": (2, 3), "kv": (1, 3)}


def held_tensor(module: nn.Module, name: str) -> Tensor:
    """Return a parameter or buffer that a module is known to hold itself, without a quantizer in between."""
    tensor = module._parameters[name] if name in module._parameters else module._buffers[name]
    assert tensor is not None, name
    return tensor


def stored_tensor(model: nn.Module, site: str) -> Tensor:
    """Return the raw stored tensor at a weight or bias site, on the graph of its parameter."""
    stored = find_stored(model, site)
    if stored is None:
        raise ModelError(f"the model stores no tensor at {site}; quantize the model as it is now")
    return stored


def find_stored(model: nn.Module, site: str) -> Tensor | None:
    """Return the raw stored tensor at a weight or bias site, or None where the model stores nothing."""
    owner, _, port = site.rpartition(":")
    try:
        module = model if owner == "self" else model.get_submodule(owner)
    except AttributeError:
        return None
    if is_recurrent(module):
        arranged = onnx_weight(module, port)
        return module._parameters.get(port) if arranged is None else arranged
    state = module.__dict__.get(STATE)
    if state is not None and state.active_norm is not None and port in ("weight", "bias"):
        return state.active_norm.folded_parameter(module, port)  # type: ignore[no-any-return]
    stored = {**module._parameters, **module._buffers}.get(port)
    if stored is None and isinstance(module, nn.MultiheadAttention):
        name, _, part = port.rpartition("_")
        packed = module._parameters.get(name)
        return None if packed is None or part not in _THIRDS else packed_rows(packed, part)
    return stored


def main_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the float dtype of most of a model's values, those that qsdk adds not counted; None where it has none."""
    counts: Counter[torch.dtype] = Counter()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and not name.rpartition(".")[2].startswith(PREFIX):
            counts[tensor.dtype] += tensor.numel()
    return max(counts, key=counts.__getitem__, default=None)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in graphs and files: `float32`."""
    return str(dtype).removeprefix("torch.")


def to_numpy(tensor: Tensor) -> Array:
    """Return the values of a tensor; those of bfloat16, which NumPy lacks, as float32."""
    known = tensor.detach().cpu()
    return np.asarray((known.float() if known.dtype == torch.bfloat16 else known).numpy())


def to_float32(tensor: Tensor) -> Floats:
    """Return the values of a tensor as a float32 array; it shares the memory of a float32 tensor on the CPU.

    A large copy has a mapping of its own, which goes back to the system as soon as it is dropped. Among smaller arrays
    on the heap, the room of one layer's copy would be split before the next layer needs it, and in the end a model in
    half precision would hold all of its weights in float32.
    """
    known = tensor.detach()
    if known.dtype == torch.float32 or known.numel() * 4 < _MAPPED_FROM:
        return np.asarray(known.float().cpu().numpy())
    result = np.frombuffer(mmap.mmap(-1, known.numel() * 4), np.float32).reshape(tuple(known.shape))
    torch.from_numpy(result).copy_(known)
    return result


def packed_rows(packed: Tensor, part: str) -> Tensor:
    """Return the rows of a packed projection [3E, ...] for queries (`q`), keys (`k`), values (`v`) or both (`kv`)."""
    first, last = _THIRDS[part]
    size = packed.shape[0] // 3
    return packed[first * size : last * size]


Key = tuple[int, int, int]


def storage_key(tensor: Tensor) -> Key:
    """Return what a tensor shares with its transpose and with nothing else: address and number of its values."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.numel()
