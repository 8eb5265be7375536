"""Requantizations of the target onnxruntime as one convolution and in 32 bits, against exact sums."""

import numpy as np
import pytest
from integer_models import LEVELS, Net, run
from onnx import numpy_helper, shape_inference

from onnx_backend.integer.convert import convert
from onnx_backend.integer.verify.integer_only import integer_findings

SCALE, ZERO, STEP, POINT = np.float32(0.031), 117, np.float32(0.047), 121


def every_code(*shape):
    """Return codes of which every column holds all 256, and their values."""
    codes = np.stack([np.random.default_rng(i).permutation(256) for i in range(int(np.prod(shape)))], 1)
    codes = codes.reshape(256, *shape)
    return codes, ((codes - ZERO) * SCALE).astype(np.float32)


def require_near(net, feeds, exact, form):
    """Convert; each level's codes are as near the exact sums as the row says, whose form is the one expected."""
    result = convert(net.model(), target="onnxruntime")
    assert integer_findings(result.model, kernels=True) == []
    (row,) = result.certificate["requantizations"]
    assert row["form"] == form
    assert row["error_bound"] <= 1 / 16
    wanted = (exact / np.float64(STEP) + POINT).clip(0, 255)
    for level in LEVELS:
        found = run(result.model, feeds, level)["y"] / np.float64(STEP) + POINT
        assert np.abs(found - wanted).max() <= 0.5 + row["error_bound"] + 1e-4
    return result


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_codes_with_numbers_of_their_channel_are_one_convolution(rank):
    shape, rng = [2, 3, 8][3 - (rank - 1) :], np.random.default_rng(0)
    codes, values = every_code(*shape)
    gain, constant = rng.uniform(-2, 2, 8).astype(np.float32), rng.uniform(-3, 3, 8).astype(np.float32)
    gain[2] = 0.0
    net = Net()
    x = net.qdq(net.input(["n", *shape]), SCALE, ZERO)
    net.output(
        net.qdq(net.op("Add", net.op("Mul", x, net.const(gain)), net.const(constant)), STEP, POINT), values.shape
    )
    exact = (codes - ZERO) * np.float64(SCALE) * gain.astype(np.float64) + constant.astype(np.float64)
    require_near(net, {"x": values}, exact, "QLinearConv")


def test_a_number_for_each_position_of_several_axes_is_a_channel():
    codes, values = every_code(3, 4, 5)
    bias = np.random.default_rng(1).normal(0, 2, (3, 4, 5)).astype(np.float32)
    net = Net()
    x = net.qdq(net.input(["n", 3, 4, 5]), SCALE, ZERO)
    y = net.op("Clip", net.op("Add", x, net.const(bias)), net.const(np.float32(-1)), net.const(np.float32(4)))
    net.output(net.qdq(y, STEP, POINT), values.shape)
    exact = ((codes - ZERO) * np.float64(SCALE) + bias.astype(np.float64)).clip(-1, 4)
    require_near(net, {"x": values}, exact, "QLinearConv")


def test_an_addend_beyond_a_bias_of_32_bits_is_written_otherwise():
    """Beside a gain this small, the constant is more units than a bias holds."""
    codes, values = every_code(4)
    gain = np.array([1e-9, 1.0, 1.0, 1.0], np.float32)
    net = Net()
    x = net.qdq(net.input([256, 4]), SCALE, ZERO)
    y = net.op("Add", net.op("Mul", x, net.const(gain)), net.const(np.array([3, 0, 0, 0], np.float32)))
    net.output(net.qdq(y, STEP, POINT), values.shape)
    exact = (codes - ZERO) * np.float64(SCALE) * gain.astype(np.float64) + np.array([3, 0, 0, 0])
    require_near(net, {"x": values}, exact, "fixed point in 32 bits")


def test_two_tensors_with_numbers_of_their_position_are_added_in_32_bits():
    """A rotary embedding is such a sum."""
    codes, values = every_code(3, 8)
    angles = np.arange(24).reshape(3, 8) / 5
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    net = Net()
    x = net.qdq(net.input([256, 3, 8]), SCALE, ZERO)
    turned = net.op("Slice", x, *(net.const(np.array([v], np.int64)) for v in (-1, -9, 2, -1)))
    y = net.op("Add", net.op("Mul", x, net.const(cos)), net.op("Mul", turned, net.const(sin)))
    net.output(net.qdq(y, STEP, POINT), values.shape)
    reals = (codes - ZERO) * np.float64(SCALE)
    exact = reals * cos.astype(np.float64) + reals[..., ::-1] * sin.astype(np.float64)
    result = require_near(net, {"x": values}, exact, "fixed point in 32 bits")
    kinds = {v.type.tensor_type.elem_type for v in shape_inference.infer_shapes(result.model).graph.value_info}
    assert not kinds & {7, 13}  # neither int64 nor uint64


def test_sums_in_the_middle_of_two_codes_stay_exact_and_even():
    codes, _ = every_code(2)
    net = Net()
    x = net.qdq(net.input([256, 2]), 0.25, 0)
    other = net.qdq(net.input([256, 2], "z"), 0.25, 0)
    half = net.const(np.array([0.5, 0.25], np.float32))
    net.output(net.qdq(net.op("Add", net.op("Mul", x, half), net.op("Mul", other, half)), 0.25, 0), [256, 2])
    result = convert(net.model(), target="onnxruntime")
    assert [row["form"] for row in result.certificate["requantizations"]] == ["fixed point"]
    given = {"x": (codes * 0.25).astype(np.float32), "z": (codes[::-1] * 0.25).astype(np.float32)}
    wanted = np.rint((codes + codes[::-1]) * np.array([0.5, 0.25])).clip(0, 255) * 0.25
    np.testing.assert_array_equal(run(result.model, given)["y"], wanted)


def test_single_numbers_have_the_rank_of_the_numbers_of_rows_that_they_meet():
    """The runtime broadcasts a number without axes element by element there."""
    net = Net()
    x = net.qdq(net.input([2, 5, 16]), 0.03, 100)
    net.output(
        net.qdq(net.op("LayerNormalization", x, net.const(np.ones(16, np.float32)), axis=-1), 0.02, 120), [2, 5, 16]
    )
    model = convert(net.model(), target="onnxruntime").model
    ranks = {t.name: numpy_helper.to_array(t).ndim for t in model.graph.initializer}
    sizes = {
        v.name: [d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in shape_inference.infer_shapes(model).graph.value_info
    }
    met = [
        (ranks[number], len(sizes[tensor]))
        for node in model.graph.node
        if node.op_type in ("Add", "Mul", "Sub", "BitShift", "BitwiseAnd")
        for number, tensor in (node.input, node.input[::-1])
        if number in ranks and sizes.get(tensor, [0])[-1] == 1
    ]
    assert len(met) > 3
    assert all(own == rank for own, rank in met)
