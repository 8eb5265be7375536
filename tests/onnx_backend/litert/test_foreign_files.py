"""Q/DQ files of ONNX Runtime's own tool as `.tflite` files: scales are kept, and what cannot be said is refused."""

import io
import warnings

import onnx
import pytest
import torch
from foreign_models import by_onnxruntime
from image_networks import NETWORKS, network
from onnxruntime.quantization import QuantType

import qsdk

#: a Sigmoid and a Tanh are calibrated to ranges that are much narrower than those of LiteRT's kernels
REFUSED = {"unet": "Sigmoid", "perceptron": "Tanh"}
NAMES = [pytest.param(n, marks=[] if n in ("mobilenet_v2", "unet") else [pytest.mark.slow]) for n in NETWORKS]


def by_their_tool(name, folder):
    """Export a network by torch and quantize it by ONNX Runtime; return the file and values for its input."""
    model, x = network(name)
    held, even = io.BytesIO(), list(NETWORKS).index(name) % 2 == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (x[:2],), held, input_names=["x"], dynamo=False, opset_version=17)
    kind = QuantType.QUInt8 if even else QuantType.QInt8
    options = {"activation_type": kind, "weight_type": QuantType.QInt8, "per_channel": even}
    return by_onnxruntime(onnx.load_from_string(held.getvalue()), tuple(x[:2].shape), folder, **options), x[:2].numpy()


@pytest.mark.parametrize("name", NAMES)
def test_files_of_onnxruntimes_tool_become_tflite_files(name, tmp_path):
    model, x = by_their_tool(name, tmp_path)
    sim, path = qsdk.quantize(model, None), tmp_path / "model.tflite"
    if name in REFUSED:
        with pytest.raises(qsdk.ExportError, match=rf"{REFUSED[name]}.*finer"):
            qsdk.export(sim, path, format="tflite")
        return
    qsdk.export(sim, path, format="tflite", check=False)
    assert qsdk.check_parity(sim, path, [{"x": x}], progress=False).summary["passed"]
