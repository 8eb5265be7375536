"""What is raised together so that each layer keeps its integer kernel whole, or is in floats whole: by ONNX Runtime."""

import random

import pytest
import torch
from torch import nn

import qsdk
from qsdk.core.precision.mixed import coded_layers, raised_with, sites_on_codes
from qsdk.core.site import port_of

INTEGER = {"QLinearConv", "QGemm", "QLinearMatMul", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"}
IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
FLOAT = {"weight": "float32", "activation": "float32"}
CONFIGS = [qsdk.w8a8(), qsdk.w8a8().for_dialect("onnxruntime", processor="vnni")]


class Attends(nn.Module):
    """Two convolutions with a skip, three Linear layers that read one tensor, products of activations, a GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.wide, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = torch.relu(x + self.second(x)).flatten(2).transpose(1, 2)
        shares = torch.softmax(self.q(x) @ self.k(x).transpose(1, 2), -1)
        return self.head(nn.functional.gelu(self.wide(shares @ self.v(x))))


@pytest.fixture(scope="module", params=CONFIGS, ids=["all", "kernels"])
def calibrated(request):
    torch.manual_seed(0)
    made = qsdk.quantize(Attends().eval(), IMAGES, request.param)
    qsdk.calibrate(made, [IMAGES], progress=False)
    return made


@pytest.fixture
def sim(calibrated):
    before = calibrated.snapshot()
    yield calibrated
    calibrated.restore(before)


def classes_of(sim) -> dict[str, list[str]]:
    """Return the sites of each encoding, but those of biases."""
    found: dict[str, list[str]] = {}
    for site, decision in sim.plan.decisions.items():
        if decision.quantized and decision.kind != "bias":
            found.setdefault(decision.encoding_site, []).append(site)
    return found


def together(sim, homes) -> set[str]:
    dtypes = {home: sim.plan.decisions[home].spec.dtype for home in classes_of(sim)}
    layers, others = list(coded_layers(sim.graph, sim.plan)), sites_on_codes(sim.graph, sim.plan)
    return {*homes, *raised_with(layers, others, dtypes, dict.fromkeys(homes, qsdk.float32))}


def raise_to_floats(sim, homes) -> None:
    config, classes = sim.config, classes_of(sim)
    for home in sorted(homes):
        for site in classes[home]:
            kind = "weight" if port_of(site) == "weight" else "activation"
            config = config.override(site, **{kind: "float32"})
    sim.replan(config)


def layers_in_the_file(sim, path) -> dict[str, str]:
    """Return the kernel of each weight that is stored as codes."""
    rows = [row for row in qsdk.export(sim, path).rows if row["site"].endswith(":weight")]
    return {row["site"]: row["kernel"] for row in rows if row["form"] != "float"}


@pytest.mark.spread(3)
@pytest.mark.parametrize("seed", range(4))
def test_no_weight_is_dequantized_whatever_is_raised(seed, sim, tmp_path):
    draw = random.Random(seed)
    homes = draw.sample(sorted(classes_of(sim)), draw.choice([1, 2, 4]))
    raise_to_floats(sim, together(sim, homes))
    kernels = layers_in_the_file(sim, tmp_path / "m.onnx")
    assert all(INTEGER.intersection(kernel.split(", ")) for kernel in kernels.values()), (homes, kernels)


def test_an_input_that_is_raised_alone_costs_its_layers_their_kernels(sim, tmp_path):
    (fed,) = {layer.fed for layer in coded_layers(sim.graph, sim.plan) if layer.weight == "q:weight"}
    assert {"q:weight", "k:weight", "v:weight"} <= together(sim, fed)
    raise_to_floats(sim, fed)
    kernels = layers_in_the_file(sim, tmp_path / "m.onnx")
    assert not INTEGER.intersection(kernels["q:weight"].split(", "))


def test_an_input_stays_on_codes_as_long_as_a_layer_reads_it(sim):
    (fed,) = {layer.fed for layer in coded_layers(sim.graph, sim.plan) if layer.weight == "q:weight"}
    assert together(sim, ["q:weight"]) == {"q:weight"}
    assert {"q:weight", "k:weight", "v:weight"} == together(sim, ["q:weight", "k:weight", "v:weight"]) - {*fed}


def test_what_is_raised_beside_others_needs_nothing_more_and_grows_with_them(sim):
    homes = sorted(classes_of(sim))
    for home in homes:
        alone = together(sim, [home])
        assert together(sim, alone) == alone
        assert alone <= together(sim, [home, homes[0], homes[-1]])
    assert together(sim, homes) == set(homes)


@pytest.mark.spread(1)
def test_a_search_with_a_budget_of_time_writes_a_file_in_which_nothing_is_slow(sim, tmp_path):
    exact = sim.unwrap()(IMAGES).detach()

    def metric(current) -> float:
        return -float((current(IMAGES) - exact).square().sum())

    allowed = 0.2 * -metric(sim)
    budgets = {"max_drop": allowed, "max_ms": 1e3, "max_evaluations": 4}
    report = qsdk.mixed_precision(sim, [IMAGES], metric, **budgets, progress=False)
    assert report.summary["met"]
    assert all("-> float32" in raised for raised in report.summary["raised"])
    kernels = layers_in_the_file(sim, tmp_path / "m.onnx")
    assert 0 < len(kernels) < 7
    assert all(INTEGER.intersection(kernel.split(", ")) for kernel in kernels.values())
