"""Norms with a Q/DQ pair on each side, and their extreme inputs."""

import numpy as np


def normed(x, axes, epsilon, *, centred=True):
    x = np.asarray(x, np.float64)
    centre = x - x.mean(axes, keepdims=True) if centred else x
    return centre / np.sqrt((centre**2).mean(axes, keepdims=True) + epsilon)


def extremes(zero, length):
    """Rows of codes: noise, all equal, one outlier, all but one at an end, tiny noise, two values."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 256, length) for _ in range(8)]
    rows += [np.full(length, v) for v in (0, 255, zero, zero + 1)]
    for low, high in ((0, 255), (zero, zero + 1), (zero, 255), (255, 0), (zero - 1, zero)):
        one = np.full(length, low)
        one[length // 3] = high
        rows.append(one)
        rows.append(np.where(np.arange(length) % 2, low, high))
    rows += [rng.integers(zero - 1, zero + 2, length) for _ in range(4)]
    return np.stack(rows).clip(0, 255)
