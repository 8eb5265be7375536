"""One scale per channel for activations that only sums and layer normalizations read."""

from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from float_files import float_onnx
from torch import Tensor, nn

import qsdk
from qsdk.core.numerics.spec import PerChannel, PerTensor

WANTED = qsdk.w8a8().override("*", per_channel_activations=True)
COMPUTED = ("input", "activation", "output")
METHODS = ("min_max", "moving_average", "mse")


class PostNorm(nn.Module):
    """Two residual sums with a normalization behind them; one channel is far larger than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 4)
        self.norm, self.last = nn.LayerNorm(8), nn.LayerNorm(8)
        self.mix = nn.Linear(8, 8)
        with torch.no_grad():
            self.down.weight[3] *= 100
            self.norm.weight[3] /= 100

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.down(torch.relu(self.up(x))))
        found: Tensor = self.head(self.last(x + self.mix(x)))
        return found


CHANNELS = ["down:output", "add.0:output", "mix:output", "add.1:output"]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return PostNorm().eval()


@pytest.fixture(scope="module")
def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return list(torch.randn(4, 16, 5, 8, generator=generator))


@pytest.fixture(scope="module")
def float_model(model: nn.Module, batches: list[Tensor]) -> onnx.ModelProto:
    return float_onnx(model, (batches[0],))


def calibrated(model: Any, batches: list[Tensor], method: str = "min_max", config: qsdk.QuantConfig = WANTED) -> Any:
    sim = qsdk.quantize(model, None if isinstance(model, onnx.ModelProto) else batches[0], config)
    qsdk.calibrate(sim, batches, method=method, progress=False)
    return sim


def sites(sim: Any) -> dict[str, Any]:
    """Granularity of each activation, by site."""
    return {d.site: d.spec.granularity for d in sim.plan.decisions.values() if d.spec and d.kind in COMPUTED}


@pytest.mark.slow
def test_only_what_sums_and_norms_read_has_channels(model: nn.Module, batches: list[Tensor]) -> None:
    found = sites(qsdk.quantize(model, batches[0], WANTED))
    assert {site for site, granularity in found.items() if granularity == PerChannel(2)} == set(CHANNELS)
    assert found["norm:output"] == PerTensor()  # a Linear reads it too
    assert found["head:output"] == found["x:input"] == PerTensor()  # they enter and leave the model


@pytest.mark.slow
def test_a_rule_can_take_it_back(model: nn.Module, batches: list[Tensor]) -> None:
    config = WANTED.override("mix", per_channel_activations=False)
    found = sites(qsdk.quantize(model, batches[0], config))
    assert found["mix:output"] == PerTensor()
    assert found["down:output"] == PerChannel(2)
    assert qsdk.QuantConfig.from_dict(config.to_dict()) == config


@pytest.mark.slow
def test_attention_keeps_one_scale_for_each_of_its_tensors() -> None:
    torch.manual_seed(0)
    attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    found = sites(qsdk.quantize(attention, torch.randn(2, 5, 8), WANTED))
    channels = [site for site, granularity in found.items() if granularity != PerTensor()]
    assert len(channels) == 3  # two sums and what is added in the second; the first adds what a Transpose moved
    assert not any("softmax" in site or "matmul" in site for site in channels)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_each_channel_has_the_range_of_its_extremes(model: nn.Module, batches: list[Tensor], method: str) -> None:
    sim = calibrated(model, batches, method)
    with torch.no_grad():
        rows = [model.down(torch.relu(model.up(x))) for x in batches]  # type: ignore[operator]
    low, high = (np.stack([getattr(x, end)((0, 1)).numpy() for x in rows]) for end in ("amin", "amax"))
    if method == "moving_average":
        low, high = (reduce(lambda mean, new: mean + 0.1 * (new - mean), end) for end in (low, high))
    else:
        low, high = low.min(0), high.max(0)
    scale = (np.maximum(high, 0) - np.minimum(low, 0)) / 255
    np.testing.assert_allclose(sim.encodings["down:output"].scale, scale, rtol=1e-5)


@pytest.mark.slow
def test_both_doors_plan_and_find_the_same(
    model: nn.Module, batches: list[Tensor], float_model: onnx.ModelProto
) -> None:
    ours, theirs = calibrated(model, batches), calibrated(float_model, batches)
    found = [e for e in theirs.encodings.values() if e.axis == 2 and e.dtype == qsdk.uint8]
    assert len(found) == len(CHANNELS)
    for site in CHANNELS:
        wanted = ours.encodings[site]
        assert any(np.allclose(e.scale, wanted.scale, rtol=1e-4) for e in found), site


@pytest.mark.slow
def test_a_large_channel_costs_the_others_nothing(model: nn.Module, batches: list[Tensor]) -> None:
    with torch.no_grad():
        exact = torch.cat([model(x) for x in batches])

    def error(config: qsdk.QuantConfig) -> float:
        sim = calibrated(model, batches, config=config)
        with torch.no_grad():
            return float((torch.cat([sim(x) for x in batches]) - exact).square().mean())

    assert error(WANTED) < error(qsdk.w8a8()) / 5


@pytest.mark.parametrize("door", ["module", "onnx"])
def test_the_runtime_computes_the_same_and_the_file_opens_again(
    model: nn.Module, batches: list[Tensor], float_model: onnx.ModelProto, door: str, tmp_path: Path
) -> None:
    sim = calibrated(model if door == "module" else float_model, batches)
    path = tmp_path / "model.onnx"
    qsdk.export(sim, path)
    parity = qsdk.check_parity(sim, path, batches[:1], progress=False)
    assert parity.summary["passed"]
    assert parity.summary["activations_max_lsb"] == 0
    again = qsdk.quantize(path, None, None)
    assert {s: e for s, e in again.encodings.items() if e.axis == 2} == {
        s: e for s, e in sim.encodings.items() if e.axis == 2
    }
    qsdk.export(again, tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == path.read_bytes()
    with pytest.raises(qsdk.IntegerError, match=r"more than one scale; quantize activations per tensor"):
        qsdk.to_integer(path, tmp_path / "integer.onnx")


@pytest.mark.slow
def test_encodings_and_sims_go_through_files(model: nn.Module, batches: list[Tensor], tmp_path: Path) -> None:
    sim = calibrated(model, batches)
    qsdk.save(sim, tmp_path / "sim.qsdk")
    assert qsdk.load(tmp_path / "sim.qsdk", PostNorm().eval()).encodings == sim.encodings
    qsdk.save_encodings(sim, tmp_path / "own.json")
    fresh = qsdk.quantize(model, batches[0], WANTED)
    qsdk.load_encodings(fresh, tmp_path / "own.json")
    assert fresh.encodings == sim.encodings


@pytest.mark.slow
def test_what_a_batch_holds_that_is_not_finite_is_named(model: nn.Module, batches: list[Tensor]) -> None:
    sim = qsdk.quantize(model, batches[0], WANTED.skip("x"))
    bad = batches[1].clone()
    bad[0, 0, 0] = float("inf")
    with pytest.raises(qsdk.DataError, match="batch 1"):
        qsdk.calibrate(sim, [batches[0], bad], progress=False)
    assert not sim.quantizers["add.0:output"].calibrated


@pytest.mark.slow
def test_each_channels_scale_is_trained(model: nn.Module, batches: list[Tensor]) -> None:
    sim = calibrated(model, batches)
    assert sim.encodings["add.0:output"].scale.shape == (8,)
    before = sim.encodings["add.0:output"].scale.copy()
    with sim.training(learn_scales=True) as trained:
        optimizer = torch.optim.SGD(sim.parameter_groups(lr=1e-2, scale_lr=10.0))
        trained(batches[0]).square().mean().backward()
        optimizer.step()
    assert (sim.encodings["add.0:output"].scale != before).sum() > 4
