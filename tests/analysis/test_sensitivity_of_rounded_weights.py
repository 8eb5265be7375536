"""`qsdk.sensitivity` after verbs that change stored values: it names them, and counts from the model as given."""

import math

import numpy as np
import pytest
import torch
from islands import DOORS
from onnx import helper
from qdq_models import make_model
from torch import nn

import qsdk

ROUNDING = ("adaround", "gptq")


@pytest.fixture(scope="module")
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.randn(256, 8, generator=torch.Generator().manual_seed(1))


def as_onnx(model):
    stored = {f"{name[2]}{name[0]}": value.detach().numpy() for name, value in model.named_parameters()}
    nodes = [
        helper.make_node("Gemm", ["x", "w0", "b0"], ["h"], "0", transB=1),
        helper.make_node("Relu", ["h"], ["r"], "1"),
        helper.make_node("Gemm", ["r", "w2", "b2"], ["y"], "2", transB=1),
    ]
    return make_model(nodes, {"x": ["n", 8]}, {"y": ["n", 4]}, stored)


def calibrated(model, x, door):
    """Return a sim, its data, and a function that measures it against the model as it was given."""
    data = list(x.split(64)) if door == "torch" else np.split(x.numpy(), 4)
    sim = qsdk.quantize(model if door == "torch" else as_onnx(model), data[0] if door == "torch" else None, qsdk.w4a8())
    qsdk.calibrate(sim, data, progress=False)
    with torch.no_grad():
        exact = model(x).numpy()

    def true_sqnr(sim) -> float:
        found = sim.run(x).numpy() if door == "torch" else sim.run(x.numpy())[0]
        error = float(np.square(found - exact).sum())
        return 10 * math.log10(float(np.square(exact).sum()) / error) if error else 200.0

    return sim, data, true_sqnr


@pytest.mark.spread(1)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("verb", ROUNDING)
def test_rounded_weights_are_named_and_the_whole_counts_from_the_given_model(model, x, door, verb):
    sim, data, true_sqnr = calibrated(model, x, door)
    assert "rounded" not in qsdk.sensitivity(sim, data, progress=False).summary
    getattr(qsdk, verb)(sim, data, progress=False)
    estimated = qsdk.sensitivity(sim, data, progress=False)
    exact = qsdk.sensitivity(sim, data, exact=True, metric=true_sqnr, progress=False)
    for report in (estimated, exact):
        assert report.summary["rounded"] == ["0:weight", "2:weight"]
        assert "rows have none of the noise" in str(report)
    assert exact.summary["sqnr_db"] == pytest.approx(true_sqnr(sim), abs=0.2)
    assert estimated.summary["sqnr_db"] == pytest.approx(true_sqnr(sim), abs=1.5)
    assert exact.summary["reference"] > 100.0
    assert exact.summary["float_now"] < 40.0
    assert max(row["drop"] for row in exact.rows) < exact.summary["drop"]


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
def test_a_shifted_bias_is_no_part_of_the_float_model(model, x, door):
    sim, data, true_sqnr = calibrated(model, x, door)
    qsdk.correct_bias(sim, data, progress=False)
    report = qsdk.sensitivity(sim, data, exact=True, progress=False)
    assert "rounded" not in report.summary
    assert report.summary["sqnr_db"] == pytest.approx(true_sqnr(sim), abs=0.01)


@pytest.mark.slow
def test_searches_say_it_too(model, x):
    sim, data, true_sqnr = calibrated(model, x, "torch")
    qsdk.adaround(sim, data, progress=False)
    assert qsdk.analysis.advise(sim, data, progress=False).summary["rounded"] == ["0:weight", "2:weight"]
    searched = qsdk.mixed_precision(sim, data, true_sqnr, max_drop=math.inf, progress=False)
    assert searched.summary["rounded"] == ["0:weight", "2:weight"]


def test_the_page_counts_from_the_given_model(model, x, tmp_path):
    sim, data, true_sqnr = calibrated(model, x, "torch")
    qsdk.adaround(sim, data, progress=False)
    report = qsdk.report(sim, tmp_path / "page.html", data=data, progress=False)
    assert report.summary["sqnr_db"] == pytest.approx(true_sqnr(sim), abs=1.5)
    assert "2 weights hold the values that they were rounded to" in (tmp_path / "page.html").read_text()
