"""Stored tensors that are only rearranged are stored rearranged; masks and first states made of shapes stay float."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_backend.opening.read_graph import read_graph
from onnx_backend.passes.fold_constants import fold_rearranged, is_full_slice
from qsdk import w8a8
from qsdk.core.planning.make_plan import make_plan
from qsdk.core.planning.plan import Plan
from qsdk.core.planning.unquantizable import steering_tensors

OPSETS = {"": 21}


def test_parts_of_a_large_tensor_are_computed_and_others_are_not():
    packed = numpy_helper.from_array(np.arange(6000, dtype=np.float32).reshape(60, 100), "w")
    bounds = {n: numpy_helper.from_array(np.array([v]), n) for n, v in (("a", 20), ("b", 40), ("axis", 0))}
    stored = {"w": packed, **bounds}
    found = fold_rearranged(helper.make_node("Slice", ["w", "a", "b", "axis"], ["part"]), stored, OPSETS, {})
    assert found is not None
    assert np.array_equal(found["part"], np.arange(2000, 4000).reshape(20, 100))
    assert fold_rearranged(helper.make_node("Mul", ["w", "w"], ["y"]), stored, OPSETS, {}) is None
    assert fold_rearranged(helper.make_node("Concat", ["w", "x"], ["y"], axis=0), stored, OPSETS, {}) is None


@pytest.mark.parametrize(
    ("start", "end", "step", "all_of_it"),
    [(0, 2**62, 1, True), (1, 2**62, 1, False), (0, 5, 1, False), (0, 2**62, 2, False)],
)
def test_only_a_slice_of_everything_is_idle(start: int, end: int, step: int, all_of_it: bool):
    small = {"s": np.array([start]), "e": np.array([end]), "a": np.array([0]), "t": np.array([step])}
    assert is_full_slice(helper.make_node("Slice", ["x", "s", "e", "a", "t"], ["y"]), small) is all_of_it
    assert not is_full_slice(helper.make_node("Slice", ["x", "s", "computed"], ["y"]), small)


def planned(nodes: list, inputs: dict[str, list], **stored: np.ndarray) -> Plan:
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()]
    made = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    kept = [numpy_helper.from_array(value, name) for name, value in stored.items()]
    graph = helper.make_graph(nodes, "g", given, made, kept)
    return make_plan(read_graph(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])), w8a8())


def test_a_large_stored_mask_is_no_weight():
    mask = np.triu(np.full((20, 20), -np.inf, np.float32), 1)
    nodes = [
        helper.make_node("Add", ["x", "mask"], ["s"]),
        helper.make_node("Softmax", ["s"], ["p"]),
        helper.make_node("IsNaN", ["p"], ["n"]),
        helper.make_node("Where", ["n", "zero", "p"], ["y"]),
    ]
    plan = planned(nodes, {"x": [20, 20]}, mask=mask, zero=np.zeros((), np.float32))
    assert not any(d.quantized for d in (*plan.decisions.values(), *plan.inside) if d.kind == "weight")
    assert plan.decisions["s:output"].reason == plan.decisions["p:output"].reason == "inside MaskedSoftmax"
    spec = plan.decisions["y:output"].spec
    assert spec is not None
    assert spec.fixed_range == (0.0, 1.0)


def test_an_ordinary_stored_operand_of_add_is_a_constant():
    plan = planned([helper.make_node("Add", ["x", "c"], ["y"])], {"x": [20, 20]}, c=np.ones((20, 20), np.float32))
    assert any(d.kind == "weight" and d.quantized for d in plan.decisions.values())


def test_positions_made_of_shapes_are_data_and_zeros_for_a_state_are_not():
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Expand", ["one", "shape"], ["spread"]),
        helper.make_node("CumSum", ["spread", "axis"], ["positions"]),
        helper.make_node("Add", ["x", "positions"], ["y"]),
    ]
    stored = {"one": np.ones((), np.float32), "axis": np.array(1)}
    plan = planned(nodes, {"x": ["n", 4]}, **stored)
    found = {site.partition(":")[0]: d.state for site, d in plan.decisions.items()}
    assert found["positions"] == "quantized"
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])]
    made = [helper.make_tensor_value_info("y", TensorProto.BOOL, None)]
    nodes[-1] = helper.make_node("Equal", ["x", "positions"], ["y"])
    kept = [numpy_helper.from_array(value, name) for name, value in stored.items()]
    graph = read_graph(helper.make_model(helper.make_graph(nodes, "g", given, made, kept)))
    assert {graph.tensors[t].name for t in steering_tensors(graph, ())} == {"spread", "positions"}
