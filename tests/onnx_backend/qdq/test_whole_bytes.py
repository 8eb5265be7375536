"""4-bit weights that no kernel reads packed are stored in 8 bits, and are 4-bit weights still."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto
from torch import nn

import qsdk
from onnx_backend.proto.graph_queries import initializers
from qsdk import ConfigError

BATCHES = [torch.randn(2, 4, 6, 6) for _ in range(2)]


def sim_of(config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 32))
    sim = qsdk.quantize(model.eval(), BATCHES[0], config)
    qsdk.calibrate(sim, BATCHES, progress=False)
    return sim


def stored_types(path):
    model = onnx.load(path)
    known = initializers(model.graph)
    pairs = [node for node in model.graph.node if node.op_type == "DequantizeLinear" and node.input[0] in known]
    types = {known[node.input[0]].data_type for node in pairs}
    return {TensorProto.DataType.Name(code) for code in types} - {"INT32"}


@pytest.mark.slow
@pytest.mark.parametrize("weight", ["int4", "uint4", "int4_strict"])
def test_the_kernels_for_integers_run_and_the_file_is_of_four_bits_still(weight, tmp_path):
    sim = sim_of(qsdk.QuantConfig(weight=weight))
    fast = qsdk.export(sim, tmp_path / "fast.onnx").summary
    small = qsdk.export(sim, tmp_path / "small.onnx", prefer="size").summary
    prefix = "U" if weight == "uint4" else ""
    assert stored_types(tmp_path / "fast.onnx") == {f"{prefix}INT8"}
    assert stored_types(tmp_path / "small.onnx") == {f"{prefix}INT4"}
    assert fast["bytes"] - fast["bytes_if_packed"] == (4 * 8 * 9 + 8 * 32) // 2
    assert "bytes_if_packed" not in small
    options = ort.SessionOptions()
    options.log_severity_level, options.optimized_model_filepath = 4, str(tmp_path / "optimized.onnx")
    ort.InferenceSession(tmp_path / "fast.onnx", options, providers=["CPUExecutionProvider"])
    ran = {node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node}
    assert {"QLinearConv", "QGemm"} <= ran
    for name in ("fast", "small"):
        path = tmp_path / f"{name}.onnx"
        parity = qsdk.check_parity(sim, path, BATCHES, progress=False).summary
        assert parity["passed"]
        assert "nodes written in another way" not in parity
        assert not [row for row in qsdk.validate(path).rows if row["severity"] != "note"]
        again = qsdk.quantize(path, None)
        encodings = sim.encodings
        assert sorted(str(e) for e in again.encodings.values()) == sorted(str(e) for e in encodings.values())
        qsdk.export(again, tmp_path / "again.onnx", prefer="speed" if name == "fast" else "size")
        assert (tmp_path / "again.onnx").read_bytes() == path.read_bytes()


def test_what_kernels_read_packed_and_other_dialects_stay_packed(tmp_path):
    sim = sim_of(qsdk.weight_only("int4", compute="int8"))
    qsdk.export(sim, tmp_path / "m.onnx")
    assert stored_types(tmp_path / "m.onnx") == {"INT4"}  # for MatMulNBits; the convolution computes in floats
    qsdk.export(sim_of(qsdk.w4a8()), tmp_path / "m.onnx", dialect="onnx")
    assert stored_types(tmp_path / "m.onnx") == {"INT4"}
    with pytest.raises(ConfigError, match="prefer='fast' is unknown; choose one of speed, size"):
        qsdk.export(sim, tmp_path / "m.onnx", prefer="fast")


def test_codes_beyond_four_bits_are_found(tmp_path):
    qsdk.export(sim_of(qsdk.w4a8()), tmp_path / "m.onnx")
    model = onnx.load(tmp_path / "m.onnx")
    weight = next(t for t in model.graph.initializer if t.data_type == TensorProto.INT8 and len(t.dims) == 4)
    weight.CopyFrom(onnx.numpy_helper.from_array(np.full(tuple(weight.dims), 9, np.int8), weight.name))
    assert "grid" in [row["rule"] for row in qsdk.validate(model).rows]
