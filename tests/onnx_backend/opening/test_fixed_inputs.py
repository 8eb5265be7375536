"""Inputs whose value is fixed: an If that they decide gives way to its branch, which is quantized."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_backend.opening.from_float import open_float
from qsdk import ConfigError, IntegerError, calibrate, check_parity, export, quantize, to_integer, w8a8


def by_sample_rate() -> onnx.ModelProto:
    """A layer of one weight at 16000 samples a second and of another one at any other rate."""
    generator = np.random.default_rng(0)
    weights = {name: generator.normal(size=(8, 8)).astype(np.float32) for name in ("fast", "slow")}

    def branch(name: str) -> onnx.GraphProto:
        made = helper.make_tensor_value_info(f"y_{name}", TensorProto.FLOAT, None)
        return helper.make_graph([helper.make_node("MatMul", ["x", name], [f"y_{name}"])], name, [], [made])

    choice = helper.make_node("If", ["is"], ["h"], then_branch=branch("fast"), else_branch=branch("slow"))
    nodes = [helper.make_node("Equal", ["sr", "rate"], ["is"]), choice, helper.make_node("Relu", ["h"], ["y"])]
    inputs = [("x", TensorProto.FLOAT, ["n", 8]), ("sr", TensorProto.INT64, [])]
    stored = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(
        nodes,
        "vad",
        [helper.make_tensor_value_info(*facts) for facts in inputs],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8])],
        [*stored, numpy_helper.from_array(np.int64(16000), "rate")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.spread(1)
@pytest.mark.parametrize(("rate", "weight"), [(16000, "fast"), (8000, "slow")])
def test_the_branch_that_a_fixed_input_takes_is_quantized(rate: int, weight: str, tmp_path):
    model = by_sample_rate()
    before = model.SerializeToString()
    x = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)
    sim = quantize(model, None, w8a8(), inputs={"sr": rate})
    calibrate(sim, [{"x": x}], progress=False)
    assert model.SerializeToString() == before
    assert all(d.quantized or d.reason.startswith("inside") for d in sim.plan.decisions.values())
    stored = next(numpy_helper.to_array(t) for t in model.graph.initializer if t.name == weight)
    wanted = np.maximum(x @ stored, 0)
    assert np.abs(sim.run({"x": x})[0] - wanted).max() < 0.05 * wanted.max()
    export(sim, tmp_path / "model.onnx")
    assert [value.name for value in onnx.load(tmp_path / "model.onnx").graph.input] == ["x"]
    assert check_parity(sim, tmp_path / "model.onnx", [{"x": x}], progress=False).summary["passed"]
    assert to_integer(tmp_path / "model.onnx", tmp_path / "int.onnx").summary["float_tensors"] == 0


def test_an_if_inside_the_branch_that_its_constant_decides_is_inlined_too():
    model = by_sample_rate()
    (outer,) = (node for node in model.graph.node if node.op_type == "If")
    branch = next(a.g for a in outer.attribute if a.name == "then_branch")
    inner = helper.make_node("If", ["known"], ["y_fast"])
    for name, op in (("then_branch", "Relu"), ("else_branch", "Neg")):
        made = helper.make_tensor_value_info(f"{op}_out", TensorProto.FLOAT, None)
        graph = helper.make_graph([helper.make_node(op, ["product"], [f"{op}_out"])], op, [], [made])
        inner.attribute.append(helper.make_attribute(name, graph))
    branch.node[0].output[0] = "product"
    yes = helper.make_tensor("yes", TensorProto.BOOL, [], [True])
    branch.node.extend([helper.make_node("Constant", [], ["known"], value=yes), inner])
    sim = quantize(model, None, w8a8(), inputs={"sr": 16000})
    assert [op.type for op in sim.graph.ops] == ["MatMul", "Relu", "Relu"]


def test_what_cannot_be_fixed_is_refused_by_name():
    model = by_sample_rate()
    for inputs, message in (
        ({"rate": 1}, "'rate', which is no input; the model's are x, sr"),
        ({"sr": 0.5}, "'sr' to 0.5, and that input is int64"),
        ({"sr": "fast"}, "'sr' to 'fast', and that input is int64"),
        ({"sr": [1, 2]}, r"'sr' to an array of shape \[2\], it takes \[\]"),
        ({"x": np.zeros((2, 9))}, r"'x' to an array of shape \[2, 9\], it takes \[\?, 8\]"),
        ({"sr": 1, "x": np.zeros((2, 8))}, "fixes every input"),
    ):
        with pytest.raises(ConfigError, match=message):
            quantize(model, None, w8a8(), inputs=inputs)
    assert open_float(model, w8a8()).graph.inputs  # still as it was


@pytest.mark.slow
def test_a_branch_that_stays_open_names_what_would_fix_it(tmp_path: Path):
    sim = quantize(by_sample_rate(), None, w8a8())
    x = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)
    batches = [{"x": x, "sr": np.array(rate)} for rate in (16000, 8000)]
    calibrate(sim, batches, progress=False)
    inside = [row for row in sim.coverage().rows if row["state"] == "float"]
    assert {row["site"] for row in inside} >= {"(fast)", "(slow)"}
    assert all("the If 'h': " in row["reason"] and "inputs={name: value}" in row["reason"] for row in inside)
    export(sim, tmp_path / "model.onnx")
    assert check_parity(sim, tmp_path / "model.onnx", batches, progress=False).summary["passed"]
    with pytest.raises(IntegerError, match=r"If 'h': .* quantize\(..., inputs=\{name: value\}\)"):
        to_integer(tmp_path / "model.onnx", tmp_path / "int.onnx")
