"""Softmax and LogSoftmax on integers, with every kind of score and mask, against exact arithmetic."""

import numpy as np
import pytest
from exact_integer import grid_codes, require_exact
from grid_values import on_grid
from integer_comparison import ENCODINGS, compare, noise
from integer_models import INT8, LEVELS, UINT8, Net, run
from onnx import TensorProto

from onnx_backend.integer.convert import convert
from onnx_backend.integer.fixed_point.fixed_arithmetic import error_of_exponential
from onnx_backend.integer.ir.values import Refused
from qsdk import IntegerError

OUT = (1 / 255, 0)


def softmax(x, axis=-1):
    x = np.asarray(x, np.float64)
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize("encoding", ["uint8", "int8"])
@pytest.mark.parametrize("size", [0.03, 0.3, 3.0])
def test_softmax_of_codes(encoding, axis, size):
    facts = {**ENCODINGS[encoding], "scale": size * 0.01}
    net = Net()
    x = net.qdq(net.input([4, 7, 40]), **facts)
    net.output(net.qdq(net.op("Softmax", x, axis=axis), *OUT), [4, 7, 40])
    feeds = {"x": noise((4, 7, 40), size)}
    bound, _ = require_exact(net.model(), feeds, lambda f: softmax(on_grid(f["x"], **facts), axis), saturated=1.0)
    assert bound < 1e-4


def extremes():
    """Rows of 256: all codes, all equal, one outlier, two outliers, all at an end."""
    codes = np.arange(256)
    rows = [codes, codes[::-1], np.full(256, 7), np.r_[255, np.zeros(255)], np.r_[255, 255, np.zeros(254)]]
    rows += [np.full(256, 255), np.r_[0, np.full(255, 255)], np.r_[np.full(128, 100), np.full(128, 101)]]
    return np.stack(rows)


@pytest.mark.parametrize("scale", [1e-3, 0.02, 0.1, 1.0, 30.0])
def test_softmax_at_its_extremes(scale):
    net = Net()
    x = net.qdq(net.input([8, 256]), scale, 128)
    top = max(float(softmax((extremes() - 128) * scale).max()), 1e-3) / 255
    net.output(net.qdq(net.op("Softmax", x), top * 1.003, 0), [8, 256])
    feeds = {"x": ((extremes() - 128) * np.float32(scale)).astype(np.float32)}
    require_exact(net.model(), feeds, lambda f: softmax(on_grid(f["x"], scale, 128)), tolerance=0.01, saturated=1.0)


def test_log_softmax():
    net = Net()
    x = net.qdq(net.input([8, 256]), 0.04, 128)
    net.output(net.qdq(net.op("LogSoftmax", x), 0.051, 255), [8, 256])
    feeds = {"x": ((extremes() - 128) * np.float32(0.04)).astype(np.float32)}
    bound, _ = require_exact(net.model(), feeds, lambda f: np.log(softmax(on_grid(f["x"], 0.04, 128))), tolerance=0.01)
    assert bound < 1e-3


def scores(net, *, depth=16, length=24):
    """Attention scores that no quantizer stands behind, scaled."""
    q = net.qdq(net.input([2, 3, length, depth], "q"), 0.023, 120)
    k = net.qdq(net.input([2, 3, depth, length], "k"), 0.019, 133)
    feeds = {"q": noise((2, 3, length, depth), 1.5), "k": noise((2, 3, depth, length), 1.2, seed=1)}
    return net.op("Mul", net.op("MatMul", q, k), net.const(np.float32(depth**-0.5))), feeds


def exact_scores(feeds):
    return on_grid(feeds["q"], 0.023, 120) @ on_grid(feeds["k"], 0.019, 133) * np.float64(np.float32(16**-0.5))


def test_scores_without_a_quantizer_of_their_own():
    net = Net()
    y, feeds = scores(net)
    net.output(net.qdq(net.op("Softmax", y), *OUT), [2, 3, 24, 24])
    bound, _ = require_exact(net.model(), feeds, lambda f: softmax(exact_scores(f)))
    assert bound < 1e-2


CAUSAL = np.tril(np.ones((24, 24), bool))
LOWEST = float(np.finfo(np.float32).min)


@pytest.mark.spread(12)
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("lowest", [-np.inf, LOWEST, -1e9, -10000.0])
@pytest.mark.parametrize("form", ["added", "where", "chosen", "filled"])
def test_masks(form, lowest, quantized):
    """A causal mask as a stored tensor, made from booleans, or filled in."""
    net = Net()
    y, feeds = scores(net)
    if quantized:
        y = net.qdq(y, 0.05, 128)
    low, zero = net.const(np.float32(lowest)), net.const(np.float32(0))
    if form == "added":
        y = net.op("Add", y, net.const(np.where(CAUSAL, 0, lowest).astype(np.float32)))
    elif form == "filled":
        y = net.op("Where", net.input([24, 24], "m", TensorProto.BOOL), low, y)
        feeds["m"] = ~CAUSAL
    else:
        mask = net.const(CAUSAL) if form == "where" else net.input([24, 24], "m", TensorProto.BOOL)
        y = net.op("Add", y, net.op("Where", mask, zero, low))
        if form == "chosen":
            feeds["m"] = CAUSAL
    net.output(net.qdq(net.op("Softmax", y), *OUT), [2, 3, 24, 24])

    def exact(f):
        raw = exact_scores(f)
        return softmax(np.where(CAUSAL, on_grid(raw, 0.05, 128) if quantized else raw, -np.inf))

    differing = 0.02 if quantized else 0.001  # the inner quantizer has near-ties of its own
    if quantized:
        compare(net.model(), feeds, 0.02)
    else:
        require_exact(net.model(), feeds, exact, differing=differing)


def test_what_is_masked_is_zero_beside_the_lowest_score_that_there_can_be():
    net = Net()
    y = net.qdq(net.input([1, 24, 24]), 0.01, 128)
    y = net.op("Add", y, net.const(np.where(CAUSAL, 0, -np.inf).astype(np.float32)))
    net.output(net.qdq(net.op("Softmax", y), *OUT), [1, 24, 24])
    feeds = {"x": np.full((1, 24, 24), -1.28, np.float32)}
    require_exact(net.model(), feeds, lambda f: softmax(np.where(CAUSAL, on_grid(f["x"], 0.01, 128), -np.inf)))


def padded(net, lowest, *, safe):
    y, feeds = scores(net)
    y = net.qdq(y, 0.05, 128)
    mask = net.input([2, 1, 1, 24], "m", TensorProto.BOOL)
    keep = np.ones((2, 1, 1, 24), bool)
    keep[0, ..., 9:], keep[1] = False, False  # a whole batch entry is padding
    zero = net.const(np.float32(0))
    y = net.op("Softmax", net.op("Add", y, net.op("Where", mask, zero, net.const(np.float32(lowest)))))
    if safe:
        y = net.op("Where", net.op("IsNaN", y), zero, y)
    net.output(net.qdq(y, *OUT), [2, 3, 24, 24])
    return {**feeds, "m": keep}


def test_a_row_that_is_masked_altogether_is_zero_where_nan_is_replaced():
    net = Net()
    feeds = padded(net, -np.inf, safe=True)
    result = compare(net.model(), feeds, 0.02)
    assert not {"IsNaN"} & {node.op_type for node in result.model.graph.node}


def test_a_row_that_the_lowest_number_masks_altogether_is_uniform():
    net = Net()
    feeds = padded(net, LOWEST, safe=False)
    compare(net.model(), feeds, 0.02)


def test_a_mask_made_by_arithmetic_from_integers():
    net = Net()
    y, feeds = scores(net)
    taken = net.op("Cast", net.input([2, 24], "m", TensorProto.BOOL), to=TensorProto.FLOAT)
    shaped = net.op("Reshape", taken, net.const(np.array([2, 1, 1, 24])))
    bias = net.op("Mul", net.op("Sub", net.const(np.float32(1)), shaped), net.const(np.float32(LOWEST)))
    net.output(net.qdq(net.op("Softmax", net.op("Add", y, bias)), *OUT), [2, 3, 24, 24])
    keep = np.ones((2, 24), bool)
    keep[0, 5:] = False
    feeds["m"] = keep
    where = keep[:, None, None, :]
    require_exact(net.model(), feeds, lambda f: softmax(np.where(where, exact_scores(f), -np.inf)))


def test_the_probabilities_need_no_quantizer_in_front_of_a_matmul():
    net = Net()
    y, feeds = scores(net)
    v = net.qdq(net.input([2, 3, 24, 8], "v"), 0.021, 99)
    feeds["v"] = noise((2, 3, 24, 8), 1.0, seed=5)
    net.output(net.qdq(net.op("MatMul", net.op("Softmax", y), v), 0.011, 120), [2, 3, 24, 8])
    bound, _ = require_exact(net.model(), feeds, lambda f: softmax(exact_scores(f)) @ on_grid(f["v"], 0.021, 99))
    assert bound < 0.05


def test_a_row_of_dynamic_length():
    net = Net()
    x = net.qdq(net.input([3, "n"]), 0.05, 119)
    net.output(net.qdq(net.op("Softmax", x), *OUT), [3, "n"])
    compare(net.model(), {"x": noise((3, 33), 2.0)})


REFUSED = {
    "nan elsewhere": "does not simply replace NaN",
    "another number": "another number than 0",
    "relu": "clips a mask",
    "log": "minus infinity was added",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_mask_cannot_do(case):
    net = Net()
    y, _ = scores(net)
    mask, zero = net.input([24, 24], "m", TensorProto.BOOL), net.const(np.float32(0))
    y = net.op("Add", y, net.op("Where", mask, zero, net.const(np.float32(-np.inf))))
    if case == "relu":
        y = net.op("Relu", y)
    elif case == "log":
        y = net.op("LogSoftmax", y)
    else:
        y = net.op("Softmax", y)
        other = net.op("Relu", y) if case == "nan elsewhere" else y
        y = net.op("Where", net.op("IsNaN", y), zero if case == "nan elsewhere" else net.const(np.float32(1)), other)
    net.output(net.qdq(y, *OUT), [2, 3, 24, 24])
    with pytest.raises(IntegerError, match=REFUSED[case]):
        convert(net.model())


def test_grid_codes_are_what_the_tests_think():
    np.testing.assert_allclose(grid_codes((0.5, 2))[:4], [-1, -0.5, 0, 0.5])
    assert INT8 != UINT8


@pytest.mark.parametrize("target", ["standard", "onnxruntime"])
def test_a_softmax_of_one_element_is_one(target):
    """A window of attention may hold a single patch."""
    net = Net()
    x = net.qdq(net.input([4, 1]), 0.031, 119)
    net.output(net.qdq(net.op("Softmax", x, axis=-1), 1 / 255, 0), [4, 1])
    feeds = {"x": np.linspace(-3, 3, 4, dtype=np.float32)[:, None]}
    found = run(convert(net.model(), target=target).model, feeds)["y"]
    np.testing.assert_array_equal(found, np.full((4, 1), np.float32(255) * np.float32(1 / 255)))


def test_scores_that_may_be_off_by_anything_are_refused():
    assert error_of_exponential(2.0**-10) == pytest.approx(2.0**-10, rel=1e-3)
    with pytest.raises(Refused, match=r"may be off by 7\.5e"):
        error_of_exponential(7.5e4)


@pytest.mark.parametrize("length", [2, 128, 600])
@pytest.mark.parametrize(("scale", "zero"), [(1 / 255, 0), (1 / 256, 0), (1 / 600, 3), (1 / 100, 20)])
@pytest.mark.parametrize("lowest", [-np.inf, LOWEST])
def test_masked_scores_become_codes_by_one_product(scale, zero, lowest, length):
    """Shares of rows, also of one that is masked altogether, are as near as the certificate says at every level."""
    net, shape = Net(), [2, 3, 5, length]
    x = net.qdq(net.input(shape), 0.05, 100)
    kept = net.input([2, 1, 5, length], "kept", TensorProto.BOOL)
    mask = net.op("Where", kept, net.const(np.float32(0)), net.const(np.float32(lowest)))
    y = net.op("Softmax", net.op("Add", x, mask), axis=-1)
    y = net.op("Where", net.op("IsNaN", y), net.const(np.float32(0)), y)
    net.output(net.qdq(y, scale, zero), shape)
    result = convert(net.model(), target="onnxruntime")
    (row,) = result.certificate["requantizations"]
    assert row["form"] == "shares of rows"
    narrow = any(tensor.data_type == TensorProto.UINT32 for tensor in result.model.graph.initializer)
    assert narrow == (length == 2 or (length, scale) in ((128, 1 / 255), (128, 1 / 100), (600, 1 / 100)))
    assert row["error_bound"] <= (1 / 16 if narrow else 1e-3)
    codes = np.random.default_rng(3).integers(0, 256, shape)
    some = np.random.default_rng(4).random((2, 1, 5, length)) < 0.6
    some[..., 0] = True
    some[0, 0, 1] = False  # a row without a score: 0 with minus infinity, else left open here
    reals = (codes - 100) * np.float64(np.float32(0.05))
    kept_scores = np.where(some, reals, -1e4)
    powers = np.exp(kept_scores - kept_scores.max(-1, keepdims=True)) * some
    step = np.float64(np.float32(scale))
    wanted = (powers / np.maximum(powers.sum(-1, keepdims=True), 1e-9) / step + zero).clip(0, 255)
    compared = np.broadcast_to(some.any(-1) | (lowest == -np.inf), shape[:-1])
    for level in LEVELS:
        found = run(result.model, {"x": reals.astype(np.float32), "kept": some}, level)["y"] / step + zero
        assert np.abs(found - wanted)[compared].max() <= 0.5 + row["error_bound"] + 1e-4


@pytest.mark.parametrize(("length", "narrow"), [(2, True), (49, True), (600, False)])
@pytest.mark.parametrize(("scale", "zero"), [(1 / 255, 0), (1 / 200, 20)])
def test_scores_on_a_fine_grid_become_codes_by_one_product(scale, zero, length, narrow):
    """A position's bias and a window's mask are on no grid of the scores: they have no table of differences."""
    net, shape = Net(), [4, 3, 7, length]
    x = net.qdq(net.input(shape), 0.05, 100)
    bias = np.random.default_rng(5).normal(0, 1, (3, 7, length)).astype(np.float32)
    bias = bias[None] - 100 * (np.random.default_rng(6).random((4, 1, 7, length)) < 0.3).astype(np.float32)
    net.output(net.qdq(net.op("Softmax", net.op("Add", x, net.const(bias)), axis=-1), scale, zero), shape)
    feeds = {"x": noise(shape)}

    def exact(given):
        return softmax(on_grid(given["x"], 0.05, 100) + bias.astype(np.float64))

    loose = {"tolerance": 0.05, "differing": 0.05}
    bound, result = require_exact(net.model(), feeds, exact, target="onnxruntime", saturated=1.0, **loose)
    (row,) = result.certificate["requantizations"]
    assert row["form"] == "shares of rows"
    assert any(tensor.data_type == TensorProto.UINT32 for tensor in result.model.graph.initializer)
    sums = [node for node in result.model.graph.node if node.op_type == "ReduceSum"]
    assert not sums  # by a product with ones, not in 64 bits by rows
    assert bound <= (1 / 16 if narrow else 1e-3)
    assert (bound > 1e-3) == narrow
