"""The ops of `torch.ops.quantized_decomposed`, which exist once the file of torch that registers them is imported."""

from typing import Any

import torch
from torch.ao.quantization.fx import _decomposed

#: the library that registers them; who loads a program imports it first
LIBRARY = _decomposed.__name__
_OPS: Any = torch.ops.quantized_decomposed
QUANTIZE, DEQUANTIZE = _OPS.quantize_per_tensor.default, _OPS.dequantize_per_tensor.default
QUANTIZE_CHANNELS, DEQUANTIZE_CHANNELS = _OPS.quantize_per_channel.default, _OPS.dequantize_per_channel.default
