"""Fake quantization of a tensor by an encoding, for values that no module owns."""

import torch
from torch import Tensor

from qsdk.core.numerics import affine
from qsdk.core.numerics.encoding import Encoding


def fake_quantize(x: Tensor, encoding: Encoding) -> Tensor:
    """Return a float tensor on the grid of an encoding, as `Encoding.fake_quantize` computes it, without gradients.

    The steps are in place, and the zero point is in the bounds: `clip(q + z, lo, hi) - z == clip(q, lo - z, hi - z)`.
    """
    values = x.detach().float()
    if not encoding.dtype.is_integer:
        return torch.from_numpy(encoding.fake_quantize(values.cpu().numpy())).to(x)
    scale, zero_point = (
        affine.align(torch.from_numpy(part).to(values), tuple(x.shape), encoding.axis, encoding.block_size)
        for part in (encoding.scale, encoding.zero_point)
    )
    on_grid: Tensor = (values / scale).round_()
    if encoding.axis is None:  # numbers as bounds are one fast kernel
        zero = float(encoding.zero_point[0])
        on_grid.clamp_(encoding.dtype.lo - zero, encoding.dtype.hi - zero)
    else:
        on_grid.clamp_(encoding.dtype.lo - zero_point, encoding.dtype.hi - zero_point)
    return on_grid.mul_(scale).to(x.dtype)
