"""Ranges learned by gradient."""

import copy

import numpy as np
import pytest
import torch
from observed_model import onnx_model
from torch import nn

import qsdk
from qsdk import CalibrationError, ConfigError, DataError, ModelError
from torch_bridge.quantizers.fake_quant import FakeQuantGrid, fake_quantize


class Outliers(nn.Module):
    """What one token in 16 sends into a LayerNorm is a hundred times what the others do."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x):
        return self.head(self.norm(self.layer(x)))


def batches(count=8, seed=0, tokens=16):
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(4, tokens, 16, generator=generator) for _ in range(count)]
    for x in found:
        x[:, 0, 0] = 400
    return found


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    network = Outliers().eval()
    with torch.no_grad():
        network.layer.weight[:, 0] = 0
        network.layer.weight[5, 0] = 0.5  # one channel of one token
    return network


@pytest.fixture(scope="module")
def quantized(model):
    # the input is given at 16 bits: the tensor to choose a range for is the LayerNorm's
    return qsdk.quantize(model, batches(1)[0], qsdk.w8a8().override("*", input="uint16"))


@pytest.fixture
def sim(quantized):
    for quantizer in quantized.quantizers.values():
        quantizer.frozen = False
    qsdk.calibrate(quantized, batches(), progress=False)
    return quantized


def error(sim, model, seed=9):
    x = batches(1, seed)[0]
    with torch.no_grad():
        return float((sim(x) - model(x)).square().sum() / model(x).square().sum())


def state(sim):
    return {site: (e.scale.tobytes(), e.zero_point.tobytes(), e.frozen) for site, e in sim.encodings.items()}


@pytest.mark.slow
def test_outliers_before_a_norm_are_cut_off(sim, model):
    before = error(sim, model)
    report = qsdk.train.tune_ranges(sim, batches(), steps=40, progress=False)
    assert error(sim, model) < 0.5 * before
    summary = report.to_dict()["summary"]
    assert summary["kept"]
    assert summary["error_after"] < 0.5 * summary["error_before"]
    assert summary["passes"] > 0
    rows = {row["site"]: row for row in report.to_dict()["rows"]}
    assert rows["layer:output"]["high"] < 0.5 * rows["layer:output"]["high_before"]
    high = float(sim.encodings["layer:output"].high[0])
    assert high == pytest.approx(rows["layer:output"]["high"])


def test_the_same_seed_gives_the_same_ranges(sim):
    found = []
    for _ in range(2):
        qsdk.calibrate(sim, batches(), progress=False)
        qsdk.train.tune_ranges(sim, batches(), steps=5, progress=False, seed=3)
        found.append(state(sim))
    assert found[0] == found[1]


def test_only_ranges_of_activations_change(sim):
    weights = copy.deepcopy(sim.model.state_dict())
    sim.freeze("norm*")
    before = state(sim)
    qsdk.train.tune_ranges(sim, batches(), steps=5, progress=False)
    after = state(sim)
    changed = {site for site in before if before[site] != after[site]}
    assert "layer:output" in changed
    assert changed <= {site for site, d in sim.plan.decisions.items() if d.kind not in ("weight", "bias")} | {
        site for site, d in sim.plan.decisions.items() if d.bias_of is not None
    }
    assert before["norm:output"] == after["norm:output"]
    assert all(
        torch.equal(value, weights[name])
        for name, value in sim.model.state_dict().items()
        if "scale" not in name and "zero" not in name
    )
    assert all(parameter.requires_grad for parameter in sim.model.parameters())


def test_learned_ranges_that_are_no_better_are_discarded(sim):
    before = state(sim)
    report = qsdk.train.tune_ranges(sim, batches(), steps=2, lr=40.0, progress=False)
    assert not report.to_dict()["summary"]["kept"]
    assert state(sim) == before


class Stop(BaseException):
    pass


@pytest.mark.parametrize("raised", [Stop, ValueError])
def test_an_interrupted_run_changes_nothing(sim, raised):
    before, calls = state(sim), []

    def forward(model, batch):
        calls.append(1)
        if len(calls) == 12:
            raise raised
        return model(batch)

    with pytest.raises(raised):
        qsdk.train.tune_ranges(sim, batches(), steps=20, forward=forward, progress=False)
    assert state(sim) == before
    assert all(parameter.requires_grad for parameter in sim.model.parameters())


def test_refusals(sim, model):
    with pytest.raises(ConfigError, match="steps=0 must be 1 at least"):
        qsdk.train.tune_ranges(sim, batches(), steps=0)
    with pytest.raises(ConfigError, match=r"lr=0 positive"):
        qsdk.train.tune_ranges(sim, batches(), lr=0)
    with pytest.raises(DataError, match="the data holds no batch"):
        qsdk.train.tune_ranges(sim, [], progress=False)
    with pytest.raises(CalibrationError, match=r"call qsdk\.calibrate\(sim, batches\) first"):
        qsdk.train.tune_ranges(qsdk.quantize(model, batches(1)[0], qsdk.w8a8()), batches())
    sim.freeze("*")
    with pytest.raises(CalibrationError, match="no activation has a range that may be learned"):
        qsdk.train.tune_ranges(sim, batches(), progress=False)


def test_an_onnx_model_has_no_gradients():
    with pytest.raises(ModelError, match="tune_ranges needs gradients, which an ONNX model has not"):
        qsdk.train.tune_ranges(qsdk.quantize(onnx_model(), None, qsdk.w8a8()), [np.zeros((1, 3, 8, 8), np.float32)])


def test_gradients_are_those_of_the_straight_through_formula():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200, generator=generator, dtype=torch.float64) * 3
    upstream = torch.randn(200, generator=generator, dtype=torch.float64)
    found = []
    for exact in (True, False):
        values = [x.clone(), torch.tensor([0.11], dtype=torch.float64), torch.tensor([6.0], dtype=torch.float64)]
        for value in values:
            value.requires_grad_()
        if exact:
            y = fake_quantize(*values, FakeQuantGrid(0, 15))
        else:
            v, scale, zero_point = values
            ratio = v / scale
            rounded = ratio + (ratio.round() - ratio).detach()
            codes = rounded + zero_point
            inside = (codes.detach() >= 0) & (codes.detach() <= 15)  # what the gradient passes is no version of clamp's
            y = (torch.where(inside, codes, codes.detach().clamp(0, 15)) - zero_point) * scale
        y.backward(upstream)
        found.append([y.detach(), *(value.grad for value in values)])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other)
