"""Constants that are moved to where only a run knows: class tokens, position tables cut to a length, masks."""

import numpy as np
import pytest
from integer_comparison import compare, noise
from integer_models import INT8, UINT8, UINT16, Net
from onnx import TensorProto, helper

from qsdk import to_integer

RNG = np.random.default_rng(0)
NUMBERS = RNG.normal(0, 1, (1, 40, 8)).astype(np.float32)
KINDS = ("per tensor", "16 bits", "per channel", "float", "few numbers", "one number")


def stored(net, kind):
    """A constant of shape (1, 40, 8), as a file can hold it."""
    if kind == "per tensor":
        return net.qdq(net.const(NUMBERS), 0.021, 3, INT8)
    if kind == "16 bits":
        return net.qdq(net.const(NUMBERS), 0.0001, 31000, UINT16)
    if kind == "per channel":
        codes = RNG.integers(-128, 128, (1, 40, 8)).astype(np.int8)
        scale = net.const(RNG.uniform(0.01, 0.03, 40).astype(np.float32))
        return net.op("DequantizeLinear", net.const(codes), scale, net.const(np.zeros(40, np.int8)), axis=1)
    if kind == "one number":
        return net.const(np.full((1, 40, 8), 0.37, np.float32))
    return net.const(NUMBERS if kind == "float" else np.round(NUMBERS * 4) / 4)


def sizes(net, x, *wanted):
    """A shape of the sizes of x at some axes, and of numbers."""
    shape = net.op("Shape", x)
    parts = [
        net.op("Gather", shape, net.const(np.array([axis]))) if isinstance(axis, int) else net.const(np.array(axis))
        for axis in wanted
    ]
    return net.op("Concat", *parts, axis=0)


def moved(net, op, constant, x):
    """The constant as (n, length, 8), or as what broadcasts to it; n and length are those of x."""
    if op == "Expand":
        cut = net.op("Slice", constant, *(net.const(np.array([n])) for n in (0, 5, 1)))
        return net.op("Expand", cut, sizes(net, x, 0, [5], [8]))
    if op == "Tile":
        rest = net.op("Slice", constant, *(net.const(np.array([n])) for n in (0, 5, 1)))
        return net.op("Tile", rest, sizes(net, x, 0, [1], [1]))
    if op == "Slice":
        return net.op("Slice", constant, net.const(np.array([0])), sizes(net, x, 1), net.const(np.array([1])))
    if op == "Gather":
        places = net.op("Range", net.const(np.int64(0)), net.op("Squeeze", sizes(net, x, 1)), net.const(np.int64(1)))
        return net.op("Gather", constant, places, axis=1)
    return net.op(
        "Reshape",
        net.op("Gather", constant, net.const(np.array([3])), axis=1),
        net.op("Abs", sizes(net, x, [1], [1], 2)),
    )


@pytest.mark.parametrize("kind", ["per tensor", "per channel", "few numbers"])
@pytest.mark.parametrize("op", ["Expand", "Tile", "Slice", "Gather", "Reshape"])
def test_a_constant_goes_where_only_a_run_knows(op, kind):
    net = Net()
    x = net.qdq(net.input(["n", 5, 8]), 0.031, 119)
    y = net.op("Add", x, moved(net, op, stored(net, kind), x))
    net.output(net.qdq(y, 0.0417, 120), ["n", 5, 8])
    compare(net.model(), {"x": noise((3, 5, 8))})


@pytest.mark.parametrize("kind", KINDS)
def test_class_tokens_join_patches_of_any_batch_exactly(kind):
    net = Net()
    x = net.qdq(net.input(["n", 5, 8]), 0.031, 119)
    y = net.op("Concat", moved(net, "Expand", stored(net, kind), x), x, axis=1)
    net.output(net.qdq(y, 0.04, 120), ["n", 10, 8])
    feeds = {"x": noise((3, 5, 8))}
    result = compare(net.model(), feeds, tolerance=0.0)
    assert "Expand" in {node.op_type for node in result.model.graph.node}


@pytest.mark.parametrize("kind", KINDS)
def test_a_moved_constant_takes_part_in_arithmetic(kind):
    """Queries that are the same for every image."""
    net = Net()
    x = net.qdq(net.input(["n", 8, 6]), 0.031, 119)
    scores = net.op("MatMul", moved(net, "Expand", stored(net, kind), x), x)
    net.output(net.qdq(net.op("Softmax", scores), 1 / 255, 0), ["n", 5, 6])
    compare(net.model(), {"x": noise((3, 8, 6), 0.5)})


def test_a_table_of_float_rows_is_quantized_at_conversion_time():
    net = Net()
    ids = net.input(["n", 5], "ids", TensorProto.INT64)
    table = net.const(RNG.normal(0, 1, (50, 16)).astype(np.float32))
    net.output(net.qdq(net.op("Gather", table, ids), 0.02, 128), ["n", 5, 16])
    compare(net.model(), {"ids": RNG.integers(0, 50, (3, 5))}, tolerance=0.0)


# --- Pad -------------------------------------------------------------------------------------------------------------

PADS = np.array([0, 0, 1, 2, 0, 0, 2, 1])


@pytest.mark.parametrize("fill", [0.3, 9.0, -np.inf])
@pytest.mark.parametrize("behind", ["", "Relu", "Sigmoid", "MaxPool", "layer"])
def test_a_pad_with_any_number_is_exact(fill, behind):
    net = Net()
    x = net.qdq(net.input([2, 3, 6, 6]), 0.05, 100)
    if behind == "layer":
        w, scale = net.weight((3, 3, 1, 1), 0)
        x = net.op("Relu", net.op("Conv", x, w, net.bias(3, 0.05, scale)))
    elif behind == "Sigmoid":
        x = net.op("Sigmoid", x)
    y = net.op("Pad", x, net.const(PADS), net.const(np.float32(fill)))
    if behind == "Relu":
        y = net.op("Relu", y)
    elif behind == "MaxPool":
        y = net.op("MaxPool", y, kernel_shape=[3, 3], strides=[2, 2])
    net.output(net.qdq(y, 0.04, 90), [2, 3, 4, 4] if behind == "MaxPool" else [2, 3, 9, 9])
    compare(net.model(), {"x": noise((2, 3, 6, 6))}, tolerance=0.01 if behind == "layer" else 0.0)


def test_a_pad_behind_a_slope_and_before_a_clip():
    net = Net()
    x = net.qdq(net.input([2, 3, 6, 6]), 0.05, 100)
    w, scale = net.weight((3, 3, 1, 1), 0)
    y = net.op("LeakyRelu", net.op("Conv", x, w, net.bias(3, 0.05, scale)), alpha=0.2)
    y = net.op("Pad", y, net.const(PADS), net.const(np.float32(7.0)))
    y = net.op("Clip", net.op("Transpose", y, perm=[0, 2, 3, 1]), net.const(np.float32(-0.5)), net.const(np.float32(2)))
    net.output(net.qdq(y, 0.01, 60, UINT8), [2, 9, 9, 3])
    compare(net.model(), {"x": noise((2, 3, 6, 6))}, tolerance=0.01)


# --- slopes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slopes", [(-0.5, 0.3, 0.0), (-0.5, -0.2, -1.5), (0.0, 0.0, 0.0), (0.2, 0.0, 1.0)])
@pytest.mark.parametrize("encoding", [(0.031, 119, UINT8), (0.031, -100, INT8), (0.0002, 30000, UINT16)])
def test_slopes_of_any_sign_behind_a_layer(slopes, encoding):
    net = Net()
    x = net.qdq(net.input(["n", 3, 6, 6]), 0.05, 100)
    w, scale = net.weight((3, 3, 1, 1), 0)
    slope = net.const(np.float32(slopes).reshape(3, 1, 1))
    y = net.op("PRelu", net.op("Conv", x, w, net.bias(3, 0.05, scale)), slope)
    net.output(net.qdq(y, *encoding), ["n", 3, 6, 6])
    compare(net.model(), {"x": noise((2, 3, 6, 6))}, tolerance=0.02)


@pytest.mark.parametrize("form", ["codes", "function", "clipped", "computed slope"])
def test_slopes_wherever_a_value_comes_from(form):
    net = Net()
    x = net.qdq(net.input(["n", 8]), 0.05, 100)
    slope = net.const(np.linspace(-1, 1, 8, dtype=np.float32))
    if form == "function":
        x = net.op("Tanh", x)
    elif form == "clipped":
        x = net.op("Clip", net.op("Add", x, x), net.const(np.float32(-3)), net.const(np.float32(2)))
    elif form == "computed slope":
        slope = net.qdq(net.input([8], "z"), 0.02, 100)
    net.output(net.qdq(net.op("PRelu", x, slope), 0.03, 110), ["n", 8])
    feeds = {"x": noise((40, 8))} | ({"z": noise((8,), 1)} if form == "computed slope" else {})
    compare(net.model(), feeds, tolerance=0.02)


# --- numbers and tables in the size of what a run brings -------------------------------------------------------------


@pytest.mark.parametrize("number", [0.37, None])
def test_a_number_fills_what_only_a_run_knows_the_size_of(number):
    net = Net()
    x = net.qdq(net.input(["n", 5, 8]), 0.031, 119)
    attrs = {} if number is None else {"value": helper.make_tensor("number", TensorProto.FLOAT, [1], [number])}
    start = net.qdq(net.op("ConstantOfShape", sizes(net, x, 0, [2], [8]), **attrs), 0.04, 120)
    net.output(net.qdq(net.op("Concat", start, x, axis=1), 0.04, 120), ["n", 7, 8])
    result = compare(net.model(), {"x": noise((3, 5, 8))}, tolerance=0.0)
    assert result.report.summary["float_tensors"] == 0


def test_fixed_sizes_leave_the_codes_of_an_expanded_constant_to_the_conversion(tmp_path):
    """What is computed of sizes is stored; the Q/DQ pair behind it says what integers a product reads."""
    net = Net()
    x = net.qdq(net.input(["n", 8, 6]), 0.031, 119)
    queries = net.op("Expand", net.const(NUMBERS[:, :5]), sizes(net, x, 0, [5], [8]))
    y = net.op("MatMul", net.qdq(queries, 0.03, 120), x)
    net.output(net.qdq(y, 0.1, 120), ["n", 5, 6])
    for shapes in (None, {"x": (3, 8, 6)}):
        summary = to_integer(net.model(), tmp_path / "int.onnx", shapes=shapes).summary
        assert summary["operations_max_lsb"] <= 1
