"""Orthogonal matrices to rotate channels with: randomized Hadamard, and random."""

import numpy as np
import numpy.typing as npt

from qsdk.algorithms.rotation.hadamard import hadamard

Floats = npt.NDArray[np.float64]


def randomized_hadamard(size: int, seed: int) -> Floats:
    """Return an orthogonal matrix, [size, size], all of whose elements have the magnitude `size ** -0.5`.

    It is a Hadamard matrix with random signs of its rows and columns, as in QuaRot (Ashkboos et al. 2024). Of a size
    that has none here, the largest part that has one is used, times a random matrix for the rest.
    """
    generator = np.random.default_rng(seed)
    part = next(part for part in range(size, 0, -1) if size % part == 0 and hadamard(part) is not None)
    signs = hadamard(part)
    assert signs is not None
    spread = signs / np.sqrt(part)
    if part < size:
        spread = np.kron(spread, _random(size // part, generator))
    rows, columns = generator.choice((-1.0, 1.0), (2, size))
    signed: Floats = rows[:, None] * spread * columns
    return signed


def random_orthogonal(size: int, seed: int) -> Floats:
    """Return a random orthogonal matrix, [size, size], uniformly distributed (Haar)."""
    return _random(size, np.random.default_rng(seed))


def keeping_the_mean(rotation: Floats) -> Floats:
    """Return an orthogonal matrix close to another one, which leaves the mean of a vector as it is.

    One reflection takes the image of the vector of ones back to it, so a LayerNorm commutes with the result: both the
    mean and the length of a vector stay. (Reflection G: (Q G)^T 1 = 1 and (Q G) 1 = 1.)
    """
    ones = np.full(len(rotation), len(rotation) ** -0.5)
    between = ones @ rotation - ones
    length = between @ between
    if length < 1e-30:
        return rotation
    reflected: Floats = rotation - np.outer(rotation @ between, between) * (2 / length)
    return reflected


def _random(size: int, generator: np.random.Generator) -> Floats:
    q, r = np.linalg.qr(generator.standard_normal((size, size)))
    uniform: Floats = q * np.sign(np.diag(r))
    return uniform
