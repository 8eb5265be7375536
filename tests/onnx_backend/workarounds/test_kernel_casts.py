"""Casts around the ops that the runtime has no kernel for: the table, derived again, and what they leave unchanged."""

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from kernel_probes import CODES, OPSETS, PROBES, has_kernel, runs
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper

from onnx_backend.proto.nodes import metadata
from onnx_backend.proto.subgraphs import all_nodes
from onnx_backend.workarounds.kernel_casts import (
    KERNELS,
    LACKING,
    ROUNDED,
    has_other_floats,
    insert_kernel_casts,
    remove_kernel_casts,
)

node, value = helper.make_node, helper.make_tensor_value_info
ARRAYS = {"bfloat16": ml_dtypes.bfloat16, "float64": np.float64, "float16": np.float16}
#: the runtime writes these out as other ops, which round to bfloat16 in their middle; a kernel in float32 rounds once
WRITTEN_OUT = {"bfloat16": {"LayerNormalization"}, "float64": set()}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", sorted(LACKING))
def test_the_table_holds_the_ops_that_the_installed_runtime_has_kernels_for(dtype: str):
    assert KERNELS[dtype] <= PROBES.keys()
    assert {op for op in PROBES if has_kernel(op, dtype)} - WRITTEN_OUT[dtype] == KERNELS[dtype]


@pytest.mark.parametrize("op", sorted(KERNELS["float16"] - {"DequantizeLinear", "QuantizeLinear"}))
def test_the_ops_that_no_simulation_casts_in_float16_are_exact_there(op: str):
    """Of QuantizeLinear and DequantizeLinear, the tests of the formula in half precision say so."""
    assert op not in PROBES or runs(op, "float16", 21, exact=True) == ""


def model_of(
    nodes: list, dtype: str, outputs: dict[str, list[int]], stored: dict[str, np.ndarray] | None = None, opset: int = 21
) -> ModelProto:
    """A model with an input `x` [2, 4, 4, 4] of the dtype and a condition `c`."""
    inputs = [value("x", CODES[dtype], [2, 4, 4, 4]), value("c", TensorProto.BOOL, [])]
    made = [value(name, CODES[dtype], shape) for name, shape in outputs.items()]
    tensors = [numpy_helper.from_array(array, name) for name, array in (stored or {}).items()]
    graph = helper.make_graph(nodes, "g", inputs, made, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def stored_for(dtype: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {
        "w": (rng.normal(size=(4, 4, 3, 3)) / 4).astype(ARRAYS[dtype]),
        "g": rng.normal(size=4).astype(ARRAYS[dtype]),
    }


def chain(dtype: str) -> ModelProto:
    """A convolution, movements, ops with and without kernels, a tensor read twice, and an output read again."""
    nodes = [
        node("Conv", ["x", "w"], ["a"], pads=[1] * 4),
        node("Transpose", ["a"], ["b"], perm=[0, 2, 3, 1]),
        node("Erf", ["b"], ["d"]),
        node("Softplus", ["b"], ["e"]),
        node("Add", ["d", "e"], ["f"]),
        node("LayerNormalization", ["f", "g"], ["y", "mean"], stash_type=CODES[dtype] if dtype == "bfloat16" else 1),
        node("GlobalAveragePool", ["y"], ["z"]),
    ]
    return model_of(nodes, dtype, {"y": [2, 4, 4, 4], "z": [2, 4, 1, 1]}, stored_for(dtype))


def branches(dtype: str) -> ModelProto:
    """An If whose bodies read a tensor and a weight from outside, use the same names, and hold a Loop."""

    def body(name: str, nodes: list, out: str) -> GraphProto:
        return helper.make_graph(nodes, name, [], [value(out, CODES[dtype], [2, 4, 4, 4])])

    step = helper.make_graph(
        [node("Erf", ["s"], ["t"]), node("Conv", ["t", "w"], ["next"], pads=[1] * 4), node("Identity", ["on"], ["go"])],
        "step",
        [value("i", TensorProto.INT64, []), value("on", TensorProto.BOOL, []), value("s", CODES[dtype], [2, 4, 4, 4])],
        [value("go", TensorProto.BOOL, []), value("next", CODES[dtype], [2, 4, 4, 4])],
    )
    then = body("then", [node("Erf", ["a"], ["t"]), node("Conv", ["t", "w"], ["o"], pads=[1] * 4)], "o")
    other = body("other", [node("Loop", ["n", "", "a"], ["t"], body=step), node("Erf", ["t"], ["o"])], "o")
    nodes = [
        node("Erf", ["x"], ["a"]),
        node("If", ["c"], ["k"], then_branch=then, else_branch=other),
        node("Conv", ["k", "w"], ["y"], pads=[1] * 4),
    ]
    return model_of(nodes, dtype, {"y": [2, 4, 4, 4]}, {**stored_for(dtype), "n": np.array(2)})


def run(model: ModelProto, dtype: str, level: ort.GraphOptimizationLevel, condition: bool) -> list[np.ndarray]:
    """Run a model whose edges are float32 by Casts of the test's own."""
    framed = ModelProto()
    framed.CopyFrom(model)
    framed.graph.input[0].type.tensor_type.elem_type = TensorProto.FLOAT
    framed.graph.input[0].name = "fed"
    framed.graph.node.insert(0, node("Cast", ["fed"], ["x"], to=CODES[dtype]))
    names = [output.name for output in framed.graph.output]
    framed.graph.node.extend(node("Cast", [name], [f"{name}f"], to=TensorProto.FLOAT) for name in names)
    del framed.graph.output[:]
    framed.graph.output.extend(helper.make_empty_tensor_value_info(f"{name}f") for name in names)
    options = ort.SessionOptions()
    options.graph_optimization_level, options.log_severity_level = level, 4
    session = ort.InferenceSession(framed.SerializeToString(), options, providers=["CPUExecutionProvider"])
    x = np.random.default_rng(0).normal(size=(2, 4, 4, 4)).astype(ml_dtypes.bfloat16).astype(np.float32)
    feeds = {"fed": x, "c": np.array(condition)}
    return list(session.run(None, {given.name: feeds[given.name] for given in session.get_inputs()}))


def in_float32(model: ModelProto, rounded_to: str) -> ModelProto:
    """The same model in float32, every result of an op rounded to a dtype: what the Casts must compute."""
    changed = ModelProto()
    changed.CopyFrom(model)
    _to_float32(changed.graph, rounded_to)
    return changed


def _to_float32(graph: GraphProto, rounded_to: str) -> None:
    narrow = set(CODES.values()) - {TensorProto.FLOAT}
    for tensor in graph.initializer:
        if tensor.data_type in narrow:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))
    for info in (*graph.input, *graph.output, *graph.value_info):
        if info.type.tensor_type.elem_type in narrow:
            info.type.tensor_type.elem_type = TensorProto.FLOAT
    rounded = []
    for item in graph.node:
        for attribute in item.attribute:
            if attribute.name == "stash_type":
                attribute.i = 1
            if attribute.HasField("g"):
                _to_float32(attribute.g, rounded_to)
        rounded.append(item)
        if item.op_type in ("Identity", "If", "Loop"):
            continue
        for at, name in enumerate(item.output):
            item.output[at] = f"{name} exact"
            rounded.append(node("Cast", [f"{name} exact"], [f"{name} rounded"], to=CODES[rounded_to]))
            rounded.append(node("Cast", [f"{name} rounded"], [name], to=TensorProto.FLOAT))
    kept = list(rounded)
    del graph.node[:]
    graph.node.extend(kept)


@pytest.mark.parametrize("condition", [True, False])
@pytest.mark.parametrize("build", [chain, branches])
@pytest.mark.parametrize("dtype", KERNELS)
def test_the_casts_compute_in_float32_and_round_every_result(dtype: str, build, condition: bool):
    model = build(dtype)
    wanted = run(in_float32(model, dtype), "float32", ort.GraphOptimizationLevel.ORT_DISABLE_ALL, condition)
    insert_kernel_casts(model, ROUNDED)
    onnx.checker.check_model(model, full_check=True)
    exact = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    for level in (exact, ort.GraphOptimizationLevel.ORT_ENABLE_ALL):
        for got, want in zip(run(model, dtype, level, condition), wanted, strict=True):
            if dtype != "float64" and level == exact:
                np.testing.assert_array_equal(got, want)
            else:
                np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("build", [chain, branches])
@pytest.mark.parametrize("dtype", KERNELS)
def test_taken_out_again_the_casts_leave_the_model_as_it_was(dtype: str, build):
    model = build(dtype)
    before = model.SerializeToString(deterministic=True)
    insert_kernel_casts(model, ROUNDED)
    assert model.SerializeToString(deterministic=True) != before
    remove_kernel_casts(model)
    assert model.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_result_whose_type_inference_leaves_open_is_cast_back_too(dtype: str):
    """Inference knows no type behind GroupNormalization; a quantizer there would read two types."""
    nodes = [node("GroupNormalization", ["x", "g", "g"], ["n"], num_groups=2), node("Flatten", ["n"], ["y"])]
    model = model_of(nodes, dtype, {"y": [2, 64]}, stored_for(dtype))
    insert_kernel_casts(model, ROUNDED)
    onnx.checker.check_model(model, full_check=True)
    (flat,) = (item for item in model.graph.node if item.op_type == "Flatten")
    (back,) = (item for item in model.graph.node if flat.input[0] in item.output)
    assert (back.op_type, back.attribute[0].i) == ("Cast", CODES[dtype])


def test_a_second_result_of_another_type_has_no_cast():
    """Nothing is known of the types behind GroupNormalization; by its schema, indices are no bfloat16."""
    nodes = [
        node("GroupNormalization", ["x", "g", "g"], ["n"], num_groups=2),
        node("TopK", ["n", "k"], ["y", "i"]),
        node("Gather", ["g", "i"], ["z"]),
    ]
    stored = {**stored_for("bfloat16"), "k": np.array([2])}
    model = model_of(nodes, "bfloat16", {"y": [2, 4, 4, 2], "z": [2, 4, 4, 2]}, stored)
    insert_kernel_casts(model)
    assert not [item for item in model.graph.node if "qsdk.kernel_cast" in metadata(item) and "i" in item.output[0]]
    values, picked = run(model, "bfloat16", ort.GraphOptimizationLevel.ORT_ENABLE_ALL, True)
    assert values.shape == picked.shape == (2, 4, 4, 2)


def test_the_float32_copy_of_a_tensor_that_leaves_the_model_stays():
    """Taken out, the Cast of an output would leave the model without it."""
    model = chain("bfloat16")
    insert_kernel_casts(model)
    (copy,) = (item for item in model.graph.node if item.op_type == "Cast" and item.input[0] == "y")
    model.graph.output.append(value(copy.output[0], TensorProto.FLOAT, [2, 4, 4, 4]))
    remove_kernel_casts(model)
    assert [item.op_type for item in model.graph.node if copy.output[0] in item.output] == ["Cast"]


def test_readers_share_one_cast_which_stands_just_before_the_first():
    model = branches("bfloat16")
    insert_kernel_casts(model)
    casts = [item for item in all_nodes(model.graph.node) if "qsdk.kernel_cast" in metadata(item)]
    ups = [item.input[0] for item in casts if item.output[0].endswith("as_float32")]
    assert sorted(set(ups)) == sorted(set(ups) & {"x", "a", "w", "t", "s", "k"})
    assert ups.count("w") == ups.count("a") == 1
    outer = [item.op_type for item in model.graph.node]
    assert outer == ["Cast", "Erf", "Cast", "Cast", "Cast", "If", "Cast", "Conv", "Cast"]


@pytest.mark.parametrize("opset", OPSETS)
def test_an_op_whose_schema_lacks_the_dtype_is_cast_at_every_opset(opset: int):
    """`Conv` takes bfloat16 from opset 22 on."""
    nodes = [node("Flatten", ["x"], ["f"]), node("Reshape", ["f", "s"], ["r"]), node("Conv", ["r", "w"], ["y"])]
    model = model_of(
        nodes, "bfloat16", {"y": [2, 4, 2, 2]}, {**stored_for("bfloat16"), "s": np.array([2, 4, 4, 4])}, opset
    )
    insert_kernel_casts(model)
    kinds = [item.op_type for item in model.graph.node]
    assert kinds == ["Flatten", "Reshape", "Cast", "Cast", "Conv", "Cast"]
    run(model, "bfloat16", ort.GraphOptimizationLevel.ORT_ENABLE_ALL, True)


def test_attributes_that_name_a_dtype_follow_the_casts_and_come_back():
    model = chain("bfloat16")
    insert_kernel_casts(model)
    (norm,) = (item for item in model.graph.node if item.op_type == "LayerNormalization")
    assert [attribute.i for attribute in norm.attribute if attribute.name == "stash_type"] == [TensorProto.FLOAT]
    remove_kernel_casts(model)
    (norm,) = (item for item in model.graph.node if item.op_type == "LayerNormalization")
    assert [attribute.i for attribute in norm.attribute if attribute.name == "stash_type"] == [TensorProto.BFLOAT16]
    assert not metadata(norm)


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        ([node("Cast", ["x"], ["y"], to=TensorProto.FLOAT16)], False),
        ([node("Cast", ["x"], ["y"], to=TensorProto.BFLOAT16)], True),
        ([node("EyeLike", ["x"], ["y"], dtype=TensorProto.DOUBLE)], True),
        ([node("ConstantOfShape", ["s"], ["y"], value=helper.make_tensor("v", TensorProto.DOUBLE, [1], [1.0]))], True),
        ([node("ConstantOfShape", ["s"], ["y"], value=helper.make_tensor("v", TensorProto.INT64, [1], [1]))], False),
        ([node("Gemm", ["x", "x"], ["y"], transA=1, alpha=16.0)], False),
    ],
)
def test_a_model_without_these_dtypes_is_known_by_a_look(nodes, found: bool):
    graph = helper.make_graph(nodes, "g", [value("x", TensorProto.FLOAT, [2, 2])], [])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    assert has_other_floats(model) == found
    before = model.SerializeToString(deterministic=True)
    if not found:
        insert_kernel_casts(model)
        assert model.SerializeToString(deterministic=True) == before
