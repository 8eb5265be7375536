"""Calibration at the PyTorch door, and that both doors find the same encodings for the same network."""

import copy
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import qsdk
from qsdk import CalibrationError, ConfigError, OnnxSim, QuantSim, w4a8, w8a8
from qsdk.core.ranges.estimators import METHODS
from qsdk.core.ranges.histogram import SAMPLES

ALL_METHODS = sorted(set(METHODS.values()))


class Net(nn.Module):
    """Convolutions, a sum, ties over a pool and a Concat, a Sigmoid, a linear layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.gate = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(16 * 16, 5)

    def forward(self, x):
        x = F.relu(self.first(x))
        y = F.relu(self.second(x) + x)
        y = torch.cat([F.max_pool2d(y, 2), F.avg_pool2d(torch.sigmoid(self.gate(x)) * x, 2)], 1)
        return self.head(y.flatten(1))


def batches(count=3, size=6, scale=1.0):
    rng = np.random.default_rng(count)
    return [(rng.standard_t(4, size=(size, 3, 8, 8)) * scale).astype(np.float32) for _ in range(count)]


def tensors(arrays):
    return [torch.from_numpy(array) for array in arrays]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    return Net().eval()


@pytest.fixture(scope="module")
def float_onnx(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.zeros(2, 3, 8, 8)
        dynamic = ({0: torch.export.Dim("n", min=1, max=1024)},)
        program = torch.onnx.export(model, (x,), dynamo=True, opset_version=21, dynamic_shapes=dynamic, verbose=False)
    return program.model_proto


@pytest.fixture(scope="module", params=[w8a8(), w4a8(block_size=4)], ids=["w8a8", "w4a8 blocks"])
def both_doors(request, model, float_onnx):
    return qsdk.quantize(model, torch.zeros(2, 3, 8, 8), request.param), qsdk.quantize(float_onnx, None, request.param)


@pytest.fixture(scope="module")
def uncalibrated(model):
    return qsdk.quantize(model, torch.zeros(2, 3, 8, 8), w8a8())


@pytest.fixture
def sim(uncalibrated):
    return copy.deepcopy(uncalibrated)


def own_encodings(sim: QuantSim | OnnxSim, *kinds: str):
    found = sim.encodings
    return [found[site] for site, d in sim.plan.decisions.items() if d.kind in kinds and d.quantized and not d.tied_to]


@pytest.mark.spread(4)
@pytest.mark.parametrize("method", ALL_METHODS)
def test_both_doors_find_the_same_encodings_within_a_bin(both_doors, method: str):
    data = batches(scale=3.0)
    torch_sim, onnx_sim = both_doors
    options = {"method": method, "weight_method": method, "percentile": 99.0, "progress": False}
    qsdk.calibrate(torch_sim, tensors(data), **options)
    qsdk.calibrate(onnx_sim, data, **options)
    pairs = list(
        zip(
            own_encodings(torch_sim, "activation", "input", "output"),
            own_encodings(onnx_sim, "activation", "input", "output"),
            strict=True,
        )
    )
    assert len(pairs) >= 6
    for left, right in pairs:
        width = max(float(left.high[0] - left.low[0]), float(right.high[0] - right.low[0])) / 512
        slack = width + float(left.scale[0])  # the zero point is rounded
        assert left.dtype == right.dtype
        assert abs(float(left.high[0] - right.high[0])) <= slack
        assert abs(float(left.low[0] - right.low[0])) <= slack
        assert left.scale == pytest.approx(right.scale, rel=2 / 512)
    weights = [own_encodings(sim, "weight") for sim in (torch_sim, onnx_sim)]
    assert sorted(e.scale.size for e in weights[0]) == sorted(e.scale.size for e in weights[1])
    scales = [np.sort(np.concatenate([e.scale.ravel() for e in found])) for found in weights]
    np.testing.assert_allclose(scales[0], scales[1], rtol=1e-6)


@pytest.mark.spread(1)
@pytest.mark.parametrize("method", ["percentile", "tf_enhanced"])
def test_large_tensors_are_sampled_alike(method: str):
    torch.manual_seed(0)
    layer = nn.Linear(64, 4)
    data = [np.random.default_rng(i).normal(size=(2000, 64)).astype(np.float32) for i in range(2)]
    assert data[0].size > 3 * SAMPLES
    torch_sim = qsdk.quantize(layer, torch.from_numpy(data[0][:4]), w8a8())
    qsdk.calibrate(torch_sim, tensors(data), method=method, progress=False)
    stored = [numpy_helper.from_array(layer.weight.detach().numpy().T.copy(), "w")]
    shapes = {"x": ["n", 64], "y": ["n", 4]}
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items())
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"], "mm")], "g", [x], [y], stored)
    onnx_sim = qsdk.quantize(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), None, w8a8()
    )
    qsdk.calibrate(onnx_sim, data, method=method, progress=False)
    left, right = own_encodings(torch_sim, "input")[0], own_encodings(onnx_sim, "input")[0]
    assert left == right


@pytest.mark.spread(5)
@pytest.mark.parametrize("method", ALL_METHODS)
def test_calibration_leaves_a_fixed_range(sim, method: str):
    site = next(site for site, d in sim.plan.decisions.items() if d.op_type == "Sigmoid" and d.quantized)
    for scale in (1.0, 1e-3):
        qsdk.calibrate(sim, tensors(batches(scale=scale)), method=method, progress=False)
        assert sim.encodings[site].scale.tolist() == [np.nextafter(np.float32(1 / 255), np.float32(0))]
        assert sim.encodings[site].zero_point.tolist() == [0]


@pytest.mark.parametrize(("alias", "name"), sorted(METHODS.items()))
def test_aliases(sim, alias: str, name: str):
    left, right = sim, copy.deepcopy(sim)
    for sim, method in ((left, alias), (right, name)):
        qsdk.calibrate(sim, tensors(batches()), method=method, weight_method=method, progress=False)
    assert left.encodings == right.encodings


@pytest.mark.parametrize("method", sorted(set(ALL_METHODS) - {"moving_average"}))
def test_any_order_of_batches_gives_the_same_encodings(sim, method: str):
    data = tensors([*batches(2), *batches(1, scale=7)])
    left, right = sim, copy.deepcopy(sim)
    qsdk.calibrate(left, data, method=method, progress=False)
    qsdk.calibrate(right, data[::-1], method=method, progress=False)
    assert left.encodings == right.encodings


def test_wrong_options_are_explained(sim):
    for option in ("method", "weight_method"):
        with pytest.raises(ConfigError, match="unknown calibration method 'magic'; choose one of min_max"):
            qsdk.calibrate(sim, tensors(batches()), progress=False, **{option: "magic"})
    with pytest.raises(ConfigError, match=r"percentile=0.999 is outside 50..100; give the share to keep, such as 99.9"):
        qsdk.calibrate(sim, tensors(batches()), method="percentile", percentile=0.999, progress=False)
    with pytest.raises(CalibrationError, match="no batch reached"):
        qsdk.calibrate(sim, [torch.zeros(0, 3, 8, 8)], method="mse", progress=False)
