"""Tensors that are computed before every call (weight norm, spectral norm, pruning) are folded into their value."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from edges import road
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch_models import calibrated, randomized, seeded, sim_of

import qsdk
from qsdk import ConfigError, quantize, w8a8


class Bounded(nn.Module):
    """A parametrization of the user's own."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.tanh()


def pruned_twice(layer: nn.Module) -> None:
    prune.random_unstructured(layer, "weight", 0.3)
    prune.l1_unstructured(layer, "weight", 0.5)


def weight_and_bias(layer: nn.Module) -> None:
    parametrizations.weight_norm(layer)
    parametrize.register_parametrization(layer, "bias", Bounded())


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def old_weight_norm(layer: nn.Module) -> None:
    torch.nn.utils.weight_norm(layer)


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "weight norm": parametrizations.weight_norm,
    "weight norm, old": old_weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "spectral norm, old": torch.nn.utils.spectral_norm,
    "pruned": lambda layer: prune.ln_structured(layer, "weight", 0.5, n=2, dim=0),
    "pruned twice": pruned_twice,
    "own": lambda layer: parametrize.register_parametrization(layer, "weight", Bounded()),
    "weight and bias": weight_and_bias,
}
QUICK = ("weight norm", "spectral norm, old", "pruned twice")
SOME_SLOW = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.nightly) for name in WAYS]
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")


def network(way: Callable[[nn.Module], Any], seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5))
    for layer in (model[0], model[4]):
        way(layer)
        model.train()(seeded(4, 3, 6, 6))  # spectral norms iterate
    return randomized(model, seed)  # type: ignore[return-value]


X = seeded(3, 3, 6, 6)


def state(model: nn.Module) -> tuple[Any, ...]:
    hooks = [[*map(id, module._forward_pre_hooks.values())] for module in model.modules()]
    kinds = [type(module) for module in model.modules()]
    return [*model.state_dict()], [*dict(model.named_parameters())], kinds, hooks


def close(left: Tensor, right: Tensor) -> bool:
    return bool((left - right).abs().max() <= 1e-5 * right.abs().max())


@pytest.mark.parametrize("name", SOME_SLOW)
def test_computed_weights_are_folded_and_checkpoints_still_load(name: str):
    model = network(WAYS[name])
    expected, before = model(X).detach(), state(model)
    tensors = {key: value.clone() for key, value in model.state_dict().items()}
    sim = sim_of(model, X)
    assert state(model) == before
    assert all(torch.equal(value, tensors[key]) for key, value in model.state_dict().items())
    assert {"0:weight", "4:weight"} <= {s for s, d in sim.plan.decisions.items() if d.quantized}
    assert "is folded into its value" in str(sim.coverage().summary["4.weight"])
    plain = sim.unwrap()
    assert sorted(plain.state_dict()) == ["0.bias", "0.weight", "4.bias", "4.weight"]
    assert [type(m) for m in plain.modules()][1:] == [nn.Conv2d, nn.Identity, nn.ReLU, nn.Flatten, nn.Linear]
    assert close(plain(X), expected)
    other = network(WAYS[name], seed=1)
    sim.model.load_state_dict(other.state_dict())
    assert close(sim.unwrap()(X), other(X))
    own = copy.deepcopy(sim.model.state_dict())
    sim.model.load_state_dict(own)
    assert all(torch.equal(value, own[key]) for key, value in sim.model.state_dict().items())


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", SOME_SLOW)
def test_in_place_preparation_restores_what_computes_the_weights(name: str):
    model = network(WAYS[name])
    expected, before = model(X).detach(), state(model)
    with pytest.raises(ConfigError):
        quantize(model, X, w8a8().override("nothing", weight="int4"), in_place=True)
    assert state(model) == before
    assert torch.equal(model(X), expected)
    model.load_state_dict(network(WAYS[name], seed=1).state_dict())
    assert torch.equal(model(X), network(WAYS[name], seed=1)(X))


@pytest.mark.slow
def test_the_road_of_a_weight_normed_network(tmp_path: Path):
    model = network(parametrizations.weight_norm)
    came = road(model, X, [seeded(5, 3, 6, 6, seed=1)], tmp_path)
    qsdk.save(came.sim, tmp_path / "sim.qsdk")
    assert torch.equal(qsdk.load(tmp_path / "sim.qsdk", model)(X), came.sim(X))
    assert torch.equal(copy.deepcopy(came.sim)(X), came.sim(X))


@pytest.mark.parametrize("norm", [old_weight_norm, parametrizations.weight_norm], ids=["old", "new"])
def test_a_weight_normed_recurrent_net(norm: Callable[..., Any]):
    model = nn.GRU(4, 6, batch_first=True)
    if norm is old_weight_norm:
        torch.nn.utils.weight_norm(model, "weight_hh_l0")
    else:
        norm(model, "weight_hh_l0")
    x = seeded(2, 3, 4)
    expected = model.eval()(x)[0].detach()
    sim = calibrated(model, x)
    assert sim.plan.decisions["self:weight_hh_l0"].quantized
    with sim.float_phase() as floating:
        assert torch.equal(floating(x)[0], expected)
    assert 0 < float((sim(x)[0] - expected).abs().max()) < 0.05


def test_training_trains_the_plain_weight():
    sim = calibrated(network(parametrizations.weight_norm), X)
    before = sim.model.get_parameter("4.weight").detach().clone()
    with sim.training():
        sim.model(X).square().sum().backward()
        torch.optim.SGD(sim.model.parameters(), lr=1e-3).step()
    assert not torch.equal(sim.model.get_parameter("4.weight"), before)


class Standardised(nn.Conv2d):
    """A convolution with a standardised weight and a learned gain, as in networks without BatchNorm."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gain = nn.Parameter(torch.full((self.out_channels, 1, 1, 1), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        centred = weight - weight.mean((1, 2, 3), keepdim=True)
        weight = self.gain * centred / (weight.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class MaskedLinear(nn.Linear):
    """A Linear that reads part of its inputs, with nothing beside its weight that a checkpoint would show."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.tril(), self.bias)


class FromInput(nn.Linear):
    """A Linear whose weight depends on its input, which is no constant."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * x.mean().sigmoid(), self.bias)


def own_forwards(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = (Standardised(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), Standardised(6, 4, 3, groups=2, stride=2))
    return randomized(nn.Sequential(*layers, nn.Flatten(), MaskedLinear(16, 5), FromInput(5, 3)))


@pytest.mark.slow
def test_layers_that_compute_their_weight_in_forward(tmp_path: Path):
    model = own_forwards()
    expected, before = model(X).detach(), state(model)
    came = road(model, X, [seeded(5, 3, 6, 6, seed=1)], tmp_path)
    assert state(model) == before
    weights = {s: d for s, d in came.sim.plan.decisions.items() if d.kind == "weight" and s.endswith(":weight")}
    assert [str(weights[f"{i}:weight"].spec.granularity) for i in (0, 3, 5)] == ["per channel (axis 0)"] * 3
    assert (
        came.sim.coverage().summary["0.weight"] == "Standardised is folded into its value, which is a plain tensor now"
    )
    assert came.sim.coverage().summary["folded"] == 1
    plain = came.sim.unwrap()
    assert [type(plain.get_submodule(str(i))) for i in (0, 3, 5, 6)] == [nn.Conv2d, nn.Conv2d, nn.Linear, FromInput]
    assert close(plain(X), expected)
    kinds = [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node]
    assert kinds.count("Conv") == 2
    assert kinds.count("Sqrt") == 0


@pytest.mark.slow
def test_checkpoints_of_layers_that_compute_their_weight_in_forward(tmp_path: Path):
    sim, other = calibrated(own_forwards(), X), own_forwards(seed=1)
    raw = {key: value.clone() for key, value in sim.model.state_dict().items()}
    sim.model.load_state_dict(other.state_dict(), strict=False)
    assert close(sim.unwrap()(X), other(X))
    # the sim's own state is known by its encodings, or by its metadata
    for kept in (sim.model.state_dict(), sim_of(own_forwards(), X).model.state_dict(), raw):
        sim.model.load_state_dict(kept, strict=False)
        assert all(torch.equal(sim.model.state_dict()[key], value) for key, value in kept.items())
    qsdk.save(sim, tmp_path / "sim.qsdk")
    assert torch.equal(qsdk.load(tmp_path / "sim.qsdk", own_forwards())(X), sim(X))


def test_in_place_gives_back_layers_that_compute_their_weight():
    model = own_forwards()
    expected, before = model(X).detach(), state(model)
    with pytest.raises(ConfigError):
        quantize(model, X, w8a8().override("nothing", weight="int4"), in_place=True)
    assert state(model) == before
    assert torch.equal(model(X), expected)
