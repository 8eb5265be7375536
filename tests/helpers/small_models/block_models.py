"""Networks with a scale per block of weights, in integers."""

import numpy as np
from integer_models import GRID, INT4, NUMPY, UINT4, Net

from onnx_backend.integer.ir.values import BlockConstant

X = (0.031, 119)


class BlockNet(Net):
    """Writes weights with a scale per block; `real` are the weights in float64."""

    real: np.ndarray
    stored: BlockConstant

    def blocks(self, shape, axis, size, dtype=INT4, scale=None, points=False):
        lo, hi = GRID[dtype]
        codes = self.rng.integers(lo, hi + 1, shape)
        small = tuple(-(-n // size) if i == axis else n for i, n in enumerate(shape))
        scale = self.rng.uniform(1e-3, 1e-2, small).astype(np.float32) if scale is None else scale(self.rng, small)
        zeros = self.rng.integers(lo, hi + 1, small) if points else np.zeros(small, np.int64)
        along = np.arange(shape[axis]) // size
        wide, points_of = scale.astype(np.float64), zeros.take(along, axis)
        self.stored = BlockConstant(codes - points_of, wide, axis, size, dtype)
        self.real = self.stored.integers * wide.take(along, axis)
        kind = None if dtype in (INT4, UINT4) else NUMPY[dtype]
        stored = [self.const(v.astype(kind or np.int64), "weight", dtype) for v in (codes, zeros)]
        given = [stored[0], self.const(scale, "scale"), *(stored[1:] if points else [])]
        return self.op("DequantizeLinear", *given, axis=axis, block_size=size)


def real_input(x, scale=X[0], zero=X[1], hi=255):
    """What the model's quantizer makes of an input, in float64."""
    return (np.clip(np.rint(x / np.float32(scale)) + zero, 0, hi) - zero) * np.float64(np.float32(scale))


def multiplied(shape=(5, 40), made=(40, 12), size=16, out=(0.05, 121), axis=-2, **weight):
    """x @ weight, with blocks along the inputs if nothing else is said, and its exact function."""
    net = BlockNet()
    x = net.qdq(net.input(list(shape)), *X)
    y = net.op("MatMul", x, net.blocks(made, axis % len(made), size, **weight))
    net.output(net.qdq(y, *out), [*shape[:-1], made[-1]])
    return net.model(), lambda feeds: real_input(feeds["x"]) @ net.real
