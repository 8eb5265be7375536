"""The integer-only behaviours that other systems are held to, each on its own."""

import json
from fractions import Fraction

import numpy as np
import onnx
import pytest
from integer_models import LEVELS, UINT8, Net, run
from onnx import TensorProto, helper, shape_inference

import qsdk
from onnx_backend.integer.codegen.expand import expand
from onnx_backend.integer.ir.builder import Builder, requantize
from onnx_backend.integer.ir.values import ActivationEncoding, Linear, Term
from onnx_backend.integer.reference.run import run_reference

INTEGERS = {
    *(TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16, TensorProto.INT32),
    *(TensorProto.UINT32, TensorProto.INT64, TensorProto.UINT64, TensorProto.BOOL),
}


def of_every_op():
    """Conv, Add, Concat, Mul, AveragePool and Softmax, each between pairs with scales in no simple ratio."""
    net = Net(3)
    x = net.qdq(net.input([2, 4, 8, 8]), 0.0313, 117)
    w, scale = net.weight((4, 4, 3, 3), 0)
    conv = net.qdq(net.op("Conv", x, w, net.bias(4, 0.0313, scale), pads=[1] * 4), 0.0471, 121)
    total = net.qdq(net.op("Add", conv, x), 0.0527, 124)
    product = net.qdq(net.op("Mul", total, conv), 0.1931, 130)
    joined = net.qdq(net.op("Concat", product, total, axis=1), 0.1733, 127)
    pooled = net.qdq(net.op("AveragePool", joined, kernel_shape=[2, 2], strides=[2, 2]), 0.0891, 125)
    rows = net.qdq(net.op("Reshape", pooled, net.const(np.array([2, 8, 16]))), 0.0891, 125)
    net.output(net.qdq(net.op("Softmax", rows, axis=-1), 1 / 256, 0), [2, 8, 16])
    return net.model()


def float_tensors(model):
    """The name of every tensor between the edges that is not an integer, by shape inference alone."""
    graph = shape_inference.infer_shapes(model, check_type=True, strict_mode=True).graph
    kinds = {info.name: info.type.tensor_type.elem_type for info in (*graph.input, *graph.value_info, *graph.output)}
    kinds |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    edges = {info.name for info in (*graph.input, *graph.output)}
    pairs = [node for node in graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    edges |= {node.input[1] for node in pairs if node.input[0] in edges or node.output[0] in edges}
    made = {name for node in graph.node for name in (*node.input, *node.output) if name}
    assert made <= set(kinds)
    return [name for name, kind in kinds.items() if kind not in INTEGERS and name not in edges]


def test_an_integer_only_model_holds_no_float_and_equals_its_reference(tmp_path):
    model = of_every_op()
    report = qsdk.to_integer(model, tmp_path / "integer.onnx")
    written = onnx.load(tmp_path / "integer.onnx")
    assert [entry.domain for entry in written.opset_import] == [""]
    assert float_tensors(written) == []
    assert float_tensors(model) != []
    rows = json.loads((tmp_path / "integer.onnx.certificate.json").read_text())["requantizations"]
    assert {"Conv", "Add", "Mul", "AveragePool", "Concat", "Softmax"} <= {row["op_type"] for row in rows}
    parity = {row["op_type"] for row in json.loads((tmp_path / "integer.onnx.certificate.json").read_text())["parity"]}
    assert {"Conv", "Add", "Mul", "AveragePool", "Concat", "Softmax"} <= parity
    assert report.summary["operations_max_lsb"] <= 1
    feeds = {"x": np.random.default_rng(2).uniform(-4, 4, (2, 4, 8, 8)).astype(np.float32)}
    wanted = run_reference(written, feeds)["y"]
    assert np.unique(wanted).size > 40
    for level in LEVELS:
        np.testing.assert_array_equal(run(written, feeds, level)["y"], wanted, err_msg=level)


MULTIPLIER = 0.0072474


def recipe(zero_point):
    """The requantization of int32 accumulators with the multiplier, as `standard` writes it, and its certificate."""
    builder = Builder(["acc", "y"], "half_even")
    ends = np.asarray(-(2**31) + 1), np.asarray(2**31 - 1)
    term = Term("acc", np.asarray(MULTIPLIER), np.zeros((), np.int64), *ends)
    codes = requantize(builder, Linear((term,)), ActivationEncoding(1.0, zero_point, UINT8), "codes")
    nodes = expand(builder, {codes})
    nodes[-1].output[0] = "y"
    edges = [helper.make_tensor_value_info(n, k, ["n"]) for n, k in (("acc", TensorProto.INT32), ("y", UINT8))]
    graph = helper.make_graph(nodes, "recipe", edges[:1], edges[1:], builder.initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return model, builder.certificate[0]


@pytest.mark.parametrize("zero_point", [0, 128, 255])
def test_requantization_of_every_accumulator_is_within_one_step(zero_point):
    model, row = recipe(zero_point)
    # a multiplier in [1/2, 1) times 2**-7, with 31 bits of mantissa: 31 + 7
    assert row["shifts"] == [38]
    assert 2**30 <= row["mantissas"][0][0] < 2**31
    assert abs(Fraction(row["mantissas"][0][0], 2**38) - Fraction(MULTIPLIER)) <= Fraction(1, 2**39)
    reach = int(300 / MULTIPLIER)  # the grid has 256 codes: beyond this every accumulator saturates
    accumulators = np.arange(-reach, reach + 1, dtype=np.int64)
    far = np.array([s * v for s in (1, -1) for v in (2**24, 2**30, 2**31 - 1)], np.int64)
    accumulators = np.concatenate([accumulators, far])
    exact = np.clip(accumulators * MULTIPLIER + zero_point, 0, 255)
    feeds = {"acc": accumulators.astype(np.int32)}
    reference = run_reference(model, feeds)["y"]
    error = np.abs(reference - exact)
    assert error.max() <= 0.5 + 1e-6  # better than one step: it is the nearest code
    assert np.unique(reference).size > 2
    for level in LEVELS:
        np.testing.assert_array_equal(run(model, feeds, level)["y"], reference, err_msg=level)
