"""Values that layers round while the model runs and that a residual sum reads too: the sum has them as they are."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnxruntime.quantization import quantize_dynamic
from torch import nn

import qsdk
from qsdk.core.planning.plan import WHOLE

DYNAMIC = qsdk.QuantConfig(dynamic_activations=True)


class PostNorm(nn.Module):
    """Blocks whose norms stand behind the sums, as BERT has them: what a norm gives is multiplied and added."""

    def __init__(self, attention=False):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True) if attention else None
        self.wide, self.narrow = (nn.ModuleList(nn.Linear(*n) for _ in range(3)) for n in ((16, 64), (64, 16)))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))

    def forward(self, x):
        """Keep the shape, [N, T, 16]."""
        if self.attention is not None:
            x = x + self.attention(x, x, x, need_weights=False)[0]
        for wide, narrow, norm in zip(self.wide, self.narrow, self.norms, strict=True):
            x = norm(x + narrow(torch.relu(wide(x))))
        return x


def decibels(got, wanted):
    return 10 * np.log10((wanted**2).sum() / ((got - wanted) ** 2).sum())


def outputs(path, x):
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["linear", "attention"])
def exported(request, tmp_path_factory):
    torch.manual_seed(0)
    model, folder = PostNorm(request.param).eval(), tmp_path_factory.mktemp("post_norm")
    batches = [torch.randn(4, 12, 16) for _ in range(6)]
    sim = qsdk.quantize(model, batches[0], DYNAMIC.for_dialect("onnxruntime", processor="vnni"))
    qsdk.calibrate(sim, batches, progress=False)
    qsdk.export(sim, folder / "ours.onnx")
    return sim, model, batches, folder


def test_an_ordinary_session_computes_the_simulation(exported):
    sim, _, batches, folder = exported
    with torch.no_grad():
        assert decibels(outputs(folder / "ours.onnx", batches[1]), sim(batches[1]).numpy()) > 60
    assert qsdk.check_parity(sim, folder / "ours.onnx", batches, progress=False).summary["passed"]


def test_the_sum_has_the_values_and_coverage_says_so(exported):
    sim, *_, folder = exported
    norm = sim.plan.decisions["norms.0:output"]
    assert norm.state == "float"
    assert norm.reason == "each of its layers rounds it to uint8; what else reads it has its values"
    assert sim.plan.decisions["wide.1:weight"].input_block == WHOLE
    assert "rounds its input to uint8" in sim.explain("wide.1:weight")
    assert sim.plan.decisions["narrow.1:weight"].input_block is None  # nothing else reads what it multiplies
    graph = onnx.load(folder / "ours.onnx").graph
    makers = {name: node.op_type for node in graph.node for name in node.output}
    sums = [node for node in graph.node if node.op_type == "Add" and {makers.get(n) for n in node.input} >= {"Add"}]
    assert sums
    assert not any("DequantizeLinear" in {makers.get(name) for name in node.input} for node in sums)
    assert sum(node.op_type == "MatMulInteger" for node in graph.node) >= 6


def test_it_is_as_near_to_float_as_the_runtimes_own_tool(exported):
    _, model, batches, folder = exported
    torch.onnx.export(model, (batches[0],), folder / "float.onnx", dynamo=True, verbose=False)
    quantize_dynamic(Path(folder / "float.onnx"), Path(folder / "theirs.onnx"), per_channel=True)
    with torch.no_grad():
        exact = [model(x).numpy() for x in batches]
    ours, theirs = (
        np.mean([decibels(outputs(folder / f"{name}.onnx", x), y) for x, y in zip(batches, exact, strict=True)])
        for name in ("ours", "theirs")
    )
    assert ours > theirs - 1  # which leaves products of two activations float
    config = DYNAMIC.for_dialect("onnxruntime", processor="vnni", placement="all")
    qsdk.calibrate(everywhere := qsdk.quantize(model, batches[0], config), batches, progress=False)
    with torch.no_grad():
        assert ours > decibels(everywhere(batches[1]).numpy(), exact[1]) + 3


def test_a_file_that_is_read_back_rounds_the_same_inputs(exported, tmp_path):
    sim, _, batches, folder = exported
    again = qsdk.quantize(folder / "ours.onnx")
    rounding = {site for site, decision in sim.plan.decisions.items() if decision.input_block == WHOLE}
    assert {site for site, decision in again.plan.decisions.items() if decision.input_block == WHOLE} == rounding
    qsdk.export(again, tmp_path / "again.onnx")
    np.testing.assert_array_equal(
        outputs(tmp_path / "again.onnx", batches[1]), outputs(folder / "ours.onnx", batches[1])
    )


def test_the_model_as_onnx_is_planned_alike(exported, tmp_path):
    sim, model, batches, _ = exported
    torch.onnx.export(model, (batches[0],), tmp_path / "float.onnx", dynamo=True, verbose=False)
    onnx_sim = qsdk.quantize(tmp_path / "float.onnx", config=sim.config)
    qsdk.calibrate(onnx_sim, [{"x": batch.numpy()} for batch in batches], progress=False)
    qsdk.export(onnx_sim, tmp_path / "ours.onnx")
    with torch.no_grad():
        assert decibels(outputs(tmp_path / "ours.onnx", batches[1]), sim(batches[1]).numpy()) > 60


def test_the_solvers_see_rounded_inputs(exported):
    sim, model, batches, _ = exported
    tuned = qsdk.quantize(model, batches[0], sim.config)
    qsdk.calibrate(tuned, batches, progress=False)
    qsdk.gptq(tuned, batches, progress=False)
    with torch.no_grad():
        before, after = (sum(float((one(x) - model(x)).square().mean()) for x in batches) for one in (sim, tuned))
    assert after < before


class Functional(nn.Module):
    """A function of torch that multiplies what a layer and a sum read too."""

    def __init__(self):
        super().__init__()
        self.weight, self.layer, self.last = nn.Parameter(torch.randn(12, 12)), nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x):
        y = torch.relu(self.layer(x))
        return nn.functional.linear(y, self.weight) + self.last(y) + y


def test_what_a_function_multiplies_is_rounded_for_all_readers(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 8, 12)
    sim = qsdk.quantize(Functional(), x, DYNAMIC.for_dialect("onnxruntime"))
    qsdk.calibrate(sim, [x], progress=False)
    assert sim.plan.decisions["relu.0:output"].dynamic
    assert not any(decision.input_block for decision in sim.plan.decisions.values())
    qsdk.export(sim, tmp_path / "m.onnx")
    ops = [node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node]
    assert (ops.count("MatMulInteger"), ops.count("MatMul")) == (3, 0)
    with torch.no_grad():
        assert decibels(outputs(tmp_path / "m.onnx", x), sim(x).numpy()) > 60
