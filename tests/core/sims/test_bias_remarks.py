"""Biases that int32 does not hold well are reported at both doors, and the sim has the very bias that the file has."""

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import qsdk
from qsdk import Encoding

BATCH = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
BIAS = (3.0, 0.004, -0.003, 0.005, 0.002, 0.0)


class Two(nn.Module):
    """A layer whose weight has an outlier and whose bias is small, and one of ordinary weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.coarse, self.fine = nn.Linear(8, 6), nn.Linear(6, 4)
        with torch.no_grad():
            self.coarse.weight[0, 0] = 400.0
            self.coarse.bias.copy_(torch.tensor(BIAS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fine(self.coarse(x).relu())


class Tiny(Two):
    """The same with a channel of tiny weights behind which a bias of 5000 needs room."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.fine.weight[2] *= 1e-9
            self.fine.bias[2] = 5000.0


@pytest.fixture(params=["torch", "onnx"])
def calibrated(request, tmp_path):
    """Makes a calibrated sim of a module at a door; gives it and the report of calibrate."""

    def make(model, config):
        if request.param == "torch":
            sim, batch = qsdk.quantize(model, BATCH, config), BATCH
        else:
            torch.onnx.export(model.eval(), (BATCH,), tmp_path / "float.onnx", dynamo=True, verbose=False)
            sim, batch = qsdk.quantize(tmp_path / "float.onnx", None, config), BATCH.numpy()
        return sim, qsdk.calibrate(sim, [batch], progress=False)

    return make


def notes(report):
    return {row["site"]: row["note"] for row in report.rows if row.get("note")}


def biases(sim):
    """The sites of the coarse layer's bias and of the fine one's, in graph order."""
    return [site for site, decision in sim.plan.decisions.items() if decision.kind == "bias"]


def reason(sim, site):
    return next(row["reason"] for row in sim.coverage().rows if row["site"] == site)


@pytest.mark.slow
def test_a_bias_that_an_outlier_weight_wipes_out_is_reported_everywhere(calibrated, tmp_path):
    sim, report = calibrated(Two(), qsdk.w8a8().override("*", per_channel=False))
    coarse, fine = biases(sim)
    said = notes(report)
    assert set(said) == {coarse}
    assert said[coarse].startswith("4 of 6 values round to 0 (the largest is 0.005)")
    assert 'bias="float32"' in said[coarse]
    assert report.summary["bias_notes"] == 1
    assert reason(sim, coarse) == f"input scale x weight scale; {said[coarse]}"
    assert reason(sim, fine) == "input scale x weight scale"
    exported = qsdk.export(sim, tmp_path / "model.onnx")
    assert notes(exported) == said
    assert sim.encodings[coarse].fake_quantize(np.float32(BIAS))[1:].tolist() == [0.0] * 5  # the sim shows it


@pytest.mark.spread(1)
def test_scales_per_channel_save_the_other_channels_and_leave_nothing_to_report(calibrated):
    sim, report = calibrated(Two(), qsdk.w8a8())
    assert notes(report) == {}
    assert report.summary["bias_notes"] == 0
    kept = sim.encodings[biases(sim)[0]].fake_quantize(np.float32(BIAS))
    np.testing.assert_allclose(kept[1:], BIAS[1:], rtol=0.05, atol=1e-9)


@pytest.mark.spread(1)
def test_a_float_bias_is_the_remedy_and_stands_in_the_file_as_it_is(calibrated, tmp_path):
    sim, report = calibrated(Two(), qsdk.w8a8().override("*", per_channel=False, bias="float32"))
    assert notes(report) == {}
    qsdk.export(sim, tmp_path / "model.onnx")
    stored = [numpy_helper.to_array(t) for t in onnx.load(tmp_path / "model.onnx").graph.initializer]
    assert any(np.array_equal(value, np.float32(BIAS)) for value in stored)


def test_room_made_for_a_bias_is_reported_and_keeps_it(calibrated):
    sim, report = calibrated(Tiny(), qsdk.w8a8())
    fine = biases(sim)[1]
    assert notes(report) == {fine: "the weight's scale was raised in 1 of 4 channels, so that the bias fits int32"}
    kept = sim.encodings[fine].fake_quantize(np.float32([0, 0, 5000, 0]))
    assert kept[2] == pytest.approx(5000, rel=1e-6)


@pytest.mark.spread(1)
def test_a_bias_that_later_verbs_push_out_of_int32_is_reported_before_and_after_export(calibrated, tmp_path):
    sim, _ = calibrated(Tiny(), qsdk.w8a8())
    fine = biases(sim)[1]
    weight = sim.plan.decisions[fine].bias_of[1]
    state = sim.snapshot()
    narrow = state.own[weight].scale.copy()
    narrow[2] = 1e-12
    changed = {**state.own, weight: Encoding(qsdk.int8, narrow, 0, state.own[weight].axis)}
    sim.restore(type(state)(state.config, state.plan, changed))
    assert "1 of 4 values do not fit int32 and are clipped" in reason(sim, fine)
    assert set(notes(qsdk.export(sim, tmp_path / "model.onnx"))) == {fine}


@pytest.mark.spread(2)
@pytest.mark.parametrize("bias", ["int32", "float32"])
@pytest.mark.parametrize("per_channel", [True, False])
def test_the_file_has_the_bias_that_the_sim_simulates(calibrated, tmp_path, bias, per_channel):
    sim, _ = calibrated(Tiny(), qsdk.w8a8().override("*", per_channel=per_channel, bias=bias))
    path = tmp_path / "model.onnx"
    qsdk.export(sim, path)
    data = [BATCH] if hasattr(sim, "model") else [BATCH.numpy()]
    report = qsdk.check_parity(sim, path, data, progress=False)
    assert report.summary["passed"], str(report)
    rows = [row for row in report.rows if row["kind"] == "bias"]
    assert [row["max_lsb"] for row in rows] == [0.0, 0.0]
    again = qsdk.quantize(path, None, None)
    assert again.encodings == sim.encodings
    assert report.summary["sqnr_db"] > 60
