"""The relaxation of AdaRound: its schedule, its losses, and that it ends on the grid."""

import numpy as np
import pytest
import torch

from qsdk.algorithms import adaround, seq_mse
from qsdk.algorithms.relaxation import (
    DEFAULT,
    Options,
    beta_at,
    reconstruction_loss,
    relax,
    rounding_loss,
    soft_rounding,
)
from qsdk.algorithms.rounding import Grid
from qsdk.core.dtypes import int4
from qsdk.core.layer_problem import WeightLayout
from qsdk.core.spec import PerBlock, PerChannel, Spec
from tests.random_problems import problem_of


def test_behaviour_58_beta_falls_along_a_cosine_after_the_warm_start() -> None:
    assert beta_at(8000, 10000, (20, 2), 0.2) == pytest.approx(4.636038969321072, rel=1e-12)
    assert beta_at(2000, 10000) == 20
    assert beta_at(6000, 10000) == pytest.approx(11)
    assert beta_at(9999, 10000) == pytest.approx(2.00000069, abs=1e-8)


def test_behaviour_59_the_rounding_loss_acts_after_the_warm_start_on_what_is_undecided() -> None:
    undecided, options = soft_rounding(torch.zeros(4)), Options(regularization=0.01)
    assert undecided.tolist() == [0.5] * 4
    assert float(rounding_loss(undecided, 1999, 10000, options)) == 0
    assert float(rounding_loss(undecided, 2000, 10000, options)) == pytest.approx(0.04)
    assert float(rounding_loss(soft_rounding(torch.tensor([-9.0, 9.0])), 2000, 10000, options)) == 0


def test_behaviour_60_the_reconstruction_loss_sums_outputs_and_averages_positions() -> None:
    assert float(reconstruction_loss(torch.ones(2, 5), torch.zeros(2, 5))) == 5
    assert float(reconstruction_loss(torch.ones(2, 5, 3, 3), torch.zeros(2, 5, 3, 3))) == 5


@pytest.mark.parametrize("method", ["fast", "relaxed"])
def test_behaviour_61_every_weight_ends_on_floor_or_ceil(method: adaround.Method) -> None:
    problem = problem_of(WeightLayout("linear", (16, 48)), Spec(int4, PerChannel(0)))
    found = adaround.solve(problem, method=method, iterations=20).weight
    grid = Grid.of(problem, problem.encoding).around(problem.weight.mT)
    below, above = ((codes * grid.scale).mT for codes in (grid.lowest, grid.highest))
    assert ((found == below) | (found == above)).all()
    assert (found == below).float().mean() == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("granularity", [PerChannel(0), PerBlock(1, 4)], ids=str)
@pytest.mark.parametrize(("method", "share"), [("fast", 0.7), ("relaxed", 0.7)])
def test_behaviour_62_convolutions_beat_nearest_on_held_out_data(
    method: adaround.Method, share: float, granularity: PerChannel | PerBlock
) -> None:
    layout = WeightLayout("conv", (8, 8, 3, 3))
    seen, unseen = (problem_of(layout, Spec(int4, granularity), seed=seed) for seed in (0, 1))
    nearest = unseen.relative_error(seq_mse.fake_quantize(seen, seen.encoding))
    assert unseen.relative_error(adaround.solve(seen, method=method, shift_bias=False).weight) < share * nearest


def test_the_closed_form_gradient_is_that_of_the_loss() -> None:
    """One step of Adam moves every rounding against the sign of the loss's gradient by autograd."""
    problem = problem_of(WeightLayout("linear", (3, 7)), Spec(int4, PerChannel(0)))
    weight, grid = problem.weight.mT, Grid.of(problem, problem.encoding).around(problem.weight.mT)
    seen: list[torch.Tensor] = []

    def gradient(at: torch.Tensor, step: int) -> torch.Tensor:
        seen.append(at.clone())
        return 2 * (at - 0.3)

    options = Options(learning_rate=0.01, warm_start=0.0, regularization=0.1)
    relax(weight, grid, gradient, 2, options)
    low, step = grid.lowest * grid.scale, (grid.highest - grid.lowest) * grid.scale
    share = ((seen[0] - low) / step).clamp(1e-6, 1 - 1e-6)
    alpha = torch.logit((share + 0.1) / 1.2).requires_grad_()
    loss = (low + step * soft_rounding(alpha) - 0.3).square().sum() + rounding_loss(soft_rounding(alpha), 0, 2, options)
    (wanted,) = torch.autograd.grad(loss, alpha)
    assert torch.allclose(seen[0], weight, atol=1e-6)  # it starts at the weight itself
    moved, clear = seen[1] - seen[0], wanted.abs() > 1e-4
    assert clear.float().mean() > 0.8
    assert torch.equal(moved[clear].sign(), -wanted[clear].sign())


def test_it_ends_when_all_is_decided() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.rand(1, 10, 4, generator=generator) * 4 - 2
    grid = Grid(torch.ones_like(weight), torch.full_like(weight, -4), torch.full_like(weight, 3)).around(weight)
    wish = torch.where(torch.rand(weight.shape, generator=generator) < 0.5, grid.lowest, grid.highest)
    steps: list[int] = []

    def gradient(at: torch.Tensor, step: int) -> torch.Tensor:
        steps.append(step)
        return 2 * (at - wish)

    assert torch.equal(relax(weight, grid, gradient, 2000, DEFAULT), wish)
    assert len(steps) < 1000
    assert np.array_equal(steps, range(len(steps)))
