"""What is float inside a supergroup and integer after lowering: slopes behind a layer, GELU, rotary embedding."""

import numpy as np
import pytest
from integer_comparison import ENCODINGS, compare, grid, noise
from integer_models import INT8, UINT8, Net

from onnx_backend.integer.convert import convert
from qsdk import IntegerError


def layer(encoding="uint8"):
    net = Net()
    x = net.qdq(net.input([2, 3, 9, 8]), **ENCODINGS[encoding])
    w, scale = net.weight((6, 3, 3, 3), 0)
    return net, net.op("Conv", x, w, net.bias(6, 0.031, scale))


@pytest.mark.parametrize("alpha", [0.01, 0.2, 1.0, 1.7])
@pytest.mark.parametrize("encoding", ["uint8", "int8", "uint8_default"])
def test_leaky_relu_is_folded_into_the_requantization_of_its_layer(encoding, alpha):
    net, y = layer(encoding)
    y = net.op("LeakyRelu", y, alpha=alpha)
    net.output(net.qdq(y, **ENCODINGS[encoding]), [2, 6, 7, 6])
    result = compare(net.model(), {"x": noise((2, 3, 9, 8))})
    assert [row["form"] for row in result.certificate["requantizations"]] == ["fixed point"] * 2


def test_prelu_has_a_slope_per_channel():
    net, y = layer()
    slope = net.const(np.linspace(0.05, 1.5, 6, dtype=np.float32).reshape(6, 1, 1))
    net.output(net.qdq(net.op("PRelu", y, slope), **ENCODINGS["int8"]), [2, 6, 7, 6])
    compare(net.model(), {"x": noise((2, 3, 9, 8))})


def test_prelu_with_a_quantized_slope():
    net, y = layer()
    slope = net.qdq(net.const(np.linspace(0.1, 1.2, 6, dtype=np.float32).reshape(6, 1, 1)), 0.01, 0, INT8)
    net.output(net.qdq(net.op("PRelu", y, slope), **ENCODINGS["uint8"]), [2, 6, 7, 6])
    compare(net.model(), {"x": noise((2, 3, 9, 8))})


@pytest.mark.parametrize("op", ["LeakyRelu", "PRelu"])
@pytest.mark.parametrize("dtype", [UINT8, INT8])
def test_behind_a_dequantize_linear_it_is_a_table(op, dtype):
    zero = 100 if dtype == UINT8 else -28
    net = Net()
    x = net.qdq(net.input([256]), 0.05, zero, dtype)
    y = net.op("LeakyRelu", x, alpha=0.3) if op == "LeakyRelu" else net.op("PRelu", x, net.const(np.float32([0.3])))
    net.output(net.qdq(y, 0.041, zero, dtype), [256])
    result = compare(net.model(), {"x": grid(0.05, zero, dtype)}, tolerance=0.0)
    assert [row["form"] for row in result.certificate["requantizations"]][-1] == "table"


def test_a_sum_of_two_tensors_with_a_slope():
    net = Net()
    a = net.qdq(net.input([2, 64]), 0.031, 119)
    b = net.qdq(net.input([2, 64], "z"), 0.017, 30)
    net.output(net.qdq(net.op("LeakyRelu", net.op("Add", a, b), alpha=0.1), 0.04, 60), [2, 64])
    compare(net.model(), {"x": noise((2, 64)), "z": noise((2, 64), seed=1)})


@pytest.mark.parametrize("slope", [0.0, -0.5])
def test_a_slope_that_is_not_positive_is_done_in_fixed_point(slope):
    net, y = layer()
    net.output(net.qdq(net.op("LeakyRelu", y, alpha=slope), 0.031, 119), [2, 6, 7, 6])
    compare(net.model(), {"x": noise((2, 3, 9, 8))})


def rotary(net, x, cos, sin, *, pairs=False):
    """x * cos + rotate_half(x) * sin over an axis of 8."""
    bounds = {"0": 0, "1": 1, "2": 2, "4": 4, "8": 8, "-1": -1}
    n = {key: net.const(np.array([value])) for key, value in bounds.items()}
    if pairs:
        a, b = (net.op("Slice", x, n[start], n["8"], n["-1"], n["2"]) for start in ("0", "1"))
        parts = [net.op("Unsqueeze", part, n["-1"]) for part in (net.op("Neg", b), a)]
        turned = net.op("Reshape", net.op("Concat", *parts, axis=-1), net.const(np.array([2, 5, 8])))
    else:
        a, b = net.op("Slice", x, n["0"], n["4"], n["-1"]), net.op("Slice", x, n["4"], n["8"], n["-1"])
        turned = net.op("Concat", net.op("Neg", b), a, axis=-1)
    return net.op("Add", net.op("Mul", x, cos), net.op("Mul", turned, sin))


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("zero", [119, 0, 255])
def test_rotary_embedding_is_a_sum_of_two_products(zero, stored, pairs):
    net = Net()
    x = net.qdq(net.input([2, 5, 8]), 0.031, zero)
    angles = np.linspace(0, 6, 40, dtype=np.float32).reshape(5, 8)
    feeds = {"x": noise((2, 5, 8)), "cos": np.cos(angles), "sin": np.sin(angles)}
    if stored:
        cos, sin = (net.qdq(net.const(feeds.pop(name)), 1 / 127, 0, INT8) for name in ("cos", "sin"))
    else:
        cos, sin = (net.qdq(net.input([5, 8], name), 2 / 255, 128) for name in ("cos", "sin"))
    net.output(net.qdq(rotary(net, x, cos, sin, pairs=pairs), 0.043, 121), [2, 5, 8])
    compare(net.model(), feeds)


def test_a_concat_of_two_scales_times_a_tensor():
    net = Net()
    a, b = (net.qdq(net.input([2, 8], name), scale, 119) for name, scale in (("x", 0.03), ("z", 0.04)))
    c = net.qdq(net.input([2, 16], "w"), 0.02, 3)
    net.output(net.qdq(net.op("Mul", net.op("Concat", a, b, axis=1), c), 0.05, 100), [2, 16])
    compare(net.model(), {"x": noise((2, 8)), "z": noise((2, 8), seed=1), "w": noise((2, 16), seed=2)}, 0.01)


@pytest.mark.parametrize("constant_first", [False, True])
def test_a_constant_on_either_side_of_a_difference(constant_first):
    net = Net()
    both = net.op("Add", net.qdq(net.input([8, 16]), 0.03, 120), net.qdq(net.input([8, 16], "z"), 0.05, 100))
    operands = both, net.const(np.float32(1.7))
    y = net.op("Sub", *(operands[::-1] if constant_first else operands))
    net.output(net.qdq(y, 0.09, 128), [8, 16])
    compare(net.model(), {"x": noise((8, 16), 1.5), "z": noise((8, 16), 2.5, seed=1)})


def test_a_gelu_by_tanh_is_one_table():
    net = Net()
    x = net.qdq(net.input([256]), 0.04, 110)
    cubed = net.op("Mul", net.op("Pow", x, net.const(np.float32(3))), net.const(np.float32(0.044715)))
    bent = net.op("Tanh", net.op("Mul", net.op("Add", x, cubed), net.const(np.float32(0.7978846))))
    rise = net.op("Add", bent, net.const(np.float32(1)))
    y = net.op("Mul", net.op("Mul", x, net.const(np.float32(0.5))), rise)
    net.output(net.qdq(y, 0.03, 8), [256])
    result = compare(net.model(), {"x": grid(0.04, 110)}, tolerance=0.01)
    assert [row["form"] for row in result.certificate["requantizations"]] == ["table"]


def test_a_power_that_is_not_a_number_is_refused():
    net = Net()
    y = net.op("Pow", net.qdq(net.input([8]), 0.04, 110), net.const(np.float32(-0.5)))
    net.output(net.qdq(y, 0.03, 8), [8])
    with pytest.raises(IntegerError, match="not a number for some value"):
        convert(net.model())
