"""The stored tensors of a traced module, referred to by name instead of being copied into the traced bytes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from qsdk.core.lazy_arrays import LazyArrays

LARGE = 4096  # a constant of more elements is referred to by name
#: dtypes that NumPy does not have: torch's integers of their bits, and the dtype of ml_dtypes
_BY_BITS: Mapping[torch.dtype, tuple[torch.dtype, Any]] = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e4m3fnuz: (torch.uint8, ml_dtypes.float8_e4m3fnuz),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
    torch.float8_e5m2fnuz: (torch.uint8, ml_dtypes.float8_e5m2fnuz),
}


@dataclass(frozen=True)
class WeightsByName:
    """The stored tensors that are not in the bytes of a trace.

    Attributes:
        state: name -> path of a parameter or buffer of the module.
        constants: name -> large constant of the trace.
    """

    state: Mapping[str, str]
    constants: Mapping[str, Tensor]

    def values_in(self, model: nn.Module) -> LazyArrays:
        """Return their values, read from the module at each access: on the CPU views, no copies."""
        names = (*self.state, *self.constants)
        return LazyArrays(names, lambda name: _as_array(self._tensor(model, name)))

    def _tensor(self, model: nn.Module, name: str) -> Tensor:
        if name in self.constants:
            return self.constants[name]
        owner, _, leaf = self.state[name].rpartition(".")
        module = model.get_submodule(owner)
        parameter = module._parameters.get(leaf)
        tensor = parameter if parameter is not None else module._buffers[leaf]
        assert tensor is not None, name
        return tensor


def detach_weights(program: torch.onnx.ONNXProgram, model: nn.Module) -> tuple[bytes, WeightsByName]:
    """Return the bytes of a traced model without its state and large constants, and the names of these."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    places = {path: tensor.data_ptr() for path, tensor in tensors}
    state: dict[str, str] = {}
    constants: dict[str, Tensor] = {}
    for value in program.model.graph.initializers.values():
        held: Any = value.const_value
        raw, name = getattr(held, "raw", None), str(value.name)
        if not isinstance(raw, Tensor):
            continue
        path = name if name in places else name.removesuffix("_stored")
        if places.get(path) == raw.data_ptr():
            state[name] = path
        elif raw.numel() > LARGE:
            constants[name] = raw
        else:
            continue
        value.const_value = type(held)(torch.empty(0, dtype=raw.dtype), name=value.name)
    return program.model_proto.SerializeToString(), WeightsByName(state, constants)


def _as_array(tensor: Tensor) -> npt.NDArray[Any]:
    local = tensor.detach().cpu()
    if local.dtype not in _BY_BITS:
        return np.asarray(local.numpy())
    bits, dtype = _BY_BITS[local.dtype]
    return np.asarray(local.view(bits).numpy().view(dtype))
