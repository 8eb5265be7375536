"""The rough search of scales finds what trying all candidates finds, though rows leave it early."""

import pytest
import torch

from qsdk.algorithms.solvers import range_search
from qsdk.algorithms.solvers.range_search import _RoughSearch, on_grid

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
