"""The integer-only conversion: exact requantization, every op against its Q/DQ model, refusals, edges, the checker."""

import json
import re
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from integer_comparison import ENCODINGS, ROUNDINGS, compare, exact, grid, noise, refused
from integer_models import INT4, INT8, LEVELS, UINT4, UINT8, Net, run, simulate, small_cnn
from onnx import ModelProto, TensorProto, checker, helper, numpy_helper

from onnx_backend.integer.codegen.expand import expand
from onnx_backend.integer.convert import convert
from onnx_backend.integer.ir.builder import Builder, requantize
from onnx_backend.integer.ir.values import ActivationEncoding, Linear, Term
from onnx_backend.integer.reference.run import run_reference
from onnx_backend.integer.verify.integer_only import integer_findings, require_integer_only
from qsdk import ConfigError, IntegerError

MANTISSAS = [2**30, 2**30 + 1, 3 * 2**29, 2**31 - 1, 2**31 - 2, 1518500250, 1234567891]


# --- the emitted requantization against big integers -----------------------------------------------------------------


def worst_accumulators(shift, mantissa, bound):
    """Extremes, and the accumulators that tie (results odd and even, both signs) with their neighbours."""
    factors = shift - 1 - ((mantissa & -mantissa).bit_length() - 1)
    ties = [] if factors < 0 else [sign * odd << factors for odd in (1, 3, 5, 7) for sign in (1, -1)]
    values = [bound, bound - 1, -bound, -bound + 1, 0, 1, -1, 3, -3, 2**20 + 1, -(2**20) - 1]
    values += [tie + step for tie in ties for step in (-1, 0, 1)]
    return [v if -bound <= v <= bound else 0 for v in values] + [0] * (35 - len(values))


def recipe_model(shift, bound, rounding, zero_point):
    """The requantization of an int32 tensor (accumulators, channels) with one mantissa per channel."""
    builder = Builder(["acc", "y"], rounding)
    scale = np.ldexp(np.array(MANTISSAS, np.float64), -shift)
    lo, hi, zero = np.asarray(-bound), np.asarray(bound), np.zeros((), np.int64)
    value = Linear((Term("acc", scale, zero, lo, hi),), source="test")
    codes = requantize(builder, value, ActivationEncoding(1.0, zero_point, UINT8), "y_codes")
    nodes = expand(builder, {codes})
    nodes[-1].output[0] = "y"
    shape = [None, len(MANTISSAS)]
    graph = helper.make_graph(
        nodes,
        "recipe",
        [helper.make_tensor_value_info("acc", TensorProto.INT32, shape)],
        [helper.make_tensor_value_info("y", TensorProto.UINT8, shape)],
        builder.initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    checker.check_model(model, full_check=True)
    return model, builder.certificate[0]["rounding"]


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("bound", [2**31 - 1, 2**24 - 1])
def test_the_emitted_recipe_equals_big_integers_for_every_shift(rounding, bound):
    forms = set()
    for shift in range(1, 66):
        zero_point = (0, 128, 255, 37)[shift % 4]
        model, form = recipe_model(shift, bound, rounding, zero_point)
        forms.add(form)
        columns = [worst_accumulators(shift, mantissa, bound) for mantissa in MANTISSAS]
        wanted = [
            [min(max(exact(a * m, shift, rounding) + zero_point, 0), 255) for a in column]
            for column, m in zip(columns, MANTISSAS, strict=True)
        ]
        acc = np.array(columns, np.int32).T.copy()
        levels = LEVELS if shift % 8 == 0 else (LEVELS[0], LEVELS[-1])
        for found in [run(model, {"acc": acc}, level)["y"] for level in levels]:
            np.testing.assert_array_equal(found, np.array(wanted).T, err_msg=f"shift {shift}")
        np.testing.assert_array_equal(run_reference(model, {"acc": acc})["y"], np.array(wanted).T)
    proven = set() if rounding == "gemmlowp" else {"half_up"}
    assert forms == {rounding} | proven  # both the proven and the general form were exercised


def test_the_recipe_avoids_the_int64_ops_that_are_wrong():
    for shift in (1, 15, 31, 40, 62):
        model, _ = recipe_model(shift, 2**31 - 1, "half_even", 128)
        types = {t.name: t.data_type for t in model.graph.initializer}
        assert not {n.op_type for n in model.graph.node} & {"Sign", "Max", "Min"}
        for node in model.graph.node:
            if node.op_type == "Clip":
                assert types[node.input[1]] == TensorProto.INT32


# --- every op against its Q/DQ model ---------------------------------------------------------------------------------


CONVS = {
    "plain": ((2, 3, 9, 8), (6, 3, 3, 3), {}),
    "padded": ((2, 3, 9, 8), (6, 3, 3, 3), {"pads": [1, 1, 1, 1]}),
    "asymmetric pads": ((2, 3, 9, 8), (6, 3, 3, 2), {"pads": [0, 1, 2, 0], "strides": [2, 1]}),
    "dilated": ((2, 3, 11, 10), (4, 3, 3, 3), {"dilations": [2, 3], "pads": [2, 3, 2, 3]}),
    "groups": ((2, 4, 7, 7), (6, 2, 3, 3), {"group": 2, "pads": [1, 1, 1, 1]}),
    "depthwise": ((2, 4, 7, 7), (4, 1, 3, 3), {"group": 4, "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "pointwise": ((2, 4, 5, 5), (7, 4, 1, 1), {}),
    "same upper": ((2, 3, 8, 9), (4, 3, 3, 2), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "same lower": ((2, 3, 8, 9), (4, 3, 3, 2), {"auto_pad": "SAME_LOWER", "strides": [2, 2]}),
    "valid": ((2, 3, 8, 9), (4, 3, 3, 2), {"auto_pad": "VALID"}),
    "1d": ((2, 3, 20), (5, 3, 4), {"pads": [2, 1], "strides": [2]}),
}


@pytest.mark.parametrize("geometry", CONVS)
def test_conv_geometries(geometry):
    x_shape, w_shape, attrs = CONVS[geometry]
    net = Net()
    x = net.qdq(net.input(["n", *x_shape[1:]]), 0.031, 119)
    w, scale = net.weight(w_shape, 0)
    y = net.op("Conv", x, w, net.bias(w_shape[0], 0.031, scale), **attrs)
    net.output(net.qdq(y, 0.04, 121), [None] * len(x_shape))
    compare(net.model(), {"x": noise(x_shape)})


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("weights", ["int8", "int8_channel", "uint8", "uint8_channel", "int4", "int4_channel", "uint4"])
def test_conv_dtypes(encoding, weights):
    net = Net()
    x = net.qdq(net.input([2, 3, 9, 8]), **ENCODINGS[encoding])
    dtype = {"int8": INT8, "uint8": UINT8, "int4": INT4, "uint4": UINT4}[weights.split("_")[0]]
    high = 0.15 if dtype in (INT4, UINT4) else 0.01
    w, scale = net.weight((6, 3, 3, 3), 0 if "channel" in weights else None, dtype, high / 9, high)
    y = net.op("Conv", x, w, net.bias(6, 0.031, scale), pads=[1, 1, 1, 1])
    net.output(net.qdq(y, **{**ENCODINGS[encoding], "scale": 0.05}), [2, 6, 9, 8])
    result = compare(net.model(), {"x": noise((2, 3, 9, 8))})
    packed = [t for t in result.model.graph.initializer if t.data_type == TensorProto.UINT4]
    assert bool(packed) == (dtype in (INT4, UINT4))
    assert not [t for t in result.model.graph.initializer if t.data_type == TensorProto.INT8]


@pytest.mark.parametrize("activation", ["Relu", "Relu6", "odd grid", None])
@pytest.mark.parametrize("encoding", ["uint8", "int8"])
def test_supergroups_fold_into_the_clip(activation, encoding):
    net = Net()
    x = net.qdq(net.input([2, 3, 9, 8]), **ENCODINGS[encoding])
    w, scale = net.weight((6, 3, 3, 3), 0)
    y = net.op("Conv", x, w, net.bias(6, 0.031, scale))
    if activation == "Relu":
        y = net.op("Relu", y)
    elif activation:
        bounds = (0.0, 6.0) if activation == "Relu6" else (-1.03, 2.2)
        y = net.op("Clip", y, *(net.const(np.float32(bound)) for bound in bounds))
    net.output(net.qdq(y, **ENCODINGS[encoding]), [2, 6, 7, 6])
    result = compare(net.model(), {"x": noise((2, 3, 9, 8))})
    assert [row["form"] for row in result.certificate["requantizations"]] == ["fixed point"]


@pytest.mark.parametrize("bias", ["none", "float", "int32", "foreign scale"])
def test_conv_bias_forms(bias):
    net = Net()
    x = net.qdq(net.input([2, 3, 6, 6]), 0.031, 119)
    w, scale = net.weight((6, 3, 3, 3), 0)
    extra = {
        "none": list,
        "float": lambda: [net.const(noise(6, 1.0))],
        "int32": lambda: [net.bias(6, 0.031, scale)],
        "foreign scale": lambda: [net.bias(6, 0.031 * 7.3, scale)],
    }[bias]()
    net.output(net.qdq(net.op("Conv", x, w, *extra), 0.05, 130), [2, 6, 4, 4])
    compare(net.model(), {"x": noise((2, 3, 6, 6))})


@pytest.mark.parametrize("behind", ["Conv", "DequantizeLinear"])
def test_batch_normalization_that_was_not_folded(behind):
    net = Net()
    y = net.qdq(net.input([2, 4, 6, 6]), 0.031, 119)
    if behind == "Conv":
        w, scale = net.weight((4, 4, 3, 3), 0)
        y = net.op("Conv", y, w, net.bias(4, 0.031, scale), pads=[1] * 4)
    gain = net.const(np.array([0.7, -0.4, 0.0, 1.3], np.float32))
    others = [net.const(noise(4, 0.5)), net.const(noise(4, 0.5)), net.const(np.abs(noise(4)) + np.float32(0.5))]
    y = net.op("BatchNormalization", y, gain, *others)
    net.output(net.qdq(net.op("Relu", y), 0.0317, 0), [2, 4, 6, 6])
    compare(net.model(), {"x": noise((2, 4, 6, 6))})


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("channels", [True, False])
@pytest.mark.parametrize("relu", [True, False])
def test_gemm(transposed, channels, relu):
    net = Net()
    x = net.qdq(net.input(["n", 40]), 0.031, 119)
    shape, axis = ((12, 40), 0) if transposed else ((40, 12), 1)
    w, scale = net.weight(shape, axis if channels else None)
    y = net.op("Gemm", x, w, net.bias(12, 0.031, scale), transB=transposed)
    y = net.op("Relu", y) if relu else y
    net.output(net.qdq(y, 0.05, 130), [None, 12])
    compare(net.model(), {"x": noise((50, 40))})


def test_gemm_alpha_beta():
    net = Net()
    x = net.qdq(net.input([50, 40]), 0.031, 119)
    w, scale = net.weight((40, 12), 1)
    y = net.op("Gemm", x, w, net.bias(12, 0.031, scale), alpha=0.5, beta=2.0)
    net.output(net.qdq(y, 0.05, 130), [50, 12])
    compare(net.model(), {"x": noise((50, 40))})


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [INT8, INT4])
def test_matmul_with_bias_add_and_relu(bias, dtype):
    net = Net()
    x = net.qdq(net.input(["n", 5, 40]), 0.031, 119)
    w, scale = net.weight((40, 12), 1, dtype, *((1e-3, 1e-2) if dtype == INT8 else (1e-2, 1e-1)))
    y = net.op("MatMul", x, w)
    if bias:
        y = net.op("Relu", net.op("Add", net.bias(12, 0.031, scale), y))
    net.output(net.qdq(y, 0.05, 20), [None, 5, 12])
    compare(net.model(), {"x": noise((9, 5, 40))})


def test_matmul_of_a_transposed_stored_weight_and_of_a_constant_on_the_left():
    net = Net()
    x = net.qdq(net.input([50, 40]), 0.031, 119)
    w, _ = net.weight((12, 40), 0)
    y = net.qdq(net.op("MatMul", x, net.op("Transpose", w, perm=[1, 0])), 0.05, 130)
    left, _ = net.weight((7, 50))
    net.output(net.qdq(net.op("MatMul", left, y), 0.2, 130), [7, 12])
    compare(net.model(), {"x": noise((50, 40))})


def test_matmul_of_two_activations():
    net = Net()
    a = net.qdq(net.input(["n", 6, 20], "a"), 0.031, 119)
    c = net.qdq(net.input(["n", 20, 7], "c"), 0.027, -3, INT8)
    net.output(net.qdq(net.op("MatMul", a, c), 0.4, 130), [None, 6, 7])
    compare(net.model(), {"a": noise((4, 6, 20)), "c": noise((4, 20, 7), seed=1)})


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul"])
@pytest.mark.parametrize("dtypes", [(UINT8, UINT8, UINT8), (INT8, UINT8, INT8)])
def test_two_activations_exhaustively(op, dtypes):
    net = Net()
    zeros = {UINT8: 119, INT8: -7}
    a = net.qdq(net.input([256, 1], "a"), 0.031, zeros[dtypes[0]], dtypes[0])
    c = net.qdq(net.input([1, 256], "c"), 0.0173, zeros[dtypes[1]], dtypes[1])
    net.output(net.qdq(net.op(op, a, c), 0.043, zeros[dtypes[2]], dtypes[2]), [256, 256])
    feeds = {
        "a": grid(0.031, zeros[dtypes[0]], dtypes[0])[:, None],
        "c": grid(0.0173, zeros[dtypes[1]], dtypes[1])[None],
    }
    compare(net.model(), feeds)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_ties_follow_the_rounding(rounding):
    net = Net()
    a, c = (net.qdq(net.input([256, 1], "a"), 0.5, 128), net.qdq(net.input([1, 256], "c"), 0.25, 128))
    net.output(net.qdq(net.op("Add", a, c), 1.0, 128), [256, 256])
    feeds = {"a": grid(0.5, 128)[:, None], "c": grid(0.25, 128)[None]}
    result = convert(net.model(), rounding=rounding)
    sums = np.arange(256)[:, None] * 2 + np.arange(256)[None] - 384
    wanted = np.vectorize(lambda p: exact(int(p), 2, rounding))(sums).clip(-128, 127)
    for found in (run(result.model, feeds)["y"], run_reference(result.model, feeds)["y"]):
        np.testing.assert_array_equal(found, wanted)
    if rounding == "half_even":
        compare(net.model(), feeds, tolerance=0.0)
    row = result.certificate["requantizations"][0]
    assert row["ties_possible"]
    assert row["rounding"] == rounding


@pytest.mark.parametrize("activation", [None, "Relu", "Clip"])
def test_residual_add_with_supergroup(activation):
    net = Net()
    x = net.qdq(net.input([2, 4, 6, 6]), 0.031, 119)
    w, scale = net.weight((4, 4, 3, 3), 0)
    c = net.qdq(net.op("Conv", x, w, net.bias(4, 0.031, scale), pads=[1] * 4), 0.0517, 120)
    y = net.op("Add", c, x)
    if activation == "Relu":
        y = net.op("Relu", y)
    elif activation:
        y = net.op("Clip", y, net.const(np.float32(0)), net.const(np.float32(6)))
    net.output(net.qdq(y, 0.0413, 0 if activation else 120), [2, 4, 6, 6])
    compare(net.model(), {"x": noise((2, 4, 6, 6))})


def test_add_straight_onto_an_accumulator():
    net = Net()
    x = net.qdq(net.input([2, 4, 6, 6]), 0.031, 119)
    w, scale = net.weight((4, 4, 3, 3), 0)
    y = net.op("Add", net.op("Conv", x, w, net.bias(4, 0.031, scale), pads=[1] * 4), x)
    net.output(net.qdq(net.op("Relu", y), 0.04, 0), [2, 4, 6, 6])
    compare(net.model(), {"x": noise((2, 4, 6, 6))})


# a constant divided by an activation is no linear op, so Div is not flipped
@pytest.mark.parametrize(("op", "flipped"), [*product(["Add", "Sub", "Mul"], [True, False]), ("Div", False)])
@pytest.mark.parametrize("shape", [(), (4, 1, 1), (4, 6, 6)])
@pytest.mark.parametrize("quantized", [True, False])
def test_activation_with_constant(op, shape, quantized, flipped):
    net = Net()
    x = net.qdq(net.input([2, 4, 6, 6]), 0.031, 119)
    values = net.rng.uniform(0.5, 2.0, shape).astype(np.float32)
    if quantized:
        c = net.op("DequantizeLinear", net.const((values * 60).astype(np.uint8)), net.const(np.float32(1 / 60)))
    else:
        c = net.const(values)
    net.output(net.qdq(net.op(op, *((c, x) if flipped else (x, c))), 0.041, 110), [2, 4, 6, 6])
    compare(net.model(), {"x": noise((2, 4, 6, 6))})


def test_adding_a_mask_far_outside_the_range():
    net = Net()
    x = net.qdq(net.input([2, 6, 6]), 0.031, 119)
    mask = np.where(np.tri(6) > 0, 0, np.finfo(np.float32).min).astype(np.float32)
    net.output(net.qdq(net.op("Add", x, net.const(mask)), 0.031, 119), [2, 6, 6])
    compare(net.model(), {"x": noise((2, 6, 6))}, tolerance=0.0)


TABLES = {
    "Relu": ("Relu", {}),
    "Clip": ("Clip", {}),
    "Sigmoid": ("Sigmoid", {}),
    "Tanh": ("Tanh", {}),
    "HardSwish": ("HardSwish", {}),
    "HardSigmoid": ("HardSigmoid", {"alpha": 0.1666, "beta": 0.5}),
    "LeakyRelu": ("LeakyRelu", {"alpha": 0.1}),
    "Elu": ("Elu", {}),
    "Gelu": ("Gelu", {}),
    "Gelu tanh": ("Gelu", {"approximate": "tanh"}),
    "Softplus": ("Softplus", {}),
    "Abs": ("Abs", {}),
    "Neg": ("Neg", {}),
    "Exp": ("Exp", {}),
    "Erf": ("Erf", {}),
    "Softsign": ("Softsign", {}),
    "Selu": ("Selu", {}),
    "Celu": ("Celu", {"alpha": 0.7}),
    "Shrink": ("Shrink", {"lambd": 0.7, "bias": 0.2}),
    "ThresholdedRelu": ("ThresholdedRelu", {"alpha": 0.4}),
    "Sign": ("Sign", {}),
    "Floor": ("Floor", {}),
    "Ceil": ("Ceil", {}),
    "Round": ("Round", {}),
    "Atan": ("Atan", {}),
    "Sinh": ("Sinh", {}),
    "Cosh": ("Cosh", {}),
    "Asinh": ("Asinh", {}),
    "Tan": ("Tan", {}),
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("dtype", [UINT8, INT8])
def test_elementwise_functions_exhaustively(name, same, dtype):
    op, attrs = TABLES[name]
    zero = {UINT8: 119, INT8: -9}[dtype]
    net = Net()
    x = net.qdq(net.input(["n"]), 0.031, zero, dtype)
    bounds = [net.const(np.float32(v)) for v in (-1.0, 2.03)] if op == "Clip" else []
    net.output(
        net.qdq(net.op(op, x, *bounds, **attrs), *((0.031, zero) if same else (0.0231, zero + 3)), dtype), [None]
    )
    result = compare(net.model(), {"x": grid(0.031, zero, dtype)}, tolerance=0.01)
    if same and name in ("Relu", "Clip"):
        assert [row["form"] for row in result.certificate["requantizations"]] == ["clip"]


def test_a_function_written_in_several_ops_is_one_table():
    net = Net()
    x = net.qdq(net.input([256]), 0.031, 119)
    y = net.op("Mul", x, net.op("Sigmoid", x))  # SiLU without Q/DQ inside
    z = net.op("Clip", net.op("Add", x, net.const(np.float32(3))), net.const(np.float32(0)), net.const(np.float32(6)))
    z = net.op("Div", net.op("Mul", x, z), net.const(np.float32(6)))  # hard swish spelled out
    net.output(net.qdq(y, 0.02, 20), [256], "silu")
    net.output(net.qdq(z, 0.02, 20), [256], "hard_swish")
    result = compare(net.model(), {"x": grid(0.031, 119)}, tolerance=0.01)
    assert [row["form"] for row in result.certificate["requantizations"]] == ["table", "table"]


MOVES = {
    "Flatten": ([2, 4, 6, 6], [], {"axis": 1}, [2, 144]),
    "Reshape": ([2, 4, 6, 6], [[0, -1, 3]], {}, [2, 48, 3]),
    "Transpose": ([2, 4, 6, 6], [], {"perm": [0, 2, 3, 1]}, [2, 6, 6, 4]),
    "MaxPool": ([2, 4, 6, 6], [], {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 1]}, [2, 4, 3, 3]),
    "MaxPool ceil": ([2, 4, 6, 6], [], {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}, [2, 4, 3, 3]),
    "MaxPool dilated": ([2, 4, 9], [], {"kernel_shape": [3], "dilations": [2], "pads": [1, 1]}, [2, 4, 7]),
    "MaxPool same": ([2, 4, 7], [], {"kernel_shape": [3], "strides": [2], "auto_pad": "SAME_UPPER"}, [2, 4, 4]),
    "GlobalMaxPool": ([2, 4, 6, 6], [], {}, [2, 4, 1, 1]),
    "ReduceMax": ([2, 4, 6, 6], [[2, 3]], {"keepdims": 0}, [2, 4]),
    "Squeeze": ([2, 1, 6, 1], [[1, 3]], {}, [2, 6]),
    "Unsqueeze": ([2, 6], [[0, 3]], {}, [1, 2, 6, 1]),
    "Identity": ([2, 6], [], {}, [2, 6]),
    "Slice": ([2, 6, 5], [[4, 1], [-100, 4], [1, 2], [-2, 1]], {}, [2, 3, 3]),
    "Gather": ([2, 6, 5], [[3, 0, 1]], {"axis": 1}, [2, 3, 5]),
    "Expand": ([2, 1, 5], [[2, 3, 5]], {}, [2, 3, 5]),
    "Tile": ([2, 3], [[2, 2]], {}, [4, 6]),
    "Pad": ([2, 3, 4, 4], [[0, 0, 1, 2, 0, 0, 0, 1]], {}, [2, 3, 5, 7]),
    "Pad reflect": ([2, 3, 4, 4], [[0, 0, 1, 2, 0, 0, 0, 1]], {"mode": "reflect"}, [2, 3, 5, 7]),
    "Pad edge": ([2, 3, 4, 4], [[0, 0, 1, 2, 0, 0, 0, 1]], {"mode": "edge"}, [2, 3, 5, 7]),
}


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("behind", ["same", "different", "none", "accumulator", "input"])
def test_moves(name, behind):
    shape, extra, attrs, out = MOVES[name]
    net = Net()
    x = net.input(shape)
    if behind != "input":
        x = net.qdq(x, 0.031, 119)
    if behind == "accumulator":  # the move stands between the op and its QuantizeLinear
        x = net.op("Relu", net.op("Mul", x, net.const(net.rng.uniform(0.5, 1.5, shape).astype(np.float32))))
    y = net.op(name.split()[0], x, *(net.const(np.array(e, np.int64)) for e in extra), **attrs)
    if behind != "none":
        y = net.qdq(y, *((0.031, 119) if behind in ("same", "accumulator") else (0.047, 101)))
    net.output(y, out)
    result = compare(net.model(), {"x": noise(shape, 0.7)}, tolerance=0.01)
    wanted = {"same": [], "different": ["table"], "none": [], "accumulator": ["fixed point"], "input": []}[behind]
    assert [row["form"] for row in result.certificate["requantizations"]] == wanted


@pytest.mark.parametrize("fill", [0.0, 0.031 * 40])
def test_pad_with_a_constant_on_the_grid(fill):
    net = Net()
    x = net.qdq(net.input([2, 3, 4]), 0.031, 119)
    pads = net.const(np.array([1, 2], np.int64))
    y = net.op("Pad", x, pads, net.const(np.float32(fill)), net.const(np.array([2], np.int64)))
    net.output(net.qdq(y, 0.031, 119), [2, 3, 7])
    compare(net.model(), {"x": noise((2, 3, 4))}, tolerance=0.0)


def test_split_gives_every_output():
    net = Net()
    x = net.qdq(net.input([2, 7, 3]), 0.031, 119)
    a, c = net.op("Split", x, net.const(np.array([3, 4], np.int64)), outputs=2, axis=1)
    net.output(net.qdq(a, 0.031, 119), [2, 3, 3], "a")
    net.output(net.qdq(net.op("Relu", c), 0.02, 0), [2, 4, 3], "c")
    compare(net.model(), {"x": noise((2, 7, 3))})


@pytest.mark.parametrize("case", ["shared", "different", "accumulators", "shared without Q"])
def test_concat(case):
    net = Net()
    scales = (0.031, 119), (0.031, 119) if case.startswith("shared") else (0.024, 90)
    a, c = (net.qdq(net.input([2, 3, 4], n), *s) for n, s in zip("ac", scales, strict=True))
    if case == "accumulators":
        a, c = net.op("Relu", net.op("Add", a, c)), net.op("Mul", a, net.const(noise((3, 1), 1.0)))
    y = net.op("Concat", a, c, axis=1)
    if case != "shared without Q":
        y = net.qdq(y, 0.031, 119)
    net.output(y, [2, 6, 4])
    result = compare(net.model(), {"a": noise((2, 3, 4)), "c": noise((2, 3, 4), seed=1)})
    forms = {"different": ["table"], "accumulators": ["fixed point"] * 2}.get(case, [])
    assert [row["form"] for row in result.certificate["requantizations"]] == forms


ASSEMBLED = {
    "a Concat alone": (lambda net, y: y, [2, 3, 7]),
    "turned": (lambda net, y: net.op("Transpose", y, perm=[2, 0, 1]), [7, 2, 3]),
    "in another shape": (lambda net, y: net.op("Reshape", y, net.const(np.array([-1, 7]))), [6, 7]),
    "in another shape behind a turn": (
        lambda net, y: net.op("Reshape", net.op("Transpose", y, perm=[0, 2, 1]), net.const(np.array([2, 7, 3, 1]))),
        [2, 7, 3, 1],
    ),
    "twice": (lambda net, y: net.op("Concat", y, y, axis=1), [2, 6, 7]),
    "twice, then turned": (lambda net, y: net.op("Transpose", net.op("Concat", y, y, axis=0)), [7, 3, 4]),
    "with columns of whole numbers": (
        lambda net, y: net.op("Concat", y, net.const(np.arange(-2, 4, dtype=np.float32).reshape(2, 3, 1)), axis=2),
        [2, 3, 8],
    ),
}


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", ASSEMBLED)
def test_parts_that_leave_as_one_tensor_keep_their_own_encodings(name, wide):
    net, (moved, shape) = Net(), ASSEMBLED[name]
    boxes = net.qdq(net.input([2, 3, 4], "a"), 2.5, 100)
    scores = net.qdq(net.op("Sigmoid", net.qdq(net.input([2, 3, 3], "c"), 0.03, 120)), 1 / 255, 0)
    if wide:
        scores = net.qdq(scores, 1 / 65535, 0, TensorProto.UINT16)
    net.output(moved(net, net.op("Concat", boxes, scores, axis=2)), shape)
    feeds = {"a": noise((2, 3, 4), 200.0), "c": noise((2, 3, 3), seed=1)}
    result, wanted = convert(net.model()), simulate(net.model(), feeds)["y"]
    assert integer_findings(result.model) == []
    for level in LEVELS:
        np.testing.assert_array_equal(run(result.model, feeds, level)["y"], wanted)
    np.testing.assert_array_equal(run_reference(result.model, feeds)["y"], wanted)


def test_a_stored_part_of_what_leaves_has_16_bits_where_8_are_not_exact():
    net, column = Net(), np.linspace(-0.7, 3.3, 6, dtype=np.float32).reshape(2, 3, 1)
    boxes = net.qdq(net.input([2, 3, 4], "a"), 2.5, 100)
    net.output(net.op("Concat", boxes, net.const(column), axis=2), [2, 3, 5])
    feeds = {"a": noise((2, 3, 4), 200.0)}
    found, wanted = run(convert(net.model()).model, feeds)["y"], simulate(net.model(), feeds)["y"]
    np.testing.assert_array_equal(found[..., :4], wanted[..., :4])
    assert np.abs(found - wanted).max() <= 4.0 / 65535


@pytest.mark.parametrize(
    ("moved", "shape", "reason"),
    [
        (lambda net, y, z: net.op("Concat", y, z, axis=1), [2, 6, 7], "joined of several encodings along another axis"),
        (
            lambda net, y, z: net.op("Reshape", y, net.const(np.array([42]))),
            [42],
            "several encodings, which Reshape moves out of their axis",
        ),
        (
            lambda net, y, z: net.op("Concat", y, net.const(np.full((2, 3, 1), np.nan, np.float32)), axis=2),
            [2, 3, 8],
            "holds NaN",
        ),
        (
            lambda net, y, z: net.op("Concat", y, net.op("Sigmoid", y), axis=2),
            [2, 3, 14],
            "parts that are not all quantized",
        ),
    ],
)
def test_parts_that_no_axis_tells_apart_are_refused_without_advice_that_erases_one(moved, shape, reason):
    net = Net()
    first, second, third = (
        net.qdq(net.input([2, 3, size], name), scale)
        for name, size, scale in (("a", 4, 2.5), ("b", 3, 0.004), ("c", 7, 1.0))
    )
    y = moved(net, net.op("Concat", first, second, axis=2), third)
    net.output(y, shape)
    with pytest.raises(IntegerError, match=reason) as error:
        convert(net.model())
    assert "keep what joins and moves them float by allow_float=" in str(error.value)


POOLS = {
    "plain": {"kernel_shape": [2, 2], "strides": [2, 2]},
    "overlapping": {"kernel_shape": [3, 3], "strides": [2, 1]},
    "padded": {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]},
    "padded asymmetric": {"kernel_shape": [3, 2], "pads": [0, 1, 2, 0], "strides": [2, 2]},
    "counting pads": {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1},
    "dilated": {"kernel_shape": [2, 3], "dilations": [2, 2], "pads": [1, 1, 1, 1]},
    "same upper": {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"},
    "same lower": {"kernel_shape": [2, 2], "auto_pad": "SAME_LOWER"},
    "valid": {"kernel_shape": [3, 3], "auto_pad": "VALID"},
    "ceil that changes nothing": {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1},
}


@pytest.mark.parametrize("name", POOLS)
def test_average_pool(name):
    attrs = POOLS[name]
    net = Net()
    x = net.qdq(net.input(["n", 5, 8, 8]), 0.031, 119)
    net.output(net.qdq(net.op("AveragePool", x, **attrs), 0.0222, 111), [None] * 4)
    compare(net.model(), {"x": noise((3, 5, 8, 8))}, tolerance=0.005)


@pytest.mark.parametrize("form", ["GlobalAveragePool", "ReduceMean", "ReduceMean keepdims", "ReduceSum"])
def test_means(form):
    net = Net()
    x = net.qdq(net.input(["n", 5, 7, 7]), 0.031, -9, INT8)
    if form == "GlobalAveragePool":
        y, out = net.op(form, x), [None, 5, 1, 1]
    else:
        keep = int("keepdims" in form)
        axes = net.const(np.array([-2, 3], np.int64))
        y, out = net.op(form.split()[0], x, axes, keepdims=keep), [None, 5, *([1, 1] * keep)]
    net.output(net.qdq(y, 0.9 if form == "ReduceSum" else 0.0123, 3, INT8), out)
    compare(net.model(), {"x": noise((40, 5, 7, 7))}, tolerance=0.005)


def test_embedding_lookup_and_integer_inputs():
    net = Net()
    ids = net.input(["n", 5], "ids", TensorProto.INT64)
    table, _ = net.weight((11, 8))
    y = net.qdq(net.op("Gather", table, ids), 0.01, 120)
    w, _scale = net.weight((8, 6), 1)
    net.output(net.qdq(net.op("MatMul", y, w), 0.01, 120), [None, 5, 6])
    compare(net.model(), {"ids": np.random.default_rng(0).integers(0, 11, (3, 5))}, tolerance=0.01)


@pytest.mark.parametrize("dtype", [UINT8, INT8])
def test_models_that_already_take_and_give_integers(dtype):
    kind, zero = {UINT8: (np.uint8, 119), INT8: (np.int8, -9)}[dtype]
    net = Net()
    codes, scale = net.input([2, 3, 6, 6], dtype=dtype), np.float32(0.031)
    x = net.op("DequantizeLinear", codes, net.const(scale), net.const(kind(zero)))
    w, w_scale = net.weight((4, 3, 3, 3), 0)
    y = net.op("Conv", x, w, net.bias(4, scale, w_scale))
    y = net.op("QuantizeLinear", y, net.const(np.float32(0.05)), net.const(kind(zero)))
    net.output(y, [2, 4, 4, 4], dtype=dtype)
    x = np.random.default_rng(0).integers(np.iinfo(kind).min, np.iinfo(kind).max, (2, 3, 6, 6)).astype(kind)
    result = compare(net.model(), {"x": x})
    assert not [n for n in result.model.graph.node if "Linear" in n.op_type]


def test_rows_gathered_before_they_are_dequantized():
    net = Net()
    table = net.const(np.random.default_rng(0).integers(-128, 128, (11, 8)).astype(np.int8))
    rows = net.op("Gather", table, net.input([5], "ids", TensorProto.INT64))
    y = net.op("DequantizeLinear", rows, net.const(np.float32(0.01)), net.const(np.int8(3)))
    net.output(net.qdq(net.op("Relu", y), 0.0113, 0), [5, 8])
    compare(net.model(), {"ids": np.array([3, 0, 10, 3, 7])})


def test_shape_arithmetic_passes_unchanged():
    net = Net()
    x = net.qdq(net.input(["n", 4, 6]), 0.031, 119)
    batch = net.op("Gather", net.op("Shape", x), net.const(np.array([0], np.int64)))
    rest = net.op("Mul", net.const(np.array([12], np.int64)), net.const(np.array([2], np.int64)))
    y = net.op("Reshape", x, net.op("Concat", batch, rest, axis=0))
    net.output(net.qdq(y, 0.031, 119), [None, 24])
    result = compare(net.model(), {"x": noise((3, 4, 6))}, tolerance=0.0)
    assert run(result.model, {"x": noise((5, 4, 6))})["y"].shape == (5, 24)


def test_argmax_leaves_as_an_integer():
    net = Net()
    x = net.qdq(net.input([50, 9]), 0.031, 119)
    net.output(net.op("ArgMax", x, axis=1, keepdims=0), [50], dtype=TensorProto.INT64)
    compare(net.model(), {"x": noise((50, 9))}, tolerance=0.0)


@pytest.mark.parametrize("dtype", [UINT4, INT4])
def test_activations_of_four_bits(dtype):
    zero = {UINT4: 7, INT4: -1}[dtype]
    net = Net()
    x = net.qdq(net.input([2, 3, 9, 8]), 0.4, zero, dtype)
    w, scale = net.weight((6, 3, 3, 3), 0, INT4, 0.01, 0.1)
    y = net.op("Conv", x, w, net.bias(6, 0.4, scale))
    net.output(net.qdq(y, 0.6, zero, dtype), [2, 6, 7, 6])
    compare(net.model(), {"x": noise((2, 3, 9, 8))})


def test_float_weights_behind_quantize_dequantize():
    net = Net()
    x = net.qdq(net.input([2, 3, 6, 6]), 0.031, 119)
    scale = net.const(net.rng.uniform(0.004, 0.01, 4).astype(np.float32))
    zero = net.const(np.zeros(4, np.int8))
    w = net.const(noise((4, 3, 3, 3), 0.3))
    w = net.op("DequantizeLinear", net.op("QuantizeLinear", w, scale, zero, axis=0), scale, zero, axis=0)
    net.output(net.qdq(net.op("Conv", x, w), 0.05, 120), [2, 4, 4, 4])
    compare(net.model(), {"x": noise((2, 3, 6, 6))})


def test_one_accumulator_with_two_quantizers_and_an_input_with_two_readers():
    net = Net()
    x = net.input([2, 3, 6, 6])
    first, second = net.qdq(x, 0.031, 119), net.qdq(x, 0.031, 119)
    w, scale = net.weight((4, 3, 3, 3), 0)
    y = net.op("Conv", first, w, net.bias(4, 0.031, scale))
    net.output(net.qdq(y, 0.05, 120), [2, 4, 4, 4], "a")
    net.output(net.qdq(net.op("Relu", y), 0.02, 0), [2, 4, 4, 4], "b")
    net.output(net.qdq(net.op("Relu", second), 0.02, 0), [2, 3, 6, 6], "c")
    result = compare(net.model(), {"x": noise((2, 3, 6, 6))})
    assert sum(n.op_type == "QuantizeLinear" for n in result.model.graph.node) == 1
    assert sum(n.op_type == "ConvInteger" for n in result.model.graph.node) == 1


# --- whole models, edges, certificate --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [UINT8, INT8])
@pytest.mark.parametrize("activation", ["relu", "relu6"])
def test_small_cnn(dtype, activation):
    model = small_cnn(1, dtype=dtype, activation=activation)
    for batch in (1, 7):
        result = compare(model, {"x": noise((batch, 3, 12, 12), 1.0)}, tolerance=0.2)  # rounding noise compounds
    domains = {node.domain for node in result.model.graph.node}
    assert domains == {""}
    edges = [n.op_type for n in result.model.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert edges == ["QuantizeLinear", "DequantizeLinear"]


@pytest.mark.parametrize("dtype", [UINT8, INT8])
def test_every_site_of_the_cnn_is_teacher_forced_within_one_lsb(dtype):
    """Each op alone: cut the Q/DQ model at every DequantizeLinear and convert the piece between two of them."""
    model = small_cnn(2, dtype=dtype)
    result = convert(model)
    reference = run_reference(result.model, {"x": noise((4, 3, 12, 12), 1.0)}, every_tensor=True)
    quantizers = [n for n in model.graph.node if n.op_type == "QuantizeLinear"]
    shift = 128 if dtype == INT8 else 0
    feeds, checked = {"x": noise((4, 3, 12, 12), 1.0)}, 0
    for node in quantizers:
        if node.output[0] in reference:
            codes = reference[node.output[0]].astype(np.int64) - shift
            feeds[node.output[0]] = codes.astype({UINT8: np.uint8, INT8: np.int8}[dtype])
    forced = ModelProto()  # every quantized tensor becomes an input, so each op sees the integer model's own codes
    forced.CopyFrom(model)
    del forced.graph.node[:], forced.graph.output[:]
    for node in model.graph.node:
        copy = forced.graph.node.add()
        copy.CopyFrom(node)
        if node.op_type == "QuantizeLinear" and node.output[0] in feeds:
            copy.output[0] = f"{node.output[0]}.own"
            forced.graph.output.append(helper.make_tensor_value_info(copy.output[0], dtype, None))
            forced.graph.input.append(helper.make_tensor_value_info(node.output[0], dtype, None))
    own = simulate(forced, feeds)
    for name, found in own.items():
        lsb = np.abs(found.astype(np.int64) - feeds[name.removesuffix(".own")])
        assert lsb.max() <= 1, name
        assert (lsb > 0).mean() < 0.01, name
        checked += 1
    assert checked >= 9


@pytest.mark.parametrize("dtype", [UINT8, INT8])
def test_integer_edges(dtype):
    model = small_cnn(1, dtype=dtype)
    by_float, by_integer = convert(model), convert(model, edges="integer")
    assert integer_findings(by_integer.model, edges="integer") == []
    meta = {p.key: p.value for p in by_integer.model.metadata_props}
    x = noise((3, 3, 12, 12), 1.0)
    scale, zero = (np.float32(meta["qsdk.input.x.scale"]), int(meta["qsdk.input.x.zero_point"]))
    assert (scale, zero) == (np.float32(0.0313), 117 if dtype == UINT8 else -9)
    kind = {UINT8: np.uint8, INT8: np.int8}[dtype]
    codes = (np.rint(x / scale) + zero).clip(np.iinfo(kind).min, np.iinfo(kind).max).astype(kind)
    found = run(by_integer.model, {"x": codes})["y"]
    assert found.dtype == kind
    np.testing.assert_array_equal(found, run_reference(by_integer.model, {"x": codes})["y"])
    scale, zero = (np.float32(meta["qsdk.output.y.scale"]), int(meta["qsdk.output.y.zero_point"]))
    values = (found.astype(np.float32) - zero) * scale
    np.testing.assert_array_equal(values, run(by_float.model, {"x": x})["y"])
    assert [i.name for i in by_integer.model.graph.input] == ["x"]
    assert [o.name for o in by_integer.model.graph.output] == ["y"]


def test_certificate_and_report_are_plain_and_complete():
    model = small_cnn(1)
    result = convert(model)
    json.dumps(result.certificate)
    json.dumps(result.report.to_dict())
    assert result.report.summary["float_tensors"] == 0
    assert result.report.summary["quantize_nodes"] == 0
    assert result.report.summary["max_lsb"] is None
    rows = {row["node"]: row for row in result.certificate["requantizations"]}
    conv = next(n.name for n in model.graph.node if n.op_type == "Conv")
    row = rows[conv]
    assert row["op_type"] == "Conv"
    assert row["input_zero_points"] == [117]
    assert row["weight_zero_point"] == 128
    assert len(row["multipliers"][0]) == len(row["mantissas"][0]) == len(row["shifts"]) == 8
    np.testing.assert_allclose(
        np.ldexp(np.array(row["mantissas"][0], float), -np.array(row["shifts"])), row["multipliers"][0]
    )
    tensors = {name for node in result.model.graph.node for name in node.output}
    assert {row["tensor"] for row in result.certificate["requantizations"]} <= tensors


def test_conversion_is_deterministic():
    assert convert(small_cnn(1)).model.SerializeToString() == convert(small_cnn(1)).model.SerializeToString()


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"target": "tflite"}, 'choose "standard", "onnxruntime" or "portable"'),
        ({"edges": "none"}, '"float" or "integer"'),
        ({"rounding": "up"}, "half_even"),
    ],
)
def test_unknown_options(option, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        convert(small_cnn(), **option)


def test_every_refused_node_is_listed_with_reason_and_remedy():
    net = Net()
    x = net.qdq(net.input([2, 4, 6, 6]), 0.031, 119)
    hardest = net.qdq(net.op("Hardmax", x), 0.004, 0)
    float_conv = net.qdq(net.op("Conv", hardest, net.const(noise((4, 4, 1, 1)))), 0.05, 120)
    w, _ = net.weight((4, 4, 3, 3), 0)
    net.output(net.qdq(net.op("Round", net.op("Conv", float_conv, w)), 0.004, 0), [2, 4, 4, 4])
    model = net.model()
    message = refused(model, "3 nodes cannot be made integer-only", "no integer form", "weight is float")
    for op in ("Hardmax", "Conv", "Round"):
        assert re.search(rf"{op} 'node_{op.lower()}_\d+': .+; .+", message), message


def test_an_unquantized_output_is_refused():
    net = Net()
    x = net.qdq(net.input([2, 8]), 0.031, 119)
    w, _ = net.weight((8, 4), 1)
    net.output(net.op("MatMul", x, w), [2, 4], "logits")
    refused(net, "'logits'", "leaves the model unquantized")


def test_an_unquantized_input_is_refused():
    net = Net()
    w, _ = net.weight((8, 4), 1)
    net.output(net.qdq(net.op("MatMul", net.input([2, 8]), w), 0.1, 3), [2, 4])
    refused(net, "MatMul 'node_matmul", "its input is a float tensor", "QuantizeLinear/DequantizeLinear pair")


def test_a_float_op_on_the_input_is_refused():
    net = Net()
    net.output(net.qdq(net.op("Sqrt", net.input([2, 8])), 0.1, 3), [2, 8])
    refused(net, "Sqrt 'node_sqrt")


def test_an_accumulator_beyond_int32_is_refused_with_its_bound():
    net = Net()
    x = net.qdq(net.input([1, 70000]), 0.031, 0)
    w = net.op("DequantizeLinear", net.const(np.full((70000, 2), 127, np.int8)), net.const(np.float32(1e-4)))
    net.output(net.qdq(net.op("MatMul", x, w), 1.0, 0), [1, 2])
    refused(net, "MatMul 'node_matmul", str(70000 * 127 * 255), "beyond int32")


def test_a_bias_beyond_int32_is_refused():
    net = Net()
    x = net.qdq(net.input([1, 8]), 0.5, 0)
    w = net.op("DequantizeLinear", net.const(np.full((8, 2), 127, np.int8)), net.const(np.float32(0.5)))
    bias = net.const(np.full(2, 2**31 - 100, np.int32))
    bias = net.op("DequantizeLinear", bias, net.const(np.float32(0.25)))
    net.output(net.qdq(net.op("Gemm", x, w, bias), 1.0, 0), [1, 2])
    refused(net, "Gemm 'node_gemm", "with the bias can reach", "beyond int32")


def test_weights_per_input_channel_are_refused():
    net = Net()
    x = net.qdq(net.input([1, 8]), 0.5, 0)
    w, _ = net.weight((8, 2), 0)
    net.output(net.qdq(net.op("MatMul", x, w), 1.0, 0), [1, 2])
    refused(net, "one scale per index of axis 0")


def test_per_channel_activations_are_refused():
    net = Net()
    scale = net.const(np.array([0.1, 0.2], np.float32))
    q = net.op("QuantizeLinear", net.input([3, 2]), scale, axis=1)
    net.output(net.op("DequantizeLinear", q, scale, axis=1), [3, 2])
    refused(net, "QuantizeLinear 'node_quantizelinear", "more than one scale")


def test_sums_over_sizes_that_are_not_static_are_refused():
    net = Net()
    x = net.qdq(net.input([1, 3, "h", "w"]), 0.5, 0)
    net.output(net.qdq(net.op("ReduceSum", x, net.const(np.array([2, 3], np.int64))), 1.0, 0), [1, 3, 1, 1], "a")
    refused(net, "ReduceSum 'node_reducesum", "not static")


def test_contrib_ops_and_subgraphs_are_refused():
    net = Net()
    x = net.qdq(net.input([2, 3]), 0.5, 10)
    net.output(net.qdq(net.op("QuickGelu", x, domain="com.microsoft"), 0.5, 10), [2, 3])
    graph = helper.make_graph(net.nodes, "net", net.inputs, net.outputs, net.initializers)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    refused(
        helper.make_model(graph, opset_imports=imports, ir_version=10), "QuickGelu 'node_quickgelu", "com.microsoft"
    )


def test_an_input_with_two_encodings_is_refused_only_at_integer_edges():
    net = Net()
    x = net.input([2, 3])
    net.output(net.qdq(x, 0.5, 10), [2, 3], "a")
    net.output(net.qdq(x, 0.25, 10), [2, 3], "b")
    model = net.model()
    compare(model, {"x": noise((2, 3))})
    refused(model, "two encodings", edges="integer")


def test_old_opsets_are_refused():
    model = small_cnn()
    model.opset_import[0].version = 12
    refused(model, "opset 12")


# --- the checker -----------------------------------------------------------------------------------------------------


@pytest.fixture
def integer_model():
    return convert(small_cnn(1)).model


def kinds(model, **options):
    return {(finding.kind, finding.where) for finding in integer_findings(model, **options)}


def test_the_checker_accepts_what_convert_writes(integer_model):
    require_integer_only(integer_model)


def test_the_checker_finds_a_planted_float_tensor(integer_model):
    codes = next(n.output[0] for n in integer_model.graph.node if n.op_type == "QuantizeLinear")
    integer_model.graph.node.insert(
        1, helper.make_node("Cast", [codes], ["planted"], "planted_cast", to=TensorProto.FLOAT)
    )
    assert ("float tensor", "planted_cast") in kinds(integer_model)
    with pytest.raises(IntegerError, match="'planted_cast': Cast makes 'planted' of float"):
        require_integer_only(integer_model)


def test_the_checker_finds_a_planted_float_initializer_and_attribute(integer_model):
    integer_model.graph.initializer.append(numpy_helper.from_array(np.float32(1), "planted"))
    integer_model.graph.node.append(helper.make_node("Constant", [], ["half"], "planted_constant", value_float=0.5))
    assert {("float tensor", "planted"), ("float tensor", "planted_constant")} <= kinds(integer_model)


def test_the_checker_finds_a_planted_quantize_pair(integer_model):
    graph = integer_model.graph
    conv = next(n for n in graph.node if n.op_type == "ConvInteger")
    edge = next(n for n in graph.node if n.op_type == "QuantizeLinear")
    pair = [
        helper.make_node("DequantizeLinear", [conv.input[0], *edge.input[1:]], ["inner"], "planted_dq"),
        helper.make_node("QuantizeLinear", ["inner", *edge.input[1:]], ["inner_q"], "planted_q"),
    ]
    at = list(graph.node).index(conv)
    conv.input[0] = "inner_q"
    for node in reversed(pair):
        graph.node.insert(at, node)
    found = kinds(integer_model)
    assert {("quantize node", "planted_dq"), ("quantize node", "planted_q"), ("float tensor", "planted_dq")} <= found


def test_the_checker_finds_contrib_domains(integer_model):
    integer_model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    codes = next(n.output[0] for n in integer_model.graph.node if n.op_type == "QuantizeLinear")
    node = helper.make_node("QLinearAdd", [codes], ["planted"], "planted_add", domain="com.microsoft")
    integer_model.graph.node.append(node)
    assert {("domain", "com.microsoft"), ("domain", "planted_add")} <= kinds(integer_model)


def test_the_checker_knows_the_edges(integer_model):
    inside = kinds(integer_model, edges="integer")
    assert {kind for kind, _ in inside} >= {"float tensor", "quantize node"}
    assert ("float tensor", "x") in inside
    assert kinds(small_cnn()) & {("float tensor", "node_conv_10")}


@pytest.mark.parametrize(("opset", "stored"), [(25, TensorProto.UINT2), (21, TensorProto.UINT4)])
def test_weights_of_two_bits_stay_packed(opset, stored):
    net = Net()
    x = net.qdq(net.input([2, 8, 5, 5]), 0.031, 119)
    values = net.rng.integers(-2, 2, (6, 8, 3, 3))
    kind = ml_dtypes.int2 if opset == 25 else ml_dtypes.int4
    weight = net.op("DequantizeLinear", net.const(values.astype(kind)), net.const(np.full(6, 0.02, np.float32)), axis=0)
    net.output(net.qdq(net.op("Conv", x, weight), 0.02, 119), [2, 6, 3, 3])
    model = net.model(opset)
    result = convert(model)
    feeds = {"x": noise((2, 8, 5, 5))}
    found = [run(result.model, feeds, level)["y"] for level in LEVELS] + [run_reference(result.model, feeds)["y"]]
    assert all(np.array_equal(found[0], other) for other in found[1:])
    assert np.abs(found[0] - simulate(model, feeds)["y"]).max() <= 0.0201
    assert stored in {tensor.data_type for tensor in result.model.graph.initializer}
