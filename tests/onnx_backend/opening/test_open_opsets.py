"""Models of old opsets are raised, and give what the runtime gives for the file itself."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from qdq_models import convnet, make_model, weights

import onnx_backend.passes.convert_opset as raising
from onnx_backend.opening.from_float import open_float
from onnx_backend.proto.opsets import opset_of
from qsdk import FileFormatError, ModelError, w8a8

node = helper.make_node
RNG = np.random.default_rng(0)
IMAGE = RNG.normal(size=(2, 4, 6, 6)).astype(np.float32)
SERIES = RNG.normal(size=(3, 2, 4)).astype(np.float32)
TABLE = RNG.normal(size=(2, 4)).astype(np.float32)
NORM = {name: np.abs(RNG.normal(size=4)).astype(np.float32) for name in ("s", "b", "m", "v")}
GRID = RNG.uniform(-1, 1, size=(2, 3, 3, 2)).astype(np.float32)


def scales(*values):
    return {"scales": np.array(values, np.float32)}


# op, opset, stored, attributes, x
CASES = {
    "batch norm": ("BatchNormalization", 9, NORM, {}, IMAGE),
    "batch norm with spatial": ("BatchNormalization", 8, NORM, {"spatial": 1}, IMAGE),
    "upsample nearest": ("Upsample", 9, scales(1, 1, 2, 2), {"mode": "nearest"}, IMAGE),
    "upsample linear": ("Upsample", 9, scales(1, 1, 2, 2), {"mode": "linear"}, IMAGE),
    "resize nearest": ("Resize", 10, scales(1, 1, 1.5, 0.6), {"mode": "nearest"}, IMAGE),
    "resize nearest smaller": ("Resize", 10, scales(1, 1, 0.4, 0.6), {"mode": "nearest"}, IMAGE),
    "resize nearest larger": ("Resize", 10, scales(1, 1, 1.4, 2.6), {"mode": "nearest"}, IMAGE),
    "resize linear": ("Resize", 10, scales(1, 1, 1.5, 1.7), {"mode": "linear"}, IMAGE),
    "clip": ("Clip", 9, {}, {"min": -0.5, "max": 0.5}, IMAGE),
    "clip above": ("Clip", 9, {}, {"max": 0.5}, IMAGE),
    "pad": ("Pad", 9, {}, {"pads": [0, 0, 1, 1, 0, 0, 2, 2], "value": 1.5}, IMAGE),
    "pad reflect": ("Pad", 9, {}, {"pads": [0, 0, 1, 1, 0, 0, 2, 2], "mode": "reflect"}, IMAGE),
    "slice": ("Slice", 9, {}, {"starts": [1], "ends": [3], "axes": [1]}, IMAGE),
    "unsqueeze": ("Unsqueeze", 9, {}, {"axes": [0, 3]}, IMAGE),
    "sum of axes": ("ReduceSum", 11, {}, {"axes": [1, -1], "keepdims": 0}, IMAGE),
    "mean of axes": ("ReduceMean", 17, {}, {"axes": [1], "keepdims": 1}, IMAGE),
    "max of axes": ("ReduceMax", 11, {}, {"axes": [-1]}, IMAGE),
    "softmax flattens": ("Softmax", 9, {}, {"axis": 1}, IMAGE),
    "log softmax flattens": ("LogSoftmax", 12, {}, {"axis": 2}, IMAGE),
    "hardmax flattens": ("Hardmax", 9, {}, {"axis": 2}, IMAGE),
    "gemm": ("Gemm", 9, weights(w=(5, 4), c=(5,)), {"transB": 1}, TABLE),
    "gru": ("GRU", 9, weights(w=(1, 9, 4), r=(1, 9, 3)), {"hidden_size": 3, "linear_before_reset": 1}, SERIES),
    "lstm": ("LSTM", 9, weights(w=(1, 12, 4), r=(1, 12, 3)), {"hidden_size": 3}, SERIES),
    "scatter": ("Scatter", 9, {"i": np.zeros((1,) * 4, np.int64), **weights(u=(1, 1, 1, 1))}, {"axis": 1}, IMAGE),
    "average pool": ("AveragePool", 10, {}, {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}, IMAGE),
    "expand": ("Expand", 9, {"shape": np.array([3, 1, 1, 1, 1])}, {}, IMAGE),
    "power": ("Pow", 9, {"e": np.float32(2)}, {}, IMAGE),
    "mean and variance": ("MeanVarianceNormalization", 9, {}, {}, IMAGE),
    "grid sample": ("GridSample", 16, {"grid": GRID}, {"mode": "bilinear"}, IMAGE),
    "group norm": ("GroupNormalization", 18, weights(s=(2,), b=(2,)), {"num_groups": 2}, IMAGE),
}


def run(model, feeds):
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"]).run(None, feeds)


def one_node(op, opset, stored, attributes, x):
    only = node(op, ["x", *stored], ["y"], "only", **attributes)
    return make_model([only], {"x": list(x.shape)}, {"y": None}, stored, opset, 3)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("with_example", [True, False])
def test_an_old_op_gives_the_same_values(case, with_example):
    *_, x = CASES[case]
    model = one_node(*CASES[case])
    opened = open_float(model, w8a8(), x if with_example else None)
    assert opset_of(opened.model) == 21
    for left, right in zip(run(model, {"x": x}), run(opened.model, {"x": x}), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-6)
    how = "the example" if with_example else "random inputs"
    before = opset_of(model)
    assert opened.notes.summary()["opened"] == f"raised from opset {before} to 21: equal outputs on {how}"


@pytest.mark.parametrize("opset", [21, 22, 23, 24, 25])
def test_a_new_opset_stays_what_it_is(opset):
    opened = open_float(convnet(opset), w8a8())
    assert opset_of(opened.model) == opset
    assert opened.notes.remarks == ()


@pytest.mark.parametrize("opset", [9, 10, 11, 12, 13, 15, 17, 19, 20])
def test_every_old_opset_gives_the_same_plan(opset):
    assert open_float(convnet(opset), w8a8()).plan == open_float(convnet(), w8a8()).plan


def test_bodies_are_raised_too():
    flat = helper.make_graph(
        [node("Softmax", ["x"], ["o"], axis=1)], "t", [], [helper.make_tensor_value_info("o", 1, None)]
    )
    turned = helper.make_graph(
        [
            node("Unsqueeze", ["x"], ["u"], axes=[0]),
            node("Hardmax", ["u"], ["h"], axis=2),
            node("Squeeze", ["h"], ["p"], axes=[0]),
        ],
        "e",
        [],
        [helper.make_tensor_value_info("p", 1, None)],
    )
    nodes = [
        node("ReduceMax", ["x"], ["top"], keepdims=0),
        node("Greater", ["top", "limit"], ["c"]),
        node("If", ["c"], ["y"], then_branch=flat, else_branch=turned),
    ]
    model = make_model(nodes, {"x": [2, 4, 6, 6]}, {"y": None}, {"limit": np.float32(0)}, 11, 6)
    raised = open_float(model, w8a8()).model
    for sign in (1, -1):
        x = sign * np.abs(IMAGE)
        np.testing.assert_allclose(run(model, {"x": x})[0], run(raised, {"x": x})[0], rtol=1e-6, atol=1e-7)


def test_a_conversion_that_changes_a_value_is_refused_with_the_output_and_the_node(monkeypatch):
    monkeypatch.setattr(raising, "_make_resizes_asymmetric", lambda graph: None)
    nodes = [
        node("Relu", ["x"], ["r"], "relu"),
        node("Upsample", ["r", "scales"], ["u"], "enlarge", mode="linear"),
        node("Neg", ["u"], ["y"], "neg"),
    ]
    model = make_model(nodes, {"x": [2, 4, 6, 6]}, {"y": None}, scales(1, 1, 2, 2), 9, 4)
    said = r"from opset 9 to 21 changes the output 'y': it first differs behind the Upsample 'enlarge'; export"
    with pytest.raises(ModelError, match=said):
        open_float(model, w8a8(), IMAGE)


def averaging(opset=18):
    """Averages of four codes lie between two codes, so that the last bit of a float decides the rounding."""
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["xq"]),
        node("DequantizeLinear", ["xq", "s", "z"], ["xd"]),
        node("AveragePool", ["xd"], ["a"], "average", kernel_shape=[2, 2], strides=[2, 2]),
        node("LeakyRelu", ["a"], ["l"], "leaky", alpha=0.1),
        node("QuantizeLinear", ["l", "s", "z"], ["lq"], "second"),
        node("DequantizeLinear", ["lq", "s", "z"], ["ld"]),
        node(
            "Resize", ["ld", "", "scales"], ["u"], "enlarge", mode="linear", coordinate_transformation_mode="half_pixel"
        ),
        node("DynamicQuantizeLinear", ["u"], ["uq", "us", "uz"]),
        node("DequantizeLinear", ["uq", "us", "uz"], ["y"]),
    ]
    stored = {"s": np.float32(0.05), "z": np.uint8(100), **scales(1, 1, 2, 2)}
    return make_model(nodes, {"x": [2, 4, 6, 6]}, {"y": None}, stored, opset, 8)


@pytest.mark.parametrize("opset", [13, 18])
def test_a_rounding_that_the_new_kernel_turns_is_no_change_of_the_model(opset):
    model = averaging(opset)
    raised, remarks = raising.raise_opset(onnx.ModelProto.FromString(model.SerializeToString()), {"x": IMAGE})
    assert (run(model, {"x": IMAGE})[0] != run(raised, {"x": IMAGE})[0]).any()
    said = "equal on the example where every quantizer gives the same codes; roundings that turned change outputs"
    assert remarks == (f"raised from opset {opset} to 21: {said}",)


def set_attribute(name, changed):
    def change(model):
        (found,) = (a for n in model.graph.node for a in n.attribute if a.name == name)
        found.CopyFrom(helper.make_attribute(name, changed))

    return change


def set_input(name, at, value):
    def change(model):
        (found,) = (n for n in model.graph.node if n.name == name)
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, "changed"))
        found.input[at] = "changed"

    return change


@pytest.mark.parametrize(
    ("change", "culprit"),
    [
        (set_attribute("alpha", 0.101), "LeakyRelu 'leaky'"),  # moves no code by more than a step
        (set_input("second", 1, np.float32(0.06)), "QuantizeLinear 'second'"),
        (set_input("second", 2, np.uint8(97)), "QuantizeLinear 'second'"),
        (set_attribute("coordinate_transformation_mode", "asymmetric"), "Resize 'enlarge'"),
    ],
)
def test_a_conversion_that_changes_a_quantized_model_is_refused(change, culprit, monkeypatch):
    convert = onnx.version_converter.convert_version

    def wrongly(model, version):
        converted = convert(model, version)
        change(converted)
        return converted

    model = averaging()
    raising.raise_opset(onnx.ModelProto.FromString(model.SerializeToString()), {"x": IMAGE})
    monkeypatch.setattr(onnx.version_converter, "convert_version", wrongly)
    with pytest.raises(ModelError, match=f"changes the output 'y': it first differs behind the {culprit}; export"):
        raising.raise_opset(model, {"x": IMAGE})


def test_an_op_that_the_opset_does_not_have_is_named():
    model = one_node("Gelu", 11, {}, {}, TABLE)
    with pytest.raises(FileFormatError, match=r"cannot load the model.*Gelu"):
        open_float(model, w8a8())


def test_a_failure_of_the_converter_says_what_to_do(monkeypatch):
    def failing(model, version):
        raise onnx.version_converter.ConvertError("no adapter")

    monkeypatch.setattr(onnx.version_converter, "convert_version", failing)
    with pytest.raises(
        ModelError, match=r"cannot be raised from opset 13 to 21: no adapter; export the model at opset 21"
    ):
        open_float(convnet(13), w8a8())


def test_a_model_that_does_not_run_on_random_inputs_says_so():
    nodes = [node("Gather", ["w", "i"], ["y"], "pick")]
    model = make_model(nodes, {}, {"y": None}, weights(w=(1, 3)), 13, 7)
    model.graph.input.append(helper.make_tensor_value_info("i", TensorProto.INT64, ["n"]))
    model.graph.node[0].input[0] = "t"
    model.graph.node.insert(0, node("Slice", ["w", "start", "end"], ["t"]))
    for name, value in (("start", [0]), ("end", [0])):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(value), name))
    said = open_float(model, w8a8()).notes.remarks[0]
    assert "not compared by running: the original does not run on random inputs" in said
    assert "pass an example" in said


def test_random_numbers_are_not_compared():
    nodes = [node("RandomNormalLike", ["x"], ["r"]), node("Add", ["x", "r"], ["y"])]
    opened = open_float(make_model(nodes, {"x": [2]}, {"y": [2]}, {}, 13, 7), w8a8())
    assert "draws random numbers" in opened.notes.remarks[0]


@pytest.mark.parametrize(
    ("change", "message"), [({"opset": 27}, "opset 27"), ({"ir": 99}, "IR version 99"), ({"ir": 0}, "IR version 0")]
)
def test_what_is_newer_than_the_runtime_is_refused(change, message):
    with pytest.raises(ModelError, match=message):
        open_float(make_model([node("Relu", ["x"], ["y"])], {"x": [2]}, {"y": [2]}, {}, **change), w8a8())
