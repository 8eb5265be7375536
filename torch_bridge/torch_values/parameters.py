"""Stored tensors at sites: a parameter or buffer of a module, or the part of one that a single op reads."""

import mmap
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from qsdk.core.errors import ModelError
from torch_bridge.torch_values.gate_order import is_recurrent, onnx_weight

PREFIX = "qsdk_"  # prefix of the buffers that hold encodings, and of all other tensors that qsdk adds
STATE = "_qsdk_state"  # key of a wrapped module's state in its __dict__
STEPS = "qsdk_steps"  # a buffer of the root while the model is trained, so that checkpoints carry it
_MAPPED_FROM = 1 << 20  # bytes
# Thirds of a packed projection: the first, and the one after the last.
_THIRDS = {"q": (0, 1), "k": (1, 2), "v": (2, 3), "kv": (1, 3)}


def stored_tensor(model: nn.Module, site: str) -> Tensor:
    """Return the raw stored tensor at a weight or bias site, on the graph of its parameter.

    Raises:
        ModelError: the model stores nothing there.
    """
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


def to_numpy(tensor: Tensor) -> npt.NDArray[Any]:
    """Return the values of a tensor; those of bfloat16, which NumPy lacks, as float32."""
    known = tensor.detach().cpu()
    return np.asarray((known.float() if known.dtype == torch.bfloat16 else known).numpy())


def to_float32(tensor: Tensor) -> npt.NDArray[np.float32]:
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
