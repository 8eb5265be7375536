"""Sums that are the same to the last bit in any order."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qsdk.algorithms.problems.moments import Bounds, ExactSum, Moments, exponents


def summed(terms: torch.Tensor, bounds: list[torch.Tensor]) -> torch.Tensor:
    total = ExactSum(bounds)
    for term in terms:
        total.add(term)
    return total.value()


def bounds_of(terms: torch.Tensor) -> list[torch.Tensor]:
    return [exponents(terms.double().abs().sum(0))]


def test_exponents_bound_values() -> None:
    values = torch.tensor([0.0, 1e-45, 0.75, 1.0, 3.0, -4.0, 3e38])
    found = exponents(values)
    assert found.tolist() == [0, -148, 0, 1, 2, 3, 128]
    assert bool((values.double().abs() < torch.exp2(found.double())).all())


@pytest.mark.slow
@given(st.integers(0, 10_000), st.integers(2, 40))
def test_any_order_gives_the_same_bits(seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # of all magnitudes, so that many terms are far below the unit
    terms = torch.randn(count, 50, generator=generator) * torch.exp2(
        torch.randint(-70, 20, (count, 50), generator=generator).float()
    )
    bounds = bounds_of(terms)
    found = summed(terms, bounds)
    for _ in range(4):
        assert torch.equal(summed(terms[torch.randperm(count, generator=generator)], bounds), found)
    half = count // 2
    assert torch.equal(summed(terms[:half], bounds) + summed(terms[half:], bounds), found)
    exact = torch.tensor([math.fsum(column) for column in terms.double().T.tolist()], dtype=torch.float64)
    assert float(((found - exact).abs() / torch.exp2(bounds[0].double())).max()) <= count * 2.0**-50


def test_terms_half_way_between_two_multiples_do_not_depend_on_the_others() -> None:
    unit = 2.0**-49
    small = torch.full((6, 1), unit / 2) * torch.tensor([1.0, 3.0, -1.0, -5.0, 1.0, 7.0])[:, None]
    terms = torch.cat([torch.tensor([[0.25], [unit]]), small])
    bounds = [torch.zeros(1, dtype=torch.int64)]
    found = {
        float(summed(terms[torch.randperm(8, generator=torch.Generator().manual_seed(k))], bounds)) for k in range(99)
    }
    assert len(found) == 1


def test_moments_of_shuffled_batches_have_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(3)
    for outputs in (7, 300):  # fewer outputs than inputs, and more
        x = [torch.randn(1, 300, 260, generator=generator) for _ in range(5)]
        noisy = [one + 0.1 * torch.randn(one.shape, generator=generator) for one in x]
        weight = torch.randn(1, outputs, 260, generator=generator)
        bounds = Bounds.of(torch.cat(x, 1), torch.cat(noisy, 1), 1500)
        sums = []
        for order in ([0, 1, 2, 3, 4], [3, 0, 4, 2, 1]):
            moments = Moments(weight, bounds)
            for at in order:
                assert moments.add(x[at], noisy[at], 2.5, (at, 0))
            sums.append(moments.finish())
        for name in ("h", "linear", "drifts", "mean", "mean_quantized"):
            assert torch.equal(getattr(sums[0], name), getattr(sums[1], name)), name
        h = 2.5 * sum(one[0].double().T @ one[0].double() for one in noisy)
        assert float((sums[0].h[0] - h).abs().max() / h.abs().max()) < 1e-6
