"""The stored tensors of a traced module, handed over by name instead of being copied into the traced bytes."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from qsdk.core.lazy_arrays import LazyArrays

LARGE = 4096  # elements of a tensor that is handed over by name


def handed_over(program: torch.onnx.ONNXProgram) -> tuple[bytes, LazyArrays]:
    """The bytes of a traced model without its large stored tensors, and these by name.

    Each is read from the module when it is asked for: on the CPU a view of its memory, no copy.
    """
    apart: dict[str, Any] = {}
    for value in program.model.graph.initializers.values():
        tensor: Any = value.const_value
        raw = getattr(tensor, "raw", None)
        if isinstance(raw, Tensor) and raw.numel() > LARGE:
            apart[str(value.name)] = tensor
            value.const_value = type(tensor)(torch.empty(0, dtype=raw.dtype), name=value.name)
    weights = LazyArrays(apart, lambda name: np.asarray(apart[name].numpy()))
    return program.model_proto.SerializeToString(), weights
