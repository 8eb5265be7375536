"""Forwards set on an object in place of its class's: trainers put autocast there, users their own code."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_models import calibrated, seeded, sim_of, states

from qsdk import ModelError, QuantSim, check_parity, export

X = seeded(4, 8)


class Net(nn.Module):
    """Two Linears with functions between them: [N, 8] to [N, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)) + x)


def mixed_precision(model: nn.Module) -> None:
    """Put autocast around the forward as accelerate does it."""
    model._original_forward = model.forward  # type: ignore[assignment]
    inner = torch.autocast("cpu", torch.bfloat16)(type(model).forward)

    def in_float32(*args: Any) -> Tensor:
        made: Tensor = inner(*args).float()
        return made

    model.forward = MethodType(in_float32, model)


def right(sim: QuantSim, folder: Path) -> bool:
    path = str(folder / "m.onnx")
    export(sim, path)
    return bool(check_parity(sim, path, [X], progress=False).summary["passed"])


def one_step(sim: QuantSim, model: nn.Module) -> None:
    optimizer = torch.optim.SGD(sim.parameter_groups(lr=0.01))
    model(X).square().mean().backward()
    optimizer.step()


def test_a_trainer_that_leaves_autocast_around_the_forward_leaves_a_sim_that_exports(tmp_path: Path):
    torch.manual_seed(0)
    sim = calibrated(Net(), X)
    with sim.training(learn_scales=True) as model:
        mixed_precision(model)
        one_step(sim, model)
        copied, plain = copy.deepcopy(sim), sim.unwrap()
    assert torch.equal(plain(X), sim.unwrap()(X))
    for one in (sim, copied):
        assert "forward" not in vars(one.model)
        assert right(one, tmp_path)
    assert torch.equal(sim(X), copied(X))


def test_a_model_that_was_trained_in_mixed_precision_is_quantized_in_the_types_of_its_parameters(tmp_path: Path):
    torch.manual_seed(0)
    model = Net().eval()
    expected = calibrated(model, X)
    mixed_precision(model)
    forward = vars(model)["forward"]
    sim = calibrated(model, X)
    assert states(sim) == states(expected)
    assert torch.equal(sim(X), expected(X))
    assert "self (autocast)" in sim.coverage().summary
    assert right(sim, tmp_path)
    assert vars(model)["forward"] is forward
    in_place = calibrated(model, X, in_place=True)
    assert torch.equal(in_place(X), expected(X))


def twice(self: Net, x: Tensor) -> Tensor:
    return torch.sigmoid(self.second(self.first(x))) * 2


def test_a_method_on_the_object_is_the_forward_of_the_sim(tmp_path: Path):
    torch.manual_seed(0)
    model = Net().eval()
    model.forward = MethodType(twice, model)
    sim = calibrated(model, X)
    assert states(sim)["mul.0:output"] == "quantized"
    assert states(sim)["x:input"] == "quantized"
    assert right(sim, tmp_path)
    assert torch.equal(sim.unwrap()(X), model(X))
    assert torch.equal(copy.deepcopy(sim)(X), sim(X))


def closure(model: nn.Module) -> None:
    inner = model.forward
    model.forward = lambda x: inner(x) * 2


def borrowed(model: nn.Module) -> None:
    model.forward = Net().forward


@pytest.mark.parametrize("patch", [closure, borrowed])
def test_a_forward_that_would_call_the_original_from_a_copy_is_refused(patch: Callable[[nn.Module], None]):
    model = nn.Sequential(Net()).eval()
    patch(model[0])
    with pytest.raises(
        ModelError, match=r"forward of 0 \(Net\) was replaced on the object by .* or pass in_place=True"
    ):
        sim_of(model, X)


@pytest.mark.slow
def test_in_place_a_forward_may_hold_its_object(tmp_path: Path):
    torch.manual_seed(0)
    model = Net().eval()
    closure(model)
    expected = model(X)
    sim = calibrated(model, X, in_place=True)
    assert states(sim)["mul.0:output"] == "quantized"
    assert right(sim, tmp_path)
    assert torch.allclose(sim(X), expected, atol=0.2)
