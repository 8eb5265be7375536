"""Hadamard matrices by Kronecker products of Sylvester's and Paley's constructions."""

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
