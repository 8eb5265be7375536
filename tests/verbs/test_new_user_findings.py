"""What three demanding new users have found, each made small: models of their own, the shell, round trips."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper
from qdq_models import make_model, mlp
from torch import Tensor, nn
from torch_models import calibrated, seeded
from zoo_models import distinct

import qsdk
from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import initializers
from qsdk import (
    ExportError,
    IntegerError,
    QuantConfig,
    calibrate,
    check_parity,
    export,
    float16,
    quantize,
    to_integer,
    validate,
    w8a8,
)
from qsdk.cli import main

node = helper.make_node


def default_session(path: Path, *given: Tensor) -> list[np.ndarray]:
    session = ort.InferenceSession(path)
    names = [value.name for value in session.get_inputs()]
    return session.run(None, dict(zip(names, (x.numpy() for x in given), strict=True)))


# --- the runtime at its default level --------------------------------------------------------------------------------


class Stack(nn.Module):
    """A stack of matrices in one parameter, as a mixture of experts has."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(seeded(3, 8, 6, seed=1) * torch.tensor([1.0, 5, 20, 1, 2, 3]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(torch.bmm(x, self.experts))


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    "config", [w8a8(), w8a8().override("*", activation="int8", weight="uint8"), w8a8().skip("*:output*")]
)
def test_a_stack_of_matrices_with_scales_per_channel_runs_at_the_default_level(config: QuantConfig, tmp_path: Path):
    x = seeded(3, 5, 8)
    sim = calibrated(Stack(), x, config)
    export(sim, tmp_path / "m.onnx")
    assert sim.encodings["self:experts"].scale.size == 6
    wanted = sim(x).numpy()
    step = float(sim.encodings["relu.0:output"].scale[0]) if "relu.0:output" in sim.encodings else 1e-4
    np.testing.assert_allclose(default_session(tmp_path / "m.onnx", x)[0], wanted, atol=1.01 * step)
    assert {row["rule"] for row in validate(tmp_path / "m.onnx").rows} <= {"speed"}


@pytest.mark.parametrize("weight", ["float8e4m3fn", "float8e5m2", "mxfp8"])
def test_float8_weights_in_blocks_or_not_run_beside_uint8(weight: str, tmp_path: Path):
    """The float result of a MatMul makes the runtime choose MatMulIntegerToFloat, which knows no float8."""
    x = seeded(2, 3, 64)
    sim = calibrated(distinct(nn.Sequential(nn.Linear(64, 6), nn.GELU())), x, w8a8().override("*", weight=weight))
    export(sim, tmp_path / "m.onnx")
    step = float(sim.encodings["1:output"].scale[0])
    np.testing.assert_allclose(default_session(tmp_path / "m.onnx", x)[0], sim(x).numpy(), atol=1.01 * step)


@pytest.mark.slow
def test_validate_has_nothing_to_say_but_that_they_are_slow_of_four_bit_activations_as_exported(tmp_path: Path):
    x = seeded(2, 3, 6, 6)
    model = distinct(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Hardtanh(-0.5, 0.7), nn.Conv2d(4, 2, 3)))
    sim = calibrated(model, x, w8a8().override("*", activation="uint4"))
    export(sim, tmp_path / "m.onnx")
    assert {row["rule"] for row in validate(tmp_path / "m.onnx").rows} == {"speed"}
    export(sim, tmp_path / "pure.onnx", dialect="onnx")
    assert {row["rule"] for row in validate(tmp_path / "pure.onnx").rows} == {"default_session"}


class Bags(nn.Module):
    """Exported as a Loop with an If in an If, decided by constants, on which the runtime crashes."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(10, 4, mode="mean"), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.bag(ids))


def test_bags_of_embeddings_run_everywhere(tmp_path: Path):
    ids = torch.tensor([[1, 2, 3], [4, 5, 9]])
    sim = calibrated(distinct(Bags()), ids)
    export(sim, tmp_path / "m.onnx")
    step = float(sim.encodings["head:output"].scale[0])
    other = torch.tensor([[7, 7, 1], [0, 8, 2], [3, 3, 3]])
    np.testing.assert_allclose(default_session(tmp_path / "m.onnx", other)[0], sim(other).numpy(), atol=1.01 * step)
    assert check_parity(sim, tmp_path / "m.onnx", [ids], progress=False).summary["passed"]


def branches_in_a_branch(mode: int) -> onnx.ModelProto:
    """If the input is positive: y = 2 x or 3 x, which a constant inside decides; else -x."""
    info = helper.make_tensor_value_info

    def branch(name: str, *nodes: onnx.NodeProto) -> onnx.GraphProto:
        return helper.make_graph(list(nodes), name, [], [info(nodes[-1].output[0], TensorProto.FLOAT, None)])

    inner = node("If", ["first"], ["chosen"], "inner")
    for name, factor in (("then_branch", "two"), ("else_branch", "three")):
        inner.attribute.append(helper.make_attribute(name, branch(name, node("Mul", ["x", factor], [f"by_{factor}"]))))
    constants = [
        node("Constant", [], ["mode"], value_int=mode),
        node("Constant", [], ["one"], value_int=1),
        node("Equal", ["mode", "one"], ["first"]),
    ]
    outer = node("If", ["positive"], ["y"], "outer")
    outer.attribute.append(helper.make_attribute("then_branch", branch("then", *constants, inner)))
    outer.attribute.append(helper.make_attribute("else_branch", branch("else", node("Neg", ["x"], ["turned"]))))
    nodes = [node("ReduceSum", ["x"], ["sum"], keepdims=0), node("Greater", ["sum", "zero"], ["positive"]), outer]
    stored = [
        helper.make_tensor(n, TensorProto.FLOAT, [], [v]) for n, v in (("zero", 0.0), ("two", 2.0), ("three", 3.0))
    ]
    graph = helper.make_graph(
        nodes, "g", [info("x", TensorProto.FLOAT, [2, 3])], [info("y", TensorProto.FLOAT, [2, 3])], stored
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize(("mode", "factor"), [(1, 2.0), (0, 3.0)])
def test_an_if_in_a_branch_that_a_constant_decides_is_its_branch(mode: int, factor: float, tmp_path: Path):
    x = np.array([[1, 2, -1], [0.5, 1, 3]], np.float32)
    sim = quantize(branches_in_a_branch(mode), None, w8a8())
    calibrate(sim, [x, -x], progress=False)
    outer = next(n for n in sim.traced().model.graph.node if n.op_type == "If")
    assert not [inner for a in outer.attribute for inner in a.g.node if inner.op_type == "If"]
    step = float(sim.encodings["outer:output"].scale[0])
    quantized = sim.encodings["x:input"].fake_quantize(x) if "x:input" in sim.encodings else x
    np.testing.assert_allclose(sim.run(x)[0], factor * quantized, atol=1.01 * step)
    np.testing.assert_allclose(sim.run(-x)[0], x, atol=step)
    assert (
        "default_session" not in export(sim, tmp_path / "m.onnx").summary
    )  # the outer one is decided as the file runs
    assert check_parity(sim, tmp_path / "m.onnx", [x, -x], progress=False).summary["passed"]
    for given in (x, -x):
        np.testing.assert_allclose(
            default_session(tmp_path / "m.onnx", torch.from_numpy(given))[0], sim.run(given)[0], atol=1.01 * step
        )


# --- masks -----------------------------------------------------------------------------------------------------------


class CausalTriu(nn.Module):
    """Hides the future as the first Llama does: a triangle of minus infinity, of the length of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
        scores = self.q(x) @ self.k(x).transpose(1, 2) / 8**0.5
        return torch.softmax(scores + hidden, -1) @ self.v(x)


@pytest.mark.slow
def test_a_triangle_of_minus_infinity_is_a_mask(tmp_path: Path):
    x = seeded(2, 5, 8)
    sim = calibrated(distinct(CausalTriu()), x, dynamic_shapes={"x": {0: "batch", 1: "length"}})
    assert "mask of MaskedSoftmax" in sim.plan.decisions["triu.0:output"].reason
    export(sim, tmp_path / "m.onnx")
    longer = seeded(1, 7, 8, seed=3)
    assert check_parity(sim, tmp_path / "m.onnx", [longer], progress=False).summary["passed"]
    changed = longer.clone()
    changed[:, -1] += 1  # the last token changes nothing before it
    first, second = (sim(given)[:, :-1] for given in (longer, changed))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


# --- round trips -----------------------------------------------------------------------------------------------------


class TiedTokens(nn.Module):
    """A head that is the table of tokens, and a stack of two equal moves of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mix, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.mix(self.tokens(ids))
        return self.head(torch.stack([x, x.flip(1)], 1).sum(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        w8a8(),
        w8a8().override("head", per_channel=False),
        w8a8().override("*", weight="int8_strict", activation="int8_strict"),
        w8a8().override("*", weight="int6", activation="uint6"),
        w8a8().skip("mix", dtype=float16).skip("head", dtype=float16),
    ],
    ids=["w8a8", "one grid", "strict", "int6", "float16"],
)
def test_tied_weights_stacks_and_casts_export_again_to_the_same_bytes(config: QuantConfig, tmp_path: Path):
    ids = torch.arange(10).reshape(2, 5)
    sim = calibrated(distinct(TiedTokens()), ids, config)
    export(sim, tmp_path / "m.onnx")
    (tmp_path / "again").mkdir()
    export(quantize(tmp_path / "m.onnx", None, None), tmp_path / "again" / "m.onnx")
    for name in ("m.onnx", "m.encodings.json"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_a_weight_with_two_sites_has_a_name_of_the_model_at_both(tmp_path: Path):
    sim = calibrated(distinct(TiedTokens()), torch.arange(10).reshape(2, 5))
    export(sim, tmp_path / "m.onnx")
    entries: dict[str, Any] = json.loads((tmp_path / "m.encodings.json").read_text())["encodings"]
    names = [entries[site]["tensor"] for site in ("tokens:weight", "head:weight")]
    assert names == ["head.weight", "head.weight_1"]
    stored = initializers(onnx.load(tmp_path / "m.onnx").graph)
    for name, site in zip(names, ("tokens:weight", "head:weight"), strict=True):
        codes = array(stored[f"{name}_quantized"])
        assert codes.size == 96
        assert np.abs(codes).max() == 127 if sim.encodings[site].scale.size == 1 else codes.max() >= 126


# --- the shell -------------------------------------------------------------------------------------------------------


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in, with float.onnx and data.npy."""
    monkeypatch.chdir(tmp_path)
    onnx.save(mlp(), "float.onnx")
    np.save("data.npy", np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32))
    return tmp_path


def test_quantize_does_not_write_over_the_float_model(shell: Path, capsys: pytest.CaptureFixture[str]):
    before = Path("float.onnx").read_bytes()
    for out in ("float.onnx", "./float.onnx"):
        assert main(["quantize", "float.onnx", out, "--data", "data.npy"]) == 2
        assert "is the float model, which would be gone; name another file" in capsys.readouterr().err
    assert Path("float.onnx").read_bytes() == before
    assert sorted(path.name for path in shell.iterdir()) == ["data.npy", "float.onnx"]


@pytest.mark.parametrize("out", [".", "folder", "folder/", ".."])
def test_a_folder_is_no_file_to_export_to(out: str, shell: Path, capsys: pytest.CaptureFixture[str]):
    (shell / "folder").mkdir()
    assert main(["quantize", "float.onnx", out, "--data", "data.npy"]) == 2
    assert "is a directory; give the name of a file" in capsys.readouterr().err
    assert list((shell / "folder").iterdir()) == []
    assert main(["quantize", "float.onnx", "m.onnx", "--data", "data.npy"]) == 0
    wrong_usage = (["to-integer", "m.onnx", out], ["encodings", "convert", "m.onnx", out, "--to", "2.0.0"])
    for arguments in (*wrong_usage, ["report", "m.onnx", "--out", out]):
        assert main(arguments) == 2
        assert "is a directory; give the name of a file" in capsys.readouterr().err
    assert main(["to-integer", "m.onnx", "gone/m.onnx"]) == 2
    assert "cannot write gone/m.onnx: create the folder gone first" in capsys.readouterr().err


def test_an_unknown_config_names_the_presets_too(shell: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["quantize", "float.onnx", "m.onnx", "--data", "data.npy", "--config", "best"]) == 2
    assert "the names are w8a8, w8a16, w4a8, w4a16, weight_only, " in capsys.readouterr().err
    assert qsdk.load_config("w4a16") == qsdk.w4a16()


def test_encodings_that_leave_the_axis_to_the_model_are_shown_with_it(shell: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["quantize", "float.onnx", "m.onnx", "--data", "data.npy"]) == 0
    assert main(["encodings", "convert", "m.onnx", "old.json", "--to", "1.0.0"]) == 0
    assert main(["encodings", "show", "old.json"]) == 2
    assert "pass model= (--model)" in capsys.readouterr().err
    assert main(["encodings", "show", "old.json", "--model", "float.onnx", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["rows"]
    channels = [row["granularity"] for row in shown if row["granularity"].startswith("per channel")]
    assert len(channels) == sum(e.axis is not None for e in quantize("m.onnx", None, None).encodings.values()) > 0


def test_a_nameless_node_without_integer_form_is_named_as_in_the_users_file(tmp_path: Path):
    model = make_model(
        [node("Gemm", ["x", "w"], ["made"]), node("Hardmax", ["made"], ["y"])],
        {"x": [2, 3]},
        {"y": [2, 4]},
        {"w": np.eye(3, 4, dtype=np.float32)},
    )
    sim = quantize(model, None, w8a8())
    calibrate(sim, [np.ones((2, 3), np.float32), np.eye(2, 3, dtype=np.float32)], progress=False)
    export(sim, tmp_path / "m.onnx")
    with pytest.raises(IntegerError, match="Hardmax 'y': Hardmax has no integer form"):
        to_integer(tmp_path / "m.onnx", tmp_path / "int.onnx")


@pytest.mark.slow
def test_exporting_to_nothing_is_refused(tmp_path: Path):
    sim = calibrated(nn.Linear(3, 2), seeded(2, 3))
    for path in ("", tmp_path):
        with pytest.raises(ExportError, match="is a directory; give the name of a file"):
            export(sim, path)


# --- saving ----------------------------------------------------------------------------------------------------------


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    "config",
    [
        w8a8().override("*", weight="mxfp4"),
        w8a8().override("*", weight="mxfp8"),
        w8a8().override("*", weight="nvfp4"),
        w8a8(block_size=3).override("*", weight="int4", two_level_scales=True),
        w8a8().override("*", dynamic_activations=True),
        w8a8().override("*", scale_bits=1),
    ],
    ids=["mxfp4", "mxfp8", "nvfp4", "two levels", "dynamic", "powers of two"],
)
@pytest.mark.parametrize("door", ["torch", "onnx"])
def test_a_sim_of_any_form_of_scales_is_saved_and_loaded(config: QuantConfig, door: str, tmp_path: Path):
    model: Any = distinct(nn.Linear(6, 4)) if door == "torch" else mlp()
    x: Any = seeded(2, 6) if door == "torch" else seeded(2, 6).numpy()
    sim = quantize(model, x, config)
    calibrate(sim, [x], progress=False)
    qsdk.save(sim, tmp_path / "s.qsdk")
    back = qsdk.load(tmp_path / "s.qsdk", model if door == "torch" else None)
    assert back.plan.decisions == sim.plan.decisions
    assert back.encodings == sim.encodings
    for found, wanted in zip(back.run(x), sim.run(x), strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))
