"""Trainable BatchNorms in ordinary training code: checkpoints, copies, torch.compile, recomputation, re-estimation."""

import copy
import io
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_models import BatchNormNet, calibrated, randomized, seeded
from trainable_norm_models import fresh, net, one_step, same, state

import qsdk
from qsdk import ConfigError, DataError, ModelError, QuantSim, w4a8, w8a8

X = seeded(8, 2, 6, 6)
TEST = seeded(4, 2, 6, 6, seed=99)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
    return [one_step(model, optimizer, seeded(8, 2, 6, 6, seed=k)) for k in numbers]


def optimizer_of(sim: QuantSim) -> torch.optim.Optimizer:
    return torch.optim.SGD(sim.parameter_groups(lr=0.05, scale_lr=0.01), momentum=0.9)


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_a_checkpoint_of_a_training_block_resumes_in_another_bit_for_bit(at: int):
    """Saved before or after the statistics were frozen."""
    options: dict[str, Any] = {"learn_scales": True, "freeze_bn_after": 2}
    with (sim := fresh()).training(**options) as live:
        optimizer = optimizer_of(sim)
        steps(live, optimizer, range(at))
        stored = io.BytesIO()
        torch.save((live.state_dict(), optimizer.state_dict()), stored)
        expected = steps(live, optimizer, range(at, 5))
    with (other := fresh(seed=5)).training(**options) as live:
        optimizer = optimizer_of(other)
        stored.seek(0)
        weights, momenta = torch.load(stored)
        live.load_state_dict(weights)
        optimizer.load_state_dict(momenta)
        assert live.bn1.training is (at < 2)
        assert steps(live, optimizer, range(at, 5)) == expected
    assert torch.equal(sim(TEST), other(TEST))


def test_a_checkpoint_of_a_training_block_loads_outside_but_a_folded_one_does_not_load_inside():
    sim, other = fresh(), fresh(seed=5)
    with sim.training(freeze_bn_after=2) as live:
        steps(live, optimizer_of(sim), range(3))
        inside = state(live)
        folded = state(other.model)
        before = state(live)
        with pytest.raises(ModelError, match=r"bn1 is folded into conv1 in this checkpoint.*load it before"):
            live.load_state_dict(folded)
        assert same(state(live), before)
    other.model.load_state_dict(inside)
    assert torch.equal(other(TEST), sim(TEST))
    with other.training(freeze_bn_after=2) as live:
        assert torch.equal(live.bn1.running_var, inside["bn1.running_var"])
        torch.testing.assert_close(live.conv1.weight.detach(), inside["conv1.weight"], rtol=3e-7, atol=1e-9)


@pytest.mark.slow
def test_a_saved_sim_trains_on_from_the_same_function(tmp_path):
    sim = fresh()
    with sim.training(freeze_bn_after=math.inf) as live:
        steps(live, optimizer_of(sim), range(5))
    qsdk.save(sim, str(tmp_path / "sim"))
    loaded = qsdk.load(str(tmp_path / "sim"), net())
    assert torch.equal(loaded(TEST), sim(TEST))
    with sim.training(freeze_bn_after=math.inf) as one, loaded.training(freeze_bn_after=math.inf) as other:
        # gamma and beta are known, the statistics are those of the float model: the weight is scaled to fit them
        torch.testing.assert_close(one.bn1.weight, other.bn1.weight)
        torch.testing.assert_close(one(TEST), other(TEST), rtol=0.02, atol=0.02)


def test_copies_and_pickles_made_inside_the_block_can_be_trained_on_their_own():
    sim = fresh()
    with sim.training(learn_scales=True, freeze_bn_after=math.inf) as live:
        steps(live, optimizer_of(sim), range(2))
        copied, pickled = copy.deepcopy(sim), pickle.loads(pickle.dumps(live))
        floats = sim.unwrap()
        output_of_copy = live.eval()(TEST)
        live.train()
        for other in (copy.deepcopy(live), pickled):
            assert torch.equal(other.eval()(TEST), live.eval()(TEST))
            other.train()
            live.train()
            other(X)
            assert not torch.equal(other.bn1.running_mean, live.bn1.running_mean)
        live.eval()
        output = live(TEST).detach()
    with sim.float_phase() as inner:
        torch.testing.assert_close(floats(TEST), inner(TEST))
    assert not any(isinstance(m, nn.BatchNorm2d) for m in floats.modules())
    assert not isinstance(copied.model.bn1, nn.BatchNorm2d), "a copied sim is not in the block"
    with copied.training(freeze_bn_after=0) as live:
        assert torch.equal(live(TEST), output_of_copy)
    assert torch.equal(sim(TEST), output)


def test_export_and_save_inside_the_block_write_the_folded_model_and_change_nothing(tmp_path):
    sim = fresh()
    with sim.training(learn_scales=True, freeze_bn_after=math.inf) as live:
        optimizer = optimizer_of(sim)
        steps(live, optimizer, range(2))
        before = state(live)
        qsdk.export(sim, str(tmp_path / "inside.onnx"))
        assert qsdk.check_parity(sim, str(tmp_path / "inside.onnx"), [TEST], progress=False).summary["passed"]
        assert same(state(live), before)
        assert live.bn1.training
        qsdk.save(sim, str(tmp_path / "sim"))
        expected = copy.deepcopy(live.eval())(TEST)
    qsdk.export(sim, str(tmp_path / "outside.onnx"))
    assert torch.equal(sim(TEST), expected)
    assert torch.equal(qsdk.load(str(tmp_path / "sim"), net())(TEST), expected)
    assert (tmp_path / "inside.onnx").read_bytes() == (tmp_path / "outside.onnx").read_bytes()


def test_a_snapshot_of_the_block_leads_back_inside_and_outside():
    sim = fresh()
    outside = sim.snapshot(weights=True), sim(TEST)
    with sim.training(freeze_bn_after=math.inf) as live:
        optimizer = torch.optim.SGD(live.parameters(), lr=0.05)
        steps(live, optimizer, range(2))
        inside, weight, mean = sim.snapshot(weights=True), live.conv1.weight.detach().clone(), live.bn1.running_mean + 0
        assert live.bn1.training
        output = live.eval()(TEST)
        live.train()
        expected = steps(live, torch.optim.SGD(live.parameters(), lr=0.05), range(2, 4))
        sim.restore(inside)
        assert torch.equal(live.eval()(TEST), output)
        assert torch.equal(live.bn1.running_mean, mean)
        torch.testing.assert_close(live.conv1.weight.detach(), weight, rtol=3e-7, atol=1e-9)
        live.train()
        again = steps(live, torch.optim.SGD(live.parameters(), lr=0.05), range(2, 4))
        torch.testing.assert_close(again, expected, rtol=1e-3, atol=1e-5)
    for snapshot, expected_output in ((inside, output), outside):
        sim.restore(snapshot)
        assert torch.equal(sim(TEST), expected_output)


def test_verbs_that_write_weights_are_refused_inside_the_block():
    sim = fresh()
    with sim.training(freeze_bn_after=1) as live:
        before = state(live)
        for verb in (qsdk.adaround, qsdk.equalize):
            with pytest.raises(ConfigError, match="leave the training block"):
                verb(sim, [X], progress=False)
        with pytest.raises(ConfigError, match="in a training block already"), sim.training():
            pass
        assert same(state(live), before)


class Recomputed(nn.Module):
    """A network whose activations may be computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.how = BatchNormNet(), dict[str, bool]()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.inner, x, **self.how) if self.how else self.inner(x)
        return found


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_recomputed_gradients_are_the_same_bit_for_bit(reentrant: bool):
    torch.manual_seed(0)
    model = randomized(Recomputed())
    found = []
    for how in ({}, {"use_reentrant": reentrant}):
        sim = calibrated(model, X)
        sim.model.how = how
        with sim.training(learn_scales=True, freeze_bn_after=math.inf) as live:
            live(X.clone().requires_grad_()).square().mean().backward()
            found.append({name: p.grad for name, p in live.named_parameters()})
            assert int(live.inner.bn1.num_batches_tracked) == (2 if how else 1)  # as any BatchNorm that is called again
    assert same(*found)


def test_accumulated_gradients_use_one_weight():
    """The factor in the weight follows the running variance from step to step, not from forward to forward."""
    sim = fresh(w4a8())
    with sim.training(freeze_bn_after=math.inf) as live:
        first, again = live(X).detach(), live(X).detach()
        assert torch.equal(first, again)
        optimizer = torch.optim.SGD(live.parameters(), lr=0.0)
        optimizer.step()
        assert not torch.equal(live(X).detach(), first)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile does that
def test_torch_compile_compiles_trainable_norms_once_and_once_more_when_they_freeze():
    torch._dynamo.reset()
    sims = [fresh() for _ in range(2)]
    torch._dynamo.utils.counters.clear()
    options: dict[str, Any] = {"learn_scales": True, "freeze_bn_after": 2}
    with sims[0].training(**options) as live, sims[1].training(**options) as eager:
        compiled = torch.compile(live, fullgraph=True, backend="aot_eager")
        found = steps(compiled, optimizer_of(sims[0]), range(4))
        expected = steps(eager, optimizer_of(sims[1]), range(4))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(sims[0](TEST), sims[1](TEST), rtol=1e-4, atol=1e-5)


def test_a_model_quantized_in_place_keeps_its_objects():
    model = net()
    named, norm = dict(model.named_parameters()), model.bn1
    sim = calibrated(model, X, in_place=True)
    with sim.training(freeze_bn_after=2) as live:
        assert live.bn1 is norm
        inside = dict(live.named_parameters())
        assert inside.keys() == named.keys()
        assert all(named[name] is parameter for name, parameter in inside.items())


class OwnPadding(nn.Conv2d):
    """A convolution with a forward of its own, as `Conv2dSame` of timm."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (1, 1, 1, 1)), self.weight, self.bias)


class Shared(nn.Module):
    """Layers that have two paths each."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)
        self.features = nn.Sequential(self.conv, self.bn, nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.features(x)
        return found


@pytest.mark.slow
def test_norms_of_layers_with_their_own_forward_or_several_paths_can_be_trained():
    own = nn.Sequential(OwnPadding(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    for model in (own, Shared()):
        sim = calibrated(randomized(model), X)
        output = sim(TEST)
        with sim.training(freeze_bn_after=1) as live:
            assert isinstance(live.bn if model is not own else live[1], nn.BatchNorm2d)
            assert torch.equal(live.eval()(TEST), output)
            live.train()
            steps(live, optimizer_of(sim), range(3))
            output = live.eval()(TEST)
        assert torch.equal(sim(TEST), output)


def test_norms_that_stay_folded_are_named():
    model = nn.Sequential(
        nn.BatchNorm2d(2), nn.Conv2d(2, 3, 1), nn.ReLU(), OwnPadding(3, 3, 3), nn.BatchNorm2d(3), nn.Flatten()
    )
    sim = calibrated(randomized(model), X)
    summary = sim.coverage().summary
    assert summary["0 (BatchNorm) stays folded in training"] == "it stands before 1"
    assert "a forward of its own" in summary["4 (BatchNorm) stays folded in training"]
    with sim.training(freeze_bn_after=1) as live:
        assert not any(isinstance(m, nn.BatchNorm2d) for m in live.modules())
        steps(live, optimizer_of(sim), range(1))


@pytest.mark.slow
def test_synchronized_batch_norms_can_be_trained():
    sim = calibrated(nn.SyncBatchNorm.convert_sync_batchnorm(net()), X)
    with sim.training(freeze_bn_after=1) as live:
        assert isinstance(live.bn1, nn.SyncBatchNorm)
        steps(live, optimizer_of(sim), range(2))
        output = live.eval()(TEST)
    assert torch.equal(sim(TEST), output)


def test_averaged_models_get_their_statistics_with_torchs_own_function():
    sim = fresh()
    with sim.training(freeze_bn_after=math.inf) as live:
        averaged = torch.optim.swa_utils.AveragedModel(live)
        steps(live, optimizer_of(sim), range(2))
        averaged.update_parameters(live)
        batches = [seeded(8, 2, 6, 6, seed=k) for k in range(3)]
        torch.optim.swa_utils.update_bn(batches, averaged)
        assert int(averaged.module.bn1.num_batches_tracked) == 3
        live.load_state_dict(averaged.module.state_dict())
        output = averaged.eval()(TEST)
    assert torch.equal(sim(TEST), output)


# --- re-estimation ----------------------------------------------------------------------------------------------------

RAGGED = [seeded(n, 2, 6, 6, seed=n) * 1.5 + 0.5 for n in (5, 3, 1, 7)]


def inputs_of_norms(sim: QuantSim) -> list[np.ndarray[Any, Any]]:
    """What the live BatchNorms get in the simulation, over all the data as one: from the sites of its exact forward."""
    found = {"bn1": [], "bn2": []}
    weights = {site: torch.from_numpy(q) for site, q in sim_weights(sim).items()}
    with sim.captured() as seen:
        for batch in RAGGED:
            sim.run(batch)
            first = torch.from_numpy(seen["relu.0:output"])
            given = {"bn1": torch.from_numpy(seen["x:input"]), "bn2": first}
            for norm, layer, groups in (("bn1", sim.model.conv1, 1), ("bn2", sim.model.conv2, 2)):
                module = getattr(sim.model, norm)
                factor = module.weight * torch.rsqrt(module.running_var + module.eps)
                weight = weights[norm] / factor.detach().reshape(-1, 1, 1, 1)
                found[norm].append(F.conv2d(given[norm], weight, layer.bias, groups=groups).detach().numpy())
    return [np.concatenate(found[norm]) for norm in ("bn1", "bn2")]


def sim_weights(sim: QuantSim) -> dict[str, np.ndarray[Any, Any]]:
    found = {}
    for norm, layer in (("bn1", "conv1:weight"), ("bn2", "conv2:weight")):
        encoding = sim.encodings[layer]
        codes = encoding.quantize(sim.stored_floats([layer])[layer]).astype(np.float32)
        found[norm] = codes * encoding.scale.reshape(-1, 1, 1, 1)
    return found


@pytest.mark.parametrize("learn", [False, True])
def test_reestimated_statistics_of_trained_norms_are_those_of_all_the_data_and_integers_stay(learn: bool):
    sim = fresh(w4a8())
    before, output, snapshot = state(sim.model), sim(TEST), sim.snapshot(weights=True)
    with sim.training(freeze_bn_after=math.inf, learn_scales=learn) as live:
        steps(live, optimizer_of(sim), range(3))
        codes = {site: sim.encodings[site].quantize(x) for site, x in sim.stored_floats(LAYERS).items()}
        report = qsdk.reestimate_batch_norm(sim, RAGGED, progress=False)
        live.eval()
        for norm, x in zip((live.bn1, live.bn2), inputs_of_norms(sim), strict=True):
            np.testing.assert_allclose(norm.running_mean, x.mean((0, 2, 3), dtype=np.float64), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(norm.running_var, x.var((0, 2, 3), dtype=np.float64, ddof=1), rtol=1e-4)
        for site, x in sim.stored_floats(LAYERS).items():
            assert (sim.encodings[site].quantize(x) == codes[site]).all(), site
        assert [(row["site"], row["note"]) for row in report.rows] == [("bn1", ""), ("bn2", "")]
        assert all(row["error_before"] > 0.1 for row in report.rows)
        again = qsdk.reestimate_batch_norm(sim, [torch.cat(RAGGED)], progress=False)
        assert max(row["error_before"] for row in again.rows) < 1e-2
        inside = live(TEST)
    assert torch.equal(sim(TEST), inside)
    sim.restore(snapshot)
    assert same(state(sim.model), before)
    assert torch.equal(sim(TEST), output)


LAYERS = ("conv1:weight", "conv2:weight")


def test_scales_that_cannot_follow_are_named():
    config = w8a8().override("conv1", per_channel=False)
    sim = calibrated(net(), RAGGED[0], config)
    scale = sim.encodings["conv1:weight"].scale.copy()
    with sim.training(freeze_bn_after=math.inf):
        report = qsdk.reestimate_batch_norm(sim, RAGGED, progress=False)
    notes = {row["site"]: row["note"] for row in report.rows}
    assert notes == {"bn1": "its layer's weight keeps its scales, so stored integers change", "bn2": ""}
    assert (report.summary["layers"], report.summary["left"]) == (2, 0)
    assert np.array_equal(sim.encodings["conv1:weight"].scale, scale)


def test_a_failed_re_estimation_leaves_the_block_as_it_was():
    sim = fresh()
    with sim.training(freeze_bn_after=math.inf, learn_scales=True) as live:
        steps(live, optimizer_of(sim), range(2))
        before, encodings = state(live), sim.encodings
        with pytest.raises(DataError, match="NaN"):
            qsdk.reestimate_batch_norm(sim, [*RAGGED, RAGGED[0] * math.nan], progress=False)
        assert same(state(live), before)
        assert sim.encodings == encodings
        assert live.bn1.training
        steps(live, optimizer_of(sim), range(2))
