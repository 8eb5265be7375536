"""Hadamard matrices of any known size, and the orthogonal matrices made of them."""

import numpy as np
import pytest

from qsdk.algorithms.rotation.orthogonal import hadamard, keeping_the_mean, random_orthogonal, randomized_hadamard


@pytest.mark.spread(14)
@pytest.mark.parametrize("size", [1, 2, 4, 12, 20, 24, 28, 36, 44, 60, 68, 144, 288, 384, 768, 896])
def test_rows_of_signs_are_orthogonal(size):
    signs = hadamard(size)
    assert signs is not None
    assert set(np.unique(signs)) <= {-1, 1}
    whole = signs.astype(np.int64)
    np.testing.assert_array_equal(whole @ whole.T, size * np.eye(size, dtype=np.int64))


@pytest.mark.parametrize("size", [3, 6, 10, 14, 18])
def test_no_other_size_has_one(size):
    assert hadamard(size) is None


@pytest.mark.parametrize("size", [2, 6, 7, 12, 24, 172, 288, 384])
@pytest.mark.parametrize("make", [randomized_hadamard, random_orthogonal])
def test_every_size_has_an_orthogonal_matrix_that_keeps_the_mean_if_asked(size, make):
    rotation = make(size, 3)
    assert np.abs(rotation @ rotation.T - np.eye(size)).max() < 1e-12
    kept = keeping_the_mean(rotation)
    assert np.abs(kept @ kept.T - np.eye(size)).max() < 1e-12
    np.testing.assert_allclose(kept.sum(axis=1), 1, atol=1e-12)
    np.testing.assert_allclose(kept.sum(axis=0), 1, atol=1e-12)


def test_one_outlier_is_spread_over_all_channels():
    rotation = randomized_hadamard(288, 0)
    np.testing.assert_allclose(np.abs(rotation), 288**-0.5, rtol=1e-12)
    assert np.abs(keeping_the_mean(rotation)).max() < 3 * 288**-0.5  # a random one has 4 to 5


def test_the_seed_decides():
    np.testing.assert_array_equal(randomized_hadamard(24, 1), randomized_hadamard(24, 1))
    assert (randomized_hadamard(24, 1) != randomized_hadamard(24, 2)).any()
