"""Dtypes and forms of a module: simulated, exported, run by ONNX Runtime, opened again."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

import qsdk
from qsdk import QuantConfig, float8e4m3fn, float16, int16, uint16, w4a8, w4a16, w8a8, weight_only

RNG = np.random.default_rng(0)
BATCHES = [RNG.normal(size=(3, 5, 64)).astype(np.float32) for _ in range(2)]
TENSORS = [torch.from_numpy(x) for x in BATCHES]


class Net(nn.Module):
    """A Linear on three dimensions, and one on two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)).mean(1))


def exported(config: QuantConfig, path, **options):
    torch.manual_seed(0)
    example = torch.from_numpy(BATCHES[0])
    sim = qsdk.quantize(Net(), example, config)
    qsdk.calibrate(sim, TENSORS, progress=False)
    qsdk.export(sim, path, **options)
    return sim, sim(example).numpy()


@pytest.mark.slow
@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (w8a8(), 0),
        (w4a8(), 1),
        (w4a16(block_size=32), 1),
        (QuantConfig(int16, uint16), 1),
        (QuantConfig(float8e4m3fn, float8e4m3fn), 1),
    ],
    ids=["W8A8", "W4A8", "W4 block 32", "W16A16", "FP8"],
)
def test_the_runtime_is_within_one_lsb_and_importing_the_file_loses_nothing(config, expected: int, tmp_path):
    sim, wanted = exported(config, tmp_path / "model.onnx")
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(tmp_path / "model.onnx", options, providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {"x": BATCHES[0]})
    output = sim.encodings["second:output"]
    codes, right = (output.quantize(value).astype(np.float32) for value in (got, wanted))
    # of float8, an LSB is the next value: at most an eighth of this one
    step = 1.0 if config.activation.is_integer else np.maximum(np.abs(right) / 8, 2.0**-9)
    assert (np.abs(codes - right) <= expected * step).all()
    parity = qsdk.check_parity(sim, tmp_path / "model.onnx", TENSORS, progress=False)
    assert parity.summary["passed"], parity
    again = qsdk.quantize(tmp_path / "model.onnx", None, None)
    assert again.encodings == sim.encodings


@pytest.mark.slow
def test_the_linears_of_a_module_come_out_in_the_form_that_the_runtime_fuses(tmp_path):
    sim, wanted = exported(weight_only(block_size=32), tmp_path / "model.onnx")
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")  # float32 activations
    session = ort.InferenceSession(tmp_path / "model.onnx", options, providers=["CPUExecutionProvider"])
    made = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert made.count("MatMulNBits") == 2
    np.testing.assert_allclose(session.run(None, {"x": BATCHES[0]})[0], wanted, rtol=1e-5, atol=1e-5)
    again = qsdk.quantize(tmp_path / "model.onnx", None, None)
    assert again.encodings == sim.encodings
    qsdk.export(again, tmp_path / "second.onnx")
    qsdk.export(qsdk.quantize(tmp_path / "second.onnx", None, None), tmp_path / "third.onnx")
    assert (tmp_path / "second.onnx").read_bytes() == (tmp_path / "third.onnx").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "opset"), [("mxfp4", 24), ("nvfp4", 21)])
def test_formats_beside_a_float16_island_and_dynamic_activations(name: str, opset: int, tmp_path):
    config = w8a8().override("first", weight=name, dynamic_activations=True).skip("second", dtype=float16)
    sim, wanted = exported(config, tmp_path / "model.onnx", dialect="onnx", opset=opset)
    forms = {row["site"]: (row["dtype"], row["state"]) for row in sim.coverage().rows}
    assert forms["first:weight"] == ("float4e2m1", "quantized")
    assert forms["second:weight"] == ("float16", "float")
    parity = qsdk.check_parity(sim, tmp_path / "model.onnx", TENSORS, progress=False)
    assert parity.summary["passed"], parity
    again = qsdk.quantize(tmp_path / "model.onnx", None, None)
    assert again.encodings == sim.encodings
    np.testing.assert_allclose(again.run(BATCHES[0])[0], wanted, atol=np.ptp(wanted) / 255)


@pytest.mark.slow
def test_scales_that_are_confined_are_not_trained():
    torch.manual_seed(0)
    config = w4a16(block_size=32).override("first", two_level_scales=True).override("x", scale_bits=1)
    sim = qsdk.quantize(Net(), torch.from_numpy(BATCHES[0]), config)
    qsdk.calibrate(sim, TENSORS, progress=False)
    with sim.training(learn_scales=True):
        learned = {name for name, _ in sim.model.named_parameters() if name.endswith("_log2")}
    assert any("second" in name for name in learned)
    assert not any(name.startswith("first.qsdk_weight") for name in learned)
    before = sim.encodings["first:weight"]
    report = qsdk.seq_mse(sim, TENSORS, progress=False)
    assert report.summary["layers"] == 2
    moved = sim.encodings["first:weight"]
    ratio = moved.scale / (moved.scale.max(axis=1, keepdims=True) / 16)
    np.testing.assert_allclose(ratio, np.rint(ratio), rtol=1e-5)
    assert moved != before
