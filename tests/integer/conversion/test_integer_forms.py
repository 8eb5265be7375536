"""The fast forms of requantizations, tables, MaxPool and Softmax: exact, and written where they apply."""

from itertools import pairwise

import numpy as np
import pytest
from integer_comparison import ROUNDINGS, compare, exact
from integer_models import LEVELS, UINT8, Net, run, simulate
from onnx import TensorProto, checker, helper

from onnx_backend.integer.codegen.expand import expand
from onnx_backend.integer.convert import convert
from onnx_backend.integer.ir.builder import Builder, requantize
from onnx_backend.integer.ir.values import ActivationEncoding, Linear, Term
from onnx_backend.integer.reference.run import run_reference

I64 = np.int64


def column(values, kind=np.float64):
    return np.asarray(values, kind).reshape(-1, 1)


def term(name, scale, zero, lo, hi):
    return Term(name, np.asarray(scale), *(np.asarray(v, I64) for v in (zero, lo, hi)))


#: Sums of int32 tensors of 4 channels -> whether every term starts at an end of its bounds, in 32 bits.
SUMS = {
    "ends per channel": (
        [term("a", column([1e-3, 0.7, 2.0, 3e-5]), column([5, -9, 0, 77]), column([-9000, 40, -3, -(2**20)]), 2**20)],
        0.0,
        True,
    ),
    "a difference": ([term("a", 0.013, 3, -(2**14), 2**15), term("b", -0.0179, -4, -700, 2**13)], 0.0, True),
    "a constant": ([term("a", column([0.5, 0.25, 3.0, 1e-4]), 0, -60000, 60000)], column([7.5, -3.25, 0.1, 90]), True),
    "signs per channel": ([term("a", column([0.5, -0.25, 3.0, -0.013]), 0, -6000, 5000)], 0.0, False),
    "a span beyond int32": ([term("a", 3e-8, 0, -(2**31) + 1, 2**31 - 1)], 0.0, False),
    "only negative": ([term("a", 0.02, -9500, -9000, -20)], 0.0, True),
}


def sum_model(terms, constant, rounding, zero):
    """The requantization of a sum to codes, and its plan."""
    builder = Builder(["a", "b", "y"], rounding)
    value = Linear(tuple(terms), np.asarray(constant), source="test")
    codes = requantize(builder, value, ActivationEncoding(1.0, zero, UINT8), "codes")
    plan, form = builder.nodes[0].plan, builder.nodes[0].rounding
    nodes = expand(builder, {codes})
    nodes[-1].output[0] = "y"
    inputs = [helper.make_tensor_value_info(t.name, TensorProto.INT32, [4, None]) for t in terms]
    output = helper.make_tensor_value_info("y", TensorProto.UINT8, [4, None])
    graph = helper.make_graph(nodes, "sum", inputs, [output], builder.initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    checker.check_model(model, full_check=True)
    return model, plan, form


def accumulators(terms, rng):
    """Both ends of every channel's bounds, and what lies between."""
    found = {}
    for t in terms:
        lo, hi = (np.broadcast_to(v, (4, 1)) for v in (t.lo, t.hi))
        between = (lo + rng.random((4, 300)) * (hi - lo)).astype(I64)
        around = (t.zero + rng.integers(-400, 400, (4, 300))).clip(lo, hi)
        found[t.name] = np.concatenate([lo, hi, between, around], 1).astype(np.int32)
    return found


@pytest.mark.parametrize("zero", [0, 131])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", SUMS)
def test_sums_are_requantized_exactly(name, rounding, zero):
    terms, constant, ends = SUMS[name]
    model, plan, form = sum_model(terms, constant, rounding, zero)
    feeds = accumulators(terms, np.random.default_rng(3))
    shape = feeds["a"].shape
    total = np.broadcast_to(plan.addend, shape).astype(object)
    for t, mantissa in zip(terms, plan.mantissas, strict=True):
        total = total + feeds[t.name].astype(object) * np.broadcast_to(mantissa, shape).astype(object)
    shifts = np.broadcast_to(plan.shift, shape)
    wanted = [exact(int(v), int(n), form) + zero for v, n in zip(total.flat, shifts.flat, strict=True)]
    wanted = np.array(wanted, object).reshape(shape).clip(0, 255).astype(np.uint8)
    assert np.unique(wanted).size > 2
    np.testing.assert_array_equal(run_reference(model, feeds)["y"], wanted)
    for level in LEVELS:
        np.testing.assert_array_equal(run(model, feeds, level)["y"], wanted)
    casts = {a.i for n in model.graph.node if n.op_type == "Cast" for a in n.attribute}
    kinds = {t.data_type for t in model.graph.initializer}
    multiplied = TensorProto.UINT64 if ends else TensorProto.INT64
    assert multiplied in casts & kinds
    if ends and rounding == "half_up":
        assert TensorProto.INT64 not in casts | kinds


def curve(shape, second_reader=False):
    """A convolution behind which a function is a table; its codes may leave the model too."""
    net = Net()
    x = net.qdq(net.input(shape), 0.031, 117)
    weight, scale = net.weight((16, shape[1], 1, 1), 0)
    y = net.qdq(net.op("Conv", x, weight, net.bias(16, 0.031, scale)), 0.029, 120)
    net.output(net.qdq(net.op("Tanh", y), 1 / 128, 128), [shape[0], 16, *shape[2:]])
    if second_reader:
        net.output(net.qdq(net.op("Transpose", y, perm=[0, 2, 3, 1]), 0.029, 120), [shape[0], *shape[2:], 16], "z")
    return net.model()


def noise(shape):
    return np.random.default_rng(5).uniform(-3, 3, shape).astype(np.float32)


@pytest.mark.parametrize("second_reader", [False, True])
def test_codes_that_only_a_table_reads_are_its_index(second_reader):
    result = compare(curve([1, 3, 4, 4], second_reader), {"x": noise([1, 3, 4, 4])})
    codes = next(r["tensor"] for r in result.certificate["requantizations"] if r["form"] == "fixed point")
    maker = next(n for n in result.model.graph.node if codes in n.output)
    assert maker.op_type == ("Cast" if second_reader else "Clip")
    (table,) = (t for t in result.model.graph.initializer if t.name.startswith("table"))
    assert list(table.dims) == [1, 256]


@pytest.mark.parametrize(("sizes", "rows"), [((16, 16), 8), ((17, 23), 8), ((15, 9), 1)])
@pytest.mark.parametrize("batch", ["n", 2])
def test_threads_share_large_tables(batch, sizes, rows):
    model = curve([batch, 3, *sizes])
    result = compare(model, {"x": noise([2, 3, *sizes])})
    (table,) = (t for t in result.model.graph.initializer if t.name.startswith("table"))
    assert list(table.dims) == [8 if batch == 2 and sizes == (15, 9) else rows, 256]
    if batch == "n":
        assert run(result.model, {"x": noise([0, 3, *sizes])})["y"].shape == (0, 16, *sizes)
        compare(model, {"x": noise([5, 3, *sizes])})


def pooled(sizes, **attributes):
    net = Net()
    x = net.qdq(net.input([2, 3, *sizes]), 0.031, 117)
    y = net.op("MaxPool", x, **attributes)
    net.output(net.qdq(y, 0.031, 117), [2, 3, *(None for _ in sizes)])
    return net.model()


POOLS = [
    {"kernel_shape": [5, 5], "pads": [2] * 4},
    {"kernel_shape": [3, 2], "strides": [2, 3], "pads": [1, 0, 0, 1]},
    {"kernel_shape": [2, 3], "dilations": [3, 2], "pads": [1, 1, 1, 2]},
    {"kernel_shape": [2, 2], "strides": [2, 2]},
    {"kernel_shape": [4]},
]


@pytest.mark.parametrize("attributes", POOLS)
def test_max_pool_becomes_slices(attributes):
    sizes = [11, 9][: len(attributes["kernel_shape"])]
    model, feeds = pooled(sizes, **attributes), {"x": noise([2, 3, *sizes])}
    result = compare(model, feeds, 0)
    assert {"MaxPool", "Max"} & {n.op_type for n in result.model.graph.node} == {"Max"}
    kernels = {n.op_type for n in convert(model, target="onnxruntime").model.graph.node}
    assert {"MaxPool", "Max"} & kernels == {"MaxPool"}


def test_max_pool_whose_sizes_follow_a_rule_stays():
    for attributes in ({"ceil_mode": 1, "strides": [2, 2]}, {"auto_pad": "SAME_UPPER"}):
        model = pooled([11, 9], kernel_shape=[2, 2], **attributes)
        assert "MaxPool" in {n.op_type for n in compare(model, {"x": noise([2, 3, 11, 9])}, 0).model.graph.node}


def scores(shape, axis, scale, zero=0, x_scale=0.05):
    net = Net()
    x = net.qdq(net.input(shape), x_scale, 200)
    net.output(net.qdq(net.op("Softmax", x, axis=axis), scale, zero), shape)
    return net.model()


@pytest.mark.parametrize("scale", [1 / 255, 1 / 256, 1 / 100])
@pytest.mark.parametrize(("shape", "axis"), [([2, 16, 7], 1), ([3, 5, 40], -1), ([9, 4], 0)])
def test_softmax_of_codes_becomes_a_kernel(shape, axis, scale):
    result = convert(scores(shape, axis, scale, 3), target="onnxruntime")
    assert [n.op_type for n in result.model.graph.node] == ["QuantizeLinear", "QLinearSoftmax", "DequantizeLinear"]
    (row,) = result.certificate["requantizations"]
    assert (row["form"], row["rounding"]) == ("QLinearSoftmax", "half_even")
    codes = np.random.default_rng(2).integers(0, 256, shape)
    x = (codes - 200) * np.float64(np.float32(0.05))
    share = np.exp(x - x.max(axis, keepdims=True))
    step = np.float64(np.float32(scale))
    wanted = share / share.sum(axis, keepdims=True) / step + 3
    for level in LEVELS:
        found = run(result.model, {"x": x.astype(np.float32)}, level)["y"] / step + 3
        assert np.abs(found - wanted.clip(0, 255)).max() <= 0.5 + row["error_bound"] + 1e-4


@pytest.mark.parametrize(
    ("shape", "scale"), [([2, 16], 0.0039), ([2, 16], 1 / 254.5), ([1, 9000], 1 / 256), ([2, "n"], 1 / 256)]
)
def test_softmax_whose_kernel_is_too_far_off_stays_on_integers(shape, scale):
    result = convert(scores(shape, -1, scale), target="onnxruntime")
    assert "QLinearSoftmax" not in {n.op_type for n in result.model.graph.node}


def test_softmax_of_anything_but_codes_stays_on_integers():
    net = Net()
    x = net.qdq(net.input([2, 3, 8]), 0.05, 100)
    weight, _ = net.weight((8, 6), 1)
    net.output(net.qdq(net.op("Softmax", net.op("MatMul", x, weight)), 1 / 256), [2, 3, 6])
    result = convert(net.model(), target="onnxruntime")
    assert "QLinearSoftmax" not in {n.op_type for n in result.model.graph.node}
    (row,) = result.certificate["requantizations"]
    assert row["form"] == "shares of rows"


@pytest.mark.parametrize(("op", "by"), [("Mul", 0.5), ("Div", -2.0)])
def test_softmax_that_something_follows_stays_on_integers(op, by):
    net = Net()
    share = net.op("Softmax", net.qdq(net.input([2, 16]), 0.05, 100))
    net.output(net.qdq(net.op(op, share, net.const(np.float32(by))), 1 / 256, 128), [2, 16])
    model, feeds = net.model(), {"x": noise([2, 16])}
    integer = convert(model, target="onnxruntime").model
    assert "QLinearSoftmax" not in {n.op_type for n in integer.graph.node}
    np.testing.assert_array_equal(run(integer, feeds)["y"], run(compare(model, feeds).model, feeds)["y"])


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0,), (2, 0, 1, 2)])
@pytest.mark.parametrize("target", ["standard", "onnxruntime"])
def test_a_concat_of_all_parts_of_a_split_reads_what_was_split(order, target):
    net = Net()
    x = net.qdq(net.input([2, 8, 5]), 0.05, 100)
    halves = [net.qdq(part, 0.05, 100) for part in net.op("Split", x, net.const(np.array([3, 5])), outputs=2, axis=1)]
    other = net.qdq(net.op("Relu", halves[1]), 0.05, 100)
    joined = net.op("Concat", *([*halves, other][i] for i in order), other, axis=1)
    net.output(net.qdq(joined, 0.05, 100), [2, None, 5])
    model, feeds = net.model(), {"x": noise([2, 8, 5])}
    found = convert(model, target=target).model
    (concat,) = (node for node in found.graph.node if node.op_type == "Concat")
    assert len(concat.input) == len(order) + 1 - ((0, 1) in pairwise(order))
    wanted = simulate(model, feeds)
    for level in LEVELS:
        np.testing.assert_array_equal(run(found, feeds, level)["y"], wanted["y"])
