"""Limits of sums of codes: the thresholds against every choice of codes there is."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qsdk.core.numerics.sum_limits import SumLimit


def drawn(seed, outputs, columns, spread=1.0):
    return (np.random.default_rng(seed).normal(size=(1, outputs, columns)) * spread).astype(np.float32)


def codes_within(limit, weight, scale):
    return (limit.within(weight, scale, -128, 127) / scale).round().clip(-128, 127)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    inputs=st.integers(1, 9),
    positions=st.integers(1, 4),
    tile=st.one_of(st.none(), st.integers(1, 12)),
    most=st.integers(1, 300),
    step=st.floats(1e-3, 2.0),
)
def test_codes_never_add_up_to_more_and_stay_where_they_fit(seed, inputs, positions, tile, most, step):
    weight, scale = drawn(seed, 3, inputs * positions), np.full((1, 3, 1), step, np.float32)
    limit = SumLimit(most, inputs * positions, inputs, tile)
    codes, nearest = codes_within(limit, weight, scale), (weight / scale).round().clip(-128, 127)
    # the tiles of a kernel [inputs, positions], counted position by position
    in_order = [matrix.reshape(3, inputs, positions).swapaxes(1, 2).reshape(3, -1) for matrix in (codes[0], nearest[0])]
    width = tile or inputs * positions
    for start in range(0, inputs * positions, width):
        found, plain = (matrix[:, start : start + width] for matrix in in_order)
        sums = np.stack([(sign * found).clip(0, None).sum(1) for sign in (1, -1)])
        assert sums.max() <= most
        for sign in (1, -1):
            fits = (sign * plain).clip(0, None).sum(1) <= most
            same = (sign * found).clip(0, None) == (sign * plain).clip(0, None)
            assert same[fits].all()
    assert limit.largest(codes) <= most


@pytest.mark.parametrize("tile", [None, 2, 3])
def test_numpy_and_torch_find_the_same(tile):
    weight, scale, limit = drawn(5, 4, 30), np.full((1, 4, 1), 0.02, np.float32), SumLimit(40, 30, 10, tile)
    found = codes_within(limit, torch.from_numpy(weight), torch.from_numpy(scale))
    np.testing.assert_array_equal(found.numpy(), codes_within(limit, weight, scale))


@pytest.mark.parametrize("seed", range(8))
def test_no_other_codes_within_the_limit_are_nearer(seed):
    weight, scale, most = drawn(seed, 1, 5, 2.0), np.ones((1, 1, 1), np.float32), 3
    found = codes_within(SumLimit(most, 5, 5), weight, scale)[0, 0]

    def fits(codes):
        return all(sum(max(sign * code, 0) for code in codes) <= most for sign in (1, -1))

    every = (codes for codes in itertools.product(range(-3, 4), repeat=5) if fits(codes))
    best = min(every, key=lambda codes: np.square(np.array(codes) - weight[0, 0]).sum())
    np.testing.assert_array_equal(found, best)
