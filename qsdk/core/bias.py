"""Biases: int32 on the grid of the accumulator, whose scale is input scale times weight scale."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from qsdk.core.encoding import Encoding

# half of int32, so that the products on top of the bias do not overflow the accumulator
_ROOM = 2.0**30


def with_room_for(bias: npt.ArrayLike, source: Encoding, weight: Encoding) -> Encoding:
    """Widen weight scales where a bias would not fit int32, as behind a channel of zeros.

    Args:
        bias: float values, one per output channel.
        source: encoding of the layer's input, per tensor.
        weight: encoding of its weight, per tensor or per output channel.

    Returns:
        `weight` itself where every value fits, else a copy with larger scales in those channels.
    """
    needed = np.abs(np.asarray(bias, np.float64)) / (_ROOM * float(source.scale[0]))
    if weight.scale.size == 1:
        needed = needed.max(initial=0.0, keepdims=True).reshape(1)
    if (needed <= weight.scale).all():
        return weight
    # the next float32 up: rounding down would leave the bias just outside
    wider = np.nextafter(np.maximum(needed, weight.scale).astype(np.float32), np.float32(np.inf))
    return replace(weight, scale=np.where(needed > weight.scale, wider, weight.scale))
