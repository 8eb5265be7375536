"""Biases: int32 on the grid of the accumulator, whose scale is input scale times weight scale."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from qsdk.core.numerics.block_scales import round_up_to_digits
from qsdk.core.numerics.encoding import Encoding

# half of int32, so that the products on top of the bias do not overflow the accumulator
_ROOM = 2.0**30
_LARGEST = 2.0**31 - 1


def with_room_for(bias: npt.ArrayLike, source: Encoding, weight: Encoding, scale_bits: int | None = None) -> Encoding:
    """Return the encoding of a weight, with larger scales where the bias would not fit int32.

    Args:
        bias: float values, one per output channel.
        source: encoding of the layer's input, per tensor.
        weight: encoding of its weight, per tensor or per output channel.
        scale_bits: significant binary digits of the weight's scales, see `Spec`.

    Returns:
        `weight` itself where every value fits, else a copy with larger scales in those channels, such as one whose
        weights are all 0.
    """
    needed = np.abs(np.asarray(bias, np.float64)) / (_ROOM * float(source.scale[0]))
    if weight.scale.size == 1:
        needed = needed.max(initial=0.0, keepdims=True).reshape(1)
    if (needed <= weight.scale).all():
        return weight
    # the next float32 up: rounding down would leave the bias just outside
    wider = np.nextafter(np.maximum(needed, weight.scale).astype(np.float32), np.float32(np.inf))
    if scale_bits is not None:
        wider = round_up_to_digits(wider, scale_bits)
    return replace(weight, scale=np.where(needed > weight.scale, wider, weight.scale))


def bias_remark(bias: npt.ArrayLike, encoding: Encoding) -> str:
    """Return what the int32 grid does to a bias beyond rounding it, as a sentence; "" for nothing.

    Args:
        bias: float values, one per output channel.
        encoding: of the bias: input scale times weight scale, per tensor or per output channel.
    """
    values = np.abs(np.asarray(bias, np.float64)).reshape(-1)
    steps = values / encoding.scale.astype(np.float64)
    clipped = int((steps > _LARGEST + 0.5).sum())
    if clipped:
        return (
            f"{clipped} of {values.size} values do not fit int32 and are clipped, because the scales of input and "
            'weight are too small; calibrate the weight again, or keep it with bias="float32"'
        )
    lost = (values > 0) & (steps <= 0.5)  # half to even: a half is 0 as well
    if lost.sum() * 2 > (values > 0).sum():
        return (
            f"{int(lost.sum())} of {values.size} values round to 0 (the largest is {values[lost].max():.3g}), because "
            f"the scales of input and weight are large: a step is {float(encoding.scale.max()):.3g}; keep it with "
            'bias="float32" if the output shows it'
        )
    widened = int((steps > _ROOM * (1 - 1e-3)).sum())
    if widened:
        return f"the weight's scale was raised in {widened} of {values.size} channels, so that the bias fits int32"
    return ""
