"""What random journeys have found, each made small: the runtime, names, and what the doors disagreed on."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from compared_plans import compare_plans
from float_files import float_onnx, plan_of_module
from onnx import helper
from qdq_models import make_model, weights
from torch import Tensor, nn
from torch_models import calibrated, seeded
from zoo_models import distinct

from onnx_backend.opening.read_graph import read_graph
from qsdk import IntegerError, QuantConfig, calibrate, check_parity, export, float16, quantize, to_integer, w4a8, w8a8
from qsdk.core.planning.graph_matching import match_graphs

node = helper.make_node
RNG = np.random.default_rng(3)


def default_session(path: Path, *given: Tensor) -> list[np.ndarray]:
    session = ort.InferenceSession(path)
    names = [value.name for value in session.get_inputs()]
    return session.run(None, dict(zip(names, (x.numpy() for x in given), strict=True)))


# --- the runtime at its default level --------------------------------------------------------------------------------


class NoBias(nn.Module):
    """What the runtime fuses with 8-bit weights: Conv, MatMul with and without a quantized result, Gemm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 4, 3, bias=False)
        self.tokens, self.head = nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(self.conv(x).flatten(2).transpose(1, 2))
        return self.head(x.mean(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weight", "result"),
    [("int8", "uint8"), ("uint8", "uint8"), ("int4", "uint8"), ("int8", "int8"), ("int8", "float32")],
)
def test_weights_with_blocks_run_at_the_default_level(weight: str, result: str, tmp_path: Path):
    config = w8a8(block_size=2).override("*", weight=weight)
    config = config.skip("tokens:output") if result == "float32" else config.override("*", activation=result)
    model, x = distinct(NoBias()), seeded(2, 6, 5, 5)
    sim = calibrated(model, x, config)
    assert str(sim.plan.decisions["conv:weight"].spec.granularity) == "per block of 2 (axis 1)"
    export(sim, tmp_path / "m.onnx")
    found, wanted = default_session(tmp_path / "m.onnx", x)[0], sim(x).numpy()
    assert np.abs(found - wanted).max() <= 2.01 * float(sim.encodings["head:output"].scale[0])
    assert check_parity(sim, tmp_path / "m.onnx", [x], progress=False).summary["passed"]
    back = quantize(tmp_path / "m.onnx", None, None)
    assert back.encodings == sim.encodings
    assert not any(op.type == "Sum" for op in back.graph.ops)
    export(back, tmp_path / "again.onnx")
    ops = [[n.op_type for n in onnx.load(tmp_path / name).graph.node] for name in ("m.onnx", "again.onnx")]
    assert sorted(ops[0]) == sorted(ops[1])
    assert ops[0].count("Sum") == (
        2 if weight == "int4" else 3
    )  # the runtime folds the weights, and would make codes of them beside pairs
    assert to_integer(tmp_path / "m.onnx", tmp_path / "int.onnx").summary["operations_max_lsb"] <= 1
    export(sim, tmp_path / "pure.onnx", dialect="onnx")
    assert "Sum" not in [n.op_type for n in onnx.load(tmp_path / "pure.onnx").graph.node]


def turned(model_output: list[str]) -> onnx.ModelProto:
    """A Sigmoid, a Transpose of it and a Relu, with some tensors as outputs."""
    nodes = [
        node("Sigmoid", ["x"], ["s"], "sigmoid"),
        node("Transpose", ["s"], ["t"], "turn", perm=[1, 0]),
        node("Relu", ["t"], ["y"], "relu"),
    ]
    return make_model(nodes, {"x": [3, 4]}, {name: [None, None] for name in model_output}, {})


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_an_output_in_front_of_a_quantized_transpose_is_not_quantized_with_it(dtype: str, tmp_path: Path):
    x = RNG.normal(size=(3, 4)).astype(np.float32)
    sim = quantize(turned(["s", "y"]), None, w8a8().skip("sigmoid", dtype=dtype).override("turn", activation="uint8"))
    calibrate(sim, [x], progress=False)
    assert sim.plan.decisions["turn:output"].quantized
    export(sim, tmp_path / "m.onnx")
    quantized = sim.encodings["x:input"].fake_quantize(x)
    exact = (1 / (1 + np.exp(-quantized.astype(np.float64)))).astype(dtype)
    for found in (default_session(tmp_path / "m.onnx", torch.from_numpy(x))[0], sim.run(x)[0]):
        np.testing.assert_allclose(found, exact, rtol=2e-3 if dtype == "float16" else 1e-6)
    assert check_parity(sim, tmp_path / "m.onnx", [x], progress=False).summary["passed"]
    assert quantize(tmp_path / "m.onnx", None, None).encodings == sim.encodings


def test_what_is_captured_in_front_of_a_transpose_is_what_the_simulation_has_there():
    x = RNG.normal(size=(3, 4)).astype(np.float32)
    sim = quantize(turned(["y"]), None, w8a8().skip("sigmoid", dtype=float16))
    calibrate(sim, [x], progress=False)
    captured = sim.capture(x)
    exact = 1 / (1 + np.exp(-captured["x:input"].astype(np.float64)))
    np.testing.assert_allclose(captured["sigmoid:output"], exact.astype(np.float16), rtol=2e-3)


# --- parity ----------------------------------------------------------------------------------------------------------


class TakesAny(nn.Module):
    """Takes as many tensors as it is given, the second maybe in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, *args: Any) -> Tensor:
        first, second = args
        return self.fc(first) + (second[0] if isinstance(second, list) else second)


@pytest.mark.slow
@pytest.mark.parametrize("nested", [False, True])
def test_parity_of_a_forward_that_takes_any_number_of_arguments(nested: bool, tmp_path: Path):
    second = seeded(2, 4, seed=1)
    example = (seeded(2, 4), [second] if nested else second)
    sim = calibrated(distinct(TakesAny()), example)
    assert {"args.0:input", "args.1.0:input" if nested else "args.1:input"} <= set(sim.plan.decisions)
    export(sim, tmp_path / "m.onnx")
    assert check_parity(sim, tmp_path / "m.onnx", [example], progress=False).summary["passed"]


def test_a_float16_gelu_far_below_zero_is_compared_with_the_size_of_its_values(tmp_path: Path):
    x = torch.linspace(-5, 3, 256).reshape(2, 128)
    sim = calibrated(nn.Sequential(nn.Identity(), nn.GELU("tanh")), x, w8a8().skip("1", dtype=float16))
    export(sim, tmp_path / "m.onnx")
    report = check_parity(sim, tmp_path / "m.onnx", [x], progress=False)
    assert report.summary["passed"], report


# --- names and states ------------------------------------------------------------------------------------------------


class Calls(nn.Module):
    """Calls a layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.fc(x)))


@pytest.mark.slow
def test_one_call_of_a_module_can_be_named_with_its_mark():
    sim = calibrated(Calls(), seeded(2, 4), w8a8().override("fc@1", activation="uint16"))
    assert sim.plan.decisions["fc@1:output"].spec.dtype.name == "uint16"
    assert sim.plan.decisions["fc:output"].spec.dtype.name == "uint8"
    sim.set_precision("fc@1", activation="int8")
    assert sim.plan.decisions["fc@1:output"].spec.dtype.name == "int8"
    sim.set_precision("fc", activation="uint16")
    assert {sim.plan.decisions[f"{owner}:output"].spec.dtype.name for owner in ("fc", "fc@1")} == {"uint16"}


def unread() -> onnx.ModelProto:
    """One input that nothing reads, one that only a Shape reads, and half of a Split that nothing reads."""
    nodes = [
        node("Split", ["x"], ["a", "b"], "split", axis=1, num_outputs=2),
        node("MatMul", ["a", "w"], ["m"], "mm"),
        node("Shape", ["z"], ["shape"], "shape"),
        node("Reshape", ["m", "shape"], ["y"], "reshape"),
    ]
    inputs = {"x": ["n", 8], "u": ["n", 3], "z": ["n", 4]}
    return make_model(nodes, inputs, {"y": [None, None]}, weights(w=(4, 4)))


@pytest.mark.parametrize("edges", ["float", "integer"])
def test_what_no_op_reads_is_float_and_says_so(edges: str, tmp_path: Path):
    graph = read_graph(unread())
    assert [tensor.site for tensor in graph.tensors if tensor.name in ("u", "z", "b")] == [None, None, None]
    sim = quantize(unread(), None, w8a8())
    rows = {row["site"]: (row["state"], row["reason"]) for row in sim.coverage().rows}
    assert {rows[name] for name in ("(u)", "(z)", "(b)")} == {("float", "no op reads its values")}
    batch = [RNG.normal(size=(5, n)).astype(np.float32) for n in (8, 3, 4)]
    calibrate(sim, [tuple(batch)], progress=False)
    export(sim, tmp_path / "m.onnx")
    assert check_parity(sim, tmp_path / "m.onnx", [tuple(batch)], progress=False).summary["passed"]
    if edges == "integer":
        with pytest.raises(IntegerError, match="graph input 'u': no QuantizeLinear reads it; quantize it, or remove"):
            to_integer(tmp_path / "m.onnx", tmp_path / "int.onnx", edges=edges)
        return
    report = to_integer(tmp_path / "m.onnx", tmp_path / "int.onnx")
    assert (report.summary["float_tensors"], report.summary["reference_equal"]) == (0, True)
    given = [torch.from_numpy(array) for array in batch]
    step = float(sim.encodings["mm:output"].scale[0])
    assert np.abs(default_session(tmp_path / "int.onnx", *given)[0] - sim.run(tuple(batch))[0]).max() <= 1.01 * step


# --- the same plan ---------------------------------------------------------------------------------------------------


class SingleNumbers(nn.Module):
    """Weights, biases, slopes and gains of one element each."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act, self.fc = nn.Conv2d(2, 1, 1), nn.PReLU(), nn.Linear(1, 1)
        self.norm, self.gain = nn.LayerNorm(1), nn.Parameter(torch.tensor([0.7]))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(self.act(self.conv(x)).flatten(1)[:, :1] * self.gain) + 0.5)


class Chunked(nn.Module):
    """Cuts a tensor that is an output too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(x)
        left, right = x.chunk(2, -1)
        return left + right, x


def both_doors(model: nn.Module, x: Tensor, config: QuantConfig) -> tuple[Any, Any, list[str]]:
    graph, plan = plan_of_module(model, (x,), config)
    sim = quantize(float_onnx(model, (x,)), None, config)
    found = compare_plans(graph, plan, sim.graph, sim.plan, match_graphs(graph, sim.graph))
    return plan, sim.plan, [str(one) for one in found]


ACTIVATIONS = (nn.ELU(), nn.Softplus(), nn.Softplus(2.0), nn.Softsign(), nn.Tanhshrink(), nn.LogSigmoid(), nn.SELU())
MODELS = {
    "numbers": SingleNumbers,
    "chunk": Chunked,
    "activations": lambda: nn.Sequential(*(layer for act in ACTIVATIONS for layer in (nn.Conv2d(2, 2, 1), act))),
}


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", MODELS)
def test_the_same_plan_at_both_doors_of_what_is_written_in_several_ops(name: str):
    module, file, differences = both_doors(distinct(MODELS[name]()), seeded(2, 2, 3, 4), w4a8())
    assert differences == []
    for plan in (module, file):
        hidden = [d for d in plan.inside if d.reason.startswith("inside a module")]
        assert {d.op_type for d in hidden} <= {"Reshape", "Transpose"}
        if name == "numbers":
            kinds = sorted((d.kind, d.quantized) for d in plan.decisions.values() if d.kind in ("weight", "bias"))
            assert kinds.count(("weight", True)) == 4  # of Conv, PReLU, Linear and LayerNorm
            assert sum(d.reason == "a scalar constant" for d in (*plan.decisions.values(), *plan.inside)) == 2
        if name == "chunk":
            assert sum(d.op_type == "Split" and d.tied_to is not None for d in plan.decisions.values()) == 2


class EndsInDropout(nn.Module):
    """An InstanceNorm whose result leaves through a Dropout, and is read again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.InstanceNorm2d(2, affine=True), nn.Dropout()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(x)
        return self.drop(x), torch.tanh(x)


@pytest.mark.slow
def test_a_dropout_at_the_end_leaves_the_site_before_it_an_output(tmp_path: Path):
    module, _, differences = both_doors(distinct(EndsInDropout()), seeded(2, 2, 3, 4), w8a8())
    assert differences == []
    assert module.decisions["norm:output"].kind == "output"
    assert module.decisions["norm:weight"].quantized
    model, x = distinct(EndsInDropout()), seeded(2, 2, 3, 4)
    sim = calibrated(model, x)
    export(sim, tmp_path / "m.onnx")
    assert check_parity(sim, tmp_path / "m.onnx", [x], progress=False).summary["passed"]
    for found, wanted in zip(default_session(tmp_path / "m.onnx", x), sim(x), strict=True):
        np.testing.assert_allclose(found, wanted.numpy(), atol=0.05)
