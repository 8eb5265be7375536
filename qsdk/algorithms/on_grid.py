"""Fake quantization of a tensor by an encoding, for values that no module owns."""

import torch
from torch import Tensor

from qsdk.core.numerics import affine
from qsdk.core.numerics.encoding import Encoding


def fake_quantize(x: Tensor, encoding: Encoding) -> Tensor:
    """Return a float tensor on the grid of an encoding, as `Encoding.fake_quantize` computes it, without gradients."""
    values = x.detach().float()
    if not encoding.dtype.is_integer:
        return torch.from_numpy(encoding.fake_quantize(values.cpu().numpy())).to(x)
    scale, zero_point = (
        affine.align(torch.from_numpy(part).to(values), tuple(x.shape), encoding.axis, encoding.block_size)
        for part in (encoding.scale, encoding.zero_point)
    )
    result: Tensor = affine.fake_quantize(values, scale, zero_point, encoding.dtype.lo, encoding.dtype.hi)
    return result.to(x.dtype)
