"""Ops that choose among values, compare or order them: exhaustively over codes, and what they refuse."""

from itertools import product

import numpy as np
import pytest
from integer_comparison import compare, grid, noise, refused
from integer_models import INT8, INT16, LEVELS, UINT8, UINT16, Net, run, simulate
from onnx import TensorProto, helper

from onnx_backend.integer.convert import convert
from onnx_backend.integer.reference.run import run_reference

COMPARISONS = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
FIRST, SECOND = (0.031, 119, UINT8), (0.0173, -7, INT8)


def pair(first=FIRST, second=SECOND):
    """Every pair of codes of two activations."""
    net = Net()
    a, c = net.qdq(net.input([256, 1], "a"), *first), net.qdq(net.input([1, 256], "c"), *second)
    return net, a, c, {"a": grid(*first)[:, None], "c": grid(*second)[None]}


# --- Max, Min, Where -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["Max", "Min"])
@pytest.mark.parametrize("out", [FIRST, SECOND, (0.043, 90, UINT8), (0.01, 0, INT8)])
def test_extremes_of_two_activations_exhaustively(op, out):
    net, a, c, feeds = pair()
    net.output(net.qdq(net.op(op, a, c), *out), [256, 256])
    result = compare(net.model(), feeds, tolerance=0.0)
    assert op in {node.op_type for node in result.model.graph.node}


@pytest.mark.parametrize("op", ["Max", "Min"])
@pytest.mark.parametrize("shape", [(), (1,), (4, 1), (1, 5)])
@pytest.mark.parametrize("flipped", [True, False])
def test_extremes_with_a_constant(op, shape, flipped):
    net = Net()
    x = net.qdq(net.input([3, 4, 5]), 0.031, 119)
    c = net.const(net.rng.normal(0, 1, shape).astype(np.float32))
    net.output(net.qdq(net.op(op, *((c, x) if flipped else (x, c))), 0.024, 100), [3, 4, 5])
    compare(net.model(), {"x": noise((3, 4, 5))}, tolerance=0.02)


def test_extremes_of_many_operands_and_accumulators():
    net = Net()
    x = net.qdq(net.input([8, 20]), 0.031, 119)
    w, scale = net.weight((20, 6), 1)
    first = net.op("Gemm", x, w, net.bias(6, 0.031, scale))
    z = net.qdq(net.input([8, 6], "z"), 0.027, 90)
    row = net.const(net.rng.normal(0, 1, 6).astype(np.float32))
    y = net.op("Max", net.op("Min", first, z, net.const(np.float32(0.7))), row, z)
    net.output(net.qdq(net.op("Relu", y), 0.0113, 0), [8, 6])
    compare(net.model(), {"x": noise((8, 20)), "z": noise((8, 6), 1.0, 1)}, tolerance=0.03)


@pytest.mark.parametrize("op", ["Max", "Min"])
def test_extremes_in_one_encoding_need_no_quantizer(op):
    net, a, c, feeds = pair(FIRST, FIRST)
    net.output(net.op(op, a, c), [256, 256])
    result = compare(net.model(), feeds, tolerance=0.0)
    assert result.certificate["requantizations"] == []


@pytest.mark.parametrize("op", ["Max", "Min"])
def test_extremes_of_decreasing_functions(op):
    net, a, c, feeds = pair(FIRST, FIRST)
    y = net.op(op, net.op("Neg", a), net.op("Neg", c))
    net.output(net.qdq(y, 0.031, 119), [256, 256])
    compare(net.model(), feeds, tolerance=0.0)


def test_extremes_of_constants_alone_fold():
    net = Net()
    x = net.qdq(net.input([256]), *FIRST)
    bound = net.op("Min", net.const(np.float32(0.8)), net.const(np.float32(1.5)))
    net.output(net.qdq(net.op("Min", x, bound), 0.024, 100), [256])
    compare(net.model(), {"x": grid(*FIRST)}, tolerance=0.02)


@pytest.mark.parametrize("branches", ["two encodings", "one encoding", "constant", "array", "minus infinity"])
@pytest.mark.parametrize("condition", ["input", "constant", "compared"])
def test_where(branches, condition):
    net = Net()
    x = net.qdq(net.input([4, 6, 6]), 0.031, 119)
    feeds = {"x": noise((4, 6, 6))}
    if condition == "input":
        mask = net.input([1, 6, 6], "mask", TensorProto.BOOL)
        feeds["mask"] = np.tri(6, dtype=bool)[None]
    elif condition == "constant":
        mask = net.const(np.tri(6, dtype=bool))
    else:
        mask = net.op("Not", net.op("Greater", x, net.const(np.float32(0.5))))
    if branches in ("two encodings", "one encoding"):
        other = net.qdq(net.input([4, 6, 1], "z"), *((0.0213, 100) if branches == "two encodings" else (0.031, 119)))
        feeds["z"] = noise((4, 6, 1), seed=1)
    else:
        values = {"constant": np.float32(0.71), "array": noise((6, 1), 1.0), "minus infinity": np.float32(-np.inf)}
        other = net.const(values[branches])
    y = net.op("Where", mask, x, other)
    net.output(net.qdq(y, *((0.031, 119) if branches == "one encoding" else (0.029, 110))), [4, 6, 6])
    compare(net.model(), feeds, tolerance=0.0)


def test_where_then_relu_and_a_move():
    net = Net()
    x = net.qdq(net.input([4, 6]), 0.031, 119)
    y = net.op("Where", net.const(np.arange(6) % 2 == 0), x, net.const(np.float32(-1.0)))
    y = net.op("Transpose", net.op("Relu", y), perm=[1, 0])
    net.output(net.qdq(y, 0.024, 3), [6, 4])
    compare(net.model(), {"x": noise((4, 6))}, tolerance=0.0)


@pytest.mark.parametrize(("upper", "k"), [(1, None), (0, None), (1, 2), (0, -1), (1, -3)])
def test_trilu(upper, k):
    net = Net()
    x = net.qdq(net.input(["n", 5, 7]), 0.031, 119)
    diagonal = [] if k is None else [net.const(np.array(k, np.int64))]
    net.output(net.qdq(net.op("Trilu", x, *diagonal, upper=upper), 0.031, 119), [None, 5, 7])
    compare(net.model(), {"x": noise((2, 5, 7))}, tolerance=0.0)


# --- moves -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["ScatterND", "ScatterElements"])
@pytest.mark.parametrize("reduction", ["none", "max", "min"])
@pytest.mark.parametrize("updates", ["same", "other", "constant"])
def test_scatter(op, reduction, updates):
    net = Net()
    x = net.qdq(net.input([5, 4]), 0.031, 119)
    feeds = {"x": noise((5, 4))}
    if op == "ScatterND":
        indices, shape = np.array([[3], [0], [3]] if reduction != "none" else [[3], [0], [1]]), (3, 4)
    else:
        indices, shape = np.array([[2, 0, 1, 4], [1, 3, 0, 0]]), (2, 4)
    if updates == "constant":
        new = net.const(noise(shape, 1.0, 2))
    else:
        new = net.qdq(net.input(shape, "u"), *((0.031, 119) if updates == "same" else (0.021, 90)))
        feeds["u"] = noise(shape, seed=1)
    y = net.op(op, x, net.const(indices.astype(np.int64)), new, reduction=reduction)
    net.output(net.qdq(y, *((0.031, 119) if updates == "same" else (0.029, 120))), [5, 4])
    compare(net.model(), feeds, tolerance=0.0)


@pytest.mark.parametrize("reduction", ["max", "min"])
def test_scatter_into_a_decreasing_function(reduction):
    net = Net()
    x, new = net.qdq(net.input([5, 4]), 0.031, 119), net.qdq(net.input([2, 4], "u"), 0.031, 119)
    indices = net.const(np.array([[3], [1]], np.int64))
    y = net.op("ScatterND", net.op("Neg", x), indices, net.op("Neg", new), reduction=reduction)
    net.output(net.qdq(y, 0.031, 119), [5, 4])
    compare(net.model(), {"x": noise((5, 4)), "u": noise((2, 4), seed=1)}, tolerance=0.0)


@pytest.mark.parametrize(
    ("op", "shape", "attrs", "out"),
    [
        ("DepthToSpace", [2, 8, 3, 4], {"blocksize": 2}, [2, 2, 6, 8]),
        ("DepthToSpace", [2, 18, 3, 2], {"blocksize": 3, "mode": "CRD"}, [2, 2, 9, 6]),
        ("SpaceToDepth", [2, 3, 6, 4], {"blocksize": 2}, [2, 12, 3, 2]),
        ("ReduceMin", [2, 3, 6, 4], {"keepdims": 0}, [2, 4]),
        ("GatherElements", [4, 3], {"axis": 0}, [2, 3]),
    ],
)
@pytest.mark.parametrize("behind", ["same", "accumulator"])
def test_more_moves(op, shape, attrs, out, behind):
    net = Net()
    x = net.qdq(net.input(shape), 0.031, 119)
    if behind == "accumulator":
        x = net.op("Mul", x, net.const(net.rng.uniform(0.5, 1.5, shape).astype(np.float32)))
    extra = {"ReduceMin": [1, 2], "GatherElements": [[3, 0, 1], [2, 2, 0]]}.get(op)
    indices = [] if extra is None else [net.const(np.array(extra, np.int64))]
    net.output(net.qdq(net.op(op, x, *indices, **attrs), 0.031, 119), out)
    compare(net.model(), {"x": noise(shape, 1.0)}, tolerance=0.01)


# --- comparisons -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", COMPARISONS)
@pytest.mark.parametrize("second", [SECOND, FIRST, (0.0155, 60, UINT8), (0.062, -8, INT8)])
def test_comparisons_of_two_activations_exhaustively(op, second):
    net, a, c, feeds = pair(FIRST, second)
    net.output(net.op(op, a, c), [256, 256], dtype=TensorProto.BOOL)
    compare(net.model(), feeds, tolerance=0.0)


@pytest.mark.parametrize("op", COMPARISONS)
@pytest.mark.parametrize("flipped", [True, False])
@pytest.mark.parametrize("value", [0.31, float(grid(*FIRST)[130]), [0.5, float(grid(*FIRST)[7]), 2.0]])
def test_comparisons_with_constants_exhaustively(op, flipped, value):
    net = Net()
    x = net.qdq(net.input([256, 1]), *FIRST)
    c = net.const(np.array(value, np.float32))
    net.output(net.op(op, *((c, x) if flipped else (x, c))), [256, None], dtype=TensorProto.BOOL)
    compare(net.model(), {"x": grid(*FIRST)[:, None]}, tolerance=0.0)


def test_comparison_with_infinity():
    net = Net()
    x = net.qdq(net.input([256]), *FIRST)
    net.output(net.op("Less", x, net.const(np.float32(np.inf))), [256], dtype=TensorProto.BOOL)
    assert run(convert(net.model()).model, {"x": grid(*FIRST)})["y"].all()


def test_comparison_of_functions_of_codes():
    net, a, c, feeds = pair()
    net.output(net.op("Less", net.op("Abs", a), net.op("Tanh", c)), [256, 256], dtype=TensorProto.BOOL)
    compare(net.model(), feeds, tolerance=0.0)


def test_logic_on_comparisons():
    net, a, c, feeds = pair()
    less, near = net.op("Less", a, c), net.op("Greater", a, net.const(np.float32(0.2)))
    y = net.op("Xor", net.op("And", less, near), net.op("Or", near, net.op("Not", less)))
    net.output(y, [256, 256], dtype=TensorProto.BOOL)
    compare(net.model(), feeds, tolerance=0.0)


# --- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("attrs", [{"axis": 1, "keepdims": 0}, {"axis": -2, "select_last_index": 1}])
@pytest.mark.parametrize("function", [None, "Relu", "Abs", "Neg"])
def test_arg_extremes_also_of_functions_with_equal_values(op, attrs, function):
    net = Net()
    x = net.qdq(net.input([30, 9]), 0.8, 119)  # coarse, so that many values are equal
    x = x if function is None else net.op(function, x)
    net.output(net.op(op, x, **attrs), [None] * (1 + attrs.get("keepdims", 1)), dtype=TensorProto.INT64)
    compare(net.model(), {"x": noise((30, 9), 1.5)}, tolerance=0.0)


@pytest.mark.parametrize(("axis", "largest"), list(product((-1, 0), (0, 1))))
@pytest.mark.parametrize("function", [None, "Relu", "Neg"])
def test_top_k(axis, largest, function):
    net = Net()
    x = net.qdq(net.input([30, 9]), 0.8, 119)
    x = x if function is None else net.op(function, x)
    k = net.const(np.array([4], np.int64))
    values, indices = net.op("TopK", x, k, outputs=2, axis=axis, largest=largest)
    out = [30, 4] if axis == -1 else [4, 9]
    names = list(net.nodes[-1].output)
    net.nodes[-1].output[names.index(indices)] = "indices"
    net.outputs.append(helper.make_tensor_value_info("indices", TensorProto.INT64, out))
    net.output(net.qdq(values, 0.7, 110), out, "values")
    compare(net.model(), {"x": noise((30, 9), 1.5) + np.float32(3 * (function == "Relu"))}, tolerance=0.0)


# --- Sum and Mean ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["Sum", "Mean"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_sums_of_several(op, count):
    net = Net()
    feeds, parts = {}, []
    for i in range(count):
        parts.append(net.qdq(net.input([16, 16], f"x{i}"), 0.031 + 0.007 * i, 119 - i))
        feeds[f"x{i}"] = noise((16, 16), 1.0, i)
    if count == 4:
        parts.insert(1, net.const(noise((16, 1), 1.0, 9)))
    net.output(net.qdq(net.op(op, *parts), 0.0271, 120), [16, 16])
    compare(net.model(), feeds, tolerance=0.02)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_refusals():
    net = Net()
    x = net.qdq(net.input([3, 4]), 0.031, 119)
    w, _ = net.weight((4, 4), 1)
    pending = net.op("MatMul", x, w)
    outputs = [
        (net.op("Less", pending, x), TensorProto.BOOL),
        (net.op("Equal", x, net.const(np.float32(np.nan))), TensorProto.BOOL),
        (net.op("ArgMin", pending, axis=1), TensorProto.INT64),
        (net.op("TopK", pending, net.const(np.array([2], np.int64)), outputs=2)[1], TensorProto.INT64),
    ]
    indices = net.const(np.array([[0]], np.int64))
    update = net.qdq(net.input([1, 4], "u"), 0.031, 119)
    scattered = net.op("ScatterND", x, indices, update, reduction="mul")
    for i, (tensor, dtype) in enumerate(outputs):
        net.nodes.append(helper.make_node("Identity", [tensor], [f"i{i}"]))
        net.output(f"i{i}", [None] * 2, f"o{i}", dtype)
    net.output(net.qdq(scattered, 0.031, 119), [3, 4])
    message = refused(net, "first operand is a float tensor", "can be NaN", "reduction='mul'")
    assert message.count("not a quantized activation") == 2


def test_dynamic_trilu_is_refused():
    net = Net()
    x = net.qdq(net.input([2, "h", 4]), 0.031, 119)
    net.output(net.qdq(net.op("Trilu", x), 0.031, 119), [2, None, 4])
    refused(net, "Trilu 'node_trilu", "are not static")


@pytest.mark.parametrize("level", LEVELS)
def test_ties_in_top_k_take_the_smaller_index_at_every_level(level):
    net = Net()
    x = net.qdq(net.input([1, 12]), 1.0, 10)
    values, indices = net.op("TopK", x, net.const(np.array([5], np.int64)), outputs=2)
    net.nodes.append(helper.make_node("Identity", [indices], ["i"]))
    net.output("i", [1, 5], "indices", TensorProto.INT64)
    net.output(net.qdq(values, 1.0, 10), [1, 5])
    feeds = {"x": np.array([[3, 7, 3, 7, 7, 1, 0, 7, 2, 7, 7, 7]], np.float32)}
    result = convert(net.model())
    found = run(result.model, feeds, level)["indices"]
    np.testing.assert_array_equal(found, [[1, 3, 4, 7, 9]])
    np.testing.assert_array_equal(run_reference(result.model, feeds)["indices"], found)
    np.testing.assert_array_equal(simulate(net.model(), feeds)["indices"], found)


SIXTEEN = {
    "DepthToSpace": ([2, 8, 3, 4], lambda n, x: n.op("DepthToSpace", x, blocksize=2)),
    "DepthToSpace CRD": ([2, 8, 3, 4], lambda n, x: n.op("DepthToSpace", x, blocksize=2, mode="CRD")),
    "SpaceToDepth": ([2, 3, 4, 6], lambda n, x: n.op("SpaceToDepth", x, blocksize=2)),
    "Max": ([2, 3, 4, 6], lambda n, x: n.op("Max", x, n.qdq(n.input([6], "z"), 1.7e-4, -411, INT16))),
    "Where": ([2, 3, 4, 6], lambda n, x: n.op("Where", n.op("Less", x, n.op("Neg", x)), x, n.const(np.float32(0.5)))),
    "Trilu": ([2, 3, 4, 6], lambda n, x: n.op("Trilu", x)),
    "TopK": ([2, 3, 4, 6], lambda n, x: n.op("TopK", x, n.const(np.array([2], np.int64)), outputs=2)[0]),
    "ReduceMin": ([2, 3, 4, 6], lambda n, x: n.op("ReduceMin", x, n.const(np.array([2], np.int64)))),
}


@pytest.mark.parametrize("name", SIXTEEN)
def test_sixteen_bits(name):
    shape, build = SIXTEEN[name]
    net = Net()
    y = build(net, net.qdq(net.input(shape), 1.3e-4, 31007, UINT16))
    net.output(net.qdq(y, 1.1e-4, 30000, UINT16), [None] * 4)
    feeds = {"x": noise(shape, 1.5)} | ({"z": noise((6,), 1.5, 1)} if name == "Max" else {})
    compare(net.model(), feeds, tolerance=0.0)
