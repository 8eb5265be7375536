"""Arithmetic that no quantizer of its own stands behind, in models, against exact arithmetic."""

import re

import numpy as np
import pytest
from exact_integer import require_exact
from fixed_point_programs import ALL_FUNCTIONS, CASES
from integer_comparison import ENCODINGS, compare, noise
from integer_models import Net
from onnx import TensorProto

from onnx_backend.integer.convert import convert
from qsdk import IntegerError


def on_grid(x, scale=0.031, zero=119):
    scale = np.float32(scale)
    return (np.clip(np.rint(x / scale) + zero, 0, 255) - zero) * np.float64(scale)


def layer(net, size=0.004):
    """A MatMul with a bias, whose accumulator is not quantized, and what it computes exactly."""
    x = net.qdq(net.input([8, 32]), **ENCODINGS["uint8"])
    w, scale = net.weight((32, 24), 1, low=size / 2, high=size)
    stored = next(n for n in net.nodes if w in n.output).input[0]
    integers = np.frombuffer(next(t for t in net.initializers if t.name == stored).raw_data, np.int8).reshape(32, 24)
    bias = net.rng.normal(0, 1, 24).astype(np.float32)
    y = net.op("Add", net.op("MatMul", x, w), net.const(bias))
    weights = integers.astype(np.float64) * scale
    return y, lambda f: on_grid(f["x"]) @ weights + bias


FEEDS = {"x": noise((8, 32), 1.3)}


@pytest.mark.parametrize(
    ("name", "attrs"), [*CASES, ("Abs", {}), ("HardSigmoid", {}), ("HardSwish", {}), ("LeakyRelu", {"alpha": -0.4})]
)
def test_a_function_straight_behind_a_layer(name, attrs):
    net = Net()
    y, exact = layer(net)
    opset = {"Gelu": 21, "Mish": 21, "Swish": 24}.get(name, 21)
    y = net.op(name, y, **attrs)
    with np.errstate(all="ignore"):
        wanted = lambda f: ALL_FUNCTIONS[name](exact(f), attrs)  # noqa: E731
        low, high = float(wanted(FEEDS).min()), float(wanted(FEEDS).max())
    scale = max(high - low, 0.1) / 250
    net.output(net.qdq(y, scale, round(min(max(-low / scale, 0), 255))), [8, 24])
    bound, _ = require_exact(net.model(opset), FEEDS, wanted, tolerance=0.006)
    assert bound < 0.02


def test_silu_behind_a_layer():
    net = Net()
    y, exact = layer(net)
    net.output(net.qdq(net.op("Mul", y, net.op("Sigmoid", y)), 0.05, 6), [8, 24])
    bound, _ = require_exact(net.model(), FEEDS, lambda f: exact(f) / (1 + np.exp(-exact(f))), tolerance=0.006)
    assert bound < 0.02


BEHIND = {
    "Exp": (
        lambda y, net: net.op("Exp", net.op("Clip", y, net.const(np.float32(-9)), net.const(np.float32(2)))),
        lambda v: np.exp(v.clip(-9, 2)),
        0.03,
        0,
    ),
    "Sqrt": (lambda y, net: net.op("Sqrt", net.op("Relu", y)), lambda v: np.sqrt(v.clip(0)), 0.012, 0),
    "Log": (
        lambda y, net: net.op("Log", net.op("Add", net.op("Abs", y), net.const(np.float32(0.01)))),
        lambda v: np.log(np.abs(v) + np.float32(0.01)),
        0.03,
        160,
    ),
    "Reciprocal": (
        lambda y, net: net.op("Reciprocal", net.op("Add", net.op("Abs", y), net.const(np.float32(0.3)))),
        lambda v: 1 / (np.abs(v) + np.float32(0.3)),
        0.013,
        0,
    ),
    "Pow 2": (lambda y, net: net.op("Pow", y, net.const(np.float32(2))), lambda v: v**2, 0.2, 0),
    "Pow 3": (lambda y, net: net.op("Pow", y, net.const(np.float32(3))), lambda v: v**3, 0.9, 120),
    "Neg": (lambda y, net: net.op("Relu", net.op("Neg", y)), lambda v: (-v).clip(0), 0.03, 0),
    "twice": (
        lambda y, net: net.op("Tanh", net.op("Mul", net.op("Relu", y), net.op("Sigmoid", y))),
        lambda v: np.tanh(v.clip(0) / (1 + np.exp(-v))),
        0.004,
        0,
    ),
    "Sub": (
        lambda y, net: net.op("Sub", net.const(np.float32(1)), net.op("Tanh", y)),
        lambda v: 1 - np.tanh(v),
        0.008,
        0,
    ),
    "Concat": (
        lambda y, net: net.op(
            "Slice",
            net.op("Concat", net.op("Tanh", y), net.op("Sigmoid", y), axis=1),
            *(net.const(np.array([v])) for v in (12, 36, 1)),
        ),
        lambda v: np.concatenate([np.tanh(v), 1 / (1 + np.exp(-v))], 1)[:, 12:36],
        0.0081,
        125,
    ),
    "Mean": (
        lambda y, net: net.op(
            "Add", net.op("ReduceMean", net.op("Tanh", y), net.const(np.array([1]))), net.op("Sigmoid", y)
        ),
        lambda v: np.tanh(v).mean(1, keepdims=True) + 1 / (1 + np.exp(-v)),
        0.008,
        60,
    ),
    "Where": (
        lambda y, net: net.op(
            "Where",
            net.op("Greater", net.qdq(net.input([8, 24], "z"), 0.1, 128), net.const(np.float32(0))),
            net.op("Tanh", y),
            net.op("Neg", net.op("Sigmoid", y)),
        ),
        None,
        0.0081,
        125,
    ),
    "Max": (
        lambda y, net: net.op("Max", net.op("Tanh", y), net.op("Sigmoid", y)),
        lambda v: np.maximum(np.tanh(v), 1 / (1 + np.exp(-v))),
        0.004,
        0,
    ),
}


@pytest.mark.parametrize("case", BEHIND)
def test_arithmetic_behind_a_layer(case):
    write, function, scale, zero = BEHIND[case]
    net = Net()
    y, exact = layer(net)
    net.output(net.qdq(write(y, net), scale, zero), [8, 24])
    feeds = dict(FEEDS)
    if case == "Where":
        feeds["z"] = noise((8, 24), seed=9)
        positive = on_grid(feeds["z"], 0.1, 128) > 0
        function = lambda v: np.where(positive, np.tanh(v), -1 / (1 + np.exp(-v)))  # noqa: E731
    bound, _ = require_exact(net.model(), feeds, lambda f: function(exact(f)), tolerance=0.006)
    assert bound < 0.05


def two(net):
    return net.qdq(net.input([8, 32]), **ENCODINGS["uint8"]), net.qdq(net.input([8, 32], "z"), 0.02, 0)


PAIR = {"x": noise((8, 32), 1.3), "z": np.abs(noise((8, 32), 1.3, seed=4)) + np.float32(0.05)}


def pair(feeds):
    return on_grid(feeds["x"]), on_grid(feeds["z"], 0.02, 0)


def test_functions_of_two_tensors():
    net = Net()
    x, z = two(net)
    net.output(
        net.qdq(net.op("Add", net.op("Sigmoid", x), net.op("Mul", net.op("Tanh", z), net.op("Exp", x))), 0.1, 0),
        [8, 32],
    )
    exact = lambda f: 1 / (1 + np.exp(-pair(f)[0])) + np.tanh(pair(f)[1]) * np.exp(pair(f)[0])  # noqa: E731
    bound, _ = require_exact(net.model(), PAIR, exact, tolerance=0.006)
    assert bound < 0.01


@pytest.mark.parametrize("keep", ["clip", "add"])
def test_division_by_a_tensor(keep):
    net = Net()
    x, z = two(net)
    least = net.const(np.float32(0.04))
    divisor = net.op("Clip", z, least) if keep == "clip" else net.op("Add", z, least)
    net.output(net.qdq(net.op("Div", x, divisor), 0.11, 118), [8, 32])
    small = np.float32(0.04)
    exact = lambda f: pair(f)[0] / (np.maximum(pair(f)[1], small) if keep == "clip" else pair(f)[1] + small)  # noqa: E731
    bound, _ = require_exact(net.model(), PAIR, exact, tolerance=0.006, saturated=0.95)
    assert bound < 0.01


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("guard", [1e-9, 1e-5, 2e-3])
def test_the_mean_of_what_a_mask_keeps(guard, quantized):
    """A row of which nothing is kept is divided by the guard, which is far below a step of the sum of the mask."""
    rng, guard = np.random.default_rng(4), np.float32(guard)
    mask = (rng.random((64, 24, 1)) < rng.uniform(0, 1, (64, 1, 1))).astype(np.float32)
    mask[:4] = 0
    net = Net()
    x = net.qdq(net.input([64, 24, 8]), 0.03, 128)
    kept = net.qdq(net.input([64, 24, 1], "z"), 1 / 255, 0)
    axes = net.const(np.array([1]))
    total = net.op("ReduceSum", net.op("Mul", x, kept), axes)
    if quantized:
        total = net.qdq(total, 0.317, 110)
    count = net.op("Clip", net.op("ReduceSum", kept, axes), net.const(guard))
    net.output(net.qdq(net.op("Div", total, count), 0.0213, 120), [64, 1, 8])
    values = rng.normal(size=(64, 24, 8)).astype(np.float32)

    def exact(feeds):
        shares = on_grid(feeds["z"], 1 / 255, 0)
        total = (on_grid(feeds["x"], 0.03, 128) * shares).sum(1, keepdims=True)
        return (on_grid(total, 0.317, 110) if quantized else total) / np.maximum(shares.sum(1, keepdims=True), guard)

    bound, _ = require_exact(net.model(), {"x": values, "z": mask}, exact, tolerance=0.006, differing=0.002)
    assert bound < 0.01


def test_a_divisor_within_its_error_of_zero_is_refused_with_what_helps():
    net = Net()
    x, z = two(net)
    mean = net.op("ReduceMean", net.op("Exp", net.op("Neg", net.op("Exp", z))), net.const(np.array([1])))
    divisor = net.op("Clip", net.op("Sub", mean, net.const(np.float32(0.1))), net.const(np.float32(1e-12)))
    net.output(net.qdq(net.op("Div", x, divisor), 0.11, 118), [8, 32])
    refused(net, r"Div .*can be 0 within its error; clip the divisor further away .*in front of the Clip")


def test_division_by_zero_saturates_like_infinity():
    net = Net()
    x, z = two(net)
    net.output(net.qdq(net.op("Div", x, z), 0.11, 118), [8, 32])
    feeds = {"x": noise((8, 32), 1.3), "z": np.tile(np.float32([0, 0.5, 1, 2]), (8, 8))}
    feeds["x"][np.abs(feeds["x"]) < 0.1] = 0.5  # 0 / 0 is not a number
    compare(net.model(), feeds, 0.006)


def test_the_sum_of_a_row_divides_it():
    net = Net()
    _, z = two(net)
    net.inputs.pop(0)
    total = net.op("ReduceSum", net.op("Exp", z), net.const(np.array([1])))
    net.output(net.qdq(net.op("Div", net.op("Exp", z), total), 0.0007, 0), [8, 32])
    exact = lambda f: (e := np.exp(on_grid(f["z"], 0.02, 0))) / e.sum(1, keepdims=True)  # noqa: E731
    del net.nodes[0:2]
    bound, _ = require_exact(net.model(), {"z": PAIR["z"]}, exact, tolerance=0.006)
    assert bound < 0.01


def test_matrices_of_which_one_is_a_function():
    net = Net()
    x, z = two(net)
    w, _scale = net.weight((32, 16), 1, low=0.01, high=0.02)
    net.output(net.qdq(net.op("MatMul", net.op("Mul", net.op("Tanh", x), z), w), 0.5, 120), [8, 16])
    compare(net.model(), PAIR, 0.006)


def test_integers_that_become_numbers():
    for kind, dtype in ((TensorProto.INT64, np.int64), (TensorProto.INT32, np.int32), (TensorProto.BOOL, np.bool_)):
        net = Net()
        taken = net.op("Cast", net.input([6], dtype=kind), to=TensorProto.FLOAT)
        net.output(net.qdq(net.op("Mul", taken, net.const(np.float32(0.7))), 0.31, 3), [6])
        compare(net.model(), {"x": np.array([0, 1, 2, 3, 5, 90]).astype(dtype)}, 0.0)


def test_large_integers_saturate():
    net = Net()
    net.output(net.qdq(net.op("Cast", net.input([4], dtype=TensorProto.INT64), to=TensorProto.FLOAT), 0.31, 3), [4])
    compare(net.model(), {"x": np.array([-(1 << 62), 1 << 62, 3, 1 << 31])}, 0.0)


def refused(net, message):
    with pytest.raises(IntegerError, match=message):
        convert(net.model())


REFUSED = {
    "Div": ("Div", "can be 0", []),
    "Sqrt": ("Sqrt", "can be negative", []),
    "Log": ("Log", "can be negative or 0", []),
    "Reciprocal": ("Reciprocal", "can be 0", []),
    "Pow": ("Pow", "its exponent is 1.7", [1.7]),
    "Exp": ("Exp", "its input can reach", []),
}


@pytest.mark.parametrize("case", REFUSED)
def test_behind_a_layer_outside_its_domain_it_is_refused_with_a_remedy(case):
    op, message, more = REFUSED[case]
    net = Net()
    y, _ = layer(net, 0.02)
    operands = [y, y] if op == "Div" else [y, *(net.const(np.float32(v)) for v in more)]
    net.output(net.qdq(net.op(op, *operands), 0.1, 100), [8, 24])
    refused(net, f"{op} 'node_.*{message}.*; .+")


def test_a_float_input_is_refused():
    net = Net()
    x = net.input([4])
    net.output(net.qdq(net.op("Div", x, net.op("Sigmoid", net.qdq(x, 0.1, 3))), 0.1, 3), [4])
    refused(net, "its first input is a float tensor")


def log_mel(bound, kind="Clip", offset=0.0, steps=1e4):
    """The logarithm of sums of powers, kept above 0 by a number."""
    net = Net()
    x = net.qdq(net.input([8, 16]), steps, 0)
    filters = net.const(net.rng.integers(0, 128, (16, 6)).astype(np.int8))
    scales = net.const(net.rng.uniform(1e-3, 1e-2, 6).astype(np.float32))
    y = net.op("MatMul", x, net.op("DequantizeLinear", filters, scales, axis=1))
    y = net.op("Add", y, net.const(np.float32(offset))) if offset else y
    kept = net.const(np.float32(bound))
    y = net.op(kind, kept, y) if kind == "Max" else net.op(kind, y, kept)
    net.output(net.qdq(net.op("Log", y), 0.2, 120), [8, 6])
    drawn = np.abs(noise((8, 16))) * np.asarray([[1], [0]] * 4)
    return net.model(), {"x": (drawn * 60 * steps).astype(np.float32)}


@pytest.mark.parametrize("kind", ["Clip", "Max", "Add"])
@pytest.mark.parametrize("steps", [1e-2, 1e8])
@pytest.mark.parametrize("target", ["standard", "portable"])
def test_the_logarithm_of_what_a_tiny_number_keeps_above_zero(kind, steps, target):
    model, feeds = log_mel(1e-10, kind, steps=steps)
    compare(model, feeds, target=target)


@pytest.mark.parametrize("steps", [1e2, 1e5])
def test_a_bound_that_integers_do_not_resolve_is_refused_with_one_that_they_do(steps):
    model, _ = log_mel(1e-10, offset=-3.3, steps=steps)
    with pytest.raises(IntegerError, match=r"clip its input at .* or above, which its integers resolve") as caught:
        convert(model)
    bound = float(re.search(r"clip its input at (\S+) or above", str(caught.value))[1])
    compare(*log_mel(bound, offset=-3.3, steps=steps))
