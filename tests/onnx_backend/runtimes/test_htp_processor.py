"""The emulation of the HTP is a processor with float16, and what a MatMul reads second has the grid that it wants."""

import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper
from torch import Tensor, nn

import qsdk
from onnx_backend.parity.teacher import RunOn
from onnx_backend.runtimes.qnn import EMULATED, TABLE, QnnRunner
from onnx_backend.runtimes.validate import validate

STEP = 0.05


@pytest.fixture(scope="module", autouse=True)
def qnn():
    return pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn has no wheel for this system")


def built(nodes, inputs: dict[str, tuple[int, ...]], stored: dict[str, np.ndarray]) -> ModelProto:
    edges = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items()]
    graph = helper.make_graph(nodes, "g", edges, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model)


def pair(source: str, result: str, *grid: str):
    return [
        helper.make_node("QuantizeLinear", [source, *grid], [f"{result}_q"]),
        helper.make_node("DequantizeLinear", [f"{result}_q", *grid], [result]),
    ]


def floats_in_front_of_a_layer() -> ModelProto:
    """Relu and a division between two pairs, as a hard swish in pieces ends, and a convolution behind them."""
    grid = {"s": np.float32(STEP), "z": np.uint8(128)}
    weight = {"w_q": np.full((4, 3, 1, 1), 50, np.int8), "w_s": np.full(4, 0.01, np.float32)}
    stored = {**grid, **weight, "w_z": np.zeros(4, np.int8), "six": np.float32(6)}
    nodes = [
        *pair("x", "d", "s", "z"),
        helper.make_node("Relu", ["d"], ["r"]),
        helper.make_node("Div", ["r", "six"], ["t"]),
        *pair("t", "e", "s", "z"),
        helper.make_node("DequantizeLinear", ["w_q", "w_s", "w_z"], ["w"], axis=0),
        helper.make_node("Conv", ["e", "w"], ["c"]),
        *pair("c", "y", "s", "z"),
    ]
    return built(nodes, {"x": (1, 3, 4, 4)}, stored)


def test_floats_in_front_of_a_layer_compile_on_the_processor_that_is_named():
    model, x = floats_in_front_of_a_layer(), np.random.default_rng(0).normal(size=(1, 3, 4, 4)).astype(np.float32)
    (wanted,), (found,) = RunOn().open(model).run({"x": x}), QnnRunner(model, cpu_fallback=False).run({"x": x})
    assert np.abs(found - wanted).max() <= 1.01 * STEP


@pytest.mark.slow
def test_they_do_not_where_none_is_named(tmp_path):
    """A process keeps the first processor that is named, so that it takes one of its own."""
    onnx.save(floats_in_front_of_a_layer(), tmp_path / "m.onnx")
    code = (
        "import sys, numpy, onnx; from onnx_backend.runtimes.qnn import QnnRunner; "
        "QnnRunner(onnx.load(sys.argv[1]), processor={}).run({'x': numpy.zeros((1, 3, 4, 4), 'float32')})"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "m.onnx")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(qsdk.__file__).parents[1], check=False)
    assert result.returncode != 0
    assert "MEM_ALLOC" in result.stderr
    assert "1002" in result.stderr


@pytest.mark.parametrize(("machine", "named"), [("x86_64", EMULATED), ("AMD64", EMULATED), ("aarch64", {})])
def test_a_device_says_itself_which_processor_it_has(monkeypatch, machine, named):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert platform.machine() == machine
    assert QnnRunner(floats_in_front_of_a_layer()).processor == named


def product(zero: int) -> ModelProto:
    """A product of two activations, the second one with this zero point."""
    grids = {"a": (0.01, 100), "b": (0.02, zero), "y": (0.01, 128)}
    stored = {f"{name}_s": np.float32(scale) for name, (scale, _) in grids.items()}
    stored |= {f"{name}_z": np.uint8(point) for name, (_, point) in grids.items()}
    nodes = [
        *pair("a", "a_d", "a_s", "a_z"),
        *pair("b", "b_d", "b_s", "b_z"),
        helper.make_node("MatMul", ["a_d", "b_d"], ["c"], "product"),
        *pair("c", "y", "y_s", "y_z"),
    ]
    return built(nodes, {"a": (2, 8, 16), "b": (2, 16, 12)}, stored)


@pytest.mark.parametrize(("zero", "is_wrong"), [(128, False), (127, True), (0, True)])
def test_a_second_operand_is_rounded_again_unless_its_zero_point_is_the_middle(zero, is_wrong):
    model, rng = product(zero), np.random.default_rng(0)
    a = ((rng.integers(0, 256, (2, 8, 16)) - 100) * np.float32(0.01)).astype(np.float32)
    b = ((rng.integers(0, 256, (2, 16, 12)) - zero) * np.float32(0.02)).astype(np.float32)
    (wanted,), (found,) = RunOn().open(model).run({"a": a, "b": b}), QnnRunner(model).run({"a": a, "b": b})
    assert (np.abs(found - wanted).max() > 1.01 * 0.01) == is_wrong
    rows = [row for row in validate(model, dialect="qnn").rows if row["node"] == "product"]
    assert [row["severity"] for row in rows] == ["warning"] * is_wrong
    assert all("for_dialect" in row["remedy"] for row in rows)
    assert TABLE.off["uint8"]["MatMul"].second_operand


@pytest.mark.parametrize(("zero", "named"), [(128, []), (127, ["product"])])
def test_a_second_operand_behind_a_transpose_is_named_too(zero, named):
    model = product(zero)
    model.graph.node.insert(4, helper.make_node("Transpose", ["b_d"], ["b_t"], perm=[0, 2, 1]))
    (matmul,) = [node for node in model.graph.node if node.op_type == "MatMul"]
    matmul.input[1] = "b_t"
    model.graph.input[1].CopyFrom(helper.make_tensor_value_info("b", TensorProto.FLOAT, (2, 12, 16)))
    del model.graph.value_info[:]
    assert [row["node"] for row in validate(model, dialect="qnn").rows if row["rule"] == "dialect"] == named


class Attention(nn.Module):
    """Tokens that attend to those that a mask keeps, as sentence encoders do it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.norm(self.tokens(ids))
        heads = [layer(x).reshape(*ids.shape, 2, 8).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        kept = mask[:, None, None, :].bool()
        return nn.functional.scaled_dot_product_attention(*heads, attn_mask=kept).transpose(1, 2).flatten(2)


@pytest.mark.slow
def test_masked_attention_is_simulated_as_the_htp_computes_it(tmp_path):
    torch.manual_seed(0)
    batch = (torch.randint(0, 50, (4, 8)), torch.tensor([[1] * 8, [1] * 5 + [0] * 3] * 2))
    sim = qsdk.quantize(Attention().eval(), batch, qsdk.w8a8().for_dialect("qnn"))
    qsdk.calibrate(sim, [batch], progress=False)
    summary = qsdk.export(sim, tmp_path / "m.onnx", dialect="qnn").summary
    assert "computed_otherwise" not in summary
    assert qsdk.validate(tmp_path / "m.onnx", dialect="qnn").summary["errors"] == 0
    parity = qsdk.check_parity(sim, tmp_path / "m.onnx", [batch], runtime="qnn", progress=False)
    assert parity.summary["passed"], str(parity)
    assert parity.summary["activations_max_lsb"] <= 1


@pytest.mark.parametrize(("head", "slope"), [("Conv", "LeakyRelu"), ("Gemm", "PRelu")])
def test_a_layer_with_a_slope_behind_it_runs_whole_on_the_htp(tmp_path, head, slope):
    rng, shape = np.random.default_rng(0), (1, 4, 8, 8) if head == "Conv" else (8, 4)
    stored = {"w": rng.normal(size=(4, 4, 1, 1)[: len(shape)]).astype(np.float32), "slope": np.full(1, 0.1, np.float32)}
    behind = helper.make_node(slope, ["c", "slope"] if slope == "PRelu" else ["c"], ["y"], "slope")
    model = built([helper.make_node(head, ["x", "w"], ["c"], "head"), behind], {"x": shape}, stored)
    x = {"x": rng.normal(size=shape).astype(np.float32)}
    sim = qsdk.quantize(model, None, qsdk.w8a8().for_dialect("qnn"))
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "m.onnx", dialect="qnn")
    (found,) = QnnRunner(onnx.load(tmp_path / "m.onnx"), cpu_fallback=False).run(x)
    assert np.abs(found - sim.run(x)[0]).max() <= 2.01 * sim.encodings["slope:output"].scale


def test_an_embedding_that_fixed_sizes_fold_is_no_missing_site(tmp_path):
    """Token types that follow from the sizes: the table goes with the look-up, and what reads it is compared."""
    rng, node, value = np.random.default_rng(0), helper.make_node, helper.make_tensor_value_info
    stored = {"words": rng.normal(size=(50, 16)), "types": rng.normal(size=(2, 16)), "w": rng.normal(size=(16, 8))}
    tensors = [numpy_helper.from_array(np.float32(array), name) for name, array in stored.items()]
    tensors.append(numpy_helper.from_array(np.int64([0]), "zero"))
    nodes = [
        node("Shape", ["ids"], ["s"]),
        node("Expand", ["zero", "s"], ["tt"]),
        node("Gather", ["words", "ids"], ["e"], "word"),
        node("Gather", ["types", "tt"], ["t"], "type"),
        node("Add", ["e", "t"], ["a"], "add"),
        node("MatMul", ["a", "w"], ["y"], "head"),
    ]
    edges = [value("ids", TensorProto.INT64, ["b", "l"]), value("y", TensorProto.FLOAT, ["b", "l", 8])]
    graph = helper.make_graph(nodes, "g", edges[:1], edges[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x, path = {"ids": rng.integers(0, 50, (1, 12))}, tmp_path / "m.onnx"
    sim = qsdk.quantize(model, None, qsdk.w8a8().for_dialect("qnn"))
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, path, dialect="qnn", shapes={"ids": (1, 12)})
    assert qsdk.check_parity(sim, path, [x], progress=False).summary["passed"]
    written = onnx.load(path)
    (entry,) = [one for one in written.metadata_props if one.key == "qsdk.constant_sites"]
    entry.value = entry.value.replace("type:embedding", "word:embedding")
    onnx.save(written, path)  # what the file still holds cannot be excused, and what it lacks must be
    rows = qsdk.check_parity(sim, written, [x], progress=False).rows
    assert [row["site"] for row in rows if "note" in row] == ["type:embedding"]
    assert "word:embedding" in [row["site"] for row in rows]
