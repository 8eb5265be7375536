"""The NumPy reference: equal to ONNX Runtime op by op, and it raises where integer arithmetic would wrap."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from integer_models import INT8, LEVELS, UINT8, run, small_cnn
from onnx import TensorProto, helper, numpy_helper

from onnx_backend.integer.convert import convert
from onnx_backend.integer.reference.run import run_reference
from qsdk import DataError, IntegerError

INT32, INT64, UINT64, BOOL = TensorProto.INT32, TensorProto.INT64, TensorProto.UINT64, TensorProto.BOOL


def one_op(op_type, feeds, constants, out_dtype, out_rank, domain="", **attributes):
    """A model of one node whose inputs are `feeds` and then `constants`."""
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    stored = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    output = helper.make_tensor_value_info("y", out_dtype, [None] * out_rank)
    node = helper.make_node(op_type, [*feeds, *constants], ["y"], "the_node", domain=domain, **attributes)
    graph = helper.make_graph([node], "one", inputs, [output], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def agree(model, feeds):
    expected = run_reference(model, feeds)["y"]
    for level in LEVELS:
        found = run(model, feeds, level)["y"]
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected, err_msg=level)
    return expected


def integers(shape, lo=0, hi=256, dtype=np.uint8, seed=0):
    return np.random.default_rng(seed).integers(lo, hi, shape).astype(dtype)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_conv_integer_equals_the_runtime(data):
    rank = data.draw(st.sampled_from([1, 2]))
    group = data.draw(st.sampled_from([1, 2, 3]))
    depth, filters = data.draw(st.integers(1, 3)), group * data.draw(st.integers(1, 3))
    kernel = data.draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank))
    attrs = {
        "strides": data.draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank)),
        "dilations": data.draw(st.lists(st.integers(1, 2), min_size=rank, max_size=rank)),
        "group": group,
    }
    auto = data.draw(st.sampled_from(["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"]))
    if auto == "NOTSET":
        attrs["pads"] = data.draw(st.lists(st.integers(0, 2), min_size=2 * rank, max_size=2 * rank))
    else:
        attrs["auto_pad"] = auto
        if auto != "VALID":
            attrs["dilations"] = [1] * rank
    seed = data.draw(st.integers(0, 999))
    x = integers((2, group * depth, *data.draw(st.lists(st.integers(5, 8), min_size=rank, max_size=rank))), seed=seed)
    w = integers((filters, depth, *kernel), seed=seed + 1)
    zeros = {"zx": integers((), seed=seed + 2), "zw": integers((), seed=seed + 3)}
    agree(one_op("ConvInteger", {"x": x}, {"w": w, **zeros}, INT32, rank + 2, **attrs), {"x": x})


@pytest.mark.parametrize(
    "shapes", [((5, 7), (7, 3)), ((2, 5, 7), (7, 3)), ((2, 3, 5, 7), (3, 7, 4)), ((7, 5), (2, 5, 3))]
)
def test_matmul_integer_equals_the_runtime(shapes):
    a, b = integers(shapes[0]), integers(shapes[1], seed=1)
    zeros = {"za": np.uint8(9), "zb": np.uint8(200)}
    agree(one_op("MatMulInteger", {"a": a}, {"b": b, **zeros}, INT32, max(a.ndim, b.ndim)), {"a": a})


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_max_pool_equals_the_runtime(data):
    kernel = data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=2))
    attrs = {
        "kernel_shape": kernel,
        "strides": data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=2)),
        "dilations": data.draw(st.lists(st.integers(1, 2), min_size=2, max_size=2)),
        "pads": [data.draw(st.integers(0, k - 1)) for k in kernel * 2],
        "ceil_mode": data.draw(st.integers(0, 1)),
    }
    x = integers((2, 3, data.draw(st.integers(5, 8)), 7), seed=data.draw(st.integers(0, 99)))
    agree(one_op("MaxPool", {"x": x}, {}, UINT8, 4, **attrs), {"x": x})


X = integers((3, 4, 5))
I64 = np.array
MOVES = [
    ("Flatten", {}, {"axis": 0}, 2),
    ("Flatten", {}, {"axis": -1}, 2),
    ("Reshape", {"s": I64([0, -1])}, {}, 2),
    ("Transpose", {}, {}, 3),
    ("Transpose", {}, {"perm": [1, 2, 0]}, 3),
    ("Unsqueeze", {"a": I64([-1, 0])}, {}, 5),
    ("Slice", {"s": I64([-1, 1]), "e": I64([-9, 99]), "a": I64([0, 2]), "t": I64([-2, 2])}, {}, 3),
    ("Slice", {"s": I64([1]), "e": I64([3])}, {}, 3),
    ("Gather", {"i": I64([[0, -1], [2, 1]])}, {"axis": 1}, 4),
    ("GatherND", {"i": I64([[0, 1], [2, 3]])}, {}, 2),
    ("Expand", {"s": I64([2, 1, 1, 5])}, {}, 4),
    ("Tile", {"r": I64([1, 2, 3])}, {}, 3),
    ("Pad", {"p": I64([0, 1, 2, 1, 0, 1]), "v": np.uint8(7)}, {}, 3),
    ("Pad", {"p": I64([0, -1, 2, 1, 0, -1])}, {}, 3),
    ("Pad", {"p": I64([1, 2]), "v": np.uint8(7), "a": I64([2])}, {}, 3),
    ("Pad", {"p": I64([0, 1, 2, 1, 0, 1])}, {"mode": "reflect"}, 3),
    ("Pad", {"p": I64([0, 1, 2, 1, 0, 1])}, {"mode": "edge"}, 3),
    ("ReduceMax", {"a": I64([1, -1])}, {"keepdims": 0}, 1),
    ("ReduceMax", {}, {}, 3),
    ("GatherElements", {"i": I64([[[1, 0, 0, 2, 2]]])}, {"axis": 0}, 3),
]


@pytest.mark.parametrize(("op", "constants", "attrs", "rank"), MOVES)
def test_moves_equal_the_runtime(op, constants, attrs, rank):
    constants = {key: np.asarray(v, v.dtype) for key, v in constants.items()}
    agree(one_op(op, {"x": X}, constants, UINT8, rank, **attrs), {"x": X})


ARITHMETIC = [
    ("Add", np.int64, INT64),
    ("Sub", np.int32, INT32),
    ("Mul", np.int64, INT64),
    ("Div", np.int64, INT64),
    ("Mod", np.int64, INT64),
    ("Less", np.int64, BOOL),
    ("Greater", np.int32, BOOL),
    ("LessOrEqual", np.int32, BOOL),
    ("Equal", np.uint64, BOOL),
    ("BitwiseAnd", np.uint64, UINT64),
]


@pytest.mark.parametrize(("op", "dtype", "out"), ARITHMETIC)
def test_arithmetic_equals_the_runtime(op, dtype, out):
    lo = 0 if dtype == np.uint64 else -(2**30)
    a, b = integers((50, 4), lo, 2**30, dtype), integers((1, 4), 1, 2**30, dtype, 1)
    a[0] = b[0]
    agree(one_op(op, {"a": a}, {"b": b}, out, 2), {"a": a})


@pytest.mark.parametrize("shift", [1, 31, 62])
def test_bit_shift_equals_the_runtime(shift):
    x = integers(50, 0, 2**63 - 1, np.uint64)
    agree(one_op("BitShift", {"x": x}, {"n": np.uint64(shift)}, UINT64, 1, direction="RIGHT"), {"x": x})


@pytest.mark.parametrize("op", ["ReduceSum", "ArgMax", "Shape", "Clip"])
def test_the_other_ops_equal_the_runtime(op):
    x = integers((3, 4, 5), -9, 9, np.int32)
    constants = {"ReduceSum": {"a": I64([0, 2])}, "Clip": {"lo": np.int32(-3), "hi": np.int32(5)}}.get(op, {})
    attrs = {"ArgMax": {"axis": 1, "select_last_index": 1}, "Shape": {"start": 1}}.get(op, {})
    out, rank = {"ReduceSum": (INT32, 3), "Clip": (INT32, 3), "ArgMax": (INT64, 3), "Shape": (INT64, 1)}[op]
    agree(one_op(op, {"x": x}, constants, out, rank, **attrs), {"x": x})


@pytest.mark.parametrize("zero", [np.uint8(3), np.int8(-3)])
def test_the_edges_equal_the_runtime(zero):
    x = np.concatenate([np.arange(-200, 200) * np.float32(0.05), [np.float32(3e38), np.float32(-np.inf)]])
    x = x.astype(np.float32)
    kind = helper.np_dtype_to_tensor_dtype(zero.dtype)
    codes = agree(one_op("QuantizeLinear", {"x": x}, {"s": np.float32(0.1), "z": zero}, kind, 1), {"x": x})
    back = one_op("DequantizeLinear", {"x": codes}, {"s": np.float32(0.1), "z": zero}, TensorProto.FLOAT, 1)
    agree(back, {"x": codes})


def test_an_accumulator_that_overflows_raises_instead_of_wrapping():
    a, b = np.full((1, 40000), 255, np.uint8), np.full((40000, 1), 255, np.uint8)
    model = one_op("MatMulInteger", {"a": a}, {"b": b}, INT32, 2)
    with pytest.raises(IntegerError, match=r"MatMulInteger 'the_node': the accumulator reaches 2601000000"):
        run_reference(model, {"a": a})
    x, w = np.full((1, 40000, 1), 255, np.uint8), np.full((1, 40000, 1), 255, np.uint8)
    with pytest.raises(IntegerError, match=r"ConvInteger 'the_node': .*beyond int32"):
        run_reference(one_op("ConvInteger", {"x": x}, {"w": w}, INT32, 3), {"x": x})


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint64])
def test_arithmetic_that_overflows_raises(dtype):
    top = np.array([np.iinfo(dtype).max], dtype)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    for op in ("Add", "Mul"):
        with pytest.raises(IntegerError, match=f"{op} 'the_node'"):
            run_reference(one_op(op, {"a": top}, {"b": top}, kind, 1), {"a": top})


def test_a_cast_that_wraps_raises():
    x = np.array([256, 0], np.int32)
    with pytest.raises(IntegerError, match=r"Cast 'the_node': a cast of 0\.\.256 to uint8 would wrap"):
        run_reference(one_op("Cast", {"x": x}, {}, UINT8, 1, to=UINT8), {"x": x})


def test_inputs_are_checked():
    model = convert(small_cnn()).model
    with pytest.raises(DataError, match="input 'x' is missing"):
        run_reference(model, {})
    with pytest.raises(DataError, match="input 'x' is float64, the model takes float32"):
        run_reference(model, {"x": np.zeros((1, 3, 12, 12))})


def test_ops_outside_integer_models_are_named():
    x = np.zeros(3, np.float32)
    with pytest.raises(IntegerError, match="Sigmoid 'the_node' is not an op of integer-only models"):
        run_reference(one_op("Sigmoid", {"x": x}, {}, TensorProto.FLOAT, 1), {"x": x})


@pytest.mark.parametrize("dtype", [UINT8, INT8])
@pytest.mark.parametrize("rounding", ["half_even", "half_up", "half_away", "gemmlowp"])
def test_every_inner_tensor_of_a_network_equals_the_runtime(dtype, rounding):
    model = convert(small_cnn(3, dtype=dtype), rounding=rounding).model
    x = np.random.default_rng(0).normal(0, 1, (3, 3, 12, 12)).astype(np.float32)
    reference = run_reference(model, {"x": x}, every_tensor=True)
    del model.graph.output[:]
    names = [name for node in model.graph.node for name in node.output]
    for name in names:
        kind = helper.np_dtype_to_tensor_dtype(reference[name].dtype)
        model.graph.output.append(helper.make_tensor_value_info(name, kind, [None] * reference[name].ndim))
    for level in LEVELS:
        found = run(model, {"x": x}, level)
        for name in names:
            np.testing.assert_array_equal(found[name], reference[name], err_msg=f"{name} at {level}")


def test_the_reference_is_usable_on_real_sizes():
    model = convert(small_cnn(0, batch=64)).model
    x = np.random.default_rng(0).normal(0, 1, (64, 3, 12, 12)).astype(np.float32)
    start = time.perf_counter()
    run_reference(model, {"x": x})
    assert time.perf_counter() - start < 5
