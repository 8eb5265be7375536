"""Sites on tensors of other float types: the form of their pairs, the way back, and where a module rounds."""

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_backend.lower import insert
from onnx_backend.passes.in_float32 import in_float32
from onnx_backend.proto.nodes import attributes, is_mark
from onnx_backend.qdq.marks import mark_node, open_qdq
from onnx_backend.qdq.read import read
from onnx_backend.workarounds.kernel_casts import insert_kernel_casts, note_single_roundings, remove_kernel_casts
from qsdk import Encoding
from qsdk.core.numerics.dtypes import dtype_named
from qsdk.core.numerics.spec import Spec
from qsdk.core.planning.plan import Decision, Plan

CODES = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16, "float64": TensorProto.DOUBLE}
ARRAYS = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float64": np.dtype(np.float64)}
node, value = helper.make_node, helper.make_tensor_value_info
COARSE, FINE = np.float32(0.0625), np.float32(0.1)  # a scale that every type holds, and one that no narrow type does


def marked(dtype):
    """`y = x @ w + b`, with a mark at each tensor."""
    nodes = [
        mark_node("x:input", "x", "xq", dtype),
        mark_node("fc:weight", "w", "wq", dtype),
        mark_node("fc:bias", "b", "bq", dtype),
        node("MatMul", ["xq", "wq"], ["m"]),
        node("Add", ["m", "bq"], ["a"]),
        mark_node("fc:output", "a", "y", dtype),
    ]
    rng = np.random.default_rng(0)
    stored = {"w": rng.normal(size=(4, 3)), "b": rng.normal(size=3) * 3}
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x", CODES[dtype], [2, 4])],
        [value("y", CODES[dtype], [2, 3])],
        [numpy_helper.from_array(array.astype(ARRAYS[dtype]), name) for name, array in stored.items()],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("qsdk", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def planned(activation, scale):
    encodings = {
        "x:input": Encoding(dtype_named(activation), scale, 3),
        "fc:weight": Encoding(dtype_named("int8"), scale, 0),
        "fc:bias": Encoding(dtype_named("int32"), scale * scale, 0),
        "fc:output": Encoding(dtype_named(activation), scale, 3),
    }
    kinds = {"x:input": "input", "fc:weight": "weight", "fc:bias": "bias", "fc:output": "output"}
    decisions = {
        s: Decision(s, "MatMul", kinds[s], Spec(e.dtype, symmetric=not e.zero_point.any()), "")
        for s, e in encodings.items()
    }
    return Plan(decisions), encodings


def types_of_scales(model):
    stored = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    return [stored[n.input[1]] for n in model.graph.node if n.op_type == "QuantizeLinear"]


@pytest.mark.parametrize(
    ("dtype", "dialect", "activation", "scale", "in_own_type"),
    [
        ("float16", "onnxruntime", "uint8", COARSE, True),
        ("float16", "onnx", "uint8", COARSE, True),
        ("float16", "onnxruntime", "uint8", FINE, False),
        ("float16", "onnxruntime", "uint7", COARSE, False),
        ("bfloat16", "onnxruntime", "uint8", COARSE, False),
        ("bfloat16", "onnx", "uint8", COARSE, True),
        ("bfloat16", "onnx", "uint8", FINE, False),
        ("float64", "onnx", "uint8", COARSE, False),
    ],
)
def test_pairs_are_of_the_tensors_type_where_that_holds_the_scale(dtype, dialect, activation, scale, in_own_type):
    plan, encodings = planned(activation, scale)
    lowered, _ = insert(marked(dtype), plan, encodings, dialect=dialect)
    wanted = CODES[dtype] if in_own_type else TensorProto.FLOAT
    assert set(types_of_scales(lowered)) == {wanted}
    casts = [n.name for n in lowered.graph.node if n.op_type == "Cast" and n.name.startswith(("x:input", "fc:output"))]
    assert bool(casts) != in_own_type
    onnx.checker.check_model(lowered, full_check=True)


@pytest.mark.parametrize("dialect", ["onnxruntime", "onnx"])
@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("scale", [COARSE, FINE])
@pytest.mark.parametrize("activation", ["uint8", "uint7", "int16"])
def test_opened_again_marks_sit_on_tensors_of_the_type_and_the_file_is_the_same(dialect, dtype, scale, activation):
    plan, encodings = planned(activation, scale)
    first, _ = insert(marked(dtype), plan, encodings, dialect=dialect)
    assert read(first) == encodings
    opened = open_qdq(first)
    assert opened.encodings == encodings
    facts = [attributes(n) for n in opened.model.graph.node if is_mark(n)]
    types = {fact["key"]: fact.get("dtype", "float32") for fact in facts}
    # values of int32 codes that a narrow type lacks are float32, with the cast behind
    assert types.pop("fc:bias") in (dtype, "float32")
    assert set(types.values()) == {dtype}
    assert not any("kernel_cast" in n.name for n in opened.model.graph.node)
    second, _ = insert(opened.model, plan, encodings, dialect=dialect)
    text = [onnx.printer.to_text(model.graph) for model in (first, second)]
    assert text[0] == text[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_codes_of_a_bias_survive_a_type_that_does_not_hold_their_values(dtype):
    plan, encodings = planned("uint8", np.float32(1e-3))
    first, _ = insert(marked(dtype), plan, encodings)
    second, _ = insert(open_qdq(first).model, plan, encodings)
    codes = [{t.name: t.raw_data for t in m.graph.initializer}["b_quantized"] for m in (first, second)]
    assert codes[0] == codes[1]


def linear_model(mark_between):
    nodes = [node("MatMul", ["x", "w"], ["m"])]
    nodes += [mark_node("m:output", "m", "n", "bfloat16")] if mark_between else []
    nodes += [node("Add", ["n" if mark_between else "m", "b"], ["a"]), mark_node("a:output", "a", "y", "bfloat16")]
    model = marked("bfloat16")
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


@pytest.mark.parametrize("mark_between", [True, False])
def test_what_lies_inside_one_op_of_the_module_is_rounded_behind_it_alone(mark_between):
    model = linear_model(mark_between)
    model.graph.value_info.append(value("m", TensorProto.BFLOAT16, [2, 3]))
    note_single_roundings(model)
    plain, _ = insert(model, Plan({}), {})
    adds = [n for n in plain.graph.node if n.op_type == "Add"]
    onnx.checker.check_model(plain, full_check=True)
    sums = {n.output[0] for n in plain.graph.node if n.op_type == "MatMul"}
    assert (adds[0].input[0] in sums) == (not mark_between)
    again = onnx.ModelProto()
    again.CopyFrom(plain)
    remove_kernel_casts(again)
    assert not any(n.op_type == "Cast" for n in again.graph.node)
    insert_kernel_casts(again)
    assert onnx.printer.to_text(again.graph) == onnx.printer.to_text(plain.graph)


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("scale", [COARSE, FINE])
def test_the_float32_view_of_a_file_has_the_same_pairs_and_no_other_float(dtype, scale):
    plan, encodings = planned("uint8", scale)
    lowered, _ = insert(marked(dtype), plan, encodings)
    view = in_float32(lowered)
    assert read(view) == encodings
    assert not any(n.op_type == "Cast" for n in view.graph.node)
    floats = {t.data_type for t in view.graph.initializer} & {TensorProto.FLOAT, *CODES.values()}
    assert floats == {TensorProto.FLOAT}
    onnx.checker.check_model(view, full_check=True)


def test_a_float32_file_is_its_own_view_also_with_a_float16_island():
    model = marked("float16")
    del model.graph.node[:]
    nodes = [node("Cast", ["x"], ["wide"], to=TensorProto.FLOAT), node("Cast", ["wide"], ["y"], to=TensorProto.FLOAT16)]
    model.graph.node.extend(nodes)
    assert in_float32(model) is model


def test_the_float32_view_keeps_a_cast_to_integers_whatever_the_order_of_its_attributes():
    plan, encodings = planned("uint8", COARSE)
    lowered, _ = insert(marked("float16"), plan, encodings)
    cast = node("Cast", ["y"], ["whole"], to=TensorProto.INT32)
    cast.attribute.insert(0, helper.make_attribute("saturate", 1))
    lowered.graph.node.append(cast)
    lowered.graph.output.append(value("whole", TensorProto.INT32, [2, 3]))
    view = in_float32(lowered)
    assert [n.op_type for n in view.graph.node if n.output[0] == "whole"] == ["Cast"]
    onnx.checker.check_model(view, full_check=True)


@pytest.mark.parametrize(("opset", "says"), [(21, None), (23, TensorProto.FLOAT), (25, TensorProto.FLOAT)])
@pytest.mark.parametrize(("dtype", "dialect"), [("float16", "onnxruntime"), ("bfloat16", "onnx")])
def test_a_pair_of_a_narrow_type_says_that_it_divides_in_float32_where_it_can(dtype, dialect, opset, says):
    plan, encodings = planned("uint8", COARSE)
    first, _ = insert(marked(dtype), plan, encodings, dialect=dialect, opset=opset)
    onnx.checker.check_model(first, full_check=True)
    said = {attributes(n).get("precision") for n in first.graph.node if n.op_type == "QuantizeLinear"}
    assert said == {says}
    assert read(first) == encodings
    second, _ = insert(open_qdq(first).model, plan, encodings, dialect=dialect, opset=opset)
    assert onnx.printer.to_text(first.graph) == onnx.printer.to_text(second.graph)
    assert read(in_float32(first)) == encodings
