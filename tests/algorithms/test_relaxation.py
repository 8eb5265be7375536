"""The relaxation of AdaRound: its schedule, its losses, and that it ends on the grid."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from random_problems import problem_from_moments, problem_of

from qsdk import ConfigError, Encoding, int4
from qsdk.algorithms.solvers import adaround, relaxation, seq_mse
from qsdk.algorithms.solvers.outputs import SampledOutputs
from qsdk.algorithms.solvers.relaxation import beta_at, relax, soft_rounding
from qsdk.algorithms.solvers.rounding import WeightGrid
from qsdk.core.layers.layer_problem import Activation, LayerProblem, WeightLayout
from qsdk.core.numerics.dtypes import dtype_named
from qsdk.core.numerics.spec import PerBlock, PerChannel, Spec
from qsdk.core.ranges.ranges import encoding_from_range, range_of


def encoding_of(weight: torch.Tensor, spec: Spec) -> Encoding:
    return encoding_from_range(range_of(weight.numpy(), spec), spec)


def test_beta_falls_along_a_cosine_after_the_warm_start() -> None:
    assert beta_at(8000, 10000) == pytest.approx(4.636038969321072, rel=1e-12)
    assert beta_at(2000, 10000) == 20
    assert beta_at(6000, 10000) == pytest.approx(11)
    assert beta_at(9999, 10000) == pytest.approx(2.00000069, abs=1e-8)


def penalty(soft: torch.Tensor, step: int, steps: int) -> torch.Tensor:
    """The round loss as the paper has it; the solver only knows its gradient."""
    if step < relaxation.WARM_START * steps:
        return soft.new_zeros(())
    beta = beta_at(step, steps)
    return relaxation.REGULARIZATION * (1 - (2 * soft - 1).abs().pow(beta)).sum()


def test_the_rounding_loss_acts_after_the_warm_start_on_undecided_weights() -> None:
    undecided = soft_rounding(torch.zeros(4))
    assert undecided.tolist() == [0.5] * 4
    assert float(penalty(undecided, 1999, 10000)) == 0
    assert float(penalty(undecided, 2000, 10000)) == pytest.approx(40)
    assert float(penalty(soft_rounding(torch.tensor([-9.0, 9.0])), 2000, 10000)) == 0
    # without another loss the solver stands still for a fifth of the steps, then pushes what is undecided apart
    weight = torch.tensor([-0.9, 0.1, 0.4, 0.6])[None, :, None]
    grid = WeightGrid(torch.ones_like(weight), torch.full_like(weight, -8), torch.full_like(weight, 7)).around(weight)
    seen: list[torch.Tensor] = []

    def nothing(at: torch.Tensor, step: int) -> torch.Tensor:
        seen.append(at.clone())
        return torch.zeros_like(at)

    assert relax(weight, grid, nothing, 300).flatten().tolist() == [-1, 0, 0, 1]
    torch.testing.assert_close(torch.stack(seen[:61]), weight.expand(61, *weight.shape), rtol=0, atol=1e-6)
    assert float((seen[-1] - seen[-1].round()).abs().max()) < float((weight - weight.round()).abs().max()) / 4


def test_the_reconstruction_loss_sums_outputs_and_averages_positions() -> None:
    """Two rows of five outputs, each off by one: 5, in what the solver minimises on moments and on samples."""
    x, layout = torch.eye(2)[None], WeightLayout("linear", (5, 2))
    weight, spec = torch.ones(1, 5, 2), Spec(int4, PerChannel(0))
    found = problem_from_moments("fc:weight", spec, encoding_of(weight[0], spec), layout, weight, x, x, x, 2)
    assert float(found.errors(torch.zeros_like(weight)).sum() / found.rows) == pytest.approx(5)
    outputs = SampledOutputs.of(replace(found, samples=(x, x)))
    assert float(outputs.errors(outputs.given(torch.zeros_like(weight))).sum(2).mean()) == pytest.approx(5)


def behind_relu(seed: int, off: float, rows: int = 2048, bias: torch.Tensor | None = None) -> LayerProblem:
    """A layer of 16 outputs, most of them below 0, whose ReLU hides what happens there; `seed` draws the rows."""
    fixed, fresh = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    weight, mix = torch.randn(16, 32, generator=fixed), torch.randn(32, 32, generator=fixed)
    x = (torch.randn(rows, 32, generator=fresh) @ (mix * torch.logspace(0, -1.5, 32)).T).relu()
    noisy = x + 0.05 * x.std() * torch.randn(x.shape, generator=fresh)
    y = x @ weight.T
    bias = -y.mean(0) - off * y.std(0) if bias is None else bias
    spec, layout = Spec(dtype_named("int3"), PerChannel(0)), WeightLayout("linear", (16, 32))
    moments = (x.T @ x)[None], (x.T @ noisy)[None], (noisy.T @ noisy)[None]
    others = {"mean": x.mean(0)[None], "mean_quantized": noisy.mean(0)[None], "samples": (x[None], noisy[None])}
    others |= {"bias": bias.reshape(1, -1), "activation": Activation(low=0.0)}
    encoding = encoding_of(weight, spec)
    return problem_from_moments("fc:weight", spec, encoding, layout, weight[None], *moments, rows, **others)


@pytest.mark.spread(1)
@pytest.mark.parametrize(("shift_bias", "share"), [(False, 0.9), (True, 1.05)])
def test_with_the_activation_in_the_loss_the_error_behind_it_is_lower_on_unseen_data(
    shift_bias: bool, share: float
) -> None:
    """0.83 of the error without; where the bias takes up the mean, that does most of it, and 0.98 is left."""
    totals = {False: 0.0, True: 0.0}
    for seed, off in ((1, 0.5), (2, 0.5), (1, 1.0), (2, 1.0)):
        seen = behind_relu(seed, off, rows=4096)
        unseen = SampledOutputs.of(behind_relu(9, off, bias=seen.bias))
        for activation in totals:
            found = adaround.solve(seen, method="relaxed", activation=activation, shift_bias=shift_bias)
            shift = 0 if found.bias_shift is None else found.bias_shift[:, None]
            totals[activation] += unseen.relative(unseen.errors(unseen.given(found.weight) + shift))
            assert found.error_after < found.error_before
            grid = WeightGrid.of(seen, seen.encoding).around(seen.weight.mT)
            below, above = ((codes * grid.scale).mT for codes in (grid.lowest, grid.highest))
            assert ((found.weight == below) | (found.weight == above)).all()
    assert totals[True] < share * totals[False]


def test_the_gradient_on_samples_is_that_of_the_error_behind_the_activation() -> None:
    problem, plain = behind_relu(1, 0.0, rows=300), torch.zeros(1, 16, 32)
    outputs = SampledOutputs.of(problem)
    at = (problem.weight + 0.1).requires_grad_()
    found = adaround.sampled_gradient(outputs, problem.weight.mT, plain, 0.5)(at.detach().mT, 0).mT
    rows = outputs.learning
    unit = float(outputs.errors(outputs.given(plain))[:, rows].sum((0, 2)).mean()) / plain.numel()
    ridge = 0.5 * outputs.x_quantized.square().mean() * (at - problem.weight).square().sum()
    loss = outputs.errors(outputs.given(at))[:, rows].sum((0, 2)).mean() + ridge
    (wanted,) = torch.autograd.grad(loss / unit, at)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3 * float(wanted.abs().mean()))


def test_second_moments_cannot_look_behind_the_activation() -> None:
    with pytest.raises(ConfigError, match="end in front of activation functions; choose method='relaxed'"):
        adaround.solve(behind_relu(1, 0.0, rows=50), activation=True)
    plain = replace(behind_relu(1, 0.0, rows=50), activation=None)
    found = [adaround.solve(plain, method="relaxed", iterations=20, activation=value).weight for value in (False, True)]
    assert torch.equal(*found)


@pytest.mark.parametrize("method", ["coordinate_descent", "relaxed"])
def test_every_weight_ends_on_floor_or_ceil(method: adaround.Method) -> None:
    problem = problem_of(WeightLayout("linear", (16, 48)), Spec(int4, PerChannel(0)))
    found = adaround.solve(problem, method=method, iterations=20).weight
    grid = WeightGrid.of(problem, problem.encoding).around(problem.weight.mT)
    below, above = ((codes * grid.scale).mT for codes in (grid.lowest, grid.highest))
    assert ((found == below) | (found == above)).all()
    assert (found == below).float().mean() == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("granularity", [PerChannel(0), PerBlock(1, 4)], ids=str)
@pytest.mark.parametrize(("method", "share"), [("coordinate_descent", 0.7), ("relaxed", 0.7)])
def test_learned_rounding_of_convolutions_beats_nearest_on_held_out_data(
    method: adaround.Method, share: float, granularity: PerChannel | PerBlock
) -> None:
    layout = WeightLayout("conv", (8, 8, 3, 3))
    seen, unseen = (problem_of(layout, Spec(int4, granularity), seed=seed) for seed in (0, 1))
    nearest = unseen.relative_error(seq_mse.fake_quantize(seen, seen.encoding))
    assert unseen.relative_error(adaround.solve(seen, method=method, shift_bias=False).weight) < share * nearest


def test_the_closed_form_gradient_is_that_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of Adam moves every rounding against the sign of the loss's gradient by autograd."""
    problem = problem_of(WeightLayout("linear", (3, 7)), Spec(int4, PerChannel(0)))
    weight, grid = problem.weight.mT, WeightGrid.of(problem, problem.encoding).around(problem.weight.mT)
    seen: list[torch.Tensor] = []

    def gradient(at: torch.Tensor, step: int) -> torch.Tensor:
        seen.append(at.clone())
        return 2 * (at - 0.3)

    monkeypatch.setattr(relaxation, "WARM_START", 0.0)
    monkeypatch.setattr(relaxation, "REGULARIZATION", 0.1)
    relax(weight, grid, gradient, 2)
    low, step = grid.lowest * grid.scale, (grid.highest - grid.lowest) * grid.scale
    share = ((seen[0] - low) / step).clamp(1e-6, 1 - 1e-6)
    alpha = torch.logit((share + 0.1) / 1.2).requires_grad_()
    loss = (low + step * soft_rounding(alpha) - 0.3).square().sum() + penalty(soft_rounding(alpha), 0, 2)
    (wanted,) = torch.autograd.grad(loss, alpha)
    assert torch.allclose(seen[0], weight, atol=1e-6)  # it starts at the weight itself
    moved, clear = seen[1] - seen[0], wanted.abs() > 1e-4
    assert clear.float().mean() > 0.8
    assert torch.equal(moved[clear].sign(), -wanted[clear].sign())


def test_it_ends_when_all_is_decided() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.rand(1, 10, 4, generator=generator) * 4 - 2
    grid = WeightGrid(torch.ones_like(weight), torch.full_like(weight, -4), torch.full_like(weight, 3)).around(weight)
    wish = torch.where(torch.rand(weight.shape, generator=generator) < 0.5, grid.lowest, grid.highest)
    steps: list[int] = []

    def gradient(at: torch.Tensor, step: int) -> torch.Tensor:
        steps.append(step)
        return 2 * (at - wish)

    assert torch.equal(relax(weight, grid, gradient, 2000), wish)
    assert len(steps) < 1000
    assert np.array_equal(steps, range(len(steps)))
