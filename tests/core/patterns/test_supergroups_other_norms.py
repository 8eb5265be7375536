"""Norms in the ways of other frameworks: TensorFlow, Gemma, and GroupNorm by reshapes."""

import numpy as np
import pytest
from norm_models import Norm, build, error_of, quantized_tensors
from norm_spellings import ALL, assert_whole, found
from onnx import helper
from other_norm_models import group_norm, tensorflow_norm
from qdq_models import make_model, run

# TensorFlow's and Gemma's ways


def test_tensorflows_layer_norm():
    model = tensorflow_norm()
    assert_whole(model, "LayerNorm")
    assert quantized_tensors(model) == ALL
    assert error_of(model, Norm()) < 1e-5


def test_gemmas_rms_norm_adds_1_to_gamma():
    model = build(Norm("rms", beta=None, gamma="left"))
    last = model.graph.node[-1]
    last.input[0] = "one_more"
    model.graph.node.insert(0, helper.make_node("Add", ["gamma", "one"], ["one_more"], "plus"))
    model.graph.initializer.append(helper.make_tensor("one", 1, [], [1.0]))
    assert_whole(model, "RMSNorm")
    assert quantized_tensors(model) == ALL


def test_a_sum_that_is_divided_by_another_number_is_no_mean():
    model = build(Norm("rms", variance="sum", beta=None))
    divisor = next(t for t in model.graph.initializer if t.float_data == [8.0] or t.raw_data == np.float32(8).tobytes())
    divisor.CopyFrom(helper.make_tensor(divisor.name, 1, [], [7.0]))
    (miss,) = found(model).near_misses
    assert str(miss) == "RMSNorm-like, not fused: its sum is not divided by the number of elements"


# GroupNorm


@pytest.mark.parametrize("by_arithmetic", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_a_group_norm_written_with_reshapes(by_arithmetic, affine):
    model = group_norm(by_arithmetic=by_arithmetic, affine=affine)
    assert_whole(model, "GroupNorm")
    assert quantized_tensors(model) == (ALL if affine else {"x", "y"})
    x = np.random.default_rng(1).normal(size=(2, 6, 4, 8)).astype(np.float32)
    (y,) = run(model, {"x": x})
    grouped = x.reshape(2, 3, -1)
    mean, variance = grouped.mean(-1, keepdims=True), grouped.var(-1, keepdims=True)
    expected = ((grouped - mean) / np.sqrt(variance + 1e-3)).reshape(x.shape)
    if affine:
        rng = np.random.default_rng(0)
        gamma, beta = (rng.normal(size=(6, 1, 1)).astype(np.float32) for _ in range(2))
        expected = expected * gamma + beta
    np.testing.assert_allclose(y, expected, atol=1e-5)


def test_a_group_norm_with_parameters_of_its_own_inside_or_another_shape_outside_is_none():
    (miss,) = found(group_norm(scale=2.0)).near_misses
    assert str(miss) == "GroupNorm-like, not fused: the scale of its InstanceNormalization is not 1"
    (miss,) = found(group_norm(affine=False, back=(2, 6, 32))).near_misses
    assert str(miss) == "GroupNorm-like, not fused: its second Reshape does not give the shape back"


# where gamma is multiplied in, and floors


def spelled(*steps, opset=21):
    """Nodes as (type, inputs, output) behind the centred `d` and the root `s` of x."""
    node = helper.make_node
    start = [
        ("ReduceMean", ["x", "axes"], "m"),
        ("Sub", ["x", "m"], "d"),
        ("Pow", ["d", "two"], "sq"),
        ("ReduceMean", ["sq", "axes"], "v"),
        ("Add", ["v", "eps"], "ve"),
        ("Sqrt", ["ve"], "s"),
        *steps,
    ]
    nodes = [node(type, inputs, [output], f"n{i}") for i, (type, inputs, output) in enumerate(start)]
    rng = np.random.default_rng(0)
    stored = {name: rng.normal(size=8).astype(np.float32) for name in ("gamma", "beta")}
    stored |= {"axes": np.array([-1]), "eps": np.float32(1e-3), "two": np.float32(2), "one": np.float32(1)}
    used = {name for one in nodes for name in one.input}
    return make_model(nodes, {"x": SHAPE}, {"y": SHAPE}, {k: v for k, v in stored.items() if k in used}, opset)


SHAPE = [2, 6, 4, 8]
PLACES = {
    "times the distance, over the root": [("Mul", ["gamma", "d"], "g"), ("Div", ["g", "s"], "n")],
    "times the distance, times the inverse": [
        ("Mul", ["d", "gamma"], "g"),
        ("Reciprocal", ["s"], "r"),
        ("Mul", ["r", "g"], "n"),
    ],
    "times the inverse": [("Div", ["one", "s"], "r"), ("Mul", ["r", "gamma"], "k"), ("Mul", ["d", "k"], "n")],
    "over the root": [("Div", ["gamma", "s"], "k"), ("Mul", ["k", "d"], "n")],
}


@pytest.mark.parametrize("place", PLACES)
def test_gamma_may_be_multiplied_in_anywhere(place):
    model = spelled(*PLACES[place], ("Add", ["n", "beta"], "y"))
    assert_whole(model, "LayerNorm")
    assert quantized_tensors(model) == ALL
    assert error_of(model, Norm()) < 1e-5


@pytest.mark.parametrize("floor", ["Relu", "Max", "Clip"])
def test_a_variance_by_difference_may_be_floored_at_0(floor):
    node = helper.make_node
    nodes = [
        node("ReduceMean", ["x", "axes"], ["m"], "mean"),
        node("Mul", ["x", "x"], ["xx"], "square"),
        node("ReduceMean", ["xx", "axes"], ["e"], "mean of squares"),
        node("Mul", ["m", "m"], ["mm"], "square of mean"),
        node("Sub", ["e", "mm"], ["v"], "variance"),
        node(floor, ["v"] if floor == "Relu" else ["v", "zero"], ["f"], "floor"),
        node("Add", ["f", "eps"], ["ve"], "eps"),
        node("Sqrt", ["ve"], ["s"], "root"),
        node("Sub", ["x", "m"], ["d"], "distance"),
        node("Div", ["d", "s"], ["y"], "out"),
    ]
    stored = {"axes": np.array([-1]), "eps": np.float32(1e-3), "zero": np.float32(0)}
    used = {name for one in nodes for name in one.input}
    model = make_model(nodes, {"x": SHAPE}, {"y": SHAPE}, {k: v for k, v in stored.items() if k in used})
    assert_whole(model, "LayerNorm")
    assert error_of(model, Norm(gamma=None, beta=None)) < 1e-4
