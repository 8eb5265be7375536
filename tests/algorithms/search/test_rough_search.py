"""The search of scales: rows leave the rough one only where they cannot gain, and the exact one goes both ways."""

import pytest
import torch

from qsdk.algorithms.solvers import range_search
from qsdk.algorithms.solvers.range_search import Block, Quadratic, _rough, _RoughSearch, best_of, on_grid

GRID = (-8.0, 7.0)


def every_loss(
    weight: torch.Tensor, target: torch.Tensor, diagonal: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor
) -> torch.Tensor:
    """Return the losses [candidates, rows] in float64."""
    points = on_grid(weight, scales[..., None], zero_points[..., None], *GRID).double()
    return ((points - target.double()).square() * diagonal.double()).sum(-1)


@pytest.mark.parametrize("cached", [64, 1 << 18])
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("present", [0.15, 0.55, 1.0])
def test_rows_leave_the_search_only_where_they_cannot_gain(
    monkeypatch: pytest.MonkeyPatch, cached: int, asymmetric: bool, step: int, present: float
) -> None:
    monkeypatch.setattr(range_search, "CACHED", cached)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 24, generator=generator) ** 3  # with outliers, so that small ranges win
    target = weight + 0.3 * torch.randn(weight.shape, generator=generator)
    diagonal = torch.rand(24, generator=generator)
    shares = torch.cat([torch.tensor([present]), torch.arange(1, 21) / 20])
    scales = shares[:, None] * weight.abs().amax(1) / 8
    zero_points = torch.randint(-6, 6, (200,), generator=generator).expand(21, 200) * float(asymmetric)
    best = _RoughSearch(weight, target, diagonal, GRID).best(scales, zero_points, step)
    losses = every_loss(weight, target, diagonal, scales, zero_points)
    tried = losses[torch.arange(20, -1, -step)]
    assert torch.allclose(losses[best, torch.arange(200)], tried.amin(0), rtol=1e-5)
    assert len(best.unique()) > 5
    assert bool(((20 - best) % step == 0).all())


def test_the_exact_search_of_a_wide_block_ends_where_neither_neighbour_is_better() -> None:
    generator = torch.Generator().manual_seed(1)
    outputs, columns = 96, 192  # wide: each output by itself, from the best of the rough search
    weight = torch.randn(1, outputs, columns, generator=generator) ** 3
    mixed = torch.randn(columns, 24, generator=generator)
    h = (mixed @ mixed.T + 0.1 * torch.eye(columns))[None]
    loss = Quadratic(h, 0.3 * torch.randn(1, outputs, columns, generator=generator))
    block = Block(weight, torch.arange(outputs)[None], GRID)
    shares = torch.cat([torch.tensor([0.4]), torch.arange(1, 21) / 20])
    scales = shares[:, None] * weight[0].abs().amax(1) / 8
    zero_points = torch.zeros_like(scales)
    chosen = best_of(block, loss, scales, zero_points).index
    every = torch.stack([loss(block.deviation(*pair))[0] for pair in zip(scales, zero_points, strict=True)])
    units = torch.arange(outputs)
    for step in (1, -1):
        neighbours = every[(chosen + step).clamp(0, 20), units]
        assert bool((every[chosen, units] <= neighbours * (1 + 1e-4)).all())
    start = _rough(block, loss, scales, zero_points, 2)
    assert bool((chosen < start).any())
    assert bool((chosen > start).any())
