"""Weights with a scale per block: multiplied into wider integers, exactly or with a stated error."""

import json

import firmware_runner
import numpy as np
import onnx
import pytest
import torch
from block_models import BlockNet, X, multiplied, real_input
from exact_integer import require_exact
from firmware_models import floats
from integer_comparison import compare, noise, refused
from integer_models import INT4, INT8, LEVELS, UINT4, UINT8, UINT16, run
from onnx import TensorProto
from onnx.reference.ops.op_conv import _conv_implementation as float_conv
from torch import nn

import qsdk
from onnx_backend.integer.convert import convert
from onnx_backend.integer.firmware.files import archive
from onnx_backend.integer.firmware.program import firmware_program
from onnx_backend.integer.reference.run import run_reference

WEIGHTS = {
    "int4": {"dtype": INT4},
    "uint4 with points": {"dtype": UINT4, "points": True},
    "int8": {"dtype": INT8, "out": (0.6, 121)},
    "uint8 with points": {"dtype": UINT8, "points": True, "out": (0.6, 121)},
    "one block longer than the axis": {"size": 64},
    "blocks of one": {"size": 1},
    "far apart": {
        "scale": lambda rng, shape: (10.0 ** rng.uniform(-6, -2, shape)).astype(np.float32),
        "out": (0.02, 9),
    },
    "blocks of outputs": {"axis": -1, "size": 5},
    "a matrix per batch": {"shape": (3, 5, 40), "made": (3, 40, 12)},
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_matmul_with_a_short_last_block(name):
    model, exact = multiplied(**WEIGHTS[name])
    feeds = {"x": noise(WEIGHTS[name].get("shape", (5, 40)))}
    bound, result = require_exact(model, feeds, exact, differing=0, tolerance=0)
    assert 0 < bound < 2e-4
    (row,) = result.certificate["requantizations"]
    assert len(row["accumulators"]) == len(row["multipliers"]) == (1 if "longer" in name else 3)


def test_the_kernels_of_a_runtime():
    model, _ = multiplied((64, 256), (256, 32), 32, (0.1, 121))
    x = noise((64, 256))
    found = run(convert(model, target="onnxruntime").model, {"x": x})["y"]
    np.testing.assert_array_equal(found, run_reference(convert(model).model, {"x": x})["y"])


@pytest.mark.parametrize("rounding", ["half_even", "half_up", "half_away", "gemmlowp"])
def test_roundings(rounding):
    model, exact = multiplied()
    once = rounding != "gemmlowp"  # which rounds twice
    require_exact(model, {"x": noise((5, 40))}, exact, differing=0 if once else 0.01, tolerance=0.02, rounding=rounding)


CONVS = {
    "pointwise": ((7, 20, 1, 1), (2, 20, 5, 5), {}),
    "taps of their own scale": ((6, 10, 3, 2), (2, 10, 7, 6), {"pads": [1, 0, 2, 1], "strides": [2, 1]}),
    "groups": ((6, 10, 3, 3), (2, 20, 7, 6), {"group": 2, "pads": [1, 1, 1, 1]}),
    "depthwise": ((4, 1, 3, 3), (2, 4, 7, 7), {"group": 4}),
    "one axis": ((5, 12, 4), (2, 12, 20), {"dilations": [2]}),
}


@pytest.mark.parametrize("dtype", [INT4, INT8])
@pytest.mark.parametrize("name", CONVS)
def test_conv(name, dtype):
    w_shape, x_shape, attrs = CONVS[name]
    net = BlockNet()
    x = net.qdq(net.input(list(x_shape)), *X)
    y = net.op("Conv", x, net.blocks(w_shape, 1, 8, dtype), net.const(noise(w_shape[0], 1.0)), **attrs)
    net.output(net.qdq(y, 0.04 if dtype == INT4 else 0.5, 121), [2, w_shape[0], *[None] * (len(x_shape) - 2)])
    bias = noise(w_shape[0], 1.0).astype(np.float64)
    keys = ("dilations", "group", "pads", "strides")

    def exact(feeds):
        facts = [attrs.get(key) for key in keys]
        facts[1] = facts[1] or 1
        return float_conv(real_input(feeds["x"]), net.real, bias, "NOTSET", facts[0], facts[1], None, *facts[2:])

    require_exact(net.model(), {"x": noise(x_shape)}, exact, differing=0, tolerance=0)


def gemm(transposed):
    net = BlockNet()
    x = net.qdq(net.input([5, 40]), *X)
    w = net.blocks((12, 40) if transposed else (40, 12), 1 if transposed else 0, 16)
    y = net.op("Gemm", x, w, net.const(noise(12, 1.0)), transB=int(transposed), alpha=-0.7, beta=0.3)
    net.output(net.qdq(y, 0.05, 121), [5, 12])
    bias = noise(12, 1.0).astype(np.float64)
    turned = (lambda w: w.T) if transposed else (lambda w: w)
    return net.model(), lambda f: np.float32(-0.7) * (real_input(f["x"]) @ turned(net.real)) + np.float32(0.3) * bias


def turned_behind():
    net = BlockNet()
    x = net.qdq(net.input([5, 40]), *X)
    y = net.op("MatMul", x, net.op("Transpose", net.blocks((12, 40), 1, 16), perm=[1, 0]))
    net.output(net.qdq(y, 0.05, 121), [5, 12])
    return net.model(), lambda feeds: real_input(feeds["x"]) @ net.real.T


def on_the_left():
    net = BlockNet()
    x = net.qdq(net.input([5, 40]), *X)
    net.output(net.qdq(net.op("MatMul", net.blocks((7, 5), 1, 2), x), 0.02, 121), [7, 40])
    return net.model(), lambda feeds: net.real @ real_input(feeds["x"])


def rectified():
    net = BlockNet()
    x = net.qdq(net.input([5, 40]), *X)
    y = net.op("Relu", net.op("Add", net.op("MatMul", x, net.blocks((40, 12), 0, 16)), net.const(noise(12, 1.0))))
    net.output(net.qdq(y, 0.02, 0), [5, 12])
    bias = noise(12, 1.0).astype(np.float64)
    return net.model(), lambda feeds: np.maximum(real_input(feeds["x"]) @ net.real + bias, 0)


FORMS = {
    "gemm": lambda: gemm(False),
    "gemm of a transposed weight": lambda: gemm(True),
    "transposed behind its scales": turned_behind,
    "on the left": on_the_left,
    "behind it a bias and a Relu": rectified,
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    model, exact = FORMS[name]()
    require_exact(model, {"x": noise((5, 40))}, exact, differing=0, tolerance=0.02)


@pytest.mark.parametrize("op", ["Sigmoid", "Gelu", "Softmax"])
def test_a_function_behind_it(op):
    net = BlockNet()
    y = net.op(op, net.op("MatMul", net.qdq(net.input([64, 40]), *X), net.blocks((40, 16), 0, 16)))
    net.output(net.qdq(y, *((0.03, 20) if op == "Gelu" else (1 / 256, 0))), [64, 16])
    compare(net.model(), {"x": noise((64, 40))})


def test_conv_transpose():
    net = BlockNet()
    y = net.op(
        "ConvTranspose", net.qdq(net.input([2, 8, 5, 5]), *X), net.blocks((8, 3, 3, 3), 0, 4), strides=[2, 2], group=2
    )
    net.output(net.qdq(y, 0.02, 119), [2, 6, 11, 11])
    compare(net.model(), {"x": noise((2, 8, 5, 5))})


def test_activations_of_sixteen_bits_take_finer_weights():
    net = BlockNet()
    x = net.qdq(net.input([16, 300]), 1.3e-4, 31007, UINT16)
    net.output(net.qdq(net.op("MatMul", x, net.blocks((300, 12), 0, 32, INT8)), 3e-4, 33000, UINT16), [16, 12])
    model, feeds = net.model(), {"x": noise((16, 300))}
    result = convert(model)
    reference = run_reference(result.model, feeds)["y"]
    for level in LEVELS:
        np.testing.assert_array_equal(run(result.model, feeds, level)["y"], reference)
    exact = real_input(feeds["x"], 1.3e-4, 31007, 65535) @ net.real / np.float64(np.float32(3e-4)) + 33000
    codes = np.rint(reference.astype(np.float64) / np.float32(3e-4)) + 33000
    (row,) = result.certificate["requantizations"]
    assert row["error_bound"] < 0.01
    assert np.abs(codes - np.clip(exact, 0, 65535)).max() <= 0.5 + row["error_bound"]
    assert np.unique(codes).size > 50


# --- whole models ---------------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.point = nn.Conv2d(6, 20, 3, padding=1), nn.Conv2d(20, 40, 1)
        self.tokens, self.head = nn.Linear(40, 33), nn.Linear(33, 10)

    def forward(self, x):
        x = torch.relu(self.point(torch.relu(self.conv(x))))
        return self.head(torch.relu(self.tokens(x.flatten(2).transpose(1, 2))).mean(1))


CONFIGS = {
    "w4a8": qsdk.w4a8(block_size=16),
    "w8a8": qsdk.w8a8(block_size=8),
    "two levels": qsdk.w4a8(block_size=16).override("*", two_level_scales=True),
}


@pytest.fixture(scope="module", params=CONFIGS)
def exported(request, tmp_path_factory):
    torch.manual_seed(0)
    model, x = Small().eval(), torch.randn(8, 6, 12, 12)
    sim = qsdk.quantize(model, x, CONFIGS[request.param])
    qsdk.calibrate(sim, [x], progress=False)
    path = tmp_path_factory.mktemp("blocks") / "m.onnx"
    qsdk.export(sim, path)
    return path, x.numpy()


@pytest.mark.parametrize("options", [{}, {"target": "onnxruntime"}], ids=str)
def test_from_torch_to_integers(exported, options, tmp_path):
    report = qsdk.to_integer(exported[0], tmp_path / "i.onnx", data=[exported[1]], **options)
    assert (report.summary["float_tensors"], report.summary["quantize_nodes"]) == (0, 0)
    assert report.summary["operations_max_lsb"] <= 1
    assert report.summary["operations_differing"] <= 1e-3
    rows = json.loads((tmp_path / "i.onnx.certificate.json").read_text())["requantizations"]
    layers = [row for row in rows if row["op_type"] in ("Conv", "Gemm", "MatMul") or "weight_bits" in row]
    assert max(row["error_bound"] for row in layers) < 0.01
    stored = onnx.load(tmp_path / "i.onnx").graph.initializer
    assert all(t.data_type != TensorProto.FLOAT or np.prod(t.dims) <= 40 for t in stored)  # scales of kernels only


def test_firmware_programs_agree():
    model, _ = multiplied()
    feeds = {"x": floats((5, 40))}
    result = convert(model)
    data = archive(firmware_program(result))
    described, arrays = firmware_runner.load(data)
    (entry,) = described["outputs"]
    found = firmware_runner.run(data, firmware_runner.feed(described, "x", feeds["x"]))[entry["tensor"]]
    np.testing.assert_array_equal(found, run_reference(result.model, feeds, every_tensor=True)[entry["tensor"]])
    assert [op["op"] for op in described["ops"]] == [*["AccumulateMatMul"] * 3, "Requantize"]
    assert [arrays[op["parameters"]["weight"]].dtype for op in described["ops"][:3]] == [np.int8] * 3


# --- what is refused ------------------------------------------------------------------------------------------------


def test_a_scale_that_is_not_positive_is_refused():
    model, _ = multiplied(scale=lambda rng, shape: np.zeros(shape, np.float32))
    refused(model, "MatMul 'node_matmul", "a scale is 0.0", "recalibrate")


def test_accumulators_beyond_int32_are_refused():
    model, _ = multiplied((1, 300_000), (300_000, 1), 32)
    refused(model, "MatMul 'node_matmul", "its accumulator can reach", "beyond int32", "split the layer")


def test_an_embedding_with_blocks_is_quantized_again_at_conversion_time():
    net = BlockNet()
    rows = net.op("Gather", net.blocks((20, 8), 1, 4), net.input([2, 3], "ids", TensorProto.INT64))
    net.output(net.qdq(rows, 0.01, 100), [2, 3, 8])
    compare(net.model(), {"ids": np.arange(6).reshape(2, 3)}, tolerance=0.0)
