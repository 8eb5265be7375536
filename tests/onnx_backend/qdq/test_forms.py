"""Forms of weights in a file: the layout that the runtime fuses, block scales in narrow types, no needless bytes."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from qdq_models import make_model, mlp, optimized, prepared, run, weights

import qsdk
from onnx_backend.lower import insert, lower
from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import initializers
from onnx_backend.proto.lazy_tensors import with_large
from onnx_backend.proto.nodes import metadata
from onnx_backend.qdq.read import qdq_pairs, read
from onnx_backend.runtime.session import simulation_session
from onnx_backend.workarounds.onnxruntime_barriers import EXACT_MATMUL, needed_options
from qsdk import ConfigError, ExportError, QuantConfig, float32, int4, int8, w4a8, w4a16, w8a8, w8a16, weight_only
from qsdk.core.numerics.spec import PerBlock, PerTensor

node = helper.make_node
FORMATS = ("mxfp4", "mxfp8", "nvfp4")


def linears(k: int = 256, n: int = 64):
    """Two linear layers as torch exports them: Gemm with transB, and Transpose -> MatMul."""
    nodes = [
        node("Gemm", ["x", "w1", "b"], ["h"], "first", transB=1),
        node("Relu", ["h"], ["r"], "relu"),
        node("Transpose", ["w2"], ["t"], "turn", perm=[1, 0]),
        node("MatMul", ["r", "t"], ["y"], "second"),
    ]
    return make_model(nodes, {"x": ["n", k]}, {"y": ["n", n]}, weights(w1=(k, k), b=(k,), w2=(n, k)))


# the layout that is fused


@pytest.mark.parametrize("block", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int4", "uint4", "int2", "uint2"])
def test_linear_weights_come_out_in_the_form_that_the_runtime_fuses(dtype: str, block: int, tmp_path):
    marked, _, plan, encodings = prepared(linears(), weight_only(dtype, block_size=block))
    model, _ = insert(marked, plan, encodings)
    assert optimized(model, tmp_path).count("MatMulNBits") == 2
    for place in qdq_pairs(model):
        assert (place.encoding.axis, place.encoding.block_size) == (1, block)  # of the weight as torch has it
        assert {a.name: a.i for a in place.dequantize.attribute} == {"axis": 0, "block_size": block}
    assert read(model) == encodings


@pytest.mark.parametrize("config", [weight_only("int4"), weight_only("int8"), w4a16(block_size=32)], ids=str)
def test_a_transposed_gemm_computes_the_same_without_its_attribute(config):
    marked, _, plan, encodings = prepared(linears(32, 8), config)
    model, _ = insert(marked, plan, encodings)
    assert not any(a.name == "transB" for found in model.graph.node for a in found.attribute)
    x = np.random.default_rng(1).normal(size=(5, 32)).astype(np.float32)
    moved = {"x": x}
    stored = {t.name: array(t) for t in linears(32, 8).graph.initializer}
    at = lambda site, value: encodings[site].fake_quantize(value) if site in encodings else value  # noqa: E731
    h = at("x:input", x) @ at("first:weight", stored["w1"]).T + stored["b"]
    y = at("second:output", at("relu:output", np.maximum(h, 0)) @ at("second:weight", stored["w2"]).T)
    (got,) = simulation_session(model).run(None, moved)
    np.testing.assert_allclose(got, y, rtol=1e-5, atol=1e-4)


def test_a_weight_that_others_read_as_it_is_stays_as_it_is():
    """A table that is looked up and multiplied with: one layout serves only one of them."""
    nodes = [
        node("Gather", ["w", "i"], ["e"], "emb"),
        node("Gemm", ["x", "w"], ["y"], "head", transB=1),
    ]
    stored = {**weights(w=(10, 6)), "i": np.array([1, 2])}
    model = make_model(nodes, {"x": ["n", 6]}, {"e": [2, 6], "y": ["n", 10]}, stored)
    marked, _, plan, encodings = prepared(model, weight_only("int8"))
    lowered_model, _ = insert(marked, plan, encodings)
    assert [a.name for found in lowered_model.graph.node if found.op_type == "Gemm" for a in found.attribute] == [
        "transB"
    ]
    assert read(lowered_model) == encodings


@pytest.mark.parametrize("channels", [5, 6, 8])
@pytest.mark.parametrize("dtype", ["int2", "uint2"])
def test_two_bit_weights_are_right_at_the_default_level(dtype: str, channels: int, tmp_path):
    """onnxruntime 1.31 packs 2 bits for MatMulNBits as if the output channels were a multiple of 4."""
    marked, _, plan, encodings = prepared(linears(64, channels), weight_only(dtype, block_size=32))
    model, _ = insert(marked, plan, encodings)
    x = np.random.default_rng(3).normal(size=(4, 64)).astype(np.float32)
    (expected,) = simulation_session(model).run(None, {"x": x})
    (got,) = run(model, {"x": x})
    assert np.abs(got - expected).max() < 0.03 * np.abs(expected).max()  # int8 activations inside MatMulNBits
    assert optimized(model, tmp_path).count("MatMulNBits") == (2 if channels % 4 == 0 else 1)
    assert qsdk.quantize(model).encodings == encodings


@pytest.mark.parametrize(
    "config",
    [
        w8a8().override("relu", activation="float32"),
        w8a16().override("relu", activation="float32"),
        w8a8(block_size=32),  # a barrier stands between the activation and the layer
        w4a8(block_size=32).override("relu", activation="float32"),
    ],
    ids=str,
)
def test_a_layer_beside_quantized_activations_keeps_its_float_input_at_the_default_level(config, tmp_path):
    marked, _, plan, encodings = prepared(linears(64, 48), config.override("second", activation="float32"))
    model, _ = insert(marked, plan, encodings)
    x = np.random.default_rng(3).normal(size=(4, 64)).astype(np.float32)
    (expected,) = simulation_session(model).run(None, {"x": x})
    (got,) = run(model, {"x": x})
    np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max())
    assert "MatMulNBits" not in optimized(model, tmp_path)
    assert needed_options(model) == {}


def test_a_file_of_weights_alone_notes_the_option_also_when_it_is_opened_and_written_again(tmp_path):
    sim = qsdk.quantize(linears(64, 48), None, weight_only("int8"))
    qsdk.calibrate(sim, [np.ones((2, 64), np.float32)], progress=False)
    for dialect in ("onnxruntime", "onnx"):
        path = tmp_path / f"{dialect}.onnx"
        first = qsdk.export(sim, path, dialect=dialect).summary.get("session_options", {})
        again = qsdk.export(qsdk.quantize(path, None), tmp_path / "again.onnx").summary["session_options"]
        assert again == dict([EXACT_MATMUL])
        assert first == (again if dialect == "onnxruntime" else {})
        warned = [row for row in qsdk.validate(path).rows if row["rule"] != "speed"]
        assert {row["rule"] for row in warned} == {"default_session"}
        assert dialect == "onnx" or f"{EXACT_MATMUL[0]}=0" in warned[0]["remedy"]
        quantized = qsdk.quantize(path, None, w8a16())
        qsdk.calibrate(quantized, [np.ones((2, 64), np.float32)], progress=False)
        assert not qsdk.export(quantized, tmp_path / "again.onnx").summary.get("session_options")
        assert qsdk.validate(tmp_path / "again.onnx").summary["warnings"] == 0


@pytest.mark.parametrize("block", [None, 32])
@pytest.mark.parametrize("preset", [w8a16, w4a16])
def test_activations_of_sixteen_bits_are_not_rounded_to_eight_at_the_default_level(preset, block, tmp_path):
    """From onnxruntime 1.32 on, MatMulNBits would replace these layers too."""
    marked, _, plan, encodings = prepared(linears(64, 48), preset(block_size=block))
    model, _ = insert(marked, plan, encodings)
    x = np.random.default_rng(3).normal(size=(4, 64)).astype(np.float32)
    (expected,) = simulation_session(model).run(None, {"x": x})
    (got,) = run(model, {"x": x})
    assert np.abs(got - expected).max() <= 1.01 * encodings["second:output"].scale.max()
    assert "MatMulNBits" not in optimized(model, tmp_path)
    assert qsdk.quantize(model).encodings == encodings


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_nor_are_they_behind_the_cast_of_a_narrow_float_type(dtype: str, tmp_path):
    """A scale below 2^-14 is float32 in the file: casts stand between the pairs and the layer, and would be merged."""
    rng, code = np.random.default_rng(3), TensorProto.DataType.Value(dtype.upper())
    kind = helper.tensor_dtype_to_np_dtype(code)
    stored = [numpy_helper.from_array((rng.normal(size=(64, 64)) / 64).astype(kind), name) for name in ("w1", "w2")]
    nodes = [node("MatMul", ["x", "w1"], ["h"], "first"), node("MatMul", ["h", "w2"], ["y"], "second")]
    ends = [helper.make_tensor_value_info(name, code, ["n", 64]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    sim = qsdk.quantize(model, None, w8a16())
    x = rng.uniform(-1, 1, (16, 64)).astype(np.float32)
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    assert "MatMulNBits" not in optimized(onnx.load(tmp_path / "model.onnx"), tmp_path)


def test_a_float16_bias_of_many_steps_does_not_overflow_at_the_default_level(tmp_path):
    """The runtime would divide it by the product of both scales in float16: infinite for 16 bits, 1,900 steps off.

    That session rounds less often than the simulation, which is a few units in the last place.
    """
    rng = np.random.default_rng(3)
    shapes = {"w": (4, 3, 3, 3), "b": (4,)}
    stored = [numpy_helper.from_array(rng.normal(size=s).astype(np.float16), name) for name, s in shapes.items()]
    half = TensorProto.FLOAT16
    ends = [helper.make_tensor_value_info(name, half, ["n", c, 6, 6]) for name, c in (("x", 3), ("y", 4))]
    layer = node("Conv", ["x", "w", "b"], ["y"], "layer", pads=[1, 1, 1, 1])
    graph = helper.make_graph([layer], "g", ends[:1], ends[1:], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    sim = qsdk.quantize(model, None, w8a16())
    batches = [(rng.normal(size=(4, 3, 6, 6)) * 20).astype(np.float16)]
    qsdk.calibrate(sim, batches, progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    report = qsdk.check_parity(sim, tmp_path / "model.onnx", batches, runtime="onnxruntime", progress=False)
    assert report.summary["activations_max_lsb"] <= 4, report


def test_four_bit_blocks_have_no_zero_points():
    for config in (weight_only("int4", block_size=32), w4a16(block_size=32, symmetric_activations=True)):
        marked, _, plan, encodings = prepared(linears(), config)
        model, rows = insert(marked, plan, encodings)
        read_weights = [place.dequantize for place in qdq_pairs(model) if place.site.endswith(":weight")]
        assert [len(found.input) for found in read_weights] == [2, 2]
        saved = {row["site"]: row["zero_point_bytes_saved"] for row in rows if row["site"].endswith(":weight")}
        assert saved == {"first:weight": 256 * 8 // 2, "second:weight": 64 * 8 // 2}


# narrow scales


@pytest.mark.parametrize("opset", [23, 24, 25])
@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_read_back_and_onnx_computes_their_values(name: str, opset: int):
    marked, graph, plan, encodings = prepared(linears(96, 24), weight_only(name))
    assert all(plan.decisions[f"{layer}:weight"].spec.scale_dtype is not None for layer in ("first", "second"))
    model, _ = insert_at(marked, plan, encodings, opset)
    onnx.checker.check_model(model, full_check=True)
    assert read(model) == encodings
    stored = {t.name: array(t) for t in linears(96, 24).graph.initializer}
    for place in qdq_pairs(model):
        value = helper.make_empty_tensor_value_info(place.dequantize.output[0])
        probe = onnx.ModelProto()
        probe.CopyFrom(model)
        probe.graph.output.append(value)
        got = ReferenceEvaluator(probe).run([value.name], {"x": np.zeros((1, 96), np.float32)})[0]
        source = stored[graph.tensors[graph.sites[place.site]].name]
        assert got.dtype == np.float32
        assert got.tobytes() == np.ascontiguousarray(encodings[place.site].fake_quantize(source).T).tobytes()


def insert_at(marked, plan, encodings, opset: int):
    made = lower(marked, plan, encodings, dialect="onnx", opset=opset)
    return with_large(made.model, made.large), made.rows


@pytest.mark.parametrize(
    ("name", "opset", "scales"),
    [
        ("mxfp4", 23, TensorProto.FLOAT),
        ("mxfp4", 24, TensorProto.FLOAT8E8M0),
        ("mxfp8", 24, TensorProto.FLOAT8E8M0),
        ("nvfp4", 23, TensorProto.FLOAT8E4M3FN),
    ],
)
def test_scales_are_stored_in_their_own_type_where_the_opset_has_it(name: str, opset: int, scales: int):
    marked, _, plan, encodings = prepared(linears(96, 24), weight_only(name))
    model, _ = insert_at(marked, plan, encodings, opset)
    stored = initializers(model.graph)
    blocks = [t for t in stored.values() if t.name.split("/")[-1] in ("scale", "scale_codes")]
    assert {t.data_type for t in blocks} == {scales}
    if name == "nvfp4":
        assert [metadata(f).get("qsdk.scales_of") for f in model.graph.node if "qsdk.scales_of" in metadata(f)] == [
            "first:weight",
            "second:weight",
        ]
        outer = [array(t) for t in stored.values() if t.name.endswith("/scale_divisor")]
        assert [(value.dtype, value.shape) for value in outer] == [(np.float32, ())] * 2


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_simulated_exported_and_opened_at_the_onnx_door(name: str, tmp_path):
    x = np.random.default_rng(2).normal(size=(4, 96)).astype(np.float32)
    sim = qsdk.quantize(linears(96, 24), None, weight_only(name))
    qsdk.calibrate(sim, [])  # only weights have ranges to find
    stored = {t.name: array(t) for t in linears(96, 24).graph.initializer}
    w1, w2 = (
        sim.encodings[f"{layer}:weight"].fake_quantize(stored[w]) for layer, w in (("first", "w1"), ("second", "w2"))
    )
    expected = np.maximum(x @ w1.T + stored["b"], 0) @ w2.T
    (got,) = sim.run(x)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)
    for opset in (21, 24):
        path = tmp_path / f"model{opset}.onnx"
        qsdk.export(sim, path, dialect="onnx", opset=opset)
        report = qsdk.check_parity(sim, path, [x], progress=False)
        assert report.summary["passed"], report
        assert report.summary["weights_max_lsb"] == 0
        again = qsdk.quantize(path, None, None)
        assert again.encodings == sim.encodings
        assert again.run(x)[0].tobytes() == got.tobytes()
        assert again.plan.decisions["first:weight"].spec == sim.plan.decisions["first:weight"].spec


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "float4e2m1"])
def test_what_the_runtime_cannot_run_is_not_written_for_it(name: str, tmp_path):
    sim = qsdk.quantize(mlp(), None, weight_only(name))
    qsdk.calibrate(sim, [])
    with pytest.raises(ExportError, match=r'mm1:weight.*no kernel for float4e2m1; export .* with dialect="onnx"'):
        qsdk.export(sim, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dialect", ["onnxruntime", "onnx"])
def test_blocks_of_activations_are_refused_with_a_remedy_that_every_dialect_has(dialect: str, tmp_path):
    model, x = torch.nn.Linear(32, 8), torch.randn(4, 32)
    qsdk.calibrate(sim := qsdk.quantize(model, x, qsdk.block_scaled("nvfp4")), [x], progress=False)
    with pytest.raises(ExportError, match='export with format="compressed-tensors"') as error:
        qsdk.export(sim, tmp_path / "model.onnx", dialect=dialect)
    assert "dialect=" not in str(error.value)


def test_a_tampered_block_scale_is_written_as_float32():
    """Scales that a narrow type cannot hold are no reason to write other ones."""
    marked, _, plan, encodings = prepared(linears(96, 24), weight_only("nvfp4"))
    encodings["first:weight"].scale[0, 0] *= np.float32(1.0000001)
    model, _ = insert_at(marked, plan, encodings, 24)
    assert initializers(model.graph)["first:weight/scale"].data_type == TensorProto.FLOAT
    assert read(model) == encodings


# how they are asked for


def test_a_format_is_asked_for_like_a_dtype():
    _, _, plan, _ = prepared(linears(96, 24), QuantConfig(int8, float32).override("first", weight="mxfp4"))
    first, second = (plan.decisions[f"{layer}:weight"].spec for layer in ("first", "second"))
    assert (first.dtype, first.granularity, first.scale_dtype) == (
        qsdk.float4e2m1,
        PerBlock(1, 32),
        qsdk.dtypes.float8e8m0,
    )
    assert (second.dtype, second.scale_dtype) == (int8, None)
    _, _, plan, _ = prepared(linears(96, 24), weight_only("mxfp4").override("first", weight="int8"))
    assert plan.decisions["first:weight"].spec.scale_dtype is None
    assert not isinstance(plan.decisions["first:weight"].spec.granularity, PerBlock)


def test_what_cannot_have_blocks_has_none():
    nodes = [
        node("Gather", ["t", "i"], ["e"], "emb"),
        node("Conv", ["e", "k"], ["y"], "depthwise", group=4),
    ]
    stored = {**weights(t=(10, 8), k=(4, 1, 3)), "i": np.array([[1, 2, 3, 4]])}
    model = make_model(nodes, {}, {"y": [1, 4, 6]}, stored)
    _, _, plan, _ = prepared(model, weight_only("mxfp4").override("*", two_level_scales=True))
    assert (plan.decisions["emb:embedding"].spec.dtype, plan.decisions["emb:embedding"].spec.granularity) == (
        int8,
        PerTensor(),
    )
    assert plan.decisions["depthwise:weight"].spec.scale_dtype is None


def test_a_format_of_blocks_is_for_weights_and_activations_alone():
    for choice in ("bias", "input", "output", "kv_cache"):
        with pytest.raises(ConfigError, match="mxfp4 is a format of blocks, for weights and activations; give a dtype"):
            weight_only().override("*", **{choice: "mxfp4"})
    with pytest.raises(ConfigError, match="unknown dtype 'mxfp5'"):
        weight_only("mxfp5")


def test_precision_can_be_set_to_a_format():
    sim = qsdk.quantize(linears(96, 24), None, weight_only())
    qsdk.calibrate(sim, [])
    sim.set_precision("second", weight="nvfp4")
    spec = sim.plan.decisions["second:weight"].spec
    assert (spec.dtype, spec.scale_dtype) == (qsdk.float4e2m1, qsdk.float8e4m3fn)
    assert sim.encodings["second:weight"].block_size == 16


def test_weight_only_leaves_activations_and_biases_float():
    _, _, plan, _ = prepared(linears(), weight_only(block_size=32))
    kinds = {site: d.quantized for site, d in plan.decisions.items()}
    assert kinds == {site: site.endswith(":weight") for site in plan.decisions}
    assert plan.decisions["first:weight"].spec.dtype == int4


def test_two_level_scales_are_lowered_to_one_blocked_scale(tmp_path):
    sim = qsdk.quantize(linears(64, 8), None, weight_only(block_size=16).override(two_level_scales=True))
    qsdk.calibrate(sim, [])
    encoding = sim.encodings["first:weight"]
    levels = encoding.scale / (encoding.scale.max(axis=1, keepdims=True) / 16)
    np.testing.assert_allclose(levels, np.rint(levels), rtol=1e-6)
    assert len(np.unique(np.rint(levels))) > 3
    qsdk.export(sim, tmp_path / "model.onnx")
    again = qsdk.quantize(tmp_path / "model.onnx", None, None)
    assert again.encodings == sim.encodings
    assert again.plan.decisions["first:weight"].spec == sim.plan.decisions["first:weight"].spec
    asymmetric = weight_only("uint4", block_size=16).override(two_level_scales=True)
    with pytest.raises(ConfigError, match="scales in uint4 belong to symmetric blocks"):
        qsdk.quantize(linears(64, 8), None, asymmetric)
