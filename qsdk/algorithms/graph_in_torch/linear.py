"""Convolutions, matrix products and the Fourier transform."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qsdk.algorithms.graph_in_torch.values import Kernels
from qsdk.algorithms.graph_in_torch.windows import Window, padded

_CONV = MappingProxyType({1: F.conv1d, 2: F.conv2d, 3: F.conv3d})
_TRANSPOSED = MappingProxyType({1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d})


def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    window = Window.of(weight.shape[2:], strides, dilations)
    widths = window.pads(x.shape[2:], pads, auto_pad)
    pad = [begin for begin, _ in widths]
    if any(begin != end for begin, end in widths):  # which torch's convolutions cannot do; a copy that autograd keeps
        x, pad = padded(x, widths), [0] * len(widths)
    return _CONV[x.ndim - 2](x, weight, bias, window.strides, pad, window.dilations, group)


def _conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    output_padding: Sequence[int] | None = None,
    output_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    window = Window.of(weight.shape[2:], strides, dilations)
    whole = _TRANSPOSED[x.ndim - 2](x, weight, None, window.strides, 0, 0, group, window.dilations)
    longer = list(output_padding or [0] * (x.ndim - 2))
    wanted = list(output_shape or [])[-(x.ndim - 2) :]
    if not wanted and auto_pad.startswith("SAME"):
        wanted = [size * stride for size, stride in zip(x.shape[2:], window.strides, strict=True)]
    if wanted:
        cut = [size + more - out for size, more, out in zip(whole.shape[2:], longer, wanted, strict=True)]
        halves = [(total // 2, total - total // 2) for total in cut]
        removed = halves if auto_pad == "SAME_UPPER" else [(end, begin) for begin, end in halves]
    else:
        removed = window.pads(x.shape[2:], pads, auto_pad)
    y = padded(whole, [(-begin, more - end) for (begin, end), more in zip(removed, longer, strict=True)])
    return y if bias is None else y + bias.reshape(-1, *[1] * (x.ndim - 2))


def _gemm(a: Tensor, b: Tensor, c: Tensor | None = None, **attributes: Any) -> Tensor:
    a = a.T if attributes.get("transA") else a
    b = b.T if attributes.get("transB") else b
    product = a @ b * float(attributes.get("alpha", 1.0))
    return product if c is None else product + c * float(attributes.get("beta", 1.0))


def _einsum(*given: Tensor, equation: str) -> Tensor:
    result: Tensor = torch.einsum(equation, *given)
    return result


def _dft(
    x: Tensor, length: Tensor | None = None, axis: Tensor | None = None, *, inverse: int = 0, onesided: int = 0
) -> Tensor:
    """Return the Fourier transform of real or complex numbers, whose parts are the last axis."""
    along = (-2 if axis is None else int(axis)) % x.ndim
    count = None if length is None else int(length)
    signal = x.squeeze(-1) if x.shape[-1] == 1 else torch.view_as_complex(x.contiguous())
    if inverse:
        return torch.view_as_real(torch.fft.ifft(signal, count, along))
    transform = torch.fft.rfft if onesided else torch.fft.fft
    return torch.view_as_real(transform(signal, count, along))


LINEAR: Kernels = MappingProxyType(
    {
        "Conv": _conv,
        "ConvTranspose": _conv_transpose,
        "DFT": _dft,
        "Det": torch.linalg.det,
        "Einsum": _einsum,
        "Gemm": _gemm,
        "MatMul": torch.matmul,
    }
)
