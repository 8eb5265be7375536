"""Sessions as an application opens them against the simulation of the same file."""

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from qdq_models import convnet, make_model, mlp, prepared

import qsdk
from onnx_backend.data_passes.session_parity import check_session
from onnx_backend.lower import insert
from qsdk import DataError, ModelError, w4a8, w4a16, w8a8, w8a16

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(4, 3, 8, 8)).astype(np.float32)
VECTORS = RNG.normal(size=(16, 6)).astype(np.float32)
node = helper.make_node
CONFIGS = {
    "w8a8": w8a8(),
    "w4a8": w4a8(),
    "w8a16": w8a16(),
    "w4a16 in blocks": w4a16(block_size=2),
    "int8": w8a8().override("*", activation="int8"),
    "int4": w8a8().override("*", activation="int4"),
    "int6": w8a8().override("*", activation="int6"),
    "float8": w8a8().override("*", activation="float8e4m3fn", weight="float8e4m3fn"),
    "float16 inside": w8a8().skip("gemm", dtype="float16"),
}


def lowered(name: str, dialect: str = "onnxruntime") -> onnx.ModelProto:
    marked, _, plan, encodings = prepared(convnet(), CONFIGS[name])
    return insert(marked, plan, encodings, dialect=dialect)[0]


@pytest.mark.slow
@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("name", CONFIGS)
def test_the_default_session_gives_what_is_simulated(name: str):
    model = lowered(name)
    report = check_session(model, [IMAGES], progress=False)
    assert report.summary["passed"], str(report)
    casts = {node.output[0] for node in model.graph.node if node.op_type == "Cast"}
    pairs = [n for n in model.graph.node if n.op_type == "QuantizeLinear" and n.input[0] not in casts]
    copies = sum(any(entry.key == "qsdk.copy_of" for entry in n.metadata_props) for n in pairs)
    sites = [row for row in report.rows if "max_lsb" in row]
    assert len(sites) == len(pairs) - copies
    assert all(row["elements"] > 0 for row in sites)


def test_each_site_gets_the_simulations_own_input():
    """A kernel that is off by much at one site is so there alone: what follows it is fed what it should have been."""
    relu = [
        node("QuantizeLinear", ["x", "s", "z8"], ["q0"], "first_q"),
        node("DequantizeLinear", ["q0", "s", "z8"], ["d0"], "first_dq"),
        node("Relu", ["d0"], ["r"], "relu"),
        node("QuantizeLinear", ["r", "t", "z"], ["q"], "the_q"),
        node("DequantizeLinear", ["q", "t", "z"], ["d"], "the_dq"),
        node("Mul", ["d", "d"], ["m"], "mul"),
        node("QuantizeLinear", ["m", "s", "z8"], ["q1"], "last_q"),
        node("DequantizeLinear", ["q1", "s", "z8"], ["y"], "last_dq"),
    ]
    stored = {"s": np.float32(0.05), "z8": np.uint8(100), "t": np.float32(0.4)}
    model = make_model(relu, {"x": ["n", 6]}, {"y": ["n", 6]}, stored)
    model.graph.initializer.append(helper.make_tensor("z", TensorProto.INT4, [], [0]))
    report = check_session(model, [VECTORS], progress=False)
    lsb = {row["site"]: row["max_lsb"] for row in report.rows}
    assert lsb == {"x:input": 0, "relu:output": 6, "mul:output": 0}  # the runtime drops the Relu
    assert report.summary["sqnr_db"] < 10
    assert not report.summary["passed"]
    assert report.summary["reason"].startswith("a site is 6 steps off")
    exact = check_session(model, [VECTORS], level="basic", progress=False)
    assert exact.summary["activations_max_lsb"] == 0
    assert exact.summary["sqnr_db"] == np.inf


def test_a_weight_only_model_is_judged_by_its_outputs():
    sim = qsdk.quantize(mlp(), None, w4a16().override("*", activation="float32"))
    qsdk.calibrate(sim, [VECTORS], progress=False)
    model = sim.qdq_model()
    at_default = check_session(model, [VECTORS], least_sqnr_db=80, float_model=mlp(), progress=False)
    (row,) = at_default.rows
    assert (row["site"], row["kind"]) == ("y:output", "output")
    assert row["sqnr_db"] == at_default.summary["sqnr_db"]
    assert not at_default.summary["passed"]
    assert at_default.summary["float_sqnr_db"] < at_default.summary["sqnr_db"] < 80
    exact = {"session.qdq_matmulnbits_accuracy_level": "0"}
    assert check_session(model, [VECTORS], entries=exact, least_sqnr_db=80, progress=False).summary["passed"]


def test_what_the_runtime_cannot_load_is_an_error_with_the_remedy():
    model = lowered("int4", "onnx")
    with pytest.raises(ModelError, match=r"cannot load the model at level 'all': .*dialect='onnxruntime', or open"):
        check_session(model, [IMAGES], progress=False)
    assert check_session(model, [IMAGES], level="none", progress=False).summary["passed"]


@pytest.mark.slow
def test_bad_data_is_refused():
    model = lowered("w8a8")
    with pytest.raises(DataError, match="the data holds no batch"):
        check_session(model, [], progress=False)
    with pytest.raises(DataError, match=r"batch 0: the input .x. takes float32"):
        check_session(model, [VECTORS], progress=False)
    with pytest.raises(DataError, match=r"batch 1: the model does not take y; its inputs are x"):
        check_session(model, [IMAGES, {"x": IMAGES, "y": IMAGES}], progress=False)


@pytest.mark.usefixtures("exact_products")
def test_a_dynamic_range_is_not_cut():
    sim = qsdk.quantize(mlp(), None, w8a8().override("mm1", dynamic_activations=True))
    qsdk.calibrate(sim, [VECTORS], progress=False)
    report = check_session(sim.qdq_model(), [VECTORS], progress=False)
    assert report.summary["passed"], str(report)


@pytest.mark.usefixtures("exact_products")
def test_where_nothing_is_compared_nothing_passes():
    sim = qsdk.quantize(mlp(), None, w8a8().override("*", activation="float32"))
    qsdk.calibrate(sim, [VECTORS], progress=False)
    report = check_session(sim.qdq_model(), [VECTORS], progress=False)
    assert not report.summary["passed"]
    assert "nothing was compared" in report.summary["reason"]
    assert check_session(sim.qdq_model(), [VECTORS], least_sqnr_db=20, progress=False).summary["passed"]
    with pytest.raises(DataError, match="batch 0: the input 'x' holds NaN"):
        check_session(lowered("w8a8"), [np.full_like(IMAGES, np.nan)], progress=False)
    with pytest.raises(DataError, match="batch 0 holds no values"):
        check_session(lowered("w8a8"), [IMAGES[:0]], progress=False)


def test_a_model_that_also_names_its_classes_has_parity(tmp_path):
    stored = {"w": np.eye(4, dtype=np.float32), "none": np.zeros(1, np.float32)}
    names = [helper.make_tensor(name, TensorProto.STRING, [1], [name.encode()]) for name in ("cat", "dog")]
    nodes = [node("MatMul", ["x", "w"], ["y"]), node("Greater", ["y", "none"], ["more"])]
    nodes.append(node("Where", ["more", "cat", "dog"], ["label"]))
    model = make_model(nodes, {"x": ["n", 4]}, {"y": ["n", 4]}, stored)
    model.graph.initializer.extend(names)
    model.graph.output.append(helper.make_tensor_value_info("label", TensorProto.STRING, ["n", 4]))
    sim, data = qsdk.quantize(model, None), [VECTORS[:, :4]]
    qsdk.calibrate(sim, data, progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    assert qsdk.check_parity(sim, tmp_path / "model.onnx", data, progress=False).summary["passed"]


def test_an_output_that_is_nan_never_passes():
    sim = qsdk.quantize(mlp(), None, w8a8().override("*", activation="float32"))
    qsdk.calibrate(sim, [VECTORS], progress=False)
    spoiled = mlp()
    spoiled.graph.initializer[-1].raw_data = np.full(3, np.nan, np.float32).tobytes()
    against = check_session(
        sim.qdq_model(), [VECTORS], least_float_sqnr_db=-1000, float_model=spoiled, progress=False
    ).summary
    assert np.isnan(against["float_sqnr_db"])
    assert not against["passed"]


def two_heads(other: str) -> ModelProto:
    """Scores between -0.5 and 0.5 beside a large output, or beside integers."""
    rng, value = np.random.default_rng(0), helper.make_tensor_value_info
    stored = {"wb": rng.normal(size=(16, 16)) * 30, "ws": rng.normal(size=(16, 16)) * 0.05, "half": 0.5}
    tensors = [numpy_helper.from_array(np.float32(v), name) for name, v in stored.items()]
    tensors.append(numpy_helper.from_array(np.int64(1), "one"))
    nodes = [node("MatMul", ["x", "wb"], ["boxes"], "box"), node("MatMul", ["x", "ws"], ["l"], "score")]
    nodes += [node("Sigmoid", ["l"], ["p"], "p"), node("Sub", ["p", "half"], ["scores"], "shift")]
    nodes.append(node("Add", ["ids", "one"], ["next"], "next"))
    kinds = {"boxes": TensorProto.FLOAT, "scores": TensorProto.FLOAT, "next": TensorProto.INT64}
    edges = [value("x", TensorProto.FLOAT, [8, 16]), value("ids", TensorProto.INT64, [8, 16])]
    outputs = [value(name, kinds[name], [8, 16]) for name in (other, "scores")]
    graph = helper.make_graph(nodes, "g", edges, outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("other", ["boxes", "next"])
def test_the_worst_float_output_decides_and_integers_have_no_power(other):
    rng, model = np.random.default_rng(1), two_heads(other)
    x = {"x": rng.normal(size=(8, 16)).astype(np.float32), "ids": rng.integers(0, 30000, (8, 16))}
    sim = qsdk.quantize(model, None, w8a16().override("score", weight="int2"))
    qsdk.calibrate(sim, [x], progress=False)
    found = check_session(sim.qdq_model(), [x], float_model=model, least_float_sqnr_db=15, progress=False)
    rows = {row["site"]: row["float_sqnr_db"] for row in found.rows if "float_sqnr_db" in row}
    assert list(rows) == [*(["box:output"] if other == "boxes" else []), "shift:output"]
    assert found.summary["float_sqnr_db"] == rows["shift:output"] < 15 < rows.get("box:output", 16)
    assert "the output 'scores' reaches" in found.summary["reason"]
    assert check_session(sim.qdq_model(), [x], float_model=model, least_float_sqnr_db=3, progress=False).summary[
        "passed"
    ]
    report = qsdk.check_parity(sim, sim.qdq_model(), [x], progress=False)
    assert [row["site"] for row in report.rows if "sqnr_db" in row] == list(rows)
    compared = qsdk.compare(model, sim, [x], progress=False)
    assert compared.summary["sqnr_db"] == pytest.approx(rows["shift:output"], abs=1)
