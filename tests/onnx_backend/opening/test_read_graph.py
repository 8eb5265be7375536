import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto, helper, numpy_helper
from qdq_models import convnet, make_model, mlp, run, weights

from onnx_backend.opening.read_graph import read_graph
from onnx_backend.proto.model_io import load
from onnx_backend.proto.nodes import metadata, set_metadata
from onnx_backend.proto.opsets import at_opset, opset_of
from onnx_backend.qdq.marks import mark, mark_node
from qsdk import FileFormatError, ModelError, w8a8
from qsdk.core.planning.make_plan import make_plan

node = helper.make_node


def marked(nodes, outputs, stored=None, inputs=None):
    imports = [helper.make_opsetid("qsdk", 1)]
    return make_model(nodes, inputs or {"x": ["n", 4]}, outputs, stored or {}, imports=imports)


def test_a_mark_is_an_identity_and_a_constant_stays_one():
    nodes = [
        mark_node("x:input", "x", "xq"),
        mark_node("fc:weight", "w", "wq"),
        node("MatMul", ["xq", "wq"], ["m"], "mm"),
        mark_node("fc:output", "m", "y"),
    ]
    graph = read_graph(marked(nodes, {"y": ["n", 3]}, weights(w=(4, 3))))
    assert [(t.name, t.site, t.constant) for t in graph.tensors] == [
        ("w", "fc:weight", True),
        ("x", "x:input", False),
        ("m", "fc:output", False),
    ]
    assert [(op.type, op.inputs, op.outputs) for op in graph.ops] == [("MatMul", (1, 0), (2,))]
    assert (list(graph.inputs), list(graph.outputs)) == ([1], [2])
    assert graph.tensors[1].shape == ("n", 4)
    assert graph.tensors[2].shape == ("n", 3)
    assert graph.tensors[0].value is not None


def test_the_same_site_twice_is_one_and_a_second_site_is_an_identity():
    nodes = [
        mark_node("a:input", "x", "one"),
        mark_node("a:input", "x", "two"),
        mark_node("b:input", "two", "three"),
        mark_node("b:input", "x", "four"),
        node("Add", ["one", "two"], ["s"], "add"),
        node("Add", ["three", "four"], ["t"], "add2"),
    ]
    graph = read_graph(marked(nodes, {"s": ["n", 4], "t": ["n", 4]}))
    assert [op.type for op in graph.ops] == ["Identity", "Add", "Add"]
    x, second = graph.sites["a:input"], graph.sites["b:input"]
    assert graph.ops[0].inputs == (x,)
    assert graph.ops[0].outputs == (second,)
    assert graph.ops[1].inputs == (x, x)
    assert graph.ops[2].inputs == (second, second)


def test_one_site_on_two_tensors_is_refused():
    nodes = [mark_node("a:input", "x", "u"), mark_node("a:input", "w", "v"), node("MatMul", ["u", "v"], ["y"])]
    with pytest.raises(ModelError, match=r"a:input marks two tensors, 'x' and 'w'"):
        read_graph(marked(nodes, {"y": ["n", 3]}, weights(w=(4, 3))))


def test_attributes_constants_and_absent_inputs():
    nodes = [
        node("Constant", [], ["low"], value_float=-1.0),
        node("Clip", ["x", "low", ""], ["y"], "clip"),
        node("Resize", ["i", "", "scales"], ["z"], "resize", mode="nearest"),
    ]
    stored = {"scales": np.ones(4, np.float32)}
    graph = read_graph(make_model(nodes, {"x": ["n", 4], "i": [1, 1, 2, 2]}, {"y": ["n", 4], "z": None}, stored))
    assert graph.ops[0].inputs[2] is None
    assert graph.scalar(graph.ops[0].inputs[1]) == -1.0
    assert graph.ops[1].attributes["mode"] == "nearest"
    assert [t.constant for t in graph.tensors] == [True, True, False, False, False, False]


def test_large_constants_keep_no_value_but_their_shape_reaches_the_output():
    graph = read_graph(
        make_model([node("MatMul", ["x", "w"], ["y"])], {"x": ["n", 100]}, {"y": None}, weights(w=(100, 90)))
    )
    assert graph.tensors[0].value is None
    assert graph.tensors[-1].shape == ("n", 90)


def test_without_marks_every_float_tensor_gets_a_site():
    graph = read_graph(convnet())
    assert list(graph.sites)[:6] == [
        "conv:weight",
        "conv:bias",
        "deconv:weight",
        "deconv:bias",
        "gemm:weight",
        "gemm:bias",
    ]
    assert all(t.site for t in graph.tensors if t.is_float)
    assert graph.tensors[graph.sites["softmax:output"]].name == "p"


def test_owners_are_unique_where_names_are_missing_or_shared():
    nodes = [node("Relu", ["x"], ["r"]), node("Relu", ["r"], ["s"], "same"), node("Relu", ["s"], ["y"], "same")]
    graph = read_graph(make_model(nodes, {"x": ["n", 4]}, {"y": ["n", 4]}, {}))
    assert list(graph.sites) == ["x:input", "r:output", "same:output", "same_1:output"]


def test_further_outputs_and_shared_or_scalar_constants():
    nodes = [
        node("Split", ["x"], ["a", "b"], "split", num_outputs=2, axis=1),
        node("Where", ["c", "k1", "k2"], ["w"], "where"),
        node("Mul", ["a", "two"], ["m"], "mul"),
        node("Add", ["m", "w"], ["y"], "add"),
    ]
    stored = weights(k1=(2,), k2=(2,)) | {"c": np.array([True, False]), "two": np.float32(2)}
    sites = read_graph(make_model(nodes, {"x": ["n", 4]}, {"y": ["n", 2], "b": ["n", 2]}, stored)).sites
    assert {"split:output", "split:output1", "where:constant", "where:constant_1"} < set(sites)
    assert "mul:constant" not in sites


@pytest.mark.parametrize("build", [mlp, convnet])
def test_marking_an_unmarked_model_keeps_sites_plan_and_values(build):
    model = build()
    graph = read_graph(model)
    again = read_graph(mark(model, graph))
    assert list(again.sites) == list(graph.sites)
    assert make_plan(again, w8a8()).decisions.keys() == make_plan(graph, w8a8()).decisions.keys()
    for site, decision in make_plan(graph, w8a8()).decisions.items():
        assert make_plan(again, w8a8()).decisions[site] == decision


def test_what_a_body_captures_is_read_by_the_op_that_holds_it():
    branch = helper.make_graph([node("Identity", ["x"], ["o"])], "b", [], [helper.make_tensor_value_info("o", 1, None)])
    nodes = [node("If", ["c"], ["y"], "choose", then_branch=branch, else_branch=branch)]
    graph = read_graph(make_model(nodes, {"x": ["n", 4]}, {"y": ["n", 4]}, {"c": np.array(True)}))
    assert [graph.tensors[t].name for t in graph.ops[0].inputs] == ["c", "x"]
    assert graph.ops[0].attributes == {}


def test_a_site_inside_a_body_is_refused():
    branch = helper.make_graph(
        [mark_node("a:output", "x", "o")], "b", [], [helper.make_tensor_value_info("o", 1, None)]
    )
    nodes = [node("If", ["c"], ["y"], "choose", then_branch=branch, else_branch=branch)]
    with pytest.raises(ModelError, match="sites lie inside the If 'choose'"):
        read_graph(marked(nodes, {"y": ["n", 4]}, {"c": np.array(True)}))


def test_functions_are_inlined():
    body = [node("Relu", ["i"], ["t"]), node("Neg", ["t"], ["o"])]
    function = helper.make_function("local", "F", ["i"], ["o"], body, [helper.make_opsetid("", 21)])
    imports = [helper.make_opsetid("local", 1)]
    call = [node("F", ["x"], ["y"], "call", domain="local")]
    model = make_model(call, {"x": ["n", 4]}, {"y": ["n", 4]}, {}, imports=imports, functions=[function])
    assert [op.type for op in read_graph(model).ops] == ["Relu", "Neg"]


def test_a_tensor_that_nothing_makes_is_a_model_error():
    nodes = [node("Relu", ["r"], ["y"], "first"), node("Relu", ["x"], ["r"], "second")]
    with pytest.raises(ModelError, match="'first' reads 'r', which nothing before it makes"):
        read_graph(make_model(nodes, {"x": ["n", 4]}, {"y": ["n", 4]}, {}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no file"),
        (b"", "no opset or no graph outputs"),
        (b"PK\x03\x04 not onnx", "cannot be read as ONNX"),
        (mlp().SerializeToString()[:-40], "truncated"),
        (mlp().SerializeToString()[:5], "truncated"),
    ],
)
def test_unreadable_files_are_named(tmp_path, content, message):
    path = tmp_path / "model.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FileFormatError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 400))
def test_a_model_cut_anywhere_is_an_error_of_ours_or_still_a_model(length):
    data = convnet().SerializeToString()
    try:
        assert isinstance(load(data[: len(data) * length // 400]), ModelProto)
    except FileFormatError:
        assert length < 400


def test_missing_external_data_is_named(tmp_path):
    model = mlp()
    tensor = model.graph.initializer[0]
    tensor.data_location = TensorProto.EXTERNAL
    tensor.ClearField("raw_data")
    tensor.external_data.add(key="location", value="weights.bin")
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(
        FileFormatError, match=r"model\.onnx keeps the weight .w1. in the file .weights\.bin., which cannot be read"
    ):
        load(tmp_path / "model.onnx")


def test_an_old_model_is_raised_and_keeps_its_values_and_metadata():
    model = convnet(13)
    set_metadata(model.graph.node[0], site="here")
    x = np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)
    before = run(model, {"x": x})
    raised = at_opset(load(model))
    assert (opset_of(raised), raised.ir_version) == (21, 10)
    assert metadata(raised.graph.node[0]) == {"qsdk.site": "here"}
    for left, right in zip(before, run(raised, {"x": x}), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


def test_a_model_newer_than_the_runtime_is_refused():
    model = mlp()
    model.opset_import[0].version = 28
    with pytest.raises(ModelError, match="opset 28; the runtime knows up to 26"):
        at_opset(model)


def test_a_large_initializer_that_is_a_graph_input_too_is_a_constant():
    model = make_model(
        [node("MatMul", ["x", "w"], ["y"])], {"x": ["n", 4], "w": [4, 3]}, {"y": ["n", 3]}, weights(w=(4, 3))
    )
    graph = read_graph(model)
    assert [graph.tensors[i].name for i in graph.inputs] == ["x"]
    assert numpy_helper.to_array(model.graph.initializer[0]).shape == graph.tensors[0].shape
