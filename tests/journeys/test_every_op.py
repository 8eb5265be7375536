"""One network with every op that the road must carry, through every step, at several configs."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsdk
from onnx_backend.integer.reference.run import run_reference
from onnx_backend.integer.verify.integer_only import integer_findings

pytestmark = pytest.mark.usefixtures("exact_products")

LEVELS = [
    ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
]


class EveryOp(nn.Module):
    """Conv (plain, grouped, depthwise, dilated), BN, ReLU, ReLU6, Hardtanh, +, cat, pools, pad, reshapes, Linear."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=8)
        self.relu6 = nn.ReLU6(inplace=True)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.average = nn.AvgPool2d(3, stride=1, padding=1)
        self.bare = nn.AvgPool2d(2, stride=1, count_include_pad=False)
        self.down = nn.Conv2d(16, 12, 3, stride=2)
        self.tanhlike = nn.Hardtanh(-2.0, 2.0)
        self.tokens = nn.Linear(12, 6)
        self.mix = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(24 + 16, 5)

    def forward(self, x):
        x = self.stem(x)
        y = self.relu6(self.grouped(x)) + x
        z = F.relu(self.depthwise(y))
        z = torch.cat([y, z], dim=1)
        z = self.pool(z)
        pooled = F.adaptive_avg_pool2d(z, 1).view(z.size(0), -1)
        z = F.pad(self.average(z), (1, 0, 0, 1))
        z = self.tanhlike(self.down(self.bare(z)))
        t = z.flatten(2).transpose(1, 2)
        t = F.relu(self.mix(self.tokens(t)))
        t = t.reshape(t.shape[0], -1, 6).permute(0, 2, 1).mean(-1)
        t = torch.cat([t, t.clamp(0.1, 0.5), -t, t + 1.0], dim=-1)
        return self.head(torch.cat([t, pooled], dim=1))


CONFIGS = {
    "w8a8": qsdk.w8a8(),
    "w4a8": qsdk.w4a8(),
    "symmetric": qsdk.w8a8(symmetric_activations=True),
    "int8 activations": qsdk.w8a8().override("*", activation="int8"),
    "strict": qsdk.w8a8().override("*", weight="int8_strict", activation="int8_strict", symmetric_activations=True),
    "per tensor": qsdk.w8a8().override("*", per_channel=False),
    "odd widths": qsdk.w8a8().override("*", weight="int3", activation="uint6"),
}


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    model = EveryOp()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(16, 3, 12, 12))  # gives BatchNorm statistics
    return model.eval()


@pytest.fixture(scope="module", params=list(CONFIGS))
def road(request, network, tmp_path_factory):
    folder = tmp_path_factory.mktemp("every_op")
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, 3, 12, 12, generator=generator) for _ in range(4)]
    sim = qsdk.quantize(network, batches[0], CONFIGS[request.param])
    qsdk.calibrate(sim, batches, progress=False)
    qsdk.export(sim, folder / "model.onnx")
    return sim, batches, folder


@pytest.mark.slow
def test_every_float_tensor_has_a_reason(road):
    sim, _, _ = road
    rows = sim.coverage().to_dict()["rows"]
    assert all(row["reason"] for row in rows)
    left = [row["site"] for row in rows if row["state"] == "float" and "inside" not in row["reason"]]
    assert all(site.startswith("(") for site in left), left  # scalars and bounds only


@pytest.mark.slow
def test_parity_holds_site_by_site(road):
    sim, batches, folder = road
    report = qsdk.check_parity(sim, folder / "model.onnx", batches[:2], progress=False)
    assert report.summary["passed"], str(report)


@pytest.mark.spread(3)
def test_the_exported_file_runs_at_every_level_as_simulated(road):
    sim, batches, folder = road
    path = str(folder / "model.onnx")
    onnx.checker.check_model(onnx.load(path), full_check=True)
    expected, scale = sim(batches[0]).numpy(), sim.encodings["head:output"].scale[0]
    for level in LEVELS:
        options = ort.SessionOptions()
        options.graph_optimization_level = level
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        got = session.run(None, {"x": batches[0].numpy()})[0]
        assert (np.abs(got - expected) / scale > 1.5).mean() < 0.05, level


@pytest.mark.slow
def test_the_integer_model_has_no_float_and_is_bit_identical_everywhere(road):
    sim, batches, folder = road
    path = str(folder / "model.int.onnx")
    summary = qsdk.to_integer(folder / "model.onnx", path).summary
    assert summary["float_tensors"] == 0
    model = onnx.load(path)
    assert integer_findings(model) == []
    assert {entry.domain for entry in model.opset_import} <= {"", "ai.onnx"}
    inputs = {"x": batches[0].numpy()}
    (expected,) = run_reference(model, inputs).values()
    for level in LEVELS:
        options = ort.SessionOptions()
        options.graph_optimization_level = level
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        np.testing.assert_array_equal(session.run(None, inputs)[0], expected)
    scale = sim.encodings["head:output"].scale[0]
    steps = np.abs(expected - sim(batches[0]).numpy()) / scale
    assert (steps > 1.5).mean() < 0.05
    assert steps.max() < 6
