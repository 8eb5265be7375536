"""Integer-only conversion to quantized kernels: QLinear* and QGemm in place of ConvInteger and integer arithmetic."""

import numpy as np
import pytest
from integer_models import INT4, INT8, LEVELS, UINT8, UINT16, Net, run, simulate, small_cnn
from onnx import TensorProto, helper

from onnx_backend.integer.convert import convert
from onnx_backend.integer.verify.integer_only import integer_findings


def compare(model, feeds, kinds, tolerance=0.002, **options):
    """Convert; every level agrees with the Q/DQ model within 1 LSB, mostly 0; `kinds` are the kernels expected."""
    result = convert(model, **options)
    assert integer_findings(result.model, kernels=True) == []
    assert integer_findings(result.model) != []  # they are kernels with float scales, which only that exception allows
    found = {node.op_type for node in result.model.graph.node}
    assert set(kinds) <= found, found
    simulated = simulate(model, feeds)
    for level in LEVELS:
        for name, got in run(result.model, feeds, level).items():
            lsb = np.abs(
                np.rint((got.astype(np.float64) - simulated[name]) / result.certificate["outputs"][name]["scale"])
            )
            assert lsb.max() <= 1, f"{name} at {level}: {lsb.max()} LSB"
            assert (lsb > 0).mean() <= tolerance, f"{name} at {level}: {(lsb > 0).mean()}"
    return result


def uniform(shape, seed=1, reach=4.0):
    return np.random.default_rng(seed).uniform(-reach, reach, shape).astype(np.float32)


ORT = {"target": "onnxruntime"}


@pytest.mark.parametrize("dtype", [UINT8, INT8])
@pytest.mark.parametrize("bias", [False, True])
def test_conv_becomes_one_kernel(dtype, bias):
    net = Net()
    zero = 117 if dtype == UINT8 else -11
    x = net.qdq(net.input([2, 8, 9, 9]), 0.031, zero, dtype)
    weight, scale = net.weight((16, 4, 3, 3), 0)
    tail = [net.bias(16, 0.031, scale)] if bias else []
    y = net.op("Relu", net.op("Conv", x, weight, *tail, group=2, pads=[1] * 4))
    net.output(net.qdq(y, 0.029, zero, dtype), [2, 16, 9, 9])
    result = compare(net.model(), {"x": uniform([2, 8, 9, 9])}, ["QLinearConv", "Clip"], **ORT)
    assert "ConvInteger" not in {n.op_type for n in result.model.graph.node}


@pytest.mark.parametrize("shape", [[5, 12], [2, 5, 12], [2, 2, 5, 12]])
@pytest.mark.parametrize("bias", [False, True])
def test_matmul_with_and_without_bias(shape, bias):
    net = Net()
    x = net.qdq(net.input(["n", *shape[1:]]), 0.031, 117)
    weight, scale = net.weight((12, 10), 1)
    y = net.op("MatMul", x, weight)
    if bias:
        y = net.op("Add", y, net.bias(10, 0.031, scale))
    net.output(net.qdq(y, 0.02, 119), ["n", *shape[1:-1], 10])
    kind = "QGemm" if bias else "QLinearMatMul"
    compare(net.model(), {"x": uniform(shape)}, [kind], **ORT)


def test_weights_of_four_bits_and_one_scale():
    net = Net()
    x = net.qdq(net.input([2, 8, 5, 5]), 0.031, 117)
    weight, _ = net.weight((6, 8, 3, 3), None, INT4)
    net.output(net.qdq(net.op("Conv", x, weight), 0.02, 119), [2, 6, 3, 3])
    compare(net.model(), {"x": uniform([2, 8, 5, 5])}, ["QLinearConv"], **ORT)


@pytest.mark.parametrize(("op", "kind"), [("Add", "QLinearAdd"), ("Sub", "QLinearAdd"), ("Mul", "QLinearMul")])
@pytest.mark.parametrize("dtypes", [(UINT8, UINT8), (INT8, UINT8), (INT8, INT8)])
def test_two_activations_exhaustively(op, kind, dtypes):
    scales = {UINT8: (0.0311, 117), INT8: (0.0273, -9)}
    net = Net()
    shapes = {"a": [256, 1], "c": [1, 256]}
    sides = [net.qdq(net.input(shapes[n], n), *scales[d], d) for n, d in zip("ac", dtypes, strict=True)]
    net.output(net.qdq(net.op(op, *sides), 0.0719, 131), [256, 256])
    feeds = {}
    for name, dtype in zip("ac", dtypes, strict=True):
        scale, zero = scales[dtype]
        codes = np.arange(256) - (0 if dtype == UINT8 else 128)
        feeds[name] = ((codes - zero) * np.float32(scale)).astype(np.float32).reshape(shapes[name])
    compare(net.model(), feeds, [kind], tolerance=0.0005, **ORT)


def test_matmul_of_two_activations():
    net = Net()
    a = net.qdq(net.input([2, 7, 16], "a"), 0.031, 117)
    c = net.qdq(net.input([2, 16, 9], "c"), 0.027, 121)
    scaled = net.op("Mul", net.op("MatMul", a, c), net.const(np.float32(0.25)))
    net.output(net.qdq(scaled, 0.07, 128), [2, 7, 9])
    feeds = {"a": uniform([2, 7, 16]), "c": uniform([2, 16, 9], 2)}
    compare(net.model(), feeds, ["QLinearMatMul"], **ORT)


@pytest.mark.parametrize("case", ["global", "mean", "mean without dims", "average"])
def test_pools(case):
    net = Net()
    x = net.qdq(net.input([2, 6, 8, 8]), 0.031, 117)
    axes = net.const(np.array([2, 3], np.int64))
    shape = [2, 6, 1, 1]
    if case == "global":
        y, kind = net.op("GlobalAveragePool", x), "QLinearGlobalAveragePool"
    elif case == "average":
        y, kind = net.op("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2]), "QLinearAveragePool"
        shape = [2, 6, 4, 4]
    else:
        y, kind = net.op("ReduceMean", x, axes, keepdims=int(case == "mean")), "QLinearGlobalAveragePool"
        shape = shape if case == "mean" else [2, 6]
    net.output(net.qdq(y, 0.013, 120), shape)
    compare(net.model(), {"x": uniform([2, 6, 8, 8])}, [kind], tolerance=0.02, **ORT)


@pytest.mark.parametrize(("op", "kind"), [("Sigmoid", "QLinearSigmoid"), ("LeakyRelu", "QLinearLeakyRelu")])
def test_functions_that_have_a_kernel(op, kind):
    net = Net()
    x = net.qdq(net.input([256]), 0.041, 117)
    net.output(net.qdq(net.op(op, x), 0.011, 25), [256])
    compare(net.model(), {"x": ((np.arange(256) - 117) * np.float32(0.041)).astype(np.float32)}, [kind], **ORT)


def test_functions_that_have_none_stay_tables():
    net = Net()
    x = net.qdq(net.input([256]), 0.041, 117)
    y = net.qdq(net.op("Tanh", x), 0.0079, 128)
    net.output(
        net.qdq(
            net.op("Conv", net.op("Reshape", y, net.const(np.array([1, 256, 1, 1]))), net.weight((3, 256, 1, 1), 0)[0]),
            0.01,
            128,
        ),
        [1, 3, 1, 1],
    )
    compare(net.model(), {"x": uniform([256])}, ["GatherElements", "QLinearConv"], tolerance=0.5, **ORT)


def test_concat_takes_its_parts_to_one_encoding():
    net = Net()
    a = net.qdq(net.input([2, 3, 4], "a"), 0.031, 117)
    c = net.qdq(net.input([2, 5, 4], "c"), 0.027, 121, UINT8)
    net.output(net.qdq(net.op("Concat", a, c, axis=1), 0.031, 117), [2, 8, 4])
    feeds = {"a": uniform([2, 3, 4]), "c": uniform([2, 5, 4], 2)}
    result = compare(net.model(), feeds, ["QLinearConcat"], tolerance=0.0, **ORT)
    assert not {"GatherElements", "Concat"} & {node.op_type for node in result.model.graph.node}


@pytest.fixture
def saturating(monkeypatch):
    """A processor whose kernels add pairs of products in 16 bits."""
    monkeypatch.setattr("onnx_backend.integer.convert.products_saturate", lambda: True)


@pytest.mark.usefixtures("saturating")
def test_a_weight_is_int8_only_where_no_pair_of_products_saturates():
    stored = {}
    for top in (64, 127):
        net = Net()
        x = net.qdq(net.input([1, 8, 4, 4]), 0.031, 0)
        values = np.full((4, 8, 1, 1), top, np.int8)
        weight = net.op("DequantizeLinear", net.const(values), net.const(np.float32(0.01)))
        net.output(net.qdq(net.op("Conv", x, weight), 1.0, 0), [1, 4, 4, 4])
        feeds = {"x": np.full([1, 8, 4, 4], 0.031 * 255, np.float32)}
        model = (
            compare(net.model(), feeds, ["QLinearConv"], **ORT).model
            if top == 64
            else convert(net.model(), **ORT).model
        )
        np.testing.assert_allclose(run(model, feeds)["y"], simulate(net.model(), feeds)["y"])
        node = next(n for n in model.graph.node if n.op_type == "QLinearConv")
        stored[top] = next(t.data_type for t in model.graph.initializer if t.name == node.input[3])
    assert stored == {64: INT8, 127: UINT8}


@pytest.mark.parametrize("dtype", [UINT8, INT8])
def test_a_whole_network(dtype):
    model = small_cnn(dtype=dtype)
    feeds = {"x": uniform([4, 3, 12, 12])}
    result = convert(model, **ORT)
    assert integer_findings(result.model, kernels=True) == []
    simulated = simulate(model, feeds)["y"]
    for level in LEVELS:
        found = run(result.model, feeds, level)["y"]
        assert np.abs(found - simulated).max() <= 3.5 * result.certificate["outputs"]["y"]["scale"]
    forms = {row["form"] for row in result.certificate["requantizations"]}
    assert "QLinearConv" in forms


def test_an_operator_of_the_runtime_that_requantizes_nothing_is_no_integer_kernel():
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("Gelu", ["x"], ["y"], "curve", domain="com.microsoft")],
            "foreign",
            *([helper.make_tensor_value_info(name, TensorProto.INT32, [4])] for name in "xy"),
        ),
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
    )
    kinds = [(finding.kind, finding.where) for finding in integer_findings(model, kernels=True)]
    assert ("domain", "curve") in kinds


@pytest.mark.parametrize("constant", [0.0, 0.8])
def test_a_pool_that_a_constant_is_added_to_keeps_it(constant):
    net = Net()
    x = net.qdq(net.input([2, 3, 6, 6]), 0.031, 117)
    pooled = net.op("AveragePool", x, kernel_shape=[2, 2])
    net.output(net.qdq(net.op("Add", pooled, net.const(np.float32(constant))), 0.02, 100), [2, 3, 5, 5])
    feeds = {"x": uniform([2, 3, 6, 6])}
    found, wanted = (
        make(net.model())["y"] for make in (lambda m: run(convert(m, **ORT).model, feeds), lambda m: simulate(m, feeds))
    )
    assert np.abs(found - wanted).max() <= 0.02 * 1.01
    assert np.abs(wanted).max() > 1.0


def test_sixteen_bits_keep_their_integer_form():
    wide, narrow = (1.3e-4, 31007, UINT16), (0.031, 117, UINT8)
    for first, second in ((wide, narrow), (narrow, wide), (wide, wide)):
        net = Net()
        x = net.qdq(net.input([2, 8, 5, 5]), *first)
        y = net.qdq(net.op("Conv", x, net.weight((8, 8, 1, 1), 0)[0]), *second)
        y = net.qdq(net.op("Sigmoid", net.qdq(net.op("Mul", net.op("Relu", x), y), *first)), *second)
        y = net.qdq(net.op("Concat", net.qdq(net.op("Add", x, y), *first), y, axis=1), *second)
        net.output(net.qdq(net.op("GlobalAveragePool", y), *first), [2, 16, 1, 1])
        feeds = {"x": uniform([2, 8, 5, 5])}
        model = convert(net.model(), **ORT).model
        assert integer_findings(model, kernels=True) == []
        found, wanted = run(model, feeds)["y"], simulate(net.model(), feeds)["y"]
        assert np.abs(found - wanted).max() <= max(first[0], second[0] / 10) * 1.01


def silu(scale, zero, *, between):
    """x * sigmoid(x) of every code, the sigmoid with a quantizer of its own or not."""
    net = Net()
    x = net.qdq(net.input([256]), 0.05, 100)
    gate = net.op("Sigmoid", x)
    gate = net.qdq(gate, 1 / 256, 0) if between else gate
    net.output(net.qdq(net.op("Mul", x, gate), scale, zero), [256])
    return net.model(), {"x": ((np.arange(256) - 100) * np.float32(0.05)).astype(np.float32)}


@pytest.mark.parametrize("between", [False, True])
def test_silu_is_two_kernels_within_one_step(between):
    model, feeds = silu(0.033, 9, between=between)
    result = compare(model, feeds, ["QLinearSigmoid", "QLinearMul"], tolerance=0.2, **ORT)
    assert "GatherElements" not in {node.op_type for node in result.model.graph.node}
    if not between:
        (row,) = result.certificate["requantizations"]
        off = run(result.model, feeds)["y"] != simulate(model, feeds)["y"]
        assert row["codes_differing"] == np.count_nonzero(off) > 0  # the input holds every code once


@pytest.mark.parametrize(
    ("encoding", "form"), [((0.03, 13), "QLinearConcat, Clip, QLinearMul"), ((0.002, 200), "table")]
)
def test_hard_swish_is_kernels_within_one_step_where_8_bits_for_its_gate_are_enough(encoding, form):
    net = Net()
    net.output(net.qdq(net.op("HardSwish", net.qdq(net.input([256]), 0.05, 100)), *encoding), [256])
    feeds = {"x": ((np.arange(256) - 100) * np.float32(0.05)).astype(np.float32)}
    result = convert(net.model(), **ORT)
    (row,) = result.certificate["requantizations"]
    off = np.abs(run(result.model, feeds)["y"] - simulate(net.model(), feeds)["y"]) / encoding[0]
    assert off.max() < 1.01
    assert (row["form"], row.get("codes_differing", 0)) == (form, np.count_nonzero(off))


def test_silu_stays_a_table_where_8_bits_for_its_sigmoid_are_not_enough():
    model, feeds = silu(0.002, 140, between=False)
    result = convert(model, **ORT)
    assert [row["form"] for row in result.certificate["requantizations"]] == ["table"]
    np.testing.assert_array_equal(run(result.model, feeds)["y"], simulate(model, feeds)["y"])


def test_a_function_of_a_table_is_one_table_of_what_that_reads():
    model, feeds = silu(0.033, 9, between=True)
    result = convert(model)
    assert [row["form"] for row in result.certificate["requantizations"]] == ["table"]
    assert "Mul" not in {node.op_type for node in result.model.graph.node}
    np.testing.assert_array_equal(run(result.model, feeds)["y"], simulate(model, feeds)["y"])


@pytest.mark.parametrize(("saturate", "weights", "dtype"), [(True, "unsigned", UINT8), (False, "signed", INT8)])
def test_weights_are_what_the_kernels_of_this_processor_add_up_exactly(monkeypatch, saturate, weights, dtype):
    net, layer = Net(), np.random.default_rng(3).integers(-128, 128, (8, 8, 3, 3))
    x = net.qdq(net.input([1, 8, 6, 6]), 0.05, 100)
    weight = net.op("DequantizeLinear", net.const(layer.astype(np.int8)), net.const(np.float32(0.01)))
    net.output(net.qdq(net.op("Conv", x, weight), 0.9, 128), [1, 8, 4, 4])
    monkeypatch.setattr("onnx_backend.integer.convert.products_saturate", lambda: saturate)
    made = convert(net.model(), **ORT)
    assert made.certificate["weights"] == weights
    (kernel,) = (node for node in made.model.graph.node if node.op_type == "QLinearConv")
    stored = next(t for t in made.model.graph.initializer if t.name == kernel.input[3])
    assert stored.data_type == dtype


def bent_layer(op, kind, slopes, dtype=UINT8, *, edge=0):
    """A layer with a LeakyRelu or PRelu; the first channel's weights are the extreme codes where `edge` says so."""
    net = Net()
    conv = kind == "Conv"
    x = net.qdq(net.input([2, 4, 9, 9] if conv else [7, 12]), 0.031, 117 if dtype == UINT8 else -11, dtype)
    shape, axis = ((6, 4, 3, 3), 0) if conv else ((12, 6), 1)
    codes = net.rng.integers(-127, 128, shape).astype(np.int8)
    codes[0 if conv else slice(None), 0] = edge or codes[0 if conv else slice(None), 0]
    scale = net.rng.uniform(0.001, 0.002, 6).astype(np.float32)
    weight = net.op("DequantizeLinear", net.const(codes, "weight"), net.const(scale), axis=axis)
    bias = net.bias(6, 0.031, scale)
    y = net.op("Conv", x, weight, bias) if conv else net.op("Gemm", x, weight, bias)
    if op == "LeakyRelu":
        y = net.op(op, y, alpha=slopes[0])
    else:
        y = net.op(op, y, net.const(np.float32(slopes).reshape((-1, 1, 1) if conv else -1)))
    net.output(net.qdq(y, 0.011, 90 if dtype == UINT8 else -38, dtype), [2, 6, 7, 7] if conv else [7, 6])
    return net.model(), {"x": uniform([2, 4, 9, 9] if conv else [7, 12])}


@pytest.mark.usefixtures("saturating")
@pytest.mark.spread(6)
@pytest.mark.parametrize("dtype", [UINT8, INT8])
@pytest.mark.parametrize("kind", ["Conv", "Gemm"])
@pytest.mark.parametrize(
    ("op", "slopes"),
    [
        ("LeakyRelu", [0.1]),
        ("LeakyRelu", [1.0]),
        ("LeakyRelu", [1.7]),
        ("LeakyRelu", [-0.4]),
        ("LeakyRelu", [0.0]),
        ("PRelu", [0.25, 0.01, 1.0, 0.0, -0.3, -1.2]),
    ],
)
def test_a_slope_behind_a_layer_is_the_extreme_of_two_kernels(op, slopes, kind, dtype):
    model, feeds = bent_layer(op, kind, slopes, dtype)
    layer = "QLinearConv" if kind == "Conv" else "QGemm"
    result = compare(model, feeds, [layer, "Min" if slopes[0] > 1 else "Max"], **ORT)
    ops = [node.op_type for node in result.model.graph.node]
    assert ops.count(layer) + ops.count("QLinearMatMul") == 2  # without a bias, which a slope of 0 takes away
    assert not {"ConvInteger", "MatMulInteger", "Cast"} & set(ops)
    assert all(row["error_bound"] < 1e-3 for row in result.certificate["requantizations"])


@pytest.mark.usefixtures("saturating")
def test_slopes_on_both_sides_of_one_add_their_parts():
    model, feeds = bent_layer("PRelu", "Conv", [0.2, 1.6, 0.1, 2.5, 0.0, 1.0])
    result = compare(model, feeds, ["QLinearConv"], **ORT)
    assert not {"Max", "Min"} & {node.op_type for node in result.model.graph.node}


@pytest.mark.usefixtures("saturating")
def test_the_largest_weights_of_a_channel_whose_slope_is_negative_change_their_sign():
    """-128 becomes 128, which is stored as uint8; beside 127 and -127 of other channels that is the whole grid."""
    model, feeds = bent_layer("PRelu", "Conv", [-0.3, 0.2, 0.2, 0.2, 0.2, 0.2], edge=-128)
    feeds = {"x": np.full([2, 4, 9, 9], -0.031 * 117, np.float32)}  # every sum is the largest that there is
    result = compare(model, feeds, ["QLinearConv", "Max"], **ORT)
    assert [node.op_type for node in result.model.graph.node].count("QLinearConv") == 2
