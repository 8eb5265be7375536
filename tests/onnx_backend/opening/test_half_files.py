"""ONNX files in float16, bfloat16 and float64, and mixed ones: planned, calibrated, simulated, solved and saved."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import onnx
import pytest
from foreign_nets import NETS, cnn, detector, transformer
from half_files import ARRAYS, CODES, HALVES, in_type
from onnx import TensorProto, helper
from qdq_models import make_model

import qsdk
from onnx_backend.opening.read_graph import read_graph
from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import initializers
from qsdk import DataError, OnnxSim

node = helper.make_node
#: of a scale, against that of the float32 file: weights and activations are rounded to the type
ROUNDING = {"float16": 0.01, "bfloat16": 0.06, "float64": 1e-6}
DIGITS = {"float16": 11, "bfloat16": 8, "float64": None}
MIXED = ("LayerNormalization", "Softmax", "Sigmoid")


def batches(net: Callable, count: int = 3) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(NETS[net]).astype(np.float32) for _ in range(count)]


@cache
def planned(net: Callable) -> OnnxSim:
    """The sim of the float32 file, calibrated."""
    return calibrated(net(), net)


def calibrated(model: onnx.ModelProto, net: Callable, config=None) -> OnnxSim:
    sim = qsdk.quantize(model, None, config or qsdk.w8a8())
    qsdk.calibrate(sim, batches(net), progress=False)
    return sim


def stored_types(sim: OnnxSim) -> set[int]:
    floats = set(CODES.values())
    return {tensor.data_type for tensor in sim.traced().model.graph.initializer if tensor.data_type in floats}


def floats_of(values) -> np.ndarray:
    return np.asarray(values, np.float32)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("net", NETS)
def test_a_file_of_any_float_type_is_quantized_as_its_float32_twin(net, dtype: str):
    twin, sim = planned(net), calibrated(in_type(net(), dtype), net)
    assert sim.plan.decisions.keys() == twin.plan.decisions.keys()
    assert [decision.site for decision in sim.plan.inside] == [decision.site for decision in twin.plan.inside]
    for site, decision in sim.plan.decisions.items():
        wanted = twin.plan.decisions[site]
        assert (decision.state, decision.tied_to, decision.reason) == (wanted.state, wanted.tied_to, wanted.reason)
        assert decision.tensor_type == dtype
        if wanted.spec is not None and decision.bias_of is None:
            assert (decision.spec.dtype, decision.spec.scale_bits) == (wanted.spec.dtype, DIGITS[dtype])
    for site, encoding in sim.encodings.items():
        np.testing.assert_allclose(encoding.scale, twin.encodings[site].scale, rtol=ROUNDING[dtype])
        if DIGITS[dtype] and sim.plan.decisions[site].bias_of is None:
            held = encoding.scale.astype(ARRAYS[dtype]).astype(np.float32)
            np.testing.assert_array_equal(held, encoding.scale)
    of_resize = {TensorProto.FLOAT} if net is detector else set()  # its sizes are float32 in every file
    assert stored_types(sim) == {CODES[dtype]} | of_resize


@pytest.mark.spread(3)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("net", NETS)
def test_the_simulation_is_as_close_to_the_float_model_as_in_float32(net, dtype: str):
    twin, sim = planned(net), calibrated(in_type(net(), dtype), net)
    for x in batches(net):
        for got, wanted in zip(sim.run(x), twin.run(x), strict=True):
            assert got.dtype == (np.float32 if dtype == "bfloat16" else ARRAYS[dtype])
            error = np.abs(floats_of(got) - wanted).max() / np.abs(wanted).max()
            assert error <= {"float16": 0.04, "bfloat16": 0.08, "float64": 0.02}[dtype]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("net", [transformer])
def test_a_cast_between_two_float_types_shares_the_encoding(net, dtype: str):
    twin, sim = planned(net), calibrated(in_type(net(), dtype, keep=MIXED), net)
    quantized = [site for site, decision in sim.plan.decisions.items() if decision.state == "quantized"]
    assert set(quantized) >= {s for s, d in twin.plan.decisions.items() if d.state == "quantized" and "norm" not in s}
    assert len(quantized) == sum(d.state == "quantized" for d in twin.plan.decisions.values())
    casts = [d for d in sim.plan.decisions.values() if d.op_type == "Cast"]
    assert len(casts) == 6
    assert all(decision.tied_to for decision in casts)
    assert {decision.tensor_type for decision in sim.plan.decisions.values()} == {dtype, "float32"}
    assert stored_types(sim) == {CODES[dtype], TensorProto.FLOAT}


@pytest.mark.parametrize("dtype", HALVES)
def test_the_formula_is_computed_in_float32_and_rounded_to_the_type(dtype: str):
    sim = calibrated(in_type(cnn(), dtype), cnn)
    x = batches(cnn)[0] * 1.7
    fed = x.astype(ARRAYS[dtype]).astype(np.float32)
    wanted = sim.encodings["x:input"].fake_quantize(fed).astype(ARRAYS[dtype])
    np.testing.assert_array_equal(floats_of(sim.capture(x)["x:input"]), floats_of(wanted))


SOLVERS = {
    "seq_mse": lambda sim, data: qsdk.seq_mse(sim, data, progress=False),
    "adaround": lambda sim, data: qsdk.adaround(sim, data, iterations=40, progress=False),
    "gptq": lambda sim, data: qsdk.gptq(sim, data, progress=False),
    "awq": lambda sim, data: qsdk.awq(sim, data, progress=False),
    "smooth_quant": lambda sim, data: qsdk.smooth_quant(sim, data, progress=False),
    "correct_bias": lambda sim, data: qsdk.correct_bias(sim, data, progress=False),
}
ROUND_TO_GRID = ("adaround", "gptq")


@pytest.mark.spread(1)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("solver", SOLVERS)
def test_solvers_write_back_the_type_of_the_file(dtype: str, solver: str):
    model = in_type(transformer(), dtype, keep=("Softmax",))
    sim = calibrated(model, transformer, qsdk.w4a8())
    exact = qsdk.quantize(model, None, qsdk.w4a8().skip("*")).run(batches(transformer)[0])[0]

    def error() -> float:
        return float(np.abs(floats_of(sim.run(batches(transformer)[0])[0]) - floats_of(exact)).mean())

    before, weights = error(), dict(sim.stored_floats([s for s in sim.stored_names() if s.endswith(":weight")]))
    SOLVERS[solver](sim, batches(transformer))
    assert stored_types(sim) == {CODES[dtype]}
    assert error() <= before * 1.15
    now = sim.stored_floats(weights)
    if solver != "seq_mse" and solver != "correct_bias":
        assert any(not np.array_equal(now[site], weights[site]) for site in weights)
    if solver in ROUND_TO_GRID:
        for site in weights:
            on_grid = sim.encodings[site].fake_quantize(now[site])
            np.testing.assert_array_equal(on_grid.astype(ARRAYS[dtype]).astype(np.float32), now[site])


@pytest.mark.spread(1)
@pytest.mark.parametrize("dtype", HALVES)
def test_a_walk_that_keeps_its_tensors_in_a_file_finds_the_same(dtype: str):
    model = in_type(cnn(), dtype)
    found = []
    for most in (None, 0):
        sim = calibrated(model, cnn, qsdk.w4a8())
        qsdk.gptq(sim, batches(cnn), max_memory=most, progress=False)
        found.append({name: array(tensor).copy() for name, tensor in initializers(sim.traced().model.graph).items()})
    for name, values in found[0].items():
        np.testing.assert_array_equal(values, found[1][name])


@pytest.mark.parametrize("dtype", HALVES)
def test_a_changed_sim_is_saved_and_loaded(tmp_path, dtype: str):
    sim = calibrated(in_type(cnn(), dtype, keep=("HardSwish",)), cnn)
    qsdk.adaround(sim, batches(cnn), iterations=20, progress=False)
    qsdk.save(sim, tmp_path / "sim.qsdk")
    back = qsdk.load(tmp_path / "sim.qsdk")
    x = batches(cnn)[0]
    np.testing.assert_array_equal(back.run(x)[0], sim.run(x)[0])
    assert back.plan == sim.plan
    assert back.given.before.keys() == sim.given.before.keys()
    for name, tensor in sim.given.before.items():
        assert back.given.before[name].data_type == tensor.data_type == CODES[dtype]
        np.testing.assert_array_equal(array(back.given.before[name]), array(tensor))


@pytest.mark.parametrize("method", ["min_max", "percentile", "mse", "tf_enhanced"])
@pytest.mark.parametrize("dtype", HALVES)
def test_statistics_of_any_type_are_those_of_its_values_in_float32(dtype: str, method: str):
    model = make_model([node("Neg", ["x"], ["y"], "neg")], {"x": ["n", 64]}, {"y": ["n", 64]}, {})
    rng = np.random.default_rng(1)
    data = [rng.standard_normal((8, 64)).astype(np.float32) for _ in range(3)]
    rounded = [x.astype(ARRAYS[dtype]).astype(np.float32) for x in data]
    config = replace(qsdk.w8a8(), scale_bits=DIGITS[dtype])
    sims = [qsdk.quantize(form, None, config) for form in (in_type(model, dtype), model)]
    for sim, batch in zip(sims, (data, rounded), strict=True):
        qsdk.calibrate(sim, batch, method=method, progress=False)
    for site, encoding in sims[0].encodings.items():
        np.testing.assert_array_equal(encoding.scale, sims[1].encodings[site].scale)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_values_too_large_for_the_type_are_named_by_site_and_batch(dtype: str):
    model = in_type(make_model([node("Mul", ["x", "x"], ["y"], "square")], {"x": [4]}, {"y": [4]}, {}), dtype)
    large = {"float16": 300.0, "bfloat16": 3e19}[dtype]
    with pytest.raises(DataError, match=r"square:output.*batch 1|batch 1.*square:output"):
        qsdk.calibrate(
            qsdk.quantize(model, None, qsdk.w8a8()), [np.ones(4, "f4"), np.float32([1, large, 2, 3])], progress=False
        )


def normed(factor: float) -> onnx.ModelProto:
    rng = np.random.default_rng(2)
    stored = {"w": rng.normal(size=(4, 3, 3, 3)), "s": np.full(4, factor), "b": rng.normal(size=4)}
    stored |= {"m": rng.normal(size=4), "v": rng.uniform(0.5, 2, 4)}
    nodes = [
        node("Conv", ["x", "w"], ["c"], "conv", pads=[1] * 4),
        node("BatchNormalization", ["c", "s", "b", "m", "v"], ["n"], "norm"),
        node("Relu", ["n"], ["y"], "relu"),
    ]
    values = {name: value.astype(np.float32) for name, value in stored.items()}
    return make_model(nodes, {"x": [2, 3, 6, 6]}, {"y": [2, 4, 6, 6]}, values)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_folded_batch_norm_is_rounded_once(dtype: str):
    model = in_type(normed(1.5), dtype)
    given = {name: array(tensor).astype(np.float64) for name, tensor in initializers(model.graph).items()}
    sim = qsdk.quantize(model, None, qsdk.w8a8())
    assert sim.coverage().summary["folded"] == 1
    folded = {name: array(tensor) for name, tensor in initializers(sim.traced().model.graph).items()}
    factor = given["s"] / np.sqrt(given["v"] + 1e-5)
    wanted = (given["w"] * factor.reshape(-1, 1, 1, 1)).astype(ARRAYS[dtype])
    np.testing.assert_array_equal(folded["w_folded"], wanted)
    np.testing.assert_array_equal(folded["conv.bias_folded"], (given["b"] - given["m"] * factor).astype(ARRAYS[dtype]))


@pytest.mark.parametrize(("dtype", "folds"), [("float16", False), ("bfloat16", True), ("float64", True)])
def test_a_batch_norm_whose_folded_weights_the_type_cannot_hold_stays(dtype: str, folds: bool):
    sim = qsdk.quantize(in_type(normed(6e4), dtype), None, qsdk.w8a8())
    summary = sim.coverage().summary
    reason = "folded, a weight or bias of conv would be too large for its type"
    assert summary.get("norm (BatchNorm) not folded", "") == ("" if folds else reason)


@pytest.mark.parametrize("dtype", HALVES)
def test_the_statistics_of_a_batch_norm_are_estimated_in_its_type(dtype: str):
    model = in_type(normed(1.5), dtype)
    sim = qsdk.quantize(model, None, qsdk.w8a8(), fold_batch_norm=False)
    data = [np.random.default_rng(4).normal(1, 2, size=(2, 3, 6, 6)).astype(np.float32) for _ in range(4)]
    qsdk.calibrate(sim, data, progress=False)
    report = qsdk.reestimate_batch_norm(sim, data, progress=False)
    assert report.rows[0]["note"] == ""
    made = np.concatenate([floats_of(sim.capture(x)["conv:output"]) for x in data])
    stored = {name: array(tensor) for name, tensor in initializers(sim.traced().model.graph).items()}
    assert stored["m"].dtype == ARRAYS[dtype]
    np.testing.assert_allclose(floats_of(stored["m"]), made.mean(axis=(0, 2, 3)), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", HALVES)
def test_an_op_of_another_domain_gives_the_type_that_it_reads(dtype: str):
    nodes = [
        node("Relu", ["x"], ["r"], "relu"),
        node("QuickGelu", ["r"], ["q"], "quick", domain="com.microsoft", alpha=1.0),
        node("Neg", ["q"], ["y"], "neg"),
    ]
    more = {"imports": [helper.make_opsetid("com.microsoft", 1)]}
    graph = read_graph(in_type(make_model(nodes, {"x": [4]}, {"y": [4]}, {}, **more), dtype))
    (quick,) = (tensor for tensor in graph.tensors if tensor.name == "q")
    assert (quick.dtype, quick.site) == (dtype, "quick:output")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("elements", [(8, 8), (80, 80)])
def test_a_float32_weight_that_is_cast_while_the_model_runs_is_a_weight(dtype: str, elements: tuple[int, int]):
    """What an exporter writes of a module under autocast."""
    weight = np.random.default_rng(6).normal(size=elements).astype(np.float32)
    nodes = [
        node("Cast", ["x"], ["xh"], "down", to=CODES[dtype]),
        node("Cast", ["w"], ["wh"], "weight_down", to=CODES[dtype]),
        node("MatMul", ["xh", "wh"], ["h"], "product"),
        node("Cast", ["h"], ["y"], "up", to=TensorProto.FLOAT),
    ]
    model = make_model(nodes, {"x": [2, elements[0]]}, {"y": [2, elements[1]]}, {"w": weight})
    sim = qsdk.quantize(model, None, qsdk.w8a8())
    decision = sim.plan.decisions["product:weight"]
    assert (decision.kind, decision.tensor_type, decision.spec.dtype.name) == ("weight", dtype, "int8")
    assert decision.spec.granularity.axis == 1


@pytest.mark.parametrize("dtype", HALVES)
def test_a_stored_mask_of_any_type_is_known(dtype: str):
    mask = np.where(np.tri(6, dtype=bool), np.float32(0), np.float32(-np.inf)).reshape(1, 1, 6, 6)
    nodes = [node("Add", ["x", "m"], ["s"], "masked"), node("Softmax", ["s"], ["y"], "softmax", axis=-1)]
    model = make_model(nodes, {"x": [1, 2, 6, 6]}, {"y": [1, 2, 6, 6]}, {"m": mask})
    plans = [qsdk.quantize(form, None, qsdk.w8a8()).plan for form in (model, in_type(model, dtype))]
    found, wanted = ({site: (d.state, d.reason) for site, d in plan.decisions.items()} for plan in reversed(plans))
    assert found == wanted
    assert found["masked:constant"][0] == "float"
