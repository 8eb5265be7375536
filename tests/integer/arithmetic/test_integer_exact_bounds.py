"""The certificate's `error_bound` against exact rationals: it holds, and is no looser than it must be."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from every_runtime import every_runtime
from exact_formula import exact, formula, unrounded
from integer_models import GRID, INT4, INT8, LEVELS, UINT8, UINT16, Net, run
from onnx import TensorProto, numpy_helper

from onnx_backend.integer.convert import convert
from onnx_backend.integer.reference.run import run_reference
from qsdk import IntegerError

#: dtype, and a zero point within its grid.
KINDS = {"uint8": (UINT8, 117), "int8": (INT8, -9), "uint16": (UINT16, 31000), "int4": (INT4, 1)}


def require_bound(model, feeds, **options):
    """Assert that the last requantization is within its bound of the exact value; give the largest error and it."""
    result = convert(model, **options)
    tensors = run_reference(result.model, feeds, every_tensor=True)
    row = [r for r in result.certificate["requantizations"] if r["form"] == "fixed point"][-1]
    nodes = [node for node in model.graph.node if node.op_type == "QuantizeLinear"]
    stored = {t.name: t for t in model.graph.initializer}
    codes = {}
    for node in nodes:
        if node.input[0] in feeds:
            codes[node.output[0]] = _codes(stored, node, feeds[node.input[0]])
    value, scale = formula(model, codes)
    steps = value / scale
    zero, (lo, hi) = row["output_zero_point"], row["codes"]
    low, high = Fraction(lo - zero), Fraction(hi - zero)
    before = np.broadcast_to(unrounded(row, tensors), steps.shape)
    inside = (steps > low) & (steps < high)
    off = np.abs(np.clip(before, low, high) - np.clip(steps, low, high))
    bound = Fraction(row["error_bound"])
    assert off.max() <= bound, (float(off.max()), row["error_bound"])
    found = tensors[row["tensor"]].astype(object)
    wanted = np.clip(steps + zero, Fraction(lo), Fraction(hi))
    assert np.all(np.abs(exact(found).reshape(wanted.shape) - wanted) <= bound + Fraction(1, 2))
    assert inside.any(), "only saturated values were compared"
    return float(off.max()), row


def _codes(stored, node, array):
    from_ = [np.asarray(_array(stored[name])) for name in node.input[1:]]
    kind = stored[node.input[2]].data_type
    lo, hi = GRID[kind]
    codes = np.rint(array.astype(np.float32) / from_[0]).astype(np.int64) + int(from_[1])
    return np.clip(codes, lo, hi)


def _array(tensor):
    return numpy_helper.to_array(tensor)


def spread_inputs(rng, shape, scale, kind, zero):
    """Random values on a grid, both of its ends among them."""
    lo, hi = GRID[kind]
    codes = rng.integers(lo, hi + 1, shape)
    codes.reshape(-1)[:2] = lo, hi
    return ((codes - zero) * np.float32(scale)).astype(np.float32)


def layered(op, kind, seed):
    """One op between quantizers with random numbers; gives the model and its feeds."""
    rng, net = np.random.default_rng(seed), Net(seed)
    dtype, zero = KINDS[kind]
    levels = GRID[dtype][1] - GRID[dtype][0]
    scale, other = (float(v) for v in rng.uniform(3.0, 6.0, 2) / levels)
    images = op in ("Conv", "AveragePool", "GlobalAveragePool", "BatchNormalization")
    shape = (2, 3, 5, 5) if images else (3, 6)
    x = net.qdq(net.input(list(shape)), scale, zero, dtype)
    feeds = {"x": spread_inputs(rng, shape, scale, dtype, zero)}
    sizes, size = {"Conv": (2, 4, 5, 5), "AveragePool": (2, 3, 2, 2), "GlobalAveragePool": (2, 3, 1, 1)}, 4.0
    if op in ("Add", "Sub", "Mul", "Mean"):
        second = net.qdq(net.input(list(shape), "z"), other, zero, dtype)
        feeds["z"] = spread_inputs(rng, shape, other, dtype, zero)
        y, size = net.op(op, x, second), 8.0
    elif op == "Conv":
        w, scales = net.weight((4, 3, 3, 3), 0)
        y, size = net.op(op, x, w, net.bias(4, scale, scales), pads=[1] * 4), 12.0
    elif op == "Gemm":
        w, scales = net.weight((5, 6), 0)
        y = net.op(op, x, w, net.bias(5, scale, scales), transB=1)
        sizes, size = {op: (3, 5)}, 12.0
    elif op == "MatMul":
        y = net.op(op, x, net.weight((6, 5), 1)[0])
        sizes, size = {op: (3, 5)}, 12.0
    elif op == "constant":
        y = net.op(
            "Add", net.op("Div", x, net.const(np.float32(1.7))), net.const(rng.normal(0, 2, 6).astype(np.float32))
        )
        size = 8.0
    elif op == "AveragePool":
        y = net.op(op, x, kernel_shape=[3, 3], strides=[2, 2])
    elif op == "LayerNormalization":
        gain, bias = (net.const(rng.uniform(0.5, 2, 6).astype(np.float32)) for _ in range(2))
        y, size = net.op(op, x, gain, bias, axis=-1, epsilon=2.0**-17), 8.0
    elif op == "BatchNormalization":
        numbers = [net.const(rng.uniform(0.5, 2, 3).astype(np.float32)) for _ in range(4)]
        y, size = net.op(op, x, *numbers, epsilon=2.0**-17), 12.0
    elif op == "Softmax":
        y, size = net.op(op, x, axis=-1), 2.0
    else:
        y = net.op(op, x)
    net.output(net.qdq(y, size / levels, zero, dtype), list(sizes.get(op, shape)))
    return net.model(), feeds


OPS = ("Add", "Sub", "Mul", "Mean", "constant", "Conv", "Gemm", "MatMul", "AveragePool", "GlobalAveragePool")
NORMS = ("BatchNormalization", "Softmax", "LayerNormalization")


@pytest.mark.parametrize(("op", "kind"), list(itertools.product(OPS + NORMS, KINDS)))
def test_every_bound_holds_in_exact_arithmetic(op, kind):
    for seed in range(2):
        require_bound(*layered(op, kind, seed))


@pytest.mark.parametrize("rounding", ["half_up", "half_away", "gemmlowp"])
def test_the_bound_holds_with_every_rounding(rounding):
    for seed in range(3):
        require_bound(*layered("Gemm", "int8", seed), rounding=rounding)


@pytest.mark.parametrize("size", [1, 100, 4000])
def test_the_rounding_of_the_scale_of_a_bias_is_counted(size):
    net = Net(3)
    x = net.qdq(net.input([2, 4]), 0.0313, 117)
    w = net.op("DequantizeLinear", net.const(np.full((4, 1), 3, np.int8)), net.const(np.float32(7e-5)))
    scale = np.float32(0.0313) * np.float32(7e-5)
    integers = net.const(np.asarray([size / scale]).astype(np.int32))
    b = net.op("DequantizeLinear", integers, net.const(np.asarray([scale])), axis=0)
    net.output(net.qdq(net.op("Gemm", x, w, b), size / 100.0, 117), [2, 1])
    worst, row = require_bound(net.model(), {"x": np.zeros((2, 4), np.float32)})
    assert worst > row["error_bound"] / 4


@pytest.mark.parametrize("other", [1.0, 2.0, 0.5])
def test_a_bias_that_was_stored_with_a_scale_of_its_own_keeps_its_values(other):
    net = Net(5)
    x = net.qdq(net.input([3, 4]), 1e-3, 117)
    weight, scale = net.weight((4, 2), low=1e-4, high=1e-3)
    stored = np.float32(np.float32(1e-3) * scale * np.float32(other))
    b = net.op("DequantizeLinear", net.const(np.array([70_000, -90_000], np.int32)), net.const(stored))
    net.output(net.qdq(net.op("Gemm", x, weight, b), 3e-4, 120), [3, 2])
    feeds = spread_inputs(np.random.default_rng(0), (3, 4), 1e-3, UINT8, 117)
    require_bound(net.model(), {"x": feeds})


def test_a_bound_is_attained_by_the_largest_accumulator():
    net = Net(0)
    x = net.qdq(net.input([2, 1]), 0.3, 0, INT8)
    w = net.op("DequantizeLinear", net.const(np.full((1, 1), 100, np.int8)), net.const(np.float32(0.0031)))
    net.output(net.qdq(net.op("MatMul", x, w), 0.1, 0, INT8), [2, 1])
    worst, row = require_bound(net.model(), {"x": np.asarray([[-128 * 0.3], [0.3]], np.float32)})
    assert row["error_bound"] >= worst
    value, before = Fraction(np.float32(0.3).item()) * Fraction(np.float32(0.0031).item()), row["mantissas"][0][0]
    misfit = abs(Fraction(before, 1 << row["shifts"][0]) - value / Fraction(np.float32(0.1).item())) * 12_800
    assert misfit <= Fraction(row["error_bound"]) <= misfit * Fraction(1001, 1000)


def test_the_rounding_of_a_constant_is_counted():
    net, count = Net(0), 64
    x = net.qdq(net.input([1, count]), 0.3, 0, INT8)
    constant = np.random.default_rng(1).uniform(-3, 3, count).astype(np.float32)
    net.output(net.qdq(net.op("Add", x, net.const(constant)), 0.3, 0, INT8), [1, count])
    worst, row = require_bound(net.model(), {"x": np.zeros((1, count), np.float32)})
    assert worst > 0.4 / 2 ** row["shifts"][0], "every constant is exact, so the test cannot see its rounding"


@pytest.mark.parametrize("steps", [1e-3, 1e5])
@pytest.mark.parametrize(("op", "number"), [("Clip", 1e-10), ("Add", 1e-10), ("Clip", 3e-4)])
def test_the_logarithm_of_a_power_that_a_tiny_number_keeps_above_zero(op, number, steps):
    net, rng = Net(), np.random.default_rng(0)
    x = net.qdq(net.input([4, 6]), steps, 0)
    filters = net.const(rng.integers(0, 128, (6, 5)).astype(np.int8))
    mel = net.op(
        "MatMul",
        x,
        net.op("DequantizeLinear", filters, net.const(rng.uniform(0.01, 0.1, 5).astype(np.float32)), axis=1),
    )
    net.output(net.qdq(net.op("Log", net.op(op, mel, net.const(np.float32(number)))), 0.25, 120), [4, 5])
    codes = rng.integers(0, 256, (4, 6)) * np.asarray([[0], [1], [1], [0]])
    codes[1, 1:] = 0
    off, row = require_bound(net.model(), {"x": (codes * np.float32(steps)).astype(np.float32)})
    assert row["error_bound"] < 1e-5
    assert off < 1e-5


def summed(op, length, behind, **attrs):
    """CumSum, or sums over edges, of codes or of accumulators."""
    net, rng = Net(), np.random.default_rng(0)
    shape = [length, 4]
    x = net.qdq(net.input(shape), 0.031, 117)
    y = net.op("MatMul", x, net.weight((4, 4), 1)[0]) if behind else x
    places = rng.integers(0, 3, shape if op == "ScatterElements" else [length, 1])
    if op == "CumSum":
        y = net.op(op, y, net.const(np.array(attrs.pop("axis", 0))), **attrs)
    else:
        start = np.zeros((3, 4), np.float32)
        start = net.qdq(net.input([3, 4], "z"), 0.17, 90) if attrs.get("start") else net.const(start)
        y = net.op(op, start, net.const(places), y, reduction="add")
    net.output(net.qdq(y, 0.9, 120), shape if op == "CumSum" else [3, 4])
    feeds = {"x": spread_inputs(rng, shape, 0.031, UINT8, 117)}
    return net.model(), feeds | ({"z": spread_inputs(rng, (3, 4), 0.17, UINT8, 90)} if attrs.get("start") else {})


SUMS = [
    ("CumSum", {}),
    ("CumSum", {"axis": -1, "reverse": 1}),
    ("CumSum", {"exclusive": 1}),
    ("ScatterND", {}),
    ("ScatterND", {"start": 1}),
    ("ScatterElements", {"start": 1}),
]


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("length", [7, 60])
@pytest.mark.parametrize(("op", "attrs"), SUMS)
def test_running_sums_and_sums_over_edges_are_within_their_bound(op, attrs, length, behind):
    _, row = require_bound(*summed(op, length, behind, **attrs))
    assert row["error_bound"] < 1e-3


@pytest.mark.slow
def test_a_running_sum_that_int32_does_not_hold_is_rounded_within_its_bound():
    net, rng = Net(), np.random.default_rng(0)
    weight = net.op("DequantizeLinear", net.const(np.full((64, 1), 127, np.int8)), net.const(np.float32(0.005)))
    y = net.op("MatMul", net.qdq(net.input([1030, 64]), 0.031, 117), weight)
    net.output(net.qdq(net.op("CumSum", y, net.const(np.array(0))), 9.0, 120), [1030, 1])
    _, row = require_bound(net.model(), {"x": spread_inputs(rng, (1030, 64), 0.031, UINT8, 117)})
    assert 0.01 < row["error_bound"] < 0.1


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize(("op", "attrs"), SUMS)
def test_running_sums_and_sums_over_edges_are_the_same_on_every_runtime(op, attrs, behind):
    model, feeds = summed(op, 40, behind, **attrs)
    results = [convert(model, target=target).model for target in ("standard", "portable")]
    wanted = run_reference(results[0], feeds)["y"]
    for name, found in every_runtime(results[1], feeds).items():
        np.testing.assert_array_equal(found[0], wanted, err_msg=name)
    for level in LEVELS:
        np.testing.assert_array_equal(run(results[0], feeds, level)["y"], wanted)


@pytest.mark.parametrize("op", ["CumSum", "ScatterND"])
def test_sums_of_an_unknown_number_are_refused_with_the_remedy(op):
    net = Net()
    x = net.qdq(net.input(["n", 4]), 0.031, 117)
    if op == "CumSum":
        y = net.op(op, x, net.const(np.array(0)))
    else:
        places = net.input(["n", 1], "places", TensorProto.INT64)
        y = net.op(op, net.const(np.zeros((3, 4), np.float32)), places, x, reduction="add")
    net.output(net.qdq(y, 0.2, 120), [None, 4])
    with pytest.raises(IntegerError, match="are not static; export with fixed sizes, or give them: shapes="):
        convert(net.model())
