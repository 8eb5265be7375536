"""MatMul with a vector on either side: a matrix of one row or column, whose axis the result does not have."""

import numpy as np
import pytest
from integer_comparison import compare, noise
from integer_models import INT8, UINT8, UINT16, Net

from onnx_backend.integer.convert import convert
from qsdk import IntegerError, calibrate, export, quantize, to_integer, w8a8


def product(form, encoding=(0.031, 119, UINT8), behind=""):
    """A MatMul of 8 products and its output's shape; x may have one, two or three axes."""
    net = Net()
    shape = {"column": [5, 8], "columns": [2, 5, 8], "row": [8, 5], "rows": [2, 8, 5]}.get(form, [8])
    x = net.qdq(net.input(shape), *encoding)
    w = net.weight((5, 8) if form == "right vector" else (8, 5) if form == "left vector" else (8,))[0]
    left, right = (w, x) if form.startswith(("row", "right")) else (x, w)
    if form == "both":
        right = net.qdq(net.input([8], "z"), 0.02, 100)
    y = net.op("MatMul", left, right)
    if behind:
        y = net.op("Relu", net.op("Add", y, net.qdq(net.const(np.float32(0.7)), 0.01, 0, INT8)))
    wanted = [] if form in ("both", "vector") else [2, 5] if form in ("columns", "rows") else [5]
    net.output(net.qdq(y, 0.013, 120), wanted)
    feeds = {"x": noise(shape)} | ({"z": noise((8,), 1)} if form == "both" else {})
    return net.model(), feeds


@pytest.mark.parametrize("behind", ["", "Add"])
@pytest.mark.parametrize("form", ["column", "columns", "row", "rows", "right vector", "left vector"])
def test_a_vector_on_either_side_is_exact(form, behind):
    model, feeds = product(form, behind=behind)
    compare(model, feeds)


@pytest.mark.parametrize("target", ["standard", "onnxruntime"])
@pytest.mark.parametrize("encoding", [(0.031, -11, INT8), (0.0002, 30000, UINT16)])
@pytest.mark.parametrize("form", ["columns", "rows"])
def test_vectors_in_every_encoding_and_target(form, encoding, target, tmp_path):
    model, feeds = product(form, encoding)
    if target == "standard":
        compare(model, feeds)
    assert to_integer(model, tmp_path / "int.onnx", target=target, data=[feeds]).summary["operations_max_lsb"] <= 1


@pytest.mark.parametrize("form", ["both", "vector"])
def test_two_vectors_give_one_number(form, tmp_path):
    model, feeds = product(form)
    assert to_integer(model, tmp_path / "int.onnx", data=[feeds]).summary["operations_max_lsb"] <= 1


def test_a_vector_of_a_scale_per_element_is_refused_by_name():
    net = Net()
    x = net.qdq(net.input([5, 8]), 0.031, 117)
    y = net.op("MatMul", x, net.weight((8,), 0)[0])
    net.output(net.qdq(y, 0.013, 120), [5])
    with pytest.raises(IntegerError, match="one scale per index of axis 0"):
        convert(net.model())


def test_a_float_model_with_a_vector_becomes_integer_only(tmp_path):
    net = Net()
    x = net.input(["n", 5, 8])
    net.output(net.op("MatMul", x, net.const(noise((8,), 0.2))), ["n", 5])
    sim = quantize(net.model(), None, w8a8())
    batch = {"x": noise((3, 5, 8))}
    calibrate(sim, [batch], progress=False)
    export(sim, tmp_path / "m.onnx")
    summary = to_integer(tmp_path / "m.onnx", tmp_path / "int.onnx", data=[batch]).summary
    assert (summary["float_tensors"], summary["operations_max_lsb"]) == (0, 0)
