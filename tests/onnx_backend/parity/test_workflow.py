"""The verbs as a user composes them: export and back, companions, refusals, both doors."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsdk


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.head = nn.Linear(4 * 6 * 6, 3)

    def forward(self, x):
        return self.head(F.relu(self.conv(x)).flatten(1))


BATCHES = [torch.randn(5, 2, 6, 6, generator=torch.Generator().manual_seed(i)) for i in range(3)]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def sim(model):
    made = qsdk.quantize(model, BATCHES[0], qsdk.w8a8())
    qsdk.calibrate(made, BATCHES, progress=False)
    return made


@pytest.fixture
def exported(sim, tmp_path):
    qsdk.export(sim, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_the_encodings_file_says_what_the_model_says_whose_scales_stand_in_its_nodes_alone(sim, exported):
    text = json.loads((exported.parent / "model.encodings.json").read_text())
    metadata = {entry.key: entry.value for entry in onnx.load(exported).metadata_props}
    embedded = json.loads(metadata["qsdk.encodings"])
    assert set(text["encodings"]) == set(sim.encodings)
    assert embedded == {**text, "encodings": {}}
    (exported.parent / "model.encodings.json").unlink()
    back = qsdk.quantize(exported, None, None)
    assert back.encodings == sim.encodings
    scale = sim.encodings["head:output"].scale[0]
    np.testing.assert_allclose(back.run(BATCHES[0].numpy())[0], sim(BATCHES[0]).numpy(), atol=1.01 * scale)


def test_what_torch_notes_about_this_machine_stays_out_of_the_file(exported):
    model = onnx.load(exported)
    keys = {entry.key for node in model.graph.node for entry in node.metadata_props}
    assert keys <= {"qsdk.site", "qsdk.dtype", "qsdk.kind", "qsdk.perm"}
    assert str(Path(__file__).parent).encode() not in exported.read_bytes()


def test_exporting_twice_writes_the_same_bytes(sim, exported, tmp_path):
    qsdk.export(sim, tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == exported.read_bytes()


def test_an_encodings_file_of_another_export_is_refused(sim, exported):
    companion = exported.parent / "model.encodings.json"
    companion.write_text(companion.read_text().replace("conv:weight", "conv:other"))
    for verb in (
        lambda: qsdk.check_parity(sim, exported, BATCHES, progress=False),
        lambda: qsdk.to_integer(exported, exported.parent / "int.onnx"),
    ):
        with pytest.raises(qsdk.FileFormatError, match=r"model\.encodings\.json does not belong to .*export again"):
            verb()
    assert not (exported.parent / "int.onnx").exists()
    companion.unlink()  # the model holds its own copy
    assert qsdk.check_parity(sim, exported, BATCHES[:1], progress=False).summary["passed"]


def test_the_export_report_lists_every_site_with_its_form(sim, tmp_path):
    report = qsdk.export(sim, tmp_path / "model.onnx").to_dict()
    forms = {row["site"]: row["form"] for row in report["rows"]}
    assert set(forms) == set(sim.plan.decisions)
    assert forms["conv:weight"] == "integer initializer"
    assert forms["conv:bias"] == "int32 bias"
    assert forms["relu.0:output"] == "QDQ output_dtype and zero point"  # with both, a Reshape behind it moves codes
    assert report["summary"]["zero_point_bytes_saved"] > 0
    assert report["summary"]["paths"] == [str(tmp_path / "model.onnx"), str(tmp_path / "model.encodings.json")]
    pure = qsdk.export(sim, tmp_path / "pure.onnx", dialect="onnx").to_dict()["rows"]
    assert {row["site"]: row["form"] for row in pure}["relu.0:output"] == "QDQ output_dtype"


def test_uncalibrated_sites_are_refused_or_left_float(model, tmp_path):
    fresh = qsdk.quantize(model, BATCHES[0], qsdk.w8a8())
    with pytest.raises(qsdk.CalibrationError, match=r"x:input.*qsdk\.calibrate.*uncalibrated=\"float\""):
        qsdk.export(fresh, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []
    qsdk.export(fresh, tmp_path / "model.onnx", uncalibrated="float")
    written = onnx.load(tmp_path / "model.onnx")
    assert not any(node.op_type == "QuantizeLinear" for node in written.graph.node)
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    with torch.no_grad():
        expected = model(BATCHES[0]).numpy()
    np.testing.assert_allclose(session.run(None, {"x": BATCHES[0].numpy()})[0], expected, atol=1e-5)


def test_an_opset_that_cannot_be_written_is_refused(sim, tmp_path):
    with pytest.raises(qsdk.ConfigError, match="opset 12 cannot be written; choose one of 13 to 25"):
        qsdk.export(sim, tmp_path / "model.onnx", opset=12)


@pytest.mark.parametrize("opset", [21, 22, 23, 24, 25])
def test_every_offered_opset_loads_and_agrees(sim, tmp_path, opset):
    path = tmp_path / "model.onnx"
    qsdk.export(sim, path, opset=opset)
    assert {entry.domain: entry.version for entry in onnx.load(path).opset_import} == {"": opset}
    assert qsdk.check_parity(sim, path, BATCHES[:1], progress=False).summary["passed"]


def test_a_model_changed_after_quantization_is_refused_at_export(model, tmp_path):
    changed = qsdk.quantize(model, BATCHES[0], qsdk.w8a8())
    qsdk.calibrate(changed, BATCHES, progress=False)
    changed.model.head = nn.Sequential(nn.Linear(144, 3))
    with pytest.raises(qsdk.ExportError, match=r"head \(Sequential\) came into the model after.*quantize the model"):
        qsdk.export(changed, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_to_integer_writes_a_certificate_and_says_what_it_measured(exported):
    out = exported.parent / "model.int.onnx"
    summary = qsdk.to_integer(exported, out).summary
    certificate = json.loads((exported.parent / "model.int.onnx.certificate.json").read_text())
    assert summary["float_tensors"] == 0
    assert summary["max_lsb"] <= 1
    assert certificate["measured"]["reference_equal"]
    assert certificate["requantizations"]


class Folded(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return nn.functional.fold(self.linear(x)[:, :, None], (2, 2), (2, 2))


@pytest.mark.slow
def test_an_op_without_an_integer_form_is_refused_and_nothing_is_written(tmp_path):
    network = Folded()
    made = qsdk.quantize(network, torch.randn(2, 4), qsdk.w8a8())
    qsdk.calibrate(made, [torch.randn(8, 4)], progress=False)
    qsdk.export(made, tmp_path / "model.onnx")
    with pytest.raises(qsdk.IntegerError, match="Col2Im 'node_"):
        qsdk.to_integer(tmp_path / "model.onnx", tmp_path / "int.onnx")
    assert not list(tmp_path.glob("int.onnx*"))


@pytest.mark.slow
def test_both_doors_reach_the_same_encodings(model, sim, tmp_path):
    program = torch.onnx.export(model, (BATCHES[0],), dynamo=True, opset_version=18, verbose=False)
    program.save(tmp_path / "float.onnx")
    other = qsdk.quantize(tmp_path / "float.onnx", None, qsdk.w8a8())
    with pytest.raises(qsdk.ConfigError, match=r"forward= calls an nn\.Module"):
        qsdk.calibrate(other, [], forward=lambda m, b: m(b))
    qsdk.calibrate(other, [batch.numpy() for batch in BATCHES], progress=False)
    ours = sorted((e.dtype.name, e.scale.tolist()) for e in sim.encodings.values())
    theirs = sorted((e.dtype.name, e.scale.tolist()) for e in other.encodings.values())
    assert [dtype for dtype, _ in ours] == [dtype for dtype, _ in theirs]
    for (_, left), (_, right) in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5)
    qsdk.export(other, tmp_path / "other.onnx")
    assert qsdk.check_parity(other, tmp_path / "other.onnx", [b.numpy() for b in BATCHES], progress=False).summary[
        "passed"
    ]


@pytest.mark.slow
def test_a_channel_of_zeros_keeps_its_bias_at_both_doors(tmp_path):
    network = nn.Conv2d(1, 2, 1).eval()
    with torch.no_grad():
        network.weight[1] = 0
        network.bias.fill_(0.75)
    batch = 1e-4 * torch.rand(4, 1, 3, 3)
    made = qsdk.quantize(network, batch, qsdk.w8a8())
    qsdk.calibrate(made, [batch], progress=False)
    np.testing.assert_allclose(made(batch).numpy(), network(batch).detach().numpy(), atol=0.004)
    program = torch.onnx.export(network, (batch,), dynamo=True, opset_version=18, verbose=False)
    program.save(tmp_path / "float.onnx")
    other = qsdk.quantize(tmp_path / "float.onnx", None, qsdk.w8a8())
    qsdk.calibrate(other, [batch.numpy()], progress=False)
    np.testing.assert_allclose(other.run(batch.numpy())[0], network(batch).detach().numpy(), atol=0.004)


@pytest.mark.slow
def test_a_float16_island_is_refused_with_the_remedy(tmp_path, model):
    made = qsdk.quantize(model, BATCHES[0], qsdk.w8a8().skip("conv", dtype=qsdk.float16))
    qsdk.calibrate(made, BATCHES, progress=False)
    qsdk.export(made, tmp_path / "model.onnx")
    assert qsdk.check_parity(made, tmp_path / "model.onnx", BATCHES, progress=False).summary["passed"]
    with pytest.raises(qsdk.IntegerError, match=r"Conv 'node_conv2d': .* drop the rule that keeps it float"):
        qsdk.to_integer(tmp_path / "model.onnx", tmp_path / "int.onnx")
