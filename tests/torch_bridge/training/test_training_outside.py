"""Training `sim.model` outside of `sim.training()`: the same steps, but nothing holds frozen values there."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import qsdk

X = torch.randn(32, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(32) % 4


def calibrated() -> qsdk.QuantSim:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    sim = qsdk.quantize(nn.Sequential(*layers).eval(), X, qsdk.w4a8())
    qsdk.calibrate(sim, [X], progress=False)
    return sim


def steps(model: nn.Module) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X), LABELS).backward()
        optimizer.step()


@pytest.mark.slow
def test_steps_outside_are_those_of_the_block():
    inside, outside, before = calibrated(), calibrated(), calibrated()
    with inside.training() as model:
        steps(model)
    steps(outside.model)
    for left, right in zip(inside.model.parameters(), outside.model.parameters(), strict=True):
        assert torch.equal(left, right)
    assert torch.equal(inside(X), outside(X))
    assert not torch.equal(outside(X), before(X))


def test_a_gradient_of_frozen_values_outside_is_an_error():
    sim = calibrated()
    sim.freeze("0", values=True)
    weight = sim.model[0].weight.detach().clone()
    with pytest.raises(qsdk.ConfigError, match=r"0:weight, whose values are frozen|0:bias, whose values are frozen"):
        steps(sim.model)
    assert torch.equal(sim.model[0].weight, weight)
    with sim.training() as model:
        steps(model)
    assert torch.equal(sim.model[0].weight, weight)
    sim.unfreeze("0")
    steps(sim.model)
    assert not torch.equal(sim.model[0].weight, weight)


@pytest.mark.spread(1)
@pytest.mark.parametrize("other", ["copied", "loaded"])
def test_frozen_values_are_guarded_in_a_sim_made_of_another(other: str, tmp_path: Path):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    sim, x = qsdk.quantize(model, torch.randn(8, 4), qsdk.w8a8()), torch.randn(8, 4)
    qsdk.calibrate(sim, [x], progress=False)
    sim.freeze("0", values=True)
    qsdk.save(sim, tmp_path / "sim.qsdk")
    found = copy.deepcopy(sim) if other == "copied" else qsdk.load(tmp_path / "sim.qsdk", model)
    with pytest.raises(qsdk.ConfigError, match="whose values are frozen"):
        found.model(x).square().sum().backward()
    found.unfreeze("0")
    found.model(x).square().sum().backward()
    with pytest.raises(qsdk.ConfigError, match="whose values are frozen"):  # the first sim is still frozen
        sim.model(x).square().sum().backward()
