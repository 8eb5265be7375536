"""Zero points that are zero, where the runtime needs them to compute a Gemm on codes exactly; and nowhere else."""

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from qdq_models import classifier, convnet, make_model, mlp, optimized, prepared, run, weights
from runtime_probes import LEVELS, opened

import qsdk
from onnx_backend.lower import insert
from onnx_backend.qdq.read import qdq_pairs, read
from onnx_backend.qdq.zero_points import write_zero_points
from onnx_backend.runtime.session import simulation_session
from qsdk import w4a8, w8a8, w8a16, weight_only

node = helper.make_node
UNSIGNED = w8a8().override(op_type="Linear", weight="uint8", symmetric_weights=True)


def layer(
    op="Gemm", *, behind=None, given="uint8", made="uint8", weight="uint8", scale=np.float32, axes=("n",), **options
):
    """One layer of matrices between two pairs without zero points; codes of 6 bits, which no processor overflows."""
    kind = {name: int(helper.np_dtype_to_tensor_dtype(np.dtype(name))) for name in (given, made)}
    codes = np.random.default_rng(0).integers(-31, 32, (16, 8)) + (32 if weight == "uint8" else 0)
    scales = {"xs": scale(0.02), "ws": np.full(8, 0.01, scale), "ys": scale(0.03), "bs": np.full(8, 2e-4, scale)}
    stored = {"wq": codes.astype(weight), "bq": np.arange(8, dtype=np.int32) * 100, **scales}
    nodes = [
        node("QuantizeLinear", ["x", "xs"], ["xq"], output_dtype=kind[given]),
        node("DequantizeLinear", ["xq", "xs"], ["xd"]),
        node("DequantizeLinear", ["wq", "ws"], ["wd"], axis=1),
        node("DequantizeLinear", ["bq", "bs"], ["bd"], axis=0),
    ]
    if op == "Gemm":
        nodes.append(node("Gemm", ["xd", "wd", "bd"], ["h"], **options))
    else:
        nodes += [node("MatMul", ["xd", "wd"], ["m"]), node("Add", ["m", "bd"], ["h"])]
    if behind:
        nodes.append(node(behind, ["h"], ["r"]))
    last = "r" if behind else "h"
    nodes.append(node("QuantizeLinear", [last, "ys"], ["yq"], output_dtype=kind[made]))
    nodes.append(node("DequantizeLinear", ["yq", "ys"], ["y"]))
    element = int(helper.np_dtype_to_tensor_dtype(np.dtype(scale)))
    edges = [helper.make_tensor_value_info(n, element, [*axes, w]) for n, w in (("x", 16), ("y", 8))]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items()]
    graph = helper.make_graph(nodes, "layer", edges[:1], edges[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("behind", [None, "Relu", "Sigmoid"])
@pytest.mark.parametrize(("op", "axes"), [("Gemm", ["n"]), ("MatMul", ["n"]), ("MatMul", [1, 5])], ids=str)
def test_the_runtime_computes_on_codes_with_them_and_in_float_without(op, axes, behind, tmp_path):
    plain, written = layer(op, behind=behind, axes=axes), layer(op, behind=behind, axes=axes)
    assert write_zero_points(written)
    assert "QGemm" not in optimized(plain, tmp_path)
    found = optimized(written, tmp_path)
    assert "QGemm" in found
    assert not {"Gemm", "FusedGemm", *(["Relu"] if len(axes) == 1 else [])} & set(found)
    x = np.random.default_rng(1).normal(size=(*axes[:-1], 5, 16)).astype(np.float32)
    wanted = opened(plain, LEVELS.ORT_DISABLE_ALL).run(None, {"x": x})[0]
    np.testing.assert_array_equal(opened(written, LEVELS.ORT_DISABLE_ALL).run(None, {"x": x})[0], wanted)
    got = opened(written, LEVELS.ORT_ENABLE_ALL).run(None, {"x": x})[0]
    assert np.abs(got - wanted).max() <= 0.031


@pytest.mark.parametrize("missing", ["xs", "ws"])
def test_both_are_needed(missing, tmp_path):
    model = layer(behind="Relu")
    write_zero_points(model)
    for item in model.graph.node:
        if item.op_type in ("QuantizeLinear", "DequantizeLinear") and item.input[1] == missing:
            del item.input[2]
    assert "QGemm" not in optimized(model, tmp_path)


def test_a_product_that_the_model_gives_back_is_no_gemm(tmp_path):
    model = layer("MatMul")
    model.graph.output.append(helper.make_tensor_value_info("m", onnx.TensorProto.FLOAT, ["n", 8]))
    assert write_zero_points(model) == []


@pytest.mark.parametrize(
    "options",
    [{"made": "uint16"}, {"given": "uint16"}, {"scale": np.float16}],
    ids=str,
)
def test_where_the_runtime_has_no_kernel_none_is_written(options, tmp_path):
    model = layer(**options)
    assert write_zero_points(model) == []
    assert model == layer(**options)
    if "scale" not in options:
        explicit = layer(**options)
        for item in explicit.graph.node:
            if item.op_type in ("QuantizeLinear", "DequantizeLinear") and item.input[0] != "bq":
                kind = {"x": "given", "y": "made"}.get(item.input[1][0], "weight")
                dtype = np.dtype(options.get(kind, "uint8"))
                name = f"{item.input[0]}_zero"
                zeros = np.zeros(8 if kind == "weight" else (), dtype)
                explicit.graph.initializer.append(numpy_helper.from_array(zeros, name))
                item.input.append(name)
        assert "QGemm" not in optimized(explicit, tmp_path)  # they would not help


@pytest.mark.parametrize("op", ["Gemm", "MatMul"])
def test_int8_weights_have_them_too(op, tmp_path):
    plain, model = layer(op, weight="int8"), layer(op, weight="int8")
    write_zero_points(model)
    assert ("QGemm" in optimized(plain, tmp_path), "QGemm" in optimized(model, tmp_path)) == (False, True)
    x = np.random.default_rng(1).normal(size=(5, 16)).astype(np.float32)
    wanted = opened(model, LEVELS.ORT_DISABLE_ALL).run(None, {"x": x})[0]
    assert np.abs(opened(model, LEVELS.ORT_ENABLE_ALL).run(None, {"x": x})[0] - wanted).max() <= 0.031


@pytest.mark.parametrize("config", [UNSIGNED, w8a8()], ids=["uint8", "int8"])
@pytest.mark.parametrize("net", [mlp, classifier, convnet])
def test_exported_linears_run_on_codes(net, config, tmp_path):
    marked, _, plan, encodings = prepared(net(), config)
    model, rows = insert(marked, plan, encodings)
    assert read(model) == encodings
    layers = {"mlp": 2}.get(net.__name__, 1)
    assert optimized(model, tmp_path).count("QGemm") == layers
    linear = {place.site for place in qdq_pairs(model) if place.encoding.dtype.name == "uint8"}
    kept = {row["site"]: row["zero_point_bytes_saved"] for row in rows}
    assert {place.site for place in qdq_pairs(model) if len(place.dequantize.input) == 3} >= {
        site for site in linear if site.endswith(":weight")
    }
    for place in qdq_pairs(model):
        assert not (len(place.dequantize.input) == 3 and kept.get(place.site))
    x = np.random.default_rng(0).normal(size=(2, *([3, 8, 8] if net is not mlp else [6]))).astype(np.float32)
    expected = simulation_session(model).run(None, {"x": x})
    for found, wanted in zip(run(model, {"x": x}, LEVELS.ORT_DISABLE_ALL), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_they_compute_what_int8_weights_compute():
    marked, _, plan, encodings = prepared(mlp(), UNSIGNED)
    unsigned, _ = insert(marked, plan, encodings)
    marked, _, plan, encodings = prepared(mlp(), w8a8())
    signed, _ = insert(marked, plan, encodings)
    x = np.random.default_rng(0).normal(size=(2, 6)).astype(np.float32)
    wanted = simulation_session(signed).run(None, {"x": x})
    for found, same in zip(simulation_session(unsigned).run(None, {"x": x}), wanted, strict=True):
        np.testing.assert_array_equal(found, same)


@pytest.mark.parametrize("dialect", ["onnx", "openvino"])
def test_other_dialects_have_none(dialect):
    marked, _, plan, encodings = prepared(mlp(), UNSIGNED)
    model, _ = insert(marked, plan, encodings, dialect=dialect)
    assert not [p for p in qdq_pairs(model) if len(p.dequantize.input) == 3 and not np.any(p.encoding.zero_point)]


@pytest.mark.parametrize("config", [w4a8(), w8a16(), weight_only("int8")], ids=str)
def test_other_widths_have_none(config):
    marked, _, plan, encodings = prepared(mlp(), config)
    model, _ = insert(marked, plan, encodings)
    assert all(len(p.dequantize.input) == 2 for p in qdq_pairs(model) if p.site.endswith(":weight"))


@pytest.mark.parametrize("edge", [0, 255])
def test_the_largest_sums_are_exact_on_every_processor(edge):
    """All codes of the input 255, and all weights at one end of the grid: as int8 these overflow without VNNI."""
    model = layer()
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.full((16, 8), edge, np.uint8), "wq"))
    model.graph.initializer[4].CopyFrom(numpy_helper.from_array(np.float32(1.6), "ys"))
    write_zero_points(model)
    x = np.full((3, 16), 255 * 0.02, np.float32)
    wanted = opened(model, LEVELS.ORT_DISABLE_ALL).run(None, {"x": x})[0]
    np.testing.assert_array_equal(opened(model, LEVELS.ORT_ENABLE_ALL).run(None, {"x": x})[0], wanted)


@pytest.mark.parametrize("op", ["Gemm", "MatMul"])
@pytest.mark.parametrize("factor", [1, 2])
def test_a_bias_in_another_scale_is_not_taken_for_one_in_that_of_the_layer(op, factor, tmp_path):
    """The runtime's QGemm does not look at the scale of the bias."""
    model = layer(op)
    model.graph.initializer[5].CopyFrom(numpy_helper.from_array(np.full(8, factor * 2e-4, np.float32), "bs"))
    qsdk.export(qsdk.quantize(model), tmp_path / "model.onnx")
    written = onnx.load(tmp_path / "model.onnx")
    x = np.random.default_rng(1).normal(size=(5, 16)).astype(np.float32)
    wanted = opened(written, LEVELS.ORT_DISABLE_ALL).run(None, {"x": x})[0]
    np.testing.assert_array_equal(opened(written, LEVELS.ORT_ENABLE_ALL).run(None, {"x": x})[0], wanted)
    assert ("QGemm" in optimized(written, tmp_path)) == (factor == 1)


@pytest.mark.parametrize("width", [16, 5000])
def test_a_layer_of_any_width_is_read_back_and_passes_parity(width, tmp_path):
    """Zero points of more than 4096 channels count as large tensors where files are read."""
    nodes = [node("Gemm", ["x", "w", "b"], ["y"], "head", transB=1)]
    float_model = make_model(nodes, {"x": ["n", 8]}, {"y": ["n", width]}, weights(w=(width, 8), b=(width,)))
    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    sim = qsdk.quantize(float_model, None, UNSIGNED)
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    parity = qsdk.check_parity(sim, tmp_path / "model.onnx", [x], progress=False)
    assert (parity.summary["passed"], parity.summary["weights_max_lsb"]) == (True, 0)
    again = qsdk.quantize(tmp_path / "model.onnx")
    assert again.encodings == sim.encodings
    qsdk.export(again, tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "model.onnx").read_bytes()


def test_a_max_pool_runs_on_codes_in_the_layout_of_its_convolutions(tmp_path):
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        *(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Conv2d(8, 8, 3), torch.nn.ReLU())
    )
    x = torch.randn(2, 3, 16, 16)
    sim = qsdk.quantize(net.eval(), x)
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    found = optimized(model, tmp_path)
    assert ("NhwcMaxPool" in found, "MaxPool" in found) == (True, False)
    for item in model.graph.node:
        if item.name.startswith(("1:output/", "2:output/")):
            del item.input[2:]
    assert "NhwcMaxPool" not in optimized(model, tmp_path)


@pytest.mark.slow
def test_what_moves_values_behind_a_relu_moves_codes(tmp_path):
    """The zero point of what is never negative is 0: without it each move is made in floats, between two pairs."""
    torch.manual_seed(0)
    moves = (torch.nn.PixelShuffle(2), torch.nn.Upsample(scale_factor=2.0), torch.nn.ChannelShuffle(2))
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), *moves, torch.nn.Conv2d(4, 8, 3))
    x = torch.randn(2, 3, 8, 8)
    sim = qsdk.quantize(net.eval(), x)
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    assert optimized(model, tmp_path).count("QuantizeLinear") == 1
    for item in model.graph.node:
        if item.name.startswith(("2:output/", "3:output/", "4/")):
            del item.input[2:]
    assert optimized(model, tmp_path).count("QuantizeLinear") > 2
