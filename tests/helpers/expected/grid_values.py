"""Values on a grid."""

import numpy as np
from integer_models import UINT8


def on_grid(x, scale, zero, dtype=UINT8):
    lo, hi = (0, 255) if dtype == UINT8 else (-128, 127)
    scale = np.float32(scale)
    return (np.clip(np.rint(x / scale) + zero, lo, hi) - zero) * np.float64(scale)
