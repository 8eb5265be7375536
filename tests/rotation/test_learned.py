"""Rotations learned on the manifold of orthogonal matrices."""

import numpy as np
import pytest

from qsdk.algorithms.rotation.learned import Turned, learn_rotation
from qsdk.algorithms.rotation.orthogonal import keeping_the_mean, random_orthogonal


def with_an_outlier(turned_by: np.ndarray) -> np.ndarray:
    """Rows that are even in all channels but one, which a rotation has hidden."""
    rows = np.random.default_rng(0).uniform(-1, 1, (200, len(turned_by)))
    return (rows @ turned_by).astype(np.float32)


@pytest.mark.parametrize("keeps_mean", [False, True])
@pytest.mark.parametrize(
    ("ranges", "symmetric"), [("tensor", False), ("row", True), ("column", True), (4, True), (5, True)]
)
def test_descent_stays_orthogonal_and_finds_less_noise(keeps_mean, ranges, symmetric):
    hidden = random_orthogonal(12, 1)
    rows = with_an_outlier(keeping_the_mean(hidden) if keeps_mean else hidden)
    found = learn_rotation([Turned(rows, 255.0, symmetric, ranges)], 12, keeps_mean=keeps_mean)
    assert np.abs(found.rotation @ found.rotation.T - np.eye(12)).max() < 1e-10
    assert found.after < found.before
    if keeps_mean:
        np.testing.assert_allclose(found.rotation.sum(axis=0), 1, atol=1e-10)
        np.testing.assert_allclose(found.rotation.sum(axis=1), 1, atol=1e-10)


def test_the_noise_is_that_of_quantizing():
    rows = with_an_outlier(np.eye(12))
    step = (rows.max() - rows.min()) / 255
    error = np.rint(rows / step) * step - rows
    measured = np.square(error).mean() / np.square(rows).mean()
    found = learn_rotation([Turned(rows, 255.0, False, "tensor")], 12, keeps_mean=False)
    assert found.before == pytest.approx(measured, rel=0.1)
    assert found.after <= found.before
