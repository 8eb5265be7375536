"""What computes in float16 and bfloat16 as torch's own modules of these types do, and what is only rounded."""

import copy

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper
from qdq_models import make_model
from torch import nn

import qsdk
from onnx_backend.proto.nodes import metadata
from onnx_backend.proto.weightless import types_of

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
both_types = pytest.mark.parametrize("dtype", DTYPES)


def captured(sim, x):
    with sim.captured() as values, torch.no_grad():
        sim.model(x)
    return {site: torch.from_numpy(value) for site, value in values.items()}


class Normed(nn.Module):
    """A convolution, and a BatchNorm with its activation."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()

    def forward(self, x):
        return self.act(self.bn(self.conv(x))).mean((2, 3))


class EveryOp(nn.Module):
    """What torch computes in a narrow type with one rounding, each as an output of its own."""

    def __init__(self):
        super().__init__()
        self.prelu, self.gn, self.rms = nn.PReLU(8), nn.GroupNorm(2, 8), nn.RMSNorm(9)
        self.conv, self.linear = nn.Conv1d(8, 6, 3, groups=2), nn.Linear(9, 7)
        self.table = nn.Embedding(5, 4)

    def forward(self, x, ids):
        positive = x.abs()
        shaped = [x.transpose(1, 2), x.reshape(-1, 9), x[:, 1:4], torch.cat([x, positive], 1), F.pad(x, (1, 1))]
        summed = [x + positive, x - positive, x * x, x / 2.5, -x, torch.maximum(x, -x), x.clamp(-1.5, 2.0)]
        smooth = [torch.sigmoid(x), torch.tanh(x), torch.erf(x), positive.sqrt(), torch.exp(x), torch.softmax(x, -1)]
        bent = [F.relu(x), F.leaky_relu(x, 0.25), F.elu(x), F.hardswish(x), F.hardsigmoid(x), self.prelu(x)]
        pooled = [F.avg_pool1d(x, 2), F.max_pool1d(x, 2), x.mean(-1), x.amax(-1), F.adaptive_avg_pool1d(x, 1)]
        layers = [self.gn(x), self.rms(x), self.conv(x), self.linear(x), x @ x.transpose(1, 2), self.table(ids)]
        return (positive, *shaped, *summed, *smooth, F.gelu(x), F.silu(x), *bent, *pooled, *layers)


@pytest.mark.spread(1)
@both_types
def test_every_op_computes_as_in_a_module_of_that_type(dtype, tmp_path):
    torch.manual_seed(1)
    model, x, ids = EveryOp().eval(), torch.randn(2, 8, 9), torch.tensor([[0, 3, 4], [1, 1, 2]])
    sim = qsdk.quantize(model, (x, ids), qsdk.w8a8().skip("*", dtype=dtype))
    narrow = copy.deepcopy(model).to(DTYPES[dtype])
    with torch.no_grad():
        wanted = narrow(x.to(DTYPES[dtype]), ids)
        got = sim.model(x, ids)
    assert [place for place, (a, b) in enumerate(zip(got, wanted, strict=True)) if not torch.equal(a, b.float())] == []
    kept = [d for d in sim.plan.decisions.values() if d.spec is not None and d.kind in ("activation", "output")]
    outside = [decision.site for decision in kept if not decision.computes_in]
    assert outside == ["rms:output"]  # written out on export, and nothing that float16 cannot hold may stay inside
    qsdk.export(sim, tmp_path / "m.onnx")
    report = qsdk.check_parity(sim, tmp_path / "m.onnx", [(x, ids)], progress=False)
    assert report.summary["passed"], str(report)


class WrittenOut(nn.Module):
    """A RMSNorm in functions, whose squares overflow float16; a factor that float16 lacks; sums in place."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x):
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        scaled = normed * 0.1
        total = scaled.clone()
        total.add_(normed)
        return total


def test_what_a_narrow_type_cannot_hold_is_computed_in_float32_and_rounded(tmp_path):
    model, x = WrittenOut(), 1000 * torch.randn(4, 8)
    sim = qsdk.quantize(model, x, qsdk.w8a8().skip("*", dtype="float16"))
    values = captured(sim, x)
    assert torch.isfinite(sim(x)).all()
    assert (sim(x) - model(x)).abs().max() < 0.01
    islands = {site for site, decision in sim.plan.decisions.items() if decision.computes_in}
    assert islands == {"add.1:output"}
    normed, scaled = values["mul.1:output"], values["mul.2:output"]
    assert torch.equal(scaled, (normed.half() * 0.1).float())
    assert torch.equal(sim(x), (scaled.half() + normed.half()).float())
    qsdk.export(sim, tmp_path / "m.onnx")
    assert qsdk.check_parity(sim, tmp_path / "m.onnx", [x], progress=False).summary["passed"]


@pytest.mark.slow
def test_a_batch_norm_whose_variance_overflows_keeps_its_parameters(tmp_path):
    model = Normed().eval()
    model.bn.running_var[2] = 1e6
    sim = qsdk.quantize(model, torch.randn(2, 3, 8, 8), qsdk.w8a8().skip("bn", dtype="float16"))
    rows = {row["site"]: row for row in sim.coverage().rows}
    assert (rows["(bn.running_var)"]["dtype"], rows["act:output"]["dtype"]) == ("float32", "float16")
    assert rows["(bn.running_var)"]["reason"].endswith("the result alone is rounded to float16")


class Recurrent(nn.Module):
    """A recurrent layer, whose exported form ends in ops that only move its values."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


def test_a_recurrent_layer_computes_in_float32_and_is_rounded(tmp_path):
    torch.manual_seed(0)
    model, x = Recurrent().eval(), torch.randn(2, 5, 8)
    sim = qsdk.quantize(model, x, qsdk.w8a8().skip("*", dtype="float16"))
    assert (sim(x) - model(x)).abs().max() < 0.01
    qsdk.export(sim, tmp_path / "m.onnx")
    assert qsdk.check_parity(sim, tmp_path / "m.onnx", [x], progress=False).summary["passed"]


@pytest.mark.slow
def test_in_a_sim_that_becomes_float16_the_islands_are_ordinary_ops(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    sim = qsdk.quantize(Normed().eval(), x, qsdk.w8a8().skip("bn", dtype="float16"))
    qsdk.calibrate(sim, [x], progress=False)
    sim.model.half()
    qsdk.export(sim, tmp_path / "m.onnx")
    written = onnx.load(tmp_path / "m.onnx")
    (norm,) = (node for node in written.graph.node if node.op_type == "BatchNormalization")
    assert types_of(written)[norm.output[0]][0] == "float16"
    assert not any(metadata(norm))
    assert qsdk.check_parity(sim, tmp_path / "m.onnx", [x.half()], progress=False).summary["passed"]


def test_encodings_that_are_applied_to_the_float_file_make_the_same_islands(tmp_path):
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "conv", pads=[1] * 4),
        helper.make_node("BatchNormalization", ["c", "gamma", "beta", "mean", "var"], ["n"], "bn"),
        helper.make_node("Relu", ["n"], ["r"], "relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["y"], "pool"),
    ]
    stored = {name: rng.uniform(0.3, 1.7, 8).astype(np.float32) for name in ("gamma", "beta", "mean", "var")}
    stored["w"] = rng.normal(size=(8, 3, 3, 3)).astype(np.float32)
    onnx.save(make_model(nodes, {"x": ["n", 3, 8, 8]}, {"y": ["n", 8, 1, 1]}, stored), tmp_path / "float.onnx")
    sim = qsdk.quantize(tmp_path / "float.onnx", None, qsdk.w8a8().skip("bn", dtype="float16"))
    qsdk.calibrate(sim, [rng.normal(size=(2, 3, 8, 8)).astype(np.float32)], progress=False)
    qsdk.export(sim, tmp_path / "q.onnx")
    qsdk.apply_encodings(tmp_path / "float.onnx", tmp_path / "q.encodings.json", tmp_path / "out.onnx")
    made, wanted = (onnx.load(tmp_path / name).graph for name in ("out.onnx", "q.onnx"))
    assert [node.SerializeToString() for node in made.node] == [node.SerializeToString() for node in wanted.node]
    types = {tensor.name: tensor.data_type for tensor in made.initializer}
    (norm,) = (node for node in made.node if node.op_type == "BatchNormalization")
    assert [types[name] for name in norm.input[1:]] == [TensorProto.FLOAT16] * 4
