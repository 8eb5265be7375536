"""`providers=`: every session of a sim opens on the execution providers that the user names."""

import json

import numpy as np
import onnxruntime as ort
import pytest
import torch
from onnx import helper
from qdq_models import convnet, make_model, mlp, weights

import qsdk
from onnx_backend.runtime import providers
from qsdk import ConfigError
from qsdk.cli import main

AZURE, CPU = "AzureExecutionProvider", "CPUExecutionProvider"  # the first takes no op of ONNX: all fall back
rng = np.random.default_rng(0)
IMAGES = [rng.normal(size=(2, 3, 8, 8)).astype(np.float32) for _ in range(2)]
needs_azure = pytest.mark.skipif(AZURE not in ort.get_available_providers(), reason=f"needs {AZURE}")


@pytest.fixture
def opened(monkeypatch):
    """The providers of every session that simulates; the pool's own session, which computes nothing, is left out."""
    found = []

    class Recorded(ort.InferenceSession):
        def __init__(self, *given, **options):
            if "disabled_optimizers" in options:
                assert options["enable_fallback"] == 0
                found.append([name for name, _ in options["providers"]])
            super().__init__(*given, **options)

    monkeypatch.setattr(ort, "InferenceSession", Recorded)
    return found


def calibrated(model=None, **options):
    sim = qsdk.quantize(model or convnet(), None, qsdk.w8a8(), **options)
    qsdk.calibrate(sim, IMAGES, progress=False)
    return sim


@pytest.mark.slow
@needs_azure
def test_every_session_of_a_sim_is_on_its_providers(opened, tmp_path):
    sim = qsdk.quantize(convnet(), None, qsdk.w8a8(), providers=[AZURE, CPU])
    opened.clear()  # opening compares the file with its simplified form, as it is written, on the CPU
    qsdk.calibrate(sim, IMAGES, progress=False)
    qsdk.equalize(sim, IMAGES, progress=False)
    for verb in (qsdk.seq_mse, qsdk.adaround, qsdk.gptq, qsdk.correct_bias):
        qsdk.calibrate(sim, IMAGES, progress=False)
        verb(sim, IMAGES, progress=False)
    sim.run(IMAGES[0])
    sim.capture(IMAGES[0])
    qsdk.export(sim, tmp_path / "model.onnx")
    assert qsdk.check_parity(sim, tmp_path / "model.onnx", IMAGES, progress=False).summary["passed"]
    assert len(opened) > 10
    assert {tuple(names) for names in opened} == {(AZURE, CPU)}


@needs_azure
def test_batch_norm_is_reestimated_on_the_providers(opened):
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["t"], "conv"),
        helper.make_node("BatchNormalization", ["t", "scale", "shift", "mean", "variance"], ["y"], "bn"),
    ]
    stored = {**weights(w=(6, 3, 1, 1)), **{name: np.ones(6, np.float32) for name in nodes[1].input[1:]}}
    model = make_model(nodes, {"x": (2, 3, 8, 8)}, {"y": None}, stored)
    sim = qsdk.quantize(model, None, qsdk.w8a8(), fold_batch_norm=False, providers=[AZURE])
    opened.clear()
    qsdk.calibrate(sim, IMAGES, progress=False)
    qsdk.reestimate_batch_norm(sim, IMAGES, progress=False)
    assert opened
    assert {tuple(names) for names in opened} == {(AZURE, CPU)}


@needs_azure
def test_values_and_encodings_are_those_of_the_cpu_where_all_nodes_fall_back():
    here, there = calibrated(), calibrated(providers=[AZURE, CPU])
    assert here.encodings == there.encodings
    np.testing.assert_array_equal(here.run(IMAGES[0])[0], there.run(IMAGES[0])[0])


@needs_azure
def test_the_nodes_that_fell_back_are_listed():
    report = calibrated(providers=[(AZURE, {}), CPU]).placement()
    assert report.summary["providers"] == f"{AZURE}, {CPU}"
    assert report.summary["session"] == f"{AZURE}, {CPU}"
    assert report.summary["fell_back"] == report.summary["nodes"] == len(report.rows) > 0
    assert {row["provider"] for row in report.rows} == {CPU}
    assert "Conv" in {row["op_type"] for row in report.rows}


def test_on_the_cpu_nothing_falls_back():
    sim = calibrated(providers=[CPU])
    assert sim.providers == providers.CPU_ONLY
    assert sim.placement().summary["fell_back"] == 0
    assert "providers" not in sim.coverage().summary


@needs_azure
def test_a_qdq_file_takes_providers_too(opened, tmp_path):
    qsdk.export(calibrated(), tmp_path / "model.onnx")
    opened.clear()
    back = qsdk.quantize(tmp_path / "model.onnx", None, providers=[AZURE, CPU])
    back.run(IMAGES[0])
    assert opened == [[AZURE, CPU]]


@needs_azure
def test_a_saved_sim_opens_where_its_provider_is_missing_and_says_so(tmp_path, monkeypatch):
    sim = calibrated(providers=[(AZURE, {"key": 1}), CPU])
    qsdk.save(sim, tmp_path / "sim.qsdk")
    kept = qsdk.load(tmp_path / "sim.qsdk")
    assert kept.providers == sim.providers
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CPU])
    back = qsdk.load(tmp_path / "sim.qsdk")
    np.testing.assert_array_equal(back.run(IMAGES[0])[0], sim.run(IMAGES[0])[0])
    assert back.coverage().summary["providers"] == f"{AZURE} (not installed here), {CPU}"
    assert back.placement().summary["session"] == CPU
    qsdk.save(back, tmp_path / "again.qsdk")
    monkeypatch.undo()
    assert qsdk.load(tmp_path / "again.qsdk").providers == sim.providers


def test_a_provider_that_is_not_installed_is_an_error_that_lists_those_that_are(monkeypatch):
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["OneExecutionProvider", CPU])
    with pytest.raises(ConfigError, match=f"TwoExecutionProvider, which .* lacks; it has OneExecutionProvider, {CPU}"):
        qsdk.quantize(mlp(), None, qsdk.w8a8(), providers=["OneExecutionProvider", "TwoExecutionProvider", CPU])


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_a_provider_that_the_runtime_drops_is_an_error(monkeypatch):
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", CPU])
    with pytest.raises(ConfigError, match="CUDAExecutionProvider, which is installed but does not start"):
        qsdk.quantize(mlp(), None, qsdk.w8a8(), providers=["CUDAExecutionProvider", CPU])


@pytest.mark.parametrize("given", [CPU, 3, [], [3], [(CPU,)], [(CPU, "device_id")]])
def test_anything_else_is_an_error_that_shows_the_form(given):
    with pytest.raises(ConfigError, match=r"takes ONNX Runtime's list of names or \(name, options\) tuples"):
        qsdk.quantize(mlp(), None, qsdk.w8a8(), providers=given)


def test_a_provider_named_twice_is_an_error():
    with pytest.raises(ConfigError, match=f"names {CPU} twice"):
        qsdk.quantize(mlp(), None, qsdk.w8a8(), providers=[CPU, (CPU, {})])


def test_a_module_takes_no_providers():
    with pytest.raises(ConfigError, match=r"for an ONNX file; a module runs where it is: move it with model\.to"):
        qsdk.quantize(torch.nn.Linear(4, 2), torch.zeros(1, 4), qsdk.w8a8(), providers=[CPU])


def test_cuda_multiplies_float32_exactly_unless_told_otherwise(monkeypatch):
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", CPU])
    plain = providers.Providers((("CUDAExecutionProvider", {"device_id": "1"}),))
    assert plain.for_session() == [("CUDAExecutionProvider", {"use_tf32": "0", "device_id": "1"}), (CPU, {})]
    fast = providers.Providers((("CUDAExecutionProvider", {"use_tf32": "1"}), (CPU, {})))
    assert fast.for_session()[0] == ("CUDAExecutionProvider", {"use_tf32": "1"})


@needs_azure
def test_the_command_line_takes_providers_and_reports_the_fallback(tmp_path, capsys):
    (tmp_path / "float.onnx").write_bytes(convnet().SerializeToString())
    np.savez(tmp_path / "data.npz", x=np.concatenate(IMAGES))
    paths = [str(tmp_path / name) for name in ("float.onnx", "model.onnx")]
    data = ["--data", str(tmp_path / "data.npz"), "--json"]
    assert main(["quantize", *paths, *data, "--providers", AZURE, CPU]) == 0
    summary = json.loads(capsys.readouterr().out)["summary"]
    assert summary["providers"] == f"{AZURE}, {CPU}"
    assert summary["fell_back"] > 0
    assert main(["quantize", *paths, *data, "--providers", "NoneExecutionProvider"]) == 2
    assert "NoneExecutionProvider, which the installed ONNX Runtime" in capsys.readouterr().err
