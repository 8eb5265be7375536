"""Q/DQ models of other tools: every encoding is adopted, they run as before, and they survive export."""

import numpy as np
import onnx
import pytest
from foreign_models import aimet, by_onnxruntime, integers, node, plain_pair, pt2e
from half_files import in_type
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantFormat
from qdq_models import convnet, make_model, mlp
from tool_options import S8, TOOL, U8, U16, of_tool

import qsdk
from onnx_backend.proto.nodes import metadata
from onnx_backend.proto.opsets import stamp
from onnx_backend.runtime.feeds import as_feeds, run_session
from onnx_backend.runtime.session import simulation_session
from qsdk import ConfigError, FileFormatError, calibrate, check_parity, export, quantize, to_integer, validate, w8a8
from qsdk.core.numerics.dtypes import dtype_named

RNG = np.random.default_rng(11)
SHAPES = {"mlp": (4, 6), "convnet": (2, 3, 8, 8)}


def inputs_of(model):
    return {
        value.name: RNG.normal(size=[dim.dim_value or 3 for dim in value.type.tensor_type.shape.dim]).astype(np.float32)
        for value in model.graph.input
        if value.name not in {tensor.name for tensor in model.graph.initializer}
    }


def adopted(model, tmp_path):
    """Open a foreign model, and hold what it computes, its encodings and its export against the file."""
    before, x = model.SerializeToString(), inputs_of(model)
    sim = quantize(model, None, None)
    wanted = simulation_session(model).run(None, x)
    for got, want in zip(sim.run(x), wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    assert not any(item.op_type in ("QuantizeLinear", "DequantizeLinear") for item in sim.traced().model.graph.node)
    export(sim, tmp_path / "first.onnx")
    again = quantize(tmp_path / "first.onnx", None, None)
    assert again.encodings == sim.encodings
    export(again, tmp_path / "second.onnx")
    assert (tmp_path / "first.onnx").read_bytes() == (tmp_path / "second.onnx").read_bytes()
    for got, want in zip(again.run(x), wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    assert model.SerializeToString() == before
    return sim


def parameters(model, tensor):
    """The scale and zero point under the names that onnxruntime's tool gives them."""
    stored = {item.name: numpy_helper.to_array(item) for item in model.graph.initializer}
    return stored[f"{tensor}_scale"], stored[f"{tensor}_zero_point"]


@pytest.mark.spread(5)
@pytest.mark.parametrize("name", TOOL)
def test_what_onnxruntime_quantizes_is_adopted(name, tmp_path):
    net, opset, options = TOOL[name]
    model = by_onnxruntime({"mlp": mlp, "convnet": convnet}[net](opset), SHAPES[net], tmp_path, **options)
    sim = adopted(model, tmp_path)
    for tensor, site in {"x": "x:input", "w1": "mm1:weight", "w": "conv:weight", "p": "softmax:output"}.items():
        if site not in sim.encodings:
            assert tensor not in [t.name for t in mlp().graph.initializer] or net == "convnet"
            continue
        scale, zero_point = parameters(model, tensor)
        found = sim.encodings[site]
        np.testing.assert_array_equal(found.scale, scale.reshape(-1))
        np.testing.assert_array_equal(found.zero_point, zero_point.reshape(-1).astype(np.int32))
        assert found.dtype.name == zero_point.dtype.name
    pairs = {n.input[0] for n in model.graph.node if n.op_type == "DequantizeLinear"}
    assert len(sim.encodings) <= len(pairs)
    assert {"x:input", "mm1:weight" if net == "mlp" else "conv:weight"} <= set(sim.encodings)
    kinds = {site: decision.kind for site, decision in sim.plan.decisions.items()}
    assert kinds["x:input"] == "input"
    if net == "convnet":  # the tool takes the bias of a MatMul for an activation
        biases = {site for site, kind in kinds.items() if kind == "bias"}
        assert biases == (set() if name == "float bias" else {"conv:bias", "deconv:bias", "gemm:bias"})
        assert all(sim.plan.decisions[site].bias_of for site in biases) or options["activation_type"] == U16


def test_a_tensor_of_two_types_keeps_both_encodings(tmp_path):
    convert = {"quant_type": U16, "recv_nodes": {"mm2"}}
    overrides = {"r": [{"quant_type": U8, "convert": convert}]}
    options = of_tool(U8, S8, True, TensorQuantOverrides=overrides)
    sim = adopted(by_onnxruntime(mlp(), (4, 6), tmp_path, **options), tmp_path)
    assert [sim.encodings[site].dtype.name for site in ("relu:output", "relu:output_1")] == ["uint8", "uint16"]
    with pytest.raises(
        qsdk.ModelError, match=r"'r' is quantized twice, as relu:output and as relu:output_1.*config=None"
    ):
        quantize(tmp_path / "quantized.onnx", None, w8a8())


def test_a_model_of_pt2e_is_adopted_with_its_computed_scales_and_its_clipped_weight(tmp_path):
    for opset in (18, 21):
        model = pt2e(opset)
        sim = adopted(model, tmp_path)
        assert {site: str(e.dtype) for site, e in sim.encodings.items()} == {
            "x:input": "int8",
            "node_conv2d:weight": "int8",
            "node_relu:output": "uint8",
            "node_linear:weight": "int4",
        }
        stored = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
        codes = np.clip(np.rint(stored["fw"] / np.float32(0.05)), -8, 7)
        written = integers(onnx.load(tmp_path / "first.onnx"))
        assert written["node_linear:weight"][0] == ("int8", codes.T.tolist())
        assert written["node_conv2d:weight"][0] == ("int8", stored["wq"].tolist())
        assert written["node_conv2d:weight"][1] == ("float32", stored["ws"].tolist())


@pytest.mark.slow
@pytest.mark.parametrize("prequantized", [False, True])
def test_a_model_of_aimet_is_adopted(prequantized, tmp_path):
    model = aimet(prequantized)
    sim = adopted(model, tmp_path)
    assert set(sim.encodings) == {"x:input", "gemm:weight", "gemm:bias", "gemm:output"}
    assert sim.plan.decisions["gemm:bias"].bias_of == ("x:input", "gemm:weight")
    stored = {t.name: numpy_helper.to_array(t) for t in aimet(True).graph.initializer}
    written = integers(onnx.load(tmp_path / "first.onnx"))
    assert written["gemm:weight"][0] == ("int8", stored["w_q"].tolist())
    assert written["gemm:bias"][0] == ("int32", stored["b_q"].tolist())
    assert check_parity(sim, tmp_path / "first.onnx", [inputs_of(model)], progress=False).summary["passed"]
    assert check_parity(sim, model, [inputs_of(model)], progress=False).summary["passed"]
    report = to_integer(model, tmp_path / "integer.onnx")
    assert report.summary["float_tensors"] == 0


# --- forms ----------------------------------------------------------------------------------------------------------


def small(nodes, stored=None, opset=21, outputs=None):
    """A model of x [n, 4] with usual parameters."""
    usual = {"s": np.float32(0.1), "z": np.uint8(7), "s2": np.float32(0.25), "z2": np.int8(-4)}
    wide = {"w": RNG.integers(-127, 128, (4, 3)).astype(np.int8), "ws": np.float32([0.5, 0.25, 0.125])}
    names = {name for item in nodes for name in item.input}
    kept = {name: value for name, value in {**usual, **wide, **(stored or {})}.items() if name in names}
    return make_model(nodes, {"x": ["n", 4]}, outputs or {"y": ["n", 3]}, kept, opset, 10 if opset > 20 else 7)


WEIGHT = [node("DequantizeLinear", ["w", "ws"], ["wd"], "wdq", axis=1)]


def test_several_dequantize_behind_one_quantize_are_one_site(tmp_path):
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"], "q"),
        node("DequantizeLinear", ["q", "s", "z"], ["d1"], "d1"),
        node("DequantizeLinear", ["q", "s", "z"], ["d2"], "d2"),
        *WEIGHT,
        node("MatMul", ["d1", "wd"], ["m"], "mm"),
        node("ReduceSum", ["d2"], ["t"], "sum", keepdims=1),
        node("Add", ["m", "t"], ["y"], "add"),
    ]
    sim = adopted(small(nodes), tmp_path)
    assert set(sim.encodings) == {"x:input", "mm:weight"}


def test_a_dequantized_output_and_codes_that_leave_keep_their_names(tmp_path):
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["codes"], "q"),
        node("DequantizeLinear", ["codes", "s", "z"], ["d1"], "d1"),
        node("DequantizeLinear", ["codes", "s", "z"], ["y"], "d2"),
        node("Relu", ["d1"], ["r"], "relu"),
    ]
    model = small(nodes, outputs={"y": ["n", 4], "r": ["n", 4]})
    model.graph.output.append(helper.make_tensor_value_info("codes", TensorProto.UINT8, ["n", 4]))
    x = inputs_of(model)
    wanted = simulation_session(model).run(None, x)
    sim = quantize(model, None, None)
    export(sim, tmp_path / "model.onnx")
    written = onnx.load(tmp_path / "model.onnx")
    assert [value.name for value in written.graph.output] == ["y", "r", "codes"]
    for got, want in zip(simulation_session(written).run(None, x), wanted, strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_pair_behind_a_pair_keeps_its_own_encoding(tmp_path):
    nodes = [
        *plain_pair("a", "x", "xa", ["s", "z"]),
        *plain_pair("b", "xa", "xb", ["s2", "z2"]),
        *WEIGHT,
        node("MatMul", ["xb", "wd"], ["y"], "mm"),
    ]
    sim = adopted(small(nodes), tmp_path)
    assert [sim.encodings[site].dtype.name for site in ("x:input", "x:input_1")] == ["uint8", "int8"]


def test_a_weight_behind_views_and_a_negative_axis(tmp_path):
    nodes = [
        node("DequantizeLinear", ["w", "ws"], ["wd"], "wdq", axis=-1),
        node("Transpose", ["wd"], ["wt"], "turn", perm=[1, 0]),
        node("Reshape", ["wt", "shape"], ["wr"], "view"),
        *plain_pair("a", "x", "xa", ["s", "z"]),
        node("MatMul", ["xa", "wt"], ["y"], "mm"),
        node("MatMul", ["xa", "wr"], ["v"], "mm2"),
    ]
    stored = {"w": RNG.integers(-127, 128, (3, 4)).astype(np.int8), "ws": np.float32([1, 2, 3, 4]), "shape": [4, 3]}
    sim = adopted(small(nodes, stored, outputs={"y": ["n", 3], "v": ["n", 3]}), tmp_path)
    assert sim.encodings["mm:weight"].axis == 1


def test_attributes_that_a_file_leaves_out_are_those_of_the_standard(tmp_path):
    """Scales along axis 1, and a Transpose that reverses all axes."""
    stored = {
        "codes": RNG.integers(-127, 128, (6, 4)).astype(np.int8),
        "s": np.linspace(0.01, 0.04, 4).astype(np.float32),
    }
    stored |= {
        "turned": RNG.integers(-127, 128, (3, 4)).astype(np.int8),
        "t": np.linspace(0.01, 0.03, 3).astype(np.float32),
    }
    nodes = [
        node("DequantizeLinear", ["codes", "s"], ["w"], "w/dequantize"),
        node("MatMul", ["x", "w"], ["h"], "first"),
        node("DequantizeLinear", ["turned", "t"], ["v"], "v/dequantize", axis=0),
        node("Transpose", ["v"], ["u"], "turn"),
        node("MatMul", ["h", "u"], ["y"], "second"),
    ]
    sim = adopted(make_model(nodes, {"x": [3, 6]}, {"y": [3, 3]}, stored), tmp_path)
    weights = {site: encoding for site, encoding in sim.encodings.items() if site.endswith(":weight")}
    assert sorted((encoding.axis, encoding.scale.size) for encoding in weights.values()) == [(0, 3), (1, 4)]


def test_one_stored_tensor_under_two_scales_is_two_sites(tmp_path):
    nodes = [
        node("DequantizeLinear", ["w", "s"], ["w1"], "dq1"),
        node("DequantizeLinear", ["w", "s2"], ["w2"], "dq2"),
        node("DequantizeLinear", ["w", "s2"], ["w3"], "dq3"),
        *(node("MatMul", ["x", f"w{i}"], [f"y{i}"], f"mm{i}") for i in (1, 2, 3)),
    ]
    sim = adopted(small(nodes, outputs={f"y{i}": ["n", 3] for i in (1, 2, 3)}), tmp_path)
    assert {site: float(e.scale[0]) for site, e in sim.encodings.items()} == {
        "mm1:weight": np.float32(0.1),
        "mm2:weight": 0.25,
    }


def test_parameters_in_constant_nodes_at_opset_10(tmp_path):
    def constant(name, value):
        return node("Constant", [], [name], name, value=numpy_helper.from_array(np.asarray(value)))

    nodes = [
        constant("s", np.float32(0.1)),
        constant("z", np.uint8(7)),
        *plain_pair("a", "x", "xa", ["s", "z"]),
        node("DequantizeLinear", ["w", "s2"], ["wd"], "wdq"),
        node("MatMul", ["xa", "wd"], ["y"], "mm"),
    ]
    model = small(nodes, opset=10)
    kept = [tensor for tensor in model.graph.initializer if tensor.name not in ("s", "z")]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    sim = adopted(model, tmp_path)
    assert sim.encodings["x:input"].zero_point.tolist() == [7]


def test_an_int32_bias_keeps_its_own_scale_and_its_codes(tmp_path):
    codes = np.array([123_456_789, -(2**31), 2**24 + 1], np.int32)
    nodes = [
        *plain_pair("a", "x", "xa", ["s", "z"]),
        *WEIGHT,
        node("DequantizeLinear", ["b", "bs"], ["bd"], "bdq", axis=0),
        node("Gemm", ["xa", "wd", "bd"], ["y"], "gemm"),
    ]
    sim = adopted(small(nodes, {"b": codes, "bs": np.float32([0.001, 1e-9, 0.3])}), tmp_path)
    decision = sim.plan.decisions["gemm:bias"]
    assert (decision.kind, decision.bias_of, str(decision.spec)) == ("bias", None, str(decision.spec))
    assert sim.encodings["gemm:bias"].scale.tolist() == np.float32([0.001, 1e-9, 0.3]).tolist()
    (dtype, written), *_ = integers(onnx.load(tmp_path / "first.onnx"))["gemm:bias"]
    # beyond 2^24 two codes are one float32, so that the file computes the same with either
    assert (dtype, np.float32(written).tolist()) == ("int32", np.float32(codes).tolist())


def test_codes_that_no_float32_stands_for_stay_in_the_file_and_are_listed(tmp_path):
    scale = np.float32(0.7)
    whole = np.arange(2**23, 2**23 + 4096, dtype=np.int32)
    stored = {"b": whole, "bs": scale}
    model = make_model(
        [node("DequantizeLinear", ["b", "bs"], ["bd"], "bdq"), node("Add", ["x", "bd"], ["y"], "add")],
        {"x": [1, 4096]},
        {"y": [1, 4096]},
        stored,
    )
    sim = quantize(model, None, None)
    x = {"x": np.zeros((1, 4096), np.float32)}
    export(sim, tmp_path / "model.onnx")
    back = quantize(tmp_path / "model.onnx", None, None)
    np.testing.assert_array_equal(back.run(x)[0], simulation_session(model).run(None, x)[0])
    kept = [n for n in onnx.load(tmp_path / "model.onnx").graph.node if "qsdk.kept" in metadata(n)]
    assert len(kept) == (0 if sim.encodings else 1)


def test_a_tensor_that_arrives_as_codes_stays_as_it_is(tmp_path):
    nodes = [
        node("DequantizeLinear", ["q", "s", "z"], ["xd"], "arrives"),
        *WEIGHT,
        node("MatMul", ["xd", "wd"], ["y"], "mm"),
    ]
    model = small(nodes)
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("q", TensorProto.UINT8, ["n", 4]))
    x = {"q": RNG.integers(0, 256, (3, 4)).astype(np.uint8)}
    sim = quantize(model, None, None)
    assert set(sim.encodings) == {"mm:weight"}
    export(sim, tmp_path / "model.onnx")
    written = simulation_session(onnx.load(tmp_path / "model.onnx"))
    np.testing.assert_array_equal(written.run(None, x)[0], simulation_session(model).run(None, x)[0])


# --- what is refused ------------------------------------------------------------------------------------------------


def test_integer_kernels_are_refused_by_name(tmp_path):
    by_onnxruntime(mlp(), (4, 6), tmp_path, quant_format=QuantFormat.QOperator, **of_tool(U8, S8))
    for config in (None, w8a8()):
        with pytest.raises(FileFormatError, match=r"is QLinearMatMul: .* write it in the QDQ format .*QuantFormat.QDQ"):
            quantize(tmp_path / "quantized.onnx", None, config)
    kernel = node("ConvInteger", ["x", "w"], ["y"], "conv_quant")
    model = make_model([kernel], {"x": [1, 3, 8, 8]}, {"y": [1, 2, 6, 6]}, {"w": np.ones((2, 3, 3, 3), np.uint8)})
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.UINT8
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.INT32
    with pytest.raises(FileFormatError, match="'conv_quant' is ConvInteger: the file holds integer kernels"):
        quantize(model, None, None)


REFUSED = {
    "its grid has no name": (
        [
            node("QuantizeLinear", ["x", "s", "z"], ["q"], "q"),
            node("Clip", ["q", "low", "high"], ["c"], "clip"),
            node("DequantizeLinear", ["c", "s", "z"], ["y"], "dq"),
        ],
        {"low": np.uint8(3), "high": np.uint8(9)},
        "'clip' clips codes to a grid that no dtype has; .* full grid",
    ),
    "a zero point of a bias": (
        [node("DequantizeLinear", ["b", "s", "bz"], ["bd"], "dq"), node("Add", ["x", "bd"], ["y"], "add")],
        {"b": np.arange(4, dtype=np.int32), "bz": np.int32(1)},
        "'dq' has an int32 tensor with a zero point other than 0, .* write 0",
    ),
    "overflow to NaN": (
        plain_pair("a", "x", "y", ["s", "f"]),
        {"f": np.zeros((), np.float32)},
        "'a_q' turns what is too large into NaN .*saturate=1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_encoding_describes_is_refused_by_name(name):
    nodes, stored, message = REFUSED[name]
    model = small(nodes, stored, outputs={"y": ["n", 4]})
    if name == "overflow to NaN":
        eights = helper.make_tensor("f", TensorProto.FLOAT8E4M3FN, [], [0.0])
        model.graph.initializer[[t.name for t in model.graph.initializer].index("f")].CopyFrom(eights)
        model.graph.node[0].attribute.append(helper.make_attribute("saturate", 0))
    with pytest.raises(FileFormatError, match=message):
        quantize(model, None, None)


@pytest.mark.parametrize("contrib", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_a_tool_made_of_a_narrow_model_computes_the_same(dtype, contrib, tmp_path):
    # the tool itself runs float16 models, and no bfloat16 ones
    given = in_type(mlp(), "float16" if dtype == "float16" else "float32")
    model = by_onnxruntime(given, (4, 6), tmp_path, extra_options={"UseQDQContribOps": contrib})
    assert any(node.domain == "com.microsoft" for node in model.graph.node) == contrib
    model = in_type(model, dtype)
    sim = quantize(model, None, None)
    # no bfloat16 stands for the codes of an int32 bias: it is float32 in front of its Cast
    types = {decision.tensor_type for site, decision in sim.plan.decisions.items() if "bias" not in site}
    assert types == {dtype}
    x = np.random.default_rng(5).normal(size=(4, 6)).astype(np.float32)
    got = sim.run(x)[0]
    # the runtime's own domain has no bfloat16, and what it dequantizes to float16 reaches the next op unrounded
    for item in model.graph.node:
        item.domain = ""
    stamp(model, 21)
    session = simulation_session(model)
    np.testing.assert_array_equal(got, run_session(session, as_feeds(x, session.get_inputs(), "x"), "x")[0])
    sites = quantize(by_onnxruntime(mlp(), (4, 6), tmp_path), None, None).encodings.keys()
    assert sim.encodings.keys() == sites
    export(sim, tmp_path / "ours.onnx")
    assert check_parity(sim, tmp_path / "ours.onnx", [x], progress=False).summary["passed"]
    np.testing.assert_array_equal(quantize(tmp_path / "ours.onnx", None, None).run(x)[0], got)


def test_a_computed_scale_that_depends_on_data_is_refused():
    nodes = [
        node("ReduceMax", ["x"], ["m"], "max", keepdims=0),
        node("QuantizeLinear", ["x", "m", "z"], ["q"], "q"),
        node("DequantizeLinear", ["q", "m", "z"], ["y"], "dq"),
    ]
    with pytest.raises(FileFormatError, match="dq computes its parameter 'm'"):
        quantize(small(nodes, outputs={"y": ["n", 4]}), None, None)


# --- with a config --------------------------------------------------------------------------------------------------


def partly_quantized():
    """A net whose first layer another tool quantized, asymmetric weights included."""
    nodes = [
        *plain_pair("a", "x", "xa", ["s", "z"]),
        node("DequantizeLinear", ["w", "ws", "wz"], ["wd"], "wdq", axis=1),
        node("MatMul", ["xa", "wd"], ["m"], "first"),
        node("Add", ["m", "b"], ["h"], "bias"),
        node("Relu", ["h"], ["r"], "relu"),
        node("MatMul", ["r", "v"], ["y"], "second"),
    ]
    stored = {
        "w": RNG.integers(0, 256, (4, 3)).astype(np.uint8),
        "wz": np.array([3, 100, 250], np.uint8),
        "ws": np.float32([0.01, 0.02, 0.03]),
        "b": np.float32([0.1, -0.2, 0.3]),
        "v": RNG.normal(size=(3, 3)).astype(np.float32),
    }
    return small(nodes, stored)


def test_with_a_config_the_file_wins_and_the_rest_is_quantized_as_wanted(tmp_path):
    model = partly_quantized()
    before = model.SerializeToString()
    plain = quantize(model, None, None)
    sim = quantize(model, None, w8a8())
    assert model.SerializeToString() == before
    ready = {site for site, found in sim.ready().items() if found}
    assert {"x:input", "first:weight"} <= ready
    rows = {row["site"]: row for row in sim.coverage().rows}
    assert (rows["first:weight"]["dtype"], rows["first:weight"]["reason"]) == ("uint8", "as the file says [the file]")
    assert rows["second:weight"]["dtype"] == "int8"
    assert "2 sites are as the file has them, frozen" in sim.coverage().summary["opened"]
    with pytest.raises(Exception, match=r"have no encoding: .*relu:output"):
        sim.run(inputs_of(model))
    calibrate(sim, [inputs_of(model)], progress=False)
    for site in ("x:input", "first:weight"):
        assert sim.encodings[site] == plain.encodings[site]
        assert sim.encodings[site].frozen
    # the bias was float in the file: the config has it derived from what the file says of input and weight
    product = plain.encodings["x:input"].scale * plain.encodings["first:weight"].scale
    np.testing.assert_array_equal(sim.encodings["bias:bias"].scale, product)
    export(sim, tmp_path / "model.onnx")
    stored = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    assert integers(onnx.load(tmp_path / "model.onnx"))["first:weight"][0] == ("uint8", stored["w"].tolist())
    assert check_parity(sim, tmp_path / "model.onnx", [inputs_of(model)], progress=False).summary["passed"]
    assert not validate(tmp_path / "model.onnx").rows


def test_with_a_config_ties_follow_the_file_where_it_says_one_thing_and_break_where_it_says_two(tmp_path):
    def net(second):
        nodes = [
            *plain_pair("a", "x", "xa", ["s", "z"]),
            node("Transpose", ["xa"], ["t"], "turn"),
            *plain_pair("b", "t", "tb", [f"s{second}", f"z{second}"]),
            node("Sigmoid", ["tb"], ["y"], "sigmoid"),
        ]
        return small(nodes, outputs={"y": [4, "n"]})

    same, other = (quantize(net(second), None, w8a8()).plan.decisions for second in ("", "2"))
    assert same["turn:output"].tied_to == "x:input"
    assert (other["turn:output"].tied_to, other["turn:output"].spec.dtype) == (None, dtype_named("int8"))
    assert other["x:input"].spec.dtype == dtype_named("uint8")


def test_with_a_config_16_bits_of_the_file_leave_no_int32_bias():
    nodes = [
        *plain_pair("a", "x", "xa", ["s", "z16"]),
        *WEIGHT,
        node("Gemm", ["xa", "wd", "b"], ["y"], "gemm"),
    ]
    sim = quantize(small(nodes, {"z16": np.uint16(9), "b": np.float32([1, 2, 3])}), None, w8a8())
    decision = sim.plan.decisions["gemm:bias"]
    assert (decision.spec, "8 bits or fewer" in decision.reason) == (None, True)


def test_with_a_config_a_rule_that_matches_nothing_is_an_error_and_set_precision_says_why():
    with pytest.raises(ConfigError, match="matches no owner"):
        quantize(partly_quantized(), None, w8a8().skip("nothing"))
    with pytest.raises(ConfigError, match="opened from a Q/DQ file"):
        quantize(partly_quantized(), None, w8a8()).set_precision("second", weight="int4")
