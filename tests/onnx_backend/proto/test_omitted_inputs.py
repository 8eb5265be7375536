"""An input that an op needs is never left out: ONNX Runtime crashes on a Sum, and onnx's checker sees nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import FunctionProto, ModelProto, NodeProto, TensorProto, helper

import qsdk
from qsdk import FileFormatError

OPSETS = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
X, Y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in "xy")


def model_of(node: NodeProto, *functions: FunctionProto) -> ModelProto:
    graph = helper.make_graph([node], "g", [X], [Y])
    return helper.make_model(graph, functions=functions, opset_imports=OPSETS, ir_version=10)


def function(name: str, *body: NodeProto) -> FunctionProto:
    return helper.make_function("own", name, ["a", "b"], ["c"], body, OPSETS)


def call(name: str, *inputs: str, output: str = "c") -> NodeProto:
    return helper.make_node(name, inputs, [output], name="call", domain="own")


SUM = function("Add2", helper.make_node("Sum", ["a", "b"], ["c"]))
CLIP = function("Clip2", helper.make_node("Clip", ["a", "b"], ["c"]))
OUTER = function("Outer", call("Add2", "a", "b"))


def in_a_branch() -> ModelProto:
    branch = helper.make_graph([helper.make_node("Sum", ["x", ""], ["z"], name="inner")], "b", [], [_value("z")])
    other = helper.make_graph([helper.make_node("Neg", ["x"], ["z"])], "b", [], [_value("z")])
    chosen = helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=other)
    model = model_of(chosen)
    model.graph.initializer.append(helper.make_tensor("yes", TensorProto.BOOL, [], [True]))
    return model


def _value(name: str) -> Any:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3])


REFUSED: dict[str, tuple[ModelProto, str]] = {
    "the last of many": (
        model_of(helper.make_node("Sum", ["x", ""], ["y"], name="n")),
        r"the node 'n' \(Sum\) omits its input 'data_0\[1\]', which Sum needs; export the model again",
    ),
    "one in the middle": (model_of(helper.make_node("Max", ["x", "", "x"], ["y"])), r"'y' \(Max\).*'data_0\[1\]'"),
    "the only one of its name": (model_of(helper.make_node("Add", ["x", ""], ["y"])), r"\(Add\) omits its input 'B'"),
    "in a branch": (in_a_branch(), r"'inner' \(Sum\)"),
    "left out of a call": (model_of(call("Add2", "x", "", output="y"), SUM), r"'call' \(Add2\) omits its input 'b'"),
    "beyond a short call": (model_of(call("Add2", "x", output="y"), SUM), r"'call' \(Add2\) omits its input 'b'"),
    "needed two calls deeper": (model_of(call("Outer", "x", output="y"), OUTER, SUM), r"\(Outer\) omits its input 'b'"),
}
READERS: dict[str, Callable[[Any, Path], Any]] = {
    "quantize": lambda model, out: qsdk.quantize(model, None, qsdk.w8a8()),
    "adopt": lambda model, out: qsdk.quantize(model, None),
    "validate": lambda model, out: qsdk.validate(model),
    "to_integer": lambda model, out: qsdk.to_integer(model, out),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_omits_what_an_op_needs_is_refused(name: str, reader: str, tmp_path: Path):
    model, message = REFUSED[name]
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    for source in (path, model):
        with pytest.raises(FileFormatError, match=message):
            READERS[reader](source, tmp_path / "int.onnx")


def test_check_parity_refuses_it_before_the_runtime_runs_it(tmp_path: Path):
    batches = [np.ones((2, 3), np.float32)]
    sim = qsdk.quantize(model_of(helper.make_node("Sum", ["x", "x"], ["y"], name="n")), None, qsdk.w8a8())
    qsdk.calibrate(sim, batches, progress=False)
    path = tmp_path / "model.onnx"
    qsdk.export(sim, path)
    broken = onnx.load(path)
    node = next(node for node in broken.graph.node if node.op_type == "Sum")
    node.input[1] = ""
    with pytest.raises(FileFormatError, match=r"'n' \(Sum\) omits its input"):
        qsdk.check_parity(sim, broken, batches)


@pytest.mark.parametrize(
    "model",
    [
        model_of(helper.make_node("Clip", ["x", "", ""], ["y"])),
        model_of(call("Clip2", "x", output="y"), CLIP),
        model_of(call("Clip2", "x", "", output="y"), CLIP),
    ],
    ids=["an op", "a short call", "a call"],
)
def test_optional_inputs_may_be_omitted(model: ModelProto):
    sim = qsdk.quantize(model, None, qsdk.w8a8())
    qsdk.calibrate(sim, [np.full((2, 3), 2, np.float32)], progress=False)
    np.testing.assert_allclose(sim.run({"x": np.full((2, 3), 2, np.float32)})[0], 2, atol=0.02)
