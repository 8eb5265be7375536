"""W4A8 beside W8A16 beside float16 islands: from a sim to a file, ONNX Runtime, and back."""

import numpy as np
import pytest
from islands import BATCHES, DOORS, batches, dtypes, in_runtime, outputs, sim_at
from onnx import TensorProto

from onnx_backend.proto.model_io import load
from qsdk import ConfigError, calibrate, check_parity, export, float16, quantize, w4a8

both = pytest.mark.parametrize("door", DOORS)


def _mixed(door):
    """W4A8 beside W8A16 beside float16 islands."""
    sim = sim_at(door, "w4a8")
    sim.set_precision("bn*", float16)
    sim.set_precision("fc1", weight="int8", activation="uint16")
    sim.set_precision("fc2:weight", float16)
    return sim


@pytest.mark.slow
@both
def test_float16_layers_are_cast_islands_and_an_import_restores_them(door, tmp_path):
    sim = _mixed(door)
    path, again = tmp_path / "m.onnx", tmp_path / "again.onnx"
    export(sim, path)
    model = load(path)
    casts = {n.name for n in model.graph.node if n.op_type == "Cast"}
    assert {"conv1:output/dequantized/enter", "relu1:output/cast_back", "fc2:weight/cast_back"} <= casts
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    norms = [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    assert [types[name] for node in norms for name in node.input[1:]] == [TensorProto.FLOAT16] * 8
    assert check_parity(sim, path, batches(door), progress=False).summary["passed"]
    np.testing.assert_allclose(in_runtime(path), outputs(sim), atol=2 * float(sim.encodings["fc2:output"].scale[0]))
    back = quantize(path, None, None)
    float16_sites = {site for site, name in dtypes(back).items() if name == "float16"}
    assert float16_sites == {"relu1:output", "relu2:output", "fc2:weight"}
    assert float16_sites == {site for site, name in dtypes(sim).items() if name == "float16"}
    assert back.encodings == sim.encodings
    export(back, again)
    assert check_parity(back, again, list(BATCHES), progress=False).summary["passed"]
    assert _bare(again) == _bare(path)
    assert np.array_equal(in_runtime(again), in_runtime(path))
    calibrate(back, list(BATCHES), progress=False)
    assert float16_sites == {site for site, name in dtypes(back).items() if name == "float16"}


def _bare(path):
    model = load(path)
    del model.metadata_props[:]
    return model


def test_an_opened_file_says_that_it_has_no_config_to_change(tmp_path):
    export(sim_at("onnx"), tmp_path / "m.onnx")
    back = quantize(tmp_path / "m.onnx", None, None)
    with pytest.raises(ConfigError, match="opened from a Q/DQ file has no config to change; quantize the float model"):
        back.set_precision("fc1", "int4")
    with pytest.raises(ConfigError, match="has no config to change"):
        back.replan(w4a8())
