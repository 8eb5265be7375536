"""`reestimate_batch_norm`: statistics over all the data, in the simulation, each after those before it."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from islands import DOORS, everything, outputs, sim_at
from torch import nn
from torch_models import calibrated, randomized

from qsdk import DataError, calibrate, float16, quantize, reestimate_batch_norm, w8a8
from qsdk.core.sims.state import owns_encoding
from torch_bridge.sim import plain_copy

both = pytest.mark.parametrize("door", DOORS)
RNG = np.random.default_rng(11)
RAGGED = [(RNG.normal(size=(n, 3, 6, 6)) * 1.5 + 0.5).astype(np.float32) for n in (5, 3, 1, 7)]


def given(door, batches=RAGGED):
    return [torch.from_numpy(batch) for batch in batches] if door == "torch" else list(batches)


def statistics(sim):
    """(mean, variance) of both BatchNorms."""
    if hasattr(sim, "model"):
        norms = (sim.model.bn1, sim.model.bn2)
        return [(norm.running_mean.numpy().copy(), norm.running_var.numpy().copy()) for norm in norms]
    return [(sim.stored_by_name(f"bn{k}.running_mean"), sim.stored_by_name(f"bn{k}.running_var")) for k in (1, 2)]


def inputs_of_norms(sim, door):
    """What the BatchNorms read in the simulation as it is now, over all the data as one."""
    if door == "onnx":
        parts = [sim.capture(batch) for batch in RAGGED]
        return [np.concatenate([part[f"conv{k}:output"] for part in parts]) for k in (1, 2)]
    found = {1: [], 2: []}
    handles = [
        norm.register_forward_pre_hook(lambda _, args, k=k: found[k].append(args[0].numpy().copy()))
        for k, norm in ((1, sim.model.bn1), (2, sim.model.bn2))
    ]
    for batch in given(door):
        sim.run(batch)
    for handle in handles:
        handle.remove()
    return [np.concatenate(found[k]) for k in (1, 2)]


@pytest.mark.spread(1)
@both
def test_reestimated_statistics_are_those_of_all_the_data_and_can_be_undone(door):
    sim = sim_at(door)
    before, old, given_outputs = everything(sim), statistics(sim), outputs(sim)
    state = sim.snapshot(weights=True)
    report = reestimate_batch_norm(sim, given(door), progress=False)
    new = statistics(sim)
    for (mean, var), x in zip(new, inputs_of_norms(sim, door), strict=True):
        # the second one's input depends on the first one's new statistics: what is met now is what was counted
        np.testing.assert_allclose(mean, x.mean((0, 2, 3), dtype=np.float64), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(var, x.var((0, 2, 3), dtype=np.float64, ddof=1), rtol=1e-5)
    assert everything(sim) == before
    assert not np.array_equal(outputs(sim), given_outputs)
    assert (report.summary["layers"], report.summary["left"]) == (2, 0)
    assert [row["error_before"] > 0.1 for row in report.rows] == [True, True]
    sim.restore(state)
    for one, other in zip(old, statistics(sim), strict=True):
        assert all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))
    assert np.array_equal(outputs(sim), given_outputs)


@both
def test_the_split_into_batches_does_not_change_statistics_and_a_second_pass_changes_nothing(door):
    one, other = sim_at(door), sim_at(door)
    reestimate_batch_norm(one, given(door), progress=False)
    reestimate_batch_norm(other, given(door, [np.concatenate(RAGGED)]), progress=False)
    for left, right in zip(statistics(one), statistics(other), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)
    found = statistics(one)
    again = reestimate_batch_norm(one, given(door), progress=False)
    np.testing.assert_array_equal(found, statistics(one))
    assert max(row["error_before"] for row in again.rows) < 1e-2  # the unbiased variance is not quite that of the data


@both
def test_float16_norms_and_skipped_layers_are_estimated_too(door):
    sim = sim_at(door)
    sim.set_precision("bn*", float16)
    sim.set_precision("conv2", "float32")
    reestimate_batch_norm(sim, given(door), progress=False)
    assert all(np.isfinite(values).all() for pair in statistics(sim) for values in pair)


@both
def test_the_simulation_runs_once(door, monkeypatch):
    sim = sim_at(door)
    calls = []
    if door == "torch":
        sim.model.conv1.register_forward_hook(lambda *_: calls.append(sim.runtime.phase))
        reestimate_batch_norm(sim, given(door), progress=False)
        assert sorted(calls) == ["float", *["quantize"] * len(RAGGED)]  # and the first batch in float, to begin with
        return
    import onnx_backend.walk.batch_norm_statistics as module
    import onnx_backend.walk.run as runs

    monkeypatch.setattr(module, "_seconds_in_float", lambda *_: 1.0)
    run = runs.run_session
    monkeypatch.setattr(runs, "run_session", lambda *args: calls.append(1) or run(*args))
    reestimate_batch_norm(sim, given(door), progress=False)
    assert len(calls) == 2 * len(RAGGED)  # one section up to each BatchNorm


@both
@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ("nan", DataError, "NaN"),
        ("shape", DataError, "batch 2"),
        ("empty", DataError, "data|batch"),
        ("stop", KeyboardInterrupt, "stop"),
    ],
)
def test_a_failure_leaves_the_sim_as_it_was(door, bad, error, message):
    sim = sim_at(door)
    before, old = everything(sim), statistics(sim)

    def batches():
        for number, batch in enumerate(given(door) if bad != "empty" else []):
            if number == 2 and bad == "stop":
                raise KeyboardInterrupt("stop")
            yield {"nan": batch * np.float32(np.nan), "shape": batch[:, :2]}.get(bad, batch) if number == 2 else batch

    with pytest.raises(error, match=message):
        reestimate_batch_norm(sim, batches(), progress=False)
    assert everything(sim) == before
    for one, other in zip(old, statistics(sim), strict=True):
        assert all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))
    if door == "torch":
        assert not any(module._forward_pre_hooks for module in sim.model.modules())


def test_one_value_has_no_variance():
    sim = calibrated(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4)).eval(), torch.randn(4, 3))
    with pytest.raises(DataError, match=r"2 saw 1 values per channel, which have no variance.*\(batches 0\)"):
        reestimate_batch_norm(sim, [torch.randn(1, 3)], progress=False)


class Twice(nn.Module):
    """A BatchNorm that is called twice, one without statistics and one that is never called."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.free, self.spare = nn.BatchNorm1d(4, track_running_stats=False), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.free(self.norm(torch.relu(self.norm(torch.relu(self.linear(x))))))


@pytest.mark.slow
def test_a_norm_called_twice_counts_both_calls_and_skipped_norms_have_a_reason():
    torch.manual_seed(0)
    batches = [torch.randn(n, 4) for n in (6, 3)]
    sim = calibrated(Twice().eval(), batches[0])
    seen = []
    handle = sim.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    report = reestimate_batch_norm(sim, batches, progress=False)
    handle.remove()
    seen = seen[-4:]  # in front of these, the model was tried on one batch
    assert [len(x) for x in seen] == [6, 3, 6, 3]  # both calls count, the second as it is after the first was estimated
    mean = sim.model.norm.running_mean
    torch.testing.assert_close(mean, torch.cat(seen).mean(0))
    assert float(mean.min()) >= 0
    notes = {row["site"]: row["note"] for row in report.rows}
    assert notes == {"norm": "", "free": "it keeps no running statistics", "spare": "no batch reaches it"}


def test_a_shared_and_a_computed_statistic_are_left_with_the_reason():
    sim = sim_at("onnx")
    marked = sim._marked.graph
    norms = [node for node in marked.node if node.op_type == "BatchNormalization"]
    norms[1].input[3] = norms[0].input[3]
    state = sim.snapshot()
    sim.restore(replace(state))
    report = reestimate_batch_norm(sim, given("onnx"), progress=False)
    assert {row["site"]: row["note"] for row in report.rows} == {
        "bn1": "",
        "bn2": "it shares its statistics with another one",
    }
    assert isinstance(marked.initializer[0], onnx.TensorProto)


# --- folding later ------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """Two convolutions, each with a BatchNorm behind it, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, groups=2), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        return self.fc(torch.relu(self.bn2(self.conv2(x))).mean((2, 3)))


@pytest.mark.slow
def test_a_norm_behind_a_trained_quantized_layer_is_folded_into_its_scale():
    """What a BatchNorm multiplies with goes into scale and weight, whatever its sign: the codes are the same."""
    torch.manual_seed(4)
    model, x = randomized(Normed()), torch.from_numpy(RAGGED[0])
    with torch.no_grad():
        model.bn1.weight[:3] *= -model.bn1.weight[:3].sign()  # these are negative
        model.bn2.weight[3:5] *= -model.bn2.weight[3:5].sign()
    config = w8a8().override("conv*", activation="float32")  # conv and norm are one op once they are folded
    sim = quantize(model, x, config, fold_batch_norm=False)
    calibrate(sim, given("torch"), progress=False)
    with sim.training(learn_scales=True) as trained:
        optimizer = torch.optim.SGD(sim.parameter_groups(lr=1e-3))
        for batch in given("torch")[:2]:
            optimizer.zero_grad()
            trained(batch).square().mean().backward()
            optimizer.step()
    reestimate_batch_norm(sim, given("torch"), progress=False)
    folded = quantize(plain_copy(sim, in_float=False), x, w8a8())  # with the statistics that were estimated last
    assert folded.folded == ("bn1", "bn2")
    own = dict(sim.snapshot().own)
    for layer, norm in (("conv1", sim.model.bn1), ("conv2", sim.model.bn2)):
        factor = (norm.weight / torch.sqrt(norm.running_var + norm.eps)).detach().numpy()
        old = own[f"{layer}:weight"]
        own[f"{layer}:weight"] = replace(old, scale=old.scale * abs(factor))
        codes = old.quantize(sim.stored_floats([f"{layer}:weight"])[f"{layer}:weight"]).astype(np.int32)
        new = own[f"{layer}:weight"].quantize(folded.stored_floats([f"{layer}:weight"])[f"{layer}:weight"])
        difference = np.abs(codes * np.sign(factor).astype(np.int32)[:, None, None, None] - new)
        assert (factor < 0).sum() >= 2
        assert difference.max() <= 1  # -128 has no counterpart
        assert (difference == 0).mean() > 0.99
    folded.restore(replace(folded.snapshot(), own={site: own[site] for site in owned(folded)}))
    step = float(sim.encodings["fc:output"].scale[0])
    for batch in given("torch"):
        assert float((sim.run(batch) - folded.run(batch)).abs().max()) <= 1.001 * step


def owned(sim):
    return [site for site, decision in sim.plan.decisions.items() if owns_encoding(decision)]
