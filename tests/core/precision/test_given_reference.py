"""A budget counts from the float model that was given, whatever verbs have made of its values since."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import qsdk
from qsdk.core.sims.biases import float_biases

IMAGES = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
BATCHES = list(IMAGES.split(2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3), nn.Conv2d(6, 4, 1)
        self.norm, self.clip = nn.BatchNorm2d(6), nn.ReLU6()

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.second(self.clip(3 * self.first(x))))))


def trained() -> Net:
    torch.manual_seed(0)
    net = Net()
    with torch.no_grad():
        net.first.weight[0] *= 20
        net(IMAGES)  # statistics of the BatchNorm
    return net.eval()


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("float") / "float.onnx"
    torch.onnx.export(trained(), (BATCHES[0],), path, dynamo=True, verbose=False)
    return str(path)


@pytest.fixture(scope="module")
def calibrated(exported) -> dict:
    made = {
        "torch": qsdk.quantize(trained(), BATCHES[0], qsdk.w4a8()),
        "onnx": qsdk.quantize(exported, None, qsdk.w4a8()),
    }
    for sim in made.values():
        qsdk.calibrate(sim, data_of(sim), progress=False)
    return made


@pytest.fixture
def sim(door: str, calibrated: dict):
    before = calibrated[door].snapshot(weights=True)
    yield calibrated[door]
    calibrated[door].restore(before)


def biases(sim) -> dict[str, np.ndarray]:
    sites = [site for site, decision in sim.plan.decisions.items() if decision.kind == "bias"]
    return {site: values.copy() for site, values in sim.stored_floats(sites).items()}


def data_of(sim) -> list:
    return BATCHES if hasattr(sim, "model") else [batch.numpy() for batch in BATCHES]


def output(sim) -> np.ndarray:
    batch = data_of(sim)[0]
    return sim(batch).numpy() if hasattr(sim, "model") else sim.run(batch)[0]


EXACT = trained()(BATCHES[0]).detach().numpy()


def closeness(sim) -> float:
    """Minus the largest difference from the float model: 0 where the sim is that model."""
    return -float(np.abs(output(sim) - EXACT).max())


def searched(sim, max_drop: float = float("inf")) -> qsdk.Report:
    return qsdk.mixed_precision(sim, data_of(sim), closeness, max_drop=max_drop, progress=False)


MOVE = {
    "seq_mse": lambda sim, data: qsdk.seq_mse(sim, data, candidates=8, progress=False),
    "adaround": lambda sim, data: qsdk.adaround(sim, data, iterations=2, starts=2, progress=False),
    "gptq": lambda sim, data: qsdk.gptq(sim, data, progress=False),
    "correct_bias": lambda sim, data: qsdk.correct_bias(sim, data, progress=False),
    "equalize": lambda sim, data: qsdk.equalize(sim, data, relu6="relu", progress=False),
    "smooth_quant": lambda sim, data: qsdk.smooth_quant(sim, data, progress=False),
    "twice": lambda sim, data: (
        qsdk.seq_mse(sim, data, candidates=8, progress=False),
        qsdk.correct_bias(sim, data, progress=False),
        qsdk.adaround(sim, data, iterations=2, starts=2, progress=False),
    ),
}
both = pytest.mark.parametrize("door", ["torch", "onnx"])


@pytest.mark.spread(8)
@both
@pytest.mark.parametrize("verb", MOVE)
def test_the_reference_is_the_model_that_was_given(sim, verb: str):
    assert searched(sim).summary["reference"] == pytest.approx(0, abs=1e-4)
    MOVE[verb](sim, data_of(sim))
    before = output(sim)
    summary = searched(sim).summary
    assert summary["reference"] == pytest.approx(0, abs=1e-4)
    if verb not in ("smooth_quant",):  # which changes no value of the float model's function
        assert summary["float_now"] < summary["reference"] - 1e-3
    np.testing.assert_array_equal(output(sim), before)


@pytest.mark.parametrize("door", ["torch"])
def test_trained_values_are_no_reference(sim):
    with sim.training() as model:
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        model(BATCHES[0]).square().mean().backward()
        optimizer.step()
        inside = copy.deepcopy(sim)
    for one in (sim, inside):
        summary = searched(one).summary
        assert summary["reference"] == pytest.approx(0, abs=1e-4)
        assert summary["float_now"] < -1e-3


@pytest.mark.slow
@both
def test_what_was_given_comes_back_from_files_and_goes_with_snapshots(sim, door: str, tmp_path):
    MOVE["seq_mse"](sim, data_of(sim))
    between = sim.snapshot(weights=True)
    qsdk.save(sim, tmp_path / "sim.qsdk")
    back = qsdk.load(tmp_path / "sim.qsdk", *([Net()] if door == "torch" else []))
    MOVE["adaround"](sim, data_of(sim))
    sim.restore(between)
    found = [searched(one).summary for one in (sim, back)]
    assert [one["reference"] for one in found] == pytest.approx([0, 0], abs=1e-4)
    assert found[0]["float_now"] == pytest.approx(found[1]["float_now"], abs=1e-6)
    assert found[0]["float_now"] < -1e-3


@pytest.mark.parametrize("door", ["torch"])
def test_values_that_the_user_writes_over_a_verbs_are_given(sim):
    MOVE["correct_bias"](sim, BATCHES)
    with torch.no_grad():
        for parameter in sim.model.parameters():
            parameter.zero_()
    summary = searched(sim).summary
    assert summary["reference"] == summary["float_now"] == pytest.approx(-float(np.abs(EXACT).max()))


@both
def test_frozen_weights_are_left_with_the_reason(sim):
    MOVE["adaround"](sim, data_of(sim))
    report = searched(sim, max_drop=0.0)
    weights = [site for site, d in sim.plan.decisions.items() if d.kind == "weight"]
    left = report.summary["left"]
    assert sorted(line.partition(": ")[0] for line in left) == sorted(weights)
    assert all("frozen at int4" in line and "sim.unfreeze" in line for line in left)


@both
def test_a_weight_that_is_raised_has_its_bias_as_given(sim):
    given = biases(sim)
    MOVE["seq_mse"](sim, data_of(sim))
    shifted = biases(sim)
    moved = [site for site in given if not np.array_equal(given[site], shifted[site])]
    assert moved
    report = searched(sim, max_drop=0.0)
    now = biases(sim)
    raised = " ".join(report.summary["raised"])
    for site in moved:
        weight = site.replace(":bias", ":weight")
        np.testing.assert_array_equal(now[site], given[site] if f"{weight}:" in raised else shifted[site])
    assert any(site.replace(":bias", ":weight") + ":" in raised for site in moved)


@both
def test_a_precision_that_is_set_by_hand_takes_its_shift_back_too(sim):
    given = biases(sim)
    MOVE["seq_mse"](sim, data_of(sim))
    shifted = biases(sim)
    site = next(site for site in given if not np.array_equal(given[site], shifted[site]))
    sim.set_precision(site.replace(":bias", ":weight"), "int8")
    now = biases(sim)
    assert all(np.array_equal(now[s], given[s] if s == site else shifted[s]) for s in given)


CONVERT = {
    "float16": (lambda model: model.half(), torch.float16),
    "bfloat16": (lambda model: model.bfloat16(), torch.bfloat16),
    "float64": (lambda model: model.double(), torch.float64),
    "float16 and back": (lambda model: model.half().float(), torch.float32),
    "bfloat16 and float64": (lambda model: model.bfloat16().double(), torch.float64),
}


@pytest.mark.slow
@pytest.mark.parametrize("door", ["torch"])
@pytest.mark.parametrize("conversion", CONVERT)
def test_what_was_given_follows_the_model_to_another_dtype(sim, conversion: str):
    convert, dtype = CONVERT[conversion]
    exact = trained().to(dtype)(BATCHES[0].to(dtype)).detach()
    MOVE["twice"](sim, BATCHES)
    sim = copy.deepcopy(sim)
    shifted, rounded = biases(sim), float_biases(sim)
    assert rounded
    convert(sim.model)

    def close(model) -> float:
        return -float((model(BATCHES[0].to(dtype)) - exact).abs().max())

    data = [batch.to(dtype) for batch in BATCHES]
    summary = qsdk.mixed_precision(sim, data, close, max_drop=float("inf"), progress=False).summary
    assert summary["reference"] == pytest.approx(0, abs=0.02)  # it is rounded to the dtype as `exact` is
    assert summary["float_now"] < 5 * min(summary["reference"], -0.01)
    assert float_biases(sim).keys() == rounded.keys()
    for site, original in float_biases(sim).items():
        np.testing.assert_array_equal(original, rounded[site])
        assert not np.array_equal(shifted[site], original)
    with torch.no_grad():  # what the user writes over them is given
        for parameter in sim.model.parameters():
            parameter.mul_(1.5)
    assert float_biases(sim) == {}
    summary = qsdk.mixed_precision(sim, data, close, max_drop=float("inf"), progress=False).summary
    assert summary["reference"] == pytest.approx(summary["float_now"], abs=1e-6)
