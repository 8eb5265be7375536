"""Sine and cosine of fixed point: positions without a bound, angles behind a layer."""

from fractions import Fraction

import numpy as np
import pytest
from exact_integer import integers_of, require_near
from integer_comparison import compare, noise
from integer_models import LEVELS, Net, run, simulate
from onnx import TensorProto, helper

from onnx_backend.integer.convert import convert
from onnx_backend.integer.fixed_point.curves import turned
from onnx_backend.integer.reference.run import run_reference

FREQUENCIES = (1.0 / 10000 ** (np.arange(4) / 4)).astype(np.float32)
PI = Fraction("3.14159265358979323846264338327950288419716939937510582097494459")


def rotary(op, kind=TensorProto.INT64):
    """Angles of a rotary embedding as decoders with a key-value cache compute them, from positions that they take."""
    net = Net()
    place = net.op("Unsqueeze", net.input(["n"], "position", kind), net.const(np.array([1])))
    angle = net.op("Mul", net.op("Cast", place, to=TensorProto.FLOAT), net.const(FREQUENCIES))
    both = net.op("Concat", angle, angle, axis=1)
    net.output(net.qdq(net.op(op, both), 2 / 255, 127), ["n", 8])
    return net.model()


def exact_codes(op, positions):
    """The codes of exact angles, as far as float64 knows them: pi has 62 digits."""
    found = np.empty((len(positions), 8))
    for i, position in enumerate(positions):
        for k in range(8):
            angle = int(position) * Fraction(float(FREQUENCIES[k % 4]))
            rest = float(angle - round(angle / (2 * PI)) * 2 * PI)
            found[i, k] = np.sin(rest) if op == "Sin" else np.cos(rest)
    return found / np.float64(np.float32(2 / 255)) + 127


@pytest.mark.parametrize("op", ["Sin", "Cos"])
def test_angles_of_positions_up_to_where_they_saturate(op):
    rng = np.random.default_rng(0)
    large = [sign * (1 << power) + step for power in (17, 18, 36, 52) for sign in (1, -1) for step in (-1, 0, 1)]
    positions = np.concatenate([np.arange(-70, 70), large, rng.integers(-(1 << 52), 1 << 52, 500)])
    result = convert(rotary(op))
    feeds = {"position": positions}
    found = run_reference(result.model, feeds)["y"]
    codes = np.rint(found / np.float32(2 / 255) + 127)
    (row,) = result.certificate["requantizations"]
    assert row["error_bound"] < 1e-3
    assert np.abs(codes - exact_codes(op, positions)).max() <= 0.5 + row["error_bound"]
    for level in LEVELS:
        np.testing.assert_array_equal(run(result.model, feeds, level)["y"], found)


@pytest.mark.parametrize("op", ["Sin", "Cos"])
@pytest.mark.parametrize("kind", [np.int64, np.int32])
def test_angles_of_near_positions_are_those_of_the_quantized_model(op, kind):
    model = rotary(op, TensorProto.INT64 if kind == np.int64 else TensorProto.INT32)
    compare(model, {"position": np.arange(-100, 100).astype(kind)})


@pytest.mark.parametrize("op", ["Sin", "Cos"])
def test_a_periodic_activation_behind_a_layer(op):
    net = Net()
    x = net.qdq(net.input(["n", 6]), 0.031, 117)
    w, scale = net.weight((16, 6), 0)
    y = net.op("Gemm", x, w, net.bias(16, 0.031, scale), transB=1)
    net.output(net.qdq(net.op(op, net.op("Mul", y, net.const(np.float32(3)))), 2 / 255, 127), ["n", 16])
    feeds = {"x": noise((40, 6))}
    compare(net.model(), feeds, 0.01)
    assert np.ptp(simulate(net.model(), feeds)["y"]) > 1.9


@pytest.mark.parametrize("op", ["Sin", "Cos"])
@pytest.mark.parametrize("scale", [3.7e-6, -0.37])
def test_a_sine_is_within_its_error(op, scale):
    node = helper.make_node(op, ["x"], ["y"])
    values = np.random.default_rng(0).integers(-(1 << 20), 1 << 20, 5000)
    found, integers = integers_of(
        lambda ctx, x: turned(ctx, node, [x]), values, bounds=[(-(1 << 20), 1 << 20)], scales=[scale]
    )
    require_near(found, integers, getattr(np, op.lower())(values * scale))
    assert found.error * float(found.scale) < 1e-6
