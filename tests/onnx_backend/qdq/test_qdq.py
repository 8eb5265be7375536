from dataclasses import replace
from itertools import product

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from qdq_models import LEVELS, convnet, encodings_of, make_model, mlp, prepared, run, weights

from onnx_backend.lower import insert
from onnx_backend.opening.read_graph import read_graph
from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import initializers
from onnx_backend.proto.model_io import load
from onnx_backend.proto.nodes import attributes
from onnx_backend.proto.opsets import at_opset
from onnx_backend.qdq.marks import mark_node, open_qdq
from onnx_backend.qdq.read import qdq_pairs, read, read_casts
from onnx_backend.runtime.session import simulation_session
from qsdk import ConfigError, Encoding, ExportError, FileFormatError, ModelError, w4a8, w4a16, w8a8, w8a16
from qsdk.core.numerics.block_scales import restrict_block_scales
from qsdk.core.numerics.dtypes import DTYPES, dtype_named
from qsdk.core.numerics.spec import PerBlock, PerChannel, PerTensor, Spec
from qsdk.core.planning.make_plan import make_plan
from qsdk.core.planning.plan import Decision, Plan

pytestmark = pytest.mark.usefixtures("exact_products")

node = helper.make_node
X = np.random.default_rng(7).normal(size=(3, 3, 8, 8)).astype(np.float32)
CONFIGS = {
    "w8a8": w8a8(),
    "w8a8 symmetric": w8a8(symmetric_activations=True),
    "w4a8": w4a8(),
    "w4a16 blocks": w4a16(block_size=2),
    "w8a16": w8a16(),
    "int16": w8a8().override("*", activation="int16"),
    "int8": w8a8().override("*", activation="int8"),
    "strict": w8a8().override("*", activation="int8_strict", weight="int8_strict"),
    "3 bits": w8a8().override("*", activation="uint6", weight="int3"),
    "uint8 weights": w8a8().override("*", weight="uint8"),
    "float16 head": w8a8().skip("gemm", dtype="float16"),
    "bfloat16 first": w8a8().skip("conv", dtype="bfloat16"),
    "float middle": w8a8().skip("add").skip("pool"),
}


def lsb_of(plan, encodings, site):
    return float(encodings[site].scale[0]) if site in encodings else 1e-3


@pytest.mark.parametrize("name", CONFIGS)
def test_checked_read_back_and_within_one_lsb_at_every_level(name):
    marked, _, plan, encodings = prepared(convnet(), CONFIGS[name])
    model, rows = insert(marked, plan, encodings)
    onnx.checker.check_model(model, full_check=True)
    assert read(model) == encodings
    assert [value.name for value in model.graph.input] == ["x"]
    assert [value.name for value in model.graph.output] == ["y", "p"]
    assert {row["site"] for row in rows} == set(plan.decisions)
    assert not any(entry.domain == "qsdk" for entry in model.opset_import)
    expected = simulation_session(model).run(None, {"x": X})
    for level in LEVELS:
        got = run(model, {"x": X}, level)
        for site, left, right in zip(("gemm:output", "softmax:output"), got, expected, strict=True):
            assert np.abs(left - right).max() <= 1.01 * lsb_of(plan, encodings, site), level


@pytest.mark.parametrize("config", [w8a8(), w4a8(), w4a16(block_size=32), w8a16(), CONFIGS["strict"]])
def test_a_round_trip_and_the_runtime_agree_with_the_formula(config):
    marked, graph, plan, encodings = prepared(mlp(), config)
    model, _ = insert(marked, plan, encodings)
    back = read(model)
    assert back == encodings
    x = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
    stored = initializers(model.graph)
    for place in qdq_pairs(model):
        if place.stored is not None:
            original = array(initializers(mlp().graph)[graph.tensors[graph.sites[place.site]].name])
            np.testing.assert_array_equal(array(stored[place.stored]), encodings[place.site].quantize(original))
    quantized = next(n for n in model.graph.node if n.name == "x:input/quantize").output[0]
    exposed = load(model)
    exposed.graph.output.append(helper.make_tensor_value_info(quantized, 0, None))
    exposed.graph.output[-1].ClearField("type")
    codes = simulation_session(exposed).run([quantized], {"x": x})[0]
    np.testing.assert_array_equal(codes, encodings["x:input"].quantize(x))


@pytest.mark.parametrize("opset", [21, 23, 25])
@pytest.mark.parametrize("dialect", ["onnxruntime", "onnx"])
def test_the_output_dtype_form_has_no_zero_point_in_a_symmetric_model(opset, dialect):
    config = w8a8(symmetric_activations=True).override("*", activation="int16")
    marked, _, plan, encodings = prepared(convnet(), config)
    model, rows = insert(marked, plan, encodings, dialect=dialect)
    model = at_opset(model, opset)
    onnx.checker.check_model(model, full_check=True)
    assert not [tensor.name for tensor in model.graph.initializer if "zero_point" in tensor.name]
    quantize = [n for n in model.graph.node if n.op_type == "QuantizeLinear"]
    assert quantize
    assert {attributes(n)["output_dtype"] for n in quantize} == {TensorProto.INT16}
    assert all(len(n.input) == 2 for n in model.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear"))
    assert read(model) == encodings
    expected = simulation_session(model).run(None, {"x": X})
    for left, right in zip(run(model, {"x": X}), expected, strict=True):
        np.testing.assert_allclose(left, right, atol=2e-3)
    assert {row["form"] for row in rows} == {"QDQ output_dtype", "integer initializer", "float"}
    saved = sum(row["zero_point_bytes_saved"] for row in rows)
    assert saved == 2 * len(quantize) + sum(encodings[s].scale.size for s in encodings if s.endswith(":weight"))


def test_uint8_carries_both_and_a_zero_point_only_where_it_is_needed():
    marked, _, plan, encodings = prepared(convnet(), w8a8())
    model, _ = insert(marked, plan, encodings)
    for quantize in (n for n in model.graph.node if n.op_type == "QuantizeLinear"):
        encoding = encodings[quantize.name.removesuffix("/quantize")]
        assert attributes(quantize)["output_dtype"] == TensorProto.UINT8
        assert len(quantize.input) == (2 if encoding.symmetric else 3)
    assert len(next(n for n in model.graph.node if n.name == "relu:output/quantize").input) == 2


@pytest.mark.parametrize("symmetric", [True, False])
def test_int8_gives_way_to_the_runtime_unless_the_pure_form_is_asked_for(symmetric):
    config = w8a8(symmetric_activations=symmetric).override("*", activation="int8")
    marked, _, plan, encodings = prepared(convnet(), config)
    for dialect, has_attribute in (("onnxruntime", False), ("onnx", True)):
        model, _ = insert(marked, plan, encodings, dialect=dialect)
        for quantize in (n for n in model.graph.node if n.op_type == "QuantizeLinear"):
            assert ("output_dtype" in attributes(quantize)) is has_attribute
            assert (len(quantize.input) == 3) is (not has_attribute or not symmetric_at(quantize, encodings))
    with pytest.raises(ConfigError, match="unknown dialect 'tflite'"):
        insert(marked, plan, encodings, dialect="tflite")


def symmetric_at(quantize, encodings):
    return encodings[quantize.name.removesuffix("/quantize")].symmetric


# --- the inverse ----------------------------------------------------------------------------------------------------

INTEGERS = sorted(
    name for name, dtype in DTYPES.items() if dtype.is_quantized and dtype.bits <= 16 and not dtype.exact_sums
)
STRICT = ["int8_strict", "int4_strict", "int6_strict"]
scales = st.floats(2.0**-20, 2.0**20, width=32)


@st.composite
def encodings_for(draw, shape, *, granular=True, names=(*INTEGERS, *STRICT)):
    dtype = dtype_named(draw(st.sampled_from(names)))
    kind = draw(st.sampled_from(["tensor", "channel", "block"] if granular else ["tensor"]))
    axis = draw(st.integers(0, len(shape) - 1)) if kind != "tensor" else None
    block = draw(st.integers(2, max(2, shape[axis]))) if kind == "block" else None
    if axis is None:
        scale_shape = (1,)
    elif block is None:
        scale_shape = (shape[axis],)
    else:
        scale_shape = (*shape[:axis], -(-shape[axis] // block), *shape[axis + 1 :])
    count = int(np.prod(scale_shape))
    scale = np.array(draw(st.lists(scales, min_size=count, max_size=count)), np.float32).reshape(scale_shape)
    bounds = (int(dtype.lo), int(dtype.hi)) if dtype.is_integer else (0, 0)
    zero = draw(st.lists(st.integers(*bounds), min_size=count, max_size=count))
    if draw(st.booleans()) and bounds[0] <= 0:
        zero = [0] * count
    return Encoding(dtype, scale, np.array(zero, np.int32).reshape(scale_shape), axis, block)


def spec_of(encoding):
    granularity = PerTensor()
    if encoding.axis is not None:
        granularity = PerChannel(encoding.axis)
        granularity = granularity if encoding.block_size is None else PerBlock(encoding.axis, encoding.block_size)
    return Spec(encoding.dtype, granularity, encoding.symmetric or encoding.dtype.kind == "minifloat")


LAYOUTS = {
    "as it is": [node("MatMul", ["xq", "wq"], ["y"], "mm")],
    "Transpose": [node("Transpose", ["wq"], ["wt"], perm=[1, 0]), node("MatMul", ["xq", "wt"], ["y"], "mm")],
    "Gemm": [node("Gemm", ["xq", "wq"], ["y"], "mm", transB=1)],
}


def confined_to(scale_dtype, encoding):
    """The encoding with block scales that a narrow type holds, if it has minifloats in blocks."""
    if scale_dtype is None or encoding.block_size is None or encoding.dtype.is_integer:
        return encoding
    spec = Spec(encoding.dtype, PerBlock(encoding.axis, encoding.block_size), scale_dtype=dtype_named(scale_dtype))
    powers = np.exp2(np.rint(np.log2(encoding.scale)))
    return replace(
        encoding, scale=powers if scale_dtype == "float8e8m0" else restrict_block_scales(encoding.scale, spec)
    )


def linear(layout):
    nodes = [mark_node("x:input", "x", "xq"), mark_node("fc:weight", "w", "wq"), *LAYOUTS[layout]]
    stored = weights(w=(6, 5) if layout == "as it is" else (5, 6))
    return make_model(nodes, {"x": ["n", 6]}, {"y": ["n", 5]}, stored, imports=[helper.make_opsetid("qsdk", 1)])


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    st.data(),
    st.sampled_from(list(LAYOUTS)),
    st.sampled_from(["onnxruntime", "onnx"]),
    st.sampled_from([None, "float8e8m0", "float8e4m3fn"]),
    st.sampled_from([21, 24]),
)
def test_reading_inverts_inserting(data, layout, dialect, scale_dtype, opset):
    model = linear(layout)
    weight = confined_to(scale_dtype, data.draw(encodings_for((6, 5) if layout == "as it is" else (5, 6))))
    found = {"x:input": data.draw(encodings_for((1, 6), granular=False)), "fc:weight": weight}
    kinds = {"x:input": "input", "fc:weight": "weight"}
    plan = Plan({s: Decision(s, "MatMul", kinds[s], spec_of(e), "") for s, e in found.items()})
    lowered, _ = insert(model, plan, found, opset=opset, dialect=dialect)
    onnx.checker.check_model(lowered, full_check=True)
    assert read(lowered) == found
    assert not any(attribute.name == "transB" for n in lowered.graph.node for attribute in n.attribute)
    assert not [n for n in lowered.graph.node if n.op_type == "Transpose"]
    opened = open_qdq(lowered)
    assert opened.encodings == found
    again, _ = insert(opened.model, plan, opened.encodings, opset=opset, dialect=dialect)
    assert read(again) == found
    wanted = weight.fake_quantize(array(model.graph.initializer[0]))
    held = next(p for p in qdq_pairs(again) if p.site == "fc:weight")
    codes = array(initializers(again.graph)[held.stored])
    codes = codes.transpose(np.argsort(held.permutation)) if held.permutation else codes
    np.testing.assert_array_equal(weight.dequantize(codes), wanted)


@pytest.mark.parametrize("name", ["int8_strict", "uint6", "int5", "int16_strict", "uint12", "uint3", "int3"])
def test_a_narrow_grid_is_recovered_from_what_stands_in_front_and_held_at_run_time(name):
    dtype = dtype_named(name)
    encoding = Encoding(dtype, np.float32([0.1]), np.int32([1]))
    nodes = [mark_node("x:input", "x", "xq"), node("Neg", ["xq"], ["y"])]
    model = make_model(nodes, {"x": [9]}, {"y": [9]}, {}, imports=[helper.make_opsetid("qsdk", 1)])
    plan = Plan({"x:input": Decision("x:input", "Input", "input", Spec(dtype), "")})
    lowered, _ = insert(model, plan, {"x:input": encoding})
    x = np.float32([-1e6, -13, -12.75, -0.15, 0, 0.05, 0.149, 13, 1e6])
    for level in LEVELS:
        np.testing.assert_array_equal(run(lowered, {"x": x}, level)[0], -encoding.fake_quantize(x))
    if DTYPES[dtype.container].bits == 8 or dtype.bits > 8:
        for n in lowered.graph.node:
            del n.metadata_props[:]
        assert list(read(lowered).values()) == [encoding]


@pytest.mark.parametrize("dtype", ["uint3", "int3", "uint4", "int4"])
def test_narrow_activations_load_and_agree_at_every_level(dtype):
    marked, _, plan, encodings = prepared(mlp(), w8a8().override("*", activation=dtype))
    lowered, _ = insert(marked, plan, encodings)
    x = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
    wanted = simulation_session(lowered).run(None, {"x": x})[0]
    step = 1.01 * encodings["add2:output"].scale[0]
    for level in LEVELS:
        assert np.abs(run(lowered, {"x": x}, level)[0] - wanted).max() <= step


def test_the_simulation_keeps_both_of_two_pairs_in_a_row():
    nodes = [mark_node("a:output", "x", "a"), mark_node("b:input", "a", "b"), node("Neg", ["b"], ["y"])]
    model = make_model(nodes, {"x": [50]}, {"y": [50]}, {}, imports=[helper.make_opsetid("qsdk", 1)])
    first = Encoding(dtype_named("uint8"), np.float32([0.5]), np.int32([100]))
    second = Encoding(dtype_named("uint8"), np.float32([0.3]), np.int32([128]))
    plan = Plan({s: Decision(s, "Neg", "activation", spec_of(first), "") for s in ("a:output", "b:input")})
    lowered, _ = insert(model, plan, {"a:output": first, "b:input": second})
    x = np.linspace(-20, 20, 50, dtype=np.float32)
    got = simulation_session(lowered).run(None, {"x": x})[0]
    np.testing.assert_array_equal(got, -second.fake_quantize(first.fake_quantize(x)))


def test_a_clip_that_means_something_else_narrows_nothing():
    nodes = [
        node("Clip", ["x", "lo", "hi"], ["c"]),
        node("QuantizeLinear", ["c", "s"], ["q"]),
        node("DequantizeLinear", ["q", "s"], ["y"]),
    ]
    stored = {"lo": np.float32(0), "hi": np.float32(6), "s": np.float32(0.025)}
    found = read(make_model(nodes, {"x": [3]}, {"y": [3]}, stored))
    assert found == {"c": Encoding(dtype_named("uint8"), np.float32([0.025]), np.int32([0]))}


def test_two_bit_weights_are_packed():
    for channels, size in ((8, 2), (5, 2)):
        nodes = [mark_node("w:weight", "w", "wq"), node("Add", ["x", "wq"], ["y"])]
        model = make_model(
            nodes,
            {"x": [channels]},
            {"y": [channels]},
            weights(w=(channels,)),
            imports=[helper.make_opsetid("qsdk", 1)],
        )
        encoding = Encoding(dtype_named("int2"), np.full(channels, 0.3, np.float32), np.zeros(channels), 0)
        plan = Plan({"w:weight": Decision("w:weight", "Add", "weight", spec_of(encoding), "")})
        lowered, _ = insert(model, plan, {"w:weight": encoding})
        onnx.checker.check_model(lowered, full_check=True)
        tensor = initializers(lowered.graph)["w_quantized"]
        assert (len(tensor.raw_data), lowered.opset_import[0].version, lowered.ir_version) == (size, 25, 13)
        values = array(model.graph.initializer[0])
        np.testing.assert_array_equal(array(tensor), encoding.quantize(values))
        got = simulation_session(lowered).run(None, {"x": np.zeros(channels, np.float32)})[0]
        np.testing.assert_array_equal(got, encoding.fake_quantize(values))


# --- structure ------------------------------------------------------------------------------------------------------


def test_a_weight_of_two_modules_is_stored_once_and_its_transpose_is_folded_once():
    nodes = [
        mark_node("a:weight", "w", "one"),
        node("Transpose", ["one"], ["t1"], perm=[1, 0]),
        mark_node("a:weight", "w", "again"),
        node("Transpose", ["again"], ["t2"], perm=[1, 0]),
        mark_node("b:weight", "w", "two"),
        node("MatMul", ["x", "t1"], ["m1"]),
        node("MatMul", ["m1", "t2"], ["m2"]),
        node("MatMul", ["m2", "two"], ["y"]),
    ]
    model = make_model(
        nodes, {"x": ["n", 4]}, {"y": ["n", 4]}, weights(w=(4, 4)), imports=[helper.make_opsetid("qsdk", 1)]
    )
    encoding = Encoding(dtype_named("int8"), np.float32([0.01] * 4), np.zeros(4), 0)
    plan = Plan({s: Decision(s, "MatMul", "weight", spec_of(encoding), "") for s in ("a:weight", "b:weight")})
    lowered, _ = insert(model, plan, {"a:weight": encoding, "b:weight": encoding})
    assert [n.op_type for n in lowered.graph.node] == ["DequantizeLinear", "DequantizeLinear", *["MatMul"] * 3]
    assert read(lowered) == {"a:weight": encoding, "b:weight": encoding}
    x = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
    weight = encoding.fake_quantize(array(model.graph.initializer[0]))
    np.testing.assert_allclose(run(lowered, {"x": x}, LEVELS[0])[0], x @ weight.T @ weight.T @ weight, rtol=1e-5)


def test_equal_encodings_of_one_tensor_share_its_integers():
    nodes = [mark_node("a:weight", "w", "one"), mark_node("b:weight", "one", "two")]
    nodes += [node("Gather", ["one", "i"], ["g"]), node("MatMul", ["g", "two"], ["y"])]
    stored = weights(w=(4, 4)) | {"i": np.array([1, 2])}
    model = make_model(nodes, {"x": ["n", 4]}, {"y": [2, 4]}, stored, imports=[helper.make_opsetid("qsdk", 1)])
    encoding = Encoding(dtype_named("int8"), np.float32([0.01]), np.zeros(1))
    plan = Plan({s: Decision(s, "MatMul", "weight", spec_of(encoding), "") for s in ("a:weight", "b:weight")})
    lowered, _ = insert(model, plan, {"a:weight": encoding, "b:weight": encoding})
    assert [t.name for t in lowered.graph.initializer if t.data_type == TensorProto.INT8] == ["w_quantized"]


def test_outputs_keep_their_names_whatever_is_decided():
    nodes = [
        mark_node("x:input", "x", "same"),
        mark_node("r:output", "r0", "r"),
        mark_node("t:output", "r0", "t"),
    ]
    nodes.insert(1, node("Relu", ["same"], ["r0"], "relu"))
    outputs = {"same": [4], "r": [4], "t": [4]}
    model = make_model(nodes, {"x": [4]}, outputs, {}, imports=[helper.make_opsetid("qsdk", 1)])
    x = np.float32([-1, 0, 1, 2])
    for dtype in (None, "float16", "uint8"):
        spec = None if dtype is None else Spec(dtype_named(dtype))
        plan = Plan({s: Decision(s, "Relu", "output", spec, "") for s in ("x:input", "r:output", "t:output")})
        encoding = Encoding(dtype_named("uint8"), np.float32([1]), np.int32([100]))
        lowered, _ = insert(model, plan, dict.fromkeys(plan.decisions, encoding))
        onnx.checker.check_model(lowered, full_check=True)
        assert [value.name for value in lowered.graph.output] == list(outputs)
        got = run(lowered, {"x": x})
        np.testing.assert_array_equal(got[0], x)
        for value in got[1:]:
            np.testing.assert_array_equal(value, np.maximum(x, 0))


def test_float16_sites_survive_the_round_trip():
    marked, _, plan, encodings = prepared(mlp(), w8a8().skip("mm2", dtype="float16").skip("add2", dtype="float16"))
    model, rows = insert(marked, plan, encodings)
    assert read_casts(model) == {"mm2:weight": "float16", "add2:bias": "float16", "add2:output": "float16"}
    assert {row["site"] for row in rows if row["form"] == "cast"} == set(read_casts(model))
    assert initializers(model.graph)["w2_float16"].data_type == TensorProto.FLOAT16
    assert dict(open_qdq(model).casts) == read_casts(model)
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    values = [run(model, {"x": x}, level)[0] for level in LEVELS]
    assert all(np.array_equal(value, value.astype(np.float16)) for value in values)


@pytest.mark.parametrize(("dtype", "zero_point"), list(product(["int4", "uint4"], [0, 3])))
def test_a_relu_before_a_narrow_q_survives_the_default_level(dtype, zero_point):
    nodes = [node("Relu", ["x"], ["r"]), mark_node("r:output", "r", "q"), node("Neg", ["q"], ["y"])]
    model = make_model(nodes, {"x": [5]}, {"y": [5]}, {}, imports=[helper.make_opsetid("qsdk", 1)])
    encoding = Encoding(dtype_named(dtype), np.float32([0.5]), np.int32([zero_point]))
    plan = Plan({"r:output": Decision("r:output", "Relu", "activation", spec_of(encoding), "")})
    lowered, _ = insert(model, plan, {"r:output": encoding})
    x = np.float32([-3, -1, 0, 1, 2])
    for level in LEVELS:
        np.testing.assert_array_equal(run(lowered, {"x": x}, level)[0], -encoding.fake_quantize(np.maximum(x, 0)))


MOVED = {
    "MaxPool": ({"kernel_shape": [2, 2]}, []),
    "Reshape": ({}, ["shape"]),
    "Transpose": ({"perm": [0, 1, 3, 2]}, []),
    "Squeeze": ({}, ["axes"]),
    "Unsqueeze": ({}, ["axes"]),
    "Slice": ({}, ["axes", "one", "axes"]),
}


@pytest.mark.parametrize("behind", ["output", "float", "relu", "move"])
@pytest.mark.parametrize("op", MOVED)
def test_a_moved_int8_tensor_loads_at_the_default_level_and_keeps_its_values(op, behind):
    options, more = MOVED[op]
    last = {"output": [], "float": [node("Neg", ["o"], ["y"])], "relu": [node("Relu", ["o"], ["y0"])]}
    last["relu"].append(mark_node("r:output", "y0", "y"))
    last["move"] = [node("Transpose", ["o"], ["t"]), node("Neg", ["t"], ["y"])]
    moved = "y" if behind == "output" else "o"
    nodes = [mark_node("x:input", "x", "a"), node(op, ["a", *more], [moved], "move", **options), *last[behind]]
    stored = {"shape": np.array([1, -1]), "axes": np.array([0]), "one": np.array([1])}
    model = make_model(nodes, {"x": [1, 4, 4, 4]}, {"y": None}, stored, imports=[helper.make_opsetid("qsdk", 1)])
    encoding = Encoding(dtype_named("int8"), np.float32([0.1]), np.int32([3]))
    plan = Plan({s: Decision(s, op, "activation", spec_of(encoding), "") for s in ("x:input", "r:output")})
    lowered, _ = insert(model, plan, dict.fromkeys(plan.decisions, encoding))
    pure, _ = insert(model, plan, dict.fromkeys(plan.decisions, encoding), dialect="onnx")
    assert all(found == encoding for found in read(lowered).values())
    assert read(lowered).keys() == read(pure).keys()
    x = np.random.default_rng(0).normal(size=(1, 4, 4, 4)).astype(np.float32)
    wanted = run(pure, {"x": x}, LEVELS[0])[0]
    for level in LEVELS:
        np.testing.assert_array_equal(run(lowered, {"x": x}, level)[0], wanted)
    opened = open_qdq(lowered)
    assert not [n for n in opened.model.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    again, _ = insert(opened.model, plan, opened.encodings)
    np.testing.assert_array_equal(run(again, {"x": x}, LEVELS[0])[0], wanted)


def test_what_cannot_be_written_is_named():
    marked, _, plan, encodings = prepared(mlp(), w8a8())
    missing = {site: e for site, e in encodings.items() if site != "relu:output"}
    with pytest.raises(ExportError, match="relu:output has no encoding"):
        insert(marked, plan, missing)
    misfit = encodings | {"mm1:weight": Encoding(dtype_named("int8"), np.ones(3, np.float32), np.zeros(3), 1)}
    with pytest.raises(ExportError, match="encoding of mm1:weight does not fit"):
        insert(marked, plan, misfit)
    narrow = encodings | {"relu:output": Encoding(dtype_named("uint6"), np.ones(8, np.float32), np.zeros(8), 1)}
    with pytest.raises(ExportError, match="relu:output is an activation of uint6 per channel"):
        insert(marked, plan, narrow)


def test_inserting_leaves_the_marked_model_alone():
    marked, _, plan, encodings = prepared(mlp(), w8a8())
    before = marked.SerializeToString()
    insert(marked, plan, encodings)
    assert marked.SerializeToString() == before


def test_one_site_on_two_tensors_is_refused():
    nodes = [mark_node("a:input", "x", "u"), mark_node("a:input", "w", "v"), node("MatMul", ["u", "v"], ["y"])]
    model = make_model(
        nodes, {"x": ["n", 4]}, {"y": ["n", 3]}, weights(w=(4, 3)), imports=[helper.make_opsetid("qsdk", 1)]
    )
    with pytest.raises(ModelError, match="a:input marks two tensors"):
        insert(model, Plan({}), {})


def test_foreign_qdq_is_read_by_tensor_name_and_what_cannot_be_read_names_its_node():
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"], "q"),
        node("DequantizeLinear", ["q", "s", "z"], ["d"], "dq"),
        node("DequantizeLinear", ["w", "ws"], ["wd"], "wdq", axis=1),
        node("MatMul", ["d", "wd"], ["y"]),
    ]
    stored = {
        "s": np.float32([0.5]),
        "z": np.array([-3], np.int8),
        "w": np.ones((4, 3), np.int8),
        "ws": np.float32([1, 2, 3]),
    }
    model = make_model(nodes, {"x": ["n", 4]}, {"y": ["n", 3]}, stored)
    assert read(model) == {
        "x": Encoding(dtype_named("int8"), np.float32([0.5]), np.int32([-3])),
        "w": Encoding(dtype_named("int8"), np.float32([1, 2, 3]), np.zeros(3), 1),
    }
    stored["ws"] = np.float32([1, 0, 3])
    with pytest.raises(FileFormatError, match="wdq: an encoding of int8 needs positive"):
        read(make_model(nodes, {"x": ["n", 4]}, {"y": ["n", 3]}, stored))
    del stored["ws"]
    with pytest.raises(FileFormatError, match="wdq computes its parameter 'ws'"):
        read(make_model(nodes, {"x": ["n", 4], "ws": [3]}, {"y": ["n", 3]}, stored))


def test_int4_initializers_are_half_a_byte():
    marked, _, plan, encodings = prepared(mlp(), w4a8())
    model, _ = insert(marked, plan, encodings)
    tensor = initializers(model.graph)["w1_quantized"]
    assert (len(tensor.raw_data), numpy_helper.to_array(tensor).dtype) == (24, ml_dtypes.int4)


def test_reading_a_plan_of_the_marked_model_is_what_insert_was_given():
    marked, graph, plan, encodings = prepared(convnet(), w8a8())
    assert make_plan(read_graph(marked), w8a8()).decisions == plan.decisions
    stored = {t.name: array(t) for t in convnet().graph.initializer}
    assert encodings_of(graph, plan, stored) == encodings
