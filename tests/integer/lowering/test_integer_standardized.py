"""Norms written op by op, with an epsilon far below a step of their input: a channel far above the others."""

import numpy as np
import pytest
from exact_integer import require_exact
from grid_values import on_grid
from integer_models import Net
from integer_norms import extremes, normed

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
