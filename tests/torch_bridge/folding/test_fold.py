"""Folding BatchNorm: exact where it is done, named with the reason where it is not."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_models import BatchNormNet, calibrated, randomized, seeded, sim_of

from qsdk import ConfigError, QuantSim, w8a8

BatchNorms = nn.modules.batchnorm._BatchNorm

FOLDED: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "conv1d": lambda: (nn.Sequential(nn.Conv1d(4, 6, 3, padding=1), nn.BatchNorm1d(6)), seeded(2, 4, 7)),
    "conv2d": lambda: (nn.Sequential(nn.Conv2d(4, 6, 3, stride=2), nn.BatchNorm2d(6)), seeded(2, 4, 7, 7)),
    "conv2d without bias": lambda: (
        nn.Sequential(nn.Conv2d(4, 6, 3, bias=False, padding="same"), nn.BatchNorm2d(6)),
        seeded(2, 4, 7, 7),
    ),
    "conv3d": lambda: (nn.Sequential(nn.Conv3d(2, 6, 2), nn.BatchNorm3d(6)), seeded(2, 2, 4, 4, 4)),
    "grouped": lambda: (nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)), seeded(2, 4, 5, 5)),
    "depthwise": lambda: (nn.Sequential(nn.Conv2d(4, 8, 3, groups=4), nn.BatchNorm2d(8)), seeded(2, 4, 5, 5)),
    "transposed 1d": lambda: (nn.Sequential(nn.ConvTranspose1d(4, 6, 3, 2), nn.BatchNorm1d(6)), seeded(2, 4, 5)),
    "transposed 2d": lambda: (
        nn.Sequential(nn.ConvTranspose2d(4, 6, 3, padding=1), nn.BatchNorm2d(6)),
        seeded(2, 4, 5, 5),
    ),
    "transposed grouped": lambda: (
        nn.Sequential(nn.ConvTranspose2d(4, 6, 3, 2, groups=2, bias=False), nn.BatchNorm2d(6)),
        seeded(2, 4, 5, 5),
    ),
    "transposed depthwise": lambda: (
        nn.Sequential(nn.ConvTranspose1d(4, 8, 3, groups=4), nn.BatchNorm1d(8)),
        seeded(2, 4, 5),
    ),
    "linear": lambda: (nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)), seeded(3, 5)),
    "linear without bias": lambda: (nn.Sequential(nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6)), seeded(3, 5)),
    "not affine": lambda: (nn.Sequential(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6, affine=False)), seeded(2, 4, 7)),
    "large eps": lambda: (nn.Sequential(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6, eps=0.5)), seeded(2, 4, 7)),
    "through identity": lambda: (
        nn.Sequential(nn.Conv1d(4, 6, 3), nn.Identity(), nn.BatchNorm1d(6), nn.ReLU()),
        seeded(2, 4, 7),
    ),
    "before conv": lambda: (nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3)), seeded(2, 4, 5, 5)),
    "before grouped conv": lambda: (
        nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, groups=2, bias=False)),
        seeded(2, 4, 5, 5),
    ),
    "before depthwise conv": lambda: (nn.Sequential(nn.BatchNorm1d(4), nn.Conv1d(4, 8, 3, groups=4)), seeded(2, 4, 5)),
    "before valid conv": lambda: (
        nn.Sequential(nn.BatchNorm1d(4), nn.Conv1d(4, 6, 3, padding="valid")),
        seeded(2, 4, 5),
    ),
    "before reflecting conv": lambda: (
        nn.Sequential(nn.BatchNorm1d(4), nn.Conv1d(4, 6, 3, padding=1, padding_mode="reflect")),
        seeded(2, 4, 5),
    ),
    "before linear": lambda: (nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3)), seeded(4, 5)),
    "functional wiring": lambda: (BatchNormNet(), seeded(2, 2, 6, 6)),
}


def difference(sim: QuantSim, model: nn.Module, example: Tensor) -> float:
    with sim.float_phase() as inner, torch.no_grad():
        return float((inner(example) - model(example)).abs().max())


@pytest.mark.spread(6)
@pytest.mark.parametrize("name", FOLDED)
def test_folding_keeps_the_output_and_removes_the_batch_norm(name: str):
    torch.manual_seed(len(name))
    model, example = FOLDED[name]()
    randomized(model)
    sim = sim_of(model, example)
    paths = [path for path, module in model.named_modules() if isinstance(module, BatchNorms)]
    assert sim.coverage().summary["folded"] == len(paths)
    assert difference(sim, model, example) <= 1e-5
    assert [type(m).__mro__[2] for p, m in sim.model.named_modules() if p in paths] == [nn.Identity] * len(paths)
    assert not any(isinstance(m, BatchNorms) for m in sim.model.modules())
    assert "BatchNormalization" not in {row["op_type"] for row in sim.coverage().rows}
    assert isinstance(next(m for m in model.modules() if isinstance(m, BatchNorms)), BatchNorms)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conv2d", "functional wiring"])
def test_repeated_folding_changes_nothing(name: str):
    model, example = FOLDED[name]()
    once = calibrated(randomized(model), example)
    again = calibrated(once.unwrap(), example)
    assert again.coverage().summary["folded"] == 0
    assert not any("not folded" in key for key in again.coverage().summary)
    plain = dict(once.unwrap().named_parameters())
    assert all(torch.equal(p, plain[n]) for n, p in again.model.named_parameters())
    assert again.encodings == once.encodings
    assert torch.equal(again(example), once(example))


@pytest.mark.slow
def test_folding_is_left_out_on_request():
    model, example = randomized(BatchNormNet()), seeded(2, 2, 6, 6)
    sim = calibrated(model, example, fold_batch_norm=False)
    assert isinstance(sim.model.bn1, nn.BatchNorm2d)
    assert sim.coverage().summary["folded"] == 0
    assert not any("not folded" in key for key in sim.coverage().summary)
    assert all(torch.equal(p, dict(model.named_parameters())[n]) for n, p in sim.model.named_parameters())
    assert difference(sim, model, example) <= 1e-6


class ReadTwice(nn.Module):
    """The output of the convolution is read beside the BatchNorm, in a way that `how` says."""

    def __init__(self, how: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.bn, self.how = nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), how

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return self.how(self.bn(y), y)


class Twice(nn.Module):
    """One BatchNorm after two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.bn = nn.Conv1d(2, 3, 1), nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.b(self.bn(self.a(x))))


class LayerTwice(nn.Module):
    """One convolution called twice, BatchNorm after the first call only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.bn(self.conv(x)))


class ConvBn(nn.Module):
    """A block around a BatchNorm that it is given."""

    def __init__(self, bn: nn.Module) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv1d(3, 3, 1), bn

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x))


class SharedNorm(nn.Module):
    """Two blocks with one BatchNorm object."""

    def __init__(self) -> None:
        super().__init__()
        bn = nn.BatchNorm1d(3)
        self.a, self.b = ConvBn(bn), ConvBn(bn)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


class TiedWeights(nn.Module):
    """Two convolutions with one weight, BatchNorm after one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.bn = nn.Conv1d(3, 3, 1), nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.bn(self.a(x)))


READ_TWICE = "the result of conv is also read elsewhere"
UNFOLDED: dict[str, tuple[Callable[[], nn.Module], Tensor, str, str]] = {
    "added": (lambda: ReadTwice(lambda bn, y: bn + y), seeded(2, 2, 5), "bn", READ_TWICE),
    "read by keyword": (
        lambda: ReadTwice(lambda bn, y: bn + torch.mul(input=y, other=2)),
        seeded(2, 2, 5),
        "bn",
        READ_TWICE,
    ),
    "read in a nested list": (
        lambda: ReadTwice(lambda bn, y: bn + torch.cat(tensors=[y])),
        seeded(2, 2, 5),
        "bn",
        READ_TWICE,
    ),
    "given out": (lambda: ReadTwice(lambda bn, y: (bn, y)), seeded(2, 2, 5), "bn", READ_TWICE),
    "given out in a dict": (lambda: ReadTwice(lambda bn, y: {"a": bn, "b": [y]}), seeded(2, 2, 5), "bn", READ_TWICE),
    "padded after": (
        lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Conv1d(4, 6, 3, padding=1)),
        seeded(2, 4, 5),
        "0",
        "pads with zeros",
    ),
    "padded same after": (
        lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Conv1d(4, 6, 3, padding="same")),
        seeded(2, 4, 5),
        "0",
        "pads with zeros",
    ),
    "transposed after": (
        lambda: nn.Sequential(nn.BatchNorm1d(4), nn.ConvTranspose1d(4, 6, 3)),
        seeded(2, 4, 5),
        "0",
        "unevenly at the borders",
    ),
    "reused": (Twice, seeded(2, 2, 5), "bn", "it runs 2 times in one forward pass"),
    "shared by two blocks": (SharedNorm, seeded(2, 3, 5), "a.bn", "it runs 2 times in one forward pass"),
    "layer reused": (LayerTwice, seeded(2, 3, 5), "bn", "conv runs 2 times in one forward pass"),
    "weight shared": (TiedWeights, seeded(2, 3, 5), "bn", "shares its weight with"),
    "alone": (
        lambda: nn.Sequential(nn.ReLU(), nn.BatchNorm1d(4), nn.ReLU()),
        seeded(3, 4),
        "1",
        "no Linear or convolution stands directly before or after it",
    ),
    "linear over another axis": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        seeded(2, 4, 4),
        "1",
        "its channels are not those of 0",
    ),
    "before linear over another axis": (
        lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)),
        seeded(2, 4, 4),
        "0",
        "its channels are not those of 1",
    ),
    "unbatched convolution": (
        lambda: nn.Sequential(nn.Conv1d(3, 5, 1), nn.BatchNorm1d(5)),
        seeded(3, 5),
        "1",
        "its channels are not those of 0",
    ),
    "no running statistics": (
        lambda: nn.Sequential(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6, track_running_stats=False)),
        seeded(2, 4, 7),
        "1",
        "it keeps no running statistics",
    ),
}


@pytest.mark.parametrize("name", UNFOLDED)
def test_a_batch_norm_that_cannot_be_folded_is_named_with_the_reason(name: str):
    torch.manual_seed(1)
    make, example, path, reason = UNFOLDED[name]
    model = randomized(make())
    sim = sim_of(model, example)
    summary = sim.coverage().summary
    assert summary["folded"] == 0
    assert reason in summary[f"{path} (BatchNorm) not folded"]
    assert isinstance(sim.model.get_submodule(path), BatchNorms)
    with sim.float_phase() as inner, torch.no_grad():
        for one, other in zip(leaves(inner(example)), leaves(model(example)), strict=True):
            assert torch.equal(one, other)
    assert f"{path} (BatchNorm) not folded: " in str(sim.coverage())


def leaves(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


@pytest.mark.slow
def test_reading_a_shape_is_not_reading_the_values():
    sim = sim_of(randomized(ReadTwice(lambda bn, y: bn.reshape(y.shape[0], -1))), seeded(2, 2, 5))
    assert sim.coverage().summary["folded"] == 1


@pytest.mark.slow
def test_a_rule_that_names_a_batch_norm_keeps_it():
    model, example = randomized(BatchNormNet()), seeded(2, 2, 6, 6)
    sim = calibrated(model, example, w8a8().skip("bn1", dtype="float16"))
    summary = sim.coverage().summary
    assert summary["folded"] == 1
    assert summary["bn1 (BatchNorm) not folded"] == "a rule names it"
    assert isinstance(sim.model.bn1, nn.BatchNorm2d)
    assert sim.plan.decisions["relu.0:output"].spec.dtype.name == "float16", "BatchNorm and ReLU are one group"
    assert isinstance(sim.model.bn2, nn.Identity)
    everything = sim_of(model, example, w8a8().override("*", symmetric_activations=True))
    assert everything.coverage().summary["folded"] == 2, "a bare * names nothing in particular"
    with pytest.raises(ConfigError, match="matches no owner"):
        sim_of(model, example, w8a8().skip("bn3"))


def test_a_negative_gamma_is_folded_with_its_sign():
    model, example = randomized(BatchNormNet()), seeded(2, 2, 6, 6)
    model.bn1.weight.data.abs_().neg_()
    sim = sim_of(model, example)
    assert difference(sim, model, example) <= 1e-5
    assert torch.equal(sim.model.conv1.weight.sign(), -model.conv1.weight.sign())


@pytest.mark.slow
def test_folding_keeps_frozen_parameters_frozen():
    model = randomized(BatchNormNet()).requires_grad_(False)
    sim = sim_of(model, seeded(2, 2, 6, 6))
    assert not any(p.requires_grad for p in sim.model.parameters())


def test_in_place_folding_keeps_the_parameter_objects():
    model, example = randomized(BatchNormNet()), seeded(2, 2, 6, 6)
    reference, weight = copy.deepcopy(model), model.conv1.weight
    sim = sim_of(model, example, in_place=True)
    assert sim.model.conv1.weight is weight
    assert difference(sim, reference, example) <= 1e-5
