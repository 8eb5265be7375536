"""What Qualcomm's HTP computes wrong for some operands is refused, and is wrong there; its neighbours are neither."""

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper

import qsdk
from onnx_backend.runtimes.onnxruntime import OnnxRuntimeRunner
from onnx_backend.runtimes.qnn import QnnRunner
from onnx_backend.runtimes.validate import validate

X = np.random.default_rng(0).uniform(-1, 1, (1, 8, 4, 6)).astype(np.float32)
STEP = 0.0625
PADS = (0, 0, 1, 1, 0, 0, 1, 1)
POOL = {"kernel_shape": [3, 3], "strides": [2, 2]}
#: op, attributes, second operand, scale of the result -> whether the HTP goes wrong
CASES = {
    "depth to space, another scale": ("DepthToSpace", {"blocksize": 2}, None, 0.004, True),
    "space to depth, another scale": ("SpaceToDepth", {"blocksize": 2}, None, 0.004, True),
    "depth to space, one scale": ("DepthToSpace", {"blocksize": 2}, None, 1 / 127, False),
    "depth to space, another dtype": ("DepthToSpace", {"blocksize": 2}, None, 0.003, False),
    "a transpose, another scale": ("Transpose", {"perm": [0, 2, 3, 1]}, None, 0.004, False),
    "padding by the edge, another scale": ("Pad", {"mode": "edge"}, PADS, 0.004, True),
    "padding by a mirror, another scale": ("Pad", {"mode": "reflect"}, PADS, 0.004, True),
    "padding by the edge, one scale": ("Pad", {"mode": "edge"}, PADS, 1 / 127, False),
    "padding by zeros, another scale": ("Pad", {}, PADS, 0.004, False),
    "a running sum of channels": ("CumSum", {}, 1, STEP, True),
    "a running sum of the last axis": ("CumSum", {}, -1, STEP, False),
    "a mean of windows beyond the edge": ("AveragePool", POOL | {"ceil_mode": 1}, None, 0.006, True),
    "a mean of windows that fit": ("AveragePool", POOL | {"ceil_mode": 1, "pads": [0, 0, 1, 1]}, None, 0.006, False),
    "a mean of padded windows": ("AveragePool", POOL | {"pads": [0, 0, 1, 1]}, None, 0.006, False),
    "a largest of windows beyond the edge": ("MaxPool", POOL | {"ceil_mode": 1}, None, 1 / 127, False),
}


def between_pairs(name: str) -> ModelProto:
    op, attributes, operand, scale, _ = CASES[name]
    stored = {"s": np.float32(1 / 127), "z": np.uint8(128), "r": np.float32(scale), "rz": np.uint8(128)}
    if scale == 1 / 127:
        stored |= {"r": stored["s"]}
    if scale == 0.003:
        stored |= {"s": np.float32(1 / 32767), "z": np.uint16(32768)}
    stored |= {} if operand is None else {"operand": np.int64(operand)}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node(op, ["d"] if operand is None else ["d", "operand"], ["m"], "the_op", **attributes),
        helper.make_node("QuantizeLinear", ["m", "r", "rz"], ["p"]),
        helper.make_node("DequantizeLinear", ["p", "r", "rz"], ["y"]),
    ]
    edges = [helper.make_tensor_value_info("x", TensorProto.FLOAT, X.shape)]
    edges += [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    tensors = [numpy_helper.from_array(np.asarray(value), key) for key, value in stored.items()]
    graph = helper.make_graph(nodes, "graph", edges[:1], edges[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model)


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_by_name(name):
    found = [row for row in validate(between_pairs(name), dialect="qnn").rows if row["severity"] == "error"]
    assert [row["node"] for row in found] == ["the_op"] * CASES[name][-1]
    assert all("measured" in row["problem"] for row in found)


def test_a_running_sum_of_the_last_axis_is_named_too():
    rows = validate(between_pairs("a running sum of the last axis"), dialect="qnn").rows
    (row,) = [row for row in rows if row["rule"] == "dialect"]
    assert row["severity"] == "warning"
    assert "rounds every sum" in row["problem"]


@pytest.mark.parametrize(("size", "steps"), [(6625, 2), (1000, 1)])
def test_shares_of_many_elements_are_named_and_two_steps_off(size, steps, tmp_path):
    x = torch.randn(1, 40, size, generator=torch.Generator().manual_seed(0)) * 4
    sim = qsdk.quantize(torch.nn.Softmax(-1), x, qsdk.w8a8().for_dialect("qnn"))
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "model.onnx", dialect="qnn")
    found = [row["problem"] for row in qsdk.validate(tmp_path / "model.onnx", dialect="qnn").rows]
    assert any("may be 2 steps off along so many" in problem for problem in found) == (steps == 2)
    pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn has no wheel for this system")
    rows = qsdk.check_parity(sim, tmp_path / "model.onnx", [x], runtime="qnn", progress=False).rows
    assert max(row["max_lsb"] for row in rows) == steps


@pytest.mark.slow
def test_a_recurrent_layer_is_named(tmp_path):
    x = torch.randn(5, 1, 8)
    sim = qsdk.quantize(torch.nn.LSTM(8, 8), x, qsdk.w8a8().for_dialect("qnn"))
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "model.onnx", dialect="qnn")
    found = [
        row for row in qsdk.validate(tmp_path / "model.onnx", dialect="qnn").rows if "voice detector" in row["problem"]
    ]
    assert [row["severity"] for row in found] == ["warning"]


@pytest.mark.parametrize("name", CASES)
def test_it_is_wrong_on_the_htp_and_its_neighbours_are_not(name):
    pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn has no wheel for this system")
    model = between_pairs(name)
    (found,), (wanted,) = QnnRunner(model).run({"x": X}), OnnxRuntimeRunner(model).run({"x": X})
    assert (np.abs(found - wanted).max() / CASES[name][3] > 10) == CASES[name][-1]
