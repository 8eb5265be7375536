"""A detector at W8A8 by default: the scores that leave the model beside boxes keep a scale of their own."""

import numpy as np
import pytest
import torch
from detector import Detector, trained_like

import qsdk

IMAGES = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def sqnr(exact: np.ndarray, found: np.ndarray) -> float:
    return float(10 * np.log10(np.square(exact).sum() / np.square(exact - found).sum()))


@pytest.fixture(scope="module")
def detector() -> Detector:
    return trained_like()


@pytest.fixture(scope="module")
def calibrated(detector: Detector):
    sim = qsdk.quantize(detector, IMAGES[:2], qsdk.w8a8())
    qsdk.calibrate(sim, [IMAGES], progress=False)
    return sim


@pytest.mark.slow
def test_scores_survive_beside_boxes(detector: Detector, calibrated):
    exact, found = detector(IMAGES).detach().numpy(), calibrated(IMAGES).numpy()
    assert sqnr(exact[:, 4:], found[:, 4:]) > 25
    assert sqnr(exact[:, :4], found[:, :4]) > 25


@pytest.mark.slow
def test_one_scale_for_both_would_lose_the_scores(detector: Detector):
    sim = qsdk.quantize(detector, IMAGES[:2], qsdk.w8a8().override("cat.6", tie=True))
    assert sim.plan.decisions["cat.6:output"].quantized
    qsdk.calibrate(sim, [IMAGES], progress=False)
    exact, found = detector(IMAGES).detach().numpy(), sim(IMAGES).numpy()
    assert sqnr(exact[:, 4:], found[:, 4:]) < 1


@pytest.mark.slow
def test_the_exported_detector_is_the_simulated_one(calibrated, tmp_path):
    qsdk.export(calibrated, tmp_path / "detector.onnx")
    report = qsdk.check_parity(calibrated, tmp_path / "detector.onnx", [IMAGES[:2]], progress=False)
    assert report.summary["passed"]
    assert report.summary["sqnr_db"] > 30


class Heads(torch.nn.Module):
    """Boxes and scores straight from a shared trunk, both without an op that has no integer form."""

    def __init__(self, *, transposed: bool = False) -> None:
        super().__init__()
        self.trunk, self.boxes, self.scores = (torch.nn.Conv2d(i, o, 3, padding=1) for i, o in ((3, 8), (8, 4), (8, 6)))
        self.transposed = transposed

    def forward(self, x):
        x = self.trunk(x).relu()
        boxes, scores = self.boxes(x).flatten(2).sigmoid() * 640.0, self.scores(x).flatten(2).sigmoid()
        found = torch.cat([boxes, scores], 1)
        return found.transpose(1, 2) if self.transposed else found


def exported_heads(tmp_path, *, transposed: bool = False) -> str:
    torch.manual_seed(3)
    x = torch.randn(2, 3, 8, 8)
    sim = qsdk.quantize(Heads(transposed=transposed).eval(), x, qsdk.w8a8())
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "heads.onnx")
    return str(tmp_path / "heads.onnx")


@pytest.mark.slow
def test_the_integer_model_leaves_with_one_dequantize_and_a_scale_per_row(tmp_path):
    report = qsdk.to_integer(exported_heads(tmp_path), tmp_path / "heads.int.onnx")
    assert (report.summary["float_tensors"], report.summary["max_lsb"]) == (0, 0)


def test_parts_that_an_integer_edge_cannot_hold_are_refused_with_the_remedy(tmp_path):
    path = exported_heads(tmp_path, transposed=False)
    with pytest.raises(qsdk.IntegerError, match=r"graph output .*QuantizeLinear"):
        qsdk.to_integer(path, tmp_path / "heads.int.onnx", edges="integer")
