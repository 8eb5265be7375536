"""If, Loop and Scan: the model opens, a decided If is inlined, and what is inside a body stays float and says so."""

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from qdq_models import make_model, weights

import qsdk
from onnx_backend.lower import insert
from onnx_backend.opening.from_float import open_float
from qsdk import w8a8
from qsdk.core.planning.plan import Plan

pytestmark = pytest.mark.usefixtures("exact_products")

node, value = helper.make_node, helper.make_tensor_value_info
X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


def run(model, x=X):
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})


def unquantized(opened_or_sim):
    return insert(opened_or_sim.traced().model, Plan({}), {})[0]


def branch(name, nodes, output, stored=()):
    tensors = [numpy_helper.from_array(array, key) for key, array in dict(stored).items()]
    return helper.make_graph(nodes, name, [], [value(output, TensorProto.FLOAT, None)], tensors)


def choosing(condition, stored=(), more=()):
    """relu(x) @ w, then either a MatMul by a weight of the branch's own or a negation."""
    then = branch(
        "then",
        [node("MatMul", ["m", "v"], ["t"], "inner"), node("Relu", ["t"], ["o"], "after")],
        "o",
        weights(1, v=(5, 5)),
    )
    other = branch("else", [node("Neg", ["m"], ["t"], "inner"), node("Add", ["t", "x5"], ["o"], "after")], "o")
    nodes = [
        *more,
        node("Relu", ["x"], ["r"], "relu"),
        node("MatMul", ["r", "w"], ["m"], "mm"),
        node("Slice", ["m", "zero", "one", "axis"], ["x5"], "slice"),
        node("If", [condition], ["y"], "choose", then_branch=then, else_branch=other),
    ]
    own = {"zero": np.array([0]), "one": np.array([1]), "axis": np.array([1])}
    return make_model(nodes, {"x": ["n", 4]}, {"y": ["n", 5]}, {**weights(w=(4, 5)), **own, **dict(stored)})


def open_choice():
    more = [node("ReduceMax", ["x"], ["top"], keepdims=0), node("Greater", ["top", "limit"], ["c"])]
    return choosing("c", {"limit": np.float32(0)}, more)


@pytest.mark.parametrize("taken", [True, False])
def test_an_if_with_a_stored_condition_is_inlined_and_planned(taken):
    model = choosing("c", {"c": np.array(taken)})
    opened = open_float(model, w8a8())
    assert "If" not in {n.op_type for n in opened.model.graph.node}
    np.testing.assert_array_equal(run(opened.model)[0], run(model)[0])
    sites = opened.plan.decisions
    if taken:
        assert sites["choose/inner:weight"].quantized
        assert sites["choose/after:output"].quantized
    assert opened.notes.inside == ()
    assert [output.name for output in opened.model.graph.output] == ["y"]


def test_a_condition_that_follows_from_a_static_shape_is_decided():
    more = [
        node("Shape", ["x"], ["shape"], start=1),
        node("ReduceMax", ["shape"], ["columns"], keepdims=0),
        node("Equal", ["columns", "four"], ["c"]),
    ]
    model = choosing("c", {"four": np.int64(4)}, more)
    opened = open_float(model, w8a8())
    assert {n.op_type for n in opened.model.graph.node} == {"Relu", "MatMul"}
    np.testing.assert_array_equal(run(opened.model)[0], run(model)[0])


def test_a_branch_that_gives_a_stored_tensor_or_an_outer_one():
    same = branch("then", [node("Identity", ["r"], ["o"])], "o")
    stored = branch("else", [node("Identity", ["k"], ["u"])], "k", weights(k=(3, 4)))
    for taken in (True, False):
        nodes = [node("Relu", ["x"], ["r"]), node("If", ["c"], ["y"], then_branch=same, else_branch=stored)]
        model = make_model(nodes, {"x": [3, 4]}, {"y": [3, 4]}, {"c": np.array(taken)})
        np.testing.assert_array_equal(run(open_float(model, w8a8()).model)[0], run(model)[0])


def test_names_of_a_branch_do_not_meet_those_outside():
    inner = branch("then", [node("Relu", ["x"], ["a"], "mm"), node("Neg", ["a"], ["r2"], "relu")], "r2")
    nodes = [
        node("Neg", ["x"], ["choose/a"], "choose/mm"),
        node("If", ["c"], ["z"], "choose", then_branch=inner, else_branch=inner),
        node("Add", ["choose/a", "z"], ["y"], "add"),
    ]
    model = make_model(nodes, {"x": [3, 4]}, {"y": [3, 4]}, {"c": np.array(True)})
    opened = open_float(model, w8a8())
    np.testing.assert_array_equal(run(opened.model)[0], run(model)[0])


def test_an_open_if_stays_and_everything_inside_says_so():
    model = open_choice()
    sim = qsdk.quantize(model, None, w8a8())
    rows = {row["site"]: row for row in sim.coverage().rows}
    inside = {site: row for site, row in rows.items() if site.startswith("(choose/")}
    assert set(inside) == {f"(choose/{where})" for where in (
        "then_branch/v", "then_branch/t", "then_branch/o", "else_branch/t", "else_branch/o"
    )}  # fmt: skip
    for site, row in inside.items():
        assert row["state"] == "float"
        assert row["reason"].startswith(f"inside the {site.split('/')[1]} of the If 'choose'")
    assert rows["mm:output"]["state"] == "quantized"
    assert rows["choose:output"]["state"] == "quantized"


@pytest.mark.spread(1)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_captured_tensor_is_quantized_inside_too(sign, tmp_path):
    sim = qsdk.quantize(open_choice(), None, w8a8())
    data = [np.abs(X), -np.abs(X)]
    qsdk.calibrate(sim, data, progress=False)
    qsdk.export(sim, tmp_path / "m.onnx")
    x = sign * np.abs(X)
    m = sim.encodings["mm:output"].fake_quantize(
        np.maximum(sim.encodings["x:input"].fake_quantize(x), 0) @ sim.stored_values()["mm:weight"]
    )
    wanted = np.maximum(m @ weights(1, v=(5, 5))["v"], 0) if sign > 0 else -m + m[:, :1]
    step = float(sim.encodings["choose:output"].scale[0])
    assert np.abs(sim.run(x)[0] - wanted).max() <= 1.5 * step
    np.testing.assert_allclose(run_file(tmp_path / "m.onnx", x), sim.run(x)[0], atol=1.01 * step)
    assert qsdk.check_parity(sim, tmp_path / "m.onnx", data, progress=False).summary["passed"]


def run_file(path, x):
    return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


def looping():
    """y = x doubled three times inside a Loop that also reads an outer weight, and all its steps."""
    body = helper.make_graph(
        [
            node("MatMul", ["h", "w"], ["p"], "step"),
            node("Add", ["p", "h"], ["h2"], "add"),
            node("Identity", ["h2"], ["seen"]),
            node("Identity", ["go"], ["go2"]),
        ],
        "body",
        [value("i", 7, []), value("go", 9, []), value("h", 1, ["n", 4])],
        [value("go2", 9, []), value("h2", 1, ["n", 4]), value("seen", 1, ["n", 4])],
    )
    nodes = [
        node("Relu", ["x"], ["r"], "relu"),
        node("Loop", ["three", "true", "r"], ["y", "steps"], "loop", body=body),
        node("MatMul", ["y", "w"], ["z"], "mm"),
    ]
    stored = {**weights(w=(4, 4)), "three": np.int64(3), "true": np.array(True)}
    return make_model(nodes, {"x": ["n", 4]}, {"z": None, "steps": None}, stored)


def scanning():
    body = helper.make_graph(
        [node("MatMul", ["h", "w"], ["p"]), node("Add", ["p", "row"], ["h2"]), node("Identity", ["h2"], ["seen"])],
        "body",
        [value("h", 1, [1, 4]), value("row", 1, [4])],
        [value("h2", 1, [1, 4]), value("seen", 1, [1, 4])],
    )
    nodes = [
        node("Relu", ["x"], ["r"], "relu"),
        node("Scan", ["start", "r"], ["last", "y"], "scan", body=body, num_scan_inputs=1),
    ]
    return make_model(nodes, {"x": [3, 4]}, {"y": None, "last": None}, weights(w=(4, 4), start=(1, 4)))


@pytest.mark.parametrize("build", [looping, scanning])
def test_loops_go_the_whole_road_and_their_bodies_stay_float(build, tmp_path):
    model = build()
    sim = qsdk.quantize(model, X, w8a8())
    for left, right in zip(run(unquantized(sim)), run(model), strict=True):
        np.testing.assert_array_equal(left, right)
    rows = sim.coverage().rows
    kind = "Loop" if build is looping else "Scan"
    inside = [row["reason"] for row in rows if f"inside the body of the {kind}" in row["reason"]]
    assert len(inside) == 3
    assert all(row["reason"] for row in rows)
    qsdk.calibrate(sim, [X], progress=False)
    qsdk.export(sim, tmp_path / "m.onnx")
    assert qsdk.check_parity(sim, tmp_path / "m.onnx", [X], progress=False).summary["passed"]
    exact, got = run(model)[0], run_file(tmp_path / "m.onnx", X)
    assert np.abs(exact - got).max() < 0.05 * np.abs(exact).max()


def test_a_weight_that_only_a_body_reads_says_where():
    rows = {row["site"]: row for row in qsdk.quantize(scanning(), None, w8a8()).coverage().rows}
    assert rows["(w)"]["reason"] == "read only inside the Scan 'scan': bodies of control flow stay float"


def test_nested_bodies_are_named_by_their_path():
    deepest = branch("deep", [node("Relu", ["r"], ["o"])], "o")
    middle = branch("middle", [node("If", ["c"], ["p"], "second", then_branch=deepest, else_branch=deepest)], "p")
    nodes = [
        node("Relu", ["x"], ["r"], "relu"),
        node("ReduceMax", ["r"], ["top"], keepdims=0),
        node("Cast", ["top"], ["c"], to=TensorProto.BOOL),
        node("If", ["c"], ["y"], "first", then_branch=middle, else_branch=middle),
    ]
    model = make_model(nodes, {"x": [3, 4]}, {"y": [3, 4]}, {})
    sim = qsdk.quantize(model, None, w8a8())
    sites = {row["site"] for row in sim.coverage().rows}
    assert {"(first/then_branch/p)", "(first/then_branch/second/else_branch/o)"} <= sites
    np.testing.assert_array_equal(run(unquantized(sim))[0], run(model)[0])


@pytest.mark.parametrize("left_out", [0, 1])
def test_a_part_that_a_split_leaves_out_does_not_end_the_process(left_out):
    """ONNX Runtime writes to a result of Split, If, Loop or Scan that has no name, at an address of none."""
    names = ["", "kept"][:: -1 if left_out else 1]
    nodes = [node("Split", ["x"], names, "parts", axis=1, num_outputs=2), node("Relu", ["kept"], ["y"])]
    value_of = {"x": (3, 4), "y": (3, 2)}
    ends = [value(name, TensorProto.FLOAT, shape) for name, shape in value_of.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:])
    sim = qsdk.quantize(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), None)
    qsdk.calibrate(sim, [X], progress=False)
    columns = slice(0, 2) if left_out else slice(2, 4)
    np.testing.assert_allclose(sim(X)[0], X[:, columns].clip(0), atol=0.03)
