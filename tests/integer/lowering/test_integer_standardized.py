"""Norms and softmaxes written op by op: a channel far above the others, scores that are far apart."""

import numpy as np
import pytest
from exact_integer import require_exact
from grid_values import on_grid
from integer_comparison import compare, refused
from integer_models import Net
from integer_norms import extremes, normed
from onnx import TensorProto, numpy_helper

import qsdk
from onnx_backend.integer.decompose.prepare import prepare

SPELLINGS = ["Div", "Reciprocal", "Pow -0.5", "mean of squares", "sums"]
TINY = np.float32(1e-12)


def mean(net, x, axes, spelling, count):
    if spelling != "sums":
        return net.op("ReduceMean", x, net.const(np.array(axes)))
    return net.op("Div", net.op("ReduceSum", x, net.const(np.array(axes))), net.const(np.float32(count)))


def written(net, x, axes, spelling, count):
    """`(x - mean) / sqrt(variance + 1e-12)`, as exporters write it."""
    middle = mean(net, x, axes, spelling, count)
    distance = net.op("Sub", x, middle)
    two = net.const(np.float32(2))
    if spelling == "mean of squares":
        squares = mean(net, net.op("Mul", x, x), axes, spelling, count)
        variance = net.op("Sub", squares, net.op("Pow", middle, two))
    else:
        variance = mean(net, net.op("Pow", distance, two), axes, spelling, count)
    inside = net.op("Add", variance, net.const(TINY))
    if spelling == "Pow -0.5":
        return net.op("Mul", distance, net.op("Pow", inside, net.const(np.float32(-0.5))))
    root = net.op("Sqrt", inside)
    return (
        net.op("Mul", distance, net.op("Reciprocal", root))
        if spelling == "Reciprocal"
        else net.op("Div", distance, root)
    )


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_norm_op_by_op_holds_for_rows_without_variance(spelling):
    codes, scale, zero = extremes(117, 48), 3.1, 117
    net = Net()
    x = net.qdq(net.input([len(codes), 48]), scale, zero)
    net.output(net.qdq(written(net, x, [-1], spelling, 48), 0.031, 121), [len(codes), 48])
    model = prepare(net.model())
    assert {"LayerNormalization", "Sqrt"} & {node.op_type for node in model.graph.node} == {"LayerNormalization"}
    feeds = {"x": ((codes - zero) * np.float32(scale)).astype(np.float32)}
    exact = lambda f: normed(on_grid(f["x"], scale, zero), -1, TINY)  # noqa: E731
    bound, _ = require_exact(model, feeds, exact, tolerance=0.005)
    assert bound < 1e-3


@pytest.mark.parametrize(("axes", "norm"), [([1], (1,)), ([2, 3], (2, 3)), ([-1, 1], (1, 3))])
def test_a_norm_op_by_op_runs_over_any_axes(axes, norm):
    net, gain = Net(), np.linspace(0.5, 1.5, 5, dtype=np.float32).reshape(5, 1, 1)
    x = net.qdq(net.input(["n", 5, 6, 7]), 3.1, 117)
    y = net.op("Mul", written(net, x, axes, "Div", 0), net.const(gain))
    net.output(net.qdq(y, 0.031, 121), ["n", 5, 6, 7])
    feeds = {"x": np.random.default_rng(0).normal(0, 90, (2, 5, 6, 7)).astype(np.float32)}
    exact = lambda f: normed(on_grid(f["x"], 3.1, 117), norm, TINY) * gain  # noqa: E731
    bound, _ = require_exact(prepare(net.model()), feeds, exact, tolerance=0.005)
    assert bound < 1e-3


def test_a_norm_with_an_outlier_channel_becomes_integers(tmp_path):
    """One channel far above the others, as in the residual sums of a transformer."""
    rng, net = np.random.default_rng(0), Net()
    x = net.qdq(net.input(["n", 6, 16]), 3.136, 135)
    y = net.op("Add", written(net, x, [-1], "Div", 16), net.const(rng.normal(0, 1, 16).astype(np.float32)))
    net.output(net.qdq(y, 0.03, 120), ["n", 6, 16])
    batch = rng.normal(0, 1, (2, 6, 16)).astype(np.float32)
    batch[..., 0] *= 200
    summary = qsdk.to_integer(net.model(), tmp_path / "int.onnx", data=[{"x": batch}]).summary
    assert (summary["float_tensors"], summary["operations_max_lsb"]) == (0, 0)


def test_what_may_stay_float_is_not_taken_for_a_norm():
    net = Net()
    x = net.qdq(net.input([4, 16]), 0.05, 117)
    net.output(net.qdq(written(net, x, [-1], "Div", 16), 0.03, 120), [4, 16])
    model = net.model()
    kept = {node.op_type for node in prepare(model, ["Sqrt"]).graph.node}
    assert kept == {node.op_type for node in model.graph.node}


# --- softmaxes -------------------------------------------------------------------------------------------------------


def by_hand(kind, scale, pairs=()):
    """A softmax op by op over rows of 10 scores, with pairs behind some of its ops."""
    net = Net()
    x, axes = net.qdq(net.input([6, 10]), scale, 128), net.const(np.array([1]))

    def pair(name, tensor, *grid):
        return net.qdq(tensor, *grid) if name in pairs else tensor

    def restored(tensor):
        return net.op("Unsqueeze", tensor, axes) if kind == "dropped" else tensor

    most = restored(net.op("ReduceMax", x, axes, keepdims=int(kind != "dropped")))
    most = net.op("Max", most, net.const(np.float32(-np.inf))) if kind == "minus infinity" else most
    most = pair("max", most, scale, 128)
    below = net.op("Add", x, net.op("Neg", most)) if kind == "negated" else net.op("Sub", x, most)
    below = x if kind == "plain" else pair("sub", below, scale, 255)
    powers = pair("exp", net.op("Exp", below), 1 / 255, 0)
    total = restored(net.op("ReduceSum", powers, axes, keepdims=int(kind not in ("dropped", "reshaped"))))
    total = net.op("Reshape", total, net.const(np.array([-1, 1]))) if kind == "reshaped" else total
    numbers = {"added": ("Add", 1e-9), "much added": ("Add", 1e-3), "clipped": ("Clip", 1e-9), "larger": ("Max", 1e-9)}
    if kind in numbers:
        total = net.op(numbers[kind][0], total, net.const(np.float32(numbers[kind][1])))
    if kind == "logarithm":
        net.output(net.qdq(net.op("Sub", below, net.op("Log", total)), scale * 1.1, 255), [6, 10])
        return net.model()
    total = pair("sum", total, 10 / 255, 0)
    if kind == "reciprocal":
        y = net.op("Mul", powers, net.op("Reciprocal", total))
    elif kind == "one over":
        y = net.op("Mul", powers, net.op("Div", net.const(np.float32(1)), total))
    else:
        y = net.op("Div", powers, total)
    net.output(net.qdq(y, 1 / 255, 0), [6, 10])
    return net.model()


ONE_OP = ["plain", "kept", "dropped", "reshaped", "minus infinity", "negated", "added", "clipped", "larger"]
SPREADS = [pytest.param(0.02), pytest.param(0.6, marks=pytest.mark.slow), pytest.param(3.0)]


def scores(scale):
    return {"x": (np.random.default_rng(0).normal(size=(6, 10)) * scale * 40).astype(np.float32)}


@pytest.mark.parametrize("scale", SPREADS)
@pytest.mark.parametrize("kind", [*ONE_OP, "reciprocal", "one over", "logarithm"])
def test_a_softmax_by_hand_is_one(kind, scale):
    model = prepare(by_hand(kind, scale))
    wanted = "LogSoftmax" if kind == "logarithm" else "Softmax"
    assert [node.op_type for node in model.graph.node if node.op_type in ("Exp", wanted)] == [wanted]
    compare(model, scores(scale), tolerance=0.05)


def test_what_an_epsilon_moves_is_in_the_bound():
    model, epsilon = by_hand("added", 0.6), 1e-6
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and numpy_helper.to_array(tensor).item() == np.float32(1e-9):
            tensor.CopyFrom(numpy_helper.from_array(np.float32(epsilon), tensor.name))

    def exact(feeds):
        x = on_grid(feeds["x"], 0.6, 128)
        powers = np.exp(x - x.max(1, keepdims=True))
        return powers / (powers.sum(1, keepdims=True) + epsilon)

    bound, _ = require_exact(prepare(model), scores(0.6), exact, tolerance=0.05)
    assert epsilon * 255 < bound < 2 * epsilon * 255


INSIDE = [("sub",), ("max", "sub"), ("exp",), ("max", "sub", "exp"), ("max", "sub", "exp", "sum")]


@pytest.mark.parametrize("scale", SPREADS)
@pytest.mark.parametrize("pairs", INSIDE)
@pytest.mark.parametrize("kind", ["kept", "added", "much added", "reciprocal", "reshaped", "logarithm"])
def test_a_softmax_with_pairs_inside_divides_by_what_is_never_0(kind, pairs, scale):
    compare(prepare(by_hand(kind, scale, pairs)), scores(scale), tolerance=0.2)


def test_a_sum_that_a_mask_can_empty_is_still_refused():
    net = Net()
    x, axes = net.qdq(net.input([6, 10]), 0.6, 128), net.const(np.array([1]))
    below = net.op("Sub", x, net.op("ReduceMax", x, axes))
    powers = net.op("Mul", net.op("Exp", below), net.const((np.arange(10) > 8).astype(np.float32)))
    net.output(net.qdq(net.op("Div", powers, net.op("ReduceSum", powers, axes)), 1 / 255, 0), [6, 10])
    refused(prepare(net.model()), "it divides by a tensor that can be 0")
