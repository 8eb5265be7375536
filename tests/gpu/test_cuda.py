"""What runs on a CUDA device: `make test-gpu` collects it; without one every test skips."""

import copy

import numpy as np
import onnxruntime as ort
import pytest
import torch
from qdq_models import convnet
from torch import nn
from torch.nn import functional as F

import qsdk

CUDA = "CUDAExecutionProvider"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda finds no device"),
]
IMAGES = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
        self.last, self.head = nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x):
        x = F.relu(self.bn(self.conv1(x)))
        return self.head(self.last(F.relu(self.conv2(x)) + 1).mean((2, 3)))


def net():
    torch.manual_seed(0)
    return Net().eval()


def calibrated(device="cuda", **options):
    sim = qsdk.quantize(net().to(device), IMAGES[0].to(device), qsdk.w4a8(), **options)
    qsdk.calibrate(sim, [x.to(device) for x in IMAGES], progress=False)
    return sim


@pytest.fixture(autouse=True)
def exact_products():
    """Multiply float32 in float32, as the CPU does."""
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    for switch in switches:
        switch.allow_tf32 = False
    yield
    for switch, allowed in zip(switches, before, strict=True):
        switch.allow_tf32 = allowed


@pytest.mark.parametrize("method", ["min_max", "moving_average", "percentile", "mse", "tf_enhanced", "entropy"])
def test_calibration_with_batches_of_the_host_is_that_with_batches_of_the_device(method):
    found = []
    for batches in (IMAGES, [x.cuda() for x in IMAGES]):
        sim = qsdk.quantize(net().cuda(), IMAGES[0].cuda(), qsdk.w8a8())
        qsdk.calibrate(sim, batches, method=method, progress=False)
        assert sim(IMAGES[0].cuda()).is_cuda
        found.append(sim.encodings)
    assert found[0] == found[1]


def test_an_encoding_of_the_gpu_is_that_of_the_cpu_within_one_ulp_of_the_scale():
    x = torch.linspace(-3, 5, 64).reshape(8, 8)
    scales = []
    for device in ("cpu", "cuda"):
        sim = qsdk.quantize(nn.Sequential(nn.Identity(), nn.ReLU()).to(device), x.to(device), qsdk.w8a8())
        qsdk.calibrate(sim, [x.to(device)], progress=False)
        scales.append({site: encoding.scale for site, encoding in sim.encodings.items()})
    for site, scale in scales[0].items():
        np.testing.assert_array_max_ulp(scale, scales[1][site], maxulp=1)


VERBS = {
    "seq_mse": lambda sim, data: qsdk.seq_mse(sim, data, progress=False),
    "adaround": lambda sim, data: qsdk.adaround(sim, data, iterations=20, progress=False),
    "gptq": lambda sim, data: qsdk.gptq(sim, data, progress=False),
    "smooth_quant": lambda sim, data: qsdk.smooth_quant(sim, data, progress=False),
    "awq": lambda sim, data: qsdk.awq(sim, data, progress=False),
    "equalize": lambda sim, data: qsdk.equalize(sim, data, progress=False),
    "correct_bias": lambda sim, data: qsdk.correct_bias(sim, data, progress=False),
    "tune_blocks": lambda sim, data: qsdk.tune_blocks(sim, data, iterations=2, progress=False),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_verbs_run_on_the_device(verb, place):
    sim = calibrated()
    VERBS[verb](sim, [x.to(place) for x in IMAGES])
    assert {value.device.type for value in sim.model.state_dict().values()} == {"cuda"}
    assert sim(IMAGES[0].cuda()).isfinite().all()


def test_batch_norm_is_reestimated_on_the_device():
    sim = calibrated(fold_batch_norm=False)
    qsdk.reestimate_batch_norm(sim, [x.cuda() for x in IMAGES], progress=False)
    assert sim.model.last.running_mean.is_cuda


@pytest.mark.parametrize("compiled", [False, True])
def test_a_training_step_on_the_device(compiled):
    sim = calibrated()
    with sim.training(learn_scales=True):
        model = torch.compile(sim.model) if compiled else sim.model
        optimizer = torch.optim.SGD(sim.parameter_groups(lr=0.1))
        losses = []
        for _ in range(10):
            optimizer.zero_grad()
            loss = model(IMAGES[0].cuda()).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_a_copy_and_a_saved_sim_cross_devices(tmp_path):
    sim = calibrated()
    x = IMAGES[0].cuda()
    np.testing.assert_array_equal(copy.deepcopy(sim)(x).detach().cpu(), sim(x).detach().cpu())
    qsdk.save(sim, tmp_path / "sim.qsdk")
    for device in ("cuda", "cpu"):
        back = qsdk.load(tmp_path / "sim.qsdk", net().to(device))
        assert back.encodings == sim.encodings
        assert back(x.to(device)).device.type == device


def test_an_export_from_the_device_is_at_parity(tmp_path):
    sim = calibrated()
    qsdk.export(sim, tmp_path / "model.onnx")
    report = qsdk.check_parity(sim, tmp_path / "model.onnx", [x.cuda() for x in IMAGES], progress=False)
    assert report.summary["weights_max_lsb"] == 0
    assert report.summary["activations_max_lsb"] <= 1


@pytest.mark.skipif(CUDA not in ort.get_available_providers(), reason=f"ONNX Runtime here has no {CUDA}")
def test_an_onnx_file_runs_on_cuda(tmp_path):
    images = [x.numpy()[:2] for x in IMAGES]
    sim = qsdk.quantize(convnet(), None, qsdk.w8a8(), providers=[CUDA, "CPUExecutionProvider"])
    qsdk.calibrate(sim, images, progress=False)
    qsdk.adaround(sim, images, iterations=20, progress=False)
    assert CUDA in {row["provider"] for row in sim.placement().rows}
    qsdk.export(sim, tmp_path / "model.onnx")
    assert qsdk.check_parity(sim, tmp_path / "model.onnx", images, progress=False).summary["passed"]
