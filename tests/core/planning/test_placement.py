"""Pairs only where an integer kernel of ONNX Runtime reads or writes them."""

import pytest
from plans import site
from strategies import GraphBuilder

from qsdk import w4a8, w8a8, w8a16
from qsdk.core.planning.make_plan import make_plan

KERNELS = w8a8().for_dialect("onnxruntime", processor="vnni")


def states(b: GraphBuilder, output: int, config=KERNELS) -> dict[str, str]:
    plan = make_plan(b.graph(output), config)
    return {name.partition(":")[0]: plan.decisions[name].state for name in plan.decisions if name.endswith("put")}


def test_what_layers_read_and_convolutions_give_is_quantized_and_nothing_else():
    b = GraphBuilder()
    first = b.op("Sigmoid", [b.conv(b.input(), "first")], "gate:output")
    second = b.conv(b.op("Exp", [first], "exp:output"), "second")
    last = b.op("Tanh", [second], "tanh:output")
    found = states(b, last)
    assert found == {
        "x": "quantized",
        "first": "quantized",
        "gate": "float",
        "exp": "quantized",
        "second": "quantized",
    } | {"tanh": "float"}
    plan = make_plan(b.graph(last), KERNELS)
    assert site(plan, "gate:output").reason.startswith("no integer kernel of ONNX Runtime reads or writes it")


@pytest.mark.parametrize("type", ["MaxPool", "Reshape", "Transpose"])
def test_what_only_moves_values_stands_behind_the_pair(type: str):
    b = GraphBuilder()
    moved = b.op(type, [b.op("Exp", [b.input()], "exp:output")], "moved:output")
    found = states(b, b.conv(moved, "conv"))
    assert (found["exp"], found["moved"], found["x"]) == ("quantized", "tied", "float")


@pytest.mark.parametrize("type", ["Add", "Mul"])
def test_a_sum_is_on_codes_where_a_layer_reads_it_and_an_operand_is_there_as_codes(type: str):
    b = GraphBuilder()
    x = b.input()
    gate = b.op("Exp", [x], "gate:output")
    read = b.op(type, [b.conv(x, "conv"), gate], "read:output")
    found = states(b, b.conv(read, "after"))
    assert (found["gate"], found["read"]) == ("quantized", "quantized")
    b = GraphBuilder()
    x = b.input()
    left = b.op(type, [b.conv(x, "conv"), b.op("Exp", [x], "gate:output")], "left:output")
    found = states(b, b.op("Tanh", [left], "tanh:output"))
    assert (found["gate"], found["left"]) == ("float", "float")


def test_a_layer_whose_weight_stays_float_reads_floats():
    b = GraphBuilder()
    read = b.conv(b.op("Exp", [b.input()], "exp:output"), "conv")
    assert states(b, read, KERNELS.skip("conv:weight"))["exp"] == "float"


def test_a_product_of_a_stored_tensor_that_is_no_weight_reads_floats():
    b = GraphBuilder()
    positions = b.stored(None, (8, 8), value=[[0.5] * 8] * 8)
    read = b.op("MatMul", [positions, b.op("Exp", [b.input()], "exp:output")], "mixed:output")
    assert states(b, read)["exp"] == "float"
    vector = b.op("MatMul", [b.op("Exp", [0], "read:output"), b.stored("shift:weight", (8,))], "vector:output")
    assert states(b, vector)["read"] == "float"
    both = b.op("MatMul", [b.op("Exp", [0], "left:output"), b.op("Sin", [0], "right:output")], "product:output")
    assert {states(b, both)[name] for name in ("left", "right")} == {"quantized"}


def test_a_rule_that_names_a_tensor_and_16_bits_are_as_wanted():
    b = GraphBuilder()
    last = b.op("Tanh", [b.op("Exp", [b.conv(b.input(), "conv")], "exp:output")], "tanh:output")
    graph = b.graph(last)
    plan = make_plan(graph, KERNELS.override("exp", activation="uint8"))
    assert [site(plan, f"{name}:output").state for name in ("exp", "tanh")] == ["quantized", "float"]
    wide = make_plan(graph, w8a16().for_dialect("onnxruntime"))
    assert site(wide, "exp:output").state == "quantized"
    narrow = make_plan(graph, w4a8().for_dialect("onnxruntime"))
    assert site(narrow, "exp:output").state == "float"
    everywhere = make_plan(graph, w8a8().for_dialect("onnxruntime", placement="all"))
    assert {d.state for d in everywhere.decisions.values()} == {
        d.state for d in make_plan(graph, w8a8()).decisions.values()
    }


def test_with_ranges_found_at_run_time_only_what_layers_read_is_quantized():
    b = GraphBuilder()
    first = b.op("MatMul", [b.input(), b.stored("first:weight", (8, 8))], "first:output")
    second = b.op("MatMul", [b.op("Exp", [first], "exp:output"), b.stored("second:weight", (8, 8))], "second:output")
    config = w8a8().override("*", dynamic_activations=True).for_dialect("onnxruntime")
    assert states(b, second, config) == {"x": "quantized", "first": "float", "exp": "quantized", "second": "float"}
