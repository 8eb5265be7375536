"""Rotations that a model computes while it runs: one matrix, or two small ones whose Kronecker product it is."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from qsdk.algorithms.rotation.hadamard import hadamard
from qsdk.algorithms.rotation.orthogonal import Floats, randomized_hadamard

_ONE_MATRIX = 64  # the largest size at which one product is cheaper than two with a Transpose between them


def online_factors(size: int, seed: int) -> tuple[Floats, ...]:
    """Return a rotation of vectors of this size, as one orthogonal matrix or as two.

    Of two, the first [b, b] turns each of the a runs of b channels, the second [a, a] what is in the same place of
    all runs: size * (a + b) products in place of size ** 2. Each is a Hadamard matrix with random signs.
    """
    a = 1 if size <= _ONE_MATRIX else min(_divisors(size), key=lambda n: _cost(n, size // n))
    factors = [randomized_hadamard(size // a, seed)]
    return (factors[0],) if a == 1 else (factors[0], randomized_hadamard(a, seed + 1))


def turned_online(x: npt.NDArray[np.generic], factors: Sequence[Floats]) -> Floats:
    """Return vectors [..., size] as the model turns them, in float64."""
    result = np.asarray(x, np.float64)
    if len(factors) == 1:
        return result @ factors[0]
    b, a = len(factors[0]), len(factors[1])
    runs = result.reshape(*result.shape[:-1], a, b) @ factors[0]
    return (runs.swapaxes(-1, -2) @ factors[1]).reshape(result.shape)


def _divisors(size: int) -> list[int]:
    return [n for n in range(1, int(size**0.5) + 1) if size % n == 0]


def _cost(a: int, b: int) -> int:
    """Return the products for each channel, and as many again for a factor that is partly a random matrix."""
    return (a + b) * (1 + sum(hadamard(n) is None for n in (a, b)))
