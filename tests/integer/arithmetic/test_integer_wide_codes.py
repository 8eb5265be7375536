"""Fixed point of codes of 16 bits, of both edges and of both targets."""

import numpy as np
import pytest
from integer_comparison import noise
from integer_models import Net, run, simulate
from onnx import TensorProto

from onnx_backend.integer.convert import convert
from onnx_backend.integer.reference.run import run_reference


def sixteen(net, x, scale, zero):
    parameters = [net.const(np.float32(scale)), net.const(np.uint16(zero))]
    return net.op("DequantizeLinear", net.op("QuantizeLinear", x, *parameters), *parameters)


OPS = {
    "Softmax": (lambda net, x: net.op("Softmax", x), 1 / 65535, 0),
    "LogSoftmax": (lambda net, x: net.op("LogSoftmax", x), 4e-4, 65535),
    "LayerNormalization": (
        lambda net, x: net.op("LayerNormalization", x, net.const(np.ones(32, np.float32))),
        2e-4,
        32768,
    ),
    "Div": (lambda net, x: net.op("Div", x, net.op("Exp", net.op("Tanh", x))), 3e-4, 32768),
    "Mean": (lambda net, x: net.op("ReduceMean", net.op("Sigmoid", x), net.const(np.array([1]))), 2e-5, 0),
}


@pytest.mark.parametrize("target", ["standard", "onnxruntime"])
@pytest.mark.parametrize("op", OPS)
def test_codes_of_sixteen_bits(op, target):
    write, scale, zero = OPS[op]
    net = Net()
    x = sixteen(net, net.input([9, 32]), 3e-4, 30000)
    y = write(net, x)
    net.output(sixteen(net, y, scale, zero), [9, 1] if op == "Mean" else [9, 32])
    model, feeds = net.model(), {"x": noise((9, 32), 2.0)}
    result = convert(model, target=target)
    found, wanted = run(result.model, feeds)["y"], simulate(model, feeds)["y"]
    lsb = np.abs(np.rint((found.astype(np.float64) - wanted) / scale))
    assert lsb.max() <= 1
    assert (lsb > 0).sum() <= max(1, 0.05 * lsb.size)  # float32 is only 256 times finer than these steps
    assert result.certificate["requantizations"][-1]["error_bound"] < 0.1
    if target == "standard":
        np.testing.assert_array_equal(run_reference(result.model, feeds)["y"], found)


@pytest.mark.parametrize("op", OPS)
def test_integer_edges(op):
    write, scale, _ = OPS[op]
    net = Net()
    x = net.qdq(net.input([9, 32]), 0.03, 119)
    net.output(net.qdq(write(net, x), scale * 200, 128), [9, 1] if op == "Mean" else [9, 32])
    result = convert(net.model(), edges="integer")
    feeds = {"x": np.random.default_rng(0).integers(0, 256, (9, 32)).astype(np.uint8)}
    kinds = {info.type.tensor_type.elem_type for info in (*result.model.graph.input, *result.model.graph.output)}
    assert kinds == {TensorProto.UINT8}
    np.testing.assert_array_equal(run_reference(result.model, feeds)["y"], run(result.model, feeds)["y"])
