"""Orthogonal matrices to rotate channels with: randomized Hadamard, and random."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

Signs = npt.NDArray[np.int8]


@cache
def hadamard(size: int) -> Signs | None:
    """Return a matrix of +1 and -1 with orthogonal rows, [size, size]; None where these constructions give none.

    Paley (1933): for a prime p = 3 mod 4 there is one of size p + 1, for a prime p = 1 mod 4 one of size 2 (p + 1).
    The Kronecker product of two is one again, so that any size 2^k * m is served for m = 1, 12, 20, 28, 36, 44, ...

    Example:
        >>> hadamard(12).astype(int) @ hadamard(12).T == 12 * np.eye(12)
        array([[ True,  True,...
        >>> hadamard(6) is None
        True
    """
    if size in (1, 2):
        return np.array([[1, 1], [1, -1]], np.int8)[:size, :size]
    if size < 4 or size % 4:
        return None
    half = hadamard(size // 2)
    if half is not None:
        return _product(_two(), half)
    if _is_prime(size - 1):
        return _paley_one(size - 1)
    if _is_prime(size // 2 - 1) and (size // 2 - 1) % 4 == 1:
        return _paley_two(size // 2 - 1)
    for factor in range(12, int(size**0.5) + 1, 4):
        one, other = (hadamard(factor), hadamard(size // factor)) if size % factor == 0 else (None, None)
        if one is not None and other is not None:
            return _product(one, other)
    return None


def _two() -> Signs:
    return np.array([[1, 1], [1, -1]], np.int8)


def _product(one: Signs, other: Signs) -> Signs:
    return np.kron(one, other).astype(np.int8)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def _differences(prime: int) -> Signs:
    """Return Jacobsthal's matrix: +1 where row - column is a square modulo the prime, -1 where not, 0 where equal."""
    character = np.full(prime, -1, np.int8)
    character[np.arange(prime) ** 2 % prime] = 1
    character[0] = 0
    places = np.arange(prime)
    differences: Signs = character[(places[:, None] - places) % prime]
    return differences


def _paley_one(prime: int) -> Signs:
    skew = np.zeros((prime + 1, prime + 1), np.int8)
    skew[0, 1:], skew[1:, 0], skew[1:, 1:] = 1, -1, _differences(prime)
    return skew + np.eye(prime + 1, dtype=np.int8)


def _paley_two(prime: int) -> Signs:
    conference = np.zeros((prime + 1, prime + 1), np.int8)
    conference[0, 1:], conference[1:, 0], conference[1:, 1:] = 1, 1, _differences(prime)
    off_diagonal, diagonal = _two(), np.array([[1, -1], [-1, -1]], np.int8)
    return _product(conference, off_diagonal) + _product(np.eye(prime + 1, dtype=np.int8), diagonal)


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
