"""Norms on integers, as one op and written out, at their extremes, against exact arithmetic."""

import numpy as np
import pytest
from exact_integer import require_exact
from grid_values import on_grid
from integer_comparison import ENCODINGS, compare, noise
from integer_models import INT8, UINT8, Net, run
from integer_norms import extremes, normed
from onnx import TensorProto, shape_inference

from onnx_backend.integer.convert import convert
from onnx_backend.integer.decompose.prepare import prepare
from onnx_backend.integer.ir.operations import Requantization
from onnx_backend.integer.reference.run import run_reference
from qsdk import IntegerError

EPSILONS = [1e-12, 1e-5, 0.1]


GAINS = ["none", "float", "quantized", "bias"]


@pytest.mark.spread(12)
@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize("scale", [0.004, 0.05, 1.3])
def test_layer_normalization_at_its_extremes(scale, gain, epsilon):
    zero, length = 117, 48
    codes = extremes(zero, length)
    net, rng = Net(), np.random.default_rng(3)
    x = net.qdq(net.input([len(codes), length]), scale, zero)
    inputs, weight, bias = [], np.ones(length), np.zeros(length)
    if gain == "quantized":
        name, w_scale = net.weight((length,), None, low=0.01, high=0.011)
        inputs = [name]
        weight = net_weight(net, name) * np.float64(w_scale)
    else:
        weight = np.ones(length) if gain == "none" else rng.uniform(-1.5, 1.5, length).astype(np.float32)
        inputs = [net.const(weight.astype(np.float32))]
    if gain == "bias":
        bias = rng.uniform(-1, 1, length).astype(np.float32)
        inputs.append(net.const(bias))
    y = net.op("LayerNormalization", x, *inputs, axis=-1, epsilon=epsilon)
    net.output(net.qdq(y, 0.031, 121), [len(codes), length])
    feeds = {"x": ((codes - zero) * np.float32(scale)).astype(np.float32)}
    exact = lambda f: normed(on_grid(f["x"], scale, zero), -1, np.float32(epsilon)) * weight + bias  # noqa: E731
    bound, _ = require_exact(net.model(), feeds, exact, tolerance=0.005)
    assert bound < 1e-3


def net_weight(net, name):
    """The integers that a DequantizeLinear reads."""
    node = next(n for n in net.nodes if name in n.output)
    from_int = next(t for t in net.initializers if t.name == node.input[0])
    return np.frombuffer(from_int.raw_data, np.int8).astype(np.float64)


@pytest.mark.spread(12)
@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("scale", [0.004, 0.05, 1.3])
@pytest.mark.parametrize(("length", "step"), [(2, 0.008), (48, 0.031), (1000, 0.11)])
def test_a_norm_of_codes_in_32_bits_is_as_near_as_its_row_says(length, step, scale, epsilon):
    zero, codes = 117, extremes(117, length)
    net, rng = Net(), np.random.default_rng(5)
    x = net.qdq(net.input([len(codes), length]), scale, zero)
    gain = rng.uniform(-2, 2, length).astype(np.float32)
    bias = rng.uniform(-1, 1, length).astype(np.float32)
    gain[0] = 0.0
    y = net.op("LayerNormalization", x, net.const(gain), net.const(bias), axis=-1, epsilon=epsilon)
    net.output(net.qdq(y, step, 100), [len(codes), length])
    result = convert(net.model(), target="onnxruntime")
    (row,) = result.certificate["requantizations"]
    assert row["form"] == "norm of rows"
    assert 0 < row["error_bound"] <= 1 / 16
    known = [value.type.tensor_type for value in shape_inference.infer_shapes(result.model).graph.value_info]
    whole = {facts.elem_type for facts in known if facts.shape.dim and facts.shape.dim[-1].dim_value == length}
    assert whole == {TensorProto.UINT8, TensorProto.UINT32}
    reals = (codes - zero) * np.float64(np.float32(scale))
    exact = normed(reals, -1, np.float32(epsilon)) * gain.astype(np.float64) + bias
    exact = exact / np.float64(np.float32(step)) + 100
    found = run(result.model, {"x": reals.astype(np.float32)})["y"] / np.float64(np.float32(step)) + 100
    assert np.abs(found - exact.clip(0, 255)).max() <= 0.5 + row["error_bound"] + 1e-4


@pytest.mark.parametrize("zero", [0, 117, 255])
@pytest.mark.parametrize(("length", "step", "scale"), [(2, 0.008, 0.05), (48, 0.031, 0.004), (1000, 0.11, 1.3)])
def test_a_root_mean_square_of_codes_in_32_bits_is_as_near_as_its_row_says(length, step, scale, zero):
    codes = extremes(zero, length)
    net, rng = Net(), np.random.default_rng(5)
    x = net.qdq(net.input([len(codes), length]), scale, zero)
    gain, epsilon = rng.uniform(-2, 2, length).astype(np.float32), np.float32(1e-5)
    mean = net.op("ReduceMean", net.op("Pow", x, net.const(np.float32(2))), net.const(np.array([-1], np.int64)))
    root = net.op("Sqrt", net.op("Add", mean, net.const(epsilon)))
    y = net.op("Mul", net.const(gain), net.op("Mul", x, net.op("Reciprocal", root)))
    net.output(net.qdq(y, step, 100), [len(codes), length])
    model = prepare(net.model())
    result = convert(model, target="onnxruntime")
    (row,) = result.certificate["requantizations"]
    assert row["form"] == "norm of rows"
    assert 0 < row["error_bound"] <= 1 / 16
    reals = (codes - zero) * np.float64(np.float32(scale))
    size = np.sqrt(np.mean(reals**2, -1, keepdims=True) + np.float64(epsilon))
    exact = reals / size * gain.astype(np.float64) / np.float64(np.float32(step)) + 100
    found = run(result.model, {"x": reals.astype(np.float32)})["y"] / np.float64(np.float32(step)) + 100
    assert np.abs(found - exact.clip(0, 255)).max() <= 0.5 + row["error_bound"] + 1e-4
    compare(model, {"x": reals.astype(np.float32)}, tolerance=0.01)  # and in fixed point, by the standard


@pytest.mark.parametrize("length", [40, 384, 768, 4096])
def test_norms_of_any_length_take_the_numbers_of_their_rows_as_fine_as_they_need(length):
    codes = extremes(117, length)
    net = Net()
    x = net.qdq(net.input([len(codes), length]), 0.05, 117)
    net.output(net.qdq(net.op("LayerNormalization", x, net.const(np.ones(length, np.float32))), 0.04, 128), codes.shape)
    result = convert(net.model(), target="onnxruntime")
    (row,) = result.certificate["requantizations"]
    assert row["form"] == "norm of rows"
    exact = normed((codes - 117) * np.float64(np.float32(0.05)), -1, np.float32(1e-5)) / np.float64(np.float32(0.04))
    found = run(result.model, {"x": ((codes - 117) * np.float32(0.05)).astype(np.float32)})["y"]
    off = np.abs(found / np.float64(np.float32(0.04)) - exact.clip(-128, 127))
    assert off.max() <= 0.5 + row["error_bound"] + 1e-4


def test_a_norm_that_32_bits_are_too_few_for_keeps_64():
    """One gain is so large that a common shift leaves the others too few bits."""
    net, gain = Net(), np.ones(16, np.float32)
    gain[3] = 3e3
    x = net.qdq(net.input([4, 16]), 0.03, 100)
    net.output(net.qdq(net.op("LayerNormalization", x, net.const(gain), axis=-1), 0.02, 120), [4, 16])
    (row,) = convert(net.model(), target="onnxruntime").certificate["requantizations"]
    assert row["form"] != "norm of rows"
    assert row["error_bound"] < 1e-2


@pytest.mark.parametrize("axis", [1, 2, -1])
@pytest.mark.parametrize("encoding", ["uint8", "int8"])
def test_layer_normalization_over_several_axes(encoding, axis):
    shape, facts = (3, 5, 16), ENCODINGS[encoding]
    net = Net()
    x = net.qdq(net.input(list(shape)), **facts)
    weight = np.random.default_rng(0).normal(0, 1, shape[axis:]).astype(np.float32)
    net.output(net.qdq(net.op("LayerNormalization", x, net.const(weight), axis=axis), 0.04, 120), list(shape))
    axes = tuple(range(axis % 3, 3))
    exact = lambda f: normed(on_grid(f["x"], **_grid(facts)), axes, np.float32(1e-5)) * weight  # noqa: E731
    require_exact(net.model(), {"x": noise(shape, 1.3)}, exact)


def _grid(facts):
    return {key: facts[key] for key in ("scale", "zero", "dtype")}


@pytest.mark.parametrize("length", [2, 3, 768, 4096])
def test_layer_normalization_of_short_and_long_rows(length):
    net = Net()
    x = net.qdq(net.input([6, length]), 0.03, 100)
    weight = np.full(length, 0.9, np.float32)
    y = net.op("LayerNormalization", x, net.const(weight), net.const(np.linspace(-1, 1, length).astype(np.float32)))
    net.output(net.qdq(y, 0.03, 121), [6, length])
    bias = np.linspace(-1, 1, length).astype(np.float32)
    exact = lambda f: normed(on_grid(f["x"], 0.03, 100), -1, np.float32(1e-5)) * weight + bias  # noqa: E731
    feeds = {"x": noise((6, length), 1.0)}
    require_exact(net.model(), feeds, exact, tolerance=0.005)


@pytest.mark.parametrize("source", ["accumulator", "sum", "one scale"])
def test_layer_normalization_of_what_has_no_quantizer(source):
    net = Net()
    x = net.qdq(net.input([4, 24]), 0.031, 119)
    if source == "accumulator":
        w, _ = net.weight((24, 32), 1)
        y = net.op("MatMul", x, w)
        length = 32
    else:
        z = net.qdq(net.input([4, 24], "z"), 0.017 if source == "sum" else 0.031, 100)
        y, length = net.op("Add", x, z), 24
    weight = net.const(np.linspace(0.5, 1.5, length).astype(np.float32))
    net.output(net.qdq(net.op("LayerNormalization", y, weight), 0.031, 120), [4, length])
    feeds = {"x": noise((4, 24), 1.2)}
    if source != "accumulator":
        feeds["z"] = noise((4, 24), 1.0, seed=2)
    result = compare(net.model(), feeds, 0.01)
    # it holds for rows that are nearly constant, where one unit of the accumulator's grid is as large as epsilon
    assert result.certificate["requantizations"][-1]["error_bound"] < 2.0


SPELLINGS = ["op", "Div", "Reciprocal", "Pow -0.5", "Mul"]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("epsilon", [1e-6, 1e-5, 0.1])
def test_rms_normalization_in_every_spelling(spelling, epsilon):
    zero, length, scale = 117, 48, 0.05
    codes = extremes(zero, length)
    net = Net()
    x = net.qdq(net.input([len(codes), length]), scale, zero)
    weight = np.linspace(0.4, 1.6, length).astype(np.float32)
    axes = net.const(np.array([-1]))
    squares = net.op("Mul", x, x) if spelling == "Mul" else net.op("Pow", x, net.const(np.float32(2)))
    inside = net.op("Add", net.op("ReduceMean", squares, axes, keepdims=1), net.const(np.float32(epsilon)))
    if spelling == "Pow -0.5":
        y = net.op("Mul", x, net.op("Pow", inside, net.const(np.float32(-0.5))))
    elif spelling in ("Reciprocal", "Mul"):
        y = net.op("Mul", x, net.op("Reciprocal", net.op("Sqrt", inside)))
    else:
        y = net.op("Div", x, net.op("Sqrt", inside))
    if spelling == "op":
        y = net.op("RMSNormalization", x, net.const(weight), axis=-1, epsilon=epsilon)
    else:
        y = net.op("Mul", net.const(weight), y)
    net.output(net.qdq(y, 0.031, 121), [len(codes), length])
    feeds = {"x": ((codes - zero) * np.float32(scale)).astype(np.float32)}
    exact = lambda f: normed(on_grid(f["x"], scale, zero), -1, np.float32(epsilon), centred=False) * weight  # noqa: E731
    model = net.model(23 if spelling == "op" else 21)
    bound, _ = require_exact(model, feeds, exact, tolerance=0.005)
    assert bound < 1e-3


def test_layer_normalization_written_out():
    zero, length, scale = 117, 48, 0.05
    codes = extremes(zero, length)
    net = Net()
    x = net.qdq(net.input([len(codes), length]), scale, zero)
    axes = net.const(np.array([-1]))
    d = net.op("Sub", x, net.op("ReduceMean", x, axes))
    variance = net.op("ReduceMean", net.op("Mul", d, d), axes)
    y = net.op("Div", d, net.op("Sqrt", net.op("Add", variance, net.const(np.float32(1e-5)))))
    net.output(net.qdq(y, 0.031, 121), [len(codes), length])
    feeds = {"x": ((codes - zero) * np.float32(scale)).astype(np.float32)}
    bound, _ = require_exact(
        net.model(), feeds, lambda f: normed(on_grid(f["x"], scale, zero), -1, np.float32(1e-5)), tolerance=0.005
    )
    assert bound < 0.05


@pytest.mark.parametrize("dtype", [UINT8, INT8])
@pytest.mark.parametrize("form", ["InstanceNormalization", "GroupNormalization", "MeanVarianceNormalization"])
def test_norms_over_images(form, dtype):
    zero = 117 if dtype == UINT8 else -11
    net = Net()
    x = net.qdq(net.input([2, 6, 5, 7]), 0.05, zero, dtype)
    weight, bias = np.linspace(0.4, 1.6, 6).astype(np.float32), np.linspace(-1, 1, 6).astype(np.float32)
    parameters = [net.const(weight), net.const(bias)]
    axes, groups = (2, 3), 6
    if form == "MeanVarianceNormalization":
        y, axes = net.op(form, x, axes=[0, 2, 3]), (0, 2, 3)
    elif form == "GroupNormalization":
        y, groups = net.op(form, x, *parameters, num_groups=3), 3
    else:
        y = net.op(form, x, *parameters)
    net.output(net.qdq(y, 0.031, zero, dtype), [2, 6, 5, 7])

    def exact(feeds):
        values = on_grid(feeds["x"], 0.05, zero, dtype)
        if form == "MeanVarianceNormalization":
            return normed(values, axes, 0.0)
        apart = values.reshape(2, groups, -1)
        gain, shift = weight.reshape(6, 1, 1), bias.reshape(6, 1, 1)
        return normed(apart, -1, np.float32(1e-5)).reshape(values.shape) * gain + shift

    bound, _ = require_exact(net.model(), {"x": noise((2, 6, 5, 7), 1.4)}, exact, tolerance=0.005)
    assert bound < 1e-3


@pytest.mark.parametrize("p", [1, 2])
def test_lp_normalization(p):
    codes = extremes(117, 30)
    codes = codes[[not np.all(row == 117) for row in codes]]
    net = Net()
    x = net.qdq(net.input([len(codes), 30]), 0.05, 117)
    net.output(net.qdq(net.op("LpNormalization", x, p=p), 2 / 255, 127), [len(codes), 30])
    feeds = {"x": ((codes - 117) * np.float32(0.05)).astype(np.float32)}

    def exact(f):
        values = on_grid(f["x"], 0.05, 117)
        return values / (np.abs(values) ** p).sum(-1, keepdims=True) ** (1 / p)

    _, result = require_exact(net.model(), feeds, exact, tolerance=0.005)
    (term,) = next(op for op in result.operations if isinstance(op, Requantization)).value.terms
    reached = np.abs(run_reference(result.model, feeds, every_tensor=True)[term.name]).max()
    assert reached > 0.99 * max(np.abs(result.bounds[term.name]))  # no row is said to be larger than the largest is


@pytest.mark.parametrize("op", ["MeanVarianceNormalization", "LpNormalization", "LayerNormalization"])
def test_rows_of_which_nothing_is_left_are_zero(op):
    """Without an epsilon the standard divides 0 by 0 here, and an integer division would end the process."""
    net = Net()
    x = net.qdq(net.input([2, 4, 6]), 0.05, 117)
    attrs = {"axes": [2]} if op == "MeanVarianceNormalization" else {}
    weight = [net.const(np.ones(6, np.float32))] if op == "LayerNormalization" else []
    if weight:
        attrs["epsilon"] = 0.0
    net.output(net.qdq(net.op(op, x, *weight, **attrs), 0.031, 121), [2, 4, 6])
    feeds = {"x": noise((2, 4, 6), 1.0)}
    feeds["x"][0, 1] = feeds["x"][1, 3] = 0.0
    result = convert(net.model())
    found = run(result.model, feeds)["y"]
    np.testing.assert_array_equal(found, run_reference(result.model, feeds)["y"])
    assert np.all(found[0, 1] == 0)
    assert np.all(found[1, 3] == 0)
    assert np.ptp(found) > 1


def test_a_gain_that_is_an_activation():
    net = Net()
    x = net.qdq(net.input([4, 24]), 0.031, 119)
    gain = net.qdq(net.input([24], "g"), 0.01, 100)
    net.output(net.qdq(net.op("LayerNormalization", x, gain), 0.031, 120), [4, 24])
    compare(net.model(), {"x": noise((4, 24)), "g": noise((24,), 1.0, seed=1)})


def test_the_mean_as_an_output_is_refused():
    net = Net()
    x = net.qdq(net.input([4, 24]), 0.031, 119)
    y, mean = net.op("LayerNormalization", x, net.const(np.ones(24, np.float32)), outputs=2)
    net.output(net.qdq(y, 0.03, 120), [4, 24])
    net.output(net.qdq(mean, 0.03, 120), [4, 1], "m")
    with pytest.raises(IntegerError, match="its mean or deviation is used"):
        convert(net.model())


def test_rows_of_dynamic_length_are_refused():
    net = Net()
    x = net.qdq(net.input([4, "n"]), 0.031, 119)
    net.output(net.qdq(net.op("LpNormalization", x), 0.03, 120), [4, "n"])
    with pytest.raises(IntegerError, match="not static"):
        convert(net.model())
