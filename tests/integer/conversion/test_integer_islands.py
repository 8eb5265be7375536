"""Float islands: what `allow_float` keeps, how it is listed, and what is refused."""

import numpy as np
import pytest
from integer_models import LEVELS, UINT8, UINT16, Net, run, simulate

import qsdk
from onnx_backend.integer.convert import convert
from onnx_backend.integer.verify.integer_only import integer_findings
from qsdk import ConfigError, IntegerError


def with_island(op="Cos", dtype=UINT8, zero=117):
    """Conv, then an op without integer form between two quantizers, then a Gemm."""
    net = Net()
    x = net.qdq(net.input([2, 4, 3, 3]), 0.031, 117)
    y = net.qdq(net.op("Conv", x, net.weight((4, 4, 3, 3), 0)[0]), 0.01 if dtype == UINT8 else 1e-4, zero, dtype)
    y = net.qdq(net.op(op, y), 0.0079, 128)
    y = net.op("Flatten", y)
    net.output(net.qdq(net.op("Gemm", y, net.weight((5, 4), 0)[0], transB=1), 0.003, 120), [2, 5])
    return net.model()


def feeds():
    return {"x": np.random.default_rng(0).uniform(-4, 4, (2, 4, 3, 3)).astype(np.float32)}


@pytest.mark.parametrize("pattern", ["Det", "node_det*"])
@pytest.mark.parametrize("options", [{}, {"target": "onnxruntime"}])
def test_a_named_op_stays_float_between_quantizers(pattern, options):
    net = Net()
    x = net.qdq(net.input([2, 3, 3]), 0.031, 117)
    net.output(net.qdq(net.op("Det", x), 0.2, 120), [2])
    with pytest.raises(IntegerError, match="Det 'node_det"):
        convert(net.model(), **options)
    result = convert(net.model(), allow_float=[pattern], **options)
    inputs = {"x": np.random.default_rng(0).uniform(-4, 4, (2, 3, 3)).astype(np.float32)}
    for level in LEVELS:
        np.testing.assert_allclose(run(result.model, inputs, level)["y"], simulate(net.model(), inputs)["y"], rtol=1e-6)
    assert [name.split("_")[1] for name in result.certificate["float_nodes"]] == ["det"]
    assert result.report.summary["float_nodes"] == 1
    assert result.report.summary["float_tensors"] > 0
    assert integer_findings(result.model)  # without the exception they are findings


@pytest.mark.parametrize(("dtype", "zero"), [(UINT8, 117), (UINT16, 31000)])
def test_an_island_inside_a_network(dtype, zero):
    model = with_island("Sin", dtype, zero)
    result = convert(model, allow_float=["Sin"])
    found, wanted = run(result.model, feeds())["y"], simulate(model, feeds())["y"]
    assert np.abs(found - wanted).max() <= 2 * 0.0031


def test_neighbours_of_an_island_must_be_quantized_or_named():
    net = Net()
    x = net.qdq(net.input([2, 3, 3]), 0.031, 117)
    net.output(net.qdq(net.op("Tanh", net.op("Det", x)), 0.0079, 120), [2])
    with pytest.raises(IntegerError, match="name it in allow_float too"):
        convert(net.model(), allow_float=["Det"])
    assert convert(net.model(), allow_float=["Det", "Tanh"]).report.summary["float_nodes"] == 2


def test_an_accumulator_and_a_float_input_may_enter_an_island_and_its_result_may_leave():
    net = Net()
    x = net.input([2, 3, 3])
    y = net.op("MatMul", net.qdq(x, 0.031, 117), net.weight((3, 3), 1)[0])
    net.output(net.op("Sub", net.op("Det", y), net.op("Det", x)), [2])
    result = convert(net.model(), allow_float=["Det", "Sub"])
    inputs = {"x": np.random.default_rng(0).uniform(-4, 4, (2, 3, 3)).astype(np.float32)}
    np.testing.assert_allclose(run(result.model, inputs)["y"], simulate(net.model(), inputs)["y"], rtol=1e-4)
    with pytest.raises(IntegerError, match="float input"):
        convert(net.model(), allow_float=["Det", "Sub"], edges="integer")


def divided(net, x):
    squares = net.op("ReduceSum", net.op("Mul", x, x), net.const(np.array([2])), keepdims=1)
    return net.op("Div", x, net.op("Sqrt", net.op("Add", squares, net.const(np.float32(0.1)))))


def joined(net, x):
    return net.op("Concat", x, net.op("Softmax", x), axis=0)


def larger(net, x):
    return net.op("Max", x, net.op("MatMul", x, net.weight((3, 3), 1)[0]))


def leaky(net, x):
    return net.op("LeakyRelu", net.op("MatMul", x, net.weight((3, 3), 1)[0]), alpha=0.1)


@pytest.mark.parametrize("before", [divided, joined, larger, leaky, lambda net, x: net.op("Softmax", x)])
def test_whatever_integers_stand_for_may_enter_an_island(before):
    net = Net()
    x = before(net, net.qdq(net.input([2, 3, 3]), 0.031, 117))
    net.output(net.op("Det", x), [None])
    result = convert(net.model(), allow_float=["Det"])
    inputs = {"x": np.random.default_rng(0).uniform(-4, 4, (2, 3, 3)).astype(np.float32)}
    wanted = simulate(net.model(), inputs)["y"]
    assert np.abs(wanted).max() > 1e-4
    np.testing.assert_allclose(run(result.model, inputs)["y"], wanted, rtol=1e-3, atol=1e-5)


def test_a_sum_of_two_layers_enters_an_island_whole():
    net = Net()
    x = net.qdq(net.input([5, 8]), 0.031, 117)
    one, other = (net.op("MatMul", x, net.weight((8, 4))[0]) for _ in range(2))
    net.output(net.op("Sin", net.op("Add", one, other)), [5, 4])
    result = convert(net.model(), allow_float=["Sin"])
    given = {"x": np.random.default_rng(0).uniform(-4, 4, (5, 8)).astype(np.float32)}
    np.testing.assert_allclose(run(result.model, given)["y"], simulate(net.model(), given)["y"], atol=1e-5)


def test_a_node_that_has_to_be_named_too_is_named():
    net = Net()
    x = net.op("Clip", net.input([2, 3, 3]), net.const(np.float32(0)))
    net.output(net.qdq(net.op("Det", x), 0.2, 120), [2])
    with pytest.raises(IntegerError, match=f"name the node that makes '{x}' in allow_float too"):
        convert(net.model(), allow_float=["Det"])
    assert convert(net.model(), allow_float=["Det", f"node_{x}"]).report.summary["float_nodes"] == 2


def test_a_pattern_that_matches_nothing_is_an_error():
    with pytest.raises(ConfigError, match="allow_float='Softmx' matches no node; node names are like node_"):
        convert(with_island("Tanh"), allow_float=["Softmx"])


def test_the_report_lists_what_stayed_float(tmp_path):
    report = qsdk.to_integer(with_island("Sin"), tmp_path / "out.onnx", allow_float=["Sin"])
    assert [row["node"].split("_")[1] for row in report.rows if row["form"] == "float"] == ["sin"]
    assert report.summary["reference_equal"] is None
    assert report.summary["max_lsb"] <= 2
