"""The Python of the guides runs as it stands, on the demo network."""

import re
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

import qsdk
from qsdk.demo.data import load
from qsdk.demo.model import load_pretrained

pytestmark = pytest.mark.slow  # what the guides use, the tests of each verb test

DOCS = Path(__file__).parents[2] / "docs"


def blocks_of(name: str) -> list[str]:
    (page,) = DOCS.rglob(name)
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def block_of(name: str) -> str:
    (block,) = blocks_of(name)
    return block


@pytest.fixture
def names(tmp_path, monkeypatch) -> dict:
    monkeypatch.chdir(tmp_path)
    data = load()
    images, labels = (torch.from_numpy(part[:64]) for part in (data.calibration_images, data.calibration_labels))

    def accuracy(sim) -> float:
        return float((sim(images).argmax(1) == labels).float().mean())

    return {"model": load_pretrained(), "example": images[:2], "batches": [images], "accuracy": accuracy}


def test_the_guide_to_precision_runs(names: dict):
    choosing, asking, trying = blocks_of("precision.md")
    exec(compile(choosing, "precision.md", "exec"), names)
    images = names["batches"][0]
    assert torch.equal(names["again"](images), names["sim"](images))
    assert names["report"].summary["met"]
    assert names["sim"].encodings["head:weight"].dtype.name == "int8"
    exec(compile(asking, "precision.md", "exec"), names)
    exec(compile(trying, "precision.md", "exec"), names)
    assert names["report"].summary["bytes"] <= 120_000
    assert Path("model.onnx").stat().st_size == names["report"].summary["bytes"]


def test_the_guide_to_comparisons_runs(names: dict):
    exec(compile(block_of("compare.md"), "compare.md", "exec"), names)
    summaries = [names[report].summary for report in ("quantized", "exported", "faulty", "dumped")]
    assert [summary["first_off"] for summary in summaries] == [None, None, "layer2.first.0:output", "layer1.act:output"]
    assert names["faulty"].summary["why"] in (DOCS / "guides" / "compare.md").read_text()
    assert "NHWC on side b" in {row["layout"] for row in names["dumped"].rows}


def test_the_guide_to_the_page_runs(names: dict):
    exec(compile(block_of("report.md"), "report.md", "exec"), names)
    assert names["worst"]["share"] > 0.1
    assert Path("both.html").stat().st_size > 100_000


def test_the_guide_to_callbacks_runs(names: dict):
    for block in blocks_of("callbacks.md"):
        exec(compile(block, "callbacks.md", "exec"), names)
    assert [name for name, *_ in names["logged"][:2]] == ["calibrate/moved_ranges", "adaround/error_before"]
    assert ("scale/head:weight", 0) in {(name, step) for name, _, step in names["logged"]}


def test_the_guide_to_post_training_quantization_runs(names: dict):
    exec(compile(block_of("ptq.md"), "ptq.md", "exec"), names)
    solved = [row for row in names["report"].rows if not row["note"]]
    assert solved
    assert all(row["error_after"] <= row["error_before"] for row in solved)


def test_the_guide_to_devices_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in blocks_of("gpu.md"):
        exec(compile(block, "gpu.md", "exec"), names)
    assert names["osim"].placement().summary["fell_back"] == 0


def test_the_guide_to_half_precision_runs(names: dict):
    exec(compile(block_of("half_precision.md"), "half_precision.md", "exec"), names)
    float_types = {value.type.tensor_type.elem_type for value in onnx.load("bfloat16.onnx").graph.input}
    assert float_types == {onnx.TensorProto.BFLOAT16}
    assert onnx.load("integer.onnx").graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    assert np.isfinite(names["outputs"][0]).all()


def test_the_guide_to_dtypes_runs(names: dict):
    exec(compile(block_of("dtypes.md"), "dtypes.md", "exec"), names)
    decisions = names["sim"].plan.decisions
    assert any(d.spec is not None and d.spec.scale_dtype == qsdk.float8e8m0 for d in decisions.values())
    assert any(decision.dynamic for decision in decisions.values())
    assert decisions["head:weight"].spec.scale_dtype == qsdk.float8e4m3fn
    held = {t.name: t.data_type for t in onnx.load("float4.onnx").graph.initializer}
    assert held["head:weight/scale_codes"] == onnx.TensorProto.FLOAT8E4M3FN


def test_the_guide_to_the_onnx_door_runs(names: dict):
    images = names["batches"][0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns about itself
        torch.onnx.export(names["model"], (images,), "float.onnx", dynamo=True, verbose=False)
    names["images"] = images.numpy()
    exec(compile(block_of("onnx.md"), "onnx.md", "exec"), names)
    np.testing.assert_array_equal(names["again"].run(names["images"])[0], names["outputs"][0])
    exact = names["model"](images).detach().numpy()
    assert (names["outputs"][0].argmax(1) == exact.argmax(1)).mean() > 0.95


def test_the_guide_to_encodings_runs(names: dict):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns about itself
        torch.onnx.export(names["model"], (names["example"],), "float.onnx", dynamo=True, verbose=False)
    exec(compile(block_of("encodings.md"), "encodings.md", "exec"), names)
    assert names["again"].encodings == names["sim"].encodings
    assert '"version": "1.0.0"' in Path("new.json").read_text()


def test_the_guide_to_export_runs(names: dict):
    exec(compile(block_of("export.md"), "export.md", "exec"), names)
    assert names["parity"].summary["passed"]
    assert names["parity"].summary["sqnr_db"] == np.inf
    assert names["options"] == {"session.qdq_matmulnbits_accuracy_level": "0"}


def test_the_guide_to_training_runs(names: dict):
    images, labels = names["batches"][0], torch.arange(64) % 10
    names["loader"] = list(zip(images.split(8), labels.split(8), strict=True))
    blocks = blocks_of("qat.md")
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, "qat.md", "exec"), names)
    assert names["sim"].encodings == names["again"].encodings
    assert torch.equal(names["sim"](images), names["again"](images))
    assert Path("trained.onnx").exists()


def test_the_guide_to_integers_runs(names: dict):
    exec(compile(block_of("integer.md"), "integer.md", "exec"), names)
    session = ort.InferenceSession("model.int.onnx", providers=["CPUExecutionProvider"])
    (output,) = session.run(None, names["x"])
    np.testing.assert_array_equal(output, next(iter(names["expected"].values())))
    assert {"parity", "requantizations", "measured"} <= set(names["certificate"])
    assert names["fast"].summary["operations_max_lsb"] <= 1
    assert names["chip"].summary["reference_equal"]


def test_the_guide_to_runtimes_runs(names: dict):
    for runtime in ("openvino", "onnxruntime_qnn"):
        pytest.importorskip(runtime, reason=f"{runtime} has no wheel for this system")
    for block in blocks_of("runtimes.md"):
        exec(compile(block, "runtimes.md", "exec"), names)
    assert names["report"].summary["integer_share"] > 0.5
