"""A user's file, however it is spelt, becomes a plan, and the model under it stays what it was."""

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from qdq_models import convnet, make_model, mlp, weights

import qsdk
from onnx_backend.lower import insert
from onnx_backend.opening.from_float import open_float
from qsdk import FileFormatError, ModelError, w8a8
from qsdk.core.planning.plan import Plan

node, value = helper.make_node, helper.make_tensor_value_info
X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


def run(model, **feeds):
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds or {"x": X})


def unquantized(model, **more):
    return insert(qsdk.quantize(model, None, w8a8(), **more).traced().model, Plan({}), {})[0]


def test_constant_nodes_and_initializers_are_one():
    model = mlp()
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    constants = [node("Constant", [], [name], f"const_{name}", value=tensor) for name, tensor in stored.items()]
    del model.graph.initializer[:]
    nodes = [*constants, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    assert open_float(model, w8a8()).plan == open_float(mlp(), w8a8()).plan


def test_stored_tensors_that_are_inputs_too_are_no_inputs_any_more():
    model = mlp(13)
    model.ir_version = 3
    model.graph.input.extend(value(t.name, t.data_type, t.dims) for t in model.graph.initializer)
    opened = open_float(model, w8a8())
    assert [v.name for v in opened.model.graph.input] == ["x"]
    assert opened.plan == open_float(mlp(), w8a8()).plan


def tied():
    nodes = [
        node("Gather", ["table", "ids"], ["e"], "embed"),
        node("Relu", ["e"], ["r"], "relu"),
        node("Transpose", ["table"], ["turned"], "turn", perm=[1, 0]),
        node("MatMul", ["r", "turned"], ["y"], "head"),
    ]
    model = make_model(nodes, {}, {"y": None}, weights(table=(7, 4)))
    model.graph.input.append(value("ids", TensorProto.INT64, ["n"]))
    return model


def test_a_tied_weight_is_one_site_and_one_stored_tensor(tmp_path):
    ids = np.array([1, 3, 6])
    sim = qsdk.quantize(tied(), ids, w8a8())
    stored = [site for site, decision in sim.plan.decisions.items() if decision.kind == "weight"]
    assert stored == ["embed:embedding"]
    qsdk.calibrate(sim, [ids], progress=False)
    qsdk.export(sim, tmp_path / "m.onnx")
    assert qsdk.check_parity(sim, tmp_path / "m.onnx", [ids], progress=False).summary["passed"]


def test_one_weight_of_two_layers():
    nodes = [node("MatMul", ["x", "w"], ["t"], "one"), node("MatMul", ["t", "w"], ["y"], "two")]
    opened = open_float(make_model(nodes, {"x": [3, 4]}, {"y": None}, weights(w=(4, 4))), w8a8())
    assert [s for s in opened.plan.decisions if "weight" in s] == ["one:weight"]


@pytest.mark.parametrize("size", [4, 80])  # small constants fold in another way than large ones
@pytest.mark.parametrize("view", ["Identity", "Reshape", "Unsqueeze", "Cast", "chain"])
def test_a_view_of_a_weight_is_a_weight(view, size):
    flat = np.random.default_rng(0).normal(size=(size, size)).astype(np.float32)
    made, stored = {
        "Identity": ([node("Identity", ["w0"], ["w"])], {"w0": flat}),
        "Reshape": ([node("Reshape", ["w0", "s"], ["w"])], {"w0": flat.reshape(-1), "s": np.array([size, size])}),
        "Unsqueeze": ([node("Squeeze", ["w0", "s"], ["w"])], {"w0": flat[None], "s": np.array([0])}),
        "Cast": ([node("Cast", ["w0"], ["w"], to=1)], {"w0": flat.astype(np.float16)}),
        "chain": (
            [node("Cast", ["w0"], ["w1"], to=1), node("Reshape", ["w1", "s"], ["w2"]), node("Identity", ["w2"], ["w"])],
            {"w0": flat.astype(np.float16).reshape(-1), "s": np.array([size, -1])},
        ),
    }[view]
    nodes = [*made, node("MatMul", ["x", "w"], ["y"], "mm")]
    model = make_model(nodes, {"x": [3, size]}, {"y": [3, size]}, stored)
    opened = open_float(model, w8a8())
    assert opened.plan.decisions["mm:weight"].state == "quantized"
    x = np.random.default_rng(1).normal(size=(3, size)).astype(np.float32)
    np.testing.assert_array_equal(run(opened.model, x=x)[0], run(model, x=x)[0])


@pytest.mark.parametrize("opset", [17, 21])
def test_functions_are_inlined_and_planned(opset):
    body = [node("MatMul", ["i", "v"], ["t"], "inner"), node("Relu", ["t"], ["o"], "after")]
    function = helper.make_function("local", "Layer", ["i", "v"], ["o"], body, [helper.make_opsetid("", opset)])
    calls = [
        node("Layer", ["x", "w1"], ["h"], "first", domain="local"),
        node("Layer", ["h", "w2"], ["y"], "second", domain="local"),
    ]
    stored, imports = weights(w1=(4, 6), w2=(6, 5)), [helper.make_opsetid("local", 1)]
    model = make_model(calls, {"x": [3, 4]}, {"y": None}, stored, opset, 8, imports=imports, functions=[function])
    opened = open_float(model, w8a8())
    assert sum(decision.kind == "weight" for decision in opened.plan.decisions.values()) == 2
    np.testing.assert_array_equal(run(opened.model)[0], run(model)[0])


def test_missing_and_repeated_node_names():
    nodes = [node("Relu", ["x"], ["a"]), node("Neg", ["a"], ["b"], "same"), node("Abs", ["b"], ["y"], "same")]
    opened = open_float(make_model(nodes, {"x": [3, 4]}, {"y": [3, 4]}, {}), w8a8())
    assert set(opened.plan.decisions) == {"x:input", "a:output", "same:output", "same_1:output"}


def test_nodes_are_sorted_and_dead_ones_are_gone():
    nodes = [
        node("Abs", ["b"], ["y"], "abs"),
        node("Neg", ["a"], ["b"], "neg"),
        node("Sqrt", ["a"], ["nowhere"], "dead"),
        node("Relu", ["x"], ["a"], "relu"),
    ]
    opened = open_float(make_model(nodes, {"x": [3, 4]}, {"y": [3, 4]}, {}), w8a8())
    assert [n.name for n in opened.model.graph.node] == ["relu", "neg", "abs"]


def test_outputs_that_are_inputs_constants_or_listed_twice_stay_what_they_are():
    nodes = [node("Relu", ["x"], ["y"], "relu")]
    model = make_model(nodes, {"x": [3, 4]}, {"y": [3, 4], "x": [3, 4], "w": [4]}, weights(w=(4,)), 13, 7)
    model.graph.output.append(model.graph.output[0])
    sim = qsdk.quantize(model, None, w8a8())
    assert [v.name for v in sim.traced().model.graph.output] == ["y", "x", "w", "y"]
    qsdk.calibrate(sim, [X], progress=False)
    got = sim.run(X)
    for left, right in zip(got, run(model), strict=True):
        assert np.abs(left - right).max() <= 0.51 * sim.encodings["x:input"].scale[0]
    for left, right in zip(run(unquantized(model)), run(model), strict=True):
        np.testing.assert_array_equal(left, right)


def test_sequences_and_strings_are_left_alone():
    nodes = [
        node("Relu", ["x"], ["r"], "relu"),
        node("SequenceConstruct", ["r", "x"], ["s"], "pack"),
        node("SequenceAt", ["s", "zero"], ["t"], "unpack"),
        node("Neg", ["t"], ["y"], "neg"),
        node("Constant", [], ["text"], "text", value_strings=["a", "b"]),
        node("Identity", ["text"], ["said"], "say"),
    ]
    model = make_model(nodes, {"x": [3, 4]}, {"y": [3, 4]}, {"zero": np.int64(0)})
    model.graph.output.append(value("said", TensorProto.STRING, [2]))
    sim = qsdk.quantize(model, None, w8a8())
    assert set(sim.plan.decisions) == {"x:input", "relu:output", "unpack:output", "neg:output"}
    qsdk.calibrate(sim, [X], progress=False)
    got, said = sim.run(X)
    assert said.tolist() == ["a", "b"]
    assert np.abs(got - run(model)[0]).max() < 0.05


def mixed():
    nodes = [
        node("Relu", ["x"], ["r"], "relu"),
        node("Cast", ["r"], ["h"], "down", to=TensorProto.FLOAT16),
        node("Mul", ["h", "k"], ["m"], "half"),
        node("Cast", ["m"], ["f"], "up", to=TensorProto.FLOAT),
        node("Cast", ["r"], ["d"], "wide", to=TensorProto.DOUBLE),
        node("Cast", ["d"], ["g"], "narrow", to=TensorProto.FLOAT),
        node("Add", ["f", "g"], ["y"], "add"),
    ]
    return make_model(nodes, {"x": [3, 4]}, {"y": [3, 4]}, {"k": np.full(4, 3, np.float16)})


def test_tensors_of_every_float_type_are_quantized_and_a_cast_keeps_the_encoding(tmp_path):
    sim = qsdk.quantize(mixed(), None, w8a8())
    states = {row["site"]: (row["state"], row["dtype"]) for row in sim.coverage().rows}
    assert {site: states[site] for site in ("half:constant", "half:output", "add:output", "relu:output")} == {
        "half:constant": ("quantized", "int8"),
        "half:output": ("quantized", "uint8"),
        "add:output": ("quantized", "uint8"),
        "relu:output": ("quantized", "uint8"),
    }
    tied = {site: decision.tied_to for site, decision in sim.plan.decisions.items() if decision.tied_to}
    casts = {"down:output": "relu:output", "wide:output": "relu:output", "narrow:output": "relu:output"}
    assert tied == {**casts, "up:output": "half:output"}
    types = {site: decision.tensor_type for site, decision in sim.plan.decisions.items()}
    assert [types[site] for site in ("down:output", "half:constant", "wide:output")] == [
        "float16",
        "float16",
        "float64",
    ]
    # both ends of a Cast to float16 hold the scale
    assert sim.plan.decisions["relu:output"].spec.scale_bits == 11
    assert sim.plan.decisions["add:output"].spec.scale_bits is None
    qsdk.calibrate(sim, [X], progress=False)
    qsdk.export(sim, tmp_path / "m.onnx")
    assert qsdk.check_parity(sim, tmp_path / "m.onnx", [X], progress=False).summary["passed"]


def test_inputs_and_outputs_keep_their_names_and_order_in_simulation_and_export(tmp_path):
    nodes = [
        node("Add", ["input:0", "b"], ["t"], "add"),
        node("Relu", ["t"], ["output"], "r"),
        node("Neg", ["t"], ["a"], "n"),
    ]
    model = make_model(nodes, {"input:0": [3, 4], "b": ["n", 4]}, {"output": [3, 4], "t": None, "a": [3, 4]}, {}, 11, 6)
    sim = qsdk.quantize(model, (X, X), w8a8())
    qsdk.calibrate(sim, [(X, 2 * X)], progress=False)
    qsdk.export(sim, tmp_path / "m.onnx")
    session = ort.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    assert [v.name for v in session.get_inputs()] == ["input:0", "b"]
    assert [v.name for v in session.get_outputs()] == ["output", "t", "a"]
    assert session.get_inputs()[1].shape == ["n", 4]


def test_integer_inputs_and_channels_last():
    nodes = [
        node("Cast", ["pixels"], ["f"], "cast", to=1),
        node("Transpose", ["f"], ["nchw"], "turn", perm=[0, 3, 1, 2]),
        node("Conv", ["nchw", "w"], ["c"], "conv"),
        node("Transpose", ["c"], ["y"], "back", perm=[0, 2, 3, 1]),
    ]
    model = make_model(nodes, {}, {"y": None}, weights(w=(5, 3, 2, 2)))
    model.graph.input.append(value("pixels", TensorProto.UINT8, ["n", 6, 6, 3]))
    x = np.random.default_rng(0).integers(0, 256, (2, 6, 6, 3)).astype(np.uint8)
    sim = qsdk.quantize(model, x, w8a8())
    assert sim.plan.decisions["turn:output"].state == "tied"
    qsdk.calibrate(sim, [x], progress=False)
    assert np.abs(sim.run(x)[0] - run(model, pixels=x)[0]).max() < 0.02 * np.abs(run(model, pixels=x)[0]).max()


def test_what_the_file_claims_of_inner_shapes_is_not_believed():
    nodes = [
        node("Reshape", ["x", "free"], ["r"], "reshape"),
        node("Shape", ["r"], ["s"], "shape"),
        node("ConstantOfShape", ["s"], ["y"], "zeros"),
    ]
    model = make_model(nodes, {"x": [3, 4], "y0": [1]}, {"y": None}, {"free": np.array([2, -1])})
    del model.graph.input[1]
    model.graph.value_info.append(value("r", 1, [5, None]))
    opened = open_float(model, w8a8())
    assert run(opened.model)[0].shape == (2, 6)
    assert opened.graph.tensors[opened.graph.outputs[0]].shape == (2, 6)


def test_what_the_file_claims_of_an_output_is_not_believed_either():
    nodes = [
        node("Relu", ["x"], ["r"], "relu"),
        node("Shape", ["r"], ["s"], "shape"),
        node("ConstantOfShape", ["s"], ["y"], "zeros"),
    ]
    model = make_model(nodes, {"x": ["n", 4]}, {"r": [5, 4], "y": None}, {})
    opened = open_float(model, w8a8())
    assert [n.op_type for n in opened.model.graph.node] == ["Relu", "Shape", "ConstantOfShape"]
    assert opened.graph.tensors[opened.graph.outputs[0]].shape == ("n", 4)


def test_sparse_weights_are_stored_dense():
    model = make_model([node("MatMul", ["x", "w"], ["y"], "mm")], {"x": [3, 4]}, {"y": [3, 4]}, {})
    sparse = model.graph.sparse_initializer.add(dims=[4, 4])
    sparse.values.CopyFrom(numpy_helper.from_array(np.array([1.5, -2], np.float32), "w"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.array([1, 10])))
    opened = open_float(model, w8a8())
    assert opened.plan.decisions["mm:weight"].quantized
    np.testing.assert_allclose(
        run(opened.model)[0], X @ np.array([[0, 1.5, 0, 0], [0] * 4, [0, 0, -2, 0], [0] * 4], "f")
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m: m.graph.node.append(m.graph.node[0]), "the node 'mm1' makes 'm1', which exists already"),
        (lambda m: m.graph.node[0].input.__setitem__(0, "m2"), "'mm1' is in a circle"),
        (lambda m: m.graph.node[1].input.__setitem__(0, "gone"), "the node 'add1' reads 'gone', which nothing makes"),
        (lambda m: m.graph.initializer.append(m.graph.initializer[0]), "stores two tensors named 'w1'"),
        (lambda m: m.graph.output[0].ClearField("name"), "output '' is made by no node"),
        (lambda m: m.graph.input.append(m.graph.input[0]), "two inputs named 'x'"),
    ],
)
def test_a_broken_graph_names_what_is_broken(damage, message):
    model = mlp()
    damage(model)
    with pytest.raises(ModelError, match=message):
        open_float(model, w8a8())


def test_a_stored_tensor_of_the_wrong_size_is_named():
    for change in ({"dims": [6, 9]}, {"raw_data": b"abc"}):
        model = mlp()
        tensor = model.graph.initializer[0]
        tensor.raw_data = change.get("raw_data", tensor.raw_data)
        if "dims" in change:
            del tensor.dims[:]
            tensor.dims.extend(change["dims"])
        with pytest.raises(FileFormatError, match=r"the stored tensor 'w1' cannot be read \(.* bytes where its shape"):
            open_float(model, w8a8())


def test_what_the_runtime_refuses_is_refused_with_what_it_says(tmp_path):
    model = convnet()
    model.graph.node[0].op_type = "Convolution"
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(FileFormatError, match=r"the runtime cannot load .*m\.onnx: .*Convolution.*export it again"):
        open_float(tmp_path / "m.onnx", w8a8())
