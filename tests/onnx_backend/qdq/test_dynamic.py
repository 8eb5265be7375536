"""Dynamic activations: DynamicQuantizeLinear, simulated, exported and read back."""

from itertools import pairwise

import numpy as np
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper
from qdq_models import convnet, make_model, mlp, run, weights
from torch import nn

import qsdk
from onnx_backend.proto.model_io import load
from onnx_backend.qdq.read import dynamic_pairs
from qsdk import ConfigError, w8a8
from qsdk.core.numerics import affine

DYNAMIC = w8a8().override(dynamic_activations=True)
RNG = np.random.default_rng(5)
ROWS = RNG.normal(size=(6, 6)).astype(np.float32)
IMAGES = RNG.normal(size=(2, 3, 8, 8)).astype(np.float32)


def runtime_session() -> ort.InferenceSession:
    node = helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"])
    kinds = {"q": TensorProto.UINT8, "s": TensorProto.FLOAT, "z": TensorProto.UINT8}
    outputs = [helper.make_tensor_value_info(name, kind, None) for name, kind in kinds.items()]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)]
    graph = helper.make_graph([node], "graph", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def arrays():
    for index in range(400):
        x = (RNG.normal(size=(5, 33)) * 10.0 ** RNG.integers(-6, 6)).astype(np.float32)
        yield (x, np.abs(x), -np.abs(x), np.round(x * 4) / 4, np.zeros_like(x))[index % 5]


def test_the_formula_is_the_runtimes_to_the_last_bit_in_numpy_and_torch():
    session = runtime_session()
    for x in arrays():
        codes, scale, zero_point = session.run(None, {"x": x})
        found = affine.dynamic_parameters(x.min(), x.max())
        assert (found[0], found[1]) == (scale, zero_point)
        assert np.array_equal(affine.quantize(x, *found, 0, 255), codes)
        in_torch = affine.dynamic_parameters(*torch.from_numpy(x).aminmax())
        assert [float(value) for value in in_torch] == [float(value) for value in found]


def test_the_plan_says_what_is_dynamic_and_what_follows_from_it():
    sim = qsdk.quantize(convnet(), None, DYNAMIC)
    rows = {row["site"]: row for row in sim.coverage().rows}
    assert (rows["relu:output"]["state"], rows["relu:output"]["granularity"]) == ("quantized", "per tensor, dynamic")
    # what only moves values has nothing to quantize: it is on their grid
    assert (rows["pool:output"]["state"], rows["pool:output"]["dtype"]) == ("tied", "float32")
    assert "holds values of concat:output, which is quantized dynamically" in rows["pool:output"]["reason"]
    assert rows["gemm:bias"]["reason"] == "the scale of its input is found while the model runs"
    assert rows["gemm:weight"]["dtype"] == "int8"
    assert sim.ready().keys() == {"conv:weight", "deconv:weight", "gemm:weight"}


@pytest.mark.spread(1)
@pytest.mark.parametrize("model", [mlp, convnet])
def test_no_data_is_needed_and_the_file_gives_what_the_simulation_gives(model, tmp_path):
    x = ROWS if model is mlp else IMAGES
    sim = qsdk.quantize(model(), None, DYNAMIC)
    qsdk.calibrate(sim, [])
    report = qsdk.export(sim, tmp_path / "model.onnx")
    assert "DynamicQuantizeLinear" in {row["form"] for row in report.rows}
    parity = qsdk.check_parity(sim, tmp_path / "model.onnx", [x], progress=False)
    assert parity.summary["passed"], parity
    checked = {row["site"] for row in parity.rows if row["kind"] not in ("weight", "bias")}
    assert checked == {site for site, decision in sim.plan.decisions.items() if decision.dynamic}
    outputs = sim.run(x)
    for got, wanted in zip(run(load(tmp_path / "model.onnx"), {"x": x}), outputs, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1.01 * float(np.ptp(wanted)) / 255)


@pytest.mark.slow
def test_a_dynamic_file_comes_back_and_goes_out_the_same(tmp_path):
    sim = qsdk.quantize(convnet(), None, w8a8().override("conv*", dynamic_activations=True))
    qsdk.calibrate(sim, [IMAGES], progress=False)
    paths = [tmp_path / f"{name}.onnx" for name in ("first", "second", "third")]
    qsdk.export(sim, paths[0])
    for before, after in pairwise(paths):
        again = qsdk.quantize(before, None, None)
        assert [place.site for place in dynamic_pairs(load(before))] == ["relu:output"]
        assert again.plan.decisions["relu:output"].spec == sim.plan.decisions["relu:output"].spec
        assert again.encodings == sim.encodings
        for got, wanted in zip(again.run(IMAGES), sim.run(IMAGES), strict=True):
            assert got.tobytes() == wanted.tobytes()
        qsdk.export(again, after)
    assert paths[1].read_bytes() == paths[2].read_bytes()


def test_a_difference_in_a_dynamic_site_is_found():
    sim = qsdk.quantize(mlp(), None, DYNAMIC)
    qsdk.calibrate(sim, [])
    model = sim.qdq_model()
    quantize = next(node for node in model.graph.node if node.op_type == "DynamicQuantizeLinear")
    model.graph.node.append(helper.make_node("Mul", [quantize.input[0], quantize.input[0]], ["squared"]))
    quantize.input[0] = "squared"
    nodes = sorted(model.graph.node, key=lambda node: node.output[0] != "squared")
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    parity = qsdk.check_parity(sim, model, [ROWS], progress=False)
    assert not parity.summary["passed"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)).reshape(-1, 16))


def test_both_doors_agree_and_training_goes_through(tmp_path):
    torch.manual_seed(0)
    x = torch.from_numpy(ROWS)
    sim = qsdk.quantize(Net(), x, DYNAMIC.skip("second", dtype="float16"))
    qsdk.calibrate(sim, [])
    qsdk.export(sim, tmp_path / "model.onnx")
    parity = qsdk.check_parity(sim, tmp_path / "model.onnx", [x], progress=False)
    assert parity.summary["passed"], parity
    again = qsdk.quantize(tmp_path / "model.onnx", None, None)
    np.testing.assert_allclose(again.run(ROWS)[0], sim(x).numpy(), rtol=2e-3, atol=2e-3)  # float16 at the end
    with sim.training() as model:
        model(x).square().sum().backward()
    assert all(bool(p.grad.abs().sum() > 0) for p in (model.first.weight, model.second.weight))
    assert sim(x[:0]).shape == (0, 3)


def test_the_example_of_the_formula():
    """Worked by hand: -1..3 in 255 steps of 4/255, zero point 64."""
    x = np.float32([-1, 0, 1, 3])
    scale, zero_point = affine.dynamic_parameters(x.min(), x.max())
    assert (float(scale), float(zero_point)) == (float(np.float32(4) / np.float32(255)), 64)
    assert affine.quantize(x, scale, zero_point, 0, 255).tolist() == [0, 64, 128, 255]


@pytest.mark.parametrize("config", [qsdk.w8a16(), w8a8(symmetric_activations=True)], ids=["uint16", "symmetric"])
def test_only_asymmetric_uint8_is_dynamic(config):
    with pytest.raises(ConfigError, match="a dynamic activation is asymmetric uint8 per tensor"):
        qsdk.quantize(mlp(), None, config.override(dynamic_activations=True))


def test_a_float_dynamic_site_can_be_left_out():
    sim = qsdk.quantize(mlp(), None, DYNAMIC.skip("relu"))
    assert sim.plan.decisions["relu:output"].spec is None
    back = sim.plan.decisions["x:input"]
    assert back.dynamic
    sim = qsdk.quantize(mlp(), None, DYNAMIC.override("x", dynamic_activations=False))
    assert not sim.plan.decisions["x:input"].dynamic
    assert sim.plan.decisions["x:input"].quantized


def test_a_saved_sim_keeps_what_is_dynamic(tmp_path):
    model = make_model(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "mm")], {"x": ["n", 6]}, {"y": ["n", 4]}, weights(w=(6, 4))
    )
    sim = qsdk.quantize(model, None, DYNAMIC)
    qsdk.calibrate(sim, [])
    qsdk.save(sim, tmp_path / "sim.qsdk")
    again = qsdk.load(tmp_path / "sim.qsdk")
    assert again.plan == sim.plan
    assert again.run(ROWS)[0].tobytes() == sim.run(ROWS)[0].tobytes()
