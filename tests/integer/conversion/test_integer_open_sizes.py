"""Sizes that a file leaves open: worked out from data, from other sizes, and named where they would help."""

import json

import numpy as np
import onnx
import pytest
import torch
from dynamic_products import dynamic_product
from integer_comparison import noise
from integer_models import Net
from onnx import TensorProto, helper, numpy_helper
from qdq_models import make_model

import qsdk
from onnx_backend.integer.convert import convert
from onnx_backend.integer.decompose.prepare import prepare
from onnx_backend.integer.reference.run import run_reference
from onnx_backend.passes.static_sizes import propagate_static_sizes
from qsdk import IntegerError


def grown_mean(size):
    """A mean along an axis whose size inference does not follow: a whole number of steps, as a ratio of floats."""
    net = Net()
    x = net.qdq(net.input(["n", 4, size]), 0.031, 117)
    sizes = net.op("Cast", net.op("Shape", x, start=2, end=3), to=1)
    scaled = net.op("Floor", net.op("Mul", sizes, net.const(np.float32([0.5]))))
    length = net.op("Cast", scaled, to=7)
    rest = net.op("Slice", x, net.const(np.array([0])), length, net.const(np.array([2])))
    y = net.op("ReduceMean", rest, net.const(np.array([2])), keepdims=1)
    net.output(net.qdq(y, 0.0117, 120), ["n", 4, 1])
    return net.model()


def test_a_refusal_that_fixed_sizes_cure_names_them(tmp_path):
    with pytest.raises(IntegerError, match="not static") as caught:
        qsdk.to_integer(dynamic_product(), tmp_path / "int.onnx")
    assert 'shapes={"x": (?, 4, ?)}' in str(caught.value)
    assert "--shape x=?,4,?" in str(caught.value)


def test_a_refusal_that_no_sizes_cure_does_not_name_them(tmp_path):
    net = Net()
    x = net.qdq(net.input(["n", 4]), 0.031, 117)
    net.output(net.qdq(net.op("Det", net.op("Reshape", x, net.const(np.array([-1, 2, 2])))), 0.1, 120), ["n"])
    with pytest.raises(IntegerError, match="Det has no integer form") as caught:
        qsdk.to_integer(net.model(), tmp_path / "int.onnx")
    assert "shapes=" not in str(caught.value)


def test_sizes_come_from_data_where_they_are_needed(tmp_path):
    batch = {"x": noise((3, 4, 7))}
    summary = qsdk.to_integer(dynamic_product(), tmp_path / "int.onnx", data=[batch]).summary
    assert summary["fixed_shapes"] == {"x": [None, 4, 7]}  # a batch may still have any size
    assert summary["operations_max_lsb"] <= 1


def test_sizes_stay_open_where_none_is_needed(tmp_path):
    net = Net()
    x = net.qdq(net.input(["n", 4]), 0.031, 117)
    net.output(net.qdq(net.op("Sigmoid", x), 0.004, 0), ["n", 4])
    assert "fixed_shapes" not in qsdk.to_integer(net.model(), tmp_path / "i.onnx", data=[{"x": noise((3, 4))}]).summary


def test_sizes_that_follow_from_sizes_are_computed(tmp_path):
    summary = qsdk.to_integer(grown_mean("length"), tmp_path / "int.onnx", shapes={"x": (2, 4, 7)}).summary
    assert summary["operations_max_lsb"] <= 1
    assert "Floor" not in {node.op_type for node in propagate_static_sizes(grown_mean(7)).graph.node}
    assert "Floor" in {node.op_type for node in propagate_static_sizes(grown_mean("length")).graph.node}


def float_product():
    """The product of an input of any length with itself, as a float model."""
    net = Net()
    x = net.input(["n", 4, "length"])
    net.output(net.op("MatMul", x, net.op("Transpose", x, perm=[0, 2, 1])), ["n", 4, 4])
    return net.model()


class Product(torch.nn.Module):
    def forward(self, x):
        return x @ x.transpose(1, 2)


def exported(model, example, path, **options):
    sim = qsdk.quantize(model, example, **options)
    qsdk.calibrate(sim, [example], progress=False)
    qsdk.export(sim, path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("door", ["torch", "onnx"])
def test_sizes_come_from_the_example_where_they_are_needed(door, tmp_path):
    x = noise((3, 4, 7))
    if door == "torch":
        dynamic = ({0: "n", 2: "length"},)
        path = exported(Product(), torch.from_numpy(x), tmp_path / "m.onnx", dynamic_shapes=dynamic)
    else:
        path = exported(float_product(), x, tmp_path / "m.onnx")
    summary = qsdk.to_integer(path, tmp_path / "int.onnx").summary
    assert (summary["fixed_shapes"], summary["sizes_from"]) == ({"x": [None, 4, 7]}, "the example")
    certificate = json.loads((tmp_path / "int.onnx.certificate.json").read_text())
    assert (certificate["fixed_shapes"], certificate["sizes_from"]) == ({"x": [None, 4, 7]}, "the example")
    again = qsdk.quantize(path)  # opened and exported again, it still says so
    qsdk.export(again, tmp_path / "again.onnx")
    assert qsdk.to_integer(tmp_path / "again.onnx", tmp_path / "i.onnx").summary["sizes_from"] == "the example"
    for options, origin in (({"shapes": {"x": (2, 4, 5)}}, "shapes="), ({"data": [{"x": noise((2, 4, 5))}]}, "data=")):
        summary = qsdk.to_integer(path, tmp_path / "i.onnx", **options).summary
        assert (summary["fixed_shapes"]["x"][1:], summary["sizes_from"]) == ([4, 5], origin)


def test_a_refusal_at_the_sizes_of_data_is_the_true_one(tmp_path):
    net = Net()
    x = net.qdq(net.input(["n", "length", 8]), 0.031, 117)
    total = net.qdq(net.op("ReduceSum", x, net.const(np.array([1]))), 0.2, 120)
    net.output(net.qdq(net.op("Hardmax", total), 0.004, 0), ["n", 1, 8])
    with pytest.raises(IntegerError) as caught:
        qsdk.to_integer(net.model(), tmp_path / "int.onnx", data=[{"x": noise((4, 6, 8))}], progress=False)
    assert "Hardmax 'node_hardmax" in str(caught.value)
    assert "ReduceSum" not in str(caught.value)
    assert "shapes=" not in str(caught.value)


@pytest.mark.parametrize("said", ["{", "[1]", '{"x": [3, 5, 7]}', '{"x": [3, 4]}', '{"x": [3, 4, -7]}', '{"y": [3]}'])
def test_an_example_that_does_not_fit_the_file_is_none(said, tmp_path):
    model = dynamic_product()
    model.metadata_props.add(key="qsdk.example", value=said)
    with pytest.raises(IntegerError, match="shapes="):
        qsdk.to_integer(model, tmp_path / "int.onnx")


def test_a_file_of_fixed_sizes_notes_no_example(tmp_path):
    path = exported(Product(), torch.from_numpy(noise((3, 4, 7))), tmp_path / "m.onnx", dynamic_shapes={})
    assert "qsdk.example" not in {entry.key for entry in onnx.load(path).metadata_props}


def of_open_sizes(kind):
    """A model with one node that needs a size which the file leaves open."""
    net = Net()
    x = net.qdq(net.input(["n", 4, "length"]), 0.031, 117)
    if kind == "Concat":
        y = net.op("Concat", x, net.qdq(net.op("Sigmoid", x), 0.004, 0), axis=2)
        net.output(y, ["n", 4, None])
        return net.model()
    left, right = (net.qdq(net.input(["n", *axes, "c"], axes), 0.031, 117) for axes in ("hw", "ab"))
    y = net.op("Einsum", left, right, equation="nhwc,nabc->nhwab")
    net.output(net.qdq(y, 0.05, 120), [None] * 5)
    return net.model()


@pytest.mark.parametrize("kind", ["Concat", "Einsum"])
def test_every_refusal_of_an_open_size_names_the_remedy(kind):
    with pytest.raises(IntegerError) as caught:
        convert(prepare(of_open_sizes(kind)))
    for line in str(caught.value).splitlines()[1:]:
        assert "shapes={input name: sizes}" in line, line


@pytest.mark.parametrize(
    ("part", "kept"), [({"start": 0, "end": 1}, [3]), ({"start": 1}, [5, 2]), ({"end": -1}, [3, 5])], ids=str
)
def test_sizes_of_some_axes_are_those_of_these_axes(part, kept):
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], **part),
        helper.make_node("Cast", ["s"], ["f"], to=1),
        helper.make_node("Identity", ["f"], ["y"]),
    ]
    decided = propagate_static_sizes(make_model(nodes, {"x": [3, 5, 2]}, {"y": [len(kept)]}, {}))
    stored = {t.name: numpy_helper.to_array(t).tolist() for t in decided.graph.initializer}
    assert stored["f"] == kept


def test_the_shape_of_integers_of_open_sizes_is_measured():
    net = Net()
    ids = net.input(["n", 3], "ids", TensorProto.INT64)
    net.output(net.qdq(net.op("Gather", net.const(noise((9, 2))), ids), 0.03, 120), ["n", 3, 2])
    net.output(net.op("Shape", ids), [2], "sizes", TensorProto.INT64)
    model = convert(net.model()).model
    for count in (1, 4):
        assert run_reference(model, {"ids": np.zeros((count, 3), np.int64)})["sizes"].tolist() == [count, 3]
