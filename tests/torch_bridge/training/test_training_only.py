"""Forwards that take another path in train mode: what only training has is float, and the rest is as in the file."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_models import calibrated, seeded

from qsdk import QuantSim, check_parity, export

X = seeded(4, 8)


class StochasticDepth(nn.Module):
    """Drops whole rows in training: of any shape."""

    def __init__(self, keep: float) -> None:
        super().__init__()
        self.keep = keep

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.keep == 1:
            return x
        return x.div(self.keep) * x.new_empty((x.shape[0], 1)).bernoulli_(self.keep)


class Residual(nn.Module):
    """A block with stochastic depth; training adds at a line of its own: [N, 8] to [N, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(8, 8), StochasticDepth(0.9)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return x + self.drop(self.layer(x))
        return x + self.layer(x)


class Auxiliary(nn.Module):
    """Gives a second output in training: [N, 8] to [N, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.auxiliary = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.layer(x))
        return (h, self.auxiliary(h)) if self.training else h


class AsksForGradients(nn.Module):
    """Sets requires_grad on a view of its input: [N, 8] to [N, 1, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = x[:, None]
        if self.training:
            h.requires_grad = True
        return self.layer(h)


class Cached(nn.Module):
    """Keeps position biases in eval mode: [N, 8] to [N, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bias = nn.Linear(8, 8), nn.Parameter(seeded(3))
        self.register_buffer("index", torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]), persistent=False)
        self.cache: dict[str, Tensor] = {}
        self.constant: Tensor | None = None

    def train(self, mode: bool = True) -> "Cached":
        super().train(mode)
        if mode:
            self.cache = {}
        return self

    def positions(self) -> Tensor:
        if self.training:
            return self.bias[self.index]
        if "bias" not in self.cache:
            self.cache["bias"] = self.bias[self.index]
        return self.cache["bias"]

    def forward(self, x: Tensor) -> Tensor:
        if self.constant is None:
            self.constant = torch.arange(8.0)
        return self.layer(x) + self.positions() + self.constant


def one_step(sim: QuantSim) -> None:
    with sim.training(learn_scales=True) as model:
        optimizer = torch.optim.SGD(sim.parameter_groups(lr=0.01))
        out = model(X)
        sum(part.square().mean() for part in (out if isinstance(out, tuple) else (out,))).backward()
        optimizer.step()


def right(sim: QuantSim, folder: Path) -> bool:
    path = str(folder / "m.onnx")
    export(sim, path)
    return bool(check_parity(sim, path, [X], progress=False).summary["passed"])


def only_training(sim: QuantSim) -> set[str]:
    return {row["site"] for row in sim.coverage().rows if row["reason"] == "runs only in training"}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Residual, {"drop/div.0:output", "drop/bernoulli.0:output", "drop/mul.0:output"}),
        (Auxiliary, {"auxiliary:weight", "auxiliary:bias", "auxiliary:output"}),
        (AsksForGradients, set()),
    ],
)
def test_a_branch_of_training_trains_and_is_in_no_file(
    make: Callable[[], nn.Module], expected: set[str], tmp_path: Path
):
    torch.manual_seed(0)
    sim = calibrated(make(), X)
    assert only_training(sim) == expected
    before = sim.unwrap()
    one_step(sim)
    moved = {name for name, p in sim.unwrap().named_parameters() if not torch.equal(p, before.get_parameter(name))}
    assert moved == {name for name, _ in before.named_parameters()}
    assert right(sim, tmp_path)


@pytest.mark.spread(1)
@pytest.mark.parametrize("used", ["never", "without gradients", "with gradients"])
def test_values_cached_from_parameters_are_computed_again(used: str, tmp_path: Path):
    torch.manual_seed(0)
    model = Cached().eval()
    if used != "never":
        with torch.set_grad_enabled(used == "with gradients"):
            model(X)
    held = dict(model.cache)
    sim = calibrated(model, X)
    assert model.cache.keys() == held.keys()
    assert all(model.cache[key] is held[key] for key in held)
    assert "self:bias" in {row["site"] for row in sim.coverage().rows}
    assert right(sim, tmp_path)
    before = sim(X)
    one_step(sim)
    assert right(sim, tmp_path)
    with torch.no_grad():
        sim.model.bias.add_(1.0)
    assert (sim(X) - before).mean() > 0.5  # the float model would go on with what it has cached
    assert sim.model.cache == {}


class Shifted(nn.Module):
    """Multiplies by 1 in training, before what the file multiplies: [N, 8] to [N, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act = nn.Linear(8, 8), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x * torch.ones_like(x)
            x = self.act(self.first(x))
        else:
            x = self.act(self.first(x))
        x = x * 0.1
        return self.act(x * 30.0)


def test_calls_in_training_are_those_of_the_same_line_or_module():
    torch.manual_seed(0)
    sim = calibrated(Shifted(), X)
    assert only_training(sim) == {"mul.2:output"}
    expected = sim(X)
    with sim.training() as model:
        assert torch.equal(model(X), expected)
        model.eval()
        assert torch.equal(model(X), expected)


class Writes(nn.Module):
    """Writes into its state and draws numbers in training: [N, 8] to [N, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.norm = nn.Linear(8, 8), nn.Parameter(torch.tensor(9.0)), nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(8))
        self.steps: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale.data.clamp_(max=1.0)
            self.seen += x.detach().mean(0)
            self.seen = self.seen.clone()
            self.steps.append(len(self.steps))
            x = x + random.random() + np.random.rand() + torch.rand(())
        return self.norm(self.layer(x) * self.scale)


@pytest.mark.spread(1)
@pytest.mark.parametrize("in_place", [False, True])
def test_the_run_in_train_mode_changes_nothing(in_place: bool):
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Writes().eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sim = calibrated(model, X, fold_batch_norm=False, in_place=in_place)
    after = sim.unwrap()
    assert all(torch.equal(after.state_dict()[name], value) for name, value in state.items())
    assert after.steps == model.steps == []
    assert not after.training
    drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    Writes()
    assert drawn == (random.random(), float(np.random.rand()), float(torch.rand(())))


class NeedsTargets(nn.Module):
    """Refuses to run in training without targets: [N, 8] to [N, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if self.training and targets is None:
            raise AssertionError("targets should not be none when in training mode")
        return self.layer(x) if targets is None else F.mse_loss(self.layer(x), targets)


@pytest.mark.slow
def test_a_model_that_does_not_run_in_training_is_quantized_and_coverage_says_so(tmp_path: Path):
    torch.manual_seed(0)
    sim = calibrated(NeedsTargets(), X)
    assert "targets should not be none" in sim.coverage().summary["train mode"]
    assert right(sim, tmp_path)
    with sim.training(learn_scales=True) as model:
        model(X, X).backward()
        assert model.layer.weight.grad is not None
