"""Frozen values: weights and biases that no verb changes, at either door."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_models import calibrated, randomized, seeded

import qsdk
from qsdk import ConfigError, calibrate, correct_bias, equalize, export, gptq, quantize, save, seq_mse, w4a8, w8a16
from qsdk.core.sims.state import put_back_on_error, read_frozen_values
from qsdk.verbs.doors.choose import Sim

X = seeded(16, 2, 6, 6)


class Net(nn.Module):
    """Two convolutions with BatchNorms, and a Linear: [N, 2, 6, 6] to [N, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.second, self.last, self.head = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return self.head(torch.relu(self.last(self.second(x))).flatten(1))


def sim_of_either_door(door: str, folder: Path) -> tuple[Sim, Any]:
    torch.manual_seed(0)
    model = randomized(Net())
    if door == "PyTorch":
        return calibrated(model, X, w4a8()), X
    path = str(folder / "float.onnx")
    torch.onnx.export(model, (X,), path, dynamo=True, verbose=False, input_names=["x"])
    sim = quantize(path, None, w4a8())
    calibrate(sim, [{"x": X.numpy()}], progress=False)
    return sim, {"x": X.numpy()}


VERBS: dict[str, Callable[[Sim, Any], Any]] = {
    "seq_mse": lambda sim, x: seq_mse(sim, [x], progress=False),
    "adaround": lambda sim, x: qsdk.adaround(sim, [x], progress=False),
    "gptq": lambda sim, x: gptq(sim, [x], progress=False),
    "correct_bias": lambda sim, x: correct_bias(sim, [x], progress=False),
    "correct_bias analytic": lambda sim, x: correct_bias(sim, method="analytic"),
    "equalize": lambda sim, x: equalize(sim, [x], progress=False),
    "smooth_quant": lambda sim, x: qsdk.smooth_quant(sim, [x], progress=False),
    "reestimate_batch_norm": lambda sim, x: qsdk.reestimate_batch_norm(sim, [x], progress=False),
}


def stored(sim: Sim) -> dict[str, Any]:
    sites = [site for site, decision in sim.plan.decisions.items() if decision.kind in ("weight", "bias")]
    return {site: value.copy() for site, value in sim.stored_floats(sites).items()}


@pytest.mark.spread(1)
@pytest.mark.parametrize("door", ["PyTorch", "ONNX"])
def test_every_verb_leaves_frozen_values_or_is_refused_by_name(door: str, tmp_path: Path):
    sim, x = sim_of_either_door(door, tmp_path)
    frozen = [site for site in stored(sim) if site.endswith(":weight")][1].rpartition(":")[0]
    assert sim.freeze(frozen, values=True) >= 3
    assert sim.frozen_values == {f"{frozen}:weight", f"{frozen}:bias"}
    start, done, refused = stored(sim), 0, {}
    for name, verb in VERBS.items():
        before = stored(sim)
        try:
            verb(sim, x)
            done += 1
        except ConfigError as error:
            refused[name] = str(error)
            assert all(np.array_equal(value, before[site]) for site, value in stored(sim).items()), name
        for site in sim.frozen_values:
            assert np.array_equal(stored(sim)[site], start[site]), name
    assert done >= 6, refused
    assert all(f"the values of {frozen}:" in message for message in refused.values()), refused
    assert any(not np.array_equal(value, start[site]) for site, value in stored(sim).items())


def trained(sim: qsdk.QuantSim, **options: Any) -> None:
    with sim.training(learn_scales=True, **options) as model:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)
        for _ in range(2):
            model(X).square().mean().backward()
            optimizer.step()


@pytest.mark.parametrize("options", [{}, {"freeze_bn_after": 10}])
def test_training_leaves_frozen_values_and_moves_the_others(options: dict[str, Any]):
    torch.manual_seed(0)
    sim = calibrated(randomized(Net()), X)
    sim.freeze("second", values=True)
    sim.freeze("first")
    start, encodings = stored(sim), sim.encodings
    trained(sim, **options)
    after = stored(sim)
    assert {site for site, value in after.items() if np.array_equal(value, start[site])} == {
        "second:weight",
        "second:bias",
    }
    assert sim.encodings["second:weight"] == encodings["second:weight"]
    assert all(parameter.requires_grad for parameter in sim.model.parameters())
    assert sim.unfreeze("second") >= 3
    trained(sim)
    assert not np.array_equal(stored(sim)["second:weight"], start["second:weight"])


@pytest.mark.slow
def test_a_part_of_a_parameter_and_a_recurrent_layer_are_held():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.rnn = nn.MultiheadAttention(8, 2, batch_first=True), nn.GRU(8, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(self.attention(x * 2, x + 1, x, need_weights=False)[0])[0]

    torch.manual_seed(0)
    x = seeded(2, 3, 8)
    sim = calibrated(Mixed(), x)
    sim.freeze("attention:in_proj_weight_q", values=True)
    sim.freeze("rnn", values=True)
    before = {name: value.clone() for name, value in sim.unwrap().state_dict().items()}
    with sim.training() as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1)
        model(x).square().mean().backward()
        optimizer.step()
    after = sim.unwrap().state_dict()
    assert torch.equal(after["attention.in_proj_weight"][:8], before["attention.in_proj_weight"][:8])
    assert not torch.equal(after["attention.in_proj_weight"][8:], before["attention.in_proj_weight"][8:])
    assert all(torch.equal(after[name], value) for name, value in before.items() if name.startswith("rnn"))


def test_float_values_freeze_and_the_verb_that_shifts_them_is_refused():
    torch.manual_seed(0)
    sim = calibrated(randomized(Net()), X, w8a16())
    assert sim.freeze("head:bias", values=True) == 1
    before = stored(sim)
    shifted = {"head:bias": before["head:bias"] + 1}
    with (
        pytest.raises(ConfigError, match=r"the values of head:bias are frozen, .* sim.unfreeze\('head:bias'\)"),
        put_back_on_error(sim, weights=True),
    ):
        sim.store_floats(shifted)
    assert all(np.array_equal(value, before[site]) for site, value in stored(sim).items())
    assert sim.unfreeze("head:bias") == 1
    with put_back_on_error(sim, weights=True):
        sim.store_floats(shifted)
    assert np.array_equal(stored(sim)["head:bias"], shifted["head:bias"])
    with pytest.raises(ConfigError, match="matches no weight and no bias"):
        sim.freeze("x:input", values=True)


def test_frozen_values_are_saved(tmp_path: Path):
    torch.manual_seed(0)
    model = randomized(Net())
    sim = calibrated(model, X)
    sim.freeze("head", values=True)
    save(sim, str(tmp_path / "sim.qsdk"))
    again = qsdk.load(str(tmp_path / "sim.qsdk"), model)
    assert again.frozen_values == sim.frozen_values == {"head:weight", "head:bias"}
    export(again, str(tmp_path / "m.onnx"))
    with pytest.raises(qsdk.FileFormatError, match=r"there freezes the values of 'nowhere:weight', which is no site"):
        read_frozen_values(["nowhere:weight"], sim.plan, "there")
