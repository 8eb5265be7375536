"""Integer-only conversion of whole models in every shape that ONNX allows: their edges, names, bodies and sizes."""

from itertools import pairwise

import numpy as np
import onnx
import pytest
from foreign_forms import OUT, stamped, started
from integer_models import INT8, INT16, LEVELS, UINT8, UINT16, Net, run
from onnx import TensorProto, helper

import qsdk
from onnx_backend.integer.reference.run import run_reference

F32 = np.float32


def basic(shape=(2, 8)):
    net, x = started(shape)
    net.output(net.qdq(net.op("MatMul", x, net.weight((8, 4), 1)[0]), *OUT), [shape[0], 4])
    return net


def converted(model, folder, **options):
    summary = qsdk.to_integer(model, folder / "integer.onnx", **options).summary
    assert summary["float_tensors"] == 0
    assert summary["operations_max_lsb"] <= 1
    return onnx.load(folder / "integer.onnx")


def same(model, written, feeds):
    """Both models give the same outputs under the same names, within one step, at every level."""
    wanted = run(model, feeds, "ORT_DISABLE_ALL")
    reference = run_reference(written, feeds)
    assert [o.name for o in written.graph.output] == [o.name for o in model.graph.output]
    for level in LEVELS:
        for name, found in run(written, feeds, level).items():
            np.testing.assert_array_equal(found, reference[name], err_msg=f"{name} at {level}")
            np.testing.assert_allclose(found, wanted[name], atol=0.051)


X = {"x": np.random.default_rng(0).uniform(-3, 3, (2, 8)).astype(F32)}


# --- how models hold what they store --------------------------------------------------------------------------------


@pytest.mark.parametrize(("opset", "ir"), [(13, 3), (21, 10)])
def test_initializers_that_are_listed_as_inputs(opset, ir, tmp_path):
    net = Net()
    x = net.qdq(net.input([2, 8]), 0.031, 119)
    w = net.op("DequantizeLinear", net.const(np.full((8, 4), 9, np.int8)), net.const(F32(0.01)), net.const(np.int8(0)))
    net.output(net.qdq(net.op("MatMul", x, w), *OUT), [2, 4])
    listed = [helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in net.initializers]
    net.inputs += listed
    model = stamped(net, opset, ir)
    written = converted(model, tmp_path)
    assert [info.name for info in written.graph.input] == ["x"]
    same(model, written, X)


def test_functions_are_inlined(tmp_path):
    body = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    function = helper.make_function("my", "pair", ["x", "s", "z"], ["y"], body, [helper.make_opsetid("", 21)])
    net = Net()
    x = net.op("pair", net.input([2, 8]), net.const(F32(0.03)), net.const(np.uint8(100)), domain="my")
    net.output(net.qdq(net.op("MatMul", x, net.weight((8, 4))[0]), *OUT), [2, 4])
    model = stamped(net, imports=[helper.make_opsetid("my", 1)], functions=[function])
    same(model, converted(model, tmp_path), X)


def test_weights_in_external_data(tmp_path):
    net, x = started((2, 64))
    net.output(net.qdq(net.op("MatMul", x, net.weight((64, 64), 1)[0]), *OUT), [2, 64])
    model = net.model()
    apart = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 128}
    onnx.save(net.model(), tmp_path / "model.onnx", **apart)
    summary = qsdk.to_integer(tmp_path / "model.onnx", tmp_path / "integer.onnx").summary
    assert summary["float_tensors"] == 0
    feeds = {"x": np.random.default_rng(0).uniform(-3, 3, (2, 64)).astype(F32)}
    same(model, onnx.load(tmp_path / "integer.onnx"), feeds)
    (tmp_path / "weights.bin").unlink()
    same(model, onnx.load(tmp_path / "integer.onnx"), feeds)  # it holds its weights itself


# --- bodies ---------------------------------------------------------------------------------------------------------


def branched(condition):
    net, x = started()

    def branch(op, name):
        output = helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, [2, 8])
        return helper.make_graph([helper.make_node(op, [x], [f"{name}_out"], name)], name, [], [output])

    branches = {"then_branch": branch("Relu", "then"), "else_branch": branch("Sigmoid", "else")}
    net.output(net.qdq(net.op("If", condition(net), **branches), 0.02, 20), [2, 8])
    return stamped(net)


@pytest.mark.parametrize("taken", [True, False])
def test_a_decided_branch_is_inlined(taken, tmp_path):
    model = branched(lambda net: net.op("Not", net.const(np.bool_(not taken))))
    written = converted(model, tmp_path)
    assert "If" not in {node.op_type for node in written.graph.node}
    same(model, written, X)


def refused(model, folder, *fragments, error=qsdk.IntegerError, **options):
    with pytest.raises(error) as caught:
        qsdk.to_integer(model, folder / "integer.onnx", **options)
    for fragment in fragments:
        assert fragment in str(caught.value), str(caught.value)
    assert not (folder / "integer.onnx").exists()


@pytest.mark.parametrize("options", [{}, {"allow_float": ["If"]}])
def test_a_branch_that_data_decides_is_refused_by_name(options, tmp_path):
    model = branched(lambda net: net.input([], "condition", TensorProto.BOOL))
    said = "If 'node_if_4': it is control flow, whose branches or steps are chosen while the model runs"
    refused(model, tmp_path, said, "export the model with the condition", **options)


def test_a_loop_is_refused_by_name(tmp_path):
    net, x = started()
    given = [("i", TensorProto.INT64, []), ("c", TensorProto.BOOL, []), ("v", TensorProto.FLOAT, [2, 8])]
    made = [("co", TensorProto.BOOL, []), ("vo", TensorProto.FLOAT, [2, 8])]
    steps = [helper.make_node("Relu", ["v"], ["vo"]), helper.make_node("Identity", ["c"], ["co"])]
    edges = [[helper.make_tensor_value_info(*facts) for facts in side] for side in (given, made)]
    body = helper.make_graph(steps, "b", *edges)
    loop = net.op("Loop", net.const(np.int64(3)), net.const(np.bool_(True)), x, body=body)
    net.output(net.qdq(loop, 0.03, 20), [2, 8])
    refused(stamped(net), tmp_path, "Loop 'node_loop_6': it is control flow", "number of steps fixed")


# --- outputs --------------------------------------------------------------------------------------------------------


def test_an_output_that_is_also_read_inside(tmp_path):
    net, x = started()
    hidden = net.output(net.qdq(net.op("MatMul", x, net.weight((8, 4), 1)[0]), *OUT), [2, 4], "hidden")
    net.output(net.qdq(net.op("Relu", hidden), 0.02, 0), [2, 4])
    same(net.model(), converted(net.model(), tmp_path), X)


def test_outputs_that_are_the_same_tensor(tmp_path):
    net = Net()
    s, z = net.const(F32(0.03)), net.const(np.uint8(100))
    q = net.op("QuantizeLinear", net.input([2, 8]), s, z)
    net.output(net.op("DequantizeLinear", q, s, z), [2, 8], "a")
    net.output(net.op("DequantizeLinear", q, s, z), [2, 8], "b")
    net.nodes.append(helper.make_node("Identity", ["a"], ["c"], "copy"))
    net.outputs.append(helper.make_tensor_value_info("c", TensorProto.FLOAT, [2, 8]))
    same(net.model(), converted(net.model(), tmp_path), X)


def test_an_integer_input_that_is_an_output(tmp_path):
    net = basic()
    net.input([3], "n", TensorProto.INT64)
    net.outputs.append(net.inputs[-1])
    written = converted(net.model(), tmp_path)
    found = run(written, {**X, "n": np.array([4, 5, 6])})
    np.testing.assert_array_equal(found["n"], [4, 5, 6])


def test_outputs_that_are_not_computed_are_refused(tmp_path):
    net = basic()
    net.outputs.append(net.inputs[0])
    refused(net.model(), tmp_path, "graph output 'x': it is the float input 'x' as it came; remove it from")
    net = basic()
    net.output(net.op("Identity", net.const(F32([1, 2]))), [2], "k")
    refused(net.model(), tmp_path, "graph output 'k': it is a float constant; remove it from the model's outputs")
    net = basic()
    net.outputs.clear()
    refused(stamped(net), tmp_path, "the model has no outputs")


def test_shapes_and_stored_integers_may_leave(tmp_path):
    net = basic()
    net.output(net.op("Shape", "x"), [2], "sizes", TensorProto.INT64)
    net.outputs.append(helper.make_tensor_value_info(net.const(np.array([7, 8])), TensorProto.INT64, [2]))
    found = run(converted(net.model(), tmp_path), X)
    assert found["sizes"].tolist() == [2, 8]
    assert [7, 8] in [value.tolist() for value in found.values()]


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "same"])
def test_nodes_without_names_and_with_one_name(name, tmp_path):
    model = basic().model()
    for node in model.graph.node:
        node.name = name
    same(basic().model(), converted(model, tmp_path), X)


def renamed(model, names):
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        value.name = names.get(value.name, value.name)
    return model


@pytest.mark.slow
def test_names_that_collide_with_written_ones(tmp_path):
    model = basic().model()
    written = converted(model, tmp_path)
    ours, theirs = (
        {name for node in found.graph.node for name in (*node.input, *node.output)} for found in (written, model)
    )
    inner = sorted(ours - theirs)
    assert len(inner) > 10
    for name, other in pairwise(inner):
        edges = renamed(basic().model(), {"x": name, "y": other})
        found = run(converted(edges, tmp_path), {name: X["x"]})[other]
        np.testing.assert_array_equal(found, run(written, X)["y"])
    quantized = [node.output[0] for node in model.graph.node if node.op_type == "QuantizeLinear"]
    swapped = renamed(basic().model(), dict(zip(quantized, inner, strict=False)))
    np.testing.assert_array_equal(run(converted(swapped, tmp_path), X)["y"], run(written, X)["y"])


# --- versions and sizes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opset", [18, 19, 20, 21, 22, 23, 24, 25])
def test_opsets(opset, tmp_path):
    net = Net()
    x = net.qdq(net.input([2, 8]), 0.031, 119)
    w = net.op("DequantizeLinear", net.const(np.full((8, 4), 9, np.int8)), net.const(F32(0.01)), net.const(np.int8(0)))
    net.output(net.qdq(net.op("MatMul", x, w), *OUT), [2, 4])
    model = stamped(net, opset, helper.find_min_ir_version_for([helper.make_opsetid("", opset)]))
    written = converted(model, tmp_path)
    assert written.opset_import[0].version == max(opset, 21)
    same(model, written, X)


def test_opsets_that_the_runtime_does_not_know_are_refused_with_the_remedy(tmp_path):
    model = stamped(basic(), 27, 13)
    with pytest.raises(qsdk.FileFormatError, match=r"opset 27 is beyond the runtime's 26; export at"):
        qsdk.to_integer(model, tmp_path / "integer.onnx")


@pytest.mark.parametrize("target", ["standard", "onnxruntime"])
def test_batches_of_any_size(target, tmp_path):
    net, x = started(("n", 8))
    hidden = net.qdq(net.op("MatMul", x, net.weight((8, 4), 1)[0]), *OUT)
    net.output(net.qdq(net.op("Sigmoid", hidden), 0.004, 0), ["n", 4])
    model = net.model()
    written = converted(model, tmp_path, target=target)
    for batch in (0, 1, 5):
        feeds = {"x": np.random.default_rng(batch).uniform(-3, 3, (batch, 8)).astype(F32)}
        for level in LEVELS:
            assert run(written, feeds, level)["y"].shape == (batch, 4)
        np.testing.assert_allclose(run(written, feeds)["y"], run(model, feeds)["y"], atol=0.02)  # one step before


def test_an_axis_in_the_middle_may_be_empty(tmp_path):
    net, x = started((2, "boxes", 4))
    net.output(net.qdq(net.op("Sigmoid", x), 0.004, 0), [2, "boxes", 4])
    written = converted(net.model(), tmp_path)
    for boxes in (0, 3):
        feeds = {"x": np.zeros((2, boxes, 4), F32)}
        assert run_reference(written, feeds)["y"].shape == (2, boxes, 4)
        for level in LEVELS:
            assert run(written, feeds, level)["y"].shape == (2, boxes, 4)


def test_scalars(tmp_path):
    net, x = started(())
    net.output(net.qdq(net.op("Relu", x), 0.02, 0), [])
    same(net.model(), converted(net.model(), tmp_path), {"x": np.array(1.7, F32)})


def test_indices_stay_within_their_tables_in_the_measurement(tmp_path):
    net = Net()
    ids = net.op("Reshape", net.op("Cast", net.input([2, 3], "ids", TensorProto.INT32), to=TensorProto.INT64),
                 net.const(np.array([6])))  # fmt: skip
    table = net.weight((10, 8))[0]
    net.output(net.qdq(net.op("Gather", table, ids), 0.01, 100), [6, 8])
    report = qsdk.to_integer(net.model(), tmp_path / "integer.onnx")
    assert report.summary["max_lsb"] == 0
    with pytest.raises(qsdk.DataError, match=r"does not run on the inputs of the measurement.*data=\[batch\]"):
        qsdk.to_integer(net.model(), tmp_path / "other.onnx", data=[{"ids": np.full((2, 3), 99, np.int32)}])


# --- integer edges --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [UINT8, INT8, UINT16, INT16, TensorProto.UINT4, TensorProto.INT4])
def test_integer_edges_can_be_used_from_the_file_alone(dtype, tmp_path):
    zero = 7 if dtype in (UINT8, UINT16, TensorProto.UINT4) else -3
    net = Net()
    first = net.qdq(net.input([2, 8], "first.x"), 0.031, zero, dtype)
    second = net.qdq(net.input([2, 8], "second"), 0.047, zero, dtype)
    net.output(net.qdq(net.op("Add", first, second), 0.059, zero, dtype), [2, 8], "sum")
    net.output(net.qdq(net.op("Relu", first), 0.029, zero, dtype), [2, 8], "relu")
    model = net.model()
    qsdk.to_integer(model, tmp_path / "float.onnx")
    qsdk.to_integer(model, tmp_path / "integer.onnx", edges="integer")
    written = onnx.load(tmp_path / "integer.onnx")
    facts = {entry.key: entry.value for entry in written.metadata_props}
    values = {n: np.random.default_rng(1).uniform(-0.7, 0.7, (2, 8)).astype(F32) for n in ("first.x", "second")}

    def of(kind, name):
        return F32(facts[f"qsdk.{kind}.{name}.scale"]), int(facts[f"qsdk.{kind}.{name}.zero_point"])

    codes = {}
    for info in written.graph.input:
        stored = helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        scale, zero_point = of("input", info.name)
        held = np.iinfo(stored)
        codes[info.name] = (np.rint(values[info.name] / scale) + zero_point).clip(held.min, held.max).astype(stored)
        assert facts[f"qsdk.input.{info.name}.dtype"] == TensorProto.DataType.Name(dtype).lower()
    wanted = run(onnx.load(tmp_path / "float.onnx"), values)
    found = run(written, codes)
    for name, array in found.items():
        scale, zero_point = of("output", name)
        np.testing.assert_array_equal((array.astype(F32) - zero_point) * scale, wanted[name])
    assert len(np.unique(found["sum"])) > 4


def test_an_unread_float_input_is_refused_at_integer_edges_alone(tmp_path):
    net = basic()
    net.input([3], "unused")
    converted(net.model(), tmp_path)
    (tmp_path / "integer.onnx").unlink()
    said = "graph input 'unused': no QuantizeLinear reads it; quantize it, or remove it if unused"
    refused(net.model(), tmp_path, said, edges="integer")
