"""Arrays and dtypes of a graph as those of torch, and the type of the functions that evaluate ops.

A kernel takes the op's inputs by position, with None for an absent one, and its attributes by keyword, under the names
and with the defaults of the ONNX specification. It returns a tensor, or a tuple of them for several outputs.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from qsdk.core.arrays import Array

Kernel = Callable[..., Tensor | tuple[Tensor, ...]]
Kernels = Mapping[str, Kernel]

#: ONNX's number of an element type -> torch's. The 16-bit floats are computed in float32, as the runtime does on a CPU:
#: gradients would underflow in float16.
DTYPES = MappingProxyType(
    {
        1: torch.float32,
        2: torch.uint8,
        3: torch.int8,
        4: torch.uint16,
        5: torch.int16,
        6: torch.int32,
        7: torch.int64,
        9: torch.bool,
        10: torch.float32,
        11: torch.float64,
        12: torch.uint32,
        13: torch.uint64,
        16: torch.float32,
    }
)


def as_tensor(value: Array | Tensor, dtype: str) -> Tensor:
    """Return a value as a tensor on the host; a float one in the graph's dtype, or float32 where that has 16 bits."""
    if isinstance(value, Tensor):
        return value
    array = np.asarray(value)
    if dtype in ("float32", "float16", "bfloat16"):
        array = array.astype(np.float32, copy=False)
    elif dtype == "float64":
        array = array.astype(np.float64, copy=False)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def ints(tensor: Tensor) -> list[int]:
    """Return the integers of a shape, of axes or of bounds."""
    return [int(number) for number in tensor.reshape(-1).tolist()]
