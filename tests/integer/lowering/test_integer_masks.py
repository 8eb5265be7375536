"""Masks of scores as exporters write them, and numbers that only their integer type bounds."""

import numpy as np
import pytest
from integer_comparison import compare, noise
from integer_models import UINT8, UINT16, Net
from onnx import TensorProto

from onnx_backend.integer.convert import convert
from onnx_backend.integer.decompose.prepare import prepare
from onnx_backend.integer.reference.run import run_reference
from qsdk import IntegerError

LOWEST = float(np.finfo(np.float32).min)
KEPT = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 0, 1, 0, 1, 0]]).reshape(3, 1, 6)


def on_grid(x):
    """What a quantizer of 16 bits leaves of x, as float64."""
    return (np.clip(np.rint(x / np.float32(0.0002)) + 30000, 0, 65535) - 30000) * np.float64(np.float32(0.0002))


GRIDS = {UINT8: (0.05, 117), UINT16: (0.0002, 30000)}


def attention(kind, low, form, dtype):
    """Softmax of scores with an addend that hides some: `(1 - mask) * low`, or `low` where the mask is 0."""
    net = Net()
    scores = net.qdq(net.input(["n", 4, 6]), *GRIDS[dtype], dtype)
    mask = net.input(["n", 1, 6], "mask", kind)
    if kind == TensorProto.FLOAT:
        top = 255 if dtype == UINT8 else 65535
        mask = net.qdq(mask, 1 / top, 0, dtype)
    else:
        mask = net.op("Cast", mask, to=TensorProto.FLOAT)
    one, lowest = net.const(np.float32(1)), net.const(np.float32(low))
    if form == "(m - 1) * -low":
        added = net.op("Mul", net.op("Sub", mask, one), net.const(np.float32(-low)))
    else:
        added = turned = net.op("Sub", one, mask)
        if form == "(1 - m) * low":
            added = net.op("Mul", turned, lowest)
        elif form == "where":
            added = net.op("Where", net.op("Cast", turned, to=TensorProto.BOOL), lowest, turned)
        elif form == "causal too":
            causal = net.const(np.triu(np.full((4, 6), low, np.float32), 3))
            added = net.op("Add", net.op("Mul", turned, lowest), causal)
    top = 255 if dtype == UINT8 else 65535
    y = net.op("Softmax", net.op("Add", scores, added))
    net.output(net.qdq(y, 1 / top, 0, dtype), ["n", 4, 6])
    return net.model()


FORMS = ["(1 - m) * low", "(m - 1) * -low", "where", "causal too"]


@pytest.mark.spread(10)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("low", [LOWEST, -1e4])
@pytest.mark.parametrize("kind", ["FLOAT", "INT64", "BOOL"])
def test_a_mask_hides_what_it_hides_in_float(kind, low, form):
    of_type = getattr(TensorProto, kind)
    for dtype in (UINT8, UINT16):
        model = attention(of_type, low, form, dtype)
        mask = KEPT.astype({"FLOAT": np.float32, "INT64": np.int64, "INT32": np.int32, "BOOL": bool}[kind])
        result = compare(model, {"x": noise((3, 4, 6), 2.0), "mask": mask}, tolerance=0.1)
        if form != "where":  # there the bound is that of all 64-bit integers beside the scores, not of 0 and 1
            assert result.certificate["requantizations"][-1]["error_bound"] < 5.0


def turned(net, x):
    return net.op("Transpose", x, perm=[0, 2, 1])


def spread_over_heads(net, x):
    """As nn.MultiheadAttention does with a padding mask, for four heads."""
    x = net.op("Reshape", x, net.const([-1, 1, 1, 6]))
    x = net.op("Expand", x, net.const([1, 4, 1, 1]))
    return net.op("Reshape", x, net.const([-1, 4, 6]))


def padded(net, x):
    return net.op(
        "Pad", net.op("Slice", x, net.const([0]), net.const([4]), net.const([2])), net.const([0, 0, 1, 0, 0, 1])
    )


def padded_with_less(net, x):
    """The fill is below every score, and hides nothing."""
    part = net.op("Slice", x, net.const([0]), net.const([4]), net.const([2]))
    return net.op("Pad", part, net.const([0, 0, 0, 0, 0, 2]), net.const(np.float32(-9)))


def picked(net, x):
    return net.op("Gather", x, net.const([5, 0, 0, 3, 1, 2]), axis=2)


MOVES = [turned, padded, padded_with_less, picked]


@pytest.mark.parametrize("target", ["standard", "onnxruntime"])
@pytest.mark.parametrize(
    ("beside", "moved"),
    [("nothing", spread_over_heads), *((beside, moved) for beside in ("nothing", "scores") for moved in MOVES)],
)
def test_a_mask_of_infinities_hides_the_same_scores_after_it_has_moved(beside, moved, target):
    net = Net()
    scores = net.qdq(net.input(["n", 4, 6]), 0.05, 117)
    hidden, nothing = net.input(["n", 1, 6], "mask", TensorProto.BOOL), net.const(np.float32(0))
    # the mask has the shape of one row, which the scores beside it repeat
    x = net.op("Where", hidden, net.const(np.float32(-np.inf)), scores if beside == "scores" else nothing)
    x = moved(net, x)
    shape, axis = (["n", 6, 4], 1) if moved is turned else (["n", 4, 6], 2)
    if beside == "nothing":
        x = net.op("Add", net.op("Transpose", scores, perm=[0, 2, 1]) if moved is turned else scores, x)
    net.output(net.qdq(net.op("Softmax", x, axis=axis), 1 / 255), shape)
    compare(net.model(), {"x": noise((3, 4, 6), 2.0), "mask": KEPT == 0}, tolerance=0.1, target=target)


def test_the_certificate_says_where_the_bounds_of_a_type_are_not_kept():
    certificate = convert(attention(TensorProto.INT64, LOWEST, "(1 - m) * low", UINT8)).certificate
    assert ["swallows" in line for line in certificate["assumed"]] == [True]
    assert convert(attention(TensorProto.BOOL, LOWEST, "(1 - m) * low", UINT8)).certificate["assumed"] == []


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_integers_weigh_fine_numbers_exactly(kind):
    """The mean of the kept positions: a product of 64-bit integers and 16-bit codes, summed and divided."""
    net = Net()
    x = net.qdq(net.input([3, 600, 2]), 0.0002, 30000, UINT16)
    weight = net.op("Cast", net.input([3, 600, 1], "w", TensorProto.INT64 if kind is np.int64 else 6), to=1)
    total = net.op("ReduceSum", net.op("Mul", x, weight), net.const(np.array([1])), keepdims=0)
    net.output(net.qdq(total, 0.003, 30000, UINT16), [3, 2])
    feeds = {"x": noise((3, 600, 2), 1.5), "w": np.random.default_rng(1).integers(0, 3, (3, 600, 1)).astype(kind)}
    exact = lambda f: (on_grid(f["x"]) * f["w"]).sum(1)  # noqa: E731
    result = compare(net.model(), feeds, tolerance=0.5)
    steps = (exact(feeds) / np.float64(np.float32(0.003))).round()
    found = (run_reference(result.model, feeds)["y"] / np.float64(np.float32(0.003))).round()
    np.testing.assert_allclose(found, steps, atol=1)


# --- functions of codes to integers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["BOOL", "INT8", "INT32", "INT64", "UINT8"])
def test_codes_are_cast_as_the_numbers_they_stand_for(to):
    net = Net()
    x = net.qdq(net.input([64]), 0.31, 0 if to == "UINT8" else 117)
    y = net.op("Cast", net.op("Relu", x), to=getattr(TensorProto, to))
    net.output(net.qdq(net.op("Cast", y, to=TensorProto.FLOAT), 0.3, 0), [64])
    compare(net.model(), {"x": noise((64,), 20.0)}, tolerance=0.0)


def test_numbers_that_a_type_does_not_hold_are_refused():
    net = Net()
    x = net.qdq(net.input([64]), 3.1, 117)
    y = net.op("Cast", net.op("Cast", x, to=TensorProto.INT8), to=TensorProto.FLOAT)
    net.output(net.qdq(y, 0.3, 0), [64])
    with pytest.raises(IntegerError, match="beyond what int8 holds"):
        convert(net.model())


@pytest.mark.parametrize("to", ["FLOAT", "BOOL"])
def test_cast_like_is_the_cast_that_it_is(to):
    net = Net()
    x = net.qdq(net.input([2, 8]), 0.31, 117)
    like = net.input([1], "like", getattr(TensorProto, to))
    y = net.op("CastLike", x, like)
    z = net.op("Where", y, x, net.const(np.float32(3))) if to == "BOOL" else net.op("Add", y, x)
    net.output(net.qdq(z, 0.5, 110), [2, 8])
    model = prepare(net.model())
    assert "CastLike" not in {node.op_type for node in model.graph.node}
    compare(model, {"x": noise((2, 8), 9.0), "like": np.zeros(1, bool if to == "BOOL" else np.float32)})


# --- sums of scales that are far apart -------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["Add", "Concat", "Where"])
def test_a_fine_operand_keeps_its_steps_beside_a_coarse_one(op):
    """A fine value and one of millions, whose difference to itself is then taken away again."""
    net = Net()
    x, far = net.qdq(net.input([4, 8]), 0.0002, 30000, UINT16), net.qdq(net.input([4, 8], "z"), 5e4, 3, UINT8)
    x, far = net.op("Tanh", x), net.op("Abs", far)
    if op == "Add":
        y = net.op("Add", net.op("Add", x, far), net.op("Neg", far))
    elif op == "Concat":
        both = net.op(
            "Concat", net.op("Exp", x), net.op("Exp", net.op("Mul", far, net.const(np.float32(2e-6)))), axis=0
        )
        y = net.op("Slice", both, net.const(np.array([0])), net.const(np.array([4])), net.const(np.array([0])))
    else:
        kept = net.op("Less", far, net.const(np.float32(1e9)))
        y = net.op("Where", kept, net.op("Mul", x, x), net.op("Mul", far, far))
    net.output(net.qdq(y, 0.00004, 32768 if op == "Add" else 0, UINT16), [4, 8])
    feeds = {"x": noise((4, 8), 0.4), "z": np.abs(noise((4, 8), 3e6))}
    grids = on_grid(feeds["x"])
    wanted = {"Add": np.tanh(grids), "Concat": np.exp(np.tanh(grids)), "Where": np.tanh(grids) ** 2}[op]
    found = run_reference(convert(net.model()).model, feeds)["y"]
    np.testing.assert_allclose(found, wanted, atol=0.00006)
