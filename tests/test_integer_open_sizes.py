"""Sizes that a file leaves open: worked out from data, from other sizes, and named where they would help."""

import numpy as np
import pytest
from integer_models import Net
from test_integer import noise
from test_integer_shapes import dynamic_product

import qsdk
from onnx_backend.integer.preparing.decided_sizes import with_decided_sizes
from qsdk.core.errors import IntegerError


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
    assert "Floor" not in {node.op_type for node in with_decided_sizes(grown_mean(7)).graph.node}
    assert "Floor" in {node.op_type for node in with_decided_sizes(grown_mean("length")).graph.node}
