"""Folded BatchNorms that are trained: `sim.training(freeze_bn_after=...)`."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_models import BatchNormNet, calibrated, randomized, seeded, sim_of
from trainable_norm_models import fresh, net, one_step, same, state

import qsdk
from qsdk import ConfigError, QuantConfig, QuantSim, w4a8, w8a8

FLOAT = w8a8().override("*", weight="float32", activation="float32", bias="float32")


def pair(layer: nn.Module, norm: nn.Module) -> nn.Module:
    return nn.Sequential(layer, norm, nn.ReLU())


LAYERS: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "linear": lambda: (pair(nn.Linear(5, 6), nn.BatchNorm1d(6)), (8, 5)),
    "linear without bias": lambda: (pair(nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6)), (8, 5)),
    "conv1d": lambda: (pair(nn.Conv1d(4, 6, 3, padding=1), nn.BatchNorm1d(6)), (4, 4, 7)),
    "conv2d reflecting": lambda: (
        pair(nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d(6)),
        (4, 4, 5, 5),
    ),
    "conv3d": lambda: (pair(nn.Conv3d(2, 6, 2), nn.BatchNorm3d(6)), (4, 2, 3, 3, 3)),
    "grouped": lambda: (pair(nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)), (4, 4, 5, 5)),
    "depthwise": lambda: (pair(nn.Conv2d(4, 8, 3, groups=4, bias=False), nn.BatchNorm2d(8)), (4, 4, 5, 5)),
    "transposed": lambda: (pair(nn.ConvTranspose2d(4, 6, 3, 2), nn.BatchNorm2d(6)), (4, 4, 3, 3)),
    "transposed grouped": lambda: (pair(nn.ConvTranspose1d(4, 6, 3, groups=2), nn.BatchNorm1d(6)), (4, 4, 5)),
    "not affine": lambda: (pair(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6, affine=False)), (4, 4, 7)),
    "cumulative average": lambda: (pair(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6, momentum=None)), (4, 4, 7)),
    "two": lambda: (BatchNormNet(), (8, 2, 6, 6)),
}


# the others say it once more
QUICK = ("linear without bias", "depthwise", "transposed grouped", "not affine", "cumulative average", "two")
layers = pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in LAYERS]
)


def trained(model: nn.Module, inputs: list[Tensor], *, lr: float = 0.05) -> list[float]:
    """The losses of an ordinary loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-3)
    losses = []
    for x in inputs:
        optimizer.zero_grad()
        loss = (model(x) - 0.3).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@layers
def test_without_quantizers_trainable_norms_train_like_the_float_model(name: str):
    torch.manual_seed(1)
    model, shape = LAYERS[name]()
    randomized(model)
    sim = sim_of(model, seeded(*shape), FLOAT)
    inputs = [seeded(*shape, seed=k) for k in range(20)]
    with sim.training(freeze_bn_after=math.inf) as live:
        assert [n for n in live.state_dict() if n != "qsdk_steps"] == list(model.state_dict())
        assert [n for n, _ in live.named_parameters()] == [n for n, _ in model.named_parameters()]
        assert [type(m).__mro__[2] for m in live.modules()] == [type(m) for m in model.modules()]
        for key, value in model.state_dict().items():
            torch.testing.assert_close(live.state_dict()[key], value, rtol=3e-7, atol=1e-9)
        model.train()
        found, expected = trained(live, inputs), trained(model, inputs)
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=1e-6)
        for key, value in model.state_dict().items():
            torch.testing.assert_close(live.state_dict()[key], value, rtol=1e-3, atol=1e-5)
        live.eval()
        inside = live(inputs[0])
    assert torch.equal(sim(inputs[0]), inside)
    torch.testing.assert_close(inside, model.eval()(inputs[0]), rtol=1e-3, atol=1e-4)
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in sim.model.modules())


@pytest.mark.parametrize("name", ["linear", "transposed grouped", "not affine"])
def test_entering_and_leaving_changes_no_bit(name: str):
    torch.manual_seed(2)
    model, shape = LAYERS[name]()
    x = seeded(*shape)
    sim = calibrated(randomized(model), x)
    before, encodings, output = state(sim.model), sim.encodings, sim(x)
    for after in (0, 3, math.inf):
        with sim.training(freeze_bn_after=after) as live:
            assert torch.equal(live.eval()(x), output)
    assert same(state(sim.model), before)
    assert sim.encodings == encodings
    assert torch.equal(sim(x), output)


def quick(sim: QuantSim, steps: int, *, after: float = 2, **options: Any) -> Tensor:
    """Train a sim of BatchNormNet; what it gives in eval mode at the end of the block."""
    with sim.training(freeze_bn_after=after, **options) as live:
        trained(live, [seeded(8, 2, 6, 6, seed=k) for k in range(steps)])
        live.eval()
        return live(seeded(4, 2, 6, 6, seed=99)).detach()


@pytest.mark.slow
@pytest.mark.parametrize("config", [w4a8(), w8a8().skip("conv1", dtype="float16")])
def test_trained_norms_are_folded_as_trained_and_exported(config: QuantConfig, tmp_path):
    sim = fresh(config)
    untrained = sim(seeded(4, 2, 6, 6, seed=99))
    inside = quick(sim, 5, learn_scales=True)
    assert torch.equal(sim(seeded(4, 2, 6, 6, seed=99)), inside)
    assert not torch.equal(untrained, inside)
    path = str(tmp_path / "model.onnx")
    qsdk.export(sim, path)
    parity = qsdk.check_parity(sim, path, [seeded(4, 2, 6, 6, seed=k) for k in range(3)])
    assert parity.summary["passed"]
    assert parity.summary["weights_max_lsb"] == 0


@pytest.mark.slow
def test_a_frozen_norm_runs_as_exported_and_trains_gamma_through_the_folded_weight():
    model, x = net(), seeded(8, 2, 6, 6)
    sim = sim_of(model, x, FLOAT)
    frozen = copy.deepcopy(model).eval()
    with sim.training(freeze_bn_after=0) as live:
        live.train()
        (live(x) - 0.3).square().mean().backward()
        (frozen(x) - 0.3).square().mean().backward()
        for (name, mine), (_, theirs) in zip(live.named_parameters(), frozen.named_parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)
    with (quantized := fresh()).training(freeze_bn_after=0) as live:
        in_training = live(x).detach()
    assert torch.equal(quantized(x), in_training)


@pytest.mark.slow
def test_gradients_are_those_of_finite_differences():
    """Frozen, in float64 and without quantizers; with batch statistics against autograd of the float model above."""
    model, x = nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3)), seeded(3, 2, 4).double()
    sim = sim_of(randomized(model.double()), x, FLOAT)
    for after in (0, math.inf):
        with sim.training(freeze_bn_after=after) as live:

            def loss(*_: Tensor, live: nn.Module = live) -> Tensor:
                return live(x).sin().sum()

            assert torch.autograd.gradcheck(loss, tuple(live.parameters()))


@pytest.mark.slow
def test_the_steps_decide_when_statistics_freeze_whatever_the_loop_calls():
    sim = calibrated(net(), seeded(8, 2, 6, 6), w8a8().override("bn1", activation="uint8"))
    assert sim.folded == ("bn2",)
    with sim.training(freeze_bn_after=2) as live:
        optimizer = torch.optim.SGD(live.parameters(), lr=0.01)
        seen = []
        for k in range(4):
            live.train()
            seen.append((live.bn1.training, live.bn2.training))
            before = live.bn1.running_mean.clone(), live.bn2.running_var.clone()
            live(seeded(8, 2, 6, 6, seed=k)).square().mean().backward()
            now = live.bn1.running_mean, live.bn2.running_var
            moved = [not torch.equal(a, b) for a, b in zip(before, now, strict=True)]
            assert moved == [k < 2, k < 2]
            optimizer.step()
        assert seen == [(True, True), (True, True), (False, False), (False, False)]
    with sim.training() as live:
        assert live.bn1.training, "without a number the ones that were never folded are as model.train() has them"
        assert type(live.bn2).__mro__[2] is nn.Identity


def test_a_batch_norm_in_eval_mode_uses_its_running_statistics():
    sim = fresh()
    with sim.training(freeze_bn_after=math.inf) as live:
        for module in live.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        before = state(live)
        inside = live(seeded(4, 2, 6, 6)).detach()
        assert same(state(live), before)
    assert torch.equal(sim(seeded(4, 2, 6, 6)), inside)


def test_one_value_per_channel_raises_torchs_own_error():
    sim = calibrated(pair(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval(), seeded(8, 3))
    with sim.training(freeze_bn_after=math.inf) as live, pytest.raises(ValueError, match="more than 1 value"):
        live(seeded(1, 3))
    with sim.training(freeze_bn_after=0) as live:
        assert live(seeded(1, 3)).shape == (1, 4)


@pytest.mark.parametrize("number", [-1, math.nan, True, "2"])
def test_a_number_that_is_none_is_refused(number: Any):
    sim = fresh()
    before = state(sim.model)
    with pytest.raises(ConfigError, match="freeze_bn_after"), sim.training(freeze_bn_after=number):
        pass
    assert same(state(sim.model), before)


def test_an_exception_leaves_a_folded_sim_with_the_trained_values():
    sim = fresh()
    before = state(sim.model)
    inside = []

    def loop() -> None:
        with sim.training(freeze_bn_after=5) as live:
            trained(live, [seeded(8, 2, 6, 6)])
            inside.append(live.eval()(seeded(4, 2, 6, 6)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert torch.equal(sim(seeded(4, 2, 6, 6)), inside[0])
    assert state(sim.model).keys() == before.keys()
    assert not same(state(sim.model), before)


def test_two_training_blocks_equal_one():
    """What a block has trained is what the next one starts from: gamma, statistics and all."""
    sim, other = (fresh() for _ in range(2))
    inputs = [seeded(8, 2, 6, 6, seed=k) for k in range(4)]
    with sim.training(freeze_bn_after=math.inf) as live:
        optimizer = torch.optim.SGD(live.parameters(), lr=0.05)
        once = [one_step(live, optimizer, x) for x in inputs]
    twice = []
    for part in (inputs[:2], inputs[2:]):
        with other.training(freeze_bn_after=math.inf) as live:
            optimizer = torch.optim.SGD(live.parameters(), lr=0.05)
            twice += [one_step(live, optimizer, x) for x in part]
    torch.testing.assert_close(once, twice, rtol=1e-4, atol=1e-6)


def test_a_snapshot_from_before_leads_back_bit_for_bit_and_trains_the_same():
    sim, x = fresh(), seeded(4, 2, 6, 6, seed=99)
    before, output, snapshot = state(sim.model), sim(x), sim.snapshot(weights=True)
    first = quick(sim, 4, learn_scales=True)
    sim.restore(snapshot)
    assert same(state(sim.model), before)
    assert torch.equal(sim(x), output)
    assert torch.equal(quick(sim, 4, learn_scales=True), first)


@pytest.mark.slow
@pytest.mark.parametrize("trained_before", [False, True])
def test_equalized_layers_are_trained_from_their_present_weights(trained_before: bool):
    """Factors that went through folded layers are in gamma, so that batch statistics do not undo them."""
    model, x = net(3), seeded(64, 2, 6, 6)
    with torch.no_grad():
        model.bn1.weight[:2] *= 30
    sim = calibrated(model, x, w8a8().override("*", weight="int16", activation="float32"))
    weight = sim.model.conv1.weight.detach().clone()
    assert qsdk.equalize(sim, [x], progress=False).summary["scaled"] > 0
    assert not torch.allclose(sim.model.conv1.weight, weight, rtol=0.1)
    if trained_before:
        with sim.training():  # folded: afterwards nobody knows what BatchNorms said
            pass
    assert bool(sim.folded_norms) is not trained_before
    with sim.training(freeze_bn_after=math.inf) as live:
        torch.testing.assert_close(live(x), model.train()(x), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_training_keeps_a_corrected_bias():
    sim, x = calibrated(net(), seeded(64, 2, 6, 6), w4a8()), seeded(4, 2, 6, 6, seed=9)
    bias = sim.model.conv1.bias.detach().clone()
    qsdk.correct_bias(sim, [seeded(64, 2, 6, 6)], progress=False)
    assert not torch.equal(sim.model.conv1.bias, bias)
    output, bias = sim(x), sim.model.conv1.bias.detach().clone()
    with sim.training(freeze_bn_after=0) as live:
        torch.testing.assert_close(live(x).detach(), output)
    torch.testing.assert_close(sim.model.conv1.bias, bias, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_training_keeps_rounded_weights():
    sim, x = calibrated(net(), seeded(64, 2, 6, 6), w4a8()), seeded(4, 2, 6, 6, seed=9)
    qsdk.adaround(sim, [seeded(64, 2, 6, 6)], iterations=50, progress=False)
    output, codes = sim(x), sim.stored_floats(["conv1:weight"])
    with sim.training(freeze_bn_after=0) as live:
        torch.testing.assert_close(live(x).detach(), output)
    encoding = sim.encodings["conv1:weight"]
    now = sim.stored_floats(["conv1:weight"])["conv1:weight"]
    assert (encoding.quantize(now) == encoding.quantize(codes["conv1:weight"])).all()


def test_a_gamma_of_zero_keeps_its_layers_weight():
    model, x = net(), seeded(8, 2, 6, 6)
    with torch.no_grad():
        model.bn1.weight[1], model.bn1.bias[1] = 0, 1
    sim = calibrated(model, x)
    assert not sim.model.conv1.weight[1].any()
    with sim.training(freeze_bn_after=math.inf) as live:
        assert torch.equal(live.conv1.weight[1], model.conv1.weight[1])
        loss = live(x).square().mean()
        loss.backward()
        assert loss.isfinite()
        assert all(p.grad.isfinite().all() for p in live.parameters())
    with torch.no_grad():
        sim.model.conv1.weight[1] = 0.25  # written over: the channel is one that counts again
    output = sim(x)
    with sim.training(freeze_bn_after=0) as live:
        assert live.bn1.weight[1] > 0
        torch.testing.assert_close(live(x).detach(), output, rtol=1e-5, atol=1e-5)
