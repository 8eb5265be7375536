"""Ties: which ops carry an encoding from their input to their output."""

import numpy as np
import pytest
from strategies import GraphBuilder

from qsdk import w8a8
from qsdk.core.graph.graph import Graph, Op, Tensor
from qsdk.core.planning.make_plan import make_plan
from qsdk.core.planning.ties import PASS_THROUGH, Classes, find_rescaled, find_ties, keeps_grid


def tied(graph: Graph, left: int, right: int, groups: dict[int, object] | None = None) -> bool:
    classes = find_ties(graph, dict.fromkeys(range(len(graph.tensors))) if groups is None else groups)
    return classes.find(left) == classes.find(right)


def test_classes_are_represented_by_their_smallest_member():
    classes = Classes()
    classes.union(7, 5)
    classes.union(9, 8)
    classes.union(9, 7)
    assert [classes.find(i) for i in (5, 6, 7, 8, 9)] == [5, 6, 5, 5, 5]
    classes.union(3, 9)
    assert [classes.find(i) for i in (3, 5, 7, 8, 9)] == [3] * 5
    classes.union(3, 3)
    assert classes.find(3) == 3


@pytest.mark.parametrize("type", sorted(PASS_THROUGH))
def test_ops_that_move_values_tie(type: str):
    b = GraphBuilder()
    x = b.input()
    y = b.op(type, [x])
    assert tied(b.graph(y), x, y)


@pytest.mark.parametrize(
    "type", ["Relu", "Add", "Mul", "AveragePool", "GlobalAveragePool", "Softmax", "ReduceSum", "Neg"]
)
def test_ops_that_compute_do_not(type: str):
    b = GraphBuilder()
    x = b.input()
    y = b.op(type, [x])
    graph = b.graph(y)
    assert not tied(graph, x, y)
    assert not keeps_grid(graph, graph.ops[0])


def test_every_output_of_split_is_tied():
    tensors = [Tensor(name) for name in "xab"]
    graph = Graph(tensors, [Op("Split", (0,), (1, 2))], [0], [1, 2])
    assert tied(graph, 0, 1)
    assert tied(graph, 0, 2)


def test_only_the_first_input_is_data():
    b = GraphBuilder()
    table, indices = b.input("table"), b.input("indices")
    y = b.op("Gather", [table, indices])
    assert tied(b.graph(y), table, y)
    assert not tied(b.graph(y), indices, y)


def test_an_op_without_inputs_ties_nothing():
    b = GraphBuilder()
    y = b.op("Identity", [None])
    z = b.op("Identity", [])
    assert not tied(b.graph(z), y, z)


@pytest.mark.parametrize(
    ("value", "mode", "expected"),
    [
        (None, "constant", True),
        (0.0, "constant", True),
        (-0.0, "constant", True),
        (5.0, "constant", False),
        (5.0, b"constant", False),
        (5.0, "reflect", True),
        (5.0, b"edge", True),
    ],
)
def test_pad_is_tied_only_where_the_range_contains_its_constant(value, mode, expected: bool):
    b = GraphBuilder()
    x, pads = b.input(), b.stored(None, (8,), value=[0] * 8, dtype="int64")
    constant = None if value is None else b.stored(None, (), value=value)
    y = b.op("Pad", [x, pads, constant], mode=mode)
    assert tied(b.graph(y), x, y) is expected


def test_pad_with_an_unknown_constant_is_not_tied():
    b = GraphBuilder()
    x, pads, computed = b.input(), b.stored(None, (8,), value=[0] * 8, dtype="int64"), b.input("value", ())
    y = b.op("Pad", [x, pads, computed])
    assert not tied(b.graph(y), x, y)


@pytest.mark.parametrize(
    ("mode", "expected"), [("nearest", True), (b"nearest", True), ("linear", False), ("cubic", False)]
)
def test_resize_is_tied_where_it_copies(mode, expected: bool):
    b = GraphBuilder()
    x = b.input()
    y = b.op("Resize", [x], mode=mode)
    assert tied(b.graph(y), x, y) is expected


def test_concat_ties_all_inputs_and_the_output():
    b = GraphBuilder()
    xs = [b.input(name) for name in "abc"]
    y = b.op("Concat", xs)
    assert all(tied(b.graph(y), x, y) for x in xs)


def test_concat_leaves_a_stored_operand_alone():
    b = GraphBuilder()
    x, w = b.input(), b.stored("token:weight", (1, 4))
    y = b.op("Concat", [w, x])
    assert tied(b.graph(y), x, y)
    assert not tied(b.graph(y), w, y)


@pytest.mark.parametrize("odd_one", [0, 1, 2])
def test_concat_ties_those_that_agree_with_its_output_in_any_order(odd_one: int):
    b = GraphBuilder()
    xs = [b.input(name) for name in "abc"]
    y = b.op("Concat", xs)
    groups = {**dict.fromkeys(xs, "uint8"), y: "uint8", xs[odd_one]: "uint16"}
    for i, x in enumerate(xs):
        assert tied(b.graph(y), x, y, groups) is (i != odd_one)


def test_a_tie_ends_at_a_tensor_that_is_not_quantized():
    b = GraphBuilder()
    x = b.input()
    middle = b.op("Reshape", [x], "middle:output")
    y = b.op("Reshape", [middle], "y:output")
    graph = b.graph(y)
    assert not tied(graph, x, y, {x: "uint8", y: "uint8"})
    assert tied(graph, x, y, {x: "uint8", middle: "uint8", y: "uint8"})


def test_a_tie_runs_through_a_tensor_inside_an_op():
    b = GraphBuilder()
    x = b.input()
    inner = b.op("Slice", [x])  # x[:, 1:] is two Slices and one site
    y = b.op("Slice", [inner], "getitem.0:output")
    assert tied(b.graph(y), x, y, {x: "uint8", y: "uint8"})
    other = b.op("Sigmoid", [x])
    z = b.op("Slice", [other], "z:output")
    assert not tied(b.graph(z), x, z, {x: "uint8", z: "uint8"})


def test_a_tie_ends_where_the_specs_differ():
    b = GraphBuilder()
    x = b.input()
    y = b.op("Reshape", [x])
    assert not tied(b.graph(y), x, y, {x: "uint8", y: "uint16"})


# values that are written over others


@pytest.mark.parametrize("type", ["ScatterND", "ScatterElements"])
def test_what_is_assigned_by_index_ties_what_it_replaces(type: str):
    b = GraphBuilder()
    x, places, new = b.input("x"), b.input("places", dtype="int64"), b.input("new")
    y = b.op(type, [x, places, new])
    assert tied(b.graph(y), x, y)
    assert tied(b.graph(y), new, y)
    assert not tied(b.graph(y), places, y)
    b = GraphBuilder()
    x, places, new = b.input("x"), b.input("places", dtype="int64"), b.input("new")
    y = b.op(type, [x, places, new], reduction="add")
    assert not tied(b.graph(y), x, y)


def test_a_tie_runs_through_assignments_inside_an_op_and_over_zeros():
    b = GraphBuilder()
    places, first, second = b.input("places", dtype="int64"), b.input("first"), b.input("second")
    zeros = b.op("ConstantOfShape", [b.input("shape", (4,), "int64")])
    y = b.op("ScatterND", [b.op("ScatterND", [zeros, places, first]), places, second])
    z = b.op("Slice", [y], "getitem.0:output")
    groups = dict.fromkeys((first, second, z), "uint8")
    assert tied(b.graph(z), first, second, groups)
    assert tied(b.graph(z), first, z, groups)
    b = GraphBuilder()  # ones need not be on the grid
    ones = b.stored(None, (4,), value=np.ones(4))
    new = b.input("new")
    z = b.op("Slice", [b.op("ScatterND", [ones, b.input("places", dtype="int64"), new])], "getitem.0:output")
    assert not tied(b.graph(z), new, z, {new: "uint8", z: "uint8"})


@pytest.mark.parametrize(
    ("computed", "expected"),
    [
        (lambda b, x: b.op("Add", [x, b.input("z")]), False),
        (lambda b, x: b.op("Div", [x, b.stored(None, (), value=8.0)]), False),
        (lambda b, x: b.op("Mul", [x, b.stored(None, (), value=300.0)]), True),
        (lambda b, x: b.op("Mul", [x, b.input("z")]), True),
        (lambda b, x: b.op("Sigmoid", [b.op("Slice", [x])]), True),
        (lambda b, x: b.op("Mul", [b.input("y"), b.input("z")]), False),
    ],
)
def test_new_values_of_another_size_than_those_that_they_are_computed_from_share_no_grid(computed, expected: bool):
    b = GraphBuilder()
    x = b.op("Neg", [b.input("a")], "neg:output")
    y = b.op("ScatterND", [b.op("Transpose", [x]), b.input("places", dtype="int64"), computed(b, x)])
    graph = b.graph(b.op("Neg", [y], "y:output"))
    assert bool(find_rescaled(graph)) is expected
    decisions = make_plan(graph, w8a8()).decisions
    assert decisions["neg:output"].state == "quantized"


def test_assigned_scores_that_leave_the_model_keep_their_own_encoding():
    for made, apart in (("Sigmoid", True), ("Sqrt", False)):
        b = GraphBuilder()
        x = b.op("Neg", [b.input("a")], "neg:output")
        scores = b.op(made, [b.input("b")], "scores:output")
        y = b.op("ScatterND", [x, b.input("places", dtype="int64"), scores], "y:output")
        decisions = make_plan(b.graph(y), w8a8()).decisions
        assert (decisions["y:output"].state, decisions["scores:output"].state) == (
            ("float", "quantized") if apart else ("tied", "tied")
        )
