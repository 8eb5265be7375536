"""Scales per block, multiplied into the weight: what is exact, and that the error of what is not is stated."""

import numpy as np
import pytest
from block_models import BlockNet, X, multiplied
from exact_integer import require_exact
from hypothesis import given
from hypothesis import strategies as st
from integer_comparison import noise
from integer_models import INT4, INT8, UINT4, run, simulate

from onnx_backend.integer.convert import convert
from onnx_backend.integer.ir.values import BlockConstant
from onnx_backend.integer.lowering.layers.layers import to_channel_scales


def levels(top):
    """Block scales that are 1 to `top` times a scale per channel."""

    def scale(rng, shape):
        factors = rng.integers(1, top + 1, shape)
        factors[0] = top
        return (factors * rng.uniform(1e-4, 1e-3, (1, *shape[1:])).astype(np.float32)).astype(np.float32)

    return scale


@pytest.mark.parametrize("target", ["standard", "onnxruntime"])
def test_two_levels_of_scales_are_one_layer_of_eight_bits(target):
    model, exact = multiplied(out=(0.03, 121), scale=levels(16))
    result = convert(model, target=target)
    (row,) = result.certificate["requantizations"]
    assert len(row["accumulators"]) == 1
    assert row["form"] == ("fixed point" if target == "standard" else "QLinearMatMul")
    assert row["error_bound"] < 1e-4  # float32 rounded the products of both levels
    found = run(result.model, {"x": noise((5, 40))})["y"]
    np.testing.assert_array_equal(found, simulate(model, {"x": noise((5, 40))})["y"])
    if target == "standard":
        require_exact(model, {"x": noise((5, 40))}, exact, differing=0, tolerance=0)


@pytest.mark.parametrize(("dtype", "top", "parts"), [(INT4, 16, 1), (UINT4, 16, 2), (INT8, 256, 2)])
def test_levels_of_other_codes(dtype, top, parts):
    model, exact = multiplied(
        out=(0.03 if dtype != INT8 else 8.0, 121), dtype=dtype, points=dtype == UINT4, scale=levels(top)
    )
    _, result = require_exact(model, {"x": noise((5, 40))}, exact, differing=0, tolerance=0)
    assert len(result.certificate["requantizations"][0]["accumulators"]) == parts


def blocks_of(codes, scale, size, axis=0):
    return BlockConstant(np.asarray(codes, np.int64), np.asarray(scale, np.float64), axis, size, INT4)


def test_levels_give_the_integers_themselves():
    codes, factors = np.arange(-8, 8).reshape(8, 2), np.array([[16, 3], [1, 7]])
    made = to_channel_scales(blocks_of(codes, factors * np.array([[0.25, 0.1]]), 4), 1, 24)
    np.testing.assert_array_equal(made.integers, codes * np.repeat(factors, 4, 0))
    np.testing.assert_allclose(made.scale, [0.25, 0.1], rtol=1e-12)
    assert made.error < 1e-12


def test_powers_of_two_are_exact_up_to_the_bits():
    codes = np.arange(-8, 8).reshape(8, 2)
    made = to_channel_scales(blocks_of(codes, [[1.0, 1.0], [2.0**-19, 2.0**-10]], 4), 1, 24)
    assert made.error == 0.0
    np.testing.assert_array_equal(
        made.integers * made.scale, codes * np.repeat([[1.0, 1.0], [2.0**-19, 2.0**-10]], 4, 0)
    )
    assert to_channel_scales(blocks_of(codes, [[1.0, 1.0], [2.0**-21, 1.0]], 4), 1, 24).error > 0.0


def test_a_weight_close_to_a_power_of_two_leaves_room_for_signed_bytes():
    made = to_channel_scales(blocks_of([[1], [4]], [[1.0], [0.9990234375]], 1), 1, 24)
    assert 0x3F0000 < made.integers.max() <= 0x7F7F7F


@pytest.mark.slow
@given(st.integers(0, 10_000), st.sampled_from([24, 32]), st.integers(0, 2), st.integers(1, 6))
def test_a_weight_is_rounded_to_its_bits(seed, bits, axis, size):
    rng = np.random.default_rng(seed)
    shape, along = (3, 5, 4), int(rng.integers(3))
    small = [-(-n // size) if i == along else n for i, n in enumerate(shape)]
    scale = 10.0 ** rng.uniform(-3, 0, small)
    given = blocks_of(rng.integers(-8, 8, shape), scale, size, along)
    made = to_channel_scales(given, axis, bits)
    real = given.integers * np.repeat(scale, size, along).take(range(shape[along]), along)
    off = np.abs(real - made.integers * (made.scale.reshape([-1 if i == axis else 1 for i in range(3)])))
    others = tuple(i for i in range(3) if i != axis)
    top = np.abs(real).max(others, keepdims=True)
    assert (off <= top * 2.0 ** (1 - bits)).all() or made.error < 1e-6 * top.max()  # a channel of whole multiples
    assert made.integers.min() > -(1 << (bits - 1))
    assert made.integers.max() < 1 << (bits - 1)
    np.testing.assert_allclose(float(made.error), off.sum(others).max(), rtol=1e-5, atol=1e-15)


# --- errors add up --------------------------------------------------------------------------------------------------


def bound_of(write, scale):
    net = BlockNet()
    x = net.qdq(net.input([5, 40]), *X)
    net.output(net.qdq(write(net, x), scale, 121), [5, 12])
    return convert(net.model()).certificate["requantizations"][-1]["error_bound"]


#: Layers: op, shape of the weight, axis of its blocks, axis of its channels, shape of the input, attributes.
LAYERS = {
    "MatMul": ("MatMul", (40, 12), 0, 1, (5, 40), {}),
    "weight on the left": ("MatMul", (12, 40), 1, 0, (40, 7), {}),
    "Gemm": ("Gemm", (12, 40), 1, 0, (5, 40), {"transB": 1, "alpha": -3.0}),
    "Conv": ("Conv", (6, 20, 2, 2), 1, 0, (1, 20, 5, 5), {}),
    "ConvTranspose": ("ConvTranspose", (20, 6, 2, 2), 0, 1, (1, 20, 5, 5), {}),
}


@pytest.mark.parametrize("zero", [119, 200])
@pytest.mark.parametrize("name", LAYERS)
def test_the_bound_holds_what_the_weight_was_rounded_by(name, zero):
    op, w_shape, axis, channels, x_shape, attrs = LAYERS[name]
    net = BlockNet()
    x = net.qdq(net.input(list(x_shape)), X[0], zero)
    w = net.blocks(w_shape, axis, 4)
    y = net.op(op, *((w, x) if "left" in name else (x, w)), **attrs)
    net.output(net.qdq(y, 0.05, 121), [None] * len(x_shape))
    error = to_channel_scales(net.stored, channels, 24).error * abs(attrs.get("alpha", 1.0))
    bound = convert(net.model()).certificate["requantizations"][0]["error_bound"]
    least = error * max(zero, 255 - zero) * np.float32(X[0]) / np.float32(0.05)
    assert least * (1 - 1e-9) <= bound <= 1.5 * least


def test_a_factor_and_a_sum_carry_the_error():
    def layer(net, x):
        return net.op("MatMul", x, net.blocks((40, 12), 0, 16))

    alone = bound_of(layer, 0.05)
    assert bound_of(lambda net, x: net.op("Mul", layer(net, x), net.const(np.float32(8))), 0.4) == pytest.approx(
        alone, rel=0.05
    )
    assert bound_of(lambda net, x: net.op("Add", layer(net, x), layer(net, x)), 0.05) == pytest.approx(
        2 * alone, rel=0.3
    )
