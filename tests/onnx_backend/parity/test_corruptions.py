"""A file that computes something else than its simulation never passes `check_parity`, and the report says where."""

import corrupted_models
import numpy as np
import pytest
import torch
from onnx import helper, numpy_helper
from qdq_models import make_model, mlp, weights
from torch import nn

import qsdk
from onnx_backend.parity.float_outputs import verdict
from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import initializers
from onnx_backend.proto.nodes import replace_nodes
from qsdk import DataError

RNG = np.random.default_rng(5)
VECTORS = RNG.normal(size=(16, 6)).astype(np.float32)
EIGHT_BIT_WEIGHTS = qsdk.w8a8().override("*", activation="float32")


def simulated(config):
    sim = qsdk.quantize(mlp(), None, config)
    qsdk.calibrate(sim, [VECTORS], progress=False)
    return sim, sim.qdq_model()


def checked(sim, model, data=(VECTORS,)):
    return qsdk.check_parity(sim, model, data, progress=False)


def wrong_rows(report):
    return {row["site"]: row for row in report.rows if row["max_lsb"] > (0 if row["kind"] in ("weight", "bias") else 1)}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in corrupted_models.CONFIGS if name.startswith("convnet")])
def test_no_corrupted_file_passes(name, tmp_path):
    case = corrupted_models.exported(name, str(tmp_path / "model.onnx"))
    assert qsdk.check_parity(case.sim, case.model, case.data, progress=False).summary["passed"]
    tried = zip(corrupted_models.corruptions(case.model, np.random.default_rng(7)), range(10), strict=False)
    taken = {corruption.label: corrupted_models.verdict(case, corruption) for corruption, _ in tried}
    assert len(taken) == 10
    assert set(taken.values()) <= {"found", "refused"}, taken
    assert list(taken.values()).count("found") >= 6


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in corrupted_models.CONFIGS if not name.startswith("convnet")])
def test_no_corrupted_file_of_a_module_passes(name, tmp_path):
    case = corrupted_models.exported(name, str(tmp_path / "model.onnx"))
    tried = zip(corrupted_models.corruptions(case.model, np.random.default_rng(8)), range(40), strict=False)
    taken = {corruption.label: corrupted_models.verdict(case, corruption) for corruption, _ in tried}
    assert set(taken.values()) <= {"found", "refused"}, taken


@pytest.mark.parametrize(
    "config", [EIGHT_BIT_WEIGHTS, qsdk.w8a8().override("*", bias="float32")], ids=["weights", "all"]
)
@pytest.mark.parametrize("moved", [1e-6, 100, np.nan])
def test_a_float_bias_is_compared_number_by_number(config, moved):
    sim, model = simulated(config)
    row = next(row for row in checked(sim, model).rows if row["site"] == "add1:bias")
    assert (row["kind"], row["max_lsb"], row["elements"]) == ("bias", 0, 8)
    tensor = initializers(model.graph)["b1"]
    values = array(tensor).copy()
    values[3] += np.float32(moved)
    tensor.CopyFrom(numpy_helper.from_array(values, "b1"))
    report = checked(sim, model)
    assert not report.summary["passed"]
    assert "add1:bias" in wrong_rows(report)


def test_an_op_that_the_data_does_not_tell_apart_is_named():
    sim, model = simulated(EIGHT_BIT_WEIGHTS)
    relu = next(node for node in model.graph.node if node.op_type == "Relu")
    relu.op_type = "Elu"  # differs below 0 alone
    sim.change_stored({"b1": np.full(8, 50, np.float32)})  # nothing is below 0
    model = sim.qdq_model()
    assert checked(sim, model).summary["passed"]
    next(node for node in model.graph.node if node.op_type == "Relu").op_type = "Elu"
    report = checked(sim, model)
    assert not report.summary["passed"]
    assert "it is Elu where the simulation has Relu" in wrong_rows(report)["relu"]["note"]


def test_a_file_that_a_tool_rewrote_is_judged_by_what_it_gives():
    sim, model = simulated(EIGHT_BIT_WEIGHTS)
    nodes = []
    for node in model.graph.node:
        if node.op_type == "Add":  # what fuses a product and a sum
            product = nodes.pop()
            node = helper.make_node("Gemm", [*product.input, node.input[1]], list(node.output), node.name)
        nodes.append(node)
    replace_nodes(model.graph, nodes)
    report = checked(sim, model)
    assert report.summary["passed"], report
    assert report.summary["nodes written in another way"] >= 1
    nodes[-1].attribute.append(helper.make_attribute("alpha", 1.001))
    replace_nodes(model.graph, nodes)
    report = checked(sim, model)
    assert not report.summary["passed"]
    (row,) = wrong_rows(report).values()
    assert repr(nodes[-1].name) in row["note"]


@pytest.mark.slow
def test_data_that_says_nothing_is_refused():
    for config in (qsdk.w8a8(), EIGHT_BIT_WEIGHTS):
        sim, model = simulated(config)
        with pytest.raises(DataError, match=r"batch 0 holds no values \(x: \(0, 6\)\)"):
            checked(sim, model, [np.zeros((0, 6), np.float32)])
        with pytest.raises(DataError, match="batch 1: the input 'x' holds NaN"):
            checked(sim, model, [VECTORS, np.full((2, 6), np.nan, np.float32)])


@pytest.mark.slow
def test_a_module_with_quantized_weights_alone_is_held_against_what_it_gives(tmp_path):
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), [torch.randn(4, 6)]
    sim = qsdk.quantize(model, data[0], qsdk.weight_only("int4", block_size=2))
    qsdk.calibrate(sim, data, progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    report = qsdk.check_parity(sim, tmp_path / "model.onnx", data, progress=False)
    assert report.summary["passed"], report
    row = next(row for row in report.rows if row["site"] == "output:output")
    assert (row["kind"], row["elements"]) == ("output", 12)
    assert row["max_lsb"] < 1


def test_what_rounding_explains_is_measured_where_the_values_are():
    wanted = np.array([1e9, 1.0, 1e-3, 2.0])
    noisy = [wanted, wanted * (1 + 1e-6), wanted * (1 - 1e-6)]
    assert verdict(wanted * (1 + 1e-6), wanted, noisy).passed
    assert not verdict(wanted + np.array([0, 1e-2, 0, 0]), wanted, noisy).passed  # a large neighbour excuses nothing
    assert not verdict(np.where(wanted == 1, np.nan, wanted), wanted, noisy).passed
    assert not verdict(wanted[:2], wanted, noisy).passed
    assert not verdict(np.array([1, 2]), np.array([1, 3]), [np.array([1, 2])] * 2).passed


def test_a_model_that_does_not_run_fails_with_the_place():
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], "product"),
        helper.make_node("Reshape", ["m", "form"], ["f"], "folded"),
        helper.make_node("Relu", ["f"], ["y"], "relu"),
    ]
    stored = {**weights(w=(6, 8)), "form": np.array([-1, 4, 2], np.int64)}
    sim = qsdk.quantize(make_model(nodes, {"x": ["n", 6]}, {"y": [None, None, None]}, stored), None, qsdk.w8a8())
    qsdk.calibrate(sim, [VECTORS], progress=False)
    model = sim.qdq_model()
    assert checked(sim, model).summary["passed"]
    initializers(model.graph)["form"].CopyFrom(numpy_helper.from_array(np.array([-1, 5, 2], np.int64), "form"))
    report = checked(sim, model)
    assert not report.summary["passed"]
    assert "its stored 'form' holds other numbers" in wrong_rows(report)["folded:output"]["note"]
    assert "does not run" in wrong_rows(report)["the model"]["note"]
