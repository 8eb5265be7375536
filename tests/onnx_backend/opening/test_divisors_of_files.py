"""A file may quantize a divisor, whose grid holds 0: it is opened as it is, and says so where a user looks."""

import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

import qsdk

SIZE = [1, 64]
HOLDS_0 = "its grid holds 0, where the op that divides by it or takes its logarithm gives infinity or NaN"


def pair(name: str, result: str, scale: float, zero_point: int) -> tuple[list[NodeProto], list[TensorProto]]:
    stored = [(f"{result}_scale", np.float32(scale)), (f"{result}_zero_point", np.uint8(zero_point))]
    names = [stored_name for stored_name, _ in stored]
    nodes = [
        helper.make_node("QuantizeLinear", [name, *names], [f"{result}_codes"]),
        helper.make_node("DequantizeLinear", [f"{result}_codes", *names], [result]),
    ]
    return nodes, [numpy_helper.from_array(np.asarray(value), stored_name) for stored_name, value in stored]


@pytest.fixture(scope="module")
def model() -> ModelProto:
    nodes, stored = [], []
    for made, also in (
        pair("x", "dividend", 0.02, 128),
        pair("b", "divisor", 0.01, 0),
        ([helper.make_node("Div", ["dividend", "divisor"], ["ratio"], name="div")], []),
        pair("ratio", "y", 0.5, 128),
    ):
        nodes, stored = nodes + made, stored + also
    x, b, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, SIZE) for name in "xby")
    graph = helper.make_graph(nodes, "g", [x, b], [y], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("config", [None, qsdk.w8a8()], ids=["as the file is", "with a config"])
def test_coverage_says_that_the_grid_of_a_divisor_holds_0(model, config):
    rows = {row["site"]: row["reason"] for row in qsdk.quantize(model, None, config).coverage().rows}
    assert rows["b:input"] == f"as the file says; {HOLDS_0} [the file]"
    assert rows["x:input"] == rows["div:output"] == "as the file says [the file]"


def test_to_integer_says_what_it_makes_of_0_by_0(model, tmp_path):
    onnx.save(model, tmp_path / "model.onnx")
    report = qsdk.to_integer(tmp_path / "model.onnx", tmp_path / "int.onnx")
    note = "0 / 0 is 0; in the Q/DQ file it is NaN, which runtimes quantize differently"
    assert report.summary["div leaves the standard"] == note
