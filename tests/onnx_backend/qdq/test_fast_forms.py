"""Dynamic int8 and weights of convolutions in the forms that ONNX Runtime computes fast, and back as pairs."""

import numpy as np
import onnx
import pytest
import torch
from fast_files import exported, require_same_sim
from torch import nn

import qsdk
from onnx_backend.proto.nodes import metadata
from onnx_backend.qdq.fast_forms import FORM_KEY


@pytest.mark.parametrize("weight", ["int8", "uint8", "int4"])
@pytest.mark.parametrize("shape", [(6, 24), (2, 3, 24)], ids=str)
def test_a_dynamic_linear_runs_as_one_kernel(weight, shape, tmp_path):
    torch.manual_seed(0)
    model, batches = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 8)), [torch.randn(shape)]
    config = qsdk.QuantConfig(weight=weight).override("*", dynamic_activations=True)
    sim, path, ran, wanted, got = exported(model, batches, config, tmp_path)
    assert ran.count("DynamicQuantizeMatMul") == 2
    assert not {"MatMul", "Gemm", "FusedMatMul"} & set(ran)
    np.testing.assert_allclose(got, wanted, atol=0.02 * np.abs(wanted).max())
    require_same_sim(sim, path, batches, tmp_path)
    qsdk.export(sim, path, dialect="onnx")  # other runtimes get the pairs
    assert not [node for node in onnx.load(path).graph.node if FORM_KEY in metadata(node)]


def test_what_else_reads_a_dynamic_tensor_reads_its_pair(tmp_path):
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16, bias=False)

        def forward(self, x):
            """Read one tensor by a layer and by a sum."""
            return torch.relu(x + self.layer(x))

    batches = [torch.randn(4, 16)]
    config = qsdk.w8a8().override("*", dynamic_activations=True)
    sim, path, ran, wanted, got = exported(Residual(), batches, config, tmp_path)
    assert "DynamicQuantizeMatMul" in ran or "MatMulIntegerToFloat" in ran
    np.testing.assert_allclose(got, wanted, atol=0.02 * np.abs(wanted).max())
    require_same_sim(sim, path, batches, tmp_path)


@pytest.mark.parametrize("weight", ["int8", "uint8", "int4", "uint4", "int3"])
def test_weights_of_convolutions_alone_are_dequantized_when_a_session_is_opened(weight, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.ConvTranspose2d(6, 4, 2, stride=2), nn.Conv2d(4, 4, 1))
    config, batches = qsdk.weight_only(weight).override("2", per_channel=False), [torch.randn(1, 4, 6, 6)]
    sim, path, ran, wanted, got = exported(model, batches, config, tmp_path)
    assert "DequantizeLinear" not in ran
    assert {"Cast", "Mul", "Reshape"}.isdisjoint(ran)
    np.testing.assert_allclose(got, wanted, atol=1e-5 * np.abs(wanted).max())
    require_same_sim(sim, path, batches, tmp_path)
    assert qsdk.export(sim, path).summary["bytes"] < 20_000


def far_apart(layer):
    """The layer with channels of very different sizes, so that a scale for all of them would show."""
    with torch.no_grad():
        layer.weight.mul_(torch.logspace(-3, 0, layer.weight.numel()).reshape(layer.weight.shape))
    return layer


class Cell(nn.Module):
    """A recurrent layer of both directions."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cell = getattr(nn, kind)(6, 4, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gives the states of all steps."""
        return self.cell(x)[0]


@pytest.mark.parametrize(
    ("model", "config", "shape"),
    [
        *((Cell(kind), qsdk.w8a8(), (5, 2, 6)) for kind in ("LSTM", "GRU")),
        (Cell("LSTM"), qsdk.weight_only("int8"), (5, 2, 6)),
        *(
            (nn.Sequential(nn.Linear(16, 16), norm(16), nn.Linear(16, 16)), qsdk.w8a8(), (4, 16))
            for norm in (nn.LayerNorm, nn.RMSNorm)
        ),
        (
            nn.Sequential(*(far_apart(nn.Conv2d(4, 4, 3)) for _ in range(2)), nn.ReLU()),
            qsdk.w8a8().override("0", dynamic_activations=True).override("*:input", dynamic_activations=True),
            (1, 4, 6, 6),
        ),
        (nn.Sequential(far_apart(nn.Linear(32, 16)), nn.Linear(16, 16)), qsdk.w4a8(block_size=16), (4, 32)),
        (
            far_apart(nn.Linear(32, 16)),
            qsdk.w4a8(block_size=16).override("*", weight="uint4", symmetric_weights=False),
            (4, 32),
        ),
    ],
    ids=["LSTM", "GRU", "LSTM weights", "LayerNorm", "RMSNorm", "dynamic convolutions", "blocks", "blocks uint4"],
)
def test_no_weight_that_is_read_in_floats_is_dequantized_in_every_run(model, config, shape, tmp_path):
    torch.manual_seed(0)
    batches = [torch.randn(shape)]
    sim, path, _, wanted, got = exported(model, batches, config, tmp_path)
    graph = onnx.load(tmp_path / "optimized.onnx").graph
    stored = {tensor.name for tensor in graph.initializer}
    whole = [n for n in graph.node if n.op_type == "DequantizeLinear" and n.input[0] in stored]
    assert not {"node_conv2d_weight_q", "node_conv2d_1_weight_q"} & stored  # int8 of floats
    assert [node for node in whole if not any(node.output[0] in n.input[2:] for n in graph.node)] == []
    np.testing.assert_allclose(got, wanted, atol=0.02 * np.abs(wanted).max())
    require_same_sim(sim, path, batches, tmp_path)


@pytest.mark.slow
def test_weights_in_blocks_and_between_quantized_activations_stay_pairs(tmp_path):
    batches = [torch.randn(1, 32, 4, 4)]
    for config in (qsdk.weight_only("int4", block_size=16), qsdk.w8a8(), qsdk.weight_only("float8e4m3fn")):
        sim, path, *_ = exported(nn.Sequential(nn.Conv2d(32, 4, 1)), batches, config, tmp_path)
        assert not [node for node in onnx.load(path).graph.node if FORM_KEY in metadata(node)]
        assert qsdk.check_parity(sim, path, batches, progress=False).summary["passed"]


@pytest.mark.parametrize(
    "config", [qsdk.w8a8(), qsdk.w8a8().for_dialect("onnxruntime", processor="vnni")], ids=["all", "kernels"]
)
@pytest.mark.parametrize("axes", [None, {"input": {0: "batch", 1: "length"}}], ids=["batch", "length"])
def test_a_linear_on_three_axes_is_one_kernel_at_any_size(axes, config, tmp_path):
    """And the weight of the norm in front is dequantized once, when the session is opened."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 8))
    nn.init.normal_(model[0].weight)
    batches = [torch.randn(2, 3, 24)]
    sim, path, ran, wanted, got = exported(model, batches, config, tmp_path, axes=axes)
    assert ran.count("QGemm") == 2
    assert not {"MatMul", "MatMulIntegerToFloat", "Add", "BiasGelu", "Gemm", "Mul", "Cast"} & set(ran)
    np.testing.assert_allclose(got, wanted, atol=0.02 * np.abs(wanted).max())
    require_same_sim(sim, path, batches, tmp_path)
    with torch.no_grad():
        more = torch.randn(5, 3 if axes is None else 7, 24)
        session = qsdk.session(path)
        (found,) = session.run(None, {session.get_inputs()[0].name: more.numpy()})
        np.testing.assert_allclose(found, sim(more).numpy(), atol=0.02 * np.abs(wanted).max())
    qsdk.export(sim, path, dialect="onnx")
    assert not [node for node in onnx.load(path).graph.node if FORM_KEY in metadata(node)]


class Head(nn.Module):
    """Makes an image of tokens and enlarges it, as heads for segmentation do."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Conv2d(12, 4, 1)

    def forward(self, x):
        """Give four channels."""
        image = self.first(x).transpose(1, 2).reshape(-1, 12, 2, 3)
        return self.last(nn.functional.interpolate(image, scale_factor=2.0, mode="bilinear"))


@pytest.mark.parametrize("config", [qsdk.w8a8(), qsdk.w8a8().for_dialect("onnxruntime")], ids=["all", "kernels"])
def test_an_image_made_of_tokens_has_its_channels_last_up_to_the_convolution(config, tmp_path):
    torch.manual_seed(0)
    batches = [torch.randn(2, 6, 8)]
    sim, path, ran, wanted, got = exported(Head(), batches, config, tmp_path)
    assert ran.count("Transpose") == 1  # of the result
    np.testing.assert_allclose(got, wanted, atol=0.02 * np.abs(wanted).max())
    require_same_sim(sim, path, batches, tmp_path)


def test_frozen_encodings_are_frozen_in_the_file(tmp_path):
    batches = [torch.randn(1, 4, 6, 6)]
    sim = qsdk.quantize(nn.Sequential(nn.Conv2d(4, 6, 3)), batches[0], qsdk.weight_only("int8"))
    qsdk.calibrate(sim, batches, progress=False)
    sim.freeze("0:weight")
    qsdk.export(sim, tmp_path / "m.onnx")
    assert [encoding.frozen for encoding in qsdk.quantize(tmp_path / "m.onnx", None).encodings.values()] == [True]


@pytest.mark.parametrize("key", ["qsdk.stands_for", "qsdk.part_of"])
def test_a_form_that_was_changed_is_refused(key, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    sim = qsdk.quantize(torch.nn.Linear(8, 4), x, qsdk.w8a8().override("*", dynamic_activations=True))
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    node = (
        next(n for n in model.graph.node if n.op_type == "Mul" and any(e.key == key for e in n.metadata_props))
        if (key == "qsdk.part_of")
        else next(n for n in model.graph.node if any(e.key == key for e in n.metadata_props))
    )
    if key == "qsdk.part_of":
        node.op_type = "Div"
    else:
        next(e for e in node.metadata_props if e.key == key).value = '["%"]'
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(qsdk.FileFormatError, match=r"stands_for.*export"):
        qsdk.check_parity(sim, tmp_path / "model.onnx", [x], progress=False)
