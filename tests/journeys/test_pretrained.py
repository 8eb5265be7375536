"""Real pretrained networks through the whole road: module -> sim -> ONNX -> parity -> integer-only."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
import zoo

import qsdk
from onnx_backend.integer.reference.run import run_reference
from onnx_backend.integer.verify.integer_only import integer_findings

pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.usefixtures("exact_products")]


class Road:
    """What one network became, and how it scores on labelled images."""

    def __init__(self, model, images, labels, config, folder, calibration):
        self.images, self.labels = images, labels
        self.sim = qsdk.quantize(model, images[:1], config)
        qsdk.calibrate(self.sim, list(calibration.split(5)), progress=False)
        self.onnx, self.integer = str(folder / "model.onnx"), str(folder / "model.int.onnx")
        self.export = qsdk.export(self.sim, self.onnx)
        self.conversion = qsdk.to_integer(self.onnx, self.integer)

    def correct(self, predict):
        with torch.no_grad():
            logits = [np.asarray(predict(batch)) for batch in self.images.split(100)]
        return int((np.concatenate(logits).argmax(1) == self.labels.numpy()).sum())

    def runtime(self, path):
        session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        return lambda batch: session.run(None, {session.get_inputs()[0].name: batch.numpy()})[0]


@pytest.fixture(scope="module")
def mobilenet(tmp_path_factory):
    model = zoo.mobilenet_v2()
    images, labels = zoo.imagenet_images()
    return model, Road(model, images, labels, qsdk.w8a8(), tmp_path_factory.mktemp("mobilenet"), images)


@pytest.fixture(scope="module", params=["w8a8", "w4a8"])
def digits(request, tmp_path_factory):
    model = zoo.digit_cnn()
    images, labels = zoo.mnist(count=2000)
    config = {"w8a8": qsdk.w8a8, "w4a8": qsdk.w4a8}[request.param]()
    calibration = zoo.mnist("train", count=100)[0]
    return model, Road(model, images, labels, config, tmp_path_factory.mktemp("digits"), calibration)


def test_mobilenet_v2_keeps_its_accuracy_in_every_form(mobilenet):
    model, road = mobilenet
    assert road.correct(model) == 18
    assert len(model.state_dict()) == 314  # the caller's model still has its BatchNorms
    assert road.sim.coverage().summary["folded"] == 52
    for predict in (road.sim, road.runtime(road.onnx), road.runtime(road.integer)):
        assert road.correct(predict) >= 17


def test_mobilenet_v2_is_at_parity_site_by_site(mobilenet):
    _, road = mobilenet
    report = qsdk.check_parity(road.sim, road.onnx, [road.images[:2]], progress=False)
    assert report.summary["passed"]
    assert report.summary["weights_max_lsb"] == 0
    assert report.summary["activations_max_lsb"] <= 1
    sites = {row["site"] for row in report.rows}
    assert sites == {site for site, decision in road.sim.plan.decisions.items() if decision.spec is not None}


def test_mobilenet_v2_has_no_float_left(mobilenet):
    _, road = mobilenet
    assert road.conversion.summary["float_tensors"] == 0
    assert integer_findings(onnx.load(road.integer)) == []


def test_the_digit_network_keeps_its_accuracy_in_every_form(digits):
    model, road = digits
    count = len(road.labels)
    in_float, simulated = road.correct(model), road.correct(road.sim)
    assert in_float >= 0.985 * count
    assert abs(simulated - in_float) <= 0.003 * count
    for path in (road.onnx, road.integer):
        assert abs(road.correct(road.runtime(path)) - simulated) <= 0.001 * count


def test_the_digit_network_is_at_parity_and_its_integers_are_the_references(digits):
    _, road = digits
    report = qsdk.check_parity(road.sim, road.onnx, [road.images[:64]], progress=False)
    assert report.summary["passed"], str(report)
    model = onnx.load(road.integer)
    inputs = {model.graph.input[0].name: road.images[:32].numpy()}
    expected = run_reference(model, inputs)
    got = road.runtime(road.integer)(road.images[:32])
    np.testing.assert_array_equal(got, next(iter(expected.values())))
