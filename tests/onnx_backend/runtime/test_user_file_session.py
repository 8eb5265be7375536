"""`qsdk.session` opens a file as it says it needs to be opened."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

import qsdk


@pytest.mark.parametrize("compute", ["float32", "int8"])
def test_a_file_of_weights_alone_is_right_without_reading_a_page(compute, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(4, 64)
    sim = qsdk.quantize(torch.nn.Linear(64, 8), x, qsdk.weight_only("int8", compute=compute))
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "m.onnx")
    wanted = sim(x).detach().numpy()
    (found,) = qsdk.session(tmp_path / "m.onnx", threads=1).run(None, {"input": x.numpy()})
    (plain,) = ort.InferenceSession(tmp_path / "m.onnx").run(None, {"input": x.numpy()})
    noise = {name: float(np.abs(y - wanted).max()) for name, y in (("opened", found), ("plain", plain))}
    assert noise["opened"] < 1e-5
    assert (noise["plain"] < 1e-5) == (compute == "int8")


def test_what_cannot_be_opened_is_said_by_name(tmp_path):
    with pytest.raises(qsdk.FileFormatError, match=r"missing\.onnx"):
        qsdk.session(tmp_path / "missing.onnx")
    with pytest.raises(qsdk.ConfigError, match="NoSuchProvider"):
        qsdk.session(_broken(tmp_path / "broken.onnx"), providers=["NoSuchProvider"])
    with pytest.raises(qsdk.FileFormatError, match=r"broken\.onnx: ONNX Runtime .* cannot load it: .*qsdk.validate"):
        qsdk.session(_broken(tmp_path / "broken.onnx"))


def _broken(path):
    node = onnx.helper.make_node("Relu", ["nowhere"], ["y"])
    y = onnx.helper.make_tensor_value_info("y", 1, [1])
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([node], "broken", [], [y])), path)
    return path
