"""LSTM layers that round their input and their states to uint8, as ONNX Runtime's DynamicQuantizeLSTM does."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

import qsdk
from qsdk import ExportError, QuantConfig, w8a8, weight_only
from qsdk.core.planning.plan import WHOLE

DYNAMIC = QuantConfig(dynamic_activations=True)


class Speech(nn.Module):
    """A recurrent layer and a Linear on every step."""

    def __init__(self, kind="LSTM", **options):
        super().__init__()
        self.layer = getattr(nn, kind)(12, 16, **options)
        self.head = nn.Linear(16 * (1 + options.get("bidirectional", False)), 5)

    def forward(self, x):
        """Give [T, N, 5], or [N, T, 5]."""
        return self.head(self.layer(x)[0])


def quantized(config, batch=1, **options):
    torch.manual_seed(1)
    model = Speech(**options).eval()
    shape = (batch, 20, 12) if options.get("batch_first") else (20, batch, 12)
    batches = [torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    sim = qsdk.quantize(model, batches[0], config)
    qsdk.calibrate(sim, batches, progress=False)
    return model, sim, batches


def in_session(path, x, threads=1):
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


def rounding(sim):
    return [site for site, decision in sim.plan.decisions.items() if decision.input_block == WHOLE]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "options"),
    [
        (DYNAMIC.for_dialect("onnxruntime"), {"batch_first": True}),
        (DYNAMIC.for_dialect("onnxruntime", processor="vnni"), {"bidirectional": True, "num_layers": 2, "batch": 3}),
        (DYNAMIC.for_dialect("onnxruntime", processor="avx2"), {"bias": False}),
        (DYNAMIC.override("*", op_type="LSTM", compute="int8"), {"bidirectional": True}),
        (weight_only("int8", compute="int8"), {"batch": 3}),
        (weight_only("int4", block_size=4).for_dialect("onnxruntime"), {}),
    ],
    ids=str,
)
def test_an_ordinary_session_rounds_the_states_as_the_simulation_does(config, options, tmp_path):
    model, sim, batches = quantized(config, **options)
    assert len(rounding(sim)) == options.get("num_layers", 1)
    reasons = {row["site"]: row["reason"] for row in sim.coverage().rows}
    assert all("its state in each step, to uint8" in reasons[site] for site in rounding(sim))
    report = qsdk.export(sim, tmp_path / "m.onnx")
    assert not report.summary.get("session_options")
    ops = [node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node]
    assert (ops.count("DynamicQuantizeLSTM"), ops.count("LSTM")) == (options.get("num_layers", 1), 0)
    with torch.no_grad():
        wanted, exact = sim(batches[1]).numpy(), model(batches[1]).numpy()
    got = in_session(tmp_path / "m.onnx", batches[1])
    noise = np.sqrt(np.mean((wanted - exact) ** 2))
    # a value at the edge between two codes may take the other one: within the rounding that is simulated
    assert np.sqrt(np.mean((got - wanted) ** 2)) < 0.2 * noise
    assert np.median(np.abs(got - wanted)) < 1e-6 or "*" in str(config)
    parity = qsdk.check_parity(sim, tmp_path / "m.onnx", batches, progress=False).summary
    assert parity["passed"]
    assert parity["weights_max_lsb"] == 0
    assert not [row for row in qsdk.validate(tmp_path / "m.onnx").rows if row["severity"] == "error"]
    again = qsdk.quantize(tmp_path / "m.onnx")
    np.testing.assert_allclose(again.run(batches[1].numpy())[0], got, atol=1e-5)
    qsdk.export(again, tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "m.onnx").read_bytes()
    qsdk.save(sim, tmp_path / "saved")
    with torch.no_grad():
        np.testing.assert_array_equal(qsdk.load(tmp_path / "saved", model)(batches[1]).numpy(), wanted)


@pytest.mark.slow
def test_a_float_file_is_simulated_by_the_kernel_and_exported_the_same(tmp_path):
    model, _, batches = quantized(DYNAMIC, batch=2)
    torch.onnx.export(model, (batches[0],), tmp_path / "float.onnx", dynamo=True, opset_version=21, verbose=False)
    config = weight_only("int8", compute="int8")
    sim = qsdk.quantize(tmp_path / "float.onnx", None, config)
    values = [x.numpy() for x in batches]
    qsdk.calibrate(sim, values, progress=False)
    _, torch_sim, _ = quantized(config, batch=2)
    with torch.no_grad():
        np.testing.assert_allclose(sim.run(values[1])[0], torch_sim(batches[1]).numpy(), atol=2e-3)
    qsdk.export(sim, tmp_path / "m.onnx")
    np.testing.assert_allclose(in_session(tmp_path / "m.onnx", batches[1]), sim.run(values[1])[0], atol=1e-5)


@pytest.mark.slow
def test_the_states_are_rounded_in_training_and_gradients_pass(tmp_path):
    _, sim, batches = quantized(weight_only("int8", compute="int8"))
    exact = quantized(weight_only("int8"))[1]
    with torch.no_grad():
        assert not torch.allclose(sim(batches[0]), exact(batches[0]), atol=1e-5)
    with sim.training():
        before = sim.model(batches[0]).detach()
        sim.model(batches[0]).square().sum().backward()
        assert float(sim.model.layer.weight_hh_l0.grad.abs().max()) > 0
    with torch.no_grad():
        torch.testing.assert_close(sim(batches[0]), before, atol=1e-5, rtol=0)


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (DYNAMIC, "LSTM"),
        (DYNAMIC.for_dialect("onnxruntime"), "GRU"),  # the runtime has no such kernel
        (DYNAMIC.for_dialect("onnxruntime").override("layer", compute="float32"), "LSTM"),
        (w8a8().override("layer", compute="int8"), "LSTM"),  # its input is on a grid of calibration
        (w8a8().for_dialect("onnxruntime"), "LSTM"),
    ],
    ids=str,
)
def test_other_layers_keep_their_states(config, kind, tmp_path):
    _, sim, _ = quantized(config, kind=kind)
    assert not rounding(sim)
    qsdk.export(sim, tmp_path / "m.onnx")
    assert kind in [node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node]


def test_files_for_others_are_refused_with_the_layer_and_the_remedy(tmp_path):
    _, sim, _ = quantized(weight_only("int8", compute="int8"))
    with pytest.raises(ExportError, match=r"LSTM of layer:weight_hh_l0 rounds its state .* compute=\"float32\""):
        qsdk.export(sim, tmp_path / "m.onnx", dialect="onnx")
    assert not list(tmp_path.iterdir())


def test_several_threads_round_their_own_rows_within_the_noise_of_one(tmp_path):
    model, sim, batches = quantized(DYNAMIC.for_dialect("onnxruntime"), batch=8)
    qsdk.export(sim, tmp_path / "m.onnx")
    with torch.no_grad():
        exact = model(batches[1]).numpy()
    one, two = (in_session(tmp_path / "m.onnx", batches[1], threads) for threads in (1, 2))
    assert np.sqrt(np.mean((one - two) ** 2)) < 0.7 * np.sqrt(np.mean((one - exact) ** 2))


class Mixed(nn.Module):
    """A convolution, and a Linear behind what only moves values."""

    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv1d(4, 8, 3), nn.Linear(8, 6)

    def forward(self, x):
        """Give [N, T, 6]."""
        return self.linear(self.conv(x).transpose(1, 2))


def test_only_what_a_linear_reads_is_found_while_the_model_runs():
    batch = torch.randn(2, 4, 9)
    sim = qsdk.quantize(Mixed().eval(), batch, DYNAMIC.for_dialect("onnxruntime"))
    dynamic = [site for site, decision in sim.plan.decisions.items() if decision.dynamic]
    assert len(dynamic) == 1
    assert "transpose" in dynamic[0]
    assert sim.plan.decisions["conv:weight"].quantized
