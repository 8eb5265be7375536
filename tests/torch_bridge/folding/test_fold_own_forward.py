"""BatchNorms and layers whose forwards are the user's own: folded where these keep to their weights and statistics."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_models import calibrated, randomized, seeded, sim_of

import qsdk
from qsdk import float16, w8a8


class SameConv(nn.Conv2d):
    """Pads before it convolves, as TensorFlow's SAME."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (0, 1, 0, 1)), self.weight, self.bias, self.stride)


class PaddedBySubmodule(nn.Conv2d):
    def __init__(self, *args: int) -> None:
        super().__init__(*args, bias=False)
        self.pad = nn.ZeroPad2d(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.pad(x))


class OwnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class ForgetsItsBias(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight)


class Activated(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x))


class TwoInputs(nn.Conv2d):
    def forward(self, x: Tensor, gain: Tensor) -> Tensor:
        return F.conv2d(x * gain, self.weight, self.bias)


class Gained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = TwoInputs(3, 5, 3), nn.BatchNorm2d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x, x.mean()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "shape"),
    [(SameConv(3, 5, 3), (2, 3, 6, 6)), (PaddedBySubmodule(3, 5, 3), (2, 3, 6, 6)), (OwnLinear(3, 5), (4, 3))],
    ids=["pads by function", "pads by module, no bias", "linear"],
)
def test_a_batch_norm_is_folded_into_a_layer_that_follows_its_weight_and_bias(layer, shape):
    norm = nn.BatchNorm1d(5) if len(shape) == 2 else nn.BatchNorm2d(5)
    model = randomized(nn.Sequential(layer, norm, nn.ReLU())).eval()
    example = seeded(*shape)
    sim = sim_of(model, example)
    assert sim.coverage().summary["folded"] == 1
    assert "BatchNormalization" not in {row["op_type"] for row in sim.coverage().rows}
    with sim.float_phase() as inner, torch.no_grad():
        torch.testing.assert_close(inner(example), model(example))


@pytest.mark.slow
@pytest.mark.parametrize("layer", [ForgetsItsBias(3, 5, 3, bias=False), Activated(3, 5, 3)])
def test_a_batch_norm_after_a_layer_that_computes_something_else_stays_with_a_reason(layer):
    model, example = randomized(nn.Sequential(layer, nn.BatchNorm2d(5))).eval(), seeded(2, 3, 6, 6)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sim = sim_of(model, example)
    assert sim.coverage().summary["folded"] == 0
    reason = sim.coverage().summary["1 (BatchNorm) not folded"]
    assert reason == "0 computes something else than its weight and bias say"
    with sim.float_phase() as inner, torch.no_grad():
        assert torch.equal(inner(example), model(example))
    assert all(torch.equal(value, before[name]) for name, value in sim.unwrap().state_dict().items())


def test_a_layer_that_cannot_be_run_alone_keeps_its_batch_norm():
    model, example = randomized(Gained()).eval(), seeded(2, 3, 6, 6)
    sim = sim_of(model, example)
    assert sim.coverage().summary["norm (BatchNorm) not folded"].startswith("conv computes something else")
    with sim.float_phase() as inner, torch.no_grad():
        assert torch.equal(inner(example), model(example))


class Paired(nn.Conv2d):
    """Gives its result in a container, as layers with a cache or statistics do."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x), None


class PairThenNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = Paired(3, 5, 3), nn.BatchNorm2d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)[0]).relu()


def test_a_layer_that_gives_a_tuple_is_folded_and_trained():
    model, example = randomized(PairThenNorm()).eval(), seeded(4, 3, 6, 6)
    sim = calibrated(model, example)
    assert sim.coverage().summary["folded"] == 1
    with sim.float_phase() as inner, torch.no_grad():
        torch.testing.assert_close(inner(example), model(example))
    with sim.training(freeze_bn_after=math.inf) as live:
        live(example).sum().backward()
        assert live.norm.weight.grad is not None
        qsdk.reestimate_batch_norm(sim, [example], progress=False)
        torch.testing.assert_close(live.norm.running_mean, model.conv(example)[0].mean((0, 2, 3)), atol=0.05, rtol=0)


class NormAct(nn.BatchNorm2d):
    """Written as in timm: normalizes by function, then drops and activates; a gain of its own besides."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Dropout(0.0), nn.LeakyReLU(0.2, inplace=True)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
        known = not self.training or self.track_running_stats
        mean, var = (self.running_mean, self.running_var) if known else (None, None)
        y = F.batch_norm(x, mean, var, self.weight, self.bias, self.training, self.momentum, self.eps)
        return self.act(self.drop(y)) * self.gain


class FixedNorm(nn.BatchNorm2d):
    """Uses the running statistics in train mode too."""

    def forward(self, x: Tensor) -> Tensor:
        statistics = self.running_mean, self.running_var
        return F.relu(F.batch_norm(x, *statistics, self.weight, self.bias, False, 0.1, self.eps))


class Checked(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.numel() else x


class FrozenNorm(nn.Module):
    """No BatchNorm of torch: all of its tensors are buffers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.eps = 1e-5
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(channels) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


def with_norms(norm: type[nn.Module]) -> nn.Module:
    return randomized(nn.Sequential(nn.Conv2d(3, 5, 3, bias=False), norm(5), nn.Conv2d(5, 4, 3), norm(4))).eval()


@pytest.mark.parametrize("norm", [NormAct, FixedNorm, FrozenNorm])
def test_a_batch_norm_with_a_forward_of_its_own_is_folded_and_the_rest_of_it_stays(norm: type[nn.Module]):
    model, example = with_norms(norm), seeded(4, 3, 8, 8)
    checkpoint = copy.deepcopy(model.state_dict())
    sim = sim_of(model, example)
    assert sim.coverage().summary["folded"] == 2
    assert not any("batch_norm" in row["site"] for row in sim.coverage().rows)
    assert "BatchNorm" not in repr(sim)
    sim.model.load_state_dict(checkpoint)  # folded on its way in
    want = model(example)
    with sim.float_phase() as inner, torch.no_grad():
        torch.testing.assert_close(inner(example), want)
        torch.testing.assert_close(inner.train()(example), want)  # as with an Identity in its place
    torch.testing.assert_close(sim.unwrap().eval()(example), want)
    assert all(torch.equal(x, checkpoint[name]) for name, x in model.state_dict().items())


def test_a_folded_norm_with_a_forward_of_its_own_is_saved_and_restored(tmp_path):
    model, example = with_norms(NormAct), seeded(4, 3, 8, 8)
    sim = calibrated(model, example)
    qsdk.save(sim, tmp_path / "sim.qsdk")
    assert torch.equal(qsdk.load(tmp_path / "sim.qsdk", model)(example), sim(example))
    assert torch.equal(copy.deepcopy(sim)(example), sim(example))
    before, modules = copy.deepcopy(model.state_dict()), list(model.modules())
    with pytest.raises(qsdk.ConfigError):
        qsdk.quantize(model, example, w8a8().skip("nowhere"), in_place=True)
    assert list(model.modules()) == modules
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_a_norm_with_a_forward_of_its_own_trains_as_in_float():
    torch.manual_seed(3)
    model, example = with_norms(NormAct), seeded(4, 3, 8, 8)
    sim = sim_of(model, example, w8a8().override("*", weight="float32", activation="float32", bias="float32"))
    with sim.training(freeze_bn_after=math.inf) as live:
        assert [name for name in live.state_dict() if name != "qsdk_steps"] == list(model.state_dict())
        model.train()
        for seed in range(3):
            x = seeded(4, 3, 8, 8, seed=seed)
            for network in (live, model):
                network.zero_grad()
                network(x).square().mean().backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(live.get_parameter(name).grad, p.grad, rtol=1e-3, atol=1e-5)
        for name, x in model.named_buffers():
            torch.testing.assert_close(live.get_buffer(name), x, rtol=1e-3, atol=1e-5)
        inside = live.eval()(example)
    torch.testing.assert_close(sim(example), inside)
    torch.testing.assert_close(inside, model.eval()(example), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("norm", "reason"),
    [(FixedNorm, "does not use the statistics of the batch in train mode"), (FrozenNorm, "no BatchNorm of torch")],
)
def test_a_norm_whose_statistics_are_fixed_stays_folded_in_training(norm: type[nn.Module], reason: str):
    model, example = with_norms(norm), seeded(4, 3, 8, 8)
    sim = calibrated(model, example)
    assert reason in sim.coverage().summary["1 (BatchNorm) stays folded in training"]
    exported = sim(example)
    with sim.training(freeze_bn_after=math.inf) as live, torch.no_grad():
        torch.testing.assert_close(live(example), exported)


class Doubles(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 2)


class Centered(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, 1 + self.weight, self.bias)


class ByHand(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return (x - self.running_mean[:, None, None]) / (self.running_var[:, None, None] + self.eps).sqrt()


class InTwoParts(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(x.relu())


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (Doubles, "no Linear or convolution stands directly before or after it"),
        (Centered, "normalizes with something else than its own weight, bias, statistics and eps"),
        (ByHand, "calls F.batch_norm never"),
        (InTwoParts, "calls F.batch_norm 2 times"),
    ],
)
def test_a_norm_whose_forward_says_something_else_stays_and_quantize_says_why(norm: type[nn.Module], reason: str):
    model, example = randomized(nn.Sequential(nn.Conv2d(3, 5, 3), norm(5), nn.ReLU())).eval(), seeded(2, 3, 6, 6)
    sim = sim_of(model, example)
    assert reason in sim.notes["1 (BatchNorm) not folded"]
    assert "1 BatchNorm not folded, see sim.notes" in repr(sim)
    with sim.float_phase() as inner, torch.no_grad():
        assert torch.equal(inner(example), model(example))


def test_a_norm_that_does_not_run_is_not_said_to_run_0_times():
    model = randomized(nn.Sequential(nn.Conv2d(3, 5, 3)))
    model[0].unused = nn.BatchNorm2d(5)
    sim = sim_of(model.eval(), seeded(2, 3, 6, 6))
    assert sim.notes["0.unused (BatchNorm) not folded"] == "it does not run in one forward pass"


def test_a_norm_in_front_of_its_layer_is_folded_where_nothing_follows_in_its_forward():
    for norm, folded in ((Checked, 1), (NormAct, 0)):
        model = randomized(nn.Sequential(nn.ReLU(), norm(3), nn.Conv2d(3, 5, 3))).eval()
        sim, example = sim_of(model, seeded(2, 3, 6, 6)), seeded(2, 3, 6, 6)
        assert sim.coverage().summary["folded"] == folded
        with sim.float_phase() as inner, torch.no_grad():
            torch.testing.assert_close(inner(example), model(example))


def test_a_norm_with_a_forward_of_its_own_as_a_float16_island_does_all_of_its_forward():
    model, example = with_norms(NormAct), seeded(2, 3, 8, 8)
    sim = calibrated(model, example, w8a8().skip("*", dtype=float16), fold_batch_norm=False)
    torch.testing.assert_close(sim(example), model(example), rtol=0.02, atol=0.02)
